"""The models of a comparison, from their names on the command line or from a file, as options by
section.key.
"""

from mixer.common.errors import UserError
from mixer.common.yaml_file import read_yaml
from mixer.models.architecture import OF_MIXERS, OF_TRANSFORMERS, TRANSFORMERS, ModelConfig
from mixer.ops.plain import BACKENDS


def entrant(name: str) -> dict:
    """The options of a mixing backend, or of a transformer: qwen3 or llama (as wide as the
    configuration's model), qwen3:HIDDENxHEADS or llama:HIDDENxHEADS.

    Raises UserError for any other name.
    """
    if name in BACKENDS:
        chosen = {"model.architecture": "masked_mixer", "model.mixing_backend": name}
        return chosen | {f"model.{key}": None for key in OF_TRANSFORMERS}
    kind, _, size = name.partition(":")
    hidden, _, heads = size.partition("x")
    if kind not in TRANSFORMERS or (size and not (hidden.isdecimal() and heads.isdecimal())):
        raise UserError(
            f"--backends {name}; allowed: {', '.join([*BACKENDS, *TRANSFORMERS])} (as wide as the "
            "configuration's model), or a transformer's HIDDENxHEADS such as qwen3:512x4"
        )
    # The MLP gets its default width, so that it has about as many parameters as a masked mixer
    # of its width, even where the configuration sets the mixer's.
    found = {"model.architecture": kind, "model.intermediate_size": None}
    found["optim.shared_lags"] = False  # there are no mixing weights
    found |= {f"model.{key}": getattr(ModelConfig(), key) for key in OF_MIXERS}
    if size:
        found |= {"model.hidden_size": int(hidden), "model.num_attention_heads": int(heads)}
    return found


def entrants_of(file: str) -> dict[str, dict]:
    """The entrants that a YAML file names, each with the options in which it differs from the
    configuration:

        small mixer: {model.hidden_size: 256}
        small transformer: {model.architecture: qwen3, model.hidden_size: 256, optim.lr: 1e-3}

    Options of masked mixers that the configuration sets are taken back for a transformer.

    Raises UserError for a file that cannot be read or says something else.
    """
    found = {}
    for name, options in read_yaml(file).items():
        if not (name and isinstance(options, dict) and all("." in key for key in options)):
            raise UserError(
                f"--models {file}: {name!r} has {options!r}; allowed: a name with options, such as "
                "`small: {model.hidden_size: 256}`"
            )
        architecture = options.get("model.architecture")
        found[str(name)] = entrant(architecture if architecture in TRANSFORMERS else "auto")
        found[str(name)] |= options
    return found
