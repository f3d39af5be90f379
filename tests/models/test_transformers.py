"""At home with transformers: saved code, other dtypes and devices, its Trainer, and LoRA."""

import importlib
import os
import re
import subprocess
import sys
import types

import peft
import pytest
import torch
from models import CODE, MIXINGS, generate, lively_model, padded, small_model, tokens
from runs import ROOT
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

from mixer.data.tokenizer import train_tokenizer
from mixer.models.masked_mixer.configuration import AUTO_MAP, code_files, copy_code

COPIED = (
    "# Copied beside every saved model: "
    "it imports from this package only files that are copied too.\n"
)
SETTINGS = {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True}
LOAD_ELSEWHERE = """
import pathlib, sys, torch
sys.modules["mixer"] = None  # as if it were not installed
from transformers import AutoModel, AutoModelForCausalLM
for path in [*pathlib.Path("saved").iterdir(), *pathlib.Path("with_package").iterdir()]:
    if there := path.parent.name == "with_package":
        sys.modules.pop("mixer", None)
    model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    ids, mask, logits, written = torch.load(path / "expected.pt")
    body = AutoModel.from_pretrained(path, trust_remote_code=True)
    hidden = body(ids, attention_mask=mask).last_hidden_state
    for again in (model(ids, attention_mask=mask).logits, model.lm_head(hidden)):
        torch.testing.assert_close(again, logits, rtol=1e-4, atol=1e-5)
    greedy = dict(max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0)
    assert torch.equal(model.generate(ids, attention_mask=mask, **greedy)[:, -8:], written)
    model(ids, labels=ids).loss.backward()
    assert ("mixer.ops" in sys.modules) == there
    model.save_pretrained(pathlib.Path("again", path.name))
"""


def test_modeling_itself_imports_every_other_file_of_the_saved_code(tmp_path):
    """transformers up to 5.9 copies no file of a local model but these, and then cannot load it."""
    copy_code(tmp_path)
    imported = re.findall(r"^from \.(\w+) import", (tmp_path / "modeling.py").read_text(), re.M)
    assert {f"{name}.py" for name in imported} == CODE - {"modeling.py"}


def test_files_that_are_copied_beside_a_model_say_so_and_import_no_others():
    copied = code_files()
    files = (ROOT / "mixer").rglob("*.py")
    assert {path for path in files if path.read_text().startswith(COPIED)} == set(copied)
    modules = {path.stem for path in copied}
    for path in copied:
        imported = re.findall(r"^ *from (?:mixer\.\w+)?\.(\w+) import", path.read_text(), re.M)
        assert set(imported) <= modules, path


