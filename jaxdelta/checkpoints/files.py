"""Tensors of a Hugging Face checkpoint folder, read one at a time. Only safetensors files are read, never pickles.

The weights are those that transformers 5.24 takes: the file that ``transformers_weights`` of ``config.json`` names, else
``model.safetensors``, else the shards of ``model.safetensors.index.json``, whose names vary (the only shard of Qwen3.5-0.8B
is ``model.safetensors-00001-of-00001.safetensors``). Other files in the folder are not read.
"""

import re
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  gives numpy bfloat16, which safetensors needs to return such a tensor
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxdelta import json_text

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
LONGEST_HEADER = 100_000_000  # limit of the format; a larger number means that it is another kind of file
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
NO_WEIGHTS = ("training_args", "optimizer", "scheduler", "rng_state", "scaler")  # pickles that lie beside weights


class CheckpointError(ValueError):
    """A checkpoint cannot be loaded; the message tells what was expected, what was found and what to do."""


class TensorFiles:
    """The tensors of a folder.

    Args:
        folder: folder of the checkpoint.
        chosen: safetensors file or index that ``config.json`` names; None is the default.

    Attributes:
        shapes: shape of each tensor, by name.
        dtypes: stored dtype of each tensor, as safetensors names it (``BF16``, ``F32`` ...).
        files: the safetensors files that are read, in order of name.
        unread: other safetensors files in the folder.

    Raises:
        CheckpointError: there are no weights, a file is missing, truncated or not a safetensors file, a tensor is in two
            files, or is not where the index places it.
    """

    def __init__(self, folder: Path, *, chosen: Any = None):
        self._file_of: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        weights = _weights(folder, chosen)
        placed = _weight_map(weights) if weights.suffix == ".json" else None
        self.files = [weights] if placed is None else [folder / name for name in sorted(set(placed.values()))]
        self.unread = sorted(set(folder.glob("*.safetensors")) - set(self.files))
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
                raise CheckpointError(f"{weights} places tensor {name} in {file}, which does not hold it")

    def read(self, name: str) -> np.ndarray:
        """A copy of one tensor, in its stored dtype."""
        with _open(self._file_of[name]) as tensors:
            return tensors.get_tensor(name)


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file; raises CheckpointError if the file is missing or holds something else."""
    try:
        value = json_text.parse(file.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing; a checkpoint folder holds config.json and safetensors files") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror})") from None
    except json_text.RepeatedKey as error:
        raise CheckpointError(f"{file}: {error}; keep the one that is meant") from None
    except ValueError as error:
        raise CheckpointError(f"{file} is not valid JSON ({error}){pointer_hint(file)}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds a {type(value).__name__}; expected a JSON object")
    return value


def _weights(folder: Path, chosen: Any) -> Path:
    """The file or the index of the weights."""
    if chosen is None:
        names = [name for name in (SINGLE, INDEX) if (folder / name).is_file()]
        if not names:
            raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}{weights_hint(folder)}")
        return folder / names[0]
    if not isinstance(chosen, str) or Path(chosen).name != chosen or not chosen.endswith((".safetensors", ".index.json")):
        raise CheckpointError(
            f"config.json has transformers_weights = {chosen!r}; expected a safetensors file or index of the same folder"
        )
    if not (folder / chosen).is_file():
        raise CheckpointError(f"config.json names the weights {chosen}, which are missing in {folder}")
    return folder / chosen


def _weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor of an index."""
    placed = read_json(index).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise CheckpointError(f"{index} has no weight_map")
    for name in sorted(set(map(str, placed.values()))):
        if Path(name).name != name or not (index.parent / name).is_file():
            raise CheckpointError(f"{index} names the file {name}, which is missing; download it again")
    return placed


def weights_hint(folder: Path) -> str:
    """A clause about weights in ``folder`` with names or formats that are not read, or an empty text."""
    found = sorted(file.name for file in folder.glob("*.safetensors"))
    if any(re.search(r"-\d+-of-\d+\.", name) for name in found):
        return f"; it holds {some(found)}, shards without their {INDEX}: add it"
    if found:
        return f"; it holds {some(found)}, a name that is not read by itself: rename it to {SINGLE}"
    pickles = [file.name for pattern in PICKLES for file in folder.glob(pattern)]
    pickles = sorted(name for name in pickles if not name.startswith(NO_WEIGHTS))
    return (
        f"; {some(pickles)} would have to be unpickled, which runs code: convert it to safetensors first" if pickles else ""
    )


def some(names: list[str]) -> str:
    """The first few of ``names``, as text."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") if names else "none"


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
        if header_size <= LONGEST_HEADER and size >= 8 + header_size:
            try:
                header = json_text.parse(stream.read(header_size))
                ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
                expected = 8 + header_size + max(ends, default=0)
                if expected != size:
                    return f"it has {size} bytes, its header promises {expected}; download it again"
                return "shapes, dtypes and offsets of its header contradict one another; download it again"
            except (ValueError, KeyError, TypeError, AttributeError):
                pass
    return f"its {size} bytes are no safetensors file; download it again"


def pointer_hint(file: Path) -> str:
    """A clause if ``file`` is a Git LFS pointer, or an empty text."""
    with file.open("rb") as stream:
        is_pointer = stream.read(40).startswith(b"version https://git-lfs")
    return "; it is a Git LFS pointer, not the file itself: run `git lfs pull`" if is_pointer else ""
