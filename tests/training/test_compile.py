"""torch.compile of training, and recomputation: faster or smaller, and otherwise nothing
changes.
"""

import os
from functools import partial

import pytest
import torch
from models import small_model, tokens
from runs import assert_same, killed_after, read_lines, read_losses
from safetensors.torch import load_file
from toolchain import needs_gxx
from torch.nn.functional import cross_entropy
from transformers.modeling_layers import GradientCheckpointingLayer

from mixer.models.masked_mixer import modeling
from mixer.models.masked_mixer.mixing import gelu, short_gelu
from mixer.objectives.language import TokenLoss, token_nats
from mixer.training import passes, start
from mixer.training.config import load_config
from mixer.training.loop import train
from mixer.training.optim import OptimConfig, build_optimizer, set_learning_rate
from mixer.training.passes import compiled, compiled_parts, set_recompute

HAS_TAG = hasattr(torch.compiler.config, "cache_key_tag")
needs_tag = pytest.mark.skipif(not HAS_TAG, reason="needs torch 2.7")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# Eight samples a step on two processes, in micro-batches; an evaluation whose last batches are
# smaller, or empty on a process.
TRAIN = {"steps": 12, "batch_size": 2, "gradient_accumulation_steps": 2}
TRAIN |= {"eval_every": 5, "eval_samples": 9}


def compile_quickly(set_option=setattr) -> None:
    """Code without vector instructions, and no compiling processes beside the ranks: less work for
    the C++ compiler.
    """
    from torch._inductor import config

    set_option(config.cpp, "vec_isa_ok", False)
    set_option(config, "compile_threads", 1)


@needs_gxx
@needs_tag
def test_code_that_the_compiler_has_kept_is_not_for_other_operators(tmp_path, monkeypatch):
    """It calls their gradients, which an update may have changed."""
    from torch._dynamo.utils import counters

    compile_quickly(monkeypatch.setattr)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.compiler.config, "cache_key_tag", "")  # back to it in the end
    x, hits = torch.ones(8, requires_grad=True), []
    for version in ("old", "old", "new"):
        monkeypatch.setattr(passes, "operators_hash", partial(str, version))
        torch._dynamo.reset()
        counters.clear()
        compiled(torch.sin)(x).sum().backward()
        hits.append(counters["aot_autograd"]["autograd_cache_hit"])
    assert hits == [0, 1, 0]


def without_ddp_on_another_cpu() -> None:
    """As where a step is a CUDA graph, up to its recording; each rank draws weights of its own."""
    draw, rank = torch.manual_seed, int(os.environ.get("RANK", 0))
    torch.manual_seed = lambda seed: draw(seed + rank)
    start.compile_loss, start.obstacle_to_graph = lambda *_: True, lambda *_: ""
    start.Passes.record = lambda *_: None


def test_all_processes_have_the_weights_of_the_first_also_without_ddp(
    write_config, launch, tmp_path
):
    config = write_config(train=TRAIN | {"steps": 3})
    on_two = {"processes": 2, "before": without_ddp_on_another_cpu}
    launch("--config", config, "name=one").succeed()
    launch("--config", config, "name=two", **on_two).succeed()
    one, two = (read_lines(tmp_path / "runs" / name)[0] for name in ("one", "two"))
    assert two["validation_loss"] == pytest.approx(one["validation_loss"], rel=1e-6)


