"""The code that goes with every saved model, for `trust_remote_code=True` where this package is not imported.

transformers' own save_pretrained finds it by the relative imports of modeling.py; who writes a config.json alone takes it from
here.
"""

import shutil
from pathlib import Path

CODE = ("cache.py", "configuration.py", "gelu.py", "generation.py", "modeling.py", "plain.py", "step.py")


def write_code(directory: Path) -> None:
    """The files that AUTO_MAP in a config.json names, and what they import."""
    for name in CODE:
        shutil.copyfile(Path(__file__).with_name(name), directory / name)
