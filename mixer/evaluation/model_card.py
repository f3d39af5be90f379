"""The model card of an exported checkpoint: what it is, how to load it and how it was trained."""

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from mixer.checkpoints.format import earlier_settings, read_trainer
from mixer.common.parsing import as_yaml
from mixer.models.masked_mixer.modeling import MaskedMixerForCausalLM
from mixer.reporting.metrics_file import read_metrics

# Settings that may be paths of the training machine, and are left out.
MAY_BE_PATHS = ("path", "validation_path", "tokenizer")
METRICS = {  # the last values of metrics.jsonl, and what the card calls them
    "loss": "training loss, nats a token",
    "validation_loss": "validation loss, nats a token",
    "validation_bits_per_byte": "validation bits per byte",
    "validation_tokens": "validation tokens scored",
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


def model_card(model: MaskedMixerForCausalLM, checkpoint: Path, title: str, license: str) -> str:
    """The card as Markdown. What is not known of the checkpoint or its run is left out.

    Raises UserError where the run's files are damaged.
    """
    trainer, config = read_trainer(checkpoint), model.config
    header = ModelCardData(
        license=license,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["masked-mixer", "custom_code"],
    )
    facts = {
        "parameters": f"{model.num_parameters():,}",
        "context, tokens": str(config.max_position_embeddings),
        "hidden size, layers": f"{config.hidden_size}, {config.num_hidden_layers}",
        "vocabulary": str(config.vocab_size),
    }
    if trainer:
        facts |= {"steps": f"{trainer['step']:,}", "tokens seen": f"{trainer['tokens']:,}"}
        facts |= last_metrics(checkpoint.resolve().parent / "metrics.jsonl", trainer["step"])
    keys = "\nIn its keyed blocks, softmax weights multiply the learned ones: a kind of attention."
    limit = "\nPrompt and new tokens together must fit into its context."
    return TEXT.format(
        keys=keys if config.mixer_key_size else "",
        limit=limit if config.mixing_weight == "full" else "",
        header=header.to_yaml(),
        title=title,
        facts="\n".join(f"| {name} | {value} |" for name, value in facts.items()),
        configuration=configuration(trainer) if trainer.get("settings") else "",
    )


def last_metrics(file: Path, step: int) -> dict[str, str]:
    """The last METRICS up to a step."""
    found, last = {}, {}
    for line in read_metrics(file) if file.is_file() else []:
        last |= line if line["step"] <= step else {}
    for key, text in METRICS.items():
        if isinstance(last.get(key), (int, float)):
            found[text] = f"{last[key]:,}" if key.endswith("tokens") else f"{last[key]:.4f}"
    return found


def configuration(trainer: dict[str, Any]) -> str:
    """The settings of the run, and what earlier steps had in place of them."""
    run = trainer["settings"]
    data = {name: value for name, value in run.get("data", {}).items() if name not in MAY_BE_PATHS}
    left_out = [f"data.{name}" for name in MAY_BE_PATHS]
    earlier = earlier_settings(trainer.get("earlier", {}), left_out)
    text = f"\n## Configuration\n\n```yaml\n{as_yaml(run | {'data': data})}```\n"
    return text + "".join(f"\n{line}.\n" for line in earlier)
