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
from mixer.ops.diagnosis import Facts, Problem, Version, gather, judge
from mixer.ops.toolchain import dotted
from mixer.reporting.tables import wrapped


def lines(facts: Facts) -> Iterator[tuple[str, str]]:
    """The names of the facts and what they are, a line each."""
    for index, gpu in enumerate(facts.gpus):
        state = "do not run" if gpu.reason else "run"
        capability = dotted(gpu.capability)
        yield f"GPU {index}", f"{gpu.name}, compute capability {capability}; kernels {state}"
    if not facts.gpus:
        yield "GPU", "none"
    where = ", in a container" if facts.container else ""
    yield "driver", (cuda_version(facts.driver_cuda) if facts.driver_library else "none") + where
    arches = " ".join(facts.torch_arches) or "no GPU"
    yield "torch", f"{facts.torch}, {cuda_version(facts.torch_cuda)}, for {arches}"
    yield "nvcc", facts.nvcc or "none"
    yield "host compiler", facts.host_compiler or "none"
    yield "cache", facts.cache or "none"


def cuda_version(pair: Version | None) -> str:
    return f"CUDA {dotted(pair)}" if pair else "no CUDA"


def page(facts: Facts, problems: list[Problem]) -> str:
    """What the command prints: the facts, the problems with their fixes, and the verdict."""
    text = [f"{name:14} {value}" for name, value in lines(facts)]
    for problem in problems:
        text += ["", wrapped(f"PROBLEM: {problem.what}"), f"  $ {problem.fix}"]
    verdict = "works here" if facts.works else "will not work here"
    return "\n".join([*text, "", f"The cuda backend {verdict}."])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m mixer.doctor", description="Whether the CUDA kernels will work here."
    )
    parser.add_argument("--json", action="store_true", help="facts and problems as JSON")
    options = parser.parse_args(arguments)
    facts = gather()
    problems = judge(facts)
    if options.json:
        everything = {"works": facts.works, "facts": dataclasses.asdict(facts)}
        everything["problems"] = [dataclasses.asdict(problem) for problem in problems]
        print(json.dumps(everything, indent=2))
    else:
        print(page(facts, problems))
    sys.exit(0 if facts.works else 1)


if __name__ == "__main__":
    run_command(main)