def test_the_saved_code_loads_where_the_package_is_absent_or_not_imported(tmp_path):
    models = {name: lively_model(**mixing) for name, mixing in MIXINGS.items()}
    directories = {tmp_path / "saved" / name: model for name, model in models.items()}
    directories[tmp_path / "with_package" / "there"] = models["gate-heads"]
    ids, mask = padded("left")
    for directory, model in directories.items():
        model.save_pretrained(directory)
        logits = model(ids, attention_mask=mask).logits.detach()
        expected = (ids, mask, logits, generate(model, ids, attention_mask=mask))
        torch.save(expected, directory / "expected.pt")
    environment = {"HF_MODULES_CACHE": str(tmp_path / "modules"), "PYTHONPATH": str(ROOT)}
    process = subprocess.run(
        [sys.executable, "-c", LOAD_ELSEWHERE],
        cwd=tmp_path,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    for directory, model in directories.items():
        written = tmp_path / "again" / directory.name
        assert {path.name for path in written.iterdir()} >= CODE
        # with the package imported: its own class
        again = AutoModelForCausalLM.from_pretrained(written)
        assert type(again) is type(model) and again.config.auto_map == AUTO_MAP
        torch.testing.assert_close(again(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        ({"mixer.ops": None}, None),  # not installed
        ({"mixer": None, "mixer.ops": None}, None),
        ({"mixer.ops": types.ModuleType("mixer.ops")}, "cannot import name 'keyed_conv'"),
        ({"mixer.ops.triangular": None}, "mixer.ops.triangular"),
    ],
)
def test_a_package_that_is_there_and_cannot_be_imported_is_an_error(
    broken, problem, monkeypatch, tmp_path
):
    """And not plain PyTorch without a word, at a fraction of the speed."""
    copy_code(tmp_path / "beside_a_model")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ["mixer.ops", *(n for n in sys.modules if n.startswith("beside_a_model"))]:
        monkeypatch.delitem(sys.modules, name)
    for name, module in broken.items():
        monkeypatch.setitem(sys.modules, name, module)
    if problem:
        with pytest.raises(ImportError, match=problem):
            importlib.import_module("beside_a_model.convolution")
    else:
        layers = importlib.import_module("beside_a_model.convolution")
        assert layers.triangular_conv.__module__ == "beside_a_model.plain"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_loading_in_half_precision(dtype, tmp_path):
    model = small_model(num_mixer_heads=2)
    model.save_pretrained(tmp_path)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert {parameter.dtype for parameter in half.parameters()} == {dtype}
    logits = half(tokens()).logits.float()
    torch.testing.assert_close(logits, model(tokens()).logits, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("mixing", ["expansion", "keyed-parts", "rows"])
def test_a_device_map_spreads_the_blocks(tmp_path, mixing):
    model = lively_model(**MIXINGS[mixing])
    ids = tokens(batch=2, length=4)
    model.save_pretrained(tmp_path / "model", max_shard_size="5KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    device_map = {
        "model.embed_tokens": "cpu",
        "model.suffix_match": "cpu",
        "model.layers.0": "cpu",
        "model.layers.1": "disk",
        "model.norm": "cpu",
        "lm_head": "disk",
    }
    spread = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offload"
    )
    torch.testing.assert_close(spread(ids).logits, model(ids).logits)
    assert torch.equal(generate(spread, ids), generate(model, ids))
    assert spread.model.layers[1].mlp.up_proj.weight.device.type == "meta"


def test_gradient_checkpointing_has_the_same_gradients_and_no_cache():
    model = lively_model().train()
    ids = tokens(batch=2, length=6)
    expected = generate(model, ids)
    gradients = []
    calls = []
    for layer in model.model.layers:
        layer.mixing.register_forward_hook(lambda *_: calls.append(1))
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        calls.clear()
        output = model(ids, labels=ids, use_cache=True)
        gradients.append(torch.autograd.grad(output.loss, tuple(model.parameters())))
        assert len(calls) == (4 if checkpointing else 2)  # blocks are computed again
        assert (output.past_key_values is None) == checkpointing
    torch.testing.assert_close(*gradients)
    # as in the middle of training, where nothing is computed again
    assert torch.equal(generate(model, ids), expected)


def test_transformers_trainer_trains_it_and_saves_what_loads(tmp_path):
    tokenizer = train_tokenizer(["def read(self, size):", "def write(self, text):"] * 4, 300)
    tokenizer.padding_side = "left"
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    texts = ["def read(self, size):", "def write(self, text): return", "def read", "self"] * 6
    rows = [{"input_ids": tokenizer(text).input_ids} for text in texts]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=30,
        learning_rate=1e-2,
        gradient_checkpointing=True,
        **SETTINGS,
    )
    trainer = Trainer(
        small_model(vocab_size=len(tokenizer), max_position_embeddings=32),
        arguments,
        train_dataset=rows,
        eval_dataset=rows[:4],
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before / 2
    trainer.save_model()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded.state_dict(), trainer.model.state_dict(), rtol=0, atol=0)


LENGTHS = (2, 3, 1, 11, 12, 7)


def padded_row(number: int, side: str) -> dict[str, torch.Tensor]:
    """A text of LENGTHS[number] tokens; `mixed` pads every other one on the left, `inside` on both
    sides of its first token. The last text has a prompt before it that is not scored.
    """
    text = tokens()[number % 3][: LENGTHS[number]]
    width = 12 if number > 2 else 4
    left = {"left": 1, "right": 0, "mixed": number % 2, "inside": 0.5}[side]
    before = int(left * (width - len(text)))
    columns = torch.arange(before, before + len(text))
    if side == "inside":
        columns[0] = 0
    row = {
        "input_ids": torch.zeros(width, dtype=torch.int64),
        "labels": torch.full((width,), -100),
        "attention_mask": torch.zeros(width, dtype=torch.int64),
    }
    row["input_ids"][columns] = text
    row["labels"][columns] = text
    row["attention_mask"][columns] = 1
    if number == 5:
        row["labels"][columns[:4]] = -100
    return row


