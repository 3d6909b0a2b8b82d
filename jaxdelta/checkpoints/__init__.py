"""Loading and saving checkpoints: a local folder in Hugging Face's format, a hub id, or an embedded model.

Neither torch nor pickle is used.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from jaxdelta.checkpoints import delta_lm, qwen3_5, tokenizer
from jaxdelta.checkpoints.files import INDEX, SINGLE, CheckpointError, TensorFiles, read_json, some
from jaxdelta.checkpoints.forms import (
    ADAPTER,
    other_form,
    refuse_other_forms,
    refuse_quantised,
    refuse_wrapped,
    wrapper_of,
)
from jaxdelta.checkpoints.key_table import COPY, EMBED, Entry, one_value
from jaxdelta.checkpoints.tokenizer import load_tokenizer, read_tokenizer, tokenizer_files
from jaxdelta.models import build
from jaxdelta.models.config import DecoderConfig, DeltaLMConfig, Qwen3_5Config
from jaxdelta.models.decoder import Decoder

__all__ = ["CheckpointError", "Info", "Origin", "embedded_models", "inspect", "load", "load_tokenizer", "save"]

ASSETS = Path(__file__).parents[1] / "assets"
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
STORED = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16}
KEY_TABLES = {Qwen3_5Config: qwen3_5, DeltaLMConfig: delta_lm}
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "config.json", ADAPTER, *tokenizer.FILES]


@dataclass(frozen=True)
class Origin:
    """Where a model came from.

    Attributes:
        name: as given to :func:`load`.
        folder: local folder from which it was read.
        revision: commit of a hub download; None for a local folder.
        raw_config: content of ``config.json``.
        stored_dtypes: stored dtype of each tensor, by name without prefix.
    """

    name: str
    folder: Path
    revision: str | None
    raw_config: Mapping[str, Any]
    stored_dtypes: Mapping[str, str]

    def sha256(self) -> dict[str, str]:
        """Checksum of every file that determines the model, by file name."""
        files = ["config.json", *tokenizer_files(self.folder)]
        weights = _tensor_files(self.folder, self.raw_config).files
        return {f.name: _sha256(f) for f in [*(self.folder / n for n in files), *weights]}


@dataclass(frozen=True)
class Info:
    """Facts about a checkpoint, found without loading its weights.

    Attributes:
        config: sizes.
        folder: local folder that holds it.
        revision: commit of a hub download; None for a local folder.
        num_parameters: of the text model.
        num_tensors: tensors that would be loaded.
        ignored: names of ignored tensors, by group.
        stored_dtypes: number of loaded tensors, by stored dtype.
        files: names of the files with the weights.
        unread: names of other safetensors files in the folder.
        tokenizer_files: names of the files of the tokenizer; empty without a tokenizer.
    """

    config: DecoderConfig
    folder: Path
    revision: str | None
    num_parameters: int
    num_tensors: int
    ignored: dict[str, list[str]] = field(default_factory=dict)
    stored_dtypes: dict[str, int] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    tokenizer_files: tuple[str, ...] = ()

    @property
    def has_tokenizer(self) -> bool:
        return bool(self.tokenizer_files)


def embedded_models() -> list[str]:
    """Names of the models that ship with the library."""
    return sorted(file.parent.name for file in ASSETS.glob("*/config.json"))


def load(name: str | os.PathLike, *, dtype: str = "float32", revision: str | None = None) -> Decoder:
    """Load a model.

    Args:
        name: an embedded model, a local folder, or a hub id (``owner/name``, downloaded once).
        dtype: "float32" or "bfloat16", of parameters and activations; A_log, dt_bias, norms and states are always f32.
        revision: branch, tag or commit of a hub id.

    Raises:
        CheckpointError: no checkpoint is found, or it is incomplete, inconsistent or of an unsupported kind; names the file
            or the tensor.
        ValueError: an unknown dtype.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; expected one of {', '.join(DTYPES)}")
    folder, revision = _resolve(name, revision)
    raw, config, tensors, stored, _ = _contents(folder)

    graphdef, abstract = nnx.split(nnx.eval_shape(lambda: build(config, dtype=DTYPES[dtype])))
    leaves = dict(nnx.to_flat_state(abstract))
    for entry, names in stored.items():
        leaf = leaves[entry.path]
        leaves[entry.path] = leaf.replace(_parameter(tensors, names, leaf.shape, leaf.dtype))
    model = nnx.merge(graphdef, nnx.from_flat_state(leaves.items()))
    model.tokenizer = read_tokenizer(folder)
    dtypes = {entry.name: tensors.dtypes[names[0]] for entry, names in stored.items()}
    model.origin = Origin(os.fspath(name), folder, revision, raw, dtypes)
    return model


