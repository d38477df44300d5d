"""Medians as dots and ranges as lines, one panel beside the other."""

from collections.abc import Mapping
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

Range = tuple[float, float, float]  # low, middle, high
OURS, THEIRS = "C0", "0.45"


def dots(
    file: Path, panels: Mapping[str, Mapping[str, Range]], unit: str, reference: float, form: str, own: str
) -> None:
    """Draw a picture.

    Args:
        file: where to.
        panels: by title, the rows by name; all panels have names of the first one.
        unit: what the numbers are, under the middle.
        reference: a number that gets a vertical line.
        form: of the numbers beside the dots, such as ".2f".
        own: what titles or names that are ours begin with; the others are grey.
    """
    names = list(next(iter(panels.values())))
    size = (2.2 + 2.6 * len(panels), 1.2 + 0.3 * len(names))
    figure, (every,) = plt.subplots(
        1, len(panels), figsize=size, sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for axes, (title, rows) in zip(every, panels.items(), strict=True):
        for name, (low, middle, high) in rows.items():
            y = len(names) - 1 - names.index(name)
            color = OURS if name.startswith(own) or title.startswith(own) else THEIRS
            axes.plot((low, high), (y, y), color=color, linewidth=2, solid_capstyle="round")
            axes.plot(middle, y, "o", color=color, markersize=6)
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
            axes.annotate(f"{middle:{form}}", (middle, y + 0.22), ha="center", fontsize=8, bbox=box)
        axes.axvline(reference, color="grey", linewidth=0.8, linestyle=":", zorder=0)
        axes.set_title(title, fontsize=10)
        axes.set_yticks(range(len(names)), reversed(names))
        axes.set_ylim(-0.5, len(names) - 0.2)
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
    if all(low >= 0 for rows in panels.values() for low, _, _ in rows.values()):
        every[0].set_xlim(left=0)
    figure.supxlabel(unit, fontsize=9)
    figure.savefig(file, dpi=130)
    plt.close(figure)
