"""Checkpoints: directories that `from_pretrained` loads and training resumes from, complete or not there at all.

    step-1000/
        config.json  model.safetensors  tokenizer.json ...    a from_pretrained directory, fp32
        trainer_state/
            trainer.json      step, position in the data, data fingerprint, loss scale, wandb id
            optimizer.pt      AdamW's state
            rng-<rank>.pt     random state of each process
            files.json        every file with its size; written last, it tells a complete checkpoint

Everything is written to `step-1000.partial`, flushed to disk, then renamed. Older ones are deleted only after that.
"""

import json
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from mixer.configuration import MaskedMixerConfig
from mixer.errors import UserError
from mixer.files import flush, flush_tree
from mixer.modeling import MaskedMixerForCausalLM


@dataclass
class CheckpointConfig:
    save_every: int = field(default=1000, metadata={"help": "steps between checkpoints; 0 for one at the end alone"})
    keep: int = field(default=2, metadata={"help": "newest checkpoints to keep, 2 or more"})
    resume: str = field(
        default="auto",
        metadata={"help": "auto (newest complete checkpoint of the run), never, or a checkpoint directory"},
    )


def save(directory: Path, accelerator: Accelerator, model, tokenizer, optimizer, trainer: dict[str, Any], keep: int) -> Path:
    """Writes `directory`/step-N (N = trainer["step"]) from all processes together; returns its path."""
    final = directory / f"step-{trainer['step']}"
    partial = final.with_name(final.name + ".partial")
    state = partial / "trainer_state"
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
        state.mkdir(parents=True)
    accelerator.wait_for_everyone()
    torch.save(_random_state(accelerator.device), state / f"rng-{accelerator.process_index}.pt")
    if accelerator.is_main_process:
        _save_model(partial, model, tokenizer)
        torch.save(optimizer.state_dict(), state / "optimizer.pt")
        (state / "trainer.json").write_text(json.dumps(trainer, indent=1))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        _complete(partial, final)
        _prune(directory, keep)
    accelerator.wait_for_everyone()
    return final


def find_resume(directory: Path, resume: str, say=print) -> Path | None:
    """The checkpoint to go on from, or None for a fresh start; see CheckpointConfig.resume.

    Raises UserError for a named checkpoint that is incomplete, and for a fresh start where checkpoints would be in the way.
    """
    found = sorted(directory.glob("step-*"), key=_step, reverse=True)
    found = [path for path in found if _step(path) >= 0]
    if resume == "never":
        if found:
            raise UserError(
                f"checkpoint.resume = 'never', but {found[0]} exists; choose another name, delete {directory}, "
                "or set checkpoint.resume=auto"
            )
        return None
    if resume != "auto":
        require_complete(Path(resume))
        return Path(resume)
    for path in found:
        problem = incomplete(path)
        if problem is None:
            return path
        say(f"passing over {path}: {problem}")
    return None


def incomplete(path: Path) -> str | None:
    """What is wrong with a checkpoint directory, or None."""
    listing = path / "trainer_state" / "files.json"
    if not path.is_dir():
        return "there is no such directory"
    if not listing.is_file():
        return "it is incomplete: trainer_state/files.json is missing"
    for name, size in json.loads(listing.read_text()).items():
        if not (path / name).is_file():
            return f"it is incomplete: {name} is missing"
        if (path / name).stat().st_size != size:
            return f"it is damaged: {name} has {(path / name).stat().st_size} bytes, {size} were written"
    return None


def require_complete(path: Path) -> None:
    problem = incomplete(path)
    if problem:
        raise UserError(f"checkpoint {path} cannot be used: {problem}; give another one, such as an earlier step-N beside it")


def load_model(path: Path, config: MaskedMixerConfig) -> MaskedMixerForCausalLM:
    """The checkpoint's model with `config`'s backend; raises UserError where its shape is another one, naming each field."""
    saved = MaskedMixerConfig.from_pretrained(path)
    fields = [name for name in MaskedMixerConfig().to_dict() if hasattr(config, name)]
    ignored = {"mixing_backend", "architectures", "dtype", "transformers_version", "_name_or_path"}
    differing = [
        f"{name} is {getattr(saved, name, None)} in the checkpoint and {getattr(config, name)} in the configuration"
        for name in fields
        if name not in ignored and getattr(saved, name, None) != getattr(config, name)
    ]
    if differing:
        raise UserError(
            f"checkpoint {path} is of another model: {'; '.join(differing)}; set these keys to the checkpoint's values, "
            "or choose another name"
        )
    return MaskedMixerForCausalLM.from_pretrained(path, dtype=torch.float32, mixing_backend=config.mixing_backend)


def load_trainer(path: Path, fingerprint: str) -> dict[str, Any]:
    """trainer.json of a checkpoint; raises UserError where it was trained on other data."""
    trainer = json.loads((path / "trainer_state" / "trainer.json").read_text())
    if trainer["data_fingerprint"] != fingerprint:
        raise UserError(
            f"checkpoint {path} was trained on other data ({trainer['data_directory']}, fingerprint "
            f"{trainer['data_fingerprint'][:12]}) than data.directory holds now ({fingerprint[:12]}); "
            "restore that data, or choose another name to start afresh"
        )
    return trainer


def load_optimizer_and_random_state(path: Path, accelerator: Accelerator, optimizer) -> None:
    """Only tensors and plain containers are unpickled (weights_only)."""
    state = path / "trainer_state"
    optimizer.load_state_dict(torch.load(state / "optimizer.pt", map_location="cpu", weights_only=True))
    own = state / f"rng-{accelerator.process_index}.pt"
    if own.exists():  # absent where the run goes on with more processes
        random_state = torch.load(own, map_location="cpu", weights_only=True)
        torch.set_rng_state(random_state["cpu"])
        if accelerator.device.type == "cuda" and "cuda" in random_state:
            torch.cuda.set_rng_state(random_state["cuda"], accelerator.device)


def remove_partial(directory: Path) -> None:
    """Deletes what a killed save left behind."""
    for path in directory.glob("step-*.partial"):
        shutil.rmtree(path)


def _step(path: Path) -> int:
    match = re.fullmatch(r"step-(\d+)", path.name)
    return int(match.group(1)) if match else -1


def _random_state(device: torch.device) -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _save_model(partial: Path, model: MaskedMixerForCausalLM, tokenizer) -> None:
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    config = MaskedMixerConfig.from_pretrained(partial)
    config.mixing_backend = "auto"  # a checkpoint of a GPU run loads on a machine without one
    config.save_pretrained(partial)


def _complete(partial: Path, final: Path) -> None:
    """Lists, flushes and renames: from here on the checkpoint exists."""
    files = {str(p.relative_to(partial)): p.stat().st_size for p in sorted(partial.rglob("*")) if p.is_file()}
    (partial / "trainer_state" / "files.json").write_text(json.dumps(files, indent=1))
    flush_tree(partial)
    if final.exists():  # an incomplete one of the same step, passed over when the run resumed
        shutil.rmtree(final)
    os.rename(partial, final)
    flush(final.parent)


def _prune(directory: Path, keep: int) -> None:
    """Deletes all but the newest `keep`; renamed first, so that a killed deletion leaves no half checkpoint."""
    found = sorted((p for p in directory.glob("step-*") if _step(p) >= 0), key=_step)
    for path in found[:-keep]:
        doomed = path.with_name(path.name + ".partial")
        os.rename(path, doomed)
        shutil.rmtree(doomed)
