"""Several models trained beside each other:

side_by_side  the plan of backends and transformers with one configuration
plan          the runs that a plan asks for
study         the results, and a process for each GPU that adds to them
training      what such a process does: a run, and what it measures
report        the tables and pictures, from the results alone
"""
