"""Generation: with its cache it writes what the full forward would, one text or a padded batch,
however it is asked.
"""

import copy
import functools
import io
import os
import pty
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import continuations
from models import MIXINGS, SETTINGS, generate, lively_model, padded, prompts, small_model, tokens
from texts import save_tokenizer
from torch._dynamo.testing import CompileCounter
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    Lfm2Config,
    MoshiConfig,
    PreTrainedTokenizerFast,
    ReformerConfig,
    ReformerModelWithLMHead,
    RwkvConfig,
    RwkvForCausalLM,
    TextIteratorStreamer,
    pipeline,
    xLSTMConfig,
)

from mixer.commands.generate import main
from mixer.common.errors import UserError
from mixer.data.config import DataConfig
from mixer.data.tokenizer import existing_tokenizer, text_encoder, train_tokenizer
from mixer.evaluation.generate import ShownText
from mixer.models.masked_mixer.cache import CACHE, MixingCache
from mixer.objectives.tasks import open_task

SIZES_OF_ATTENTION = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48}
SIZES_OF_ATTENTION |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
VARIANTS = MIXINGS | {"tied-norm": {"tie_word_embeddings": True, "final_norm": True}}
every_variant = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())


@every_variant
def test_each_step_with_the_cache_has_the_logits_of_the_full_forward(variant):
    model = lively_model(**variant)
    ids = tokens()
    expected = model(ids).logits
    cache = None
    for name, weight in model.named_parameters():
        if name.endswith("conv.weight"):  # whose upper triangle is not read
            weight.data[..., *torch.triu_indices(16, 16, 1)] = torch.nan
    # one token at a time, or some
    for start, end in ((0, 5), (5, 6), (6, 9), (9, 10), (10, 11), (11, 12)):
        output = model(ids[:, start:end], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        assert cache.get_seq_length() == end
        torch.testing.assert_close(output.logits, expected[:, start:end], rtol=1e-4, atol=1e-5)


@every_variant
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_has_the_logits_of_each_text_alone(variant, side):
    model = lively_model(**variant)
    ids, mask = padded(side)
    logits = model(ids, attention_mask=mask).logits
    for row, prompt in enumerate(prompts()):
        alone = model(prompt[None]).logits[0]
        torch.testing.assert_close(logits[row][mask[row].bool()], alone, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(logits[row, -1], alone[-1], rtol=1e-4, atol=1e-5)


def test_hidden_states_of_a_padded_batch_are_those_of_each_text_alone():
    model = lively_model(final_norm=True)
    ids, mask = padded("left")
    states = model(ids, attention_mask=mask, output_hidden_states=True).hidden_states
    assert len(states) == 1 + len(model.model.layers)
    torch.testing.assert_close(model.lm_head(states[-1]), model(ids, attention_mask=mask).logits)
    for row, prompt in enumerate(prompts()):
        alone = model(prompt[None], output_hidden_states=True).hidden_states
        in_batch = tuple(state[row : row + 1, -len(prompt) :] for state in states)
        torch.testing.assert_close(in_batch, alone, rtol=1e-4, atol=1e-5)
    written = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=3,
        return_dict_in_generate=True,
        output_hidden_states=True,
    )
    assert [state[0].shape[1] for state in written.hidden_states] == [ids.shape[1], 1, 1]


@every_variant
@pytest.mark.parametrize("batch", [1, 3])
@torch.no_grad()
def test_more_tokens_of_padded_texts_follow_those_in_the_cache(variant, batch):
    model = lively_model(**variant)
    ids = tokens(batch)
    mask = torch.ones_like(ids)
    mask[0, :2] = mask[0, 7] = 0
    cache = model(ids[:, :5], attention_mask=mask[:, :5], use_cache=True).past_key_values
    for start, end in ((5, 9), (9, 12)):
        logits = model(
            ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache
        ).logits
    alone = model(ids[:1, mask[0].bool()]).logits
    torch.testing.assert_close(logits[:1], alone[:, -3:], rtol=1e-4, atol=1e-5)


@every_variant
@torch.no_grad()
def test_the_last_chunk_of_many_tokens_may_be_one_of_padding(variant, monkeypatch):
    monkeypatch.setattr("mixer.models.masked_mixer.cache.SPARE", 2)
    model = lively_model(**variant)
    ids = tokens(batch=2)
    mask = torch.ones_like(ids)
    mask[0, 8] = 0
    cache = model(ids[:, :6], use_cache=True).past_key_values
    for start, end in ((6, 9), (9, 12)):
        chunk = ids[:, start:end]
        logits = model(chunk, attention_mask=mask[:, :end], past_key_values=cache).logits
    for row in range(2):
        alone = model(ids[row : row + 1, mask[row].bool()]).logits
        torch.testing.assert_close(logits[row : row + 1], alone[:, -3:], rtol=1e-4, atol=1e-5)


@every_variant
@pytest.mark.parametrize("search", SETTINGS)
def test_padded_batches_write_what_each_prompt_gives_alone(variant, search):
    """Padded on either side; without a cache, with one, and with a static one. Padded on the right,
    also in chunks, of which the last have no token of a short prompt.
    """
    model = lively_model(**variant)
    settings = SETTINGS[search]
    alone = [generate(model, prompt[None], use_cache=False, **settings) for prompt in prompts()]
    for side in ("left", "right"):
        ids, mask = padded(side)
        ways = [{"use_cache": False}, {}, {"cache_implementation": "static"}]
        if side == "right":
            ways.append({"prefill_chunk_size": 2})
        for cache in ways:
            written = generate(model, ids, attention_mask=mask, **settings, **cache)
            assert torch.equal(written, torch.cat(alone)), (side, cache)


def test_guessing_ahead_and_a_prompt_in_chunks_write_the_same():
    """Prompt lookup gives several tokens at once and takes back those that were wrong."""
    model = lively_model(num_mixer_heads=2, mixer_kernel_size=3)
    ids = tokens(batch=1, length=6)
    ids[0, 3:] = ids[0, :3]
    expected = generate(model, ids, use_cache=False)
    assert torch.equal(generate(model, ids, prompt_lookup_num_tokens=3, eos_token_id=0), expected)
    cache = MixingCache(model.config)
    assert torch.equal(generate(model, ids, prefill_chunk_size=2, past_key_values=cache), expected)
    cache.reset()
    assert torch.equal(generate(model, ids, past_key_values=cache), expected)


@pytest.mark.parametrize("mistaken_from", [0, 20, 99])
def test_an_assistant_writes_the_same_or_says_how_many_tokens_it_may_guess(
    mistaken_from, monkeypatch
):
    """Guesses that are right grow in number, and then more may be wrong than a ring can forget."""
    monkeypatch.setattr("mixer.models.masked_mixer.cache.SPARE", 4)
    model = lively_model(**MIXINGS["window"])
    ids = tokens(batch=1, length=6)
    expected = generate(model, ids, new=60, use_cache=False)
    assistant = copy.deepcopy(model)

    @functools.wraps(assistant.forward)
    def forward(*arguments, **options):
        output = type(assistant).forward(assistant, *arguments, **options)
        is_mistaken = output[CACHE].get_seq_length() >= mistaken_from
        output.logits = -output.logits if is_mistaken else output.logits
        return output

    assistant.forward = forward
    guesses = assistant.generation_config
    guesses.assistant_confidence_threshold = 0.0
    for schedule, number in (("heuristic", 2), ("constant", 4), ("constant", 5)):
        guesses.num_assistant_tokens_schedule = schedule
        guesses.num_assistant_tokens = number
        is_too_many = mistaken_from == 20 if schedule == "heuristic" else number > 4
        if is_too_many and mistaken_from < 99:
            with pytest.raises(ValueError, match="allowed: 4 at most, .*assistant's generation_co"):
                generate(model, ids, new=60, assistant_model=assistant)
        else:
            written = generate(model, ids, new=60, assistant_model=assistant)
            assert torch.equal(written, expected)


OF_ANY_LENGTH = ["lags", "window", "keyed-lags", "keyed-parts", "keyed-attention-window"]


@pytest.mark.parametrize("mixing", OF_ANY_LENGTH)
@torch.no_grad()
def test_rings_hold_all_that_a_token_of_a_long_text_reads(mixing, monkeypatch):
    """Texts of several rings' length: a token at a time, some or many at once, padded or not, and
    with tokens that are taken back.
    """
    monkeypatch.setattr("mixer.models.masked_mixer.cache.SPARE", 3)
    model = lively_model(**MIXINGS[mixing]).double()
    ids = tokens(batch=2, length=90)
    expected = model(ids).logits
    for static in (False, True):
        cache = MixingCache(model.config, static)
        for start, end in ((0, 40), (40, 41), (41, 44), (44, 70), (70, 71), (71, 90)):
            logits = model(ids[:, start:end], past_key_values=cache).logits
            torch.testing.assert_close(logits, expected[:, start:end])
            if start == 44:
                model(ids[:, :3].flip(1), past_key_values=cache)
                cache.crop(-3)
        largest = max(memory.shape[2] for memory in cache.memories.values())
        assert largest <= model.config.max_position_embeddings + model.config.suffix_match + 3
        with pytest.raises(ValueError, match="last 4 of 90 tokens .* allowed: 3"):
            cache.crop(-4)
        columns = min(memory.shape[2] for memory in cache.memories.values())
        cache.reset()
        model(ids[:, :columns], past_key_values=cache)
        cache.crop(-5)  # of tokens that have overwritten none
        logits = model(ids[:, columns - 5 : columns], past_key_values=cache).logits
        torch.testing.assert_close(logits, expected[:, columns - 5 : columns])
    mask = torch.ones_like(ids)
    mask[0, :7] = mask[0, 45:60] = mask[0, 75] = 0
    cache = MixingCache(model.config)
    alone = model(ids[:1, mask[0].bool()]).logits
    for start, end in ((0, 44), (44, 75), (75, 77), (77, 90)):
        chunk = ids[:, start:end]
        logits = model(chunk, attention_mask=mask[:, :end], past_key_values=cache).logits
        torch.testing.assert_close(logits[1:], expected[1:, start:end])
    torch.testing.assert_close(logits[:1], alone[:, -13:])


def test_a_mask_that_contradicts_the_cache_is_refused():
    """Its new tokens would stand where others do, and all that follows be wrong."""
    model = lively_model()
    ids, mask = padded("left")
    unpadded = tokens()[:, :8]
    hiding = [0, 0, 1, 1, 1, 1, 1, 1]
    for earlier, later in ((None, hiding), (mask, None), (mask, [1] * ids.shape[1])):
        given = unpadded if earlier is None else ids
        cache = model(given, attention_mask=earlier, use_cache=True).past_key_values
        if later is not None:
            later = torch.tensor([[*later, 1]]).expand(len(given), -1)
        with pytest.raises(ValueError, match="hides other tokens of the cache than .*reset"):
            model(given[:, :1], attention_mask=later, past_key_values=cache)
    cache.crop(-1)  # it is no longer known which of the dropped columns had tokens
    one_less = torch.cat([mask[:, :-1], torch.ones(len(ids), 1, dtype=mask.dtype)], 1)
    model(ids[:, :1], attention_mask=one_less, past_key_values=cache)
    with pytest.raises(ValueError, match="last 99 tokens were to be dropped, and the cache has"):
        cache.crop(-99)


def test_compiled_generation_is_compiled_once_for_prompts_and_once_for_steps():
    form = dict(mixing_weight="lags", mixing_init="shift", mixer_key_size=8, mixer_attention=True)
    model = lively_model(max_position_embeddings=64, mixer_rotary=True, **form)
    ids = tokens()[:, :4]
    expected = generate(model, ids, new=20)
    counter = CompileCounter()
    model.forward = torch.compile(model.forward, backend=counter)
    assert torch.equal(generate(model, ids, new=20), expected)
    assert counter.frame_count <= 3


@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
@torch.no_grad()
def test_a_cache_serves_other_texts_after_a_reset_and_a_copy_goes_on_alone(static):
    model = lively_model()
    cache = MixingCache(lively_model().config, static)
    for batch, length in ((2, 6), (2, 3), (3, 4)):
        ids = tokens(batch, length)
        expected = generate(model, ids)
        model(ids[:, :-1], past_key_values=cache)
        copied = copy.deepcopy(cache)
        assert torch.equal(generate(model, ids, past_key_values=cache), expected)
        assert torch.equal(generate(model, ids, past_key_values=copied), expected)
        cache.reset()


@pytest.mark.parametrize("mixing", ["keyed-parts", "rows-and-columns"])
@torch.no_grad()
def test_several_texts_continue_one_prompt(mixing):
    model = lively_model(**MIXINGS[mixing])
    ids = tokens(batch=1, length=6)
    cache = MixingCache(model.config)
    model(ids[:, :-1], past_key_values=cache)
    cache.batch_repeat_interleave(3)
    written = generate(model, ids, past_key_values=cache, num_return_sequences=3, num_beams=3)
    assert torch.equal(written, generate(model, ids, num_return_sequences=3, num_beams=3))


def test_gradients_with_a_cache_are_those_without():
    model = lively_model(**MIXINGS["rows-and-columns"]).train()
    ids = tokens(length=6)
    losses = [model(ids, labels=ids, use_cache=cached).loss for cached in (False, True)]
    without, with_cache = (torch.autograd.grad(loss, [*model.parameters()]) for loss in losses)
    torch.testing.assert_close(with_cache, without)


@pytest.mark.parametrize("form", ["full", "mixed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_steps_are_those_of_the_full_forward(dtype, form):
    model = small_model(num_mixer_heads=2, mixing_weight=form).to(dtype)
    ids = tokens()
    cache = model(ids[:, :8], use_cache=True).past_key_values
    step = model(ids[:, 8:9], past_key_values=cache).logits
    memory_dtype = torch.float32 if form == "mixed" else dtype  # a sum keeps more digits
    assert step.dtype == dtype
    assert {memory.dtype for memory in cache.memories.values()} == {memory_dtype}
    torch.testing.assert_close(step, model(ids).logits[:, 8:9], rtol=3e-2, atol=3e-2)


@every_variant
def test_under_autocast_the_cache_gives_nearly_the_same(variant):
    model = small_model(**variant)
    ids = tokens()
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(ids).logits
        cache = model(ids[:, :8], use_cache=True).past_key_values
        for position in range(8, 12):
            column = slice(position, position + 1)
            step = model(ids[:, column], past_key_values=cache).logits
            assert step.dtype == expected.dtype
            torch.testing.assert_close(step, expected[:, column], rtol=5e-2, atol=5e-2)


@every_variant
@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
@torch.no_grad()
def test_a_text_goes_on_with_or_without_autocast_however_it_began(variant, static):
    model = small_model(**variant)
    ids = tokens()
    expected = model(ids).logits
    for begins_in_bf16 in (True, False):
        cache = MixingCache(model.config, static)
        with torch.autocast("cpu", torch.bfloat16, enabled=begins_in_bf16):
            model(ids[:, :6], past_key_values=cache)
        with torch.autocast("cpu", torch.bfloat16, enabled=not begins_in_bf16):
            for start, end in ((6, 7), (7, 10), (10, 12)):
                logits = model(ids[:, start:end], past_key_values=cache).logits
                assert logits.dtype == (torch.float32 if begins_in_bf16 else torch.bfloat16)
                part = expected[:, start:end]
                torch.testing.assert_close(logits.float(), part, rtol=5e-2, atol=5e-2)


def test_a_loss_of_ones_own_learns_nothing_from_the_padding_on_the_left():
    """transformers' label smoothing and many a loss score all columns but those labelled -100, and
    so the first token of a text by what stands in the padding before it.
    """
    model = lively_model()
    ids, mask = padded("left")

    def gradients(batches) -> tuple:
        losses = [
            cross_entropy(logits[:, :-1].mT, labels[:, 1:], reduction="sum")
            for logits, labels in batches
        ]
        return torch.autograd.grad(sum(losses), tuple(model.parameters()))

    labels = ids.masked_fill(mask == 0, -100)
    together = gradients([(model(ids, attention_mask=mask).logits, labels)])
    alone = gradients([(model(p[None]).logits, p[None]) for p in prompts() if len(p) > 1])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(["def read(self, size):", "def write(self, text):"] * 4, 300)


def test_pipeline_and_streamer(tokenizer):
    model = lively_model(vocab_size=300, max_position_embeddings=64)
    ids = tokenizer("def read", return_tensors="pt").input_ids
    expected = tokenizer.decode(generate(model, ids)[0])
    writer = pipeline("text-generation", model=model, tokenizer=tokenizer)
    texts = writer(
        ["def read", "def write(self, te"],
        batch_size=2,
        return_full_text=False,
        max_new_tokens=8,
        do_sample=False,
    )
    assert texts[0][0]["generated_text"] == expected
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    model.generate(ids, streamer=streamer, pad_token_id=0, max_new_tokens=8, do_sample=False)
    assert "".join(streamer) == expected


def test_what_cannot_be_generated_from_is_refused():
    model = small_model()
    short = tokens(length=4)
    cache = model(tokens(), use_cache=True).past_key_values
    few = model(tokens(length=4), use_cache=True).past_key_values
    others = MixingCache(small_model(max_position_embeddings=6).config)
    narrow = torch.ones(3, 1)
    for call, words in (
        (lambda: model(tokens(length=13)), "input has 13 tokens; .* at most 12, the context"),
        (lambda: model.generate(short, max_new_tokens=9), "4 tokens and 9 new .*, 13 together"),
        (lambda: model(short, past_key_values=cache), "has 4 tokens and the cache 12; "),
        (lambda: model(short[:1], past_key_values=few), "has 1 texts, but the cache 3: give as "),
        (lambda: model(short, past_key_values=others), "texts of at most 6 .* model reads 12: gi"),
        (lambda: model(short, past_key_values=DynamicCache()), "DynamicCache given; .* a Mixing"),
        (lambda: model(short, position_ids=short), "position_ids given; a masked mixer reads "),
        (lambda: model(short, attention_mask=narrow), r"has shape \(3, 1\); allowed: \(3, 4\)"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_the_command_writes_prompts_of_different_lengths(tokenizer, tmp_path, capsys):
    model = lively_model(vocab_size=300, max_position_embeddings=64)
    ids = tokenizer("def", return_tensors="pt").input_ids
    greedy = f"def{tokenizer.decode(generate(model, ids, new=4)[0], skip_special_tokens=True)}"
    # Which the command does without:
    model.generation_config.update(
        return_dict_in_generate=True, num_return_sequences=2, num_beams=2
    )
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)

    def write(*prompts, temperature=0.0, seed=0):
        options = f"--checkpoint {tmp_path} --new-tokens 4 --temperature {temperature}"
        main([*options.split(), "--seed", str(seed), "--prompt", *prompts])
        printed = capsys.readouterr()
        assert "without a cache" not in printed.err
        return printed.out.rstrip("\n")

    alone = [write("def read(self"), write("def")]
    assert alone[0].startswith("def read(self") and alone[1] == greedy
    assert continuations(tmp_path, ["def"], 4, 1e-300, 0) == [greedy]
    assert write("def read(self", "def") == "\n\n".join(alone)
    with pytest.raises(UserError, match="a prompt is ''; allowed"):
        write("def", "")
    with pytest.raises(UserError, match="the prompt has .* context of .* is 64: ask for fewer"):
        write("def read(self, size): " * 20)
    for prompt, temperature, seed, words in (
        ("def", -1.0, 0, "--temperature -1.0; allowed: 0 or more"),
        ("def", float("nan"), 0, "--temperature nan"),
        ("def", float("inf"), 0, "--temperature inf"),
        ("a\udcff", 0.0, 0, r"a prompt is 'a\\udcff'; allowed: a token"),
        ("def", 0.0, -1, "--seed -1; allowed: 0 to"),
    ):
        with pytest.raises(UserError, match=words):
            write(prompt, temperature=temperature, seed=seed)


@pytest.fixture
def checkpoint(tokenizer, tmp_path) -> Path:
    model = lively_model(vocab_size=300, max_position_embeddings=64)
    model.generation_config.eos_token_id = None
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_one_token_to_choose_from_is_greedy_and_what_can_choose_none_is_refused(checkpoint, capsys):
    def write(*options: str) -> str:
        main(["--checkpoint", str(checkpoint), "--new-tokens", "9", *options, "--prompt", "def"])
        return capsys.readouterr().out

    greedy = write("--temperature", "0")
    hot = ("--temperature", "50", "--seed", "1")
    assert write(*hot) != greedy
    assert write(*hot, "--top-k", "0") != write(*hot)  # 50 of 300
    assert write(*hot, "--top-k", "1") == write(*hot, "--top-p", "1e-9") == greedy
    for option, value in (("top-p", "0"), ("top-p", "1.5"), ("top-p", "nan"), ("top-k", "-1")):
        with pytest.raises(UserError, match=f"--{option} {value}.*; allowed: "):
            write(f"--{option}", value)


@pytest.mark.parametrize("source", ["plain", "Llama 2"])
def test_a_text_is_shown_while_it_is_written_and_in_the_end_all_of_it(
    tmp_path, monkeypatch, source
):
    """With the space at the beginning of a line that transformers' TextStreamer loses."""
    monkeypatch.setattr("mixer.evaluation.generate.SHOW_EVERY", -1.0)
    tokenizer = existing_tokenizer(save_tokenizer(tmp_path, source))
    text = " ab naïve 日本\n cab\n\n  bed 🙂."

    def shown_parts(ids: torch.Tensor) -> list[str]:
        parts = []
        shown = ShownText(tokenizer, parts.append)
        shown.put(ids[None, :5])
        for token in ids[5:]:
            shown.put(token[None])
        shown.end()
        return parts

    parts = shown_parts(torch.from_numpy(text_encoder(tokenizer)(text).astype("int64")))
    assert "".join(parts).lstrip() == text.lstrip() and len(parts) > 10
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):  # also what is no text
        ids = torch.randint(len(tokenizer), (20,), generator=generator)
        assert "".join(shown_parts(ids)) == tokenizer.decode(ids, skip_special_tokens=True)


def test_in_a_terminal_each_line_that_is_typed_is_continued(checkpoint, monkeypatch, capsys):
    ours, theirs = pty.openpty()
    monkeypatch.setattr(sys, "stdin", open(theirs, encoding="utf-8"))
    os.write(ours, f"def\n\n{'class ' * 90}\ndef\n\x04".encode())
    main(["--checkpoint", str(checkpoint), "--new-tokens", "9", "--seed", "4294967294"])
    written, said = capsys.readouterr()
    alone = [
        continuations(checkpoint, ["def"], 9, 0.7, seed)[0] for seed in (4294967294, 0)
    ]  # the line between had a seed, too
    assert written == f"> {alone[0]}\n\n> > > {alone[1]}\n\n> \n"
    assert "Ctrl-D ends" in said and "error: the prompt has" in said
    monkeypatch.setattr(sys, "stdin", io.StringIO("def\n"))
    with pytest.raises(UserError, match="no terminal .*: give --prompt TEXT"):
        main(["--checkpoint", str(checkpoint)])


def test_a_terminal_gets_no_control_characters_of_a_text(checkpoint, monkeypatch, capsys):
    def write() -> None:
        prompt = "a\x1b[2J\r\x9b\x7f\tb\nc é"
        main(["--checkpoint", str(checkpoint), "--new-tokens", "40", "--prompt", prompt])

    write()
    whole = capsys.readouterr().out
    assert whole.startswith("a\x1b[2J\r\x9b\x7f\tb\nc é")  # into files and pipes as it is
    ours, theirs = pty.openpty()
    with open(theirs, "w", encoding="utf-8") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        write()
        shown = os.read(ours, 10_000).decode().replace("\r\n", "\n")
    assert shown.startswith(r"a\x1b[2J\r\x9b\x7f" + "\tb\nc é")
    assert {character for character in shown if not character.isprintable()} <= {"\n", "\t"}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_command_continues_a_prompt_beside_others_as_alone(tokenizer, tmp_path, temperature):
    """Also with a model that ignores attention_mask, and with a tokenizer that cannot pad."""
    torch.manual_seed(0)
    config = RwkvConfig(
        vocab_size=300,
        context_length=32,
        hidden_size=32,
        attention_hidden_size=32,
        num_hidden_layers=2,
    )
    RwkvForCausalLM(config).save_pretrained(tmp_path)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer).save_pretrained(tmp_path)
    prompts = ["def", "def read(self, size)", "class"]
    alone = [continuations(tmp_path, [prompt], 8, temperature, 5)[0] for prompt in prompts]
    assert continuations(tmp_path, prompts, 8, temperature, 5) == alone


# An xLSTM whose width is no multiple of 64, for which its cache has other shapes; an LFM2 without
# attention, whose cache cannot say how long the text is; a Moshi whose window the cache forgets.
WITHOUT_CACHE = {
    "xlstm": xLSTMConfig(vocab_size=300, hidden_size=32, num_hidden_layers=2, num_heads=4),
    "lfm2": Lfm2Config(layer_types=["conv", "conv"], **SIZES_OF_ATTENTION),
    "moshi": MoshiConfig(sliding_window=16, ffn_dim=32, head_dim=8, **SIZES_OF_ATTENTION),
}


@pytest.mark.parametrize("config", WITHOUT_CACHE.values(), ids=WITHOUT_CACHE)
def test_the_command_does_without_a_cache_that_fails_or_is_wrong(
    config, tokenizer, tmp_path, capsys
):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    prompt = "def read(self, size)"
    ids = torch.from_numpy(text_encoder(tokenizer)(prompt).astype("int64"))[None]
    for _ in range(8):
        following = model(ids, use_cache=False).logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, following], 1)
    expected = tokenizer.decode(ids[0], skip_special_tokens=True)
    assert continuations(tmp_path, [prompt], 8, 0.0, 0) == [expected]
    said = f"without a cache, as the one that transformers has for this {config.model_type} fails"
    assert said in capsys.readouterr().err


