"""The author's runs: his models and ours, on the same rows, have the same losses."""

import json

import pytest
import torch
from author import LanguageMixer, losses_of
from recurrent_reference import RecurrentReference
from runs import ROOT, read_losses
from texts import made_texts
from torch import nn
from transformers import PreTrainedModel

from mixer.checkpoints.reference_format import to_reference
from mixer.data.samples import SampleOrder
from mixer.data.tokenizer import load_tokenizer, train_tokenizer
from mixer.models.architecture import model_config, new_model
from mixer.training.config import load_config
from mixer.training.loop import train

WIDTH, BLOCKS, CONTEXT, BATCH, STEPS, WARMUP, HELD_OUT = 32, 2, 48, 8, 250, 25, 30


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> tuple[list[str], list[str]]:
    """Documents, and the options of a run on them."""
    folder, texts = tmp_path_factory.mktemp("author"), made_texts(200)
    texts += [text[:40] for text in texts]  # shorter than a row
    lines = (json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "texts.jsonl").write_text("".join(lines))
    train_tokenizer(texts, 300).save_pretrained(str(folder / "tokenizer"))
    options = ["data.source=jsonl", f"data.path={folder / 'texts.jsonl'}", "data.subset="]
    options += [f"data.tokenizer={folder / 'tokenizer'}", f"data.directory={folder / 'tokens'}"]
    return texts, [*options, f"data.validation_documents={HELD_OUT}"]


def rows_of(texts: list[str], directory: str) -> torch.Tensor:
    """As the author prepares them: (documents, CONTEXT)."""
    tokenizer = load_tokenizer(directory)
    tokenizer.pad_token = tokenizer.eos_token
    options = {"truncation": True, "max_length": CONTEXT, "padding": "max_length"}
    return tokenizer(texts, return_tensors="pt", add_special_tokens=False, **options).input_ids


def his_model(name: str, ours: PreTrainedModel) -> nn.Module:
    """With the weights of our model."""
    if name == "mixer":
        sizes = {"hidden": WIDTH, "width": 2 * WIDTH, "blocks": BLOCKS, "context": CONTEXT}
        theirs = LanguageMixer(vocabulary=300, **sizes)
    else:
        kinds = {"toeplitz": ["lag"] * 4, "recurrent": ["col", "col", "row", "row"]}[name]
        sizes = {"width": WIDTH, "vocabulary": 300}
        sizes |= {"dropout": name == "toeplitz"}
        theirs = RecurrentReference(kinds, CONTEXT, name == "recurrent", **sizes)
    theirs.load_state_dict(to_reference(ours))
    return theirs


@pytest.mark.parametrize("name", ["mixer", "toeplitz", "recurrent"])
def test_his_model_and_ours_end_at_the_same_loss(name, data, tmp_path):
    texts, options = data
    options = [*options, f"model.hidden_size={WIDTH}", f"model.num_hidden_layers={BLOCKS}"]
    options += [f"model.max_position_embeddings={CONTEXT}", f"train.batch_size={BATCH}"]
    options += [f"train.steps={STEPS}", f"optim.warmup_steps={WARMUP}"]
    options += ["train.mixed_precision=no", "logging.log_every=1", f"output_dir={tmp_path}"]
    options += [f"model.intermediate_size={2 * WIDTH}"] if name == "mixer" else []
    run = load_config(str(ROOT / f"configs/author/{name}.yaml"), options)
    train(run)
    ours = list(read_losses(run.directory).values())

    config = model_config(run.model, 300, 0)
    torch.manual_seed(run.seed)
    start = new_model(config)
    theirs = his_model(name, start)
    rows = rows_of(texts[HELD_OUT:], run.data.directory)
    order = SampleOrder(len(rows), run.seed)
    batches = (rows[order.indices(step * BATCH, BATCH)] for step in range(STEPS))
    expected = losses_of(theirs, batches, 0, STEPS, WARMUP, run.optim.lr)
    assert ours[0] == pytest.approx(expected[0], rel=1e-5)
    assert ours[-10:] == pytest.approx(expected[-10:], rel=5e-3)
    assert sum(ours[-5:]) < 0.8 * sum(ours[:5])


@pytest.mark.parametrize("name", ["toeplitz", "recurrent"])
def test_initial_weights_have_the_authors_variances(name):
    sizes = ["model.hidden_size=64", "model.num_hidden_layers=2"]
    run = load_config(str(ROOT / f"configs/author/{name}.yaml"), sizes)
    config = model_config(run.model, 300, 0)
    torch.manual_seed(0)
    for key, weight in new_model(config).named_parameters():
        if key.endswith(("bias", "decay")):
            assert not weight.any(), key
        elif "norm" not in key:  # He's normal distribution; the embedding's is the standard one
            variance = 1 if "embed" in key else 2 / weight.shape[-1]
            assert weight.std().item() == pytest.approx(variance**0.5, rel=0.1), key
