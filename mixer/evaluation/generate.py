"""Continues texts with a checkpoint, and shows them as they are written."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast, set_seed
from transformers.generation.streamers import BaseStreamer

from mixer.checkpoints.pretrained import check_token, load_checkpoint
from mixer.common.errors import UserError, first_line, say_on_stderr
from mixer.common.hardware import is_out_of_memory, memory_for
from mixer.common.terminal import counted
from mixer.data.tokenizer import text_encoder
from mixer.evaluation.scoring import check_length, choose_device, context_of
from mixer.models.masked_mixer.modeling import MaskedMixerForCausalLM

GREEDY_BELOW = 1e-4  # logits divided by a lower temperature could overflow
CHECKED = 64  # tokens of the text by which a cache is checked
# Of the logits with a cache, as a share of the largest one. On a CPU right caches are within 1e-6;
# on a GPU some convolutions round to TF32. Wrong ones were off by 0.3 to 1.3.
TOLERANCE = 3e-2
# Decoding all of a long text after each token would take most of the time.
SHOW_EVERY = 0.05  # seconds

Show = Callable[[str], None]  # gets the parts of a text, as soon as they are written


@dataclass(frozen=True)
class Sampling:
    """How a text is continued: greedily at temperature 0, else by tokens drawn from the `top_k`
    likeliest (0: all) of those that have `top_p` of the probability together.
    """

    new_tokens: int  # at most
    temperature: float
    top_k: int
    top_p: float


class Writer:
    """A checkpoint that continues prompts, one at a time, as not every model leaves out the padding
    of a batch. Raises UserError for whatever cannot be used, and too little memory.
    """

    def __init__(self, checkpoint: Path, sampling: Sampling):
        self.checkpoint = checkpoint
        self.sampling = sampling
        self.device = choose_device("auto", "fp32")
        with self.memory():
            self.model, self.tokenizer = load_checkpoint(checkpoint, self.device)
        self.encode = text_encoder(self.tokenizer)
        # Whatever generation_config.json says: beams, several texts for a prompt, another output.
        self.model.generation_config = GenerationConfig(
            eos_token_id=self.model.generation_config.eos_token_id,
            pad_token_id=0,  # nothing is padded
            max_new_tokens=sampling.new_tokens,
        )
        with self.memory():
            has_cache = isinstance(self.model, MaskedMixerForCausalLM) or cache_works(self.model)
        self.model.generation_config.use_cache = has_cache
        if not has_cache:
            model_type = self.model.config.model_type
            say_on_stderr(
                f"{checkpoint}: without a cache, as the one that transformers has for this "
                f"{model_type} fails or is wrong: each token takes as long as the text before it"
            )
        if sampling.temperature >= GREEDY_BELOW:
            self.model.generation_config.update(
                do_sample=True,
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
            )

    def memory(self) -> AbstractContextManager[None]:
        activity = f"generating with {self.checkpoint}"
        sizes = f"--new-tokens {self.sampling.new_tokens}"
        return memory_for(self.device, activity, sizes, "Give a smaller --new-tokens")

    def tokens(self, prompt: str) -> Tensor:
        """(1, tokens) int64, on the CPU, of a prompt that the model can continue."""
        ids = torch.from_numpy(self.encode(prompt).astype(np.int64))[None]
        if not ids.numel():
            raise UserError(f"the prompt {prompt[:50]!r} has no tokens: give another")
        check_token(int(ids.max()), self.model, "a prompt")
        length = ids.shape[1]
        new_tokens = self.sampling.new_tokens
        sizes = f"the prompt has {counted(length, 'token')}, --new-tokens is {new_tokens}"
        check_length(length + new_tokens, self.model, self.checkpoint, sizes)
        return ids

    def write(self, ids: Tensor, show: Show, seed: int) -> None:
        """Shows the prompt of these `tokens`, and its continuation."""
        set_seed(seed)
        inputs = ids.to(self.device)
        with self.memory():
            self.model.generate(  # pyright: ignore[reportCallIssue]
                inputs,
                attention_mask=torch.ones_like(inputs),
                streamer=ShownText(self.tokenizer, show),
            )


@torch.no_grad()
def cache_works(model: PreTrainedModel) -> bool:
    """Whether `generate` computes with a cache what it computes without. Some caches of
    transformers have other shapes than the model's states, or are asked for what they do not have,
    and some are wrong. A text of CHECKED tokens does not show what is wrong in a longer one. Raises
    UserError for a model that cannot do without, either.
    """
    try:
        without = logits_of_new_tokens(model, use_cache=False)
    except Exception as error:  # each model raises its own kinds
        if is_out_of_memory(error):
            raise
        problem = f"this {model.config.model_type} cannot write a text ({first_line(error)})"
        raise UserError(f"{problem}: give another checkpoint") from error
    try:
        with_cache = logits_of_new_tokens(model, use_cache=True)
    except Exception as error:  # each model raises its own kinds
        if is_out_of_memory(error):
            raise
        return False
    return bool((with_cache - without).abs().max() <= TOLERANCE * without.abs().max())


def logits_of_new_tokens(model: PreTrainedModel, use_cache: bool) -> Tensor:
    """Of the last few tokens of a text of CHECKED tokens, or as many as the context has, which
    `generate` writes: (1, tokens, vocabulary) fp32.
    """
    length = min(CHECKED, context_of(model) or CHECKED)
    new_tokens = min(3, length // 2)
    prompt = torch.arange(length - new_tokens, device=model.device)[None]
    prompt = prompt % model.config.get_text_config().vocab_size
    written: Any = model.generate(  # pyright: ignore[reportCallIssue]
        prompt,
        attention_mask=torch.ones_like(prompt),
        use_cache=use_cache,
        do_sample=False,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return torch.stack(written.logits, 1)


class ShownText(BaseStreamer):
    """Shows a text while `generate` gives it the tokens. In the end it is what all tokens decode
    to: transformers' TextStreamer decodes each line alone, which loses the spaces that some
    tokenizers have at the beginning of a line.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, show: Show):
        self.tokenizer = tokenizer
        self.show = show
        self.ids: list[int] = []
        self.shown = 0  # characters
        self.shown_at = 0.0  # of time.monotonic()

    def put(self, value: Tensor) -> None:
        self.ids += value.flatten().tolist()
        if time.monotonic() - self.shown_at > SHOW_EVERY:
            self.show_up_to(self.text(self.without_open_end()).rstrip("\ufffd"))
            self.shown_at = time.monotonic()

    def end(self) -> None:
        self.show_up_to(self.text(self.ids))

    def without_open_end(self) -> list[int]:
        """The tokens but for bytes at the end, such as <0xE6>, which the next tokens may make a
        character of, or no text; also if tokens that are not shown come between.
        """
        tokens = self.tokenizer.convert_ids_to_tokens(self.ids)
        added = self.tokenizer.added_tokens_decoder.values()
        hidden = {None, *(str(token) for token in added if token.special)}  # None: no such id
        end = len(tokens)
        while end and (tokens[end - 1] in hidden or tokens[end - 1].startswith("<0x")):
            end -= 1
        return self.ids[:end]

    def text(self, ids: list[int]) -> str:
        text = self.tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)  # as of one list of ids
        return text

    def show_up_to(self, text: str) -> None:
        if new := text[self.shown :]:
            self.show(new)
            self.shown = len(text)
