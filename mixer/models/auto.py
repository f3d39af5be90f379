"""Gives transformers' Auto classes the models, without importing transformers: ours, and those of
flash-linear-attention where it is installed.

`import mixer` costs no time this way. Configurations are registered when a program imports
AutoConfig, or at once where it has. A model, which takes seconds to import, is imported when an
Auto class is asked for it.
"""

import sys
from collections import UserDict
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType


def register() -> None:
    _after_import("transformers.models.auto.configuration_auto", _add_configurations)
    _after_import("transformers.models.auto.modeling_auto", _add_models)


def _add_configurations(auto: ModuleType) -> None:
    from mixer.models.masked_mixer.configuration import MaskedMixerConfig

    mapping = auto.CONFIG_MAPPING
    mapping._extra_content = OnDemand(mapping._extra_content)
    mapping.register(MaskedMixerConfig.model_type, MaskedMixerConfig)
    # Its base class imports modeling_auto, which may be waiting for this.
    shifted = partial(_imported, "mixer.models.shifted_qwen3", "ShiftedQwen3Config")
    mapping.register("shifted_qwen3", shifted)


def _add_models(auto: ModuleType) -> None:
    from mixer.models.masked_mixer.configuration import MaskedMixerConfig

    module = "mixer.models.masked_mixer.modeling"
    for auto_class, name in (
        (auto.AutoModel, "MaskedMixerModel"),
        (auto.AutoModelForCausalLM, "MaskedMixerForCausalLM"),
    ):
        mapping = auto_class._model_mapping
        mapping._extra_content = OnDemand(mapping._extra_content)
        mapping.register(MaskedMixerConfig, partial(_imported, module, name))


def _imported(module: str, name: str) -> type:
    return getattr(import_module(module), name)


class OnDemand(UserDict):
    """What an Auto class has registered: classes, or a `partial` that imports one, which whoever
    reads the value never sees.
    """

    def __getitem__(self, key):
        value = super().__getitem__(key)
        return value() if isinstance(value, partial) else value


def is_registered(model_type: str) -> bool:
    """Whether transformers has a configuration of this type. Types that flash-linear-attention
    alone has, such as gated_deltanet, are registered when it is imported: not before, because it
    needs Triton, and replaces transformers' own mamba2, which runs without.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING and find_spec("fla"):
        import_module("fla")
    return model_type in CONFIG_MAPPING


# ------------------------------------------------------------------------- when others import


def _after_import(name: str, job: Callable[[ModuleType], None]) -> None:
    """Calls job(module) once the module of this name is imported."""
    if name in sys.modules:
        job(sys.modules[name])
    else:
        sys.meta_path.insert(0, JobAfterImport(name, job))


class JobAfterImport(MetaPathFinder):
    """Finds one module as Python does, and does a job when it has been executed."""

    def __init__(self, name: str, job: Callable[[ModuleType], None]):
        self.name = name
        self.job = job

    def find_spec(self, name: str, path=None, target=None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == self.name else None
        if spec is not None and (loader := spec.loader) is not None:
            execute = loader.exec_module

            def execute_and_do(module: ModuleType) -> None:
                execute(module)
                sys.meta_path.remove(self)
                self.job(module)

            loader.exec_module = execute_and_do
        return spec
