"""Any causal language model of transformers trains, resumes and is compared, by its config.json."""

import json
import math
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from checkpoints import evaluate
from runs import ROOT, assert_same, killed_after, read_lines, read_losses, refusal
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from mixer.common.errors import UserError
from mixer.models.architecture import check_causal, flops_per_token, model_config, new_model
from mixer.models.config import ModelConfig, with_content
from mixer.objectives.retrieval import vector_size
from mixer.training.config import load_config
from mixer.training.loop import train
from mixer.training.optim import OptimConfig, build_optimizer, kinds_of
from mixer.training.passes import obstacle_to_graph

SIZE = {"hidden_size": 32, "num_hidden_layers": 4, "intermediate_size": 48}
SIZE |= {"num_attention_heads": 4, "num_key_value_heads": 2}
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8}
LATENT |= {
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "moe_intermediate_size": 16,
}
LATENT |= {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
FULL_SECOND = {"layer_types": ["linear_attention", "full_attention"] * 2}
BERT_SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
BERT_SIZE |= {"intermediate_size": 48, "is_decoder": True}
SPARSE = {"attention_type": "block_sparse", "block_size": 2, "num_random_blocks": 1}
FILES = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2},  # has names of its own, and dropout
    "lfm2": SIZE | {"layer_types": ["conv", "full_attention"] * 2},
    "gemma3_text": SIZE | {"head_dim": 8, "sliding_window": 4, "sliding_window_pattern": 2},
    "olmo_hybrid": SIZE | FULL_SECOND,
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "mamba2": {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 16}
    | {"state_size": 8, "n_groups": 1, "chunk_size": 16},
    "qwen3_next": SIZE
    | FULL_SECOND
    | {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
    | {"linear_value_head_dim": 8, "shared_expert_intermediate_size": 16},
    # Its encoder's weights are there, and get no gradient.
    "bart": {"d_model": 32, "decoder_layers": 2, "decoder_ffn_dim": 48, "encoder_layers": 1},
    # Its class changes is_decoder, its positions are not trained, and parts get no gradient.
    "marian": {"d_model": 32, "decoder_layers": 2, "decoder_ffn_dim": 48}
    | {"decoder_attention_heads": 4, "scale_embedding": True},
    # Names as its base a part that it does not have.
    "llama4_text": SIZE | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    # Projects the states of its last block to the width of its embeddings.
    "opt": SIZE | {"ffn_dim": 48, "word_embed_proj_dim": 16},
    # Chooses the tokens that attention sees, by a mask.
    "deepseek_v32": SIZE | LATENT | {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 4},
    # Mixtures of experts, which have names and shapes of their own for what these are.
    "deepseek_v3": SIZE | LATENT,
    "aria_text": SIZE | {"moe_num_experts": 4, "moe_topk": 2},
    "gemma4_text": SIZE
    | {"head_dim": 8, "global_head_dim": 8, "num_global_key_value_heads": 2}
    | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 500}
    | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
    | {"moe_intermediate_size": 16, "layer_types": ["full_attention"] * 4},
    "gpt_oss": SIZE
    | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
    | {"layer_types": ["full_attention"] * 4},
    "inkling_text": SIZE
    | {"head_dim": 8, "d_rel": 4, "rel_extent": 8, "moe_intermediate_size": 16}
    | {"n_routed_experts": 8, "num_experts_per_tok": 4, "layer_types": ["hybrid"] * 4},
    "longcat_flash": LATENT
    | {"hidden_size": 32, "ffn_hidden_size": 48, "num_layers": 2, "num_attention_heads": 4}
    | {"head_dim": 8}
    | {"expert_ffn_hidden_size": 16, "moe_topk": 2, "zero_expert_num": 2},
    "hunyuan_v1_moe": SIZE | {"head_dim": 8, "num_experts": 4, "moe_topk": [1, 2, 2, 2]},
    # Its layers with a window have other heads.
    "dots3_note_text": SIZE
    | LATENT
    | {"head_dim": 16, "shared_experts_intermediate_size": 16, "sliding_window": 4}
    | {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 4, "swa_num_attention_heads": 2}
    | {"swa_num_key_value_heads": 2, "swa_q_lora_rank": 8, "swa_kv_lora_rank": 8}
    | {"swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "bert": SIZE,
    "gemma3": {},
    "t5": {},
}
EXAMPLES = sorted((ROOT / "configs/models").glob("*.json"))
AUTO = "model.architecture=auto"


