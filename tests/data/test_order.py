"""The order of the samples: each epoch another permutation, and a position is all of its state."""

import numpy as np

from mixer.data.order import SampleOrder


def test_each_epoch_is_another_permutation_and_depends_on_the_seed():
    order = SampleOrder(100, seed=3)
    epochs = [order.indices(epoch * 100, 100) for epoch in range(3)]
    assert all(sorted(epoch) == list(range(100)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in [*epochs, SampleOrder(100, seed=4).indices(0, 100)]}) == 4


def test_the_position_is_all_that_a_resume_needs():
    whole = SampleOrder(37, seed=0).indices(0, 200)
    assert whole.dtype == np.int64
    for step in (1, 5, 64):  # whatever the batch size, and wherever it starts
        parts = [
            SampleOrder(37, 0).indices(start, min(step, 200 - start))
            for start in range(0, 200, step)
        ]
        assert np.array_equal(np.concatenate(parts), whole)
    order = SampleOrder(37, 0)
    assert np.array_equal(order.indices(150, 20), whole[150:170])
    assert np.array_equal(order.indices(10, 20), whole[10:30])
    assert len(order.indices(5, 0)) == 0
