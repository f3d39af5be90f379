"""Continue texts with a checkpoint, by sampling.

python -m mixer.generate --checkpoint runs/demo/step-600 --prompt "def read(self, "
"""

import math

from torch import Tensor
from transformers import BatchEncoding, GenerationConfig, PreTrainedModel, set_seed

from mixer.checkpoints.pretrained import check_token, load_checkpoint, settled
from mixer.common.errors import UserError, command_parser, first_line, run_command
from mixer.common.hardware import memory_for
from mixer.common.options import is_plain_text
from mixer.evaluation.measure import choose_device, reads

LOWEST_TEMPERATURE = 1e-4  # logits divided by a tiny number would overflow


def continuations(
    checkpoint: str, prompts: list[str], new_tokens: int, temperature: float, seed: int
) -> list[str]:
    """Each prompt and its continuation, all in one batch, by ancestral sampling; temperature 0 is
    greedy.

    Raises UserError for a directory that is no checkpoint, an empty prompt or one too long for the
    context, and for too little memory.
    """
    if not (temperature == 0 or LOWEST_TEMPERATURE <= temperature < math.inf):
        raise UserError(
            f"--temperature is {temperature:g}; allowed: 0 (the likeliest token each time), or "
            f"{LOWEST_TEMPERATURE} or more"
        )
    for number, prompt in enumerate(prompts, 1):
        if not (prompt and is_plain_text(prompt)):
            raise UserError(
                f"prompt {number} of {len(prompts)} is {prompt[:50]!r}; allowed: at least one "
                "token of text in UTF-8"
            )
    device = choose_device("auto", "fp32")
    sizes = f"{len(prompts)} prompt(s) at once, --new-tokens {new_tokens}"
    lower = "Give fewer prompts at once, or a smaller --new-tokens"
    with memory_for(device, f"generating with {checkpoint}", sizes, lower):
        model, tokenizer = load_checkpoint(settled(checkpoint), device)
        try:
            tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
            how = {"padding": len(prompts) > 1, "padding_side": "left"}  # one needs no token to pad
            inputs = tokenizer(prompts, return_tensors="pt", **how).to(device)  # (prompts, tokens)
            output = generate(model, inputs, new_tokens, temperature, seed, tokenizer.pad_token_id)
        except ValueError as error:  # of an option
            raise UserError(f"nothing can be generated: {first_line(error)}") from None
    return tokenizer.batch_decode(output, skip_special_tokens=True)


def generate(
    model: PreTrainedModel,
    inputs: BatchEncoding,
    new_tokens: int,
    temperature: float,
    seed: int,
    pad_token_id: int | None,
) -> Tensor:
    """The prompts and their continuations, (prompts, tokens) int64."""
    check_token(int(inputs.input_ids.max()), model, "a prompt")
    check_context(model, inputs.input_ids.shape[1], new_tokens)
    # Whatever generation_config.json says: beams, several texts for a prompt, another output.
    model.generation_config = GenerationConfig(eos_token_id=model.generation_config.eos_token_id)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 50}
    set_seed(seed)
    return model.generate(
        inputs.input_ids,
        attention_mask=inputs.attention_mask,
        max_new_tokens=new_tokens,
        pad_token_id=pad_token_id,
        **(sampling if temperature > 0 else {"do_sample": False}),
    )


def check_context(model: PreTrainedModel, prompt: int, new: int) -> None:
    """Raises UserError where tokens go beyond a context: other models than ours would fail, or
    write nonsense.
    """
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context is not None and not reads(model, prompt + new):
        raise UserError(
            f"the prompt has {prompt} tokens and --new-tokens is {new}, {prompt + new} together; "
            f"the model's context is {context}: shorten the prompt, or give fewer new tokens"
        )


def main() -> None:
    parser = command_parser("mixer.generate", __doc__)
    add, number = parser.add_argument, {"type": int, "metavar": "N"}
    add("--checkpoint", required=True, metavar="DIR", help="of any causal language model")
    add("--prompt", required=True, nargs="+", metavar="TEXT", help="texts to continue")
    add("--new-tokens", default=80, **number, help="at most this many after each text (80)")
    how = "of the sampling (0.7); 0: always the likeliest token"
    add("--temperature", type=float, default=0.7, metavar="X", help=how)
    add("--seed", default=0, **number, help="of the sampling (0)")
    options = parser.parse_args()
    texts = continuations(
        options.checkpoint, options.prompt, options.new_tokens, options.temperature, options.seed
    )
    print("\n\n".join(texts))


if __name__ == "__main__":
    run_command(main)
