# Copied beside every saved model: it imports from this package only files that are copied too.
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

__all__ = ["AUTO_MAP", "NAMES", "RECURRENT", "MaskedMixerConfig", "code_files", "copy_code"]

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
        model = ModelOptions(**{name: options.pop(name) for name in NAMES if name in options})
        if problems := option_problems(model) or shape_problems(model):
            raise ValueError("; ".join(problems))
        if model.intermediate_size is None:
            model.intermediate_size = 4 * model.hidden_size
        super().__init__(**vars(model) | options)

    @property
    def longest_text(self) -> float:
        """The most tokens that the model reads: the context, or infinity."""
        return self.max_position_embeddings if self.mixing_weight == "full" else math.inf

    def save_pretrained(self, save_directory, **kwargs) -> None:
        """As in transformers, with the model's code for machines without this package."""
        self.auto_map = AUTO_MAP
        copy_code(Path(save_directory))
        super().save_pretrained(save_directory, **kwargs)


def code_files() -> list[Path]:
    """The files that are copied beside every saved model: its own, and those of mixer/ops and
    mixer/common that these import. The first line of each says so. Beside a saved model, where this
    code runs too, all are in one folder.
    """
    model = Path(__file__).parent
    ops = Path(inspect.getfile(triangular_conv)).parent
    common = Path(inspect.getfile(option)).parent
    return [
        model / "modeling.py",
        model / "mixing.py",
        model / "convolution.py",
        model / "model_options.py",
        model / "configuration.py",
        model / "suffix.py",
        model / "cache.py",
        model / "loops.py",
        ops / "plain.py",
        common / "options.py",
    ]


def copy_code(directory: Path) -> None:
    """Copies `code_files` into a directory. What they import from each other's folders becomes
    relative.
    """
    directory.mkdir(parents=True, exist_ok=True)
    # Where transformers has loaded a saved configuration alone, the other files are missing.
    files = [file for file in code_files() if file.exists()]
    for file in files:
        code = file.read_text(encoding="utf-8")
        code = re.sub(r"^( *from) mixer\.\w+(\.\w+ import)", r"\1 \2", code, flags=re.MULTILINE)
        if file.stem == "modeling":
            # Up to 5.9, transformers takes no files along but those that this one imports itself.
            for module in sorted(path.stem for path in files if path != file):
                code += f"from .{module} import __doc__ as _\n"
        (directory / file.name).write_text(code, encoding="utf-8")
