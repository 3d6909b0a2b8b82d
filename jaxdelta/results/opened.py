"""A results folder as somebody else reads it: its manifest, tables and labelled arrays."""

from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import xarray as xr

from jaxdelta.json_text import parse
from jaxdelta.results.folder import ResultsError, read_arrays, read_rows


class Opened(NamedTuple):
    """What a finished results folder holds.

    Attributes:
        folder: where it is.
        manifest: configuration, versions, where and when.
        tables: by file name without suffix: ``rows`` of a sweep or a comparison, ``heads`` of measures by head.
        arrays: by file name without suffix, for example ``spectrum``.
    """

    folder: Path
    manifest: dict[str, Any]
    tables: dict[str, pa.Table]
    arrays: dict[str, xr.Dataset]

    @property
    def analysis(self) -> str:
        """Name of the analysis, such as "sweep"."""
        return self.manifest["configuration"]["analysis"]


def opened(folder: Path | str) -> Opened:
    """Read a finished results folder.

    Raises:
        ResultsError: there is no such folder, it is no results folder, its analysis is not finished, or a file cannot be
            read.
    """
    folder = Path(folder)
    file = folder / "manifest.json"
    if not file.exists():
        raise ResultsError(f"{folder} is no results folder: it has no manifest.json")
    try:
        manifest = parse(file.read_bytes())
        analysis = manifest["configuration"]["analysis"]
    except (ValueError, KeyError, TypeError):
        raise ResultsError(f"{file} is no manifest of a run") from None
    if not isinstance(analysis, str):
        raise ResultsError(f"{file} is no manifest of a run")
    if "finished" not in manifest:
        raise ResultsError(f"{folder} holds an unfinished {analysis}; the command that began it continues it")
    tables = {path.stem: read_rows(path) for path in sorted(folder.glob("*.parquet"))}
    arrays = {path.stem: read_arrays(path) for path in sorted(folder.glob("*.zarr"))}
    if not tables and not arrays:
        raise ResultsError(f"{folder} holds neither tables nor arrays")
    return Opened(folder, manifest, tables, arrays)
