"""train.init_from: a new run starts from the weights of a checkpoint or of an exported model."""

import json
import re
import shutil

import pytest
from runs import read_lines, read_losses, refusal
from safetensors.torch import load_file
from transformers import (
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from mixer.checkpoints.export import export
from mixer.common.errors import UserError
from mixer.models.architecture import model_config
from mixer.training.config import load_config
from mixer.training.loop import train

MIXER = {"mixing_weight": "lags", "num_mixer_heads": 2, "mixing_init": "shift"}
MIXER |= {"mixer_key_size": 4, "layer_norm_eps": 1e-6, "intermediate_size": 48}


@pytest.mark.parametrize("exported", [False, True], ids=["checkpoint", "exported"])
def test_a_run_starts_from_given_weights_and_a_resume_needs_them_no_more(
    exported, write_config, finished, tmp_path
):
    source = finished / "step-12"
    if exported:
        source = tmp_path / "model"
        export(finished / "step-12", source, "apache-2.0", "fp32")
    how = [f"train.init_from={source}", "name=tuned", "optim.name=muon", "optim.lr=0"]
    if exported:  # as on a text of one's own
        data = shutil.copytree(source, tmp_path / "tokenizer")
        how += [f"data.tokenizer={data}", f"data.directory={tmp_path / 'data'}"]

    def tune(*overrides: str) -> None:
        train(load_config(str(write_config()), [*how, *overrides]))

    tune("train.steps=4")
    weights = load_file(source / "model.safetensors")
    written = load_file(tmp_path / "runs/tuned/step-4/model.safetensors")
    assert all((written[name] == weight).all() for name, weight in weights.items())
    ends = [line for line in read_lines(finished) if "validation_loss" in line]
    lines = read_lines(tmp_path / "runs/tuned")
    starts = [line for line in lines if "validation_loss" in line]
    assert starts[0]["step"] == starts[0]["tokens"] == 0
    assert starts[0]["validation_loss"] == pytest.approx(ends[-1]["validation_loss"])
    trainer = tmp_path / "runs/tuned/step-4/trainer_state/trainer.json"
    assert json.loads(trainer.read_text())["samples"] == 4 * 8  # the data from its beginning
    assert f"init_from: {source}" in (tmp_path / "runs/tuned/config.yaml").read_text()
    shutil.rmtree(source)
    tune("train.steps=6")
    assert list(read_losses(tmp_path / "runs/tuned")) == [*range(1, 7)]


def test_a_run_starts_from_a_llama_of_the_hub(write_config, finished, tmp_path):
    """Its configuration names tokens of its tokenizer, which change no weight."""
    source, tokenizer = tmp_path / "llama", AutoTokenizer.from_pretrained(finished / "step-12")
    tokenizer.save_pretrained(source)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "max_position_embeddings": 16}
    about = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    about |= {"bos_token_id": 1, "pad_token_id": 2, "initializer_range": 0.006}
    LlamaForCausalLM(LlamaConfig(**sizes, **about)).save_pretrained(source)
    how = [f"model.{name}={size}" for name, size in sizes.items()]
    how += ["model.architecture=llama", "model.layer_norm_eps=1e-6", "train.steps=1", "optim.lr=0"]
    how += [f"train.init_from={source}", "name=tuned", "optim.warmup_steps=0"]
    train(load_config(str(write_config()), how))
    weights = load_file(source / "model.safetensors")
    written = load_file(tmp_path / "runs/tuned/step-1/model.safetensors")
    assert all((written[name] == weight).all() for name, weight in weights.items())


@pytest.mark.parametrize("kind", ["GPT-2", "grouped queries", "other wavelengths"])
def test_a_run_starts_from_models_that_no_options_describe(
    kind, write_config, finished, tmp_path, capsys
):
    """GPT-2 has another name for its context, and dropout, which training leaves out."""
    tokenizer = AutoTokenizer.from_pretrained(finished / "step-12")
    ids = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    if kind == "GPT-2":
        sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 16}
        model = GPT2LMHeadModel(GPT2Config(**sizes, **ids))
    else:
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
        sizes["num_attention_heads"] = 2
        other = {"num_key_value_heads": 1} if kind == "grouped queries" else {"rope_theta": 1e5}
        model = LlamaForCausalLM(LlamaConfig(max_position_embeddings=16, **sizes, **other, **ids))
    source = tmp_path / "source"
    model.save_pretrained(source)
    tokenizer.save_pretrained(source)
    start = [f"train.init_from={source}", "name=tuned", "optim.lr=0", "optim.warmup_steps=0"]
    start += [f"data.tokenizer={source}", f"data.directory={tmp_path / 'data'}"]
    config = str(write_config(model={}))
    train(load_config(config, [*start, "train.steps=1"]))
    weights = load_file(source / "model.safetensors")
    trained = train(load_config(config, [*start, "train.steps=2"])).state_dict()
    assert all((trained[name] == weight).all() for name, weight in weights.items())
    assert trained.keys() - weights.keys() <= {"lm_head.weight"}  # tied
    capsys.readouterr()
    for steps in (2, 3):  # finished, and going on
        train(load_config(config, [*start, f"train.steps={steps}"]))
    assert "model.config" not in capsys.readouterr().out


