"""Draws the explanatory pictures of the README and docs: python docs/figures.py"""

from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Polygon, Rectangle
from PIL import Image

HERE = Path(__file__).parent
BLUE = "#0072B2"
ORANGE = "#D55E00"
GREEN = "#009E73"
PINK = "#CC79A7"
PALE_BLUE = "#cfe4f2"
PALE_ORANGE = "#f9dcc8"
PALE_GREEN = "#cdebe0"
PALE_PINK = "#f3dfea"
GREY = "#d9d9d9"
INK = "#222222"
matplotlib.rcParams.update({"font.size": 11, "text.color": INK, "mathtext.fontset": "cm"})


def canvas(width: float, height: float):
    """Axes in inches, without ticks: 1 unit = 1 inch, at 120 dpi."""
    figure = Figure(figsize=(width, height), dpi=120, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.axis("off")
    return figure, axes


def save(figure, name: str) -> None:
    """With a palette: a third of the bytes of a file with all colours."""
    figure.canvas.draw()
    picture = Image.fromarray(np.asarray(figure.canvas.buffer_rgba())).convert("RGB")
    picture.quantize(256, Image.Quantize.MAXCOVERAGE).save(HERE / name, optimize=True)


def box(axes, x, y, width, height, text="", face="white", fontsize=None):
    shape = f"round,pad=0,rounding_size={min(0.12, height / 4)}"
    axes.add_patch(
        FancyBboxPatch(
            (x, y), width, height, boxstyle=shape, facecolor=face, edgecolor=INK, linewidth=1.3
        )
    )
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=fontsize)


def arrow(axes, start, end, colour=INK, mutation_scale=14):
    axes.add_patch(
        FancyArrowPatch(
            start,
            end,
            color=colour,
            arrowstyle="-|>",
            mutation_scale=mutation_scale,
            linewidth=1.5,
            shrinkA=0,
            shrinkB=0,
        )
    )


def lines(axes, points, colour=INK, zorder=None):
    xs, ys = zip(*points, strict=True)
    axes.plot(xs, ys, color=colour, linewidth=1.5, solid_capstyle="round", zorder=zorder)


# ------------------------------------------------------------------------- operator


def draw_tiles(axes, x, y, side, count):
    """A square of count x count tiles: read in full, cut by the diagonal, or skipped."""
    tile = side / count
    for row in range(count):
        for column in range(count):
            left = x + column * tile
            bottom = y + side - (row + 1) * tile
            if column > row:
                axes.add_patch(
                    Rectangle(
                        (left, bottom), tile, tile, facecolor="white", edgecolor=GREY, linewidth=0.9
                    )
                )
                continue
            face = PALE_BLUE if column < row else "white"
            edge = GREY if column == row else BLUE
            axes.add_patch(
                Rectangle((left, bottom), tile, tile, facecolor=face, edgecolor=edge, linewidth=0.9)
            )
            if column == row:
                corners = [(left, bottom + tile), (left, bottom), (left + tile, bottom)]
                axes.add_patch(
                    Polygon(corners, facecolor=PALE_ORANGE, edgecolor=ORANGE, linewidth=0.9)
                )
    axes.add_patch(Rectangle((x, y), side, side, fill=False, edgecolor=INK, linewidth=1.4))


def draw_rows(axes, x, y, width, side, count, face, picked, colour):
    """A (tokens x channels) matrix with `picked` rows in colour."""
    row = side / count
    for index in range(count):
        axes.add_patch(
            Rectangle(
                (x, y + side - (index + 1) * row),
                width,
                row,
                facecolor=face if index in picked else "white",
                edgecolor=colour if index in picked else GREY,
                linewidth=0.9,
            )
        )
    axes.add_patch(Rectangle((x, y), width, side, fill=False, edgecolor=INK, linewidth=1.4))


