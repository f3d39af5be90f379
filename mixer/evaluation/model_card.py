"""The model card of an exported checkpoint: what it is, how to load it, how it was trained, and
what eval.py reported of its weights.
"""

from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCardData
from huggingface_hub.utils import HFValidationError, validate_repo_id

from mixer.checkpoints.format import earlier_settings, read_trainer
from mixer.common.yaml_file import as_yaml
from mixer.evaluation.report import COLUMNS, evaluation_notes, select
from mixer.models.masked_mixer.modeling import MaskedMixerForCausalLM
from mixer.reporting.metrics_file import read_metrics
from mixer.reporting.tables import table

# Settings that may be paths of the training machine.
MAY_BE_PATHS = {"data.path", "data.validation_path", "data.tokenizer"}
# Columns of an evaluation's table that mean something on that machine alone.
OF_ONE_EVALUATION = ("label", "tokens_per_second", "peak_memory_gb")
EVALUATION_COLUMNS = {"text": "text"} | {
    title: key for title, key in COLUMNS.items() if key not in OF_ONE_EVALUATION
}
TEXT = """\
---
{header}
---
# {title}

A masked mixer ([arXiv 2409.01482](https://arxiv.org/abs/2409.01482)): a causal language model that
mixes tokens by a learned lower-triangular convolution in place of attention. Prompt and new tokens
together must fit into its context.

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
{evaluation}{configuration}"""


def model_card(
    model: MaskedMixerForCausalLM,
    checkpoint: Path,
    title: str,
    license: str,
    evaluations: list[dict],
) -> str:
    """The card as Markdown. What is not known of the checkpoint, its run or its evaluation is left
    out.

    model: with the weights' dtype as exported. evaluations: results of eval.py for these weights.
    Raises UserError where the run's files are damaged.
    """
    trainer = read_trainer(checkpoint)
    run = _without_paths(trainer.get("settings", {}))
    data = run.get("data", {})
    header = ModelCardData(
        license=license,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["masked-mixer", "custom_code"],
        datasets=[data["path"]] if data.get("source") == "hub" and data.get("path") else None,
    )
    facts = [f"| {name} | {value} |" for name, value in _facts(model, checkpoint, trainer).items()]
    evaluation = configuration = ""
    if evaluations:
        evaluation = f"\n## Evaluation\n\n{_evaluation(evaluations, title, model.dtype)}\n"
    if run:
        configuration = f"\n## Configuration\n\n```yaml\n{as_yaml(run)}```\n"
        configuration += "".join(
            f"\n{line}.\n" for line in earlier_settings(trainer.get("earlier", {}), MAY_BE_PATHS)
        )
    return TEXT.format(
        header=header.to_yaml(),
        title=title,
        facts="\n".join(facts),
        evaluation=evaluation,
        configuration=configuration,
    )


def _facts(
    model: MaskedMixerForCausalLM, checkpoint: Path, trainer: dict[str, Any]
) -> dict[str, str]:
    config = model.config
    facts = {
        "parameters": f"{model.num_parameters():,}",
        "context, tokens": str(config.max_position_embeddings),
        "hidden size, layers": f"{config.hidden_size}, {config.num_hidden_layers}",
        "vocabulary": str(config.vocab_size),
    }
    if trainer:
        facts |= {"steps": f"{trainer['step']:,}", "tokens seen": f"{trainer['tokens']:,}"}
        names = {
            "loss": "training loss, nats a token",
            "validation_loss": "validation loss, nats a token",
            "validation_bits_per_byte": "validation bits per byte",
        }
        last = _last_metrics(checkpoint, trainer["step"])
        facts |= {
            text: f"{last[key]:.4f}"
            for key, text in names.items()
            if isinstance(last.get(key), float)
        }
        if "validation_tokens" in last:
            facts["validation tokens scored"] = f"{last['validation_tokens']:,}"
    return facts


def _evaluation(results: list[dict], title: str, dtype: torch.dtype) -> str:
    """A table with a row for each evaluation, and their conventions below it."""
    rows = [result | {"label": title} for result in results]
    notes = [evaluation_notes(row) for row in rows]
    if dtype != torch.float32:
        notes.append(
            f"- Evaluated before the weights were rounded to {str(dtype).removeprefix('torch.')}."
        )
    return table(select(rows, EVALUATION_COLUMNS)) + "\n\n" + "\n".join(notes)


def _last_metrics(checkpoint: Path, step: int) -> dict[str, Any]:
    """The last value of every metric up to the checkpoint's step."""
    file = checkpoint.resolve().parent / "metrics.jsonl"
    last = {}
    for line in read_metrics(file) if file.is_file() else []:
        if line["step"] <= step:
            last |= line
    return last


def _without_paths(settings: dict[str, Any]) -> dict[str, Any]:
    """A run's settings without the paths of the machine that trained it."""
    data = dict(settings.get("data", {}))
    if data.get("source") != "hub" or _is_local(data.get("path")):
        data.pop("path", None)
    # Left out, it would seem that validation_fraction was cut from the training text.
    if data.get("validation_path"):
        data["validation_path"] = "a local text"
    if data.get("tokenizer", "train") != "train" and _is_local(data["tokenizer"]):
        data["tokenizer"] = "a local one, saved here"
    return settings | ({"data": data} if data else {})


def _is_local(name: Any) -> bool:
    """Whether this is a path rather than a name on the hub. One of another machine is not found
    here, but mostly no repository could have that name.
    """
    try:
        validate_repo_id(str(name))
    except HFValidationError:
        return True
    return Path(str(name)).exists()