@needs_gxx
def test_a_compiled_run_of_two_processes_has_the_losses_of_an_eager_one_and_resumes_exactly(
    write_config, launch, tmp_path
):
    saved = {"save_every": 5, "keep": 3}
    config = write_config(train=TRAIN | {"compile": "blocks"}, checkpoint=saved)
    on_two = {"processes": 2, "before": compile_quickly}
    output = launch("--config", config, "name=whole", **on_two).succeed()
    assert "train.compile: compiled in" in output
    whole, eager = tmp_path / "runs/whole", tmp_path / "runs/eager"
    parts = killed_after(whole, 5, "parts")
    assert "resuming" in launch("--config", config, "name=parts", **on_two).succeed()
    assert_same(parts, whole, 12)

    plain = ("--config", config, "name=eager", "train.compile=no", "train.batch_size=4")
    assert "train.compile:" not in launch(*plain).succeed()
    assert read_losses(whole) == pytest.approx(read_losses(eager), rel=1e-5)
    validation = [
        [line["validation_loss"] for line in read_lines(run) if "validation_loss" in line]
        for run in (whole, eager)
    ]
    assert len(validation[0]) == 4 and validation[0] == pytest.approx(validation[1], rel=1e-5)
    found, wanted = (load_file(run / "step-12/model.safetensors") for run in (whole, eager))
    assert found.keys() == wanted.keys()


def test_the_model_is_compiled_into_six_graphs(write_config, small_run, capsys, monkeypatch):
    """Whatever its layers, steps and last batches; the optimizer's are counted below."""
    monkeypatch.setattr(torch, "compile", with_backend("aot_eager"))
    monkeypatch.setattr(start, "compiled", lambda function: function)
    torch._dynamo.reset()
    counts = torch._dynamo.utils.counters["stats"]
    counts.clear()
    config = write_config(model=small_run["model"] | {"num_hidden_layers": 4, "final_norm": True})
    options = ["train.compile=blocks", "train.eval_samples=19", "train.steps=3"]
    train(load_config(str(config), options))
    assert "train.compile: compiled in" in capsys.readouterr().out
    # a block, the final norm and the loss, with gradients and without
    assert counts["unique_graphs"] == 6


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=[needs_gxx, pytest.mark.slow])]
)
def test_the_optimizers_are_compiled_once_and_train_as_they_do_without(backend, monkeypatch):
    compile_quickly(monkeypatch.setattr)
    monkeypatch.setattr(torch, "compile", with_backend(backend))
    torch._dynamo.reset()
    counts = torch._dynamo.utils.counters["stats"]
    counts.clear()
    config = OptimConfig(name="muon", weight_decay=0.1)
    models = [small_model(num_mixer_heads=2).train() for _ in range(2)]
    optimizers = [build_optimizer(models[0], config)]
    optimizers += [build_optimizer(models[1], config, compile=compiled)]
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            set_learning_rate(optimizer, 0.02 / (step + 1))
            optimizer.zero_grad()
            (model(tokens()).logits - step).square().mean().backward()
            optimizer.step()
    for eager, faster in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(faster, eager, rtol=1e-4, atol=1e-5)
    # Two functions of Muon for each of three shapes of matrices.
    assert counts["unique_graphs"] == 6


def with_backend(name: str):
    """torch.compile by a backend; aot_eager is without code generation, which takes most of the
    time.
    """
    real = torch.compile
    return lambda function, options=None, **how: real(function, **how, backend=name)


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        raise RuntimeError("a backward pass that was not compiled")


def blocks_that_fail_backward() -> None:
    """After the loss and lm_head have gone backward, and left a gradient."""

    def compile(part, **_):
        is_block = isinstance(part.__self__, GradientCheckpointingLayer)
        return (lambda x: FailsBackward.apply(part(x))) if is_block else part

    torch.compile = compile