def operator():
    figure, axes = canvas(10, 5.1)
    side = 2.72
    count = 8
    y = 1.35
    axes.text(
        5,
        4.78,
        "Token mixing as a triangular convolution",
        ha="center",
        va="center",
        fontsize=15,
        fontweight="bold",
    )

    row = side / count
    picked = 5
    middle = y + side - (picked + 0.5) * row
    left = 0.75
    draw_tiles(axes, left, y, side, count)
    axes.add_patch(
        Rectangle(
            (left, middle - row / 2),
            (picked + 1) * row,
            row,
            fill=False,
            edgecolor=INK,
            linewidth=2.6,
        )
    )
    axes.text(
        left + side / 2, y + side + 0.19, r"$W$  (tokens out, tokens in)", ha="center", va="center"
    )
    axes.text(left - 0.13, middle, r"$i$", ha="right", va="center", fontsize=14)
    note = {"facecolor": "white", "edgecolor": "none", "pad": 2.5}
    corner = (left + side * 0.69, y + side * 0.77)
    axes.text(
        *corner,
        "upper half\nnever read",
        ha="center",
        va="center",
        fontsize=11,
        color="#555555",
        bbox=note,
    )

    x = 4.15
    axes.text(3.82, y + side / 2, r"$\times$", ha="center", va="center", fontsize=20)
    draw_rows(axes, x, y, 1.45, side, count, PALE_GREEN, range(picked + 1), GREEN)
    axes.text(x + 0.72, y + side + 0.19, r"$x$  (tokens, channels)", ha="center", va="center")
    axes.text(
        x + 0.72, y + side - 2.5 * row, r"rows $j\leq i$", ha="center", va="center", fontsize=12
    )
    axes.text(
        x + 0.72,
        y + 1.5 * row,
        "later tokens",
        ha="center",
        va="center",
        fontsize=10,
        color="#777777",
    )
    axes.text(
        x + 0.72,
        y + 0.5 * row,
        "stay unseen",
        ha="center",
        va="center",
        fontsize=10,
        color="#777777",
    )

    axes.text(5.92, y + side / 2, r"$=$", ha="center", va="center", fontsize=20)
    draw_rows(axes, 6.25, y, 1.45, side, count, INK, (), INK)
    axes.add_patch(
        Rectangle(
            (6.25, middle - row / 2), 1.45, row, facecolor="#eeeeee", edgecolor=INK, linewidth=2.6
        )
    )
    axes.text(6.25 + 0.72, y + side + 0.19, r"$y$  (tokens, channels)", ha="center", va="center")
    axes.text(6.25 + 0.72, middle, r"$y[i]$", ha="center", va="center", fontsize=13)

    axes.text(
        6.25 + 0.72,
        y - 0.17,
        "bias and residual added",
        ha="center",
        va="center",
        fontsize=9.5,
        color="#777777",
    )
    legend(axes, 8.05, y + side - 0.2)
    formula = (
        r"$y[i]\;=\;\mathrm{bias}[i]\;+\;\mathrm{residual}[i]\;+\;\sum_{j\,\leq\,i}\,W[i,j]\;x[j]$"
    )
    axes.text(5, 0.68, formula, ha="center", va="center", fontsize=19)
    save(figure, "operator.png")


def legend(axes, x, y):
    entries = [
        (PALE_BLUE, BLUE, "tile below the\ndiagonal: computed"),
        (PALE_ORANGE, ORANGE, "tile on the diagonal:\nits lower half counts"),
        ("white", GREY, "tile above the\ndiagonal: skipped,\nneither loaded nor\nmultiplied"),
    ]
    for face, edge, text in entries:
        axes.add_patch(
            Rectangle((x, y - 0.12), 0.24, 0.24, facecolor=face, edgecolor=edge, linewidth=1.2)
        )
        axes.text(x + 0.36, y + 0.12, text, ha="left", va="top", fontsize=10, linespacing=1.25)
        y -= 0.72


# ------------------------------------------------------------------------- model


def plus(axes, x, y):
    from matplotlib.patches import Circle

    axes.add_patch(Circle((x, y), 0.13, facecolor="white", edgecolor=INK, linewidth=1.4, zorder=3))
    lines(axes, [(x - 0.07, y), (x + 0.07, y)], zorder=4)
    lines(axes, [(x, y - 0.07), (x, y + 0.07)], zorder=4)


def half_block(axes, x, y, steps):
    """Residual stream up at x; the branch leaves at y, goes through `steps` on the right, and is
    added back on top.
    """
    width = 2.35
    height = 0.34
    gap = 0.13
    centre = x + 1.75
    top = y + 0.16 + len(steps) * (height + gap)
    lines(axes, [(x, y), (centre, y)])
    arrow(axes, (centre, y), (centre, y + 0.16), mutation_scale=10)
    for index, (text, face) in enumerate(steps):
        bottom = y + 0.16 + index * (height + gap)
        box(axes, centre - width / 2, bottom, width, height, text, face, fontsize=10.5)
        if index + 1 < len(steps):
            lines(axes, [(centre, bottom + height), (centre, bottom + height + gap)])
    lines(axes, [(centre, top - gap), (centre, top + 0.07)])
    arrow(axes, (centre, top + 0.07), (x + 0.13, top + 0.07))
    plus(axes, x, top + 0.07)
    return top + 0.07


