"""Figures on disk."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxdelta.results.folder import write_whole

SUFFIXES = ("png", "svg")


def save_figures(figures: Mapping[str, Figure], folder: Path) -> list[Path]:
    """Write each figure under its name, as PNG and as SVG; returns the files."""
    return [_saved(figure, folder / name, suffix) for name, figure in figures.items() for suffix in SUFFIXES]


def _saved(figure: Figure, name: Path, suffix: str) -> Path:
    file = name.with_name(f"{name.name}.{suffix}")
    write_whole(file, lambda unfinished: figure.savefig(unfinished, dpi=150, format=suffix))
    return file


def layer_panels(layers: Sequence[int] | np.ndarray, *, columns: int = 4, width: float = 2.4) -> tuple[Figure, list[Axes]]:
    """A figure with a titled panel for each layer, which share their axes; ``width`` of a panel is in inches."""
    columns = min(columns, len(layers))
    lines = -(-len(layers) // columns)
    figure = Figure(figsize=(width * columns + 0.8, 2.2 * lines + 0.5), layout="constrained")
    panels = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).ravel()
    for axes in panels[len(layers) :]:
        axes.set_visible(False)
    for axes, layer in zip(panels, layers, strict=False):
        axes.set_title(f"layer {layer}", fontsize=9)
    return figure, list(panels[: len(layers)])