@pytest.mark.parametrize(
    "before", [None, blocks_that_fail_backward], ids=["no compiler", "backward"]
)
def test_where_compiling_fails_the_run_says_why_and_goes_on_without(
    write_config, launch, finished, tmp_path, before
):
    command = ("--config", write_config(), "name=fallen", "train.compile=blocks")
    environment = {"PATH": "/nonexistent", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    output = launch(*command, environment=environment, before=before).succeed()
    assert output.count("torch.compile has failed, the run continues without it: ") == 1
    assert "needs a C++ compiler on a CPU" in output
    assert read_losses(tmp_path / "runs/fallen") == read_losses(finished)


def without_graphs() -> None:
    def refuse():
        raise RuntimeError("operation not permitted when stream is capturing")

    torch.cuda.CUDAGraph = refuse
    start.compile_loss, start.obstacle_to_graph = lambda *_: True, lambda *_: ""


def test_a_step_that_cannot_be_recorded_is_named_with_what_to_set(write_config, launch):
    ranks = launch("--config", write_config(), before=without_graphs)
    assert ranks.wait() == [2] and "Traceback" not in ranks.output
    assert "not permitted when stream is capturing; train.cuda_graphs=false" in ranks.output


# activations of (batch, tokens, channels), as set_recompute lists them
KEPT = {"none": 12, "activation": 8, "block": 1}


@pytest.mark.parametrize("gelu", [gelu, short_gelu], ids=["CPU", "GPU"])
@pytest.mark.parametrize("what", KEPT)
def test_a_compiled_block_keeps_for_backward_what_is_listed(what, gelu, monkeypatch):
    monkeypatch.setattr(modeling, "gelu", gelu)
    torch._dynamo.reset()
    model = small_model(num_hidden_layers=1, hidden_size=64).train()
    set_recompute(model, what)
    loss = TokenLoss(model)
    # the compiler's own choice of what is kept
    how = {"backend": "aot_eager_decomp_partition", "fullgraph": True, "dynamic": False}
    for module, name in compiled_parts(loss):
        setattr(module, name, torch.compile(getattr(module, name), **how))
    x = torch.randn(8, 12, 64, dtype=torch.bfloat16, requires_grad=True)
    kept = {}

    def note(tensor):
        if tensor.shape[0] in (8, 8 * 12):  # not the weights
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16),
    ):
        y = model.model.layers[0](x)
    large = [tensor for tensor in kept.values() if tensor.numel() >= x.numel()]
    assert sum(tensor.nbytes for tensor in large) == KEPT[what] * x.nbytes
    y.sum().backward()


@pytest.mark.parametrize("what", ["activation", "block"])
def test_recomputing_changes_no_gradient(what):
    inputs, targets = tokens()[:, :-1], tokens()[:, 1:]
    gradients = {}
    for choice in ("none", what):
        model = small_model().train()
        set_recompute(model, choice)
        # an older torch would not compile evaluation with one
        assert not model.get_input_embeddings()._forward_hooks
        TokenLoss(model)(inputs, targets).sum().backward()
        gradients[choice] = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(
        torch.equal(gradient, gradients["none"][name]) for name, gradient in gradients[what].items()
    )


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_compiled_loss_is_the_cross_entropy(device, dtype):
    logits = 20 * torch.randn(3, 17, 1000, generator=torch.Generator().manual_seed(0))
    logits[0] += 1000  # a sum of exponentials as they are would be infinite
    logits = logits.to(device, dtype).requires_grad_()
    targets = torch.randint(1000, (3, 17), device=device)
    targets[1, 5:], targets[2] = -100, logits[2].argmin(-1)
    weights = torch.rand(3, 17, device=device)
    exact = cross_entropy(
        logits.double().flatten(0, 1), targets.flatten(), reduction="none"
    ).view_as(targets)
    (wanted,) = torch.autograd.grad((exact * weights).sum(), logits)
    found = compiled(token_nats)(logits, targets)
    (gradient,) = torch.autograd.grad((found * weights).sum(), logits)
    assert found.dtype == torch.float32 and (found[1, 5:] == 0).all()
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-6)
    assert gradient.dtype == dtype
    one_rounding = {torch.float32: 1e-5, torch.bfloat16: 2**-8}[dtype]
    torch.testing.assert_close(gradient, wanted, rtol=one_rounding, atol=1e-6)


def test_recomputed_blocks_have_the_gradients_of_kept_ones_wherever_they_are_asked_for():
    """Reentrant checkpoints would refuse torch.autograd.grad."""
    gradients = []
    for recompute in ("none", "block"):
        model = small_model().train()
        set_recompute(model, recompute)
        loss = model(tokens(), labels=tokens()).loss
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    assert all(map(torch.equal, *gradients))