def model():
    figure, axes = canvas(10, 7.7)
    axes.text(5, 7.38, "The masked mixer", ha="center", va="center", fontsize=15, fontweight="bold")
    x = 1.55
    box(axes, x - 0.95, 1.32, 1.9, 0.38, "token ids", "#f2f2f2")
    box(axes, x - 0.95, 2.0, 1.9, 0.38, "embedding", PALE_GREEN)
    arrow(axes, (x, 1.7), (x, 2.0))
    axes.add_patch(
        FancyBboxPatch(
            (0.62, 2.62),
            4.15,
            3.36,
            boxstyle="round,pad=0,rounding_size=0.15",
            facecolor="#fafafa",
            edgecolor="#888888",
            linestyle="--",
        )
    )
    axes.text(0.5, 4.3, r"$N$ blocks", ha="right", va="center", rotation=90, fontsize=12)
    lines(axes, [(x, 2.38), (x, 6.2)])
    middle = half_block(axes, x, 2.85, [("LayerNorm", "white"), ("token mixing", PALE_BLUE)])
    half_block(axes, x, middle + 0.34, [("LayerNorm", "white"), ("MLP", PALE_ORANGE)])
    arrow(axes, (x, 6.0), (x, 6.22))
    box(axes, x - 0.95, 6.22, 1.9, 0.38, "lm_head", PALE_GREEN)
    beside = {"ha": "left", "va": "center", "color": "#666666"}
    axes.text(x + 1.1, 6.41, "next-token logits", ha="left", va="center", fontsize=11)
    axes.text(x + 1.1, 1.51, "(batch, tokens)", fontsize=10, **beside)
    axes.text(x + 1.1, 2.19, "(batch, tokens, channels)", fontsize=10, **beside)
    axes.text(x + 1.1, 1.94, "suffix_match", fontsize=9, family="monospace", **beside)
    axes.text(x + 2.05, 1.94, "adds what last followed", fontsize=9, **beside)
    draw_stack(axes, 0.62, 0.62)

    title = "Token mixing, five ways"
    axes.text(5.25, 6.98, title, fontsize=12.5, fontweight="bold", va="center")
    variant(axes, 5.72, "flat", "", "the paper's mixer: one weight $W$", draw_flat)
    variant(axes, 4.58, "window", "mixing_window", "by lag, for the last tokens", draw_window)
    variant(axes, 3.44, "heads", "num_mixer_heads", "a $W$ per head; plain: no Linear", draw_heads)
    gates = "$k$ gates what goes in, $q$ what comes out"
    variant(axes, 2.30, "gated", "mixer_gate", gates, draw_gated)
    keyed = r"$W \odot$ softmax$(q\cdot k)$; attention: no $W$"
    variant(axes, 1.16, "keyed", "mixer_key_size", keyed, draw_keyed)
    mixing = r"x \leftarrow x + \mathrm{mix}(\mathrm{LN}(x))"
    mlp = r"x \leftarrow x + \mathrm{MLP}(\mathrm{LN}(x))"
    axes.text(5.25, 0.82, rf"${mixing}\,;\quad {mlp}$", fontsize=15, va="center")
    axes.text(5.25, 0.4, "mixing_in_mlp", fontsize=9, family="monospace", **beside)
    in_mlp = r"h = \mathrm{LN}(x)\,;\quad x \leftarrow x + \mathrm{MLP}(h + \mathrm{mix}(h))"
    axes.text(6.35, 0.4, rf"${in_mlp}$", fontsize=13, va="center")
    save(figure, "model.png")


def draw_stack(axes, x, y):
    """Eight blocks in a row, with keys in three."""
    side = 0.36
    for number in range(8):
        has_keys = number + 1 in (5, 7, 8)
        face, edge = (PALE_PINK, PINK) if has_keys else (PALE_BLUE, BLUE)
        left = x + number * (side + 0.16)
        if number:
            lines(axes, [(left - 0.16, y + side / 2), (left, y + side / 2)])
        axes.add_patch(
            Rectangle((left, y), side, side, facecolor=face, edgecolor=edge, linewidth=1.2)
        )
    note = {"ha": "left", "va": "center", "fontsize": 9, "color": "#666666"}
    axes.text(x, y - 0.2, "mixer_keyed_blocks=[5,7,8]", family="monospace", **note)
    axes.text(x + 2.2, y - 0.2, "pink: attention or keyed mixing", **note)


