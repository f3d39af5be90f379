"""The table and the pictures of a checkpoint's mixing matrices."""

import numpy as np
from matplotlib import colormaps
from matplotlib.image import imread

from mixer.evaluation.matrices import measures, plot_layer


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


def test_a_heat_map_shows_positive_weights_red_negative_ones_blue_and_zeros_white(tmp_path):
    matrix = np.zeros((3, 3))
    matrix[1:, 0] = (1, -1)  # of six weights that are shown
    plot_layer(1, {"W": matrix}, tmp_path / "layer.png")
    pixels = imread(tmp_path / "layer.png")[..., :3]
    shares = [
        np.isclose(pixels, colormaps["RdBu_r"](value)[:3], atol=0.01).all(-1).mean()
        for value in (1.0, 0.0, 0.5)
    ]
    assert shares[0] > 0.05 and shares[1] > 0.05 and shares[2] > 3 * shares[0], shares
