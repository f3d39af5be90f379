"""The models of a comparison, from their names on the command line."""

import json
from dataclasses import dataclass

from mixer.common.errors import UserError
from mixer.models.architecture import OF_LLAMA, OF_MIXERS, ModelConfig
from mixer.models.masked_mixer.plain import BACKENDS


@dataclass(frozen=True)
class Entrant:
    """A model to train: its name, the settings that make it, and the module that trains it."""

    name: str
    overrides: tuple[str, ...]
    module: str = "mixer.train"

    @property
    def folder(self) -> str:
        return self.name.replace(":", "-").replace(" ", "-")

    @property
    def is_mixer(self) -> bool:
        return not self.name.startswith("llama")


def entrant(name: str) -> Entrant:
    """The entrant of a name: a mixing backend, llama (as wide as the configuration's model), or
    llama:HIDDENxHEADS.

    Raises UserError for any other name.
    """
    if name in BACKENDS:
        unused = [f"model.{key}=null" for key in OF_LLAMA]
        chosen = ("model.architecture=masked_mixer", f"model.mixing_backend={name}")
        return Entrant(name, (*chosen, *unused))
    kind, _, size = name.partition(":")
    hidden, _, heads = size.partition("x")
    if kind != "llama" or (size and not (hidden.isdecimal() and heads.isdecimal())):
        raise UserError(
            f"--backends {name}; allowed: {', '.join(BACKENDS)}, llama (as wide as the "
            "configuration's model), or llama:HIDDENxHEADS such as llama:512x4"
        )
    # The MLP gets its default width, so that llama has about as many parameters as a masked mixer
    # of its width, even where the configuration sets the mixer's.
    settings = ["model.architecture=llama", "model.intermediate_size=null"]
    settings.append("optim.shared_lags=false")  # there are no mixing weights
    defaults = ModelConfig()
    settings += [f"model.{key}={json.dumps(getattr(defaults, key))}" for key in OF_MIXERS]
    if size:
        settings += [f"model.hidden_size={hidden}", f"model.num_attention_heads={heads}"]
    return Entrant(name, tuple(settings))


def without_mixing() -> Entrant:
    """The masked mixer without its token mixing: no backend can be faster, so it is the limit."""
    return Entrant("no mixing", entrant("auto").overrides, "mixer.comparison.no_mixing")
