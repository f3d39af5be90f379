"""From documents to batches, in the order of the data:

config        the settings
sources       where documents come from, cut into shards
readers       the texts of a shard
corpus        the documents of all shards, and the split of each
tokenizer     trained on them, or an existing one
workers       processes that do jobs, and give the results in order
tokenise      one of these jobs: a shard becomes tokens
progress      how far this is, saved and said
append        tokens of finished shards are appended to the token files
tokenise_all  all shards of a source, by the four above
manifest      what a directory of prepared data holds, and checks of it
prepare       all of this, once for a directory
token_file    a split of prepared data as samples
order         the order in which samples are used
batches       the batches of a process, read ahead
"""
