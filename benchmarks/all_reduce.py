"""What the dead halves of the mixing weights cost a data-parallel run, and whether packing the
triangles would pay.

    torchrun --standalone --nproc_per_node 4 benchmarks/all_reduce.py --output
    benchmarks/results/all_reduce_h200

Gradients of the strictly upper triangles are zero and travel all the same. For the paper's model at
several contexts: their share of what an all-reduce sends, and the time of an all-reduce of all
gradients in fp32, as they are, and with the lower triangles gathered before and put back after.
Nothing is computed meanwhile: in a run DDP sends most of it during the backward pass. Writes
OUTPUT.json and OUTPUT.md.
"""

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist
from saving import add_options, measured_by, origin, save

from mixer import MaskedMixerConfig, MaskedMixerForCausalLM
from mixer.common.errors import UserError, run_command

ROUNDS = 20
COLUMNS = ["context", "parameters", "dead share", "whole, ms", "packed, ms", "packed / whole"]


def count_weights(context: int) -> tuple[int, int]:
    """(parameters, those strictly above a diagonal) of the paper's model: hidden 1024, 16 layers,
    vocabulary 8000.
    """
    config = MaskedMixerConfig(
        vocab_size=8000, hidden_size=1024, num_hidden_layers=16, max_position_embeddings=context
    )
    with torch.device("meta"):
        model = MaskedMixerForCausalLM(config)
    return model.num_parameters(), config.num_hidden_layers * context * (context - 1) // 2


class Gradients:
    """All gradients of a model: the mixing weights' (layers, context, context), and `others`
    (count,).
    """

    def __init__(self, context: int, layers: int, others: int, device: torch.device):
        self.mixing = torch.ones(layers, context, context, device=device).tril()
        self.others = torch.ones(others, device=device)
        rows, columns = torch.tril_indices(context, context, device=device)
        self.places = rows * context + columns

    def whole(self) -> None:
        dist.all_reduce(self.mixing)
        dist.all_reduce(self.others)

    def packed(self) -> None:
        flat = self.mixing.flatten(1)  # (layers, context * context)
        lower = flat[:, self.places]  # (layers, context * (context + 1) / 2)
        dist.all_reduce(lower)
        flat[:, self.places] = lower
        dist.all_reduce(self.others)


def milliseconds(call, device: torch.device) -> float:
    """Median wall time of a call that all processes begin together."""
    times = []
    for round_ in range(ROUNDS + 3):
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if round_ >= 3:
            times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def measure(context: int, device: torch.device) -> dict:
    parameters, dead = count_weights(context)
    gradients = Gradients(context, 16, parameters - 16 * context**2, device)
    whole, packed = milliseconds(gradients.whole, device), milliseconds(gradients.packed, device)
    row = {
        "context": context,
        "parameters": parameters,
        "dead": dead,
        "dead_share": dead / parameters,
    }
    return row | {"whole_ms": whole, "packed_ms": packed}


def table(result: dict) -> str:
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---:|" * len(COLUMNS)]
    for row in result["rows"]:
        ratio = row["packed_ms"] / row["whole_ms"]
        lines.append(
            f"| {row['context']} | {row['parameters']:,} | {row['dead_share']:.1%} | "
            f"{row['whole_ms']:.2f} | {row['packed_ms']:.2f} | {ratio:.2f} |"
        )
    where = f"{result['processes']} processes, {result['backend']}; {origin(result)}"
    return "\n".join(lines) + f"\n\nMedians of {ROUNDS}; {where}.\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    options = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        raise UserError("it measures between processes; start it by torchrun, as --help shows")
    on_gpu = torch.cuda.is_available()
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if on_gpu else "cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    result = measured_by(options)
    result |= {"processes": dist.get_world_size(), "backend": dist.get_backend()}
    result["rows"] = [measure(context, device) for context in options.contexts]
    if dist.get_rank() == 0:
        save(result, table(result), options.output)
        print(table(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    run_command(main)
