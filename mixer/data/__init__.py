"""From documents to batches, in the order of the data:

config      the settings, and the manifest that prepared data has
sources     where documents come from: files, or a hub dataset
decoding    text from the bytes of a file
tokenizer   trained on them, or an existing one
samples     prepared data as samples, or pairs of texts, their order, and batches read ahead
tasks       samples of random tokens that show what a model can do, without text or files
prepare     the data of a run: a task, or a text, tokenized once into token files
"""