def build(model_type: str, context: int = 64, **values):
    content = {"model_type": model_type} | FILES[model_type] | values
    options = ModelConfig(architecture="auto", config=content, max_position_embeddings=context)
    return new_model(model_config(options, vocab_size=500, eos_token_id=0))


@pytest.fixture
def write_file(tmp_path):
    """A function that writes a model's config.json under a name; returns the overrides for it."""

    def write(model_type: str, name: str = "model", **values) -> list[str]:
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps({"model_type": model_type} | FILES[model_type] | values))
        return [AUTO, f"model.config={file}"]

    return write


@pytest.fixture
def auto_config(write_config, small_run):
    """The small run without sizes of a model, which are in the model's file."""
    sizes = {"max_position_embeddings": small_run["model"]["max_position_embeddings"]}
    return write_config(model=sizes)


@pytest.mark.parametrize(
    "model_type", ["gpt2", "lfm2", "gemma3_text", "mamba2", "qwen3_next", "marian"]
)
def test_it_trains_resumes_to_the_bit_and_is_evaluated(
    model_type, write_file, auto_config, tmp_path
):
    command = [*write_file(model_type), "optim.name=muon", "optim.lr=1e-2"]
    train(load_config(str(auto_config), [*command, "name=whole"]))
    whole = tmp_path / "runs/whole"
    losses = read_losses(whole)
    assert losses[12] < losses[1] - 0.3
    parts = killed_after(whole, 8, "parts")
    # A file of another name that holds the same is no other model.
    again = write_file(model_type, "renamed")
    train(load_config(str(auto_config), [*command, *again, "name=parts"]))
    assert_same(parts, whole, 12)

    saved = AutoModelForCausalLM.from_pretrained(whole / "step-12")
    assert saved.config.model_type == model_type
    assert saved.config.vocab_size == 400 and saved.config.max_position_embeddings == 32
    assert evaluate(whole / "step-12")["loss"] < losses[1]

    changed = write_file(model_type, layer_norm_eps=0.1, rms_norm_eps=0.1, norm_eps=0.1)
    changed += ["name=parts", "train.steps=14"]
    said = refusal(auto_config, *changed)
    assert "is of another model" in said or "layer_norm_eps = 0.1" in said


def test_several_processes_train_a_model_of_which_some_weights_are_unused(
    write_file, auto_config, launch, tmp_path
):
    command = ["--config", auto_config, *write_file("bart"), "train.steps=4"]
    launch(*command, "name=one").succeed()
    launch(*command, "name=two", "train.batch_size=4", processes=2).succeed()
    one, two = (read_losses(tmp_path / "runs" / name) for name in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-5)


# A saved mamba2 has an infinite time_step_limit, which JSON does not have.
@pytest.mark.parametrize("model_type", ["lfm2", "mamba2"])
def test_a_run_from_its_weights_needs_no_file(model_type, write_file, auto_config, tmp_path):
    train(load_config(str(auto_config), [*write_file(model_type), "name=first"]))
    (tmp_path / "model.json").unlink()
    first = tmp_path / "runs/first/step-12"
    onward = [f"train.init_from={first}", "name=second", "train.steps=1", "optim.lr=0"]
    model = train(load_config(str(auto_config), onward))
    weights = AutoModelForCausalLM.from_pretrained(first).state_dict()
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    # as does the configuration that the run has written
    train(load_config(str(tmp_path / "runs/first/config.yaml"), ["train.steps=13"]))


