"""Whether the CUDA kernels will work here, and if not, what to do: `python -m mixer.doctor
[--json]`.

Kernels that are not built yet are built. Status 0 if backend `cuda` will work, else 1.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator

from mixer.common.errors import run_command
from mixer.ops import toolchain
from mixer.ops.diagnosis import Facts, Gpu, Problem, Version, judge
from mixer.ops.machine import gather
from mixer.reporting.tables import wrapped


def lines(facts: Facts) -> Iterator[tuple[str, str]]:
    """The names of the facts and what they are, a line each."""
    for index, gpu in enumerate(facts.gpus):
        yield f"GPU {index}", gpu_line(gpu)
    if not facts.gpus:
        yield "GPU", "none"
    driver = facts.driver or ("version unknown" if facts.driver_library else "none")
    where = ", in a container" if facts.container else ""
    yield "driver", f"{driver}, {cuda_version(facts.driver_cuda)}{where}"
    arches = " ".join(facts.torch_arches) or "no GPU"
    yield "torch", f"{facts.torch}, {cuda_version(facts.torch_cuda)}, for {arches}"
    yield "NCCL", facts.nccl or "none"
    nvcc = facts.nvcc
    yield "nvcc", f"{toolchain.dotted(nvcc.version)} ({nvcc.path})" if nvcc else "none"
    yield "ninja", facts.ninja or "none"
    yield "host compiler", facts.host_compiler or "none"
    cache = facts.cache
    mode = f"mode {cache.mode:04o}, user {cache.owner}" if cache.mode is not None else "not there"
    yield "cache", f"{cache.path} ({mode})"


def gpu_line(gpu: Gpu) -> str:
    memory = f"{gpu.memory[0]} of {gpu.memory[1]} GiB free" if gpu.memory else "memory unknown"
    state = f"{'built' if gpu.library else 'not built'}, {'load' if gpu.loads else 'not loaded'}"
    state += ", do not run" if gpu.reason else ", run"
    capability = toolchain.dotted(gpu.capability)
    return f"{gpu.name}, compute capability {capability}, {memory}; kernels {state}"


def cuda_version(pair: Version | None) -> str:
    return f"CUDA {toolchain.dotted(pair)}" if pair else "no CUDA"


def page(facts: Facts, problems: list[Problem]) -> str:
    """What the command prints: the facts, the problems with their fixes, and the verdict."""
    text = [f"{name:14} {value}" for name, value in lines(facts)]
    for problem in problems:
        text += [
            "",
            wrapped(f"{'PROBLEM' if problem.blocks else 'note'}: {problem.what}"),
            wrapped(problem.means, "  ", "  "),
            f"  $ {problem.fix}",
        ]
    verdict = "will not work here" if any(problem.blocks for problem in problems) else "works here"
    return "\n".join([*text, "", f"The cuda backend {verdict}."])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m mixer.doctor", description="Whether the CUDA kernels will work here."
    )
    parser.add_argument("--json", action="store_true", help="facts and problems as JSON")
    options = parser.parse_args(arguments)
    facts = gather()
    problems = judge(facts)
    works = not any(problem.blocks for problem in problems)
    if options.json:
        everything = {
            "works": works,
            "facts": dataclasses.asdict(facts),
            "problems": [dataclasses.asdict(problem) for problem in problems],
        }
        print(json.dumps(everything, indent=2, default=str))
    else:
        print(page(facts, problems))
    sys.exit(0 if works else 1)


if __name__ == "__main__":
    run_command(main)
