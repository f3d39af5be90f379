"""Perplexity of checkpoints on a text:

evaluate      from options to results
texts         what is scored
scoring       the score of each token, window by window, and whether the model is causal
measure       the score of a text by all processes, with speed and memory
report        the table and its notes
"""
