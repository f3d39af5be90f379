"""Muon's updates are what mixer/training/muon.py says, and a skipped step changes nothing."""

import os
from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist
from launching import free_port, start_process
from models import small_model
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from mixer.training.muon import STEPS, A, B, C, Muon, iterate, normalized
from mixer.training.optim import ChainedOptimizer, OptimConfig, build_optimizer

SHAPES = ((16, 48), (48, 16), (16, 48), (24, 24))


def newton_schulz(x: torch.Tensor) -> torch.Tensor:
    """The iteration as its authors write it, in fp64."""
    if x.shape[0] > x.shape[1]:
        return newton_schulz(x.T).T
    x = x.double() / x.double().norm()
    for _ in range(STEPS):
        gram = x @ x.T
        x = A * x + (B * gram + C * gram @ gram) @ x
    return x


def matrix(kind: str, rows: int, columns: int) -> torch.Tensor:
    """Matrices whose singular values are alike, few and large, or spread over six powers of ten."""
    x = torch.randn(rows, columns, dtype=torch.float64)
    if kind == "low rank":
        return torch.randn(rows, 4).double() @ torch.randn(4, columns).double() + 1e-3 * x
    if kind == "spread":
        left, values, right = torch.linalg.svd(x, full_matrices=False)
        return left @ torch.diag(torch.logspace(0, -6, len(values)).double()) @ right
    return x


@pytest.mark.parametrize("kind", ("random", "low rank", "spread"))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", (1e-9, 1.0, 1e9))
def test_orthogonalization_is_the_published_iteration(kind, shape, size):
    torch.manual_seed(0)
    x = matrix(kind, *shape)
    wanted = newton_schulz(x)
    for dtype, allowed in ((torch.float64, 1e-10), (torch.float32, 1e-3)):
        found = iterate(normalized((size * x).to(dtype)[None]))[0]
        assert (found - wanted).norm() <= allowed * wanted.norm(), dtype


def test_a_gradient_of_zeros_moves_nothing():
    assert (iterate(normalized(torch.zeros(1, 8, 16))) == 0).all()


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize(("products", "allowed"), (("as torch's, bf16", 0.04), ("fp64", 1e-3)))
def test_muon_is_torchs_step_by_step(products, allowed, monkeypatch):
    """torch does the products in bf16, which costs 1% of an update; with exact ones we are
    equal.
    """
    if products == "fp64":
        monkeypatch.setattr(
            torch.optim._muon, "_zeropower_via_newtonschulz", lambda x, *_: newton_schulz(x)
        )
    torch.manual_seed(0)
    values = [torch.randn(shape) for shape in SHAPES]
    ours, theirs = ([nn.Parameter(value.clone()) for value in values] for _ in range(2))
    mine = Muon(ours, lr=0.01, weight_decay=0.1)
    settings = {"lr": 0.01, "weight_decay": 0.1, "momentum": 0.95, "ns_steps": STEPS}
    torchs = torch.optim.Muon(theirs, adjust_lr_fn="match_rms_adamw", **settings)
    for step in range(6):
        before = [parameter.detach().clone() for parameter in theirs]
        for mine_, their in zip(ours, theirs, strict=True):
            mine_.data.copy_(their.data)  # so that each step is compared by itself
            mine_.grad = torch.randn_like(mine_) * 10.0**-step
            their.grad = mine_.grad.clone()
        mine.step()
        torchs.step()
        for a, b, old in zip(ours, theirs, before, strict=True):
            assert (a - b).norm() <= allowed * (b - old).norm()


def test_muon_trains_queries_keys_and_values_in_one_matrix_as_three():
    torch.manual_seed(0)
    keyed = {"mixer_key_size": 4, "mixer_keyed_every": 2}
    model = small_model(num_mixer_heads=2, mixer_gate=True, **keyed)
    blocks = model.model.layers
    assert [type(block.mixing).__name__ for block in blocks] == ["Gated", "Keyed"]
    apart = []
    for block in blocks:
        whole, size = block.mixing.in_proj.weight, len(block.mixing.out_proj.weight)
        whole.grad = torch.randn_like(whole)
        keys = (len(whole) - size) // 2
        parts = (tensor.split([keys, keys, size]) for tensor in (whole.detach(), whole.grad))
        for values, gradient in zip(*parts, strict=True):
            apart.append(nn.Parameter(values.clone()))
            apart[-1].grad = gradient.clone()
    config = OptimConfig(name="muon", lr=0.01)
    build_optimizer(model, config).step()
    Muon(apart, config.lr, config.weight_decay, config.momentum).step()
    together = torch.cat([block.mixing.in_proj.weight for block in blocks])
    torch.testing.assert_close(together, torch.cat(apart))


