"""A checkpoint made ready to be given away: python -m mixer.export runs/v100/best --output DIR
--license apache-2.0

The directory holds what `from_pretrained` needs, the code for where this package is not installed,
and a model card written from the run and from what eval.py reported of these weights, without the
optimizer's state. `hf upload NAME DIR` puts it on the hub.
"""

import argparse
import re
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCardData
from omegaconf import OmegaConf

from mixer.checkpoints.checkpoint import read_trainer
from mixer.checkpoints.pretrained import check_masked_mixer, load_checkpoint
from mixer.common.errors import UserError, run_command
from mixer.common.files import check_writable
from mixer.evaluation.report import COLUMNS, evaluation_notes, evaluations_of, select
from mixer.models.masked_mixer.modeling import MaskedMixerForCausalLM
from mixer.reporting.metrics_file import read_metrics
from mixer.reporting.tables import table
from mixer.training.config import read_yaml

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SECTIONS = (
    "seed",
    "model",
    "data",
    "train",
    "optim",
)  # of a run's configuration, what is of interest elsewhere
OF_ONE_MACHINE = ("directory", "workers")  # of its data, what is not
OF_ONE_EVALUATION = (
    "label",
    "tokens_per_second",
    "peak_memory_gb",
)  # of an evaluation's columns, what is not either
EVALUATION_COLUMNS = {"text": "text"} | {
    title: key for title, key in COLUMNS.items() if key not in OF_ONE_EVALUATION
}


def export(checkpoint: Path, output: Path, license: str, dtype: str = "fp32") -> None:
    """Writes `output`, a new directory; raises UserError where it is not new or `checkpoint` is
    none.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output} exists already; choose another --output, or delete it")
    check_writable(output)
    model, tokenizer = load_checkpoint(checkpoint, torch.device("cpu"))
    check_masked_mixer(
        checkpoint, model.config, "and the model card written here is a masked mixer's"
    )
    evaluations = evaluations_of(checkpoint)
    model.config.mixing_backend = "auto"
    model.to(DTYPES[dtype])
    tokenizer.model_max_length = model.config.max_position_embeddings
    text = card(model, checkpoint, output.resolve().name, license, evaluations)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    (output / "README.md").write_text(text, encoding="utf-8")
    if not evaluations:
        print(
            f"its card has no evaluation; python eval.py --checkpoint {checkpoint} writes one beside it, for another export"
        )
    print(f"wrote {output}; read its README.md, then: hf upload NAME {output}")


def card(
    model: MaskedMixerForCausalLM,
    checkpoint: Path,
    title: str,
    license: str,
    evaluations: list[dict],
) -> str:
    """The model card: what the checkpoint, the run around it and its evaluations tell; what they do
    not is left out.
    """
    run = _run_configuration(checkpoint)
    data = run.get("data", {})
    dataset = data.get("path") if data.get("source") == "hub" else None
    header = ModelCardData(
        license=license,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["masked-mixer", "custom_code"],
        datasets=[dataset] if dataset else None,
    ).to_yaml()
    rows = _facts(model, checkpoint)
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    evaluation = (
        f"\n## Evaluation\n\n{_evaluation(evaluations, title, model.dtype)}\n"
        if evaluations
        else ""
    )
    configuration = f"\n## Configuration\n\n```yaml\n{OmegaConf.to_yaml(run)}```\n" if run else ""
    return f"""---
{header}
---
# {title}

A masked mixer ([arXiv 2409.01482](https://arxiv.org/abs/2409.01482)): a causal language model whose tokens are mixed by a
learned lower-triangular convolution in place of attention. Prompt and new tokens together fit into its context.

| | |
|---|---|
{table}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{title}", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("{title}", trust_remote_code=True)
```

The code beside the weights is plain PyTorch. Where the masked-mixer package is installed, `import mixer` before makes
`trust_remote_code` unnecessary, and its kernels are used.
{evaluation}{configuration}"""


def _facts(model: MaskedMixerForCausalLM, checkpoint: Path) -> dict[str, str]:
    config, trainer = model.config, read_trainer(checkpoint)
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
        }
        names |= {"validation_bits_per_byte": "validation bits per byte"}
        last = _last_metrics(checkpoint, trainer["step"])
        facts |= {
            text: f"{last[key]:.4f}"
            for key, text in names.items()
            if isinstance(last.get(key), float)
        }
    return facts


def _evaluation(results: list[dict], title: str, dtype: torch.dtype) -> str:
    """A row for each evaluation, and its conventions below; texts lose the directories of the
    machine that they lay on.
    """
    rows = [
        result | {"label": title, "text": re.sub(r"(?<!\S)/\S*/", "", result["text"])}
        for result in results
    ]
    notes = [evaluation_notes(row) for row in rows]
    if dtype != torch.float32:
        notes.append(
            f"- Evaluated before the weights were rounded to {str(dtype).removeprefix('torch.')}."
        )
    return table([select(row, EVALUATION_COLUMNS) for row in rows]) + "\n\n" + "\n".join(notes)


def _last_metrics(checkpoint: Path, step: int) -> dict[str, Any]:
    """The last value of every metric up to the checkpoint's step."""
    file = checkpoint.resolve().parent / "metrics.jsonl"
    last = {}
    for line in read_metrics(file) if file.is_file() else []:
        if line["step"] <= step:
            last |= line
    return last


def _run_configuration(checkpoint: Path) -> dict[str, Any]:
    """The run's config.yaml, without where things lie on the machine that trained it."""
    file = checkpoint.resolve().parent / "config.yaml"
    run = read_yaml(file) if file.is_file() else {}
    run = {name: run[name] for name in SECTIONS if name in run}
    for name, section in run.items():
        if name != "seed" and not isinstance(section, dict):
            raise UserError(
                f"{file}: its section {name} is {section!r}; it must hold keys, as in configs/: correct it"
            )
    if "data" in run:
        local = OF_ONE_MACHINE if run["data"].get("source") == "hub" else (*OF_ONE_MACHINE, "path")
        run["data"] = {key: value for key, value in run["data"].items() if key not in local}
        if Path(str(run["data"].get("tokenizer"))).exists():
            run["data"]["tokenizer"] = "a local one, saved here"
    return run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "checkpoint", type=Path, help="a checkpoint directory, such as runs/demo/best"
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="a new directory, named as the model shall be"
    )
    parser.add_argument(
        "--license", required=True, help="the model's licence, such as apache-2.0, for the card"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of the weights")
    options = parser.parse_args()
    export(options.checkpoint, options.output, options.license, options.dtype)


if __name__ == "__main__":
    run_command(main)
