"""A checkpoint as a directory to publish, with a model card."""

from pathlib import Path

from huggingface_hub import ModelCardData

from mixer.checkpoints.checkpoint import read_trainer
from mixer.checkpoints.pretrained import check_finite, load_masked_mixer, write_new
from mixer.checkpoints.settings import earlier_settings
from mixer.common.hardware import TYPES
from mixer.common.values import as_yaml
from mixer.data.tokenizer import read_tokenizer
from mixer.models.masked_mixer.modeling import MaskedMixerForCausalLM
from mixer.reporting.text import METRICS, read_metrics

# Settings that may be paths of the training machine, and are left out.
MAY_BE_PATHS = {"data.path", "data.validation_path", "data.tokenizer", "train.init_from"}
RESULTS = {  # the last values of metrics.jsonl, by what the card calls them, and their format
    "training loss, nats": ("loss", ".4f"),
    "validation loss, nats": ("validation_loss", ".4f"),
    "validation bits per byte": ("validation_bits_per_byte", ".4f"),
    "validation tokens scored": ("validation_tokens", ","),
}
TEXT = """\
---
{header}
---
# {title}

A masked mixer ([arXiv 2409.01482](https://arxiv.org/abs/2409.01482)): a causal language model whose
tokens are mixed by learned lower-triangular matrices.{keys}{limit}

| | |
|---|---|
{facts}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{title}", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("{title}", trust_remote_code=True)
```

The code beside the weights is plain PyTorch. Where the masked-mixer package is installed,
`import mixer` before these lines makes `trust_remote_code` unnecessary, and its kernels are used.
{configuration}"""


def export(checkpoint: Path, output: Path, license: str, dtype: str = "fp32") -> None:
    """Writes the checkpoint, its tokenizer, code and model card into `output`, a new directory.

    Raises UserError if `output` is not new, if `checkpoint` is not a masked mixer, and if a weight
    is not finite, in fp32 or in `dtype`.
    """
    model = load_masked_mixer(checkpoint)
    tokenizer = read_tokenizer(str(checkpoint))
    model.config.mixing_backend = "auto"
    model.to(TYPES[dtype])  # pyright: ignore[reportArgumentType]
    check_finite(checkpoint, model, f"{dtype} does not reach that far: give --dtype fp32")
    card = model_card(model, checkpoint, output.resolve().name, license)
    write_new(output, model, tokenizer, checkpoint, card)
    print(f"read {output}/README.md, then: hf upload NAME {output}")


def model_card(model: MaskedMixerForCausalLM, checkpoint: Path, title: str, license: str) -> str:
    """The card as Markdown. What is not known of the checkpoint or its run is left out."""
    config = model.config
    trainer = read_trainer(checkpoint)
    header = ModelCardData(
        license=license,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["masked-mixer", "custom_code"],
    )
    facts = {
        "parameters": f"{model.num_parameters():,}",
        "context, tokens": config.max_position_embeddings,
        "hidden size, layers": f"{config.hidden_size}, {config.num_hidden_layers}",
        "vocabulary": config.vocab_size,
    }
    if trainer:
        facts |= {"steps": f"{trainer['step']:,}", "tokens seen": f"{trainer['tokens']:,}"}
        facts |= last_metrics(checkpoint.resolve().parent / METRICS, trainer["step"])
    keys = ""
    if config.mixer_attention:
        keys = "\nSome or all of its blocks have softmax attention in place of learned weights."
    elif config.mixer_key_size:
        keys = "\nIn its keyed blocks, softmax weights multiply the learned ones, as in attention."
    limit = "\nPrompt and new tokens together must fit into its context."
    return TEXT.format(
        keys=keys,
        limit=limit if config.mixing_weight == "full" else "",
        header=header.to_yaml(),
        title=title,
        facts="\n".join(f"| {name} | {value} |" for name, value in facts.items()),
        configuration=configuration(trainer) if trainer.get("settings") else "",
    )


def last_metrics(file: Path, step: int) -> dict[str, str]:
    """The last RESULTS up to a step."""
    last = {}
    for line in read_metrics(file) if file.is_file() else []:
        last |= line if line["step"] <= step else {}
    return {
        name: f"{last[key]:{form}}"
        for name, (key, form) in RESULTS.items()
        if last.get(key) is not None
    }


def configuration(trainer: dict) -> str:
    """The settings of the run, and what earlier steps had in place of them."""
    settings = dict(trainer["settings"])
    for section, values in settings.items():
        if isinstance(values, dict):
            settings[section] = {
                key: value
                for key, value in values.items()
                if f"{section}.{key}" not in MAY_BE_PATHS
            }
    earlier = {
        step: {key: value for key, value in changed.items() if key not in MAY_BE_PATHS}
        for step, changed in trainer.get("earlier", {}).items()
    }
    text = f"\n## Configuration\n\n```yaml\n{as_yaml(settings)}```\n"
    return text + "".join(f"\n{line}.\n" for line in earlier_settings(earlier))
