"""Continues texts with a checkpoint."""

from pathlib import Path

import numpy as np
import torch
from transformers import GenerationConfig, set_seed

from mixer.checkpoints.pretrained import check_token, load_checkpoint
from mixer.common.errors import UserError
from mixer.common.hardware import memory_for
from mixer.data.tokenizer import text_encoder
from mixer.evaluation.scoring import check_length, choose_device

GREEDY_BELOW = 1e-4  # logits divided by a lower temperature could overflow


def continuations(
    checkpoint: Path, prompts: list[str], new_tokens: int, temperature: float, seed: int
) -> list[str]:
    """Each prompt and its continuation, sampled from the 50 likeliest tokens, or greedy at
    temperature 0. One prompt at a time, as not every model leaves out the padding of a batch.
    Raises UserError for whatever cannot be used, and too little memory.
    """
    device = choose_device("auto", "fp32")
    sizes = f"--new-tokens {new_tokens}"
    advice = "Give a smaller --new-tokens"
    with memory_for(device, f"generating with {checkpoint}", sizes, advice):
        model, tokenizer = load_checkpoint(checkpoint, device)
        encode = text_encoder(tokenizer)
        rows = [torch.from_numpy(encode(prompt).astype(np.int64)) for prompt in prompts]
        for prompt, row in zip(prompts, rows, strict=True):
            if not len(row):
                raise UserError(f"the prompt {prompt[:50]!r} has no tokens: give another")
            check_token(int(row.max()), model, "a prompt")
            sizes = f"the prompt has {len(row)} tokens, --new-tokens is {new_tokens}"
            check_length(len(row) + new_tokens, model, checkpoint, sizes)
        # Whatever generation_config.json says: beams, several texts for a prompt, another output.
        model.generation_config = GenerationConfig(
            eos_token_id=model.generation_config.eos_token_id,
            pad_token_id=0,  # nothing is padded
            max_new_tokens=new_tokens,
        )
        if temperature >= GREEDY_BELOW:
            model.generation_config.update(do_sample=True, temperature=temperature, top_k=50)
        assert isinstance(model, GenerationMixin)
        texts = []
        for row in rows:
            set_seed(seed)
            ids = row[None].to(device)
            output = model.generate(ids, attention_mask=torch.ones_like(ids))
            texts.append(tokenizer.decode(output[0], skip_special_tokens=True))
    return texts
