"""Several processes:

launch        starts them on a CPU, where accelerate does not
world         one process among the others: device, rank, messages, failure
shards        tensors that FSDP has cut
stop          a signal to one of them ends all
"""