@pytest.mark.parametrize("model_type", ["llama4_text", "opt", "inkling_text"])
def test_it_learns_pairs_and_finds_documents(model_type, write_file, auto_config, tmp_path):
    command = [*write_file(model_type), "train.objective=contrastive", "train.steps=4"]
    train(load_config(str(auto_config), [*command, "model.max_position_embeddings=16"]))
    (tmp_path / "texts/qrels").mkdir(parents=True)
    rows = [{"_id": f"d{n}", "text": f"def read(self, n={n})"} for n in range(3)]
    (tmp_path / "texts/corpus.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "texts/queries.jsonl").write_text(json.dumps(rows[1] | {"_id": "q"}))
    (tmp_path / "texts/qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\nq\td1\t1\n")
    checkpoint = tmp_path / "runs/small/step-4"
    found = evaluate(checkpoint, retrieval=str(tmp_path / "texts"))
    assert (found["documents"], found["mrr_at_10"]) == (3, 1)  # the copy of the query
    pooling = json.loads((checkpoint / "1_Pooling/config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert pooling["word_embedding_dimension"] == vector_size(model)


@pytest.mark.parametrize(
    ("model_type", "attention"),
    [("lfm2", "causal"), ("gemma3_text", "sdpa"), ("deepseek_v32", "sdpa"), ("mamba2", "eager")],
)
def test_its_logits_are_those_of_transformers_and_windows_keep_their_masks(model_type, attention):
    model = build(model_type)
    ids = torch.randint(500, (2, 33))
    assert model.config._attn_implementation == attention
    theirs = AutoModelForCausalLM.from_config(model.config, attn_implementation="eager")
    theirs.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(ids, use_cache=False).logits, theirs(ids).logits)


def names_of(model, parameters) -> set[str]:
    """Inside of a block, and of what is outside the whole name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {re.sub(r".*\.(layers|h)\.\d+\.", "", names[parameter]) for parameter in parameters}


@pytest.mark.parametrize(
    ("model_type", "own"),
    [
        ("lfm2", {"conv.conv.weight"}),
        ("mamba", {"mixer.A_log", "mixer.D", "mixer.dt_proj.bias", "mixer.conv1d.weight"}),
        ("mamba2", {"mixer.A_log", "mixer.D", "mixer.dt_bias", "mixer.conv1d.weight"}),
        ("olmo_hybrid", {f"linear_attn.{name}" for name in ("A_log", "dt_bias", "conv1d.weight")}),
    ],
)
def test_recurrences_and_short_convolutions_are_vectors_which_do_not_decay(model_type, own):
    model = build(model_type)
    optimizer = build_optimizer(model, OptimConfig(name="muon", vectors_lr=3.0))
    groups = [group for group in optimizer.param_groups if group.get("lr_factor") == 3.0]
    (group,) = groups
    assert group["weight_decay"] == 0
    names = names_of(model, group["params"])
    assert own <= names
    others = names_of(model, model.parameters()) - names
    assert all(name.endswith("weight") and "norm" not in name for name in others)


def test_muon_gets_the_matrices_inside_blocks_without_routers_and_experts():
    model = build("qwen3_next")
    kinds = kinds_of(model)
    assert names_of(model, kinds.embeddings) == {
        *("model.embed_tokens.weight", "lm_head.weight", "mlp.gate.weight"),
        *("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    }
    assert "mlp.shared_expert_gate.weight" in names_of(model, kinds.vectors)  # one row
    attention = {f"self_attn.{name}_proj.weight" for name in "qkvo"}
    assert attention <= names_of(model, kinds.matrices)
    assert len(kinds_of(build("gpt2")).matrices) == 4 * 2  # of a class of their own


@pytest.mark.parametrize("model_type", ["lfm2", "gpt2", "gemma3_text", "qwen3_next"])
def test_its_operations_are_those_that_torch_counts_without_what_is_masked(model_type):
    tokens = 64
    model = build(model_type, tokens)
    model.set_attn_implementation("eager")  # whose products, of the masked part too, torch counts
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, tokens, dtype=torch.int64), use_cache=False)
    counts = flops_per_token(model, tokens)
    channels = 4 * 8  # of all heads
    layers = {"gpt2": 2, "lfm2": 2, "gemma3_text": 4, "qwen3_next": 2}[model_type]
    square = 3 * layers * 2 * 2 * channels * tokens
    seen = layers * (tokens + 1) / 2
    if model_type == "gemma3_text":  # two layers see four tokens, of the first ones fewer
        seen = 2 * (tokens + 1) / 2 + 2 * (4 - 6 / tokens)
    assert counts["token_mixing"] == pytest.approx(3 * 2 * 2 * channels * seen)
    counted = 3 * counter.get_total_flops() / tokens - square + counts["token_mixing"]
    if model_type == "qwen3_next":  # the state of its recurrence is left out
        assert counts["useful"] < counted
    else:
        assert counts["useful"] == pytest.approx(counted, rel=0.01)


def test_a_model_without_attention_has_the_operations_of_its_matrices():
    counts = flops_per_token(build("lfm2", layer_types=["conv"] * 4), 64)
    assert counts["useful"] > 0 and counts["token_mixing"] == 0


@pytest.mark.parametrize(
    "model_type", ["aria_text", "deepseek_v3", "gemma4_text", "gpt_oss", "inkling_text"]
)
def test_of_experts_those_count_that_a_token_goes_to(model_type):
    tokens = 64
    model = build(model_type, tokens)
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")  # which multiplies a token with its experts alone
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(tokens)[None], use_cache=False)
    counts = flops_per_token(model, tokens)
    masked = counts["token_mixing"] * (tokens - 1) / (tokens + 1)
    counted = (counts["useful"] + masked) * tokens
    assert counted == pytest.approx(3 * counter.get_total_flops(), rel=0.01)


@pytest.mark.parametrize(
    "model_type", ["longcat_flash", "hunyuan_v1_moe", "dots3_note_text", "bloom"]
)
def test_operations_that_are_not_known_are_not_reported(
    model_type, write_file, auto_config, tmp_path
):
    """Of experts some of which compute nothing, or of another number in each layer; of attention
    with other heads in some layers, or that is not found.
    """
    train(load_config(str(auto_config), [*write_file(model_type), "train.steps=1"]))
    (line,) = [line for line in read_lines(tmp_path / "runs/small") if "loss" in line]
    assert line["tokens_per_second"] > 0 and "useful_tflops" not in line


def test_no_graph_is_recorded_of_it_unless_asked_for(monkeypatch, tmp_path):
    file = tmp_path / "gpt2.json"
    file.write_text(json.dumps({"model_type": "gpt2"}))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    world = SimpleNamespace(device=torch.device("cuda"), is_sharded=False, size=1)
    overrides = [AUTO, f"model.config={file}"]
    assert "cuda_graphs=true tries it" in obstacle_to_graph(load_config(None, overrides), world)
    for more in (["model.architecture=qwen3"], [*overrides, "train.cuda_graphs=true"]):
        assert obstacle_to_graph(load_config(None, more), world) == ""


def test_types_of_flash_linear_attention_are_known_where_it_is_installed(monkeypatch, tmp_path):
    """It registers them when it is imported; here a package of its name that has one."""
    (tmp_path / "fla.py").write_text(
        "from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM\n"
        "class Config(LlamaConfig):\n    model_type = 'some_deltanet'\n"
        "class Model(LlamaForCausalLM):\n    config_class = Config\n"
        "AutoConfig.register('some_deltanet', Config)\n"
        "AutoModelForCausalLM.register(Config, Model)\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    content = {"model_type": "some_deltanet"} | SIZE
    options = ModelConfig(architecture="auto", config=content, max_position_embeddings=16)
    config = model_config(options, vocab_size=50, eos_token_id=0)
    model = new_model(config)
    check_causal(model)
    model.save_pretrained(tmp_path / "saved")
    command = "from mixer.checkpoints.pretrained import load_model_config as load\n"
    command += (
        f"from pathlib import Path; print(load(Path({str(tmp_path / 'saved')!r})).model_type)"
    )
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    result = subprocess.run([sys.executable, "-c", command], env=environment, capture_output=True)
    assert result.stdout == b"some_deltanet\n", result.stderr


@pytest.mark.parametrize(
    ("model_type", "values", "said"),
    [
        ("lfm99", {}, "'lfm99' is unknown to the installed transformers; allowed: .* such as lfm"),
        ("mine", {"auto_map": {}}, "and code that comes with a model \\(auto_map\\) is not run"),
        ("t5", {}, "'t5' is no causal language model; allowed: those of AutoModelForCausalLM"),
        ("reformer", {}, "'reformer' takes only texts of certain lengths; .* such as roformer"),
        ("gemma3", {}, "gemma3 is made of several models; allowed: .* such as gemma3_text: give"),
        ("fuyu", {}, "fuyu is made of several models; allowed: .* such as persimmon: give"),
        ("blt", {}, "blt is made of several models; allowed: one for text alone$"),
        ("lfm2", {"norm_epss": 3}, "unknown key norm_epss; did you mean norm_eps"),
        ("lfm2", {"hidden_size": "x"}, "lfm2 refuses it: .*'hidden_size'"),
        ("mamba2", {"num_heads": 3}, "mamba2 refuses it: .*must equal num_heads"),
        ("lfm2", {"layer_types": ["conv"]}, "lfm2 "),
        ("gpt2", {"n_head": 3}, "gpt2 cannot be built: .*divisible by num_heads"),
        ("gpt2", {"n_layer": 0}, "this gpt2 has no layers; allowed: 1 or more"),
        ("mamba", {"num_hidden_layers": 0}, "this mamba has no layers; allowed: 1 or more"),
        ("lfm2", {"intermediate_size": 0}, "this lfm2 has .*weight of shape .*0.*; allowed: sizes"),
        ("lfm2", {"norm_eps": math.nan}, "this lfm2 computes numbers that are not finite, before"),
        ("bert", {}, "this bert sees later tokens, as an encoder does; allowed: a causal model"),
        # In long texts it sees later tokens, and in the first short one it becomes causal.
        ("big_bird", BERT_SIZE | SPARSE, "this big_bird replaces its layers in short texts; allow"),
        ("roberta", BERT_SIZE, "this roberta cannot compute 8 tokens .*no bos_token_id and no"),
    ],
)
def test_a_file_of_no_causal_model_is_refused(model_type, values, said, auto_config, tmp_path):
    file = tmp_path / "model.json"
    file.write_text(json.dumps({"model_type": model_type} | FILES.get(model_type, {}) | values))
    message = refusal(auto_config, AUTO, f"model.config={file}")
    assert re.match("model.config: .*" + said, message), message


def test_a_model_that_cannot_compute_is_refused():
    with pytest.raises(UserError, match="config: this lfm2 cannot compute 8 tokens .Runtime"):
        check_causal(build("lfm2", num_key_value_heads=3))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            None,
            "model.json cannot be read .FileNotFoundError.*: give a config.json of transformers",
        ),
        ("[1]", "is damaged .it holds list, allowed: an object"),
        ("{", "is damaged"),
        ('{"hidden_size": 3}', "is damaged .model_type missing.: give a config.json"),
        ('{"model_type": 3}', "is damaged .model_type = 3; allowed: text"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(content, said, tmp_path):
    file = tmp_path / "model.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UserError, match=f"1 problem.*\n.*model.config: .*{said}"):
        load_config(None, [AUTO, f"model.config={file}"])
    with pytest.raises(UserError, match="model.config is null; give a config.json of transf"):
        load_config(None, [AUTO])
    with pytest.raises(UserError, match="config is .*, which architecture llama does not have"):
        load_config(None, ["model.architecture=llama", 'model.config={"model_type": "gpt2"}'])


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda path: path.stem)
def test_each_example_is_causal_and_has_about_as_many_weights_as_the_others(file):
    options = ModelConfig(architecture="auto", config=with_content(str(file)))
    model = new_model(model_config(options, vocab_size=8000, eos_token_id=0))
    check_causal(model)
    assert 25e6 < model.num_parameters() < 35e6
