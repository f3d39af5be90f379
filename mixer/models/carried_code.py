"""The code that is saved beside every model: all files of mixer/models/masked_mixer.

With it, `trust_remote_code=True` loads a saved model where this package is not installed.
transformers' own save_pretrained copies these files by following the relative imports of
modeling.py. Code that writes a config.json without it copies them by `write_code`.
"""

import shutil
from pathlib import Path

CODE = tuple(
    path
    for path in sorted((Path(__file__).parent / "masked_mixer").glob("*.py"))
    if path.name != "__init__.py"
)


def write_code(directory: Path) -> None:
    """Copies the code into a checkpoint directory."""
    for file in CODE:
        shutil.copyfile(file, directory / file.name)
