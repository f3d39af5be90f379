"""Generation's kernel and captured steps on a GPU: `pytest tests/ops/test_mix_row_cuda.py`."""

import copy
import gc

import pytest
import torch
from mix_row_cases import TYPES, case, case_by_lag, exact
from models import MIXINGS, SETTINGS, generate, lively_model, padded, tokens

from mixer.models.masked_mixer.cache import MixingCache
from mixer.ops import mix_row, selftest, triangular

if not torch.cuda.is_available():
    pytest.skip("no CUDA device here", allow_module_level=True)

LENGTHS = [1, 7, 129, 1500]
# (batch, heads, channels of a head)
SHAPES = [(1, 1, 1024), (3, 1, 40), (64, 1, 1024), (3, 8, 128), (64, 4, 16), (1, 2, 24)]


@pytest.fixture(scope="module", autouse=True)
def kernels():
    reason = selftest.fault(0)
    assert reason is None, reason


def on_gpu(arguments):
    """The same on the GPU; the memory stays a view into a longer one, with NaN behind it."""
    memory, *tensors = arguments
    longer = memory._base.cuda()
    return longer[:, :, : memory.shape[2]], *(tensor.cuda() for tensor in tensors)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype, weight_dtype", TYPES, ids=str)
def test_as_near_to_fp64_as_the_type_allows(shape, dtype, weight_dtype, length):
    arguments = on_gpu(
        case(*shape, length, dtype, weight_dtype, ragged=length % 2 == 0 or shape[0] == 3)
    )
    assert triangular.row_uses_kernel(*arguments, "auto")
    expected, written = exact(*arguments)
    y = mix_row(*arguments)
    torch.testing.assert_close(y.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
    assert torch.equal(arguments[0].double().nan_to_num(0), written)


@pytest.mark.parametrize("columns, window", [(1, 1), (7, 4), (72, 8), (600, 512), (5, 9)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype, weight_dtype", TYPES, ids=str)
def test_a_ring_by_lag_is_as_near_to_fp64(shape, dtype, weight_dtype, columns, window):
    arguments, lags = case_by_lag(*shape, columns, dtype, weight_dtype, window, window != 4)
    arguments = [None if tensor is None else tensor.cuda() for tensor in arguments]
    assert triangular.row_uses_kernel(*arguments, "auto", lags.cuda())
    expected, written = exact(*arguments, lags.cuda())
    y = mix_row(*arguments, lags=lags.cuda())
    torch.testing.assert_close(y.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
    assert torch.equal(arguments[0].double().nan_to_num(0), written)


@pytest.mark.parametrize("batch", [1, 64])
def test_two_runs_agree_bit_for_bit(batch):
    arguments = on_gpu(case(batch, 1, 1024, 1500, torch.bfloat16, torch.float32))
    first = mix_row(*arguments)
    assert all(torch.equal(mix_row(*arguments), first) for _ in range(20))


def test_a_captured_call_goes_on_from_the_positions_in_memory():
    memory, x, weight, bias, residual, positions = on_gpu(
        case(3, 2, 64, 129, torch.bfloat16, torch.float32)
    )
    memory.nan_to_num_(0)
    mix_row(memory.clone(), x, weight, bias, residual, positions)  # what is built on first use
    graph = torch.cuda.CUDAGraph()
    replayed = memory.clone()
    with torch.cuda.graph(graph):
        y = mix_row(replayed, x, weight, bias, residual, positions)
    for step in range(5):
        positions.copy_(torch.tensor([[step], [128 - step], [60]]))
        x.normal_()
        graph.replay()
        assert torch.equal(y, mix_row(memory, x, weight, bias, residual, positions))
        assert torch.equal(replayed, memory)


@pytest.mark.parametrize("variant", MIXINGS.values(), ids=MIXINGS.keys())
@pytest.mark.parametrize("search", SETTINGS)
@pytest.mark.parametrize("cache", [None, "static"], ids=["growing", "static"])
def test_a_model_writes_what_it_writes_uncached(variant, search, cache):
    model = lively_model(**variant).cuda()
    ids, mask = padded("left")
    settings = {"attention_mask": mask.cuda(), **SETTINGS[search]}
    expected = generate(model, ids.cuda(), use_cache=False, **settings)
    assert torch.equal(
        generate(model, ids.cuda(), cache_implementation=cache, **settings), expected
    )


def test_steps_are_captured_once_and_last_through_a_reset():
    model = lively_model().cuda()
    ids = tokens(batch=2, length=5).cuda()
    cache = MixingCache(model.config, static=True)
    graphs = set()
    for prompt in (ids, ids[:, :3]):
        assert torch.equal(generate(model, prompt, past_key_values=cache), generate(model, prompt))
        graphs.add(id(cache.captured.graph))
        cache.reset()
    assert len(graphs) == 1


def test_a_step_is_captured_anew_for_moved_parameters_and_another_model():
    model = lively_model().cuda()
    ids = tokens(batch=2, length=5).cuda()
    another = lively_model(final_norm=True).cuda()
    cache = MixingCache(model.config, static=True)
    generate(model, ids, past_key_values=cache)
    freed = model.cpu()  # what the graph read is memory for other tensors now
    overwriting = [
        torch.full_like(parameter, torch.nan, device="cuda") for parameter in freed.parameters()
    ]
    for moved in (model.cuda(), another):
        cache.reset()
        assert torch.equal(generate(moved, ids, past_key_values=cache), generate(moved, ids))
    del overwriting


def test_a_cache_is_copied_with_its_captured_step():
    model = lively_model().cuda()
    ids = tokens(batch=2, length=5).cuda()
    cache = MixingCache(model.config, static=True)
    expected = generate(model, ids, past_key_values=cache)
    assert cache.captured is not None
    copied = copy.deepcopy(cache)
    copied.reset()
    assert torch.equal(generate(model, ids, past_key_values=copied), expected)
    assert copied.captured is not cache.captured


def test_captured_steps_leave_no_memory_behind():
    model = lively_model().cuda()
    ids = tokens(batch=2, length=5).cuda()
    used = []
    for _ in range(4):
        generate(model, ids, cache_implementation="static")
        gc.collect()
        used.append(torch.cuda.memory_allocated())
    assert used[1:] == used[1:2] * 3  # the first also leaves what libraries keep


@torch.no_grad()
def test_a_captured_step_has_the_logits_of_one_that_is_not():
    model = lively_model().cuda()
    ids = tokens(batch=2).cuda()
    caches = [MixingCache(model.config, static=static) for static in (True, False)]
    for start, end in ((0, 4), *((column, column + 1) for column in range(4, 12))):
        steps = [
            model(ids[:, start:end], past_key_values=cache, use_cache=True).logits
            for cache in caches
        ]
        torch.testing.assert_close(*steps, rtol=1e-5, atol=1e-5)
    assert caches[0].captured is not None and caches[1].captured is None


@pytest.mark.parametrize("variant", ["flat", "window", "keyed-parts"])
@torch.no_grad()
def test_a_captured_step_does_not_write_padding(variant, monkeypatch):
    """Many tokens are read in chunks, of which the last may be one of padding."""
    monkeypatch.setattr("mixer.models.masked_mixer.cache.SPARE", 2)
    model = lively_model(max_position_embeddings=10, **MIXINGS[variant]).cuda()
    ids = tokens(batch=2, length=10).cuda()
    mask = torch.ones_like(ids)
    mask[0, 8] = 0
    cache = MixingCache(model.config, static=True)
    for start, end in ((0, 5), (5, 6), (6, 9), (9, 10)):
        chunk = ids[:, start:end]
        logits = model(chunk, attention_mask=mask[:, :end], past_key_values=cache).logits
    for row in range(2):
        alone = model(ids[row : row + 1, mask[row].bool()]).logits
        torch.testing.assert_close(logits[row], alone[0, -1:], rtol=1e-4, atol=1e-4)
