"""Results on disk: a manifest, finished parts, and the tables or arrays made of all parts.

A folder belongs to one configuration. Work is done in parts. Each is written completely under a temporary name and then
renamed, so a killed process leaves only complete parts, and a call with the same configuration continues with the missing
ones. :mod:`jaxdelta.results.documents` defines the parts.

Any number of processes on one machine or several may work in a folder, without a lock. The first to write the manifest, a
plan or a part wins: these files are never replaced, and all processes read the same ones. The files made of all parts are
replaced as a whole. A temporary name tells its process (``0003.zarr.HOST.PID-N.partial``); only those of ended processes on
this host are removed.

    manifest.json     configuration, versions, kind of device, commit, checksums
    plans, parts
    rows.parquet, rows.csv, or labelled arrays such as maps.zarr
"""

import errno
import filecmp
import importlib.metadata
import itertools
import json
import os
import platform
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pa_parquet
import xarray as xr

from jaxdelta.json_text import parse

PACKAGES = ("jaxdelta", "jax", "jaxlib", "flax", "numpy", "tokenizers", "safetensors")
# Temporary names of this library, and nobody else's.
PARTIAL = re.compile(r"(?:[a-z_]+|\d{4,}|\d{4,}-\d{4,})\.[a-z]+\.(?P<host>[A-Za-z0-9-]+)\.(?P<pid>\d+)-\d+\.partial")
_numbers = itertools.count()
FOLDERS = ("parts", "plans")
ITEM = "item of the part"  # a column beside those of the rows


class ResultsError(ValueError):
    """A results folder cannot be used; the message tells why and what to do."""


