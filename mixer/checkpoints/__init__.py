"""Saved models and runs:

format            what a checkpoint holds; finding, completing and pruning checkpoints
writer            writes a run's checkpoints while it goes on
restore           a run goes on from a checkpoint
pretrained        any causal language model's directory, checked and loaded
reference_format  weights of the reference implementation, both ways
recurrent_format  weights of the author's structured recurrent mixers, both ways
"""
