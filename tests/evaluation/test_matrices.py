"""The table of a checkpoint's mixing matrices."""

import numpy as np

from mixer.evaluation.matrices import measures


def test_each_column_measures_what_it_says():
    matrix = np.zeros((4, 4))
    np.fill_diagonal(matrix, (1, 2, 3, 2))
    matrix[3] = (1, 0, -7, 2)  # 2 + 7 of the 10 are the share that counts, in two tokens
    assert measures(5, {"W head 1": matrix}) == [
        {
            "layer": 5,
            "matrix": "W head 1",
            "mean abs W": 16 / 10,  # of the lower triangle
            "share at lag 0": 8 / 16,
            "effective context, last row": 2,
        }
    ]
