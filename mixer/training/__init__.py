"""A training run, from its configuration to its last step:

config        all settings of a run
loop          the run; `Trainer.step` is one step
start         what it starts with: set-up, record of settings, estimate, banner
passes        the forward and backward passes; torch.compile, CUDA graphs, recomputation
backend       which backends mix tokens where model.mixing_backend is auto
optim         which optimizer trains which parameter, the learning rate, clipping, skipped steps
muon          an optimizer for matrices
metrics       throughput, and the lines of metrics.jsonl, of wandb or TensorBoard
"""
