"""From documents to batches, in the order of the data:

config        the settings
sources       where documents come from: files, or a hub dataset
readers       the texts of a file or dataset
corpus        the documents, and the split of each
tokenizer     trained on them, or an existing one
workers       processes that do a task, in order
tokenise      documents become token files
manifest      what a directory of prepared data holds, and checks of it
prepare       all of this, once for a directory
token_file    a split of prepared data as samples
tasks         samples of random tokens that show what a model can do, without text or files
pairs         prepared data as pairs of texts
run_data      the splits of a run, of prepared data or of a task
order         the order in which samples are used
batches       the batches of a process, read ahead
"""
