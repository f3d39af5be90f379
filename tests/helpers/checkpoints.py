"""Small checkpoints, of a masked mixer or GPT-2, with a tokenizer trained on a few documents; how
they are edited, and evaluated.
"""

import json
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from mixer import MaskedMixerConfig, MaskedMixerForCausalLM
from mixer.checkpoints.checkpoint import LISTING, complete
from mixer.data.tokenizer import train_tokenizer
from mixer.evaluation.evaluate import EvalOptions, evaluate_checkpoint

WORDS = "the mixer reads each token once and never looks ahead — naïve café, 日本 text too".split()
CONTEXT = 32


def documents() -> list[str]:
    """Far longer than the context, about as long, shorter, and of one word."""
    generator = torch.Generator().manual_seed(3)
    sizes = (150, 9, 31, 4, 1, 64)
    picked = [torch.randint(len(WORDS), (size,), generator=generator) for size in sizes]
    return [" ".join(WORDS[word] for word in words) for words in picked]


def save_checkpoint(directory, kind: str) -> None:
    tokenizer = train_tokenizer(documents() * 20, 300)
    torch.manual_seed(0)
    size = {"vocab_size": len(tokenizer), "max_position_embeddings": CONTEXT}
    size |= {"num_hidden_layers": 2, "hidden_size": 16}
    if kind == "gpt2":
        about = {"num_attention_heads": 2, "eos_token_id": 0, "bos_token_id": 0}
        model = GPT2LMHeadModel(GPT2Config(**size, **about))
    else:
        model = MaskedMixerForCausalLM(MaskedMixerConfig(**size))
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def evaluate(checkpoint: str | Path, **options) -> dict:
    """The numbers of eval.py, on the CPU."""
    return evaluate_checkpoint(EvalOptions(str(checkpoint), device="cpu", **options))


def list_files(checkpoint: Path) -> None:
    """Writes the listing of a checkpoint's files anew, as if training had written them as they
    are.
    """
    (checkpoint / LISTING).unlink(missing_ok=True)
    complete(checkpoint.rename(checkpoint.with_name("edited")), checkpoint)


def change_config(checkpoint: Path, **values) -> None:
    file = checkpoint / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
