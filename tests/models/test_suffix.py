"""What followed the last time that the same tokens stood in the context, against a loop."""

import pytest
import torch
from models import MIXINGS, small_model

from mixer.models.masked_mixer.suffix import followers


@pytest.mark.parametrize("length, longest, context", [(40, 3, 64), (40, 3, 9), (3, 5, 8)])
def test_the_latest_place_with_the_most_equal_tokens_is_found(length, longest, context):
    ids = torch.randint(0, 3, (4, length), generator=torch.Generator().manual_seed(0))
    tokens, equal = followers(ids, torch.arange(length)[None], context, longest)
    ones = [followers(ids, torch.tensor([[i]]), context, longest) for i in range(length)]
    assert (torch.cat([token for token, _ in ones], 1) == tokens).all()
    assert (torch.cat([count for _, count in ones], 1) == equal).all()
    for text, token, count in zip(ids.tolist(), tokens.tolist(), equal.tolist(), strict=True):
        for i in range(length):
            expected = (0, None)
            for n in range(1, min(longest, i + 1) + 1):
                suffix = text[i - n + 1 : i + 1]
                ends = [j for j in range(n - 1, i) if text[j - n + 1 : j + 1] == suffix]
                if ends and i - ends[-1] < context:
                    expected = (n, text[ends[-1] + 1])
            assert (count[i], token[i] if count[i] else None) == expected


def test_rows_that_a_checkpoint_does_not_have_start_at_zero(tmp_path):
    model = small_model(**MIXINGS["gate-heads"])
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(
        tmp_path, vocab_size=model.config.vocab_size + 7, ignore_mismatched_sizes=True
    )
    assert not loaded.model.suffix_match.embed_tokens.weight.any()
