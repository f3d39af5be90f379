"""What sentence-transformers reads beside a model that makes vectors of texts."""

import json
from pathlib import Path

LISTING = "modules.json"
# The model, the state of the last token, divided by its norm: as (folder, class).
MODULES = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
POOLING = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}


def write_modules(directory: Path, hidden_size: int) -> None:
    listing = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{name}"}
        for n, (path, name) in enumerate(MODULES)
    ]
    (directory / LISTING).write_text(json.dumps(listing, indent=1))
    (directory / "1_Pooling").mkdir()
    pooling = json.dumps(POOLING | {"word_embedding_dimension": hidden_size}, indent=1)
    (directory / "1_Pooling/config.json").write_text(pooling)
