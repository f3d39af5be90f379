"""Several processes:

world         one process among the others: device, rank, messages
ending        with the launcher, by a signal, or because another process failed
"""
