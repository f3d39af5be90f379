"""Which calls the kernels take, without a GPU."""

from types import SimpleNamespace

import pytest
import torch

from mixer.common.errors import UserError
from mixer.ops import arguments, cuda, keyed, plain, selftest, triangular


@pytest.fixture
def gpu(monkeypatch):
    """Pretends a GPU of a compute capability, whose kernels are built."""

    def pretend(capability: int) -> torch.device:
        arguments.warn_once.cache_clear()
        monkeypatch.setattr(cuda, "device_facts", lambda index: (capability, 132))
        monkeypatch.setattr(selftest, "fault", lambda index: None)
        monkeypatch.setattr(keyed, "fault", lambda *_: None)
        return torch.device("cuda", 0)

    return pretend


@pytest.mark.parametrize(
    ("capability", "dtype", "width", "serves"),
    [
        (90, torch.bfloat16, 32, True),
        (70, torch.float16, 32, True),
        (75, torch.bfloat16, 32, False),
        (90, torch.float32, 32, False),
        (90, torch.bfloat16, 20, False),
    ],
)
def test_auto_takes_the_kernels_for_what_they_serve_and_says_why_not(
    gpu, caplog, capability, dtype, width, serves
):
    shape = (2, 512, 2 * width)
    x = SimpleNamespace(dtype=dtype, shape=shape, device=gpu(capability), is_cuda=True)
    assert triangular.uses_kernels("auto", x, heads=2) == serves
    reason = f"x is {dtype} on cuda:0.* the CUDA kernels take float16"
    assert serves or f"x is {dtype} on cuda:0" in caplog.text
    if not serves:
        with pytest.raises(UserError, match=f"'cuda' cannot run here: {reason}"):
            triangular.uses_kernels("cuda", x, heads=2)
    assert not triangular.uses_kernels("dense", x, heads=2)


@pytest.mark.skipif(not keyed.HAS_TRITON, reason="no Triton here")
@pytest.mark.parametrize(
    ("capability", "changes", "serve"),
    [
        (90, {}, True),
        (90, {"dtype": torch.float64}, False),
        (90, {"key_size": 24}, False),
        (90, {"context": 65536}, False),
        (70, {}, False),
    ],
)
def test_keyed_mixing_takes_its_kernels_or_says_what_they_take(
    gpu, caplog, capability, changes, serve
):
    dtype = changes.get("dtype", torch.float16)
    key_size = changes.get("key_size", 64)
    context = changes.get("context", 512)
    assert keyed.uses_kernels(gpu(capability), dtype, key_size, 64, context, True) == serve
    message = f"for {dtype}, keys of {key_size} and values of 64"
    assert (message in caplog.text) == (not serve)


class OnGpu:
    """A tensor that says that it is on a GPU."""

    is_cuda = True
    device = torch.device("cuda", 0)

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor

    def __getattr__(self, name: str):
        return getattr(self.tensor, name)


