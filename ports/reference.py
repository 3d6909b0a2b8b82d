"""The interface of torch references, and the reference of each checkpoint.

The reference of a family is a class ``Reference`` in its own module, a subclass of the one here; MODULES names the module
for each ``model_type``. Only :func:`load_reference` depends on the family.
"""

import importlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from ports.compare import relative_error
from ports.packages import INSTALL, TESTED, UnusableReference

MODULES = {
    "qwen3_5": "ports.qwen3_5.reference",
    "qwen3_5_text": "ports.qwen3_5.reference",
    "gated_deltanet": "ports.fla.reference",
    "gated_deltaproduct": "ports.fla.reference",
    "delta_net": "ports.fla.reference",
}
PROBE = (17, 23)  # tokens of the two segments; the known fault is in later segments of more than one token
PROBE_BOUND = 1e-4  # a correct reference is below 1e-6, one that restarts is above 1e-2


class Snapshot(NamedTuple):
    """Carried arrays of one layer after a segment, f32, in this library's layout.

    Attributes:
        first: S [B, H, K, V] of a linear layer; keys [B, T, G, d] of an attention layer, of all T tokens so far.
        second: the conv tail [B, W - 1, E], the oldest column first; values, as the keys.
    """

    first: np.ndarray
    second: np.ndarray


class Reference(Protocol):
    """A checkpoint in torch. A family supplies the three attributes, the constructor and ``segments``.

    Args:
        folder: checkpoint in Hugging Face's format.
        dtype: of parameters and activations, by torch's name.
        any_version: whether ``packages`` may have untested versions.

    Attributes:
        packages: versions of the packages that compute, by names of :data:`ports.packages.TESTED`.
        implementation: the implementation, in words.
        layer_kinds: "linear" or "attention" for each layer, in depth order.

    Raises:
        UnusableReference: a package is missing, has an untested version or cannot run in this process; or tensors of the
            checkpoint do not fit the model, see :func:`filled`.
    """

    packages: dict[str, str]
    implementation: str
    layer_kinds: tuple[str, ...]

    def __init__(self, folder: Path, dtype: str = "float32", *, any_version: bool = False): ...

    def segments(
        self, tokens: np.ndarray, splits: Sequence[int] | None = None, mask: np.ndarray | None = None
    ) -> Iterator[tuple[np.ndarray, list[Snapshot]]]:
        """Logits of each segment, and a snapshot of each layer after it.

        Each segment continues from the one before. It is computed when it is requested, so only one is in memory.

        Args:
            tokens: ids, whole numbers [B, N].
            splits: tokens of each segment; None is one segment of all tokens.
            mask: bool [B, N], False is padding on the left.

        Yields:
            Logits [B, T, Y] of the T tokens of the segment, f32, and snapshots in depth order.
        """
        ...

    def run(
        self, tokens: np.ndarray, splits: Sequence[int] | None = None, mask: np.ndarray | None = None
    ) -> tuple[np.ndarray, list[list[Snapshot]]]:
        """Logits [B, N, Y] of all segments and the snapshots after each; arguments as in :meth:`segments`."""
        logits, snapshots = zip(*self.segments(tokens, splits, mask), strict=True)
        return np.concatenate(logits, axis=1), list(snapshots)


def load_reference(folder: Path, dtype: str = "float32", *, any_version: bool = False) -> Reference:
    """The checkpoint in the reference of its ``model_type``; arguments as in :class:`Reference`.

    Raises:
        UnusableReference: there is no reference for it, or as :class:`Reference`.
    """
    kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    if kind not in MODULES:
        raise UnusableReference(f"there is no reference for model_type {kind!r}; there is for {', '.join(MODULES)}")
    return importlib.import_module(MODULES[kind]).Reference(folder, dtype, any_version=any_version)


def filled(model_class, folder: Path, dtype):
    """A model of a transformers class, all of whose tensors are in the checkpoint.

    Raises:
        UnusableReference: a tensor is missing or misshaped; transformers would silently fill it with random numbers.
    """
    model, loading = model_class.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    misfits = {kind: sorted(map(str, loading[kind])) for kind in ("missing_keys", "mismatched_keys") if loading[kind]}
    if misfits:
        raise UnusableReference(f"the reference cannot fill its model from {folder}: {misfits}")
    return model.eval()


def check_segments(reference: Reference, tokens: np.ndarray) -> float:
    """Relative error of logits from two segments against one pass, over 40 tokens taken cyclically from ``tokens`` [1, N].

    NaN is returned; the comparison reports where it comes from.

    Raises:
        UnusableReference: the second segment does not continue the first.
    """
    ids = np.resize(tokens, (1, sum(PROBE)))
    whole, halves = (reference.run(ids, splits)[0] for splits in (None, PROBE))
    error = relative_error(halves, whole)
    if error >= PROBE_BOUND:
        raise UnusableReference(
            f"the reference does not carry its state: {sum(PROBE)} tokens in segments of {PROBE[0]} and {PROBE[1]} give "
            f"logits {error:.1e} away from one pass (at most {PROBE_BOUND:.0e} allowed). transformers without the fix of "
            "huggingface/transformers#45513 restarts segments of more than one token from a zero state. Install "
            f"{TESTED['transformers']} with {INSTALL}"
        )
    return error
