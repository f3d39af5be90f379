"""Pictures and tables:

metrics_file    reads metrics.jsonl
curves          losses of runs
matrices        mixing matrices, measured and drawn
figure, tables  what these share
"""
