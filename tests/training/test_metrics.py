"""Promises of metrics.jsonl beyond a single run: what a resumed run still knows."""

import json

import pytest

from mixer.common.errors import UserError
from mixer.training.config import LoggingConfig
from mixer.training.metrics import Metrics


def test_a_resumed_run_knows_the_validation_losses_before_it(tmp_path):
    """Or `best` would point to the best checkpoint since the resume, not to the best of all."""
    lines = [{"step": 4, "validation_loss": 2.5}, {"step": 4, "loss": 3.0}]
    lines += [{"step": 8, "validation_loss": 2.0}, {"step": 9, "loss": 2.4}]
    texts = [json.dumps(line).encode() for line in lines]
    texts[1:1] = [b"\xff\xfe", b"17"]  # damage that must not stop the run
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([*texts, b'{"step": 9, "lo']))
    metrics, said = Metrics(tmp_path, LoggingConfig(), {}, None), []
    metrics.rewind(8, again=set(), say=said.append)
    metrics.write({"step": 12, "validation_loss": 2.2})
    metrics.close()
    assert metrics.validation_losses == {4: 2.5, 8: 2.0, 12: 2.2}
    kept = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert kept == [*lines[:3], {"step": 12, "validation_loss": 2.2}]
    assert len(said) == 1 and "left out line 2, 3: " in said[0]


def test_a_link_to_nowhere_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("gone/metrics.jsonl")
    with pytest.raises(UserError, match="metrics.jsonl is a link .*gone.*: make the directory"):
        Metrics(tmp_path, LoggingConfig(), {}, None)
    (tmp_path / "gone").mkdir()
    Metrics(tmp_path, LoggingConfig(), {}, None).close()
