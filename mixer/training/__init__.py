"""A training run, from its configuration to its last step:

config        all settings of a run; those of the optimizer are in optim, of the log in metrics
loop          the run; `Trainer.step` is one step
start         what it starts with: data, model, optimizer, progress
record        what it trains with, kept in its checkpoints
mixing        which backend computes the token mixing
parallelize   the model with its loss (`objective`), compiled and wrapped for all processes
compile       torch.compile and CUDA graphs
automatic     what settings that are auto stand for
optim         which optimizer trains which parameter, and the learning rate
clipping      the norm of the gradient
guard         steps whose gradient is not finite
validation    the loss on the validation split
metrics       the lines of metrics.jsonl, and wandb or TensorBoard
telemetry     throughput, memory, profiles
console       what is printed
memory        how much a step needs, and what to change where that is too much
"""
