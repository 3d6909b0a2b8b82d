"""Figures on disk."""

from pathlib import Path

from matplotlib.figure import Figure

from jaxdelta.results.folder import write_whole


def save_figure(figure: Figure, file: Path) -> None:
    """Write a figure whole, in the format of the file's suffix."""
    write_whole(file, lambda unfinished: figure.savefig(unfinished, dpi=150, format=file.suffix.removeprefix(".")))
