"""Perplexity of checkpoints on a text:

evaluate      from options to results
texts         what is scored
scoring       the score of each token, window by window, and whether the model is causal
report        the table and its notes
"""