def test_the_command_refuses_a_model_that_fails_without_a_cache_too(tokenizer, tmp_path):
    """Here a Reformer, which has to lengthen texts and has no token for that."""
    config = ReformerConfig(
        vocab_size=300,
        hidden_size=32,
        num_attention_heads=2,
        attention_head_size=16,
        attn_layers=["local"],
        local_attn_chunk_length=8,
        axial_pos_embds=False,
        max_position_embeddings=32,
        pad_token_id=None,
        is_decoder=True,
    )
    ReformerModelWithLMHead(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="this reformer cannot write a text .*: give another"):
        continuations(tmp_path, ["def"], 2, 0.0, 0)


def test_the_command_refuses_a_prompt_that_the_tokenizer_of_a_task_cannot_encode(tmp_path):
    lively_model(vocab_size=300).save_pretrained(tmp_path)
    open_task(DataConfig(source="copy", vocab_size=300), 24).tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="the tokenizer cannot encode a text .*WordLevel"):
        continuations(tmp_path, ["def"], 2, 0.0, 0)


def test_the_command_refuses_more_tokens_than_a_transformers_context(tokenizer, tmp_path):
    config = GPT2Config(vocab_size=300, n_positions=16, n_embd=8, n_layer=1, n_head=1)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    prompt = len(tokenizer("def read").input_ids)
    assert len(continuations(tmp_path, ["def read"], 16 - prompt, 0.0, 0)) == 1
    with pytest.raises(UserError, match="--new-tokens is 16, .* is 16: ask for fewer"):
        continuations(tmp_path, ["def read"], 16, 0.0, 0)


@pytest.mark.parametrize("source", ["appends EOS", "Llama 2"])
def test_the_command_reads_a_prompt_as_training_reads_a_text(tmp_path, source, monkeypatch):
    """Nothing that the tokenizer puts around it: after an EOS begins another text. A space before
    it, as training has.
    """
    # As on a slow machine: bytes, a token that is not shown, and more bytes are one character.
    monkeypatch.setattr("mixer.evaluation.generate.SHOW_EVERY", -1)
    tokenizer = existing_tokenizer(save_tokenizer(tmp_path, source))
    model = lively_model(vocab_size=320, max_position_embeddings=64)
    model.generation_config.eos_token_id = None
    model.save_pretrained(tmp_path)
    prompts = ["abc", "cab <|endoftext|> bed"]
    written = []
    for prompt in prompts:
        ids = torch.from_numpy(text_encoder(tokenizer)(prompt).astype("int64"))[None]
        assert tokenizer.eos_token_id not in ids
        written.append(tokenizer.decode(generate(model, ids, new=6)[0], skip_special_tokens=True))
    expected = [prompt + text for prompt, text in zip(prompts, written, strict=True)]
    assert continuations(tmp_path, prompts, 6, 0.0, 0) == expected
