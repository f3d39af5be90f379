"""Muon, an optimizer for matrices. Like torch's own, it reads `found_inf` and `grad_scale`."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

MATRICES = 16  # that are worked on together: more need more memory, and far more time to compile
# Coefficients of the Newton-Schulz polynomial, as torch.optim.Muon has them.
A = 3.4445
B = -4.7750
C = 2.0315
# torch.optim.Muon does five. A fifth costs more and trains no better. It would also need a new Gram
# matrix of X, since rounding errors in G grow from step to step.
STEPS = 4
# A large matrix of norm 1 has a Gram matrix whose entries are too small for fp16.
SCALE = 32.0
SMALLEST_NORM = 1e-30
Tensors = Sequence[Tensor]
# Newer versions of torch have another name for it, and print a warning at the old one.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass
class Matrix:
    """A matrix of a parameter; of one that FSDP shards, the rows that this process holds.

    Attributes:
        weight, gradient, momentum: (rows, columns), or only these rows.
        shape: of the whole matrix.
        counts: how many of its rows each process holds; empty where each holds all.
    """

    weight: Tensor
    gradient: Tensor
    momentum: Tensor
    shape: tuple[int, int]
    counts: list[int]


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalized, for the matrices of linear layers, many at once (K.
    Jordan et al., https://kellerjordan.github.io/posts/muon): as torch.optim.Muon(
    adjust_lr_fn="match_rms_adamw", nesterov=True). With G the gradient of a matrix of `rows` x
    `columns` and M its momentum:

        M <- momentum M + (1 - momentum) G
        U  = 0.2 sqrt(max(rows, columns)) O(momentum M + (1 - momentum) G)
        W <- (1 - lr weight_decay) W - lr U

    O orthogonalizes (`iterate`). The factor before it gives an update the size that AdamW's has, so
    that one learning rate serves both (arXiv 2502.16982, section 2.2). A parameter may hold several
    matrices, one below another, each with an update of its own. Matrices of one shape go through O
    as one batch. The processes of a data-parallel run, which hold the same gradients, share the
    matrices out and exchange the results. Where FSDP has sharded the parameters, all else is done
    on the shards: each process gets its matrices of a batch whole for O alone, and gives them back
    in rows.

    Args:
        params: two-dimensional parameters, or groups of them; sharded by rows or not at all.
        lr, weight_decay, momentum: see above.
        rows: of each of the matrices that a parameter holds, for those that hold several.
        group: the processes that share the work; None for this one alone.
        compile: makes the elementwise parts faster, such as torch.compile; None: nothing does.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable,
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        rows: Mapping[nn.Parameter, Sequence[int]] | None = None,
        group: dist.ProcessGroup | None = None,
        compile: Callable[[Callable], Callable] | None = None,
    ):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self.rows = rows or {}
        self.group = group
        self.directions = compile(directions) if compile else directions
        self.apply = compile(apply) if compile else apply
        for settings in self.param_groups:
            for parameter in settings["params"]:
                self.state[parameter]["momentum"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        processes = dist.get_world_size(self.group) if self.group is not None else 1
        for settings in self.param_groups:
            batches = defaultdict(list)
            for parameter in settings["params"]:
                if parameter.grad is not None:
                    for matrix in self._matrices(parameter):
                        batches[matrix.shape].append(matrix)
            for matrices in batches.values():
                is_sharded = len(matrices[0].counts) > 0
                most = max(MATRICES, processes) if is_sharded else MATRICES
                for start in range(0, len(matrices), most):
                    self._update(matrices[start : start + most], settings)

    def _matrices(self, parameter: nn.Parameter) -> Iterator[Matrix]:
        """Each matrix of a parameter."""
        assert parameter.grad is not None
        tensors = [parameter.detach(), parameter.grad, self.state[parameter]["momentum"]]
        rows = self.rows.get(parameter, (len(parameter),))
        counts: list[list[int]] = [[] for _ in rows]
        here = rows  # of each matrix, on this process
        if isinstance(parameter, DTensor):
            tensors = [tensor.to_local() for tensor in tensors]
            counts = rows_of_processes(rows, dist.get_world_size(self.group))
            rank = dist.get_rank(self.group)
            here = [matrix_counts[rank] for matrix_counts in counts]
        split = [tensor.split(here) for tensor in tensors]
        for weight, gradient, momentum, height, shares in zip(*split, rows, counts, strict=True):
            yield Matrix(weight, gradient, momentum, (height, parameter.shape[1]), shares)

    def _update(self, matrices: Sequence[Matrix], settings: dict) -> None:
        """One step for matrices of one shape."""
        weights = [matrix.weight for matrix in matrices]
        gradients = [matrix.gradient for matrix in matrices]
        momenta = [matrix.momentum for matrix in matrices]
        skip, scale = skip_and_scale(self, weights[0].device)
        if not matrices[0].counts:
            stacked = self.directions(gradients, momenta, settings["momentum"], skip, scale)
            updates = self._orthogonalize(stacked)
        else:
            shards = nesterov(gradients, momenta, settings["momentum"], skip, scale)
            updates = self._orthogonalize_shards(shards, matrices)
        # A tensor: a compiled function would be compiled anew for another number.
        rate = settings["lr"] * (1 - skip)
        size = 0.2 * math.sqrt(max(matrices[0].shape))
        self.apply(weights, updates, rate, settings["weight_decay"], size)

    def _orthogonalize(self, stacked: Tensor) -> Tensor:
        """`iterate`, each process for its share of the matrices."""
        processes = dist.get_world_size(self.group) if self.group is not None else 1
        if processes == 1:
            return iterate(stacked)
        share = -(-len(stacked) // processes)
        first = dist.get_rank(self.group) * share
        chunk = stacked[first : first + share]
        chunk = iterate(F.pad(chunk, (0, 0, 0, 0, 0, share - len(chunk))))
        gathered = stacked.new_empty(share * processes, *stacked.shape[1:])
        all_gather(gathered, chunk, group=self.group)
        return gathered[: len(stacked)]

    def _orthogonalize_shards(self, shards: list[Tensor], matrices: Sequence[Matrix]) -> Tensors:
        """`iterate` for matrices of which each process holds some rows: each process gets its share
        of the matrices whole, and every process its rows of the results, one entry a matrix.

        shards: the rows that this process holds of the directions, one entry a matrix.
        """
        processes = dist.get_world_size(self.group)
        rank = dist.get_rank(self.group)
        share = -(-len(matrices) // processes)
        shares = [matrices[owner * share : (owner + 1) * share] for owner in range(processes)]
        mine = shares[rank]
        rows, columns = matrices[0].shape
        # How many rows this process sends to each process, and receives from each.
        sent = [sum(matrix.counts[rank] for matrix in owned) for owned in shares]
        received = [sum(matrix.counts[source] for matrix in mine) for source in range(processes)]

        inbox = shards[0].new_empty(sum(received), columns)
        dist.all_to_all_single(inbox, torch.cat(shards), received, sent, group=self.group)
        gathered = inbox.new_empty(len(mine), rows, columns)
        slots = rows_by_process(gathered, mine)
        for slot, message in zip(slots, inbox.split([len(slot) for slot in slots]), strict=True):
            slot.copy_(message)
        updates = iterate(normalized(gathered))
        outbox = torch.cat(rows_by_process(updates, mine) or [updates.flatten(0, 1)])
        results = updates.new_empty(sum(sent), columns)
        dist.all_to_all_single(results, outbox, sent, received, group=self.group)
        return results.split([matrix.counts[rank] for matrix in matrices])


def rows_by_process(gathered: Tensor, matrices: Sequence[Matrix]) -> list[Tensor]:
    """The rows that each process holds of whole matrices (matrices, rows, columns), as views: of
    the first process those of each matrix, then of the next one.
    """
    by_matrix = [rows.split(matrix.counts) for rows, matrix in zip(gathered, matrices, strict=True)]
    return list(chain.from_iterable(zip(*by_matrix, strict=True)))


def rows_of_processes(rows: Sequence[int], processes: int) -> list[list[int]]:
    """Of matrices of these heights, one below another in a sharded parameter, the rows that each
    process holds: FSDP cuts a parameter as torch.chunk does.
    """
    share = -(-sum(rows) // processes)
    counts = []
    first = 0
    for height in rows:
        ends = [min(max(share * rank, first), first + height) for rank in range(processes + 1)]
        counts.append([end - start for start, end in pairwise(ends)])
        first += height
    return counts


def nesterov(
    gradients: Tensors, momenta: Tensors, momentum: float, skip: Tensor, scale: Tensor
) -> list[Tensor]:
    """Updates the momenta in place; returns Nesterov's directions. skip and scale: of
    skip_and_scale; gradients that are skipped may not be finite.
    """
    directions = []
    for gradient, buffer in zip(gradients, momenta, strict=True):
        gradient = torch.where(skip > 0, buffer, gradient / scale)
        buffer.copy_(torch.lerp(buffer, gradient, 1 - momentum))
        directions.append(torch.lerp(gradient, buffer, momentum))
    return directions


def directions(
    gradients: Tensors, momenta: Tensors, momentum: float, skip: Tensor, scale: Tensor
) -> Tensor:
    """`nesterov` of whole matrices, `normalized`: (matrices, rows, columns)."""
    stacked = nesterov(gradients, momenta, momentum, skip, scale)
    return torch.stack([normalized(direction) for direction in stacked])


def apply(
    matrices: Tensors, updates: Tensor | Tensors, rate: Tensor, weight_decay: float, size: float
) -> None:
    """W <- (1 - rate weight_decay) W - rate size U, in place; also for some rows of each."""
    for matrix, update in zip(matrices, updates, strict=True):
        step = (update.to(matrix.dtype) * size + matrix * weight_decay) * rate
        matrix.copy_(matrix - step)


def normalized(x: Tensor) -> Tensor:
    """Scales each matrix (..., rows, columns) to Frobenius norm SCALE, which fits fp16. Products
    are fp16 on a GPU: every GPU multiplies it fast, and it has three bits more than bf16.
    """
    norm = x.square().sum((-2, -1), keepdim=True).sqrt()
    x = x * (SCALE / norm.clamp(min=SMALLEST_NORM))
    return x.to(torch.float16) if x.is_cuda else x


def iterate(x: Tensor) -> Tensor:
    """The Newton-Schulz iteration, on matrices (matrices, rows, columns) of norm SCALE, as
    `normalized` gives them. It moves the singular values of X, which has at most as many rows as
    columns, towards 1 and leaves the singular vectors as they are:

        G = X X^T;   X <- (a I + b G + c G^2) X      STEPS times, X scaled to Frobenius norm 1 first

    With more rows than columns it is G = X^T X, multiplied from the other side. Larger singular
    values end between 0.7 and 1.2, which is near enough for a training step; small ones have grown
    140-fold.

    All factors are polynomials of the first G, so they commute. All steps are done on small square
    matrices, and X is multiplied twice: to get the first G, and by the product of the polynomials.
    For a matrix four times as wide as high that is little more than half of the arithmetic.
    """
    tall = x.shape[-2] > x.shape[-1]
    # (matrices, shorter side, shorter side), SCALE^2 times too large, as the next ones
    gram = _multiply(x.mT, x) if tall else _multiply(x, x.mT)
    product: Tensor | None = None
    for step in range(STEPS):
        # a I + b G + c G^2 of G = gram / SCALE^2
        polynomial = torch.baddbmm(gram, gram, gram, beta=B / SCALE**2, alpha=C / SCALE**4)
        polynomial.diagonal(dim1=-2, dim2=-1).add_(A)
        product = polynomial if product is None else _multiply(polynomial, product)
        if step < STEPS - 1:
            gram = _multiply(_multiply(polynomial, gram), polynomial)
    assert product is not None  # STEPS are several
    # `product` is symmetric. A transposed result would be slow to read for what comes next.
    return _multiply(x, product, 1 / SCALE) if tall else _multiply(product, x, 1 / SCALE)


def _multiply(left: Tensor, right: Tensor, factor: float = 1.0) -> Tensor:
    """factor x left x right for batches of matrices; the factor takes no time."""
    return torch.baddbmm(left.new_zeros(()), left, right, beta=0, alpha=factor)


def skip_and_scale(optimizer: torch.optim.Optimizer, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of a step: 1 if it is to change nothing, else 0, and what gradients are divided by."""
    found_inf = getattr(optimizer, "found_inf", None)
    scale = getattr(optimizer, "grad_scale", None)
    skip = torch.zeros((), device=device) if found_inf is None else found_inf.to(device)
    return skip, torch.ones((), device=device) if scale is None else scale.to(device)
