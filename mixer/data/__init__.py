"""From documents to batches, in the order of the data:

config        the settings
sources       where documents come from, cut into shards
readers       the texts of a shard
corpus        the documents of all shards, and the split of each
tokenizer     trained on them, or an existing one
workers       processes that do jobs, and give the results in order
tokenise      one of these jobs: a shard becomes tokens
joined        tokens of finished shards are appended to the token files
tokenise_all  all shards of a source, by the three above; `progress` says how far it is
manifest      what a directory of prepared data holds, and checks of it
prepare       all of this, once for a directory
token_file    a split of prepared data as samples
order         the order in which samples are used
batches       the batches of a process, read ahead
"""
