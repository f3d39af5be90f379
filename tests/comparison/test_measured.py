"""What a comparison takes from a run's metrics."""

import pytest

from mixer.comparison.training import measured
from mixer.data.config import Manifest, SplitManifest


def test_speed_and_time_are_those_of_the_median_step_and_the_first_steps_do_not_count():
    split = SplitManifest(1, 1, 1, 4000, "", "")
    manifest = Manifest("uint16", 400, 0, "", {}, {"train": split}, "")
    lines = [
        {"step": step, "loss": 2.0, "seconds": seconds, "tokens": 100 * step, "peak_memory_gb": 1.0}
        for step, seconds in ((10, 60.0), (20, 5.0), (30, 4.0), (40, 2.0))
    ]
    lines.append({"step": 40, "validation_loss": 1.5})
    row = measured(lines, manifest, is_speed=False)
    assert row["tokens_per_second"] == pytest.approx(100 / 0.4)
    assert row["training_seconds"] == pytest.approx(40 * 0.4)
    assert row["passes"] == 1.0 and row["validation_loss"] == 1.5
    fastest = measured(lines, manifest, is_speed=True)
    assert fastest["tokens_per_second"] == pytest.approx(100 / 0.2)