@pytest.mark.parametrize("side", ["left", "left-lora", "right", "mixed", "inside"])
def test_a_step_of_the_trainer_is_the_mean_over_its_tokens_however_texts_are_padded(side, tmp_path):
    """In micro-batches of different lengths, with SGD at a rate of 1: a step is the gradient."""
    side, _, adapter = side.partition("-")
    model = lively_model(max_position_embeddings=12)
    rows = [padded_row(number, side) for number in range(6)]
    texts = [
        (row["input_ids"][row["attention_mask"] == 1], row["labels"][row["attention_mask"] == 1])
        for row in rows
    ]
    if adapter:
        linear = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, linear)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    losses = [
        functional.cross_entropy(model(ids[None]).logits[0, :-1], labels[1:], reduction="sum")
        for ids, labels in texts
    ]
    scored = [(labels[1:] != -100).sum() for _, labels in texts]
    gradient = torch.autograd.grad(sum(losses) / sum(scored), trained)
    expected = [weight.detach() - change for weight, change in zip(trained, gradient, strict=True)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=1,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=6,
        max_grad_norm=0,
        learning_rate=1,
        lr_scheduler_type="constant",
        optim="sgd",
        **SETTINGS,
    )
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[3:])
    mean = (sum(losses[3:]) / sum(scored[3:])).item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(mean)
    trainer.train()
    torch.testing.assert_close(trained, expected)


def test_label_smoothing_of_the_trainer_is_that_of_the_next_token(tmp_path):
    model = small_model()
    ids = tokens()
    arguments = TrainingArguments(output_dir=str(tmp_path), label_smoothing_factor=0.1, **SETTINGS)
    trainer = Trainer(model, arguments)
    loss = trainer.compute_loss(model, {"input_ids": ids, "labels": ids})
    logits = model(ids).logits[:, :-1].flatten(0, 1)
    targets = ids[:, 1:].flatten()
    expected = functional.cross_entropy(logits, targets, label_smoothing=0.1)
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("mixing", ["projected", "gate-heads", "keyed"])
def test_quantizing_reaches_all_linear_layers(mixing):
    """Tools replace layers of the very type nn.Linear."""
    model = lively_model(**MIXINGS[mixing])
    ids = tokens()
    types = {type(layer) for layer in model.modules() if isinstance(layer, torch.nn.Linear)}
    assert types == {torch.nn.Linear}
    quantized = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})
    assert not [layer for layer in quantized.modules() if type(layer) is torch.nn.Linear]
    error = quantized(ids).logits - model(ids).logits
    assert 0 < error.norm() < 0.1 * model(ids).logits.norm()


def test_lora_on_the_linear_layers(tmp_path):
    model = lively_model(num_mixer_heads=2)
    ids, mask = padded("left")
    base = model(ids, attention_mask=mask).logits
    linear = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, linear)
    names = [name.split(".lora_A")[0] for name, _ in adapted.named_parameters() if "lora_A" in name]
    layers = {name.rpartition(".")[2] for name in names}
    assert layers == {"in_proj", "out_proj", "up_proj", "down_proj"}
    torch.testing.assert_close(adapted(ids, attention_mask=mask).logits, base)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:  # zero at the start, where an adapter changes nothing
            torch.nn.init.normal_(parameter, std=0.1)
    expected = adapted(ids, attention_mask=mask).logits
    assert not torch.allclose(expected, base)
    written = generate(adapted, ids, attention_mask=mask)
    merged = adapted.merge_and_unload()
    assert torch.equal(generate(merged, ids, attention_mask=mask), written)
    merged.save_pretrained(tmp_path)
    for again in (merged, AutoModelForCausalLM.from_pretrained(tmp_path)):
        logits = again(ids, attention_mask=mask).logits
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_the_code_of_models_saved_by_earlier_versions_finds_its_operators():
    """It has them from this package where that is installed, and turns keys like this."""
    from mixer.ops import keyed_conv, mix_row, triangular_conv, turn

    key = torch.randn(2, 3, 8)
    turned = turn(key, 2, norm=True, rotation=None, gain=None, backend="auto").view(2, 3, 2, 4)
    assert turned.square().mean(-1).allclose(torch.ones(()), rtol=1e-3)
    assert all(map(callable, (keyed_conv, mix_row, triangular_conv)))
