"""The order of the samples: each epoch another permutation, and a position is all of its state."""

import numpy as np
import pytest

from mixer.data.batches import SampleOrder


def test_the_order_is_the_same_everywhere_and_for_ever():
    """Frozen: a change here would change what every resumed run trains on."""
    assert SampleOrder(100, seed=0).indices(0, 10).tolist() == FROZEN_100
    assert SampleOrder(10**10 // 512, seed=3).indices(10**9, 4).tolist() == FROZEN_LARGE


FROZEN_100 = [44, 99, 19, 14, 21, 88, 93, 59, 55, 43]
FROZEN_LARGE = [7707422, 7980967, 2699730, 15822793]


@pytest.mark.parametrize("samples", [1, 2, 3, 4, 5, 7, 8, 9, 63, 64, 65, 1000, 4095, 4096, 4097])
def test_an_epoch_has_each_sample_once_whatever_their_number(samples):
    for epoch in range(3):
        assert sorted(SampleOrder(samples, seed=1).indices(epoch * samples, samples)) == list(
            range(samples)
        )


def test_the_position_is_all_that_a_resume_needs():
    whole = SampleOrder(37, seed=0).indices(0, 200)
    assert whole.dtype == np.int64
    for step in (1, 5, 64):  # whatever the batch size, and wherever it starts
        parts = [
            SampleOrder(37, 0).indices(start, min(step, 200 - start))
            for start in range(0, 200, step)
        ]
        assert np.array_equal(np.concatenate(parts), whole)
    assert len(SampleOrder(37, 0).indices(5, 0)) == 0
