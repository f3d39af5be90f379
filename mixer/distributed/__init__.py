"""Several processes:

launch        starts them on a CPU, where accelerate does not
engine        accelerate with DDP or FSDP
hosts         small messages between them, and which error is shown
shards        tensors that FSDP has cut
copy_engines  gradients summed by copies over NVLink
stop          a signal to one of them ends all
"""
