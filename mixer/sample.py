"""A quick look at what a checkpoint writes: python -m mixer.sample --checkpoint DIR --prompt TEXT"""

import argparse
from pathlib import Path

import torch
from transformers import set_seed

from mixer.errors import UserError, run_command
from mixer.evaluate import choose_device, load_checkpoint


def sample(checkpoint: str, prompt: str, new_tokens: int, temperature: float, seed: int) -> str:
    """The prompt and its continuation by ancestral sampling; temperature 0 is greedy.

    Raises UserError for a directory that is no checkpoint, an empty prompt, or one too long for the context.
    """
    model, tokenizer = load_checkpoint(Path(checkpoint), choose_device("auto", "fp32"))
    inputs = tokenizer(prompt, return_tensors="pt").input_ids.to(model.device)  # (1, tokens)
    if inputs.shape[1] == 0:
        raise UserError("the prompt is empty; give at least one token of text")
    set_seed(seed)
    how = {"do_sample": True, "temperature": temperature, "top_k": 50} if temperature > 0 else {"do_sample": False}
    try:
        output = model.generate(
            inputs,
            max_new_tokens=new_tokens,
            attention_mask=torch.ones_like(inputs),
            pad_token_id=tokenizer.eos_token_id,
            **how,
        )
    except ValueError as error:
        raise UserError(str(error)) from None
    return tokenizer.decode(output[0], skip_special_tokens=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", required=True, help="a checkpoint directory, such as runs/demo/step-600")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--new-tokens", type=int, default=80)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(sample(options.checkpoint, options.prompt, options.new_tokens, options.temperature, options.seed))


if __name__ == "__main__":
    run_command(main)
