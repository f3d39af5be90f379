"""Generation's kernel without a GPU: its source runs on the CPU, called as the operator calls
it.
"""

import ctypes

import pytest
import torch
from emulator import sources
from mix_row_cases import TYPES, case, case_by_lag, exact
from models import generate, lively_model, padded
from toolchain import needs_nvcc

from mixer.ops import build, cuda, mix_row, triangular

# so that shapes are shared out in all ways: on Hopper, to clusters of 1, 2, 4 and 8
PROCESSORS = {"": 4, build.HOPPER_FLAG: 20}
# (batch, heads, channels of a head): wide and narrow blocks, 256 and 1024 threads, part of a block
SHAPES = [(1, 1, 64), (3, 2, 24), (2, 3, 8), (20, 1, 136)]
SHARED = "reinterpret_cast<float*>(emulator::shared_memory(__COUNTER__))"
EMULATED = [
    (r"__shared__ float (\w+)\[\w+\];", rf"float* \1 = {SHARED};"),
    (
        r"__shared__ float (\w+)\[\w+\]\[([^;]*)\];",
        rf"auto \1 = reinterpret_cast<float (*)[\2]>({SHARED});",
    ),
    (r'asm volatile\("griddepcontrol[^;]*;[^;]*;', ""),
    (r"(void (\w+_cluster)\(\)) \{[^}]*\}", r"\1 { emulator::\2(); }"),
    (r"(void send_to_first\([^)]*\)) \{.*?\n\}", r"\1 { emulator::send_to_first(place, value); }"),
]
EXPORT = """
extern "C" int mixer_mix_row(const TriangularConvParams* params) { return mix_row(*params); }
"""


@pytest.fixture(scope="module", params=["", build.HOPPER_FLAG], ids=["", "hopper"])
def library(request, tmp_path_factory) -> ctypes.CDLL:
    directory = tmp_path_factory.mktemp("emulator")
    text = sources.emulated(build.SOURCES / "mix_row.cu", EMULATED) + EXPORT
    flags = [request.param] if request.param else []
    unit = sources.compile_unit("mix_row", "mix_row", text, directory, *flags)
    library = ctypes.CDLL(str(sources.link([unit], directory)))
    library.processors = PROCESSORS[request.param]
    return library


@pytest.fixture
def kernel(library, monkeypatch) -> list[str]:
    """Calls of the kernel go to the emulator; returns the list of those made."""
    calls = []

    def call(name: str, params: cuda.Params) -> None:
        calls.append(name)
        assert getattr(library, name)(ctypes.byref(params)) == 0

    monkeypatch.setattr(cuda, "call", call)
    monkeypatch.setattr(cuda, "device_facts", lambda index: (0, library.processors))
    return calls


@needs_nvcc
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype, weight_dtype", TYPES, ids=str)
def test_the_kernels_source_is_right_on_the_cpu(shape, dtype, weight_dtype, kernel):
    for length in (1, 7, 129):
        arguments = case(*shape, length, dtype, weight_dtype, ragged=length != 7)
        expected, written = exact(*arguments)
        memory = arguments[0]
        residual = arguments[4] if length != 1 else None
        y = cuda.row_by_kernel(*arguments[:4], residual, arguments[5])
        expected = expected if residual is not None else expected - arguments[4].double()
        torch.testing.assert_close(y.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=4e-6)
        assert torch.equal(memory.double().nan_to_num(0), written)


@needs_nvcc
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype, weight_dtype", TYPES, ids=str)
def test_the_kernel_reads_a_ring_by_lag(shape, dtype, weight_dtype, kernel):
    for columns, window in ((1, 1), (7, 4), (72, 8), (600, 512), (5, 9)):
        arguments, lags = case_by_lag(*shape, columns, dtype, weight_dtype, window, window != 4)
        expected, written = exact(*arguments, lags)
        y = cuda.row_by_kernel(*arguments, lags)
        torch.testing.assert_close(y.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=4e-6)
        assert torch.equal(arguments[0].double().nan_to_num(0), written)


@needs_nvcc
def test_a_position_outside_the_memory_gives_nan_and_writes_nothing(kernel):
    memory, *inputs, _ = case(2, 1, 16, 7, torch.float32, torch.float32)
    before = memory.clone()
    for outside in (7, -1):
        y = cuda.row_by_kernel(memory, *inputs, torch.tensor([[outside], [0]]))
        assert y[0].isnan().all() and y[1].isfinite().all()
        assert torch.equal(memory[0].nan_to_num(0), before[0].nan_to_num(0))


@needs_nvcc
@pytest.mark.parametrize("cache", [None, "static"], ids=["growing", "static"])
@pytest.mark.parametrize("mixing_weight", ["full", "lags"])
def test_a_model_writes_the_same_by_the_kernel(mixing_weight, cache, kernel, monkeypatch):
    model = lively_model(num_mixer_heads=2, mixer_expansion=True, mixing_weight=mixing_weight)
    ids, mask = padded("left")
    settings = {"new": 4, "attention_mask": mask, "num_beams": 2, "cache_implementation": cache}
    expected = generate(model, ids, **settings)
    assert not kernel
    monkeypatch.setattr(triangular, "row_uses_kernel", lambda *arguments: True)
    assert torch.equal(generate(model, ids, **settings), expected)
    # the first of the 4 tokens comes from the prompt
    assert len(kernel) == 3 * 2 * len(model.model.layers)


@pytest.mark.parametrize("mode", ["plain", "autocast", "gradient"])
def test_compiled_and_eager_calls_agree(mode):
    memory, x, weight, bias, residual, positions = case(3, 2, 20, 7, torch.float32, torch.float32)
    parameters = [weight.nan_to_num(0).requires_grad_(mode == "gradient"), bias]

    def step(memory):
        return mix_row(memory, x, *parameters, residual, positions)

    results = []
    for call in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        written = memory.nan_to_num(0).clone()
        with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
            y = call(written)
        results.append([y.detach(), written])
        if mode == "gradient":
            results[-1] += torch.autograd.grad(y.sum(), parameters[:1])
    torch.testing.assert_close(*results)
