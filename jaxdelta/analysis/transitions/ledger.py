"""The ledger of a trained model: spectra of every token's transition, and of products of transitions over windows.

    A_t = alpha_t H_{n_h} ... H_1,  H_j = I - beta_j k_j k_j^T,  alpha_t = exp(g_t)
    H_{n_h} ... H_1 = I - Q C Q^T,  C of size min(n_h, K)              see jaxdelta/analysis/transitions/windows.py

A factor has the eigenvalue 1 - beta ||k||^2 along its key. For n_h < K the spectrum of A_t is alpha_t times that of I - C,
and alpha_t another K - n_h times. So for beta in [0, 2] and keys not longer than one its spectral radius is alpha_t, which
is called the pin, and rank(A_t - alpha_t I) = rank(C) <= n_h. The rank is lower if a factor is switched off or keys are
linearly dependent. ||k||^2 is measured: the eps of the l2 norm leaves keys shorter than one, and normalisation by the sum
of magnitudes much shorter. The facts are linear algebra; the frozenrank study observed that they hold for the transition of
DeltaProduct. Source of the model: Siems et al., arXiv 2502.10297.

For every token only an n_h x n_h problem is solved. As a check, ``whole_defect`` forms some transitions as K x K matrices,
factor by factor in f64, and takes the radius from all K eigenvalues.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import xarray as xr
from jaxtyping import Float

from jaxdelta.analysis.labels import head_coordinates, labelled
from jaxdelta.analysis.per_document import checked_length, dataset_of, text_of_document
from jaxdelta.analysis.transitions.windows import (
    ACTIVE,
    ANGLE_EDGES,
    FORGOTTEN,
    SUBSPACES,
    WindowStream,
    WindowSums,
    check_windows,
    frozen_tolerances,
    product,
)
from jaxdelta.dims import filled_up
from jaxdelta.documents import Document
from jaxdelta.models.config import DecoderConfig
from jaxdelta.models.decoder import Decoder
from jaxdelta.ops.householder import product as transition_product
from jaxdelta.ops.householder import spectral_radius
from jaxdelta.results.documents import Documents, as_documents, opened
from jaxdelta.runs.observers import Named
from jaxdelta.runs.segments import init_carry, iterate

WINDOWS = (1, 4, 16, 64, 256, 1024, 4096)
TAKEN_WHOLE = 256  # K x K transitions of a document; at least one for each head

DESCRIPTIONS = {  # long name and units of each variable
    "g": ("log-decay of a token", "nats"),
    "beta": ("write strength", "1"),
    "key_norm2": ("squared norm of the key", "1"),
    "eigenvalue": ("1 - beta |k|^2, eigenvalue of a factor along its key", "1"),
    "change": ("singular value of A / alpha - I", "1"),
    "real": ("eigenvalue of A / alpha, real part", "1"),
    "imag": ("eigenvalue of A / alpha, imaginary part", "1"),
    "whole_defect": ("largest |rho(A) / alpha - 1| of the transitions taken whole", "1"),
    "whole_count": ("transitions taken whole, of each head", "transitions"),
    "count": ("whole windows", "windows"),
    "kept": ("singular value of the product over a window, decay apart, mean", "1"),
    "changed": ("singular value of the product minus I, mean", "1"),
    "frozen": ("directions that the product changes by no more than the tolerance, mean", "directions"),
    "forgotten": ("directions that the product more than halves, mean", "directions"),
    "log_decay": ("sum of the log-decays over a window, mean", "nats"),
    "kept_smallest": ("smallest singular value of any window", "1"),
    "kept_largest": ("largest singular value of any window", "1"),
    "overlap": ("overlap of the subspaces of successive windows, mean", "1"),
    "chance": ("overlap of random subspaces of as many dimensions, mean", "1"),
    "apart": ("overlap of the subspaces of windows that are not successive, mean", "1"),
    "pairs": ("pairs of successive windows that have such subspaces", "pairs"),
    "pairs_apart": ("pairs of other windows that have such subspaces", "pairs"),
    "angles": ("principal angles of successive windows in the bin", "angles"),
    "active": ("active direction of a transition", "index"),
}


def ledger_of(
    model: Decoder,
    documents: Documents,
    *,
    segment: int = 256,
    windows: Sequence[int] = WINDOWS,
    out: Path | str | None = None,
    name: str = "model",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> xr.Dataset:
    """Spectra of the transitions of every token, and of products over windows, one document at a time.

    Args:
        documents: as for :func:`jaxdelta.analysis.compare.compare`; one token is enough.
        segment: tokens run at once; changes results by rounding only.
        windows: lengths in tokens, ascending, each a multiple of the one before; windows start at the start of a document,
            and only complete ones count.
        out: results folder; documents finished there are not run again.
        name: of the model, for the manifest.
        progress: called with the number of segments done and of all.

    Returns:
        A dataset with axes as in :mod:`jaxdelta.analysis.labels`. Of tokens, f32 over (document, token, layer, head), NaN
        where a document has ended:

        - ``g``;
        - with a ``step`` axis of n_h: ``beta``, ``key_norm2`` = ||k||^2, ``eigenvalue`` = 1 - beta ||k||^2;
        - with an ``active`` axis of min(n_h, K): ``change``, singular values of A / alpha - I; ``real`` and ``imag``,
          eigenvalues of A / alpha without the K - n_h that are 1, by magnitude;
        - ``whole_defect`` (document, layer, head): the largest |rho(A) / alpha - 1| of ``whole_count`` (document)
          transitions formed as K x K matrices, evenly spaced in the text.

        Of windows, means over (document, window, layer, head):

        - with a ``direction`` axis of K: ``kept`` and ``changed``, singular values of the product P and of P - I;
          ``kept_smallest`` and ``kept_largest`` are extremes over windows and directions;
        - ``frozen``, with a ``tolerance`` axis: number of directions that P changes by at most this; ``forgotten``: number
          of those that it more than halves; ``log_decay``, which is not in P;
        - with a ``kind`` of subspace: ``pairs`` of successive windows in which both have one, their ``overlap`` (see
          :class:`~jaxdelta.analysis.transitions.windows.Mixing`), its ``chance`` value for random subspaces of the same
          dimensions, ``angles``, counts of principal angles in bins of degrees, and ``apart``, the overlap of the
          ``pairs_apart`` that are not successive;
        - ``count`` (document, window): complete windows, 0 if a document is too short.

    Raises:
        TypeError: an argument is of another type.
        ValueError: no linear layer, no document, an empty one, two with the same name, an id out of range, or windows or
            segment out of bounds.
        NonFiniteError: a NaN or an infinity; names layer, tokens and document.
        MemoryError: not even one document fits.
        ResultsError: ``out`` cannot be used.
    """
    documents = as_documents(documents, model, fewest=1)
    check_windows(windows)
    length = checked_length(model, documents, segment)
    results = opened(out, model, name, "transitions", segment=segment, windows=list(windows))

    def work(document: Document, within) -> xr.Dataset:
        return _of_document(model, document, segment, windows, length, within)

    return dataset_of(documents, work, segment=segment, name="transitions", results=results, progress=progress)


def _of_document(model, document: Document, segment: int, windows: Sequence[int], max_length: int, progress) -> xr.Dataset:
    c, T, n = model.config, len(document.tokens), model.config.num_householder
    streams = window_streams(c, windows)
    whole = np.unique(np.linspace(0, T - 1, -(-TAKEN_WHOLE // len(c.heads))).astype(int))
    tokens, defect = [], [np.zeros(sizes.num_value_heads) for sizes in c.linear_sizes]
    for index, layers in enumerate(_rule_inputs(model, document, segment, max_length)):
        of_layers = []
        for layer, (k, beta, g) in enumerate(layers):
            streams[layer].add(k, beta, g)
            of_layers.append(measures(k, beta, g, n))
            for t in whole[(whole >= index * segment) & (whole < (index + 1) * segment)] - index * segment:
                at = slice(t * n, (t + 1) * n)
                defect[layer] = np.maximum(defect[layer], whole_defects(k[at], beta[at], g[t]))
        tokens.append({name: _stacked([m[name] for m in of_layers], axis=1) for name in of_layers[0]})
        progress(index + 1, -(-T // segment))
    whole_text = {name: np.concatenate([part[name] for part in tokens]) for name in tokens[0]}
    sums = [stream.finish() for stream in streams]
    return _dataset(c, document.name, whole_text, len(whole), _stacked(defect), sums)


def window_streams(config: DecoderConfig, windows: Sequence[int]) -> list[WindowStream]:
    """A stream of windows for each linear layer."""
    tolerances = frozen_tolerances(config.largest_state.key_dim)
    return [
        WindowStream(
            windows,
            heads=sizes.num_value_heads,
            key_dim=sizes.key_dim,
            num_householder=sizes.num_householder,
            tolerances=tolerances,
        )
        for sizes in config.linear_sizes
    ]


def _stacked(arrays: Sequence[np.ndarray], axis: int = 0) -> np.ndarray:
    """Arrays of all layers along a new axis; smaller ones are padded with NaN, counts with 0."""
    return np.stack(filled_up(arrays, np.nan if arrays[0].dtype.kind == "f" else 0), axis=axis)


def measures(
    k: Float[np.ndarray, "P H K"], beta: Float[np.ndarray, "P H"], g: Float[np.ndarray, "T H"], num_householder: int
) -> dict[str, np.ndarray]:
    """Variables of each token's transition, f32 [T, H] or with a last axis of steps or active directions; computed in f64.

    A beta outside [0, 2] is not refused; its eigenvalue exceeds 1 in magnitude and the pin does not hold.
    """
    k, beta = (
        x.reshape(len(g), num_householder, *x.shape[1:]).swapaxes(1, 2).astype(np.float64) for x in (k, beta[..., None])
    )
    beta = beta[..., 0]
    norm2 = np.sum(k * k, axis=-1)
    C = product(k, beta).deviation
    spectrum = np.linalg.eigvals(np.eye(C.shape[-1]) - C)
    spectrum = np.take_along_axis(spectrum, np.argsort(-np.abs(spectrum), axis=-1), axis=-1)
    found = {
        "g": g,
        "beta": beta,
        "key_norm2": norm2,
        "eigenvalue": 1 - beta * norm2,
        "change": np.linalg.svd(C, compute_uv=False),
        "real": spectrum.real,
        "imag": spectrum.imag,
    }
    return {name: x.astype(np.float32) for name, x in found.items()}


def whole_defects(
    k: Float[np.ndarray, "J H K"], beta: Float[np.ndarray, "J H"], g: Float[np.ndarray, " H"]
) -> Float[np.ndarray, " H"]:
    """|rho(A) / alpha - 1| of one token's transitions, formed factor by factor as K x K matrices in f64."""
    k, beta, alpha = (x.astype(np.float64) for x in (k.swapaxes(0, 1), beta.T, np.exp(g.astype(np.float64))))
    return np.abs(spectral_radius(transition_product(k, beta, alpha)) / alpha - 1)