def variant(axes, y, name, option, caption, draw):
    axes.text(5.25, y + 0.95, name, fontsize=11, va="center", fontweight="bold")
    axes.text(5.95, y + 0.95, option, fontsize=9, va="center", family="monospace", color="#666666")
    axes.text(9.75, y + 0.95, caption, fontsize=10, va="center", ha="right", color="#666666")
    draw(axes, y)


def triangle(axes, x, y, side, face=PALE_BLUE, edge=BLUE):
    axes.add_patch(
        Polygon(
            [(x, y + side), (x, y), (x + side, y)], facecolor=face, edgecolor=edge, linewidth=1.4
        )
    )
    axes.add_patch(Rectangle((x, y), side, side, fill=False, edgecolor=GREY, linewidth=0.9))


def draw_flat(axes, y):
    arrow(axes, (5.3, y + 0.4), (7.2, y + 0.4))
    triangle(axes, 7.2, y + 0.1, 0.6)
    arrow(axes, (7.8, y + 0.4), (9.75, y + 0.4))


def draw_window(axes, y):
    """The band of the last tokens, of a weight that is equal along each diagonal."""
    left, bottom, side, width = 7.2, y + 0.1, 0.6, 0.2
    arrow(axes, (5.3, y + 0.4), (left, y + 0.4))
    top = bottom + side
    band = [
        (left, top),
        (left, top - width),
        (left + side - width, bottom),
        (left + side, bottom),
    ]
    axes.add_patch(Polygon(band, facecolor=PALE_BLUE, edgecolor=BLUE, linewidth=1.4))
    axes.add_patch(Rectangle((left, bottom), side, side, fill=False, edgecolor=GREY, linewidth=0.9))
    arrow(axes, (7.8, y + 0.4), (9.75, y + 0.4))


def draw_heads(axes, y):
    arrow(axes, (5.3, y + 0.4), (5.75, y + 0.4))
    box(axes, 5.75, y + 0.2, 0.8, 0.4, "Linear", "white", fontsize=10)
    for index, face in enumerate((PALE_BLUE, PALE_ORANGE, PALE_GREEN)):
        edge = (BLUE, ORANGE, GREEN)[index]
        level = y + 0.71 - index * 0.31
        lines(axes, [(6.55, y + 0.4), (6.8, level), (7.35, level)], colour=edge)
        triangle(axes, 7.37, level - 0.12, 0.24, face, edge)
        lines(axes, [(7.63, level), (8.35, level), (8.6, y + 0.4)], colour=edge)
    draw_out(axes, y)


def draw_projections(axes, y, names):
    """The input, and its three projections, at the heights that are returned."""
    arrow(axes, (5.3, y + 0.4), (5.75, y + 0.4))
    box(axes, 5.75, y + 0.2, 0.8, 0.4, "Linear", "white", fontsize=10)
    levels = [y + 0.71, y + 0.4, y + 0.09]
    for name, level, colour in zip(names, levels, (GREEN, ORANGE, BLUE), strict=True):
        lines(axes, [(6.55, y + 0.4), (6.72, level), (6.82, level)], colour=colour)
        axes.text(6.93, level, f"${name}$", fontsize=12, va="center", ha="center", color=colour)
    return levels


def draw_gated(axes, y):
    query, key, value = draw_projections(axes, y, "qkv")
    middle = (key + value) / 2
    lines(axes, [(7.03, key), (7.18, key), (7.3, middle)], colour=ORANGE)
    lines(axes, [(7.03, value), (7.18, value), (7.3, middle)], colour=BLUE)
    product(axes, 7.38, middle)
    triangle(axes, 7.6, middle - 0.15, 0.3)
    lines(axes, [(7.47, middle), (7.58, middle)])
    lines(axes, [(7.92, middle), (8.05, middle), (8.17, y + 0.35)])
    lines(axes, [(7.03, query), (8.0, query), (8.17, y + 0.45)], colour=GREEN)
    product(axes, 8.23, y + 0.4)
    arrow(axes, (8.31, y + 0.4), (8.6, y + 0.4))
    draw_out(axes, y)


