"""Pictures and tables:

metrics_file    reads metrics.jsonl
curves          losses of runs
matrices        mixing matrices
representation  how much of a text a layer keeps
figure, tables  what these share
"""
