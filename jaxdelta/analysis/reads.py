"""What segments read of the states that they start from, direction by direction.

In a segment after a boundary o_t = S^T qbar_t + (its own writes) exactly, with S the state at the boundary and qbar_t the
pulled-back query (:mod:`jaxdelta.ops.reads`). So for S = sum_i sigma_i u_i v_i^T, direction i adds
sigma_i (u_i . qbar_t) v_i to the output, and over the tokens of the segment

    read          sum_t (u_i . qbar_t)^2 = u_i^T O u_i          how much the direction is asked for
    contribution  sigma_i^2 times that                          its energy in the outputs; the sum is sum_t ||S^T qbar_t||^2
    balanced      singular values of Qbar S                     what is both stored and read; Qbar: the stacked qbar_t
    carried       sum_t ||S^T qbar_t||^2 / sum_t ||o_t||^2      share of the carried state in the head's outputs

O = sum_t qbar_t qbar_t^T is the read Gramian, S S^T the stored one. A head's output is normalised afterwards and later
layers read it, so none of this is an effect on the loss. Balanced importances are those of balanced truncation, as in
GHOST, arXiv 2602.11408, which estimates its Gramians; here both are exact for the tokens at hand.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Array, Float

from jaxdelta.analysis.compare import with_boundary
from jaxdelta.analysis.labels import head_coordinates, labelled, without_padding
from jaxdelta.analysis.per_document import checked_length, dataset_of, text_of_document
from jaxdelta.dims import HIGHEST, stacked_alike
from jaxdelta.documents import Document
from jaxdelta.models.config import DecoderConfig
from jaxdelta.models.decoder import Decoder
from jaxdelta.ops.reads import reads
from jaxdelta.ops.spectra import effective_rank_of
from jaxdelta.results.documents import Documents, as_documents, opened
from jaxdelta.runs.observers import Seen
from jaxdelta.runs.segments import init_carry, iterate, num_boundaries

DESCRIPTIONS = {  # long name and units of each variable
    "sigma": ("singular value of the state", "1"),
    "read": ("sum over tokens of the squared component of the pulled-back query along the direction", "1"),
    "contribution": ("energy of the direction in the outputs of the segment", "1"),
    "balanced": ("singular value of the stacked pulled-back queries times the state", "1"),
    "carried": ("energy of what is read of the state, over that of the outputs", "1"),
    "stored_rank": ("effective rank of the state", "directions"),
    "read_rank": ("effective rank of the root of the read Gramian", "directions"),
    "balanced_rank": ("effective rank of the pulled-back queries times the state", "directions"),
    "read_gramian": ("sum over tokens of the outer product of the pulled-back query with itself", "1"),
    "stored_gramian": ("S S^T", "1"),
}


@dataclass(frozen=True)
class ReadSums:
    """Observes the read Gramian O, Float[L B H K K], and the energy of the outputs, Float[L B H]."""

    names = ("q", "k", "beta", "g", "o")

    def __call__(self, seen: Seen) -> tuple[Array, Array]:
        n, layers, text = seen.model.config.num_householder, seen.model.config.linear_layers, seen.is_text
        gramians = []
        for layer in layers:  # layers may differ in size
            q, k, beta, g, _ = (seen.arrays[name][layer] for name in self.names)
            qbar = jnp.where(text[..., None, None], reads(q, k, beta=beta, g=g, num_householder=n).qbar, 0)
            gramians.append(jnp.einsum("bthk,bthm->bhkm", qbar, qbar, precision=HIGHEST))
        o = jnp.where(text[..., None, None], seen.stacked("o", layers), 0)
        return stacked_alike(gramians), jnp.sum(o * o, axis=(2, 4))


def state_reads(
    model: Decoder,
    documents: Documents,
    *,
    segment: int = 256,
    gramians: bool = False,
    out: Path | str | None = None,
    name: str = "model",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> xr.Dataset:
    """What the segment after each boundary reads of every head's state, one document at a time.

    Args:
        documents: as for :func:`jaxdelta.analysis.compare.compare`; those without a boundary are left out.
        segment: tokens between two boundaries.
        gramians: whether to keep O and S S^T, K x K a head and boundary.
        out: results folder; documents finished there are not run again.
        name: of the model, for the manifest.
        progress: called with the number of segments done and of all.

    Returns:
        A dataset over (document, boundary, layer, head), NaN where a document has ended: ``carried``, ``stored_rank``,
        ``read_rank``, ``balanced_rank``, NaN for an empty state too; with an axis ``direction``, the largest sigma first:
        ``sigma``, ``read``, ``contribution``, and ``balanced``, the largest first; with ``gramians``, ``read_gramian`` and
        ``stored_gramian`` with axes ``key`` and ``key_too``.

    Raises:
        TypeError: an argument is of another type.
        ValueError: no linear layer, no document with a boundary, two with the same name, an id out of range, or a segment
            below 1.
        NonFiniteError: a NaN or an infinity; names layer, head, tokens and document.
        MemoryError: not even one document fits.
        ResultsError: ``out`` cannot be used.
    """
    documents = as_documents(documents, model, fewest=1)
    length = checked_length(model, documents, segment)
    documents = with_boundary(documents, segment)
    results = opened(out, model, name, "reads", segment=segment, gramians=gramians)

    def work(document: Document, within) -> xr.Dataset:
        return _of_document(model, document, segment, length, gramians, within)

    return dataset_of(documents, work, segment=segment, name="reads", results=results, progress=progress)


def _of_document(model: Decoder, document: Document, segment: int, max_length: int, gramians: bool, progress) -> xr.Dataset:
    text = text_of_document(document, segment)
    found, boundaries = [], num_boundaries(len(document.tokens), segment)
    for step in iterate(model, text, init_carry(model, 1, max_length), observers=(ReadSums(),), progress=progress):
        if 0 < step.index <= boundaries:
            ((O, energy),) = step.observed
            S = np.asarray(step.start.recurrent.S)[:, 0]
            found.append(of_boundary(S, O[:, 0], energy[:, 0], gramians=gramians))
    arrays = {name: np.stack([x[name] for x in found])[None] for name in found[0]}
    return _dataset(model.config, document.name, list(text.boundaries[:boundaries]), arrays)


def of_boundary(
    S: Float[np.ndarray, "L H K V"],
    O: Float[np.ndarray, "L H K K"],
    energy: Float[np.ndarray, "L H"],
    *,
    gramians: bool = False,
) -> dict[str, np.ndarray]:
    """The variables of :func:`state_reads` at one boundary, in f64.

    Args:
        S: states at the boundary.
        O: read Gramians of the segment after it.
        energy: sum over its tokens of ||o||^2.
    """
    S, O, energy = (x.astype(np.float64) for x in (S, O, energy))
    U, sigma, _ = np.linalg.svd(S, full_matrices=False)
    read = np.einsum("lhki,lhkm,lhmi->lhi", U, O, U)
    OU = sigma[..., :, None] * np.einsum("lhki,lhkm,lhmj->lhij", U, O, U) * sigma[..., None, :]
    balanced, asked = _roots(OU), _roots(O)
    contribution, empty = sigma**2 * read, sigma[..., 0] == 0
    empty = np.where(empty, np.nan, 1.0)
    found = {
        "sigma": sigma,
        "read": read,
        "contribution": contribution,
        "balanced": balanced,
        "carried": empty * contribution.sum(axis=-1) / np.where(energy > 0, energy, np.nan),
        "stored_rank": empty * effective_rank_of(sigma),
        "read_rank": empty * effective_rank_of(asked),
        "balanced_rank": empty * effective_rank_of(balanced),
    }
    return found | ({"read_gramian": O, "stored_gramian": S @ np.swapaxes(S, -1, -2)} if gramians else {})


def _roots(gramian: Float[np.ndarray, "*heads K K"]) -> Float[np.ndarray, "*heads K"]:
    """Roots of the eigenvalues, descending; 0 below K eps(f32) of the largest, which is rounding of the f32 Gramian."""
    values = np.linalg.eigvalsh(gramian)[..., ::-1]
    floor = gramian.shape[-1] * np.finfo(np.float32).eps * np.maximum(values[..., :1], 0)
    return np.sqrt(np.where(values > floor, values, 0))


def _dataset(config: DecoderConfig, name: str, boundaries: list[int], arrays: dict[str, np.ndarray]) -> xr.Dataset:
    axes = ("document", "boundary", "layer", "head")
    last = dict.fromkeys(("sigma", "read", "contribution", "balanced"), ("direction",))
    last |= dict.fromkeys(("read_gramian", "stored_gramian"), ("key", "key_too"))
    found = {x: ((*axes, *last.get(x, ())), values) for x, values in arrays.items()}
    coords = {"document": [name], "boundary": boundaries, **head_coordinates(config)}
    coords["direction"] = np.arange(arrays["sigma"].shape[-1])
    attrs = {"precision": "states, queries and read Gramians in f32; all from these in f64, without what is rounding"}
    return without_padding(config, labelled(xr.Dataset(found, coords, attrs), DESCRIPTIONS))
