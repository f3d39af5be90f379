"""Perplexity of checkpoints on a text:

evaluate      from options to results, and their report
texts         what is scored
scoring       the score of each token, window by window, and whether the model is causal
"""