@pytest.mark.parametrize("model", [{}, MIXER, {"architecture": "qwen3"}], ids=str)
def test_the_options_of_the_model_come_from_the_checkpoint_by_themselves(
    model, write_config, tmp_path, capsys
):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 32}
    train(load_config(str(write_config(model=sizes | model)), ["name=first", "train.steps=2"]))
    source = tmp_path / "runs/first/step-2"
    config, start = str(write_config(model={})), f"train.init_from={source}"
    run = load_config(config, [start, "name=tuned", "train.steps=2"])
    first = load_config(str(source.parent / "config.yaml"), [])
    found, expected = (model_config(each.model, 400, 0).to_dict() for each in (run, first))
    assert found == expected
    train(run)
    assert load_config(config, [start, "model.hidden_size=64"]).model.hidden_size == 64

    # A run that goes on has them from its own checkpoint, and begins from no others.
    source.rename(tmp_path / "moved")
    again = ["name=tuned", "train.steps=3"]
    other = refusal(config, *again, f"train.init_from={tmp_path / 'moved'}")
    assert f"the run has begun from {source}: set train.init_from={source}, or choose" in other
    none = refusal(tmp_path / "runs/tuned/config.yaml", *again, "train.init_from=")
    assert f"train.init_from = '', but the run has begun from {source}" in none
    capsys.readouterr()
    train(load_config(config, [start, *again]))
    assert "init_from" not in capsys.readouterr().out


def test_a_run_that_began_without_weights_takes_none_on_a_resume(write_config, finished):
    said = refusal(write_config(), f"train.init_from={finished / 'step-8'}", "train.steps=13")
    assert "but the run has begun without it: leave it out, or choose another name" in said


def test_weights_that_are_not_there_are_refused_with_the_options(write_config, finished):
    for given, said in (
        (finished / "step-9", "there is no such directory; give .*best or .*step-8"),
        (finished, "is a run, not a checkpoint: give "),
    ):
        with pytest.raises(UserError, match=f"^train.init_from: .*{said}"):
            load_config(str(write_config(model={})), [f"train.init_from={given}", "name=tuned"])


def test_what_cannot_fit_is_refused_before_the_text_is_read(write_config, finished, tmp_path):
    data = f"data.directory={tmp_path / 'data'}"
    start = [f"train.init_from={finished / 'step-12'}", "name=tuned", data, "data.path=/none"]
    other = tmp_path / "other"
    shutil.copytree(finished / "step-12", other)
    swap_merges(other)
    for overrides, problem in (
        (["model.hidden_size=64"], "hidden_size is 32 in the checkpoint, now 64"),
        (["model.architecture=llama"], "model_type is 'masked_mixer' in the checkpoint, now 'llam"),
        (["data.vocab_size=300"], "vocab_size is 400 in the checkpoint, now 300"),
        ([f"data.tokenizer={other}"], "has another tokenizer than the data; set data.tokenizer="),
        (["data.tokenizer=/none"], "tokenizer '/none' cannot be read"),
        (["checkpoint.resume=/none"], "the checkpoint cannot be used ./none: there is no such"),
        ([f"checkpoint.resume={finished}"], "is a run, not a checkpoint: give"),
    ):
        said = refusal(write_config(), *start, "data.source=text", *overrides)
        assert re.search(problem, said)
    assert not (tmp_path / "data").exists() and not (tmp_path / "runs/tuned").exists()


def swap_merges(source) -> None:
    """Another tokenizer with as many ids."""
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    merges = tokenizer["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))


REFUSED = {
    "width": (None, ["model.hidden_size=64"], "hidden_size is 32 in the checkpoint, now 64"),
    "llama": (None, ["model.architecture=llama"], "model_type is 'masked_mixer' .* now 'llama'"),
    "tokenizer": (swap_merges, [], "has another tokenizer than the data; set data.tokenizer="),
    "absent": (shutil.rmtree, [], "there is no such directory"),
}


@pytest.mark.parametrize(("change", "overrides", "problem"), REFUSED.values(), ids=REFUSED)
def test_weights_that_do_not_fit_are_refused_in_one_line(
    change, overrides, problem, write_config, finished, tmp_path
):
    source = shutil.copytree(finished / "step-12", tmp_path / "source")
    shutil.rmtree(source / "trainer_state")
    if change:
        change(source)
    said = refusal(write_config(), f"train.init_from={source}", "name=tuned", *overrides)
    assert re.match(f"train.init_from: checkpoint .*{problem}", said)
    assert not (tmp_path / "runs/tuned").exists()
