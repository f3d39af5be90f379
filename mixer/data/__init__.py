"""From documents to batches, in the order of the data:

config      the settings, and the manifest that prepared data has
sources     where documents come from: files, or a hub dataset
decoding    text from the bytes of a file
tokenizer   trained on them, or an existing one
samples     prepared data as samples, their order, and batches read ahead
prepare     the data of a run: a text, tokenized once into token files
"""
