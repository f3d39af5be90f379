"""At home with transformers: saved code, other dtypes and devices, its Trainer, LoRA, and a
directory for the hub.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import peft
import pytest
import torch
from huggingface_hub import ModelCard
from launching import run_python
from models import MIXINGS, generate, lively_model, padded, small_model, tokens
from runs import ROOT
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    pipeline,
)

from mixer.checkpoints.format import damage
from mixer.checkpoints.pretrained import load_masked_mixer
from mixer.common.errors import UserError
from mixer.convert import convert, convert_back
from mixer.data.tokenizer import train_tokenizer
from mixer.evaluation.evaluate import EvalOptions, evaluate_checkpoint
from mixer.export import export
from mixer.export import main as export_command
from mixer.generate import continuations
from mixer.models.carried_code import CODE
from mixer.models.masked_mixer.configuration import AUTO_MAP
from mixer.models.masked_mixer.modeling import logger

LOAD_ELSEWHERE = """
import sys, torch
if {hidden}: sys.modules["mixer"] = None  # as if it were not installed
from transformers import AutoModel, AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("{model}", trust_remote_code=True)
assert type(model).__module__.startswith("transformers_modules."), type(model)
saved = torch.load("{expected}")
ids, mask = saved["ids"], saved["mask"]
body = AutoModel.from_pretrained("{model}", trust_remote_code=True)
hidden = body(ids, attention_mask=mask).last_hidden_state
for logits in (model(ids, attention_mask=mask).logits, model.lm_head(hidden)):
    torch.testing.assert_close(logits, saved["logits"], rtol=1e-4, atol=1e-5)
