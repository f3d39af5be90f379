"""Saved models and runs:

checkpoint        what a run saves: the format, writing, finding and deleting checkpoints
settings          what a run trains with: recorded, compared when it goes on, written as config.yaml
restore           how a run continues from a checkpoint
pretrained        any causal language model's directory, checked, loaded and written
reference_format  weights in the formats of the author's code, both ways
"""