def _rule_inputs(
    model: Decoder, document: Document, segment: int, max_length: int
) -> Iterator[list[tuple[np.ndarray, ...]]]:
    """For each segment, k [P, H, K], beta [P, H] and g [T, H] of each linear layer."""
    text = text_of_document(document, segment)
    observer = Named(("k", "beta", "g"), model.config.linear_layers)
    for step in iterate(model, text, init_carry(model, 1, max_length), observers=(observer,)):
        (found,) = step.observed
        arrays = [found[name][:, 0].astype(np.float64) for name in observer.names]
        (length,) = text.part(step.index).length
        layers = []
        for sizes, k, beta, g in zip(model.config.linear_sizes, *arrays, strict=True):
            (H, K, _), writes = sizes.state, length * sizes.num_householder
            layers.append((k[:writes, :H, :K], beta[:writes, :H], g[:length, :H]))
        yield layers


def _dataset(
    config: DecoderConfig,
    name: str,
    tokens: dict[str, np.ndarray],
    taken: int,
    defect: np.ndarray,
    sums: Sequence[dict[int, WindowSums]],
):
    last = {"beta": ("step",), "key_norm2": ("step",), "eigenvalue": ("step",), "g": ()}
    found = {
        x: (("document", "token", "layer", "head", *last.get(x, ("active",))), values[None]) for x, values in tokens.items()
    }
    found["whole_defect"] = (("document", "layer", "head"), defect[None])
    found["whole_count"] = (("document",), [taken])
    by_layer = [{length: s.means() for length, s in of_layer.items()} for of_layer in sums]
    lengths, names = list(by_layer[0]), list(next(iter(by_layer[0].values())))
    inner = {"kept": "direction", "changed": "direction", "frozen": "tolerance", "overlap": "kind", "chance": "kind"}
    inner |= {"pairs": "kind", "angles": "kind", "apart": "kind", "pairs_apart": "kind"}
    for x in names:
        dims = (
            "document",
            "window",
            "layer",
            "head",
            *([inner[x]] if x in inner else []),
            *(["angle"] if x == "angles" else []),
        )
        found[x] = (dims, np.stack([_stacked([means[w][x] for means in by_layer]) for w in lengths])[None])
    found["count"] = (("document", "window"), np.array([[sums[0][w].count for w in lengths]]))
    coords = {
        "document": [name],
        "token": np.arange(len(tokens["g"])),
        **head_coordinates(config),
        "key_dim": ("layer", [sizes.key_dim for sizes in config.linear_sizes]),
        "window": lengths,
        "direction": np.arange(config.largest_state.key_dim),
        "tolerance": list(frozen_tolerances(config.largest_state.key_dim)),
        "kind": list(SUBSPACES),
        "angle": (ANGLE_EDGES[:-1] + ANGLE_EDGES[1:]) / 2,
    }
    attrs = {
        "num_householder": config.num_householder,
        "key_dim": config.largest_state.key_dim,
        "active": f"sigma(P - I) > {ACTIVE}",
        "forgotten": f"sigma(P) < {FORGOTTEN}",
        "precision": "keys, write strengths and decays as the layer has them; everything from them in f64",
    }
    return labelled(xr.Dataset(found, coords, attrs), DESCRIPTIONS)
