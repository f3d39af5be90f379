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
from mixer.evaluation.config import EvalOptions
from mixer.evaluation.evaluate import evaluate_checkpoint
from mixer.evaluation.generate import Sampling, Writer

WORDS = "the mixer reads each token once and never looks ahead — naïve café, 日本 text too".split()
CONTEXT = 32


def documents() -> list[str]:
    """Far longer than the context, about as long, shorter, and of one word."""
    generator = torch.Generator().manual_seed(3)
    sizes = (150, 9, 31, 4, 1, 64)
    indices = [torch.randint(len(WORDS), (size,), generator=generator) for size in sizes]
    return [" ".join(WORDS[index] for index in document) for document in indices]


def save_checkpoint(directory, model_type: str) -> None:
    """model_type: "gpt2", or else a masked mixer."""
    tokenizer = train_tokenizer(documents() * 20, 300)
    torch.manual_seed(0)
    if model_type == "gpt2":
        config = GPT2Config(
            vocab_size=len(tokenizer),
            n_positions=CONTEXT,
            n_embd=16,
            n_layer=2,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
        )
        model = GPT2LMHeadModel(config)
    else:
        config = MaskedMixerConfig(
            vocab_size=len(tokenizer),
            max_position_embeddings=CONTEXT,
            hidden_size=16,
            num_hidden_layers=2,
        )
        model = MaskedMixerForCausalLM(config)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def evaluate(checkpoint: str | Path, **options) -> dict:
    """The numbers of eval.py, on the CPU."""
    return evaluate_checkpoint(EvalOptions(str(checkpoint), device="cpu", **options))


def continuations(
    checkpoint: Path, prompts: list[str], new_tokens: int, temperature: float, seed: int
) -> list[str]:
    """What `mixer generate` shows for each prompt."""
    writer = Writer(checkpoint, Sampling(new_tokens, temperature, 50, 1.0))
    texts = []
    for row in [writer.tokens(prompt) for prompt in prompts]:
        pieces = []
        writer.write(row, pieces.append, seed)
        texts.append("".join(pieces))
    return texts


def list_files(checkpoint: Path) -> None:
    """Writes the listing of a checkpoint's files anew, as if training had written them as they
    are.
    """
    (checkpoint / LISTING).unlink(missing_ok=True)
    complete(checkpoint.rename(checkpoint.with_name("edited")), checkpoint)


def change_config(checkpoint: Path, **values) -> None:
    file = checkpoint / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
