"""Saved models and runs:

format            what a checkpoint holds; finding, completing and pruning checkpoints
writer            writes a run's checkpoints while it goes on
state             the tensors of a run's state: their names, and that they are finite
restore           a run goes on from a checkpoint
sentences         what sentence-transformers reads beside a model
pretrained        any causal language model's directory, checked and loaded
reference_format  weights in the formats of the author's code, both ways
"""
