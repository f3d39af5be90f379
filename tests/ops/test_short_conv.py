"""The kernel of short windows without a GPU: its source runs on the CPU, called as the operator
calls it.
"""

import ctypes
import random

import pytest
import torch
from emulated_cases import activations, numbers
from emulator import sources
from toolchain import needs_nvcc

from mixer.ops import build, cuda, plain

SHARED = "reinterpret_cast<float*>(emulator::shared_memory(__COUNTER__))"
EMULATED = [(r"__shared__ float (\w+)\[[^;]*\];", rf"float* \1 = {SHARED};")]
# With what a bias by position needs, grad_bias.cu.
EXPORT = """
extern "C" {
int mixer_short_conv(const TriangularConvParams* params) { return short_conv(*params); }
int mixer_short_conv_gradients(const TriangularConvParams* params) {
  return short_conv_gradients(*params);
}
int64_t mixer_short_conv_workspace(const TriangularConvParams* params) {
  return short_conv_workspace(*params);
}
}
"""
UNITS = {"short_conv": EXPORT, "grad_bias": ""}
CASES = 40
PROCESSORS = 3  # few, so that a thread has several runs


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    directory = tmp_path_factory.mktemp("emulator")
    objects = []
    for name, exports in UNITS.items():
        text = sources.emulated(build.SOURCES / f"{name}.cu", EMULATED) + exports
        objects.append(sources.compile_unit(name, "threads", text, directory))
    library = ctypes.CDLL(str(sources.link(objects, directory)))
    library.mixer_short_conv_workspace.restype = ctypes.c_int64
    return library


@pytest.fixture
def kernels(library, monkeypatch) -> None:
    """The operator's calls go to the emulator; what it does not write stays NaN."""

    def call(name: str, params: cuda.Params) -> None:
        assert getattr(library, name)(ctypes.byref(params)) == 0

    monkeypatch.setattr(cuda, "call", call)
    monkeypatch.setattr(cuda, "load_library", lambda index: library)
    monkeypatch.setattr(cuda, "device_facts", lambda index: (90, PROCESSORS))
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def results(conv, x, lags, bias, residual, dy) -> list[torch.Tensor]:
    """y and the gradients of all that is not None."""
    inputs = [
        None if tensor is None else tensor.detach().requires_grad_()
        for tensor in (x, lags, bias, residual)
    ]
    y = conv(*inputs)
    leaves = [tensor for tensor in inputs if tensor is not None]
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def exact(x, lags, bias, residual) -> torch.Tensor:
    return plain.triangular_conv(x, None, bias, residual, lags=lags[:, None])


@needs_nvcc
@pytest.mark.parametrize("seed", range(CASES))
def test_random_cases_of_integers_are_exact(seed, kernels):
    random.seed(seed)
    torch.manual_seed(seed)
    dtype = random.choice([torch.float16, torch.bfloat16])
    weight_dtype = random.choice([torch.float32, dtype])
    batch = random.choice([1, 2, 5])
    heads = random.randint(1, 3)
    tokens = random.choice([1, 2, 7, 8, 9, 31, 64, 130])
    width = random.choice([8, 24, 64])
    window = random.randint(1, cuda.SHORT_WINDOW)
    biases = random.choice([0, 1, tokens, tokens + 3])
    shape = (batch, tokens, heads * width)
    x, dy = (activations(*shape, dtype) for _ in range(2))
    lags = numbers(heads, window, dtype=weight_dtype)
    bias = numbers(heads, biases, dtype=weight_dtype) if biases else None
    residual = random.choice([None, activations(*shape, dtype)])
    operands = (x, lags, bias, residual, dy)
    doubles = [None if tensor is None else tensor.double() for tensor in operands]
    for ours, truth in zip(
        results(cuda.short_conv, *operands), results(exact, *doubles), strict=True
    ):
        assert torch.equal(ours, truth.to(ours.dtype))
