"""Models of directories, masked mixers or any other causal language models that transformers knows:
loaded, with every fault named, and written.
"""

import re
import shutil
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from mixer.checkpoints.checkpoint import REMEDY
from mixer.checkpoints.model_files import check_checkpoint, refused, weight_types
from mixer.checkpoints.writer import not_finite
from mixer.common.errors import UserError, first_line
from mixer.common.files import check_new, read_json, whole_directory
from mixer.common.hardware import is_out_of_memory
from mixer.data.tokenizer import fit_to_models, read_tokenizer, vocabulary_size
from mixer.models.auto import is_registered
from mixer.models.masked_mixer.configuration import MaskedMixerConfig
from mixer.models.masked_mixer.modeling import MaskedMixerForCausalLM

# Files that sentence-transformers reads beside a model that was trained to make vectors of texts.
OF_SENTENCE_TRANSFORMERS = ("modules.json", "1_Pooling/config.json")


def load_checkpoint(
    directory: Path, device: torch.device, backend: str = ""
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """(model in fp32 on the device and in eval mode, tokenizer) of any causal language model.

    backend: the mixing backend of a masked mixer; empty: what the checkpoint says. Raises UserError
    if the directory is incomplete or damaged, and if transformers does not know the model as a
    causal language model. The tokenizer may have other ids than the model: see `check_token`.
    """
    check_checkpoint(directory)
    config = load_model_config(directory)
    tokenizer = read_tokenizer(str(directory))
    if backend and isinstance(config, MaskedMixerConfig):
        config.mixing_backend = backend
    model = load_model(directory, config)
    model.to(device)  # pyright: ignore[reportArgumentType]
    return model.eval(), tokenizer


def load_masked_mixer(directory: Path) -> MaskedMixerForCausalLM:
    """`load_checkpoint`, of a masked mixer alone, on the CPU; a tokenizer may be missing."""
    check_checkpoint(directory)
    config = load_model_config(directory)
    if not isinstance(config, MaskedMixerConfig):
        raise UserError(f"{directory} is a {config.model_type}: give a masked mixer")
    model = load_model(directory, config)
    assert isinstance(model, MaskedMixerForCausalLM)
    return model


def load_model_config(directory: Path) -> PreTrainedConfig:
    """Raises UserError for a config.json that the installed transformers cannot use."""
    try:
        is_registered(read_json(directory / "config.json", REMEDY).get("model_type", ""))
        config = AutoConfig.from_pretrained(
            str(directory), trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # transformers and the hub client each raise their own kinds
        problem = f"has a config.json that cannot be used ({first_line(error)}); allowed: a "
        problem += "masked mixer, or a causal language model that the installed transformers has"
        raise refused(directory, problem) from None
    config.return_dict = True  # whatever the file says: callers read outputs by their names
    for name in ("auto_map", "transformers_weights"):  # other code, and other files of weights
        vars(config).pop(name, None)
    return config


def load_model(directory: Path, config: PreTrainedConfig) -> PreTrainedModel:
    """The directory's model in fp32, on the CPU. Raises UserError if its weights cannot be read,
    are incomplete, or are not finite floating-point numbers.
    """
    logging.disable_progress_bar()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # its report of weights that do not fit: they are refused below
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]
            str(directory),
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            local_files_only=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except Exception as error:  # transformers and a model's own code each raise their own kinds
        if is_out_of_memory(error):
            raise
        raise refused(directory, f"cannot be read ({first_line(error)})") from error
    finally:
        logging.set_verbosity(verbosity)
    _check_weights(directory, model, loading)
    check_finite(directory, model)
    return model


def _check_weights(directory: Path, model: PreTrainedModel, loading: dict) -> None:
    """Raises UserError for parameters that the checkpoint lacks or has in another shape, which
    transformers would fill with random numbers, for weights that the model has no place for, which
    it would drop, and for parameters saved as integers, bool or complex numbers.
    """
    unknown = sorted(loading["unexpected_keys"])
    advice = ". If its mixing variant is yours, add it to VARIANTS: docs/add_a_mixing_variant.md"
    if not isinstance(model, MaskedMixerForCausalLM):
        advice = ""
        # Old versions may have saved what is not needed. Weights that differ from the model's in
        # the number of their layer alone are layers that config.json leaves out.
        number = re.compile(r"\.\d+(?=\.)")
        numberless = {number.sub("", name) for name in model.state_dict()}
        unknown = [name for name in unknown if number.sub("", name) in numberless]
    names = [f".{name}" for name, _ in model.named_parameters(remove_duplicate=False)]
    wrong = [
        f"{saved} of type {dtype}"
        for saved, dtype in weight_types(directory).items()
        if not dtype.startswith(("F", "BF"))  # buffers, such as masks, may be of others
        and any(name.endswith(f".{saved}") for name in names)
    ]
    for weights, problem in (
        (sorted(loading["missing_keys"]), "lacks the weights"),
        (
            sorted(name for name, *_ in loading["mismatched_keys"]),
            "has other shapes than its config.json says, of",
        ),
        (unknown, "has weights that its config.json has no place for,"),
        (wrong, "has weights that are not floating-point numbers,"),
    ):
        if weights:
            raise refused(directory, f"{problem} {', '.join(weights[:3])}...", advice)


def write_new(
    output: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast | None,
    source: Path | None = None,
    card: str = "",
) -> None:
    """Writes a model directory, whole or not at all, and says so. Raises UserError unless `output`
    is new.

    source: the checkpoint that the model is from: what it has for sentence-transformers stays.
    """
    logging.disable_progress_bar()  # of transformers: writing takes no time
    with whole_directory(output) as stage:
        check_new(output)  # another process may have written there
        model.save_pretrained(stage)
        if tokenizer is not None:
            fit_to_models(tokenizer, model.config.max_position_embeddings)
            tokenizer.save_pretrained(stage)
        for name in OF_SENTENCE_TRANSFORMERS:
            if source is not None and (source / name).is_file():
                (stage / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(source / name, stage / name)
        if card:
            (stage / "README.md").write_text(card, encoding="utf-8")
    with_one = "with" if tokenizer else "without"
    print(f"wrote {output}: {model.num_parameters():,} parameters, {with_one} a tokenizer")


def check_finite(source: Path, model: PreTrainedModel, remedy: str = "") -> None:
    """Raises UserError naming the weights that hold a NaN or an infinity."""
    if bad := not_finite(dict(model.named_parameters())):
        remedy = remedy or "its training diverged, or the file is damaged: give another one"
        listed = ", ".join(bad[:3])
        raise UserError(f"{source} has weights that are not finite in {listed}...: {remedy}")


def check_vocabulary(tokenizer: PreTrainedTokenizerFast, vocab_size: int, name: str) -> None:
    """Raises UserError unless the tokenizer can be the model's, which may have more ids (padding),
    but not fewer. name: what the tokenizer is called.
    """
    ids = vocabulary_size(tokenizer)
    if ids > vocab_size:
        raise UserError(
            f"{name} has {ids} ids, the model {vocab_size}; allowed: as many in the model, or more:"
            " give the tokenizer that the model was trained with (for a run, the tokenizer/ folder "
            "of its data)"
        )


def check_token(largest: int, model: PreTrainedModel, name: str) -> None:
    """Raises UserError for a token that the model does not have. name: what the text is called."""
    ids = model.config.get_text_config().vocab_size
    if largest >= ids:
        raise UserError(
            f"{name} has token {largest}, but the model's vocabulary ends at {ids - 1}: give "
            "another text, or the tokenizer that the model was trained with"
        )
