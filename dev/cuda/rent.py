"""Runs a ladder program on a GPU rented from Modal, for the minutes that it takes:

    pip install modal && modal setup                                  # once: an account
    python dev/cuda/rent.py triangular_forward all --gpu H100         # all versions, at 512 tokens
    python dev/cuda/rent.py triangular_grad_weight 5 --gpu A100 --tokens 2048 --batch 32 --minutes 5
    python dev/cuda/rent.py triangular_forward 3 --dry-run            # only says what it would do

The repository goes along as it is here; the output comes back line by line, the exit status is the
program's. Modal bills until the program ends or --minutes have passed. Written from the
documentation and the signatures of Modal 1.6, and not run yet.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REMOTE = "/workspace"
IMAGE = "nvidia/cuda:13.0.1-devel-ubuntu22.04"  # as docker/Dockerfile: nvcc and cuBLAS
PYTHON = "3.11"
PROGRAMS = ("triangular_forward", "triangular_grad_input", "triangular_grad_weight")
VERSIONS = ("all", *map(str, range(8)))
HOPPER_VERSIONS = ("6", "7")
# nvcc's, of Modal's GPUs
ARCHITECTURES = {"A100": "80", "A10": "86", "L4": "89", "L40S": "89", "H100": "90a", "H200": "90a"}
FILES = ("mixer", "dev")  # of the repository, that the ladder needs
LEFT_OUT = ["**/__pycache__", "**/build", "**/results"]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Everything is checked before a GPU is paid for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("program", choices=PROGRAMS)
    add("version", choices=VERSIONS, help="a version of the ladder, 0 for cuBLAS, or all")
    add("--gpu", choices=ARCHITECTURES, default="H100")
    add("--minutes", type=int, choices=range(1, 61), default=15, metavar="N", help="stop then")
    add("--tokens", type=int, default=512)
    add("--batch", type=int, default=128)
    add("--channels", type=int, default=1024, help="a multiple of 8")
    add("--dry-run", action="store_true", help="print the command and rent nothing")
    options = parser.parse_args(arguments)
    if options.version in HOPPER_VERSIONS and ARCHITECTURES[options.gpu] != "90a":
        parser.error(
            f"version {options.version} needs a Hopper GPU and --gpu is {options.gpu}; use H100 or "
            "H200"
        )
    return options


def command(options: argparse.Namespace) -> str:
    """What the rented machine's shell runs: build one ladder, find the libraries, run it."""
    sizes = ["--tokens", options.tokens, "--batch", options.batch, "--channels", options.channels]
    steps = [
        "exec 2>&1",
        "nvidia-smi --query-gpu=name,driver_version,clocks.max.sm --format=csv,noheader",
        f"make -C dev/cuda ARCH={ARCHITECTURES[options.gpu]} build/{options.program}",
        'libraries="$(python dev/cuda/libraries.py)"',
        'eval "$libraries"',
        " ".join([f"dev/cuda/build/{options.program}", options.version, *map(str, sizes)]),
    ]
    return "\n".join(["set -e", *steps])


def run(options: argparse.Namespace) -> int:
    """The program's exit status; its output goes to ours."""
    try:
        import modal
    except ImportError:
        sys.exit("error: Modal's client is not installed: `pip install modal && modal setup`")
    image = modal.Image.from_registry(IMAGE, add_python=PYTHON)
    image = image.pip_install_from_pyproject(str(ROOT / "pyproject.toml"))
    for name in FILES:  # last, for these go to the machine as it starts and make no new image
        image = image.add_local_dir(ROOT / name, f"{REMOTE}/{name}", ignore=LEFT_OUT)
    app = modal.App.lookup("masked-mixer-ladder", create_if_missing=True)
    machine = {"app": app, "image": image, "gpu": options.gpu, "timeout": 60 * options.minutes}
    sandbox = modal.Sandbox.create("bash", "-c", command(options), workdir=REMOTE, **machine)
    try:
        for line in sandbox.stdout:
            print(line, end="", flush=True)
        sandbox.wait(raise_on_termination=False)
    finally:
        sandbox.terminate()  # also upon Ctrl-C: nothing goes on costing money
    return 1 if sandbox.returncode is None else sandbox.returncode


def main() -> None:
    options = parse()
    if options.dry_run:
        print(f"on one {options.gpu}, for at most {options.minutes} minutes, in {IMAGE}:")
        print(command(options))
    else:
        sys.exit(run(options))


if __name__ == "__main__":
    main()
