"""Several models trained beside each other:

plan      the runs that a plan asks for
study     the results, and a process for each GPU that adds to them
report    the tables and pictures, from the results alone
"""