class Results:
    """A results folder.

    Args:
        folder: created where it does not exist.
        configuration: JSON values that the numbers depend on; versions, commit and kind of device are added.

    Raises:
        ResultsError: the folder cannot be written, or holds results of another configuration or other files.
    """

    def __init__(self, folder: Path, configuration: dict[str, Any]):
        self.folder = Path(folder)
        self._manifest = self.folder / "manifest.json"
        configuration = json.loads(json.dumps(configuration | {"environment": environment(), "commit": commit()}))
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not self._manifest.exists():
                self._refuse_foreign_files()
                manifest = {"configuration": configuration, "started": _now(), "where": where()}
                self._write_manifest(manifest, replace=False)
            self.manifest = self._read_manifest(configuration)
            for name in FOLDERS:
                (self.folder / name).mkdir(exist_ok=True)
        except OSError as error:
            raise ResultsError(f"results folder {self.folder} cannot be used: {error.strerror}; choose another") from None

    def plan(self, number: int) -> list[list[Any]] | None:
        """Units of work as lists of keys; None if plan ``number`` is not written yet.

        Raises:
            ResultsError: the plan cannot be read.
        """
        file = self._plan_file(number)
        if not file.exists():
            return None
        try:
            units = parse(file.read_bytes())
            if not isinstance(units, list) or not all(isinstance(unit, list) for unit in units):
                raise ValueError("no list of units")
            return units
        except (ValueError, OSError) as error:
            raise ResultsError(f"{file} cannot be read ({error}); choose another folder or remove this one") from None

    def make_plan(self, number: int, units: list[list[Any]]) -> list[list[Any]]:
        """Write a plan unless another process was first; returns the plan that holds."""
        text = json.dumps(units) + "\n"
        self._write(self._plan_file(number), lambda file: Path(file).write_text(text, encoding="utf-8"), replace=False)
        return self.plan(number)

    def has(self, part: str) -> bool:
        """Whether a part is finished."""
        return self._rows_file(part).exists() or self._arrays_file(part).exists()

    def parts(self, part: str, count: int) -> list[pa.Table] | list[xr.Dataset] | None:
        """The results of a finished part for each of its ``count`` items; None if it is not finished.

        Raises:
            ResultsError: the part cannot be read.
        """
        if self._arrays_file(part).exists():
            return [read_arrays(self._arrays_file(part))]
        rows = read_rows(self._rows_file(part))
        if rows is None:
            return None
        if ITEM not in rows.column_names:
            raise _unreadable(self._rows_file(part), "rows of something else")
        item = rows[ITEM].to_numpy()
        rows = rows.drop_columns(ITEM)
        return [rows.filter(pa.array(item == i)) for i in range(count)]

    def write_parts(self, part: str, found: Sequence[pa.Table] | Sequence[xr.Dataset]) -> None:
        """Write the results of a part, one for each item, unless another process was first."""
        if isinstance(found[0], xr.Dataset):
            (data,) = found
            self._write(self._arrays_file(part), lambda folder: to_zarr(data, folder), replace=False)
            return
        numbers = np.repeat(np.arange(len(found), dtype=np.int32), [len(rows) for rows in found])
        rows = pa.concat_tables(found).append_column(ITEM, pa.array(numbers))
        self._write(self._rows_file(part), lambda file: pa_parquet.write_table(rows, file), replace=False)

    def finish_arrays(self, name: str, data: xr.Dataset) -> None:
        """Write the dataset of all parts as ``name``.zarr, and note in the manifest that all parts are done."""
        self._write(self.folder / f"{name}.zarr", lambda folder: to_zarr(data, folder))
        self.finished()

    def finish_rows(self, rows: pa.Table) -> None:
        """Write the rows of all parts to rows.parquet and rows.csv, and note in the manifest that all parts are done."""
        self._write(self.folder / "rows.parquet", lambda file: pa_parquet.write_table(rows, file))
        self._write(self.folder / "rows.csv", lambda file: pa_csv.write_csv(rows, file))
        self.finished()

    def finished(self) -> None:
        """Note in the manifest that all parts are done, and remove leftovers of killed processes."""
        self._remove_leftovers()
        if "finished" not in self.manifest:
            self.manifest = parse(self._manifest.read_bytes())  # another process may have been first
        if "finished" not in self.manifest:
            self.manifest["finished"] = _now()
            self._write_manifest(self.manifest, replace=True)

    def _remove_leftovers(self) -> None:
        """Remove temporary files of ended processes on this host."""
        for folder in (self.folder, *(self.folder / name for name in FOLDERS)):
            for file in folder.iterdir():
                named = PARTIAL.fullmatch(file.name)
                if named and named["host"] == host() and not _is_alive(int(named["pid"])):
                    _remove(file)

    def _plan_file(self, number: int) -> Path:
        return self.folder / "plans" / f"{number:04d}.json"

    def _rows_file(self, part: str) -> Path:
        return self.folder / "parts" / f"{part}.parquet"

    def _arrays_file(self, part: str) -> Path:
        return self.folder / "parts" / f"{part}.zarr"

    def _read_manifest(self, configuration: dict[str, Any]) -> dict[str, Any]:
        try:
            manifest = parse(self._manifest.read_bytes())
            found = dict(manifest["configuration"])
        except (ValueError, KeyError, TypeError):
            raise ResultsError(f"{self._manifest} is no manifest of a run; choose another folder") from None
        if found != configuration:
            differing = "; ".join(_differences(found, configuration))
            raise ResultsError(
                f"{self.folder} holds results of another configuration ({differing}); choose another folder or remove it"
            )
        return manifest

    def _refuse_foreign_files(self) -> None:
        """Raise ResultsError if a folder without a manifest holds more than leftovers of a process killed at its start."""
        others = [p.name for p in self.folder.iterdir() if p.name not in FOLDERS and not PARTIAL.fullmatch(p.name)]
        for folder in (self.folder / name for name in FOLDERS):
            others += [p.name for p in folder.iterdir() if not PARTIAL.fullmatch(p.name)] if folder.exists() else []
        if others and not self._manifest.exists():  # which another process may have written by now
            raise ResultsError(f"{self.folder} is not empty and has no manifest.json; choose another folder")

    def _write_manifest(self, manifest: dict[str, Any], *, replace: bool) -> None:
        text = json.dumps(manifest, indent=2) + "\n"
        self._write(self._manifest, lambda file: Path(file).write_text(text, encoding="utf-8"), replace=replace)

    def _write(self, file: Path, write: Callable[[str], Any], *, replace: bool = True) -> None:
        try:
            write_whole(file, write, replace=replace)
        except OSError as error:
            raise ResultsError(f"{file} cannot be written: {error.strerror or error}; finished parts are kept") from None


def to_zarr(data: xr.Dataset, folder: str) -> None:
    """Write labelled arrays as this library stores them."""
    data.to_zarr(folder, mode="w", consolidated=False, zarr_format=2)  # 3 has no strings yet


def finished_rows(folder: Path) -> pa.Table | None:
    """The rows of a finished analysis, or None.

    Raises:
        ResultsError: the file cannot be read.
    """
    return read_rows(folder / "rows.parquet")


