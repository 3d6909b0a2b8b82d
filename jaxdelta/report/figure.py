"""Figures on disk."""

from collections.abc import Mapping
from pathlib import Path

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
