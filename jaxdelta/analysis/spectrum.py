"""Singular values of the carried states of every head over documents, and every rank in use of them, side by side.

Published claims on the "rank" of such states contradict one another partly because each means another number; see
:mod:`jaxdelta.ops.spectra` for the definitions:

    numerical rank      #{sigma_i > max(K, V) eps(f32) sigma_1}, the floor of an f32 state
    threshold rank      #{sigma_i > 1e-4 sigma_1}
    effective rank      exp of the entropy of sigma / sum(sigma); ``energy_effective_rank`` is that of sigma^2
    stable rank         sum(sigma^2) / sigma_1^2; rank utilisation is this over min(K, V)
    energy rank         directions that hold 90, 99 and 99.9 % of sum(sigma^2)
    nuclear, Frobenius  sum(sigma), sqrt(sum(sigma^2))

States are those that the model carries, untouched, after chosen numbers of tokens. Each is factorized once, in f64.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import xarray as xr
from jaxtyping import Array, Float

from jaxdelta.analysis.labels import head_coordinates, labelled, without_padding
from jaxdelta.analysis.per_document import checked_length, dataset_of, text_of_document
from jaxdelta.arguments import whole_number
from jaxdelta.documents import Document
from jaxdelta.metrics import spearman
from jaxdelta.models.carry import stacked
from jaxdelta.models.config import DecoderConfig
from jaxdelta.models.decoder import Decoder
from jaxdelta.ops.directions import directions
from jaxdelta.ops.spectra import (
    effective_rank_of,
    energy_effective_rank_of,
    energy_rank_of,
    numerical_threshold,
    stable_rank_of,
    threshold_rank_of,
)
from jaxdelta.results.documents import Documents, as_documents, opened
from jaxdelta.runs.segments import init_carry, iterate

END = "end"
THRESHOLD = 1e-4
ENERGY = (0.9, 0.99, 0.999)
DESCRIPTIONS = {  # long name and units of each variable
    "tokens": ("tokens that the state has read", "tokens"),
    "sigma": ("singular value of the state", "1"),
    "numerical_rank": ("singular values above max(K, V) eps(f32) sigma_1", "directions"),
    "threshold_rank": (f"singular values above {THRESHOLD:g} sigma_1", "directions"),
    "effective_rank": ("exp of the entropy of sigma / sum(sigma)", "directions"),
    "energy_effective_rank": ("exp of the entropy of sigma^2 / sum(sigma^2)", "directions"),
    "stable_rank": ("sum(sigma^2) / sigma_1^2", "directions"),
    "rank_utilisation": ("stable rank over min(K, V)", "1"),
    **{f"energy_rank_{f * 100:g}": (f"directions that hold {f * 100:g} % of the energy", "directions") for f in ENERGY},
    "nuclear_norm": ("sum of the singular values", "1"),
    "frobenius_norm": ("root of the sum of squared singular values", "1"),
}
MEASURES = tuple(name for name in DESCRIPTIONS if name not in ("tokens", "sigma"))


def spectrum(
    model: Decoder,
    documents: Documents,
    *,
    segment: int = 256,
    at: int | str | Sequence[int | str] | None = None,
    out: Path | str | None = None,
    name: str = "model",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> xr.Dataset:
    """Spectra and ranks of the state of every head, one document at a time.

    Args:
        documents: as for :func:`jaxdelta.analysis.compare.compare`; one token is enough.
        segment: tokens run at once. States are known at whole segments and at the end of a document.
        at: numbers of tokens, whole segments each, or "end"; None is "end" and every power of two of segments.
        out: results folder; documents finished there are not run again.
        name: of the model, for the manifest.
        progress: called with the number of segments done and of all.

    Returns:
        A dataset over (document, at, layer, head), NaN where a document is shorter: the measures above; ``sigma`` with a
        last axis ``direction``, descending; and ``tokens`` (document, at), the tokens that the state has read. ``at`` is
        text: a number of tokens, or "end". Ranks of an empty state are 0; see :func:`empty_states`.

    Raises:
        TypeError: an argument is of another type.
        ValueError: no linear layer, no document, an empty one, two with the same name, an id out of range, a segment below
            1, or ``at`` holds what is no boundary, or none that a document reaches.
        NonFiniteError: a NaN or an infinity; names layer, head, tokens and document.
        MemoryError: not even one document fits.
        ResultsError: ``out`` cannot be used.
    """
    documents = as_documents(documents, model, fewest=1)
    length = checked_length(model, documents, segment)
    wanted = None if at is None else _checked(at, documents, segment)
    results = opened(out, model, name, "spectrum", segment=segment, at=wanted and list(map(str, wanted)))

    def work(document: Document, within) -> xr.Dataset:
        return _of_document(model, document, segment, wanted, length, within)

    common = dict(segment=segment, results=results, progress=progress)
    return dataset_of(documents, work, name="spectrum", joined=_joined, **common)


def _checked(at: int | str | Sequence[int | str], documents: Sequence[Document], segment: int) -> list[int | str]:
    """``at`` without repeats, ascending, "end" last.

    Raises:
        TypeError: an entry is neither a whole number nor "end".
        ValueError: an entry is no boundary, or no document reaches any.
    """
    if isinstance(at, str) or not np.iterable(at):
        at = [at]
    wanted = {x if x == END else whole_number("at", x) for x in at}
    numbers = sorted(x for x in wanted if x != END)
    for x in numbers:
        if x < 1 or x % segment:
            raise ValueError(f"at holds {x}; expected whole segments of {segment} tokens, or {END!r}")
    longest = max(len(d.tokens) for d in documents)
    if END not in wanted and (not numbers or numbers[0] > longest):
        raise ValueError(f"at is {numbers}, and the longest document has {longest} tokens")
    return [*numbers, *([END] if END in wanted else [])]


def _places(length: int, segment: int, wanted: list[int | str] | None) -> dict[str, int]:
    """Tokens seen at each place of a document that it reaches, by label, ascending."""
    if wanted is None:
        powers = [segment << i for i in range((length // segment).bit_length())]
        wanted = [*powers, END]
    return {str(x): length if x == END else x for x in wanted if x == END or x <= length}


def _of_document(
    model: Decoder, document: Document, segment: int, wanted: list[int | str] | None, max_length: int, progress
) -> xr.Dataset:
    places = _places(len(document.tokens), segment, wanted)
    seen, found = set(places.values()), {}
    for tokens, S in states_of(model, document, segment, max_length, progress):
        if tokens in seen:
            found[tokens] = sigma_of(S)  # on the device, which goes on
    heads, *size = model.config.largest_state
    sigma = np.zeros((len(places), len(model.config.linear_layers), heads, min(size)))
    for i, tokens in enumerate(places.values()):
        sigma[i] = np.asarray(found[tokens])[:, 0]
    return _dataset(model.config, document.name, places, sigma)


def states_of(model: Decoder, document: Document, segment: int, max_length: int, progress=lambda done, total: None):
    """Yield the tokens seen and the stacked states [L, 1, H, K, V], on the device, at each boundary and at the end.

    Raises:
        NonFiniteError: a NaN or an infinity; names layer, head and tokens.
    """
    text = text_of_document(document, segment)
    for step in iterate(model, text, init_carry(model, 1, max_length), progress=progress):
        if step.index:
            yield step.index * segment, step.start.recurrent.S
    yield len(document.tokens), stacked(step.carry)


@jax.jit
def sigma_of(S: Float[Array, "L B H K V"]) -> Float[Array, "L B H R"]:
    """Singular values of stacked states, descending, computed in f64."""
    return directions(S).sigma


class Sizes(NamedTuple):
    """min(K, V) and the threshold of the numerical rank, each [L, 1]."""

    directions: np.ndarray
    threshold: np.ndarray


def sizes_of(config: DecoderConfig) -> Sizes:
    """The sizes of each linear layer."""
    shapes = [c.state for c in config.linear_sizes]
    thresholds = [numerical_threshold((s.key_dim, s.value_dim), np.float32) for s in shapes]
    return Sizes(np.array([s.directions for s in shapes])[:, None], np.array(thresholds)[:, None])


def measures(sigma: Float[np.ndarray, "N L H R"], sizes: Sizes) -> dict[str, Float[np.ndarray, "N L H"]]:
    """Every measure of spectra, in f64; those of an empty state are 0."""
    stable = stable_rank_of(sigma)
    found = {
        "numerical_rank": threshold_rank_of(sigma, sizes.threshold[..., None]),
        "threshold_rank": threshold_rank_of(sigma, THRESHOLD),
        "effective_rank": effective_rank_of(sigma),
        "energy_effective_rank": energy_effective_rank_of(sigma),
        "stable_rank": stable,
        "rank_utilisation": stable / sizes.directions,
        "nuclear_norm": sigma.sum(axis=-1),
        "frobenius_norm": np.sqrt(np.sum(sigma**2, axis=-1)),
    }
    return found | {f"energy_rank_{f * 100:g}": energy_rank_of(sigma, f) for f in ENERGY}


def _dataset(config: DecoderConfig, name: str, places: dict[str, int], sigma: Float[np.ndarray, "N L H R"]) -> xr.Dataset:
    axes = ("document", "at", "layer", "head")
    found = {"tokens": (axes[:2], np.array([list(places.values())], float)), "sigma": ((*axes, "direction"), sigma[None])}
    found |= {x: (axes, values[None]) for x, values in measures(sigma, sizes_of(config)).items()}
    coords = {
        "document": [name],
        "at": list(places),
        **head_coordinates(config),
        "direction": np.arange(sigma.shape[-1]),
    }
    attrs = {"precision": "states as the layer has them (f32); singular values and all from them in f64"}
    return without_padding(config, labelled(xr.Dataset(found, coords, attrs), DESCRIPTIONS))


def _joined(found: Sequence[xr.Dataset]) -> xr.Dataset:
    """Documents side by side, at all places of any, ascending."""
    labels = {str(x) for data in found for x in data["at"].values}
    order = sorted(labels, key=lambda x: (x == END, x if x == END else int(x)))
    return xr.concat([data.reindex(at=order) for data in found], "document")


# Over documents


def empty_states(data: xr.Dataset, *, norm: str = "frobenius_norm") -> list[tuple[Any, ...]]:
    """(document, ..., layer, head) of every state that is all zeros, in the order of the axes of ``norm``."""
    empty = data[norm] == 0
    empty = empty.stack(place=empty.dims)
    return [tuple(x) for x in empty["place"].values[empty.values]]


def without_empty(data: xr.Dataset) -> xr.Dataset:
    """``data`` with NaN for empty states."""
    return data.where(data["frobenius_norm"] != 0)


def over_documents(data: xr.Dataset) -> xr.Dataset:
    """Median, minimum and maximum over documents of each measure, (statistic, at, layer, head), empty states left out."""
    counted = without_empty(data)[list(MEASURES)]
    parts = [getattr(counted, f)("document") for f in ("median", "min", "max")]
    return xr.concat(parts, xr.DataArray(["median", "min", "max"], dims="statistic", name="statistic")).assign_attrs(
        data.attrs
    )


def split_half(data: xr.Dataset) -> xr.Dataset:
    """For each measure and place, Spearman's correlation over heads between medians of two halves of the documents.

    Documents 1, 3, 5, ... are one half. NaN with a single document, or where all heads are equal.
    """
    counted = without_empty(data)[list(MEASURES)]
    halves = (
        [counted.isel(document=slice(i, None, 2)).median("document") for i in (0, 1)]
        if data.sizes["document"] > 1
        else None
    )
    found = {}
    for name in MEASURES:
        values = np.full(data.sizes["at"], np.nan)
        for i in range(data.sizes["at"]) if halves else ():
            a, b = (half[name].isel(at=i).values.ravel() for half in halves)
            values[i] = spearman(a, b)
        found[name] = ("at", values)
    return xr.Dataset(found, {"at": data["at"]})
