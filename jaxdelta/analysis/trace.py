"""The rank of every head's state, token by token: before each write, for each Householder step of a token.

The protocol of Siems et al., arXiv 2502.10297 (their effective_state_rank.py): the effective rank of the state before each
update, over one long text, which may run beyond the context that the model was trained on and may hold several documents.
Theirs drops singular values below 2.2e-16; here all count, which changes an effective rank by less than 1e-13. A token's
first entry is of the state before its decay.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Array, Float

from jaxdelta.analysis.labels import head_coordinates, labelled, without_padding
from jaxdelta.analysis.per_document import checked_length, dataset_of, text_of_document
from jaxdelta.arguments import whole_number
from jaxdelta.dims import HIGHEST
from jaxdelta.documents import Document
from jaxdelta.models.decoder import Decoder
from jaxdelta.ops.spectra import effective_rank_of, singular_values, stable_rank_of
from jaxdelta.results.documents import Documents, as_documents, opened
from jaxdelta.runs.observers import Seen
from jaxdelta.runs.segments import init_carry, iterate

DESCRIPTIONS = {  # long name and units of each variable
    "effective_rank": ("effective rank of the state before the write", "directions"),
    "stable_rank": ("stable rank of the state before the write", "directions"),
    "starts": ("token at which a document of the text starts", "index"),
}
PACKED = "packed"


@dataclass(frozen=True)
class Ranks:
    """Observes effective and stable rank before each write of every ``every``-th token, Float[T/every L B n_h H] each."""

    every: int

    names = ("S_before", "k", "v", "beta", "g")

    def __call__(self, seen: Seen) -> tuple[Array, Array]:
        n, layers = seen.model.config.num_householder, seen.model.config.linear_layers
        S, k, v, beta, g = (seen.stacked(name, layers) for name in self.names)
        # Padding comes last, and what is measured there is dropped.
        k, v, beta = (_by_token(x, n, self.every) for x in (k, v, beta))
        g = _by_token(g, 1, self.every)

        def block(S: Array, inputs: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
            first = [x[0] for x in inputs]
            measured = jnp.stack(_states_of_token(S, *first)[:-1], axis=2)  # L B n H K V
            sigma = singular_values(measured)
            S, _ = jax.lax.scan(lambda S, token: (_states_of_token(S, *token)[-1], None), S, inputs)
            return S, (effective_rank_of(sigma), stable_rank_of(sigma))

        return jax.lax.scan(block, S, (k, v, beta, g))[1]


def _by_token(x: Float[Array, "L B P ..."], n: int, every: int) -> Array:
    """[L, B, T n, ...] to [T / every, every, n, L, B, ...]."""
    L, B, P = x.shape[:3]
    x = x.reshape(L, B, P // (n * every), every, n, *x.shape[3:])
    return jnp.moveaxis(x, (2, 3, 4), (0, 1, 2))


def _states_of_token(S: Array, k: Array, v: Array, beta: Array, g: Array) -> list[Array]:
    """The states before each of a token's n writes, and that after the last."""
    found, S = [S], jnp.exp(g[0])[..., None, None] * S
    for j in range(len(k)):
        error = v[j] - jnp.einsum("lbhkv,lbhk->lbhv", S, k[j], precision=HIGHEST)
        S = S + jnp.einsum("lbhk,lbhv->lbhkv", k[j], beta[j][..., None] * error, precision=HIGHEST)
        found.append(S)
    return found


def rank_trace(
    model: Decoder,
    documents: Documents,
    *,
    segment: int = 256,
    every: int = 1,
    packed: bool = False,
    out: Path | str | None = None,
    name: str = "model",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> xr.Dataset:
    """Effective and stable rank of every head's state over the tokens of each document.

    One SVD a head, measured token and Householder step: for states of 128 x 128 take ``every`` of a hundred tokens or so.

    Args:
        documents: as for :func:`jaxdelta.analysis.compare.compare`; one token is enough.
        segment: tokens run at once, a multiple of ``every``.
        every: tokens from one that is measured to the next.
        packed: read the documents one after another as a single text, named "packed", without emptying the state.
        out: results folder; documents finished there are not run again.
        name: of the model, for the manifest.
        progress: called with the number of segments done and of all.

    Returns:
        A dataset over (document, token, step, layer, head), NaN where a document has ended: ``effective_rank`` and
        ``stable_rank`` before the write; ``starts`` (document, start), the tokens at which documents of the text start.
        Attribute ``context``: the longest text that the model was made for, by its config.

    Raises:
        TypeError: an argument is of another type.
        ValueError: no linear layer, no document, an empty one, two with the same name, an id out of range, or a segment
            that is no multiple of ``every``.
        NonFiniteError: a NaN or an infinity; names layer, head, tokens and document.
        MemoryError: not even one document fits.
        ResultsError: ``out`` cannot be used.
    """
    documents = as_documents(documents, model, fewest=1)
    segment, every = whole_number("segment", segment), whole_number("every", every)
    if every < 1 or segment < 1 or segment % every:
        raise ValueError(f"segment is {segment} and every is {every}; expected a multiple of every, both at least 1")
    starts = {d.name: [0] for d in documents}
    if packed:
        begins = np.cumsum([0, *(len(d.tokens) for d in documents)])
        starts = {PACKED: begins[:-1].tolist()}
        documents = [Document(PACKED, np.concatenate([d.tokens for d in documents]))]
    length = checked_length(model, documents, segment)
    results = opened(out, model, name, "trace", segment=segment, every=every)

    def work(document: Document, within) -> xr.Dataset:
        return _of_document(model, document, segment, every, length, starts[document.name], within)

    common = dict(segment=segment, results=results, progress=progress)
    return dataset_of(documents, work, name="trace", keys=lambda d: {"starts": tuple(starts[d.name])}, **common)


def _of_document(
    model: Decoder, document: Document, segment: int, every: int, max_length: int, starts: list[int], progress
) -> xr.Dataset:
    text, config = text_of_document(document, segment), model.config
    parts = []
    for step in iterate(model, text, init_carry(model, 1, max_length), observers=(Ranks(every),), progress=progress):
        (found,) = step.observed
        parts.append([np.moveaxis(x[:, :, 0], 1, 2) for x in found])  # T/every, n_h, L, H
    tokens = np.arange(0, len(document.tokens), every)
    axes = ("document", "token", "step", "layer", "head")
    names = ("effective_rank", "stable_rank")
    arrays = {
        name: (axes, np.concatenate(pieces)[None, : len(tokens)])
        for name, pieces in zip(names, zip(*parts, strict=True), strict=True)
    }
    arrays["starts"] = (("document", "start"), np.array([starts], float))
    coords = {
        "document": [document.name],
        "token": tokens,
        "step": np.arange(config.num_householder),
        **head_coordinates(config),
    }
    data = xr.Dataset(arrays, coords, {"context": config.max_position, "every": every})
    return without_padding(config, labelled(data, DESCRIPTIONS))
