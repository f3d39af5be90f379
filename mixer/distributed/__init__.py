"""Several processes:

launch        starts them on a CPU, where accelerate does not
engine        accelerate with DDP or FSDP
hosts         small messages between them, and which error is shown
shards        tensors that FSDP has cut
stop          a signal to one of them ends all
"""
