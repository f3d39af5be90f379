"""The model with its loss as one module. It is what is compiled, wrapped by DDP or FSDP, trained,
and evaluated.
"""

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel


def token_nats(logits: Tensor, targets: Tensor) -> Tensor:
    """The cross-entropy of each target in nats, fp32; 0 where the target is -100.

    logits: (batch, tokens, vocab); targets: (batch, tokens) int64. Returns (batch, tokens).
    """
    flat = F.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="none"
    )
    return flat.view_as(targets)


class Objective(nn.Module):
    """Inputs and targets, each (batch, tokens) int64, -> the nats of each target, (batch, tokens)
    fp32; 0 where the target is -100.

    The logits stay inside the module. When it is compiled, they are kept in the autocast type, and
    converted to fp32 where the loss sums over them.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model
        # accelerate reads this: the class of the blocks, which FSDP shards one by one.
        self._no_split_modules = model._no_split_modules

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.score(self.model(inputs, use_cache=False).logits, targets)

    def score(self, logits: Tensor, targets: Tensor) -> Tensor:
        return token_nats(logits, targets)

    # accelerate calls these two: FSDP shards the embeddings apart from the blocks.

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        return self.model.get_output_embeddings()