def save(model: Decoder, path: str | os.PathLike) -> None:
    """Write ``model`` as a text-only checkpoint that transformers or fla reads.

    Tensors of a loaded model are written in the dtype in which they were stored, others in their own. The weights get their
    name only when complete.

    Raises:
        FileExistsError: the folder already holds a checkpoint.
        ValueError: the family's format cannot express these sizes.
    """
    folder, table = Path(path), KEY_TABLES[type(model.config)]
    fields = table.config_to_json(model.config, model.origin.raw_config if model.origin else None)
    folder.mkdir(parents=True, exist_ok=True)
    taken = [n for n in ("config.json", tokenizer.WHOLE, tokenizer.VOCABULARY, SINGLE, INDEX) if (folder / n).exists()]
    if taken:
        raise FileExistsError(f"{folder} already holds {', '.join(taken)}; choose another folder or remove them")
    leaves = dict(nnx.to_flat_state(nnx.state(model)))
    stored_dtypes = model.origin.stored_dtypes if model.origin else {}
    tensors = {}
    for entry in table.entries(model.config):
        array = np.asarray(leaves[entry.path][...])
        array = array.astype(STORED[stored_dtypes[entry.name]] if entry.name in stored_dtypes else array.dtype)
        tensors[entry.stored_name()] = np.ascontiguousarray(array.reshape(entry.shape))
    save_file(tensors, folder / "model.partial", metadata={"format": "pt"})
    if model.tokenizer is not None:
        model.tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
    (folder / "model.partial").chmod((folder / "config.json").stat().st_mode)  # safetensors writes for the owner alone
    (folder / "model.partial").replace(folder / SINGLE)


def inspect(name: str | os.PathLike, *, revision: str | None = None) -> Info:
    """Facts on what :func:`load` would load, from the configuration and the headers of the weights.

    Raises:
        CheckpointError: as :func:`load`; but weights are not checked for NaN, and the tokenizer is not read.
    """
    folder, revision = _resolve(name, revision)
    _, config, tensors, stored, ignored = _contents(folder)
    kinds = [tensors.dtypes[names[0]] for names in stored.values()]
    return Info(
        config=config,
        folder=folder,
        revision=revision,
        num_parameters=sum(int(np.prod(entry.shape)) for entry in stored),
        num_tensors=len(stored),
        ignored=ignored,
        stored_dtypes={kind: kinds.count(kind) for kind in sorted(set(kinds))},
        files=tuple(file.name for file in tensors.files),
        unread=tuple(file.name for file in tensors.unread),
        tokenizer_files=tuple(tokenizer_files(folder)),
    )


def parameters_sha256(model: Decoder) -> str:
    """Checksum of the parameters in memory: their paths, dtypes, shapes and bits."""
    digest = hashlib.sha256()
    for path, leaf in sorted(nnx.to_flat_state(nnx.state(model)), key=lambda item: str(item[0])):
        array = np.ascontiguousarray(leaf[...])
        digest.update(f"{path} {array.dtype} {array.shape}".encode())
        digest.update(array.view(np.uint8) if array.size else b"")
    return digest.hexdigest()


def _resolve(name: str | os.PathLike, revision: str | None) -> tuple[Path, str | None]:
    """The local folder of a model, and the commit if it is a hub download."""
    text = os.fspath(name)
    try:
        Path(text).expanduser()
    except RuntimeError:
        raise CheckpointError(f"{text} begins with the home of a user that does not exist") from None
    if revision is not None and (text in embedded_models() or Path(text).expanduser().exists()):
        raise CheckpointError(f"{text} is local; a revision ({revision}) can only be asked of a hub id")
    if text in embedded_models():
        return ASSETS / text, None
    folder = Path(text).expanduser()
    if folder.is_dir():
        return folder, None
    if folder.exists():
        raise CheckpointError(f"{text} is a file; expected the folder that holds config.json and the weights")
    if not HUB_ID.fullmatch(text):
        raise CheckpointError(
            f"{text} is neither a folder, nor an embedded model ({', '.join(embedded_models())}), nor a hub id (owner/name)"
        )
    return _download(text, revision)


def _download(repo: str, revision: str | None) -> tuple[Path, str]:
    import huggingface_hub  # a second to import, and most runs are local
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        folder = Path(huggingface_hub.snapshot_download(repo, revision=revision, allow_patterns=HUB_FILES))
    except (HfHubHTTPError.__bases__[0], HFValidationError, OSError) as error:  # the first: of its HTTP client
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{repo} is no local folder and could not be had from the hub ({reason}); "
            "give a folder, or check the id and the network"
        ) from None
    if not any(folder.glob("*.safetensors")) and (said := other_form(_files_of(repo, revision))):
        raise CheckpointError(f"{repo} {said}")
    return folder, folder.name