def trained(found_inf: list[float]) -> list[torch.Tensor]:
    """All parameters and moments after steps of which some are to be skipped, whose gradients are
    NaN.
    """
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(s)) for s in ((8, 16), (1, 1, 5), (6,))]
    matrices, *others = parameters
    settings = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8}
    adamw = torch.optim.AdamW(others, fused=True, **settings)
    optimizer = ChainedOptimizer([adamw, Muon([matrices], lr=0.1, weight_decay=0.1)])
    gradients = torch.Generator().manual_seed(1)
    for bad in found_inf:
        for parameter in parameters:
            if bad:
                parameter.grad = torch.full_like(parameter, float("nan"))
            else:
                parameter.grad = torch.randn(parameter.shape, generator=gradients)
        optimizer.found_inf = torch.tensor(bad)
        optimizer.step()
    states = [optimizer.state[p][key] for p in parameters for key in sorted(optimizer.state[p])]
    return [*(parameter.detach() for parameter in parameters), *states]


def test_a_skipped_step_changes_nothing():
    with_skips, without = trained([1.0, 0.0, 1.0, 1.0, 0.0]), trained([0.0, 0.0])
    assert len(with_skips) == len(without) == 3 + 3 + 1 + 3
    for a, b in zip(with_skips, without, strict=True):
        assert torch.equal(a, b)


def test_an_optimizer_that_cannot_skip_a_step_is_refused():
    parameter = nn.Parameter(torch.ones(3))
    with pytest.raises(TypeError, match="^AdamW cannot skip a step on the device"):
        ChainedOptimizer([torch.optim.AdamW([parameter])])


# Of the parameters below: a share of rows ends inside of a matrix, a process has no row of a
# parameter or of a matrix, and a batch has fewer matrices than there are processes.
ROWS = {(24, 8): (8, 6, 10), (30, 8): (10, 10, 10), (2, 6): (2,), (9, 6): (9,)}


def check_shards(rank: int, processes: int, port: int) -> None:
    """Steps on the shards of three processes give what one process gets, with the same gradients,
    clipped, and one step skipped.
    """
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=processes)
    torch.manual_seed(0)
    whole = [nn.Linear(columns, height, bias=False) for height, columns in ROWS]
    sharded = [nn.Linear(columns, height, bias=False) for height, columns in ROWS]
    for source, layer in zip(whole, sharded, strict=True):
        layer.load_state_dict(source.state_dict())
        fully_shard(layer)
    reference = build_muon(layer.weight for layer in whole)
    optimizer = build_muon((layer.weight for layer in sharded), dist.group.WORLD)
    for bad in (False, True, False, False):
        for source, layer in zip(whole, sharded, strict=True):
            gradient = torch.randn_like(source.weight) * (float("nan") if bad else 1.0)
            source.weight.grad = gradient
            placements = layer.weight.placements
            mesh = layer.weight.device_mesh
            layer.weight.grad = distribute_tensor(gradient, mesh, placements)
        for muon in (reference, optimizer):
            muon.found_inf = torch.tensor(float(bad))
            muon.grad_scale = torch.tensor(3.0)
            muon.step()
    for source, layer in zip(whole, sharded, strict=True):
        momentum = optimizer.state[layer.weight]["momentum"].full_tensor()
        torch.testing.assert_close(layer.weight.full_tensor(), source.weight, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(momentum, reference.state[source.weight]["momentum"])
    os._exit(0)


def build_muon(weights: Iterable[nn.Parameter], group: dist.ProcessGroup | None = None) -> Muon:
    parameters = list(weights)
    rows = {parameter: ROWS[tuple(parameter.shape)] for parameter in parameters}
    return Muon(parameters, lr=0.1, weight_decay=0.1, rows=rows, group=group)


def test_muon_does_the_same_on_shards():
    port = free_port()
    ranks = [start_process(check_shards, rank, 3, port) for rank in range(3)]
    for rank in ranks:
        rank.join(60)
    assert [rank.exitcode for rank in ranks] == [0, 0, 0]
