"""From a model to what is trained: recomputation, compilation, and the engine around them."""

import torch.distributed as dist
from accelerate import Accelerator, DistributedType
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from transformers import PreTrainedModel

from mixer.common.say import Say
from mixer.distributed.engine import settle_buckets
from mixer.distributed.hosts import Hosts
from mixer.training.automatic import choose, find_environment
from mixer.training.compile import compile_objective, optimizer_compiler
from mixer.training.config import RunConfig
from mixer.training.objective import Objective
from mixer.training.optim import build_optimizer


def parallelize(
    model: PreTrainedModel,
    run: RunConfig,
    accelerator: Accelerator,
    hosts: Hosts,
    say: Say,
) -> tuple[nn.Module, AcceleratedOptimizer]:
    """The model with its loss (see Objective) ready to train on all processes, and its optimizer.

    The model itself is changed: it moves to the device, and under FSDP its parameters become
    shards. Raises UserError for settings that these processes or devices do not allow.
    """
    train = run.train
    shape = (train.batch_size, run.model.max_position_embeddings)
    set_recompute(model, train.recompute)
    objective = Objective(model).to(accelerator.device).train()
    chosen = choose(train, find_environment(accelerator, hosts))
    if chosen.line:
        say(chosen.line)

    def compile_it() -> bool:
        how, graphs = chosen.compile, chosen.cuda_graphs
        return compile_objective(objective, how, graphs, shape, accelerator, hosts, say)

    is_compiled = compile_it()
    if chosen.cuda_graphs and not is_compiled and train.cuda_graphs == "auto":
        chosen.cuda_graphs = False
        is_compiled = compile_it()
    is_sharded = accelerator.distributed_type == DistributedType.FSDP
    faster = None
    if is_compiled and not is_sharded:
        faster = optimizer_compiler(model, run.optim, hosts, say)
    processes = dist.group.WORLD if hosts.processes > 1 else None
    optimizer = build_optimizer(model, run.optim, processes, faster)
    # DDP or FSDP, and autocast. FSDP replaces the parameters, also those in the optimizer.
    parallel, optimizer = accelerator.prepare(objective, optimizer)
    settle_buckets(parallel, accelerator, shape)
    return parallel, optimizer


def set_recompute(model: PreTrainedModel, what: str) -> None:
    """Sets what the backward pass computes again instead of keeping it in memory (selective
    activation recomputation, arXiv 2205.05198).

    With A = batch x tokens x hidden_size numbers of the autocast type, a compiled block keeps for
    its backward pass

        A    its input, for both residual and norm
        A    the output of the first norm, an operand of the mixing's weight gradient
        A    the residual stream after mixing, the input of the second norm
        A    the output of the second norm, an operand of up_proj's weight gradient
        4 A  the output of up_proj, the input of the GELU
        4 A  the output of the GELU, an operand of down_proj's weight gradient

    and small tensors: the norms' statistics, and the packed and cast weights. "none" keeps all
    12 A. "activation" computes the GELU again and keeps 8 A. "block" keeps only the block's input,
    A, and computes the whole block again. Without the compiler, autocast also keeps the inputs of
    the norms in fp32.
    """
    if what == "activation":
        for module in model.modules():
            if hasattr(module, "recompute_activation"):
                module.recompute_activation = True
    if what == "block":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        # This undoes a hook that transformers adds for adapters on a frozen model. torch 2.11
        # cannot compile it where there are no gradients.
        model.disable_input_require_grads()
