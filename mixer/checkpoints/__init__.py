"""Saved models and runs:

checkpoint        what a run saves: the format, finding and deleting checkpoints
writer            writes them, while the run goes on
settings          what a run trains with: recorded, compared when it goes on, written as config.yaml
restore           how a run continues from a checkpoint
model_files       any causal language model's directory, checked
pretrained        loaded and written
reference_format  weights in the formats of the author's code, both ways
convert           checkpoints from and to these formats, and to mixing weights of another form
export            a checkpoint as a directory to publish, with a model card
"""
