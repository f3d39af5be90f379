"""The configuration of a masked mixer as transformers saves and loads it, and the model's code
beside a saved model.
"""

import inspect
import math
import re
from pathlib import Path

from transformers import PreTrainedConfig

from mixer.common.options import option, option_problems
from mixer.ops.plain import triangular_conv

from .model_options import NAMES, RECURRENT, ModelOptions, shape_problems

__all__ = ["AUTO_MAP", "NAMES", "RECURRENT", "MaskedMixerConfig", "copy_code"]

# Which code beside a saved model each of transformers' Auto classes loads with trust_remote_code.
AUTO_MAP = {
    "AutoConfig": "configuration.MaskedMixerConfig",
    "AutoModel": "modeling.MaskedMixerModel",
    "AutoModelForCausalLM": "modeling.MaskedMixerForCausalLM",
}


class MaskedMixerConfig(PreTrainedConfig):
    """The configuration of a masked mixer: the fields of ModelOptions, and what PreTrainedConfig
    takes. Raises ValueError for values that are not allowed, alone or together.
    """

    model_type = "masked_mixer"

    def __init__(self, **options):
        if tables := options.pop("value_embeddings", 0):  # which earlier versions had
            raise ValueError(
                f"value_embeddings = {tables}; only commit 98969e4 and earlier can load such a "
                "model: use that"
            )
        given = {name: options.pop(name) for name in NAMES if name in options}
        chosen = ModelOptions(**given)
        if problems := option_problems(chosen) or shape_problems(chosen):
            raise ValueError("; ".join(problems))
        if chosen.intermediate_size is None:
            chosen.intermediate_size = 4 * chosen.hidden_size
        super().__init__(**vars(chosen), **options)

    @property
    def longest_text(self) -> float:
        """The most tokens that the model reads: the context, or infinity."""
        return self.max_position_embeddings if self.mixing_weight == "full" else math.inf

    def save_pretrained(self, save_directory, **kwargs) -> None:
        """As in transformers, with the model's code for machines without this package."""
        self.auto_map = AUTO_MAP
        copy_code(Path(save_directory))
        super().save_pretrained(save_directory, **kwargs)


def copy_code(directory: Path) -> None:
    """Copies the model's files into a directory, and the files of mixer/ops and mixer/common that
    they import. All are in one folder there, so these imports become relative.
    """
    directory.mkdir(parents=True, exist_ok=True)
    elsewhere = (Path(inspect.getfile(part)) for part in (option, triangular_conv))
    files = {file.stem: file for file in (*Path(__file__).parent.glob("*.py"), *elsewhere)}
    del files["__init__"]
    for name, file in files.items():
        code = file.read_text(encoding="utf-8")
        code = re.sub(r"^( *from) mixer\.\w+(\.\w+ import)", r"\1 \2", code, flags=re.MULTILINE)
        if name == "modeling":
            # Up to 5.9, transformers takes no files along but those that this one imports itself.
            others = sorted(files.keys() - {name})
            code += "".join(f"from .{other} import __doc__ as _\n" for other in others)
        (directory / file.name).write_text(code, encoding="utf-8")
