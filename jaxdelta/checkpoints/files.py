"""Tensors of a Hugging Face checkpoint folder: which file holds which, read one at a time. safetensors only, never pickle.

Shards are found through ``model.safetensors.index.json`` where there is one, since their names vary (Qwen3.5-0.8B's only
shard is ``model.safetensors-00001-of-00001.safetensors``), else the file is ``model.safetensors``.
"""

import json
from pathlib import Path

import ml_dtypes  # noqa: F401  gives numpy bfloat16, without which safetensors cannot hand such a tensor over
import numpy as np
from safetensors import SafetensorError, safe_open

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded: says what was expected, what was found and what to do."""


class TensorFiles:
    """The tensors of a folder.

    Attributes:
        shapes: shape of each tensor by its name.
        dtypes: stored dtype of each, as safetensors names it (``BF16``, ``F32`` ...).
        files: the safetensors files, in order of name.

    Raises:
        CheckpointError: no weights, a shard that is missing, truncated or no safetensors file, a tensor that the index
            places elsewhere.
    """

    def __init__(self, folder: Path):
        self._file_of: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        placed = _weight_map(folder)
        self.files = [folder / SINGLE] if placed is None else [folder / name for name in sorted(set(placed.values()))]
        for file in self.files:
            with _open(file) as tensors:
                for name in tensors.keys():  # noqa: SIM118  a safetensors handle is no mapping
                    if name in self._file_of:
                        raise CheckpointError(f"tensor {name} is in both {self._file_of[name].name} and {file.name}")
                    tensor = tensors.get_slice(name)
                    self._file_of[name] = file
                    self.shapes[name] = tuple(tensor.get_shape())
                    self.dtypes[name] = tensor.get_dtype()
        for name, file in (placed or {}).items():
            if self._file_of.get(name) != folder / file:
                raise CheckpointError(f"{folder / INDEX} places tensor {name} in {file}, which does not hold it")

    def read(self, name: str) -> np.ndarray:
        """A copy of one tensor, in its stored dtype."""
        with _open(self._file_of[name]) as tensors:
            return tensors.get_tensor(name)


def read_json(file: Path) -> dict:
    """A JSON object; CheckpointError where the file is missing or is not one."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing; a checkpoint folder holds config.json and safetensors files") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} is not valid JSON ({error}){pointer_hint(file)}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds a {type(value).__name__}; expected a JSON object")
    return value


def _weight_map(folder: Path) -> dict[str, str] | None:
    if (folder / INDEX).exists():
        placed = read_json(folder / INDEX).get("weight_map")
        if not isinstance(placed, dict) or not placed:
            raise CheckpointError(f"{folder / INDEX} has no weight_map")
        for name in sorted(set(map(str, placed.values()))):
            if Path(name).name != name or not (folder / name).is_file():
                raise CheckpointError(f"{folder / INDEX} names the file {name}, which is missing; download it again")
        return placed
    if (folder / SINGLE).is_file():
        return None
    pickles = [file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern)]
    hint = f"; {', '.join(sorted(pickles))} would have to be unpickled, which runs code: convert it" if pickles else ""
    raise CheckpointError(f"{folder} has neither {INDEX} nor {SINGLE}{hint}")


def _open(file: Path):
    try:
        return safe_open(file, framework="np")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}): {_diagnosis(file)}") from None


def _diagnosis(file: Path) -> str:
    """What is wrong with a file that safetensors refuses."""
    if hint := pointer_hint(file):
        return hint.lstrip("; ")
    size = file.stat().st_size
    with file.open("rb") as stream:
        header_size = int.from_bytes(stream.read(8), "little")
        if size >= 8 + header_size:
            try:
                header = json.loads(stream.read(header_size))
                ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
                expected = 8 + header_size + max(ends, default=0)
                if expected != size:
                    return f"it has {size} bytes, its header promises {expected}; download it again"
                return "shapes, dtypes and offsets of its header contradict one another; download it again"
            except (ValueError, KeyError, TypeError, AttributeError):
                pass
    return f"its {size} bytes are no safetensors file; download it again"


def pointer_hint(file: Path) -> str:
    """A clause that says so where ``file`` is a Git LFS pointer, else nothing."""
    with file.open("rb") as stream:
        is_pointer = stream.read(40).startswith(b"version https://git-lfs")
    return "; it is a Git LFS pointer, not the file itself: run `git lfs pull`" if is_pointer else ""
