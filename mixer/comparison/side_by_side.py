"""The plan of backends and transformers that train with one configuration."""

from pathlib import Path

from mixer.common.errors import UserError
from mixer.common.files import as_path
from mixer.common.values import read_yaml
from mixer.models.config import TRANSFORMERS, unread_options
from mixer.models.masked_mixer.model_options import BACKENDS
from mixer.training.config import flatten, load_config

ENTRANTS = ", ".join([*BACKENDS, *TRANSFORMERS, "a config.json of transformers"])


def plan_of(
    config: str, names: list[str], seeds: int, seconds: float | None, overrides: dict
) -> dict:
    """A plan, see mixer.comparison.plan, of models as in ENTRANTS.

    config: a file; overrides: options that take the place of its own, by section.key. seeds: how
    many each model trains with. seconds: of training, instead of train.steps. Raises UserError for
    values that are not allowed.
    """
    if not names or seeds < 1 or not (seconds is None or 0 < seconds < float("inf")):
        problem = f"--backends {' '.join(names)} --seeds {seeds} --seconds {seconds}"
        raise UserError(f"{problem}; allowed: 1 or more of each, and finite seconds above 0")
    if overrides.keys() & {"name", "output_dir"}:
        raise UserError("a comparison takes no name and no output_dir: give --output PATH")
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"--backends {' '.join(names)}: {twice[0]} is named twice; name it once")
    models = {Path(name).name: entrant(name) for name in names}
    if len(models) < len({*names}):
        raise UserError(f"--backends {' '.join(names)}: two files have one name; give them others")
    shared = {key: value for key, value in overrides.items() if not key.startswith("model.")}
    run = load_config(config, [], shared)
    common = {"logging.log_every": run.logging.log_every}
    common |= dict(flatten(read_yaml(as_path(config)))) | overrides
    common = {key: value for key, value in common.items() if key not in ("name", "output_dir")}
    plan = {"common": common, "seeds": [run.seed + n for n in range(1, seeds)]}
    if not seconds:
        return plan | {"reference": next(iter(models)), "runs": models}
    kinds = {name: {"": model_options} for name, model_options in models.items()}
    return plan | {"seconds": seconds, "kinds": kinds}


def entrant(name: str) -> dict:
    """The options of a mixing backend, of a transformer as wide as the configured model, or of the
    model that a file describes.
    """
    if name in BACKENDS:
        of_model = {"architecture": "masked_mixer", "mixing_backend": name}
    elif name in TRANSFORMERS:
        # With an MLP of default width it has about as many parameters as a mixer of its width.
        of_model = {"architecture": name, "intermediate_size": None}
    elif name.endswith(".json"):
        of_model = {"architecture": "auto", "config": name}
    else:
        raise UserError(f"--backends {name}; allowed: {ENTRANTS}; other models need a plan")
    of_model |= unread_options(of_model["architecture"])
    return {f"model.{key}": value for key, value in of_model.items()}
