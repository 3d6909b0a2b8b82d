"""Results on disk: a manifest, finished parts, and the rows that they add up to.

A folder belongs to one configuration. Work is done in parts; each is written whole under a temporary name and then
renamed, so a run that is killed at any moment leaves only whole parts, and the same configuration goes on with those that
are missing. Rows come in the order of the parts, whenever each was made, so that an interrupted run ends with the rows of
an uninterrupted one.

    manifest.json     configuration, versions, device, commit, checksums, plan of the parts
    parts/0003.parquet
    rows.parquet, rows.csv

Labelled arrays are parts of the same kind, ``parts/0003.zarr``, put together as ``maps.zarr``.
"""

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pa_parquet
import xarray as xr

PACKAGES = ("jaxdelta", "jax", "jaxlib", "flax", "numpy", "tokenizers", "safetensors")


class ResultsError(ValueError):
    """A results folder that cannot be used; says why and what to do."""


class Results:
    """A results folder.

    Args:
        folder: created where it does not exist.
        configuration: JSON values that decide the rows; versions and device are added.
        plan: JSON value that says how the work is cut into parts; where the folder already has one, that one holds.

    Raises:
        ResultsError: the folder cannot be written, or holds another configuration or something else.
    """

    def __init__(self, folder: Path, configuration: dict[str, Any], plan: Any):
        self.folder = Path(folder)
        self._manifest = self.folder / "manifest.json"
        configuration = json.loads(json.dumps(configuration | {"environment": environment(), "commit": commit()}))
        try:
            (self.folder / "parts").mkdir(parents=True, exist_ok=True)
            if self._manifest.exists():
                self.manifest = self._read_manifest(configuration)
            else:
                self._refuse_foreign_files()
                self.manifest = {"configuration": configuration, "plan": plan, "started": _now()}
                self._write_manifest()
        except OSError as error:
            raise ResultsError(f"results folder {self.folder} cannot be used: {error.strerror}; choose another") from None

    @property
    def plan(self) -> Any:
        """How the work is cut into parts."""
        return self.manifest["plan"]

    def part(self, index: int) -> pa.Table | None:
        """A finished part, None where it is still to do.

        Raises:
            ResultsError: the part cannot be read.
        """
        file = self._part_file(index)
        if not file.exists():
            return None
        try:
            return pa_parquet.read_table(file)
        except (pa.ArrowInvalid, OSError) as error:
            raise ResultsError(f"{file} cannot be read ({error}); remove it, and the same command makes it anew") from None

    def write_part(self, index: int, rows: pa.Table) -> None:
        """Keep a finished part."""
        self._write(self._part_file(index), lambda file: pa_parquet.write_table(rows, file))

    def dataset(self, index: int) -> xr.Dataset | None:
        """A finished part of labelled arrays, in memory; None where it is still to do.

        Raises:
            ResultsError: the part cannot be read.
        """
        folder = self.folder / "parts" / f"{index:04d}.zarr"
        if not folder.exists():
            return None
        try:
            with xr.open_zarr(folder, consolidated=False) as stored:
                return stored.load().drop_encoding()  # of which the length of names would cut those of others
        except (ValueError, KeyError, OSError, RuntimeError) as error:  # the last for a chunk that does not unpack
            raise ResultsError(
                f"{folder} cannot be read ({error}); remove it, and the same command makes it anew"
            ) from None

    def write_dataset(self, name: str | int, data: xr.Dataset) -> None:
        """Keep a finished part of labelled arrays, or, under a name, the whole of them."""
        folder = self.folder / (f"{name}.zarr" if isinstance(name, str) else f"parts/{name:04d}.zarr")

        def write(unfinished: str) -> None:
            shutil.rmtree(folder, ignore_errors=True)
            data.to_zarr(unfinished, mode="w", consolidated=False, zarr_format=2)  # 3 has no strings yet

        self._write(folder, write)

    def finished(self) -> None:
        """Note that all parts are done."""
        self._remove_leftovers()
        if "finished" not in self.manifest:
            self.manifest["finished"] = _now()
            self._write_manifest()

    def finish(self, count: int) -> pa.Table:
        """Put parts 0 .. count - 1 together as rows.parquet and rows.csv."""
        rows = pa.concat_tables([self.part(index) for index in range(count)])
        self._write(self.folder / "rows.parquet", lambda file: pa_parquet.write_table(rows, file))
        self._write(self.folder / "rows.csv", lambda file: pa_csv.write_csv(rows, file))
        self.finished()
        return rows

    def _remove_leftovers(self) -> None:
        """Half-written files of runs that were killed; those of a live process are its own."""
        for file in self.folder.glob("**/*.partial"):
            try:
                os.kill(int(file.name.split(".")[-2]), 0)
            except (ProcessLookupError, ValueError):
                shutil.rmtree(file) if file.is_dir() else file.unlink(missing_ok=True)
            except PermissionError:
                pass  # a live process of somebody else

    def _part_file(self, index: int) -> Path:
        return self.folder / "parts" / f"{index:04d}.parquet"

    def _read_manifest(self, configuration: dict[str, Any]) -> dict[str, Any]:
        try:
            manifest = json.loads(self._manifest.read_text())
            found, _ = dict(manifest["configuration"]), manifest["plan"]
        except (ValueError, KeyError, TypeError):
            raise ResultsError(f"{self._manifest} is no manifest of a run; choose another folder") from None
        if found != configuration:
            differing = "; ".join(_differences(found, configuration))
            raise ResultsError(
                f"{self.folder} holds results of another configuration ({differing}); choose another folder or remove it"
            )
        return manifest

    def _refuse_foreign_files(self) -> None:
        """A folder without a manifest must be empty, but for what a run killed at its very start leaves."""
        others = [p.name for p in self.folder.iterdir() if p.name != "parts" and not p.name.endswith(".partial")]
        if others or any(p.suffix in (".parquet", ".zarr") for p in (self.folder / "parts").iterdir()):
            raise ResultsError(f"{self.folder} is not empty and has no manifest.json; choose another folder")

    def _write_manifest(self) -> None:
        text = json.dumps(self.manifest, indent=2) + "\n"
        self._write(self._manifest, lambda file: Path(file).write_text(text))

    def _write(self, file: Path, write) -> None:
        unfinished = file.with_name(f"{file.name}.{os.getpid()}.partial")
        try:
            write(str(unfinished))
            unfinished.replace(file)
        except OSError as error:
            raise ResultsError(f"{file} cannot be written: {error.strerror or error}; finished parts are kept") from None


def environment() -> dict[str, str]:
    """Versions and device, which decide the last digits of a result."""
    device = jax.devices()[0]
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    where = {"device": f"{device.platform} {device.device_kind}", "cores": str(os.cpu_count())}
    return versions | {"python": platform.python_version()} | where


def commit() -> str | None:
    """Last commit that changed the library, with ``+changes`` where it has any since; None outside of a checkout."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", here, *arguments], capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", __file__)
        last = git("log", "-1", "--format=%H", "--", str(here))
        return last + ("+changes" if git("status", "--porcelain", "--", str(here)) else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _differences(found: dict[str, Any], now: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key in sorted(found.keys() | now.keys()):
        a, b = found.get(key), now.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            yield from _differences(a, b, f"{prefix}{key} ")
        elif a != b:
            yield f"{prefix}{key} is {_short(a)} there, {_short(b)} now"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
