"""A model is cut into shards unit by unit, from the main process's weights."""

import ctypes
import os
import re
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from launching import free_port, start_process
from torch import nn
from torch.distributed.tensor import DTensor

from mixer.distributed import shards

SIZE = 1024
UNITS = 24
M_MMAP_THRESHOLD = -3  # of malloc.h


def build() -> nn.Module:
    """Units of 4 MB each, and two layers with the same weights, a buffer beside them."""
    units = [nn.Linear(SIZE, SIZE, bias=False) for _ in range(UNITS)]
    first = nn.Linear(8, SIZE, bias=False)
    last = nn.Linear(8, SIZE, bias=False)
    last.weight = first.weight
    root = nn.Sequential(*units, nn.ModuleList([first, last]))
    root.register_buffer("positions", torch.arange(4).float(), persistent=False)
    return root


def anonymous_bytes() -> int:
    """The memory of this process, without what is mapped from files."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"RssAnon:\s+(\d+) kB", status).group(1))


def check_shards(rank: int, port: int) -> None:
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536)  # freed tensors leave the process at once
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    plugin = SimpleNamespace(mixed_precision_policy=None, reshard_after_forward=True)
    world = SimpleNamespace(
        accelerator=SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin)),
        device=torch.device("cpu"),
        rank=rank,
        size=2,
        is_main=rank == 0,
    )
    sizes = []
    receive = shards.receive

    def noted_receive(*arguments):
        receive(*arguments)
        sizes.append(anonymous_bytes())

    shards.receive = noted_receive
    torch.manual_seed(0)
    with torch.device("cpu" if rank == 0 else "meta"):
        root = build()
    before = anonymous_bytes()
    *units, tied = root
    shards.shard(root, units, list(tied), world)
    # Of 100 MB, the main process drops what is in shards; another one has its half and a unit. What
    # gloo and torch need for themselves is 30 MB.
    assert max(sizes) - before < 100e6, [size - before for size in sizes]

    assert tied[0].weight is tied[1].weight
    assert all(isinstance(parameter, DTensor) for parameter in root.parameters())
    torch.manual_seed(0)
    whole = build()
    assert torch.equal(root.positions, whole.positions)
    for sharded, parameter in zip(root.parameters(), whole.parameters(), strict=True):
        assert torch.equal(sharded.full_tensor(), parameter)
    os._exit(0)


def test_only_the_main_process_has_the_whole_model_whose_weights_all_get():
    port = free_port()
    ranks = [start_process(check_shards, rank, port) for rank in range(2)]
    for rank in ranks:
        rank.join(60)
    assert [rank.exitcode for rank in ranks] == [0, 0]
