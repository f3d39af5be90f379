"""Check whether the CUDA kernels work here, and say what to do if not.

The status is 0 if backend `cuda` will work, else 1.
"""

import sys

from mixer.common.errors import command_parser, run_command
from mixer.reporting.text import shown_width, wrapped


def main(arguments: list[str] | None = None) -> None:
    command_parser("mixer doctor", __doc__).parse_args(arguments)
    # Only now, as this takes seconds.
    import torch

    from mixer.ops import build
    from mixer.ops.diagnosis import blindness, gpu_problem

    print(f"torch: {torch.__version__}")
    problems = set(filter(None, [blindness()]))
    for index in range(0 if problems else torch.cuda.device_count()):
        name = torch.cuda.get_device_name(index)
        capability = torch.cuda.get_device_capability(index)
        problem = gpu_problem(index, name, capability)
        origin = "prebuilt kernels" if build.prebuilt_library(capability) else "kernels built here"
        state = "kernels do not run" if problem else f"{origin} run"
        print(f"GPU {index}: {name}, compute capability {build.dotted(capability)}; {state}")
        if problem:
            problems.add(problem)
    print(f"The cuda backend {'will not work' if problems else 'works'} here.")
    if problems:
        print("Models run in plain PyTorch. To use an NVIDIA GPU, fix this:")
    for problem, fix in sorted(problems):
        print(f"\n{wrapped(f'PROBLEM: {problem}', shown_width())}\n  $ {fix}")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    run_command(main)
