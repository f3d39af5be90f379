"""Several models trained beside each other:

compare       from options to the report
entrants      the models
runs          their runs, in processes of their own
no_mixing     the training of a model without token mixing, which is the limit
result        numbers from the runs' metrics
report        tables and pictures of them
"""