def read_arrays(folder: Path) -> xr.Dataset:
    """Labelled arrays that :func:`to_zarr` wrote; raises ResultsError."""
    try:
        with xr.open_zarr(folder, consolidated=False) as stored:
            return stored.load().drop_encoding()  # which would cut longer names of other parts
    except Exception as error:  # of whatever kind, from a chunk that does not unpack to a group that is none
        raise _unreadable(folder, error) from None


def read_rows(file: Path) -> pa.Table | None:
    """The rows of a Parquet file, None if there is none; raises ResultsError."""
    if not file.exists():
        return None
    try:
        return pa_parquet.read_table(file)
    except (pa.ArrowInvalid, OSError) as error:
        raise _unreadable(file, error) from None


def _unreadable(file: Path, reason: object) -> ResultsError:
    return ResultsError(f"{file} cannot be read ({reason}); remove it, and the same command makes it anew")


def write_csv(rows: pa.Table, file: Path) -> Path:
    """Write rows to a CSV file that appears only when complete; returns the file."""
    write_whole(file, lambda unfinished: pa_csv.write_csv(rows, unfinished))
    return file


def write_tables(rows: pa.Table, folder: Path, name: str) -> list[Path]:
    """Write rows as ``name``.parquet and ``name``.csv; returns the files."""
    file = folder / f"{name}.parquet"
    write_whole(file, lambda unfinished: pa_parquet.write_table(rows, unfinished))
    return [file, write_csv(rows, folder / f"{name}.csv")]


def write_whole(file: Path, write: Callable[[str], Any], *, replace: bool = True) -> None:
    """Write a file or folder under a temporary name, and rename it when it is complete.

    Args:
        write: called with the path to write to.
        replace: replace an existing one; otherwise the existing one stays and the new one is dropped.
    """
    unfinished = _temporary(file)
    try:
        write(str(unfinished))
        _place(unfinished, file, replace=replace)
    except Exception:
        _remove(unfinished)
        raise


def _place(new: Path, file: Path, *, replace: bool) -> None:
    """Rename ``new`` to ``file``. Whatever other processes do meanwhile, a complete one has that name in the end."""
    if not new.is_dir():
        if replace:
            new.replace(file)
        else:
            _link(new, file)
        return
    while not _renamed(new, file):
        if not replace or _same(new, file):
            _remove(new)
            return
        old = _temporary(file)
        try:
            file.rename(old)
        except FileNotFoundError:  # another process was faster
            continue
        _remove(old)


def _renamed(new: Path, file: Path) -> bool:
    """Rename a folder unless one with that name exists; returns whether it was renamed."""
    try:
        new.rename(file)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


def _link(new: Path, file: Path) -> None:
    """Rename a file unless one with that name exists; else remove it."""
    try:
        os.link(new, file)
    except FileExistsError:
        pass
    except OSError:  # a file system without links: of two at the same moment the last one stays, also complete
        if not file.exists():
            new.replace(file)
    new.unlink(missing_ok=True)


def _same(a: Path, b: Path) -> bool:
    """Whether two folders hold the same files, byte for byte; False if one vanishes meanwhile."""
    names = [{p.relative_to(folder) for p in folder.rglob("*") if p.is_file()} for folder in (a, b)]
    try:
        return names[0] == names[1] and all(filecmp.cmp(a / name, b / name, shallow=False) for name in names[0])
    except OSError:
        return False


def _remove(file: Path) -> None:
    if file.is_dir():
        shutil.rmtree(file, ignore_errors=True)
    else:
        file.unlink(missing_ok=True)


def _temporary(file: Path) -> Path:
    return file.with_name(f"{file.name}.{host()}.{os.getpid()}-{next(_numbers)}.partial")


def host() -> str:
    """The scope of process numbers: the machine's name and the namespace of its processes."""
    try:
        space = os.stat("/proc/self/ns/pid").st_ino  # of a container, which may share the machine's name
    except OSError:
        space = 0
    return f"{re.sub('[^A-Za-z0-9]+', '-', socket.gethostname())[:40]}-{space:x}"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # somebody else's
        pass
    return True


def environment() -> dict[str, str]:
    """Versions and kind of device, on which the last digits of a result depend."""
    device = jax.devices()[0]
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return versions | {"python": platform.python_version(), "device": f"{device.platform} {device.device_kind}"}


def where() -> dict[str, Any]:
    """Host and cores of the process that created the folder; not part of the configuration."""
    return {"host": socket.gethostname(), "cores": os.cpu_count()}


def commit() -> str | None:
    """Last commit that changed the library, with ``+changes`` if there are uncommitted ones; None outside a checkout."""
    here = Path(__file__).parents[1]

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
