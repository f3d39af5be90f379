"""Saved models and runs:

format            what a checkpoint holds; finding, completing and pruning checkpoints
writer            writes a run's checkpoints while it goes on
restore           a run goes on from a checkpoint
pretrained        any causal language model's directory, checked and loaded
reference_format  weights in the formats of the author's code, both ways
"""
