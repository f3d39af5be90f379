"""The data of a run: both splits as samples, with their tokenizer."""

from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from mixer.common.ranks import Say
from mixer.data.config import TASKS, DataConfig
from mixer.data.manifest import SPLITS, Manifest
from mixer.data.pairs import PairFile
from mixer.data.prepare import prepare
from mixer.data.tasks import TaskSamples, open_task
from mixer.data.token_file import TokenFile
from mixer.data.tokenizer import load_tokenizer, token_bytes

Samples = TokenFile | TaskSamples | PairFile


@dataclass
class Data:
    """Prepared data, or a task."""

    manifest: Manifest
    training: Samples
    validation: Samples
    tokenizer: PreTrainedTokenizerBase
    token_bytes: np.ndarray  # (vocabulary,): of the text that each token stands for


def open_data(config: DataConfig, context: int, as_pairs: bool = False, say: Say = print) -> Data:
    """The data as samples of `context` tokens, or pairs of texts of at most so many. A text is
    prepared unless that was done already.
    """
    if config.source in TASKS:
        manifest, splits, tokenizer = open_task(config, context)
    else:
        manifest, tokenizer = prepare(config, say), load_tokenizer(config.directory)
        kind = PairFile if as_pairs else TokenFile
        splits = [kind(config.directory, split, context, say) for split in SPLITS]
    # Both are saved with the model, for tools that cut texts and make batches of them.
    tokenizer.model_max_length = context
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return Data(manifest, *splits, tokenizer, token_bytes(tokenizer))
