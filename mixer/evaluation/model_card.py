"""The model card of an exported checkpoint: what it is, how to load it, how it was trained, and
what eval.py reported of its weights.
"""

import re
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCardData

from mixer.checkpoints.format import earlier_settings, read_trainer
from mixer.common.yaml_file import as_yaml
from mixer.evaluation.report import COLUMNS, evaluation_notes, select
from mixer.models.masked_mixer.modeling import MaskedMixerForCausalLM
from mixer.reporting.metrics_file import read_metrics
from mixer.reporting.tables import table

# Settings that may be paths of the training machine, and are left out.
MAY_BE_PATHS = ("path", "validation_path", "tokenizer")
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
# Columns of an evaluation's table that mean something on that machine alone.
OF_ONE_EVALUATION = ("label", "tokens_per_second", "peak_memory_gb")
EVALUATION_COLUMNS = {"text": "text"} | {
    title: key for title, key in COLUMNS.items() if key not in OF_ONE_EVALUATION
}
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
    run = trainer.get("settings", {})
    data = run.get("data", {})
    path = data.get("path", "") if data.get("source") == "hub" else ""
    is_on_hub = HUB_NAME.fullmatch(path) and not Path(path).exists()
    header = ModelCardData(
        license=license,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["masked-mixer", "custom_code"],
        datasets=[path] if is_on_hub else None,
    )
    facts = [f"| {name} | {value} |" for name, value in _facts(model, checkpoint, trainer).items()]
    evaluation = configuration = ""
    if evaluations:
        evaluation = f"\n## Evaluation\n\n{_evaluation(evaluations, title, model.dtype)}\n"
    if run:
        data = {name: value for name, value in data.items() if name not in MAY_BE_PATHS}
        configuration = f"\n## Configuration\n\n```yaml\n{as_yaml(run | {'data': data})}```\n"
        left_out = [f"data.{name}" for name in MAY_BE_PATHS]
        configuration += "".join(
            f"\n{line}.\n" for line in earlier_settings(trainer.get("earlier", {}), left_out)
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
    if not trainer:
        return facts
    facts |= {"steps": f"{trainer['step']:,}", "tokens seen": f"{trainer['tokens']:,}"}
    file, last = checkpoint.resolve().parent / "metrics.jsonl", {}
    for line in read_metrics(file) if file.is_file() else []:
        last |= line if line["step"] <= trainer["step"] else {}
    for key, text in METRICS.items():
        if isinstance(last.get(key), (int, float)):
            facts[text] = f"{last[key]:,}" if key.endswith("tokens") else f"{last[key]:.4f}"
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
