"""A training run, from its configuration to its last step:

config        all settings of a run
loop          the run; `TrainingLoop.step` is one step
start         what it starts with: data, model and optimizer, new or from a checkpoint
estimate      the memory that it needs
passes        the forward and backward passes; torch.compile, CUDA graphs, recomputation
optim         which optimizer trains which parameter, the learning rate, clipping, skipped steps
muon          an optimizer for matrices
metrics       throughput, and the lines of metrics.jsonl, of wandb or TensorBoard
"""
