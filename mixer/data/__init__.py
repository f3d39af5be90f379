"""From documents to batches, in the order of the data:

config      the settings
sources     where documents come from: files, or a hub dataset
tokenizer   trained on them, or an existing one
prepared    what a directory of prepared data holds: samples, or pairs of texts
tasks       samples of random tokens that show what a model can do, without text or files
prepare     the data of a run: a task, or a text of which token files are made once
batches     the order in which samples are used, and the batches of a process, read ahead
"""
