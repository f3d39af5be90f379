"""The models of a comparison, from their names on the command line or from a file."""

from dataclasses import dataclass

from mixer.common.errors import UserError
from mixer.common.yaml_file import read_yaml
from mixer.models.architecture import OF_MIXERS, OF_TRANSFORMERS, TRANSFORMERS, ModelConfig
from mixer.models.masked_mixer.plain import BACKENDS
from mixer.training.config import override


@dataclass(frozen=True)
class Entrant:
    """A model to train: its name, the settings that make it, and the module that trains it."""

    name: str
    overrides: tuple[str, ...]
    module: str = "mixer.train"
    is_backend: bool = True  # the configuration's masked mixer, under one of the backends

    @property
    def folder(self) -> str:
        return self.name.replace(":", "-").replace(" ", "-")


def entrant(name: str) -> Entrant:
    """The entrant of a name: a mixing backend, or a transformer: qwen3 or llama (as wide as the
    configuration's model), qwen3:HIDDENxHEADS or llama:HIDDENxHEADS.

    Raises UserError for any other name.
    """
    if name in BACKENDS:
        unused = [f"model.{key}=null" for key in OF_TRANSFORMERS]
        chosen = ("model.architecture=masked_mixer", f"model.mixing_backend={name}")
        return Entrant(name, (*chosen, *unused))
    kind, _, size = name.partition(":")
    hidden, _, heads = size.partition("x")
    if kind not in TRANSFORMERS or (size and not (hidden.isdecimal() and heads.isdecimal())):
        raise UserError(
            f"--backends {name}; allowed: {', '.join([*BACKENDS, *TRANSFORMERS])} (as wide as the "
            "configuration's model), or a transformer's HIDDENxHEADS such as qwen3:512x4"
        )
    # The MLP gets its default width, so that it has about as many parameters as a masked mixer
    # of its width, even where the configuration sets the mixer's.
    settings = [f"model.architecture={kind}", "model.intermediate_size=null"]
    settings.append("optim.shared_lags=false")  # there are no mixing weights
    defaults = ModelConfig()
    settings += [override(f"model.{key}", getattr(defaults, key)) for key in OF_MIXERS]
    if size:
        settings += [f"model.hidden_size={hidden}", f"model.num_attention_heads={heads}"]
    return Entrant(name, tuple(settings), is_backend=False)


def entrants_of(file: str) -> list[Entrant]:
    """The entrants that a YAML file names, each with the options in which it differs from the
    configuration:

        small mixer: {model.hidden_size: 256}
        small transformer: {model.architecture: qwen3, model.hidden_size: 256, optim.lr: 1e-3}

    Options of masked mixers that the configuration sets are taken back for a transformer.

    Raises UserError for a file that cannot be read or says something else.
    """
    found = []
    for name, options in read_yaml(file).items():
        if not (name and isinstance(options, dict) and all("." in key for key in options)):
            raise UserError(
                f"--models {file}: {name!r} has {options!r}; allowed: a name with options, such as "
                "`small: {model.hidden_size: 256}`"
            )
        architecture = options.get("model.architecture")
        kind = entrant(architecture if architecture in TRANSFORMERS else "auto")
        own = tuple(override(key, value) for key, value in options.items())
        found.append(Entrant(str(name), (*kind.overrides, *own), is_backend=False))
    return found


def without_mixing() -> Entrant:
    """The masked mixer without its token mixing: no backend can be faster, so it is the limit."""
    return Entrant("no mixing", entrant("auto").overrides, "mixer.comparison.no_mixing")