def draw_keyed(axes, y):
    query, key, value = draw_projections(axes, y, "qkv")
    lines(axes, [(7.03, query), (7.13, query), (7.25, key)], colour=GREEN)
    lines(axes, [(7.03, key), (7.27, key)], colour=ORANGE)
    triangle(axes, 7.28, key - 0.15, 0.3, PALE_ORANGE, ORANGE)
    axes.text(7.43, y + 0.64, r"$q\cdot k$", fontsize=10, va="center", ha="center")
    product(axes, 7.68, key)
    triangle(axes, 7.78, key - 0.15, 0.3)
    axes.text(7.93, y + 0.64, "$W$", fontsize=10, va="center", ha="center")
    lines(axes, [(8.1, key), (8.2, key)])
    lines(axes, [(7.03, value), (8.1, value), (8.22, key - 0.06)], colour=BLUE)
    product(axes, 8.28, key, r"$\times$")
    arrow(axes, (8.36, key), (8.6, key))
    draw_out(axes, y)


def draw_out(axes, y):
    box(axes, 8.6, y + 0.2, 0.75, 0.4, "Linear", "white", fontsize=10)
    arrow(axes, (9.35, y + 0.4), (9.75, y + 0.4))


def product(axes, x, y, sign=r"$\odot$"):
    """Of elements, or with another sign of matrices."""
    axes.text(x, y, sign, fontsize=13, va="center", ha="center")


# ------------------------------------------------------------------------- switch


def switch():
    figure, axes = canvas(10, 5.0)
    axes.text(
        5,
        4.7,
        "One switch, the same weights",
        ha="center",
        va="center",
        fontsize=15,
        fontweight="bold",
    )
    box(axes, 0.3, 2.12, 1.5, 0.96, "checkpoint\n" + r"weight $W$, bias", "#f2f2f2", fontsize=11)
    box(axes, 2.2, 2.12, 1.75, 0.96, "", PALE_GREEN)
    axes.text(
        3.075,
        2.76,
        "mixing_backend",
        ha="center",
        va="center",
        family="monospace",
        fontsize=10.5,
        fontweight="bold",
    )
    axes.text(3.075, 2.4, "auto: cuda\nwhere it can run", ha="center", va="center", fontsize=8.5)
    arrow(axes, (1.8, 2.6), (2.2, 2.6))
    side = 1.12
    routes = [
        (
            2.75,
            "cuda",
            "our kernels",
            "only the tiles of 64 on or below the diagonal",
            "17/32 of the square at 1024 tokens",
            BLUE,
            draw_cuda,
        ),
        (
            1.25,
            "dense",
            "plain PyTorch, any device",
            "the full square, upper half masked to zero",
            "all of the square",
            ORANGE,
            draw_dense,
        ),
    ]
    for y, name, where, method, work, colour, draw in routes:
        centre = y + side / 2
        lines(axes, [(3.95, 2.6), (4.4, centre)], colour=colour)
        arrow(axes, (4.4, centre), (4.85, centre), colour=colour)
        draw(axes, 4.9, y, side, colour)
        axes.text(
            6.3,
            centre + 0.38,
            name,
            fontsize=13,
            family="monospace",
            fontweight="bold",
            color=colour,
            va="center",
        )
        axes.text(9.75, centre + 0.38, where, fontsize=10, color="#666666", va="center", ha="right")
        axes.text(6.3, centre + 0.04, method, fontsize=11, va="center")
        axes.text(6.3, centre - 0.26, "work: " + work, fontsize=11, va="center")
    axes.text(
        2.12,
        0.86,
        r"the same $y$ from both," + "\nup to rounding",
        ha="center",
        va="center",
        fontsize=11,
    )
    save(figure, "switch.png")


def draw_cuda(axes, x, y, side, colour):
    count = 16
    tile = side / count
    for row in range(count):
        for column in range(row + 1):
            corner = (x + column * tile, y + side - (row + 1) * tile)
            axes.add_patch(
                Rectangle(corner, tile, tile, facecolor=PALE_BLUE, edgecolor=colour, linewidth=0.45)
            )
    frame(axes, x, y, side)


def draw_dense(axes, x, y, side, colour):
    axes.add_patch(Rectangle((x, y), side, side, facecolor=PALE_ORANGE, edgecolor="none"))
    corners = [(x, y + side), (x + side, y + side), (x + side, y)]
    axes.add_patch(
        Polygon(corners, facecolor="white", edgecolor=colour, hatch="////", linewidth=0, alpha=0.75)
    )
    axes.text(
        x + side * 0.68,
        y + side * 0.7,
        r"$\times\,0$",
        fontsize=13,
        ha="center",
        va="center",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
    )
    frame(axes, x, y, side)


def frame(axes, x, y, side):
    axes.add_patch(Rectangle((x, y), side, side, fill=False, edgecolor=INK, linewidth=1.2))


if __name__ == "__main__":
    operator()
    model()
    switch()
