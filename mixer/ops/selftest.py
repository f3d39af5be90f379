"""Do the kernels work on this GPU? Small results of theirs against plain PyTorch's in fp64."""

import functools
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from mixer.common.errors import UserError, first_line
from mixer.ops import cuda, plain

MOST_APART = 2e-2  # relative: kernels round to the type


def in_own_thread(function: Callable) -> Callable:
    """Decorates a self-test, which has to run in PyTorch's default modes. It is called wherever the
    kernels are called first, and modes are a thread's own: in inference, under autocast, while
    torch.compile traces, in a recomputed block, which would keep the test's tensors by recomputing
    itself in the test's backward pass.
    """

    @functools.wraps(function)
    def call(*arguments):
        with ThreadPoolExecutor(1, "self-test") as thread:
            return thread.submit(function, *arguments).result()

    return call


@functools.cache
@in_own_thread
def fault(index: int) -> str | None:
    """What keeps the CUDA kernels from running on a device, with the one command that fixes it.
    None if nothing does.

    The first call for a device builds the library if there is none, compares small results with
    plain PyTorch's and waits for them, so it must not come inside a graph capture. The answer is
    kept: a failed build is not tried again in this process.
    """
    if torch.version.hip is not None or not torch.cuda.is_available():
        return "torch sees no NVIDIA GPU, which the CUDA kernels need: `mixer doctor`."
    try:
        problem = wrong_result(torch.device("cuda", index))
    except UserError as error:
        return str(error)
    except (RuntimeError, OSError) as error:  # most often nvcc is newer than the driver
        return (
            "the CUDA kernels are there but do not run on "
            f"{torch.cuda.get_device_name(index)}: {first_line(error)}. Update the driver, or "
            "build them with a toolkit that it supports: "
            "`CUDA_HOME=/usr/local/cuda-12 python -m mixer.ops.build`"
        )
    if problem:
        return (
            f"the CUDA kernels are wrong on {torch.cuda.get_device_name(index)}: {problem}. Build "
            "them anew: `python -m mixer.ops.build`"
        )
    return None


def wrong_result(device: torch.device) -> str | None:
    """Which result of the kernels is wrong on a device; None if none is: in each type that they
    take there, with a full weight, one by lag, and one of few lags.
    """
    dtypes = [torch.float16]
    if cuda.device_facts(device.index)[0] >= 80:
        dtypes.append(torch.bfloat16)
    batch, heads, tokens, channels = 2, 2, 320, 128  # tokens end inside of a tile
    weight_shapes = {
        "weight": (heads, 1, tokens, tokens),
        "lags": (heads, 1, tokens),
        "few lags": (heads, 1, cuda.SHORT_WINDOW),
    }
    for dtype in dtypes:
        for name, weight_shape in weight_shapes.items():
            shapes = {
                "x": (batch, tokens, channels),
                name: weight_shape,
                "bias": (heads, tokens),
                "residual": (batch, tokens, channels),
            }
            problem = compare(cuda.by_kernels, plain_conv, shapes, device, dtype)
            if problem:
                return problem
    return None


def plain_conv(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    """`cuda.by_kernels` in plain PyTorch."""
    if weight.dim() == 4:
        return plain.triangular_conv(x, weight, bias, residual)
    return plain.triangular_conv(x, None, bias, residual, lags=weight)


def compare(
    kernels: Callable[..., Tensor],
    expected: Callable[..., Tensor],
    shapes: dict[str, tuple[int, ...]],
    device: torch.device,
    dtype: torch.dtype,
) -> str | None:
    """Says which result of `kernels`, its output y or a gradient, differs from that of `expected`
    in fp64 by more than rounding; None if none does.

    shapes: of the arguments of both, which are random numbers, by name.
    """
    generator = torch.Generator(device).manual_seed(0)  # the run's own random numbers stay

    def draw(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype, generator=generator)

    arguments = [draw(shape).requires_grad_() for shape in shapes.values()]
    exact = [argument.detach().double().requires_grad_() for argument in arguments]
    y = kernels(*arguments)
    exact_y = expected(*exact)
    dy = draw(y.shape)
    # Of sums, as torch imports its compiler for gradients of anything else: 1.6 s.
    gradients = torch.autograd.grad((y * dy).sum(), arguments)
    exact_gradients = torch.autograd.grad((exact_y * dy.double()).sum(), exact)
    names = ["y", *(f"d{name}" for name in shapes)]
    problem = difference([y.detach(), *gradients], [exact_y.detach(), *exact_gradients], names)
    return f"in {dtype}, {problem}" if problem else None


def difference(
    results: Iterable[Tensor], expected: Iterable[Tensor], names: Iterable[str]
) -> str | None:
    """Says which result differs from plain PyTorch's by more than rounding; None if none does."""
    for name, ours, theirs in zip(names, results, expected, strict=True):
        error = (ours - theirs).norm(dtype=torch.float64)
        size = theirs.norm(dtype=torch.float64)
        if not error <= MOST_APART * size:  # NaN is no result either
            return f"{name} differs by {(error / size).item():.1e} from plain PyTorch's"
    return None
