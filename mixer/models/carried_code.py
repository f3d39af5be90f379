"""The code that goes with every saved model, for `trust_remote_code=True` where this package is not
imported: all of mixer/models/masked_mixer.

transformers' own save_pretrained finds these files by the relative imports of modeling.py. What
writes a config.json by itself takes them from here.
"""

import shutil
from pathlib import Path

CODE = Path(__file__).parent / "masked_mixer"


def write_code(directory: Path) -> None:
    """Copies the files that AUTO_MAP in a config.json names, and what they import."""
    for file in sorted(CODE.glob("*.py")):
        if file.name != "__init__.py":
            shutil.copyfile(file, directory / file.name)
