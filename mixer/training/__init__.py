"""A training run, from its configuration to its last step:

config        all settings of a run; those of the optimizer are in optim
loop          the run; `Trainer.step` is one step
start         what it starts with: model, optimizer, counters, and the record of its settings
objective     the model with its loss as one module, and its loss on the validation split
backend       which backends mix tokens where model.mixing_backend is auto
compile       torch.compile, CUDA graphs, and what the backward pass computes again
optim         which optimizer trains which parameter, and the learning rate
metrics       throughput, the lines of metrics.jsonl, on the terminal, and in wandb or TensorBoard
"""