def row_arguments(**changes) -> list:
    """Two texts of two heads of 8 channels, whose memory has room for 12 of 16 tokens."""
    half = {"dtype": torch.float16}
    tensors = {
        "memory": torch.zeros(2, 2, 12, 8, **half),
        "x": torch.zeros(2, 1, 16, **half),
        "weight": torch.zeros(2, 1, 16, 16),
        "bias": torch.zeros(2, 16),
        "residual": torch.zeros(2, 1, 16, **half),
        "positions": torch.zeros(2, 1, dtype=torch.int64),
    }
    tensors |= changes
    return [None if value is None else OnGpu(value) for value in tensors.values()]


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("memory", torch.zeros(2, 2, 12, 8)),
        ("memory", torch.zeros(2, 2, 17, 8).half()),  # of more tokens than there are weights
        ("memory", torch.zeros(2, 2, 8, 12).half().mT),
        ("memory", torch.zeros(400).half()[1:385].view(2, 2, 12, 8)),  # begins at no 16 bytes
        ("x", torch.zeros(1, 1, 16).half()),
        ("x", torch.zeros(2, 2, 16).half()),
        ("x", torch.zeros(2, 1, 8).half()),
        ("weight", torch.zeros(2, 1, 16, 16).bfloat16()),
        ("weight", torch.zeros(2, 1, 12, 16)),
        ("weight", torch.zeros(2, 3, 16, 16)),
        ("weight", torch.zeros(1, 1, 16, 16)),
        ("weight", torch.zeros(2, 1, 16, 16, requires_grad=True)),
        ("bias", torch.zeros(2, 16).half()),
        ("bias", torch.zeros(2, 12)),
        ("residual", torch.zeros(2, 1, 16)),
        ("residual", torch.zeros(2, 1, 8).half()),
        ("positions", torch.zeros(2, 1, dtype=torch.int32)),
        ("positions", torch.zeros(2, dtype=torch.int64)),
        ("positions", torch.zeros(3, 1, dtype=torch.int64)),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.dtype} {tuple(value.shape)}",
)
def test_the_kernel_of_a_decoding_step_takes_no_tensor_beyond_whose_end_it_would_read(
    gpu, name, tensor
):
    gpu(90)
    one_position = torch.zeros(1, 1, dtype=torch.int64)
    for fits in ({}, {"residual": None}, {"positions": one_position}):
        assert triangular.row_uses_kernel(*row_arguments(**fits), "auto"), fits
    assert not triangular.row_uses_kernel(*row_arguments(), "dense")
    assert not triangular.row_uses_kernel(*row_arguments(**{name: tensor}), "auto")


@pytest.fixture
def wrong_by(monkeypatch):
    """Kernels that compute what plain PyTorch does on the CPU, times a factor; or that cannot run,
    for a factor of None.
    """

    def pretend(factor: float | None) -> torch.device:
        def times_factor(real):
            def conv(*tensors, **more_tensors):
                if factor is None:
                    raise RuntimeError("no kernel image is available")
                return real(*tensors, **more_tensors) * factor

            return conv

        def keyed_conv(query, key, value, mixing, bias, decay):
            assert (query.shape[2], value.shape[2]) == (2 * 16, 2 * 32)  # of two heads
            return plain.keyed_conv(query, key, value, None, bias, lags=mixing, decay=decay)

        monkeypatch.setattr(cuda, "by_kernels", times_factor(selftest.plain_conv))
        monkeypatch.setattr(keyed, "by_kernels", times_factor(keyed_conv))
        monkeypatch.setattr(cuda, "device_facts", lambda index: (80, 108))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
        device = torch.device("cpu")
        monkeypatch.setattr(torch, "device", lambda *_: device)
        return device

    yield pretend
    selftest.fault.cache_clear()
    keyed.fault.cache_clear()


@pytest.mark.parametrize(
    ("factor", "said"),
    [
        (1.0, None),
        (1.1, "y differs by 1.0e-01 from plain PyTorch's"),
        (float("nan"), "y differs by nan from plain PyTorch's"),
        (None, "no kernel image is available"),
    ],
)
def test_kernels_that_fail_or_are_wrong_on_a_gpu_are_not_used_there(wrong_by, factor, said):
    """Whatever the modes of the call that comes first. A recomputed block has such hooks: if the
    self-test's tensors went through them, its backward pass would recompute the block.
    """
    device = wrong_by(factor)
    selftest.fault.cache_clear()
    keyed.fault.cache_clear()
    kept = []
    with (
        torch.inference_mode(),
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(kept.append, lambda _: pytest.fail("unpacked")),
    ):
        reason = selftest.fault(0)
        fault = keyed.fault(device, torch.float16, 16, 32, True)
    assert not kept
    for problem in (reason, fault):
        assert problem is None if said is None else said in problem
    assert reason is None or "a GPU" in reason and reason.endswith("mixer.ops.build`")
