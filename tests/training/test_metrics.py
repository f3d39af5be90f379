"""Promises of metrics.jsonl beyond a single run: what a resumed run still knows."""

import json

from mixer.training.metrics import LoggingConfig, Metrics


def test_a_resumed_run_knows_the_validation_losses_before_it(tmp_path):
    """Or `best` would point to the best checkpoint since the resume, not to the best of all."""
    lines = [{"step": 4, "validation_loss": 2.5}, {"step": 4, "loss": 3.0}]
    lines += [{"step": 8, "validation_loss": 2.0}, {"step": 9, "loss": 2.4}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    metrics = Metrics(tmp_path, LoggingConfig(), {}, None)
    metrics.rewind(8, again=set())
    metrics.write({"step": 12, "validation_loss": 2.2})
    metrics.close()
    assert metrics.validation_losses == {4: 2.5, 8: 2.0, 12: 2.2}
    kept = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert kept == [*lines[:3], {"step": 12, "validation_loss": 2.2}]
