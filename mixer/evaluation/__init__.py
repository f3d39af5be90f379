"""Checkpoints at work:

config          the options of an evaluation
evaluate        perplexity on a text, from options to results, and their report
texts           what is scored
scoring         the score of each token, window by window, and whether the model is causal
generate        continues texts
matrices        the mixing matrices, drawn and measured
representation  how much of a text each layer keeps
"""
