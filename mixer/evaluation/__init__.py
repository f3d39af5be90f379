"""Perplexity of checkpoints on a text:

evaluate      from options to results, and their report
texts         what is scored
scoring       by which processes and in which windows, and whether the model is causal
"""