def _files_of(repo: str, revision: str | None) -> list[str]:
    """Names of all files of a hub repository; empty if the hub does not answer."""
    import huggingface_hub

    try:
        return huggingface_hub.list_repo_files(repo, revision=revision)
    except Exception:  # of whatever kind: the caller has an error message without them too
        return []


class _Contents(NamedTuple):
    """Content of a folder, before weights are read."""

    raw: dict[str, Any]
    config: DecoderConfig
    tensors: TensorFiles
    stored: dict[Entry, tuple[str, ...]]
    ignored: dict[str, list[str]]


def _contents(folder: Path) -> _Contents:
    refuse_other_forms(folder)
    raw, config = _read_config(folder)
    tensors = _tensor_files(folder, raw)
    wrapper = wrapper_of(tensors.shapes)
    names = [name.removeprefix(wrapper) for name in tensors.shapes]
    refuse_quantised(folder, raw, names)
    refuse_wrapped(folder, names)
    try:
        stored, ignored = KEY_TABLES[type(config)].stored_names(config, names)
    except CheckpointError as error:
        unread = f"; {some([file.name for file in tensors.unread])} is not read" if tensors.unread else ""
        raise CheckpointError(f"{folder}: {error}{unread}") from None
    stored = {entry: tuple(wrapper + name for name in parts) for entry, parts in stored.items()}
    ignored = {group: [wrapper + name for name in members] for group, members in ignored.items()}
    _check_tensors(folder, tensors, stored)
    _check_copies(folder, tensors, stored, ignored.get(COPY, []))
    return _Contents(raw, config, tensors, stored, ignored)


def _tensor_files(folder: Path, raw: Mapping[str, Any]) -> TensorFiles:
    text = raw.get("text_config")
    inner, outer = ("in text_config", text), ("at the top level", raw)
    read, beside = ([inner], [outer]) if isinstance(text, dict) and text else ([outer], [])
    return TensorFiles(folder, chosen=one_value("transformers_weights", read, beside=beside))


def _read_config(folder: Path) -> tuple[dict[str, Any], DecoderConfig]:
    raw = read_json(folder / "config.json")
    for table in KEY_TABLES.values():
        if raw.get("model_type") in table.MODEL_TYPES:
            return raw, table.config_from_json(raw)
    supported = [name for table in KEY_TABLES.values() for name in table.MODEL_TYPES]
    raise CheckpointError(
        f"{folder / 'config.json'} has model_type {raw.get('model_type')!r}; supported: {', '.join(supported)}"
    )


def _check_tensors(folder: Path, tensors: TensorFiles, stored: dict[Entry, tuple[str, ...]]) -> None:
    for entry, names in stored.items():
        rows, *rest = entry.shape
        expected = (rows // len(names), *rest)  # of each of the tensors whose rows the parameter stacks
        for name in names:
            if tensors.shapes[name] != expected:
                raise CheckpointError(
                    f"{folder}: config.json asks for {name} of shape {list(expected)}, "
                    f"the file has {list(tensors.shapes[name])}"
                )
            if tensors.dtypes[name] not in STORED:
                raise CheckpointError(
                    f"{folder}: {name} is stored as {tensors.dtypes[name]}; supported: {', '.join(STORED)}. "
                    "Dequantise it first."
                )


def _check_copies(folder: Path, tensors: TensorFiles, stored: dict[Entry, tuple[str, ...]], copies: list[str]) -> None:
    """Raise CheckpointError if a tied head is also stored and differs from the embedding."""
    for name in copies:
        (embed,) = next(names for entry, names in stored.items() if entry.path == EMBED)
        if not np.array_equal(tensors.read(name), tensors.read(embed)):
            raise CheckpointError(
                f"{folder}: tie_word_embeddings contradicts {name}, which differs from {embed}; "
                "set the one to false, or remove the other"
            )


def _parameter(tensors: TensorFiles, names: tuple[str, ...], shape: tuple[int, ...], dtype) -> jax.Array:
    array = tensors.read(names[0]) if len(names) == 1 else np.concatenate([tensors.read(name) for name in names])
    array = array.reshape(shape).astype(dtype, copy=False)  # on the host: nothing to compile
    if not np.isfinite(array).all():
        raise CheckpointError(f"{', '.join(names)} holds NaN or infinity{'' if dtype == jnp.float32 else f' in {dtype}'}")
    return jnp.asarray(array)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
