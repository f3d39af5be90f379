"""Checkpoints at work:

config          the options of an evaluation
evaluate        perplexity on a text, or what is found, from options to results, and their report
texts           what is scored
beir            collections of documents and queries, and how good rankings are
search          what a model finds in a collection
scoring         by which processes and in which windows, and whether the model is causal
generate        continues texts
matrices        the mixing matrices, drawn and measured
representation  how much of a text each layer keeps
"""
