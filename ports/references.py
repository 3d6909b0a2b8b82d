"""The torch references: which there are, which versions were tested or are known to be wrong, how they are imported."""

import importlib
import importlib.metadata
import json
import sys
from pathlib import Path

import numpy as np

from ports.compare import relative_error

TESTED = {"torch": "2.13.0", "transformers": "5.24.0", "flash-linear-attention": "0.6.0", "triton": "3.6.0"}
INSTALL = 'pip install -e ".[test]"'
MODULES = {
    "qwen3_5": "ports.qwen3_5.reference",
    "qwen3_5_text": "ports.qwen3_5.reference",
    "gated_deltanet": "ports.fla.reference",
    "gated_deltaproduct": "ports.fla.reference",
    "delta_net": "ports.fla.reference",
}
PROBE = (17, 23)  # tokens of the two segments; the fault is in a later segment of more than one
PROBE_BOUND = 1e-4  # a right reference is below 1e-6, one that restarts above 1e-2


class UnusableReference(RuntimeError):
    """A reference that is missing, of another version than tested, or known to be wrong."""


def check_versions(*packages: str, any_version: bool = False) -> dict[str, str]:
    """Versions of ``packages``.

    Raises:
        UnusableReference: one is missing, or was not tested and ``any_version`` is not set.
    """
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            raise UnusableReference(
                f"{package} is missing; {TESTED[package]} was tested. Install it with {INSTALL}"
            ) from None
    for package in [] if any_version else untested(found):
        raise UnusableReference(f"{package} is {found[package]}; {TESTED[package]} was tested. Install that with {INSTALL}")
    return found


def untested(versions: dict[str, str]) -> list[str]:
    """Packages of another version than tested; a local label such as ``+cpu`` does not count."""
    return [name for name, version in versions.items() if version.split("+")[0] != TESTED[name]]


def import_transformers(*, any_version: bool = False):
    """transformers, with its own torch implementation of the delta rule rather than fla's Triton kernels.

    transformers takes fla's kernels wherever fla imports, and these need a GPU. Versions before the fix of
    huggingface/transformers#45513 restart every segment of more than one token from a zero state; the tested one has it,
    and :func:`check_segments` tells of any other.

    Raises:
        UnusableReference: see :func:`check_versions`; or fla was imported before.
    """
    check_versions("torch", "transformers", any_version=any_version)
    if sys.modules.get("fla") is not None:
        raise UnusableReference(
            "fla is imported in this process, so transformers would run its kernels; use another process"
        )
    sys.modules["fla"] = None
    import transformers

    return transformers


def reference_class(folder: Path) -> type:
    """The ``Reference`` for the ``model_type`` of a checkpoint folder.

    A reference has ``packages`` (names and versions of what computes), ``layer_kinds`` ("linear" or "attention" in depth
    order), ``segments`` and ``run``; see :class:`ports.qwen3_5.reference.Reference`.

    Raises:
        UnusableReference: there is none.
    """
    kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    if kind not in MODULES:
        raise UnusableReference(f"there is no reference for model_type {kind!r}; there is for {', '.join(MODULES)}")
    try:
        return importlib.import_module(MODULES[kind]).Reference
    except ModuleNotFoundError as error:
        if not MODULES[kind].startswith(error.name or "-"):
            raise
        raise UnusableReference(f"there is no reference for model_type {kind!r} yet ({error.name} is missing)") from None


def check_segments(reference, tokens: np.ndarray) -> float:
    """Relative error of the logits in two segments against one pass, over 40 tokens repeated from ``tokens`` [1, N].

    NaN is returned as it is: whoever compares names where it comes from.

    Raises:
        UnusableReference: the second segment does not go on from the first.
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