how = dict(max_new_tokens=8, do_sample=False, pad_token_id=0)
written = model.generate(ids, attention_mask=mask, **how)
assert torch.equal(written, saved["written"])
model(ids, labels=ids).loss.backward()
kernels = "mixer.ops" in sys.modules
assert kernels != {hidden}
model.save_pretrained("{again}")
"""


def test_modeling_itself_imports_every_other_file_of_the_saved_code():
    """transformers up to 5.9 copies no file of a local model but these, and then cannot load it."""
    code = next(path for path in CODE if path.name == "modeling.py").read_text()
    imported = set(re.findall(r"^from \.(\w+) import", code, re.MULTILINE))
    assert imported == {path.stem for path in CODE} - {"modeling"}


@pytest.mark.parametrize(
    ("hidden", "mixing"),
    [(True, "projected-expansion"), (False, "gate-heads")],
    ids=["package-absent", "package-there"],
)
def test_the_saved_code_loads_where_the_package_is_not_imported(hidden, mixing, tmp_path):
    variant = MIXINGS[mixing] | {"mixer_kernel_size": 3}
    model, (ids, mask) = lively_model(**variant), padded("left")
    model.save_pretrained(tmp_path / "model")
    torch.save(
        {
            "ids": ids,
            "mask": mask,
            "logits": model(ids, attention_mask=mask).logits.detach(),
            "written": model.generate(
                ids, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0
            ),
        },
        tmp_path / "expected.pt",
    )
    paths = {
        "model": tmp_path / "model",
        "expected": tmp_path / "expected.pt",
        "again": tmp_path / "again",
    }
    root = "" if hidden else str(Path(__file__).parents[2])
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules"), "PYTHONPATH": root}
    code = LOAD_ELSEWHERE.format(hidden=hidden, **paths)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "again").iterdir()} >= {path.name for path in CODE}
    # with the package imported: its own class
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert type(again) is type(model) and again.config.auto_map == AUTO_MAP
    torch.testing.assert_close(again(ids).logits, model(ids).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_loading_in_half_precision(dtype, tmp_path):
    model = small_model(num_mixer_heads=2)
    model.save_pretrained(tmp_path)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert {parameter.dtype for parameter in half.parameters()} == {dtype}
    torch.testing.assert_close(
        half(tokens()).logits.float(), model(tokens()).logits, rtol=5e-2, atol=5e-2
    )


def test_a_device_map_spreads_the_blocks(tmp_path):
    model, ids = lively_model(mixer_expansion=True), tokens(batch=2, length=4)
    model.save_pretrained(tmp_path / "model", max_shard_size="5KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    parts = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    parts |= {"model.norm": "cpu", "lm_head": "disk"}
    for device_map in ("auto", parts):
        spread = AutoModelForCausalLM.from_pretrained(
            tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offload"
        )
        torch.testing.assert_close(spread(ids).logits, model(ids).logits)
        written = [
            m.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
            for m in (spread, model)
        ]
        assert torch.equal(*written)
    assert spread.model.layers[1].mixing.conv.weight.device.type == "meta"


def test_gradient_checkpointing_gives_the_same_gradients():
    model, ids = small_model(num_mixer_heads=2).train(), tokens()
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        with torch.profiler.profile() as profile:
            model(ids, labels=ids).loss.backward()
        counts = {event.key: event.count for event in profile.key_averages()}
        # the blocks are computed once more
        assert counts["token_mixing"] == (4 if checkpointing else 2)
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_gradient_checkpointing_while_training_goes_without_a_cache(monkeypatch):
    model, ids = lively_model().train(), tokens(batch=2, length=6)
    expected, filled = generate(model, ids), model(ids, use_cache=True).past_key_values
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        said = []
        monkeypatch.setattr(logger, "warning_once", said.append)
        output = model(ids, labels=ids, use_cache=True)
        assert (
            (output.past_key_values is None)
            == checkpointing
            == ("Setting `use_cache=False`" in "".join(said))
        )
        output.loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
    # as in the middle of training, where nothing is computed again
    assert torch.equal(generate(model, ids), expected)
    with pytest.raises(
        ValueError, match="past_key_values holds tokens, which gradient checkpointing cannot follow"
    ):
        model(ids, past_key_values=filled)


@pytest.mark.parametrize("side", ["left", "right"])
def test_transformers_trainer_trains_saves_and_resumes(side, tmp_path):
    tokenizer = train_tokenizer(["def read(self, size):", "def write(self, text):"] * 4, 300)
    tokenizer.padding_side = side
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    texts = ["def read(self, size):", "def write(self, text): return", "def read", "self"] * 8
    rows = [{"input_ids": tokenizer(text).input_ids} for text in texts]
    model = small_model(vocab_size=len(tokenizer), max_position_embeddings=32)

    def trainer(steps: int) -> Trainer:
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=steps,
            per_device_train_batch_size=8,
            learning_rate=1e-2,
            save_steps=10,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            gradient_checkpointing=True,
        )
        collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
        return Trainer(
            model, arguments, train_dataset=rows, eval_dataset=rows[:4], data_collator=collator
        )

    first = trainer(20)
    before = first.evaluate()["eval_loss"]
    first.train()
    after = trainer(30)
    after.train(resume_from_checkpoint=True)
    assert after.state.global_step == 30 and after.evaluate()["eval_loss"] < before / 2
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-30")
    torch.testing.assert_close(
        loaded(torch.tensor([[1, 2, 3]])).logits, model.eval()(torch.tensor([[1, 2, 3]])).logits
    )


def test_label_smoothing_of_the_trainer_is_that_of_the_next_token(tmp_path):
    model, ids = small_model(), tokens()
    arguments = TrainingArguments(
        output_dir=str(tmp_path), label_smoothing_factor=0.1, report_to=[], use_cpu=True
    )
    loss = Trainer(model, arguments).compute_loss(model, {"input_ids": ids, "labels": ids})
    logits, targets = model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    torch.testing.assert_close(
        loss, torch.nn.functional.cross_entropy(logits, targets, label_smoothing=0.1)
    )


def test_lora_on_the_linear_layers(tmp_path):
    model, (ids, mask) = lively_model(num_mixer_heads=2), padded("left")
    base = model(ids, attention_mask=mask).logits
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    places = {
        name.split(".lora_A")[0].rpartition(".")[2]
        for name, _ in adapted.named_parameters()
        if "lora_A" in name
    }
    assert places == {"in_proj", "out_proj", "up_proj", "down_proj"}
    torch.testing.assert_close(adapted(ids, attention_mask=mask).logits, base)
    optimizer = torch.optim.AdamW((p for p in adapted.parameters() if p.requires_grad), lr=1e-2)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = adapted(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    adapted.eval()
    expected = adapted(ids, attention_mask=mask).logits
    how = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    written = adapted.generate(input_ids=ids, **how)
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(
        merged(ids, attention_mask=mask).logits, expected, rtol=1e-4, atol=1e-4
    )
    assert torch.equal(merged.generate(ids, **how), written)
    merged.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(
        loaded(ids, attention_mask=mask).logits, expected, rtol=1e-4, atol=1e-4
    )


def evaluate(directory: Path, *checkpoints: Path) -> list[dict]:
    """What eval.py reports of the checkpoints on a text in `directory`, where it also writes what
    it prints.
    """
    (directory / "book.txt").write_text("def read(self, size): return self.text[:size]\n" * 9)
    how = ["--text", directory / "book.txt", "--stride", 8, "--device", "cpu"]
    done = run_python(
        ROOT / "eval.py", "--checkpoint", *checkpoints, *how, output=directory / "printed.txt"
    )
    assert done.returncode == 0, done.stdout
    return json.loads(
        (checkpoints[0].parent / f"eval-{checkpoints[0].name}" / "report.json").read_text()
    )


def test_a_checkpoint_is_exported_with_a_card_of_its_run(finished, tmp_path, monkeypatch):
    last, given = finished / "step-12", tmp_path / "given"
    assert {path.name for path in last.iterdir()} >= {path.name for path in CODE}
    options = ["--output", str(given), "--license", "apache-2.0", "--dtype", "bf16"]
    monkeypatch.setattr("sys.argv", ["export", str(last), *options])
    export_command()
    text = (given / "README.md").read_text()
    card = ModelCard(text)
    assert card.data.license == "apache-2.0" and card.data.library_name == "transformers"
    assert (
        "| tokens seen | 3,072 |" in text
        and "| validation bits per byte | " in text
        and "batch_size: 8" in text
    )
    assert str(tmp_path.parent) not in text and "trainer_state" not in os.listdir(given)
    model = AutoModelForCausalLM.from_pretrained(given)
    assert model.dtype == torch.bfloat16 and model.config.auto_map == AUTO_MAP
    with pytest.raises(UserError, match="exists already"):
        export(last, given, "apache-2.0")
    (example,) = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
    code = "import sys\nsys.modules['mixer'] = None  # as if it were not installed\n"
    code += f"{example}assert len(tokenizer) == 400"
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules"), "PYTHONPATH": ""}
    how = {
        "cwd": tmp_path,
        "env": environment,
        "stdin": subprocess.DEVNULL,
        "capture_output": True,
        "text": True,
    }
    done = subprocess.run([sys.executable, "-c", code], **how)
    assert done.returncode == 0, done.stderr
    assert "[y/N]" not in done.stdout


def test_the_saved_tokenizer_knows_the_context(finished, tmp_path):
    last, long = finished / "step-12", "def read(self, size): return self.text[:size]\n" * 9
    convert_back(last, tmp_path / "reference.safetensors", "mixerhead")
    convert(tmp_path / "reference.safetensors", tmp_path / "converted", str(last))
    export(last, tmp_path / "exported", "mit")
    for directory in (last, tmp_path / "converted", tmp_path / "exported"):
        tokenizer = AutoTokenizer.from_pretrained(directory)
        assert (
            len(tokenizer(long).input_ids) > len(tokenizer(long, truncation=True).input_ids) == 32
        )
    writer = pipeline("text-generation", model=str(last))
    (text,) = writer(
        long, max_new_tokens=8, do_sample=False, handle_long_generation="hole", return_tensors=True
    )
    # the prompt's end, as much as leaves room for the new tokens
    assert len(text["generated_token_ids"]) == 32


def test_an_export_into_the_directory_one_stands_in_has_its_name(finished, tmp_path, monkeypatch):
    (tmp_path / "my-mixer").mkdir()
    monkeypatch.chdir(tmp_path / "my-mixer")
    export(finished / "step-12", Path("."), "apache-2.0")
    assert "# my-mixer\n" in Path("README.md").read_text()


def test_the_card_has_what_was_reported_of_these_very_weights(finished, tmp_path, capsys):
    last, earlier = finished / "step-12", finished / "step-8"

    def card(checkpoint: Path, name: str) -> str:
        export(checkpoint, tmp_path / name, "apache-2.0")
        return (tmp_path / name / "README.md").read_text()

    assert "## Evaluation" not in card(last, "unknown")
    assert f"no evaluation; python eval.py --checkpoint {last}" in capsys.readouterr().out
    results = evaluate(tmp_path, earlier, last)
    rows = [
        f"| book.txt | {r['tokens_scored']} | {r['loss']:.4f} | {r['token_perplexity']:.4f} |"
        for r in results
    ]
    for checkpoint, (own, other) in ((earlier, rows), (last, rows[::-1])):
        text = card(checkpoint, checkpoint.name)
        assert own in text and other not in text
        assert "windows of at most 32, stride 8" in text and str(tmp_path.parent) not in text
        assert damage(checkpoint) is None
    shutil.rmtree(earlier)  # as if another run had come in its place
    shutil.copytree(last, earlier)
    text = card(earlier, "replaced")
    assert rows[1] in text and rows[0] not in text
    report = finished / "eval-step-8" / "report.json"
    report.write_text(report.read_text()[:100])
    with pytest.raises(
        UserError,
        match="report.json is no report that eval.py wrote .*: evaluate again, or delete it",
    ):
        card(last, "damaged")
    report.unlink()
    whole = (finished / "config.yaml").read_text()
    (finished / "config.yaml").write_text(whole + "{")
    with pytest.raises(UserError, match="config.yaml cannot be read as YAML"):
        card(last, "damaged")
    for section in ("data: nothing\n", "data:\n", "model: [1]\n"):
        (finished / "config.yaml").write_text(section)
        with pytest.raises(
            UserError, match="config.yaml: its section (data|model) is .*; it must hold keys"
        ):
            card(last, "damaged")
    (finished / "config.yaml").write_text(whole)
    assert not (tmp_path / "damaged").exists()


def test_a_changed_byte_of_a_checkpoint_is_refused(finished, tmp_path, monkeypatch):
    monkeypatch.setenv("MIXER_CACHE", str(tmp_path / "cache"))
    checkpoint = finished / "step-12"
    uses = (
        lambda: evaluate_checkpoint(EvalOptions(str(checkpoint), device="cpu")),
        lambda: continuations(str(checkpoint), ["def"], 2, 0.0, 0),
        lambda: load_masked_mixer(checkpoint, ""),
        lambda: export(checkpoint, tmp_path / "exported", "mit"),
    )
    load_masked_mixer(checkpoint, "")  # so that its files are known to be good
    for name in ("model.safetensors", "config.json"):
        content = (checkpoint / name).read_bytes()
        changed = content[:-1] + bytes([content[-1] ^ 8])
        if name == "config.json":  # which stays JSON
            changed = content.replace(b'"hidden_size": 32', b'"hidden_size": 64')
        (checkpoint / name).write_bytes(changed)
        for use in uses:
            with pytest.raises(UserError, match=f"is damaged: {name} is not what .*: copy it"):
                use()
        (checkpoint / name).write_bytes(content)
    assert not (tmp_path / "exported").exists()
    (checkpoint / "trainer_state" / "optimizer-1-of-1.safetensors").unlink()  # nobody loads it
    load_masked_mixer(checkpoint, "")


def test_weights_that_are_not_finite_are_refused(finished, tmp_path):
    checkpoint = shutil.copytree(finished / "step-12", tmp_path / "changed")
    shutil.rmtree(checkpoint / "trainer_state")  # with what its files were
    weights = load_file(checkpoint / "model.safetensors")

    def export_with(value: float, dtype: str) -> None:
        weights["lm_head.weight"][3, 5] = value
        save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
        export(checkpoint, tmp_path / dtype, "mit", dtype)

    for value in (float("nan"), float("-inf")):
        with pytest.raises(UserError, match="not finite .* in lm_head.weight: its training div"):
            export_with(value, "fp32")
    with pytest.raises(UserError, match="in lm_head.weight: fp16 does not reach that far: give"):
        export_with(1e6, "fp16")
    assert not (tmp_path / "fp32").exists() and not (tmp_path / "fp16").exists()
    weights["lm_head.weight"] = weights["lm_head.weight"].sign() * 3e38  # finite; logits are not
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    for temperature in (0.0, 1.0):
        with pytest.raises(UserError, match="logits after [0-9]+ tokens are not finite"):
            continuations(str(checkpoint), ["def read"], 2, temperature, 0)
    export_with(1e6, "fp32")


def test_a_transformer_gets_no_mixers_card(tmp_path):
    tokenizer = train_tokenizer(["def read(self, size):"] * 4, 300)
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    for part in (tokenizer, LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))):
        part.save_pretrained(tmp_path / "llama")
    with pytest.raises(
        UserError,
        match="is a llama, and the model card .* is a masked mixer's: give one of a masked mixer",
    ):
        export(tmp_path / "llama", tmp_path / "given", "apache-2.0")
    assert not (tmp_path / "given").exists()
