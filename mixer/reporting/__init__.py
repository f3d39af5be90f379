"""Pictures and tables:

metrics_file    reads metrics.jsonl
curves          losses of runs
matrices        mixing matrices
figure, tables  what these share
"""
