"""What sets the rank of a state: how long a head remembers, and how alike the keys are that it writes along.

    horizon             1 / (1 - alpha), in tokens, for the geometric mean alpha of a head's decays
    mean key            || mean of k / ||k|| ||: 1 if all keys are parallel, near 0 if they point everywhere
    plain covariance    sum of k k^T over a window of tokens, not centred; its effective rank for windows of 1, 2, 4, ...
                        tokens up to the document, and at the horizon (linear between powers of two, in log tokens)
    P                   decayed covariance P_t = alpha_t P_{t-1} + k_t k_t^T at the end of the document
    recall error        ||S^T k - v|| / ||v|| of each write, before and after it (:mod:`jaxdelta.ops.reads`)

A state that decays holds about as many directions as there are distinct keys inside its horizon, since the delta rule
overwrites what is written along the same key. Beside each number stand the ranks of the state at the end of the document.

One pass over a document; memory does not grow with it. A window of up to a segment is the last one in each segment, longer
ones follow one another, and only whole ones count; effective ranks are means over windows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Array, Float

from jaxdelta.analysis import spectrum as spectra
from jaxdelta.analysis.labels import head_coordinates, labelled, without_padding
from jaxdelta.analysis.per_document import checked_length, dataset_of, text_of_document
from jaxdelta.arguments import whole_number
from jaxdelta.dims import HIGHEST, stacked_alike
from jaxdelta.documents import Document
from jaxdelta.metrics import spearman
from jaxdelta.models.carry import stacked
from jaxdelta.models.config import DecoderConfig
from jaxdelta.models.decoder import Decoder
from jaxdelta.ops.reads import recall_errors
from jaxdelta.ops.spectra import effective_rank_of
from jaxdelta.results.documents import Documents, as_documents, opened
from jaxdelta.runs.observers import Seen
from jaxdelta.runs.segments import init_carry, iterate

BETA_EDGES = np.linspace(0, 2, 41)
ERROR_EDGES = np.logspace(-4, 2, 121)  # end bins include what is beyond
QUANTILES = (0.05, 0.5, 0.95)
DESCRIPTIONS = {  # long name and units of each variable
    "tokens": ("tokens of the document", "tokens"),
    "alpha": ("decay of a token, arithmetic mean", "1"),
    "geometric_alpha": ("decay of a token, geometric mean", "1"),
    "horizon": ("1 / (1 - geometric mean of the decay)", "tokens"),
    "mean_key": ("norm of the mean normalised key", "1"),
    "key_rank": ("effective rank of the plain covariance of keys in a window, mean over windows", "directions"),
    "key_rank_at_horizon": ("effective rank of the plain covariance of keys inside the horizon", "directions"),
    "decayed_key_rank": ("effective rank of the decayed covariance of keys at the end", "directions"),
    "beta_count": ("writes of the strength", "writes"),
    "beta": ("write strength, mean", "1"),
    "error_before": ("quantile of the recall error before a write", "1"),
    "error_after": ("quantile of the recall error after a write", "1"),
}
RANKS = tuple(name for name in spectra.MEASURES if "norm" not in name)


def keys(
    model: Decoder,
    documents: Documents,
    *,
    segment: int = 256,
    out: Path | str | None = None,
    name: str = "model",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> xr.Dataset:
    """Horizons, the geometry of keys, write strengths and recall errors of every head, and ranks of its state.

    Args:
        documents: as for :func:`jaxdelta.analysis.compare.compare`; one token is enough.
        segment: tokens run at once, a power of two.
        out: results folder; documents finished there are not run again.
        name: of the model, for the manifest.
        progress: called with the number of segments done and of all.

    Returns:
        A dataset over (document, layer, head): the variables above, and every measure of :func:`jaxdelta.spectrum` at the
        end of the document. ``key_rank`` has an axis ``window``, NaN where none is whole; ``beta_count`` an axis
        ``strength``, middles of 40 bins over [0, 2]; errors an axis ``quantile``.

    Raises:
        TypeError: an argument is of another type.
        ValueError: no linear layer, no document, an empty one, two with the same name, an id out of range, or a segment
            that is no power of two.
        NonFiniteError: a NaN or an infinity; names layer, head, tokens and document.
        MemoryError: not even one document fits.
        ResultsError: ``out`` cannot be used.
    """
    documents = as_documents(documents, model, fewest=1)
    segment = whole_number("segment", segment)
    if segment < 1 or segment & (segment - 1):
        raise ValueError(f"segment is {segment}; expected a power of two, as windows are")
    length = checked_length(model, documents, segment)
    results = opened(out, model, name, "keys", segment=segment)

    def work(document: Document, within) -> xr.Dataset:
        return _of_document(model, document, segment, length, within)

    return dataset_of(documents, work, segment=segment, name="keys", results=results, progress=progress)


@dataclass(frozen=True)
class KeyMoments:
    """What is kept of the keys of a segment.

    Per write: ``before`` and ``after``, recall errors, and ``beta``, Float[L B P H], NaN at padding; per token ``g``,
    Float[L B T H]. Sums over the segment: ``mean``, normalised keys, [L B H K]; ``plain``, k k^T, and ``decayed``, the same
    weighted by the decays that follow, [L B H K K]. ``short``, effective ranks of the plain covariance of its last 1, 2, 4
    ... tokens up to the segment, [J L B H].
    """

    names = ("S_before", "k", "v", "beta", "g")

    def __call__(self, seen: Seen) -> dict[str, Array]:
        n = seen.model.config.num_householder
        layers = seen.model.config.linear_layers
        text = seen.is_text
        writes = jnp.repeat(text, n, axis=1)[..., None]
        found: dict[str, list[Array]] = {"before": [], "after": [], "beta": []}
        for layer in layers:  # layers may differ in size
            S, k, v, beta, g = (seen.arrays[name][layer] for name in self.names)
            beta = jnp.where(writes, beta, 0)
            errors = recall_errors(k, v, beta=beta, g=jnp.where(text[..., None], g, 0), num_householder=n, state=S)
            for name, x in (("before", errors.before), ("after", errors.after), ("beta", beta)):
                found[name].append(jnp.where(writes, x, jnp.nan))
        k, g = seen.stacked("k", layers), jnp.where(text[..., None], seen.stacked("g", layers), 0)
        k = jnp.where(writes[..., None], k, 0)
        size = jnp.linalg.norm(k, axis=-1, keepdims=True)
        after = jnp.flip(jnp.cumsum(jnp.flip(g, axis=2), axis=2), axis=2) - g  # decays of the tokens that follow
        weight = jnp.repeat(jnp.exp(after), n, axis=2)
        return {name: stacked_alike(x) for name, x in found.items()} | {
            "g": g,
            "mean": jnp.sum(k / jnp.where(size > 0, size, 1), axis=2),
            "plain": _moment(k, jnp.ones_like(weight)),
            "decayed": _moment(k, weight),
            "short": self._short(k, seen.length, n),
        }

    def _short(self, k: Float[Array, "L B P H K"], length: Array | None, n: int) -> Float[Array, "J L B H"]:
        T = k.shape[2] // n
        end = jnp.full(k.shape[1], T) if length is None else length
        token = jnp.arange(T * n) // n
        windows = [1 << i for i in range(T.bit_length())]
        inside = jnp.stack([token >= end[:, None] - w for w in windows]).astype(k.dtype)  # J B P
        moments = jnp.einsum("jbp,lbphk,lbphm->jlbhkm", inside, k, k, precision=HIGHEST)
        return _rank(moments)


def _moment(k: Float[Array, "L B P H K"], weight: Float[Array, "L B P H"]) -> Float[Array, "L B H K K"]:
    return jnp.einsum("lbph,lbphk,lbphm->lbhkm", weight, k, k, precision=HIGHEST)


def _rank(moment: Array) -> Array:
    """Effective rank of symmetric matrices [..., K, K] without negative eigenvalues."""
    return effective_rank_of(jnp.maximum(jnp.linalg.eigvalsh(moment)[..., ::-1], 0))


class _Windows:
    """Plain covariances of consecutive windows of whole segments, doubled like the digits of a binary counter."""

    def __init__(self):
        self.waiting: list[np.ndarray | None] = []
        self.sums: list[np.ndarray] = []
        self.counts: list[int] = []

    def add(self, moment: Float[np.ndarray, "L H K K"]) -> None:
        level = 0
        while True:
            if level == len(self.waiting):
                self.waiting.append(None)
                self.sums.append(np.zeros(moment.shape[:2]))
                self.counts.append(0)
            if level:  # the lowest is the segment itself, whose rank the device gave
                self.sums[level] += np.asarray(_rank_f64(moment))
                self.counts[level] += 1
            if self.waiting[level] is None:
                self.waiting[level] = moment
                return
            moment, self.waiting[level] = self.waiting[level] + moment, None
            level += 1


def _rank_f64(moment: Float[np.ndarray, "L H K K"]) -> Float[np.ndarray, "L H"]:
    return effective_rank_of(np.maximum(np.linalg.eigvalsh(moment.astype(np.float64))[..., ::-1], 0))


def _of_document(model: Decoder, document: Document, segment: int, max_length: int, progress) -> xr.Dataset:
    c, n, N = model.config, model.config.num_householder, len(document.tokens)
    text = text_of_document(document, segment)
    totals, windows = _Totals(c, segment), _Windows()
    for step in iterate(model, text, init_carry(model, 1, max_length), observers=(KeyMoments(),), progress=progress):
        (found,) = step.observed
        found = {name: x[:, :, 0] if name == "short" else x[:, 0] for name, x in found.items()}
        length = int(text.part(step.index).length[0])
        totals.add(found, length)
        if length == segment:
            windows.add(found["plain"].astype(np.float64))
    sigma = np.asarray(spectra.sigma_of(stacked(step.carry)), np.float64)[None, :, 0]
    return _dataset(c, document.name, N, n, totals, windows, sigma, segment)


class _Totals:
    """Sums over the segments of a document."""

    def __init__(self, config: DecoderConfig, segment: int):
        heads, K, _ = config.largest_state
        L = len(config.linear_layers)
        self.g, self.alpha, self.beta = (np.zeros((L, heads)) for _ in range(3))
        self.mean, self.decayed = np.zeros((L, heads, K)), np.zeros((L, heads, K, K))
        self.beta_count = np.zeros((L, heads, len(BETA_EDGES) - 1), int)
        self.errors = {name: np.zeros((L, heads, len(ERROR_EDGES) - 1), int) for name in ("before", "after")}
        self.short = np.zeros((segment.bit_length(), L, heads))
        self.short_count = np.zeros(segment.bit_length(), int)

    def add(self, found: dict[str, np.ndarray], length: int) -> None:
        """Add a segment with ``length`` tokens of text."""
        g = found["g"][:, :length].astype(np.float64)
        self.g += g.sum(axis=1)
        self.alpha += np.exp(g).sum(axis=1)
        self.mean += found["mean"]
        self.decayed = np.exp(g.sum(axis=1))[..., None, None] * self.decayed + found["decayed"]
        self.beta += np.nansum(found["beta"], axis=1, dtype=np.float64)
        self.beta_count += _counts(found["beta"], BETA_EDGES)
        for name, counts in self.errors.items():
            counts += _counts(found[name], ERROR_EDGES)
        whole = [1 << i <= length for i in range(len(self.short))]
        self.short[whole] += found["short"][whole]
        self.short_count += whole


def _counts(x: Float[np.ndarray, "L P H"], edges: np.ndarray) -> np.ndarray:
    """Histograms over P, [L, H, bins]; end bins include what is beyond, NaN is left out."""
    L, _, H = x.shape
    bins = len(edges) - 1
    index = np.clip(np.searchsorted(edges, x, side="right") - 1, 0, bins - 1)
    place = (np.arange(L)[:, None, None] * H + np.arange(H)) * bins + index
    return np.bincount(place[~np.isnan(x)], minlength=L * H * bins).reshape(L, H, bins)


def _quantiles(counts: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Quantiles [L, H, quantiles] of histograms [L, H, bins], linear inside a bin; NaN for an empty one."""
    below = np.concatenate([np.zeros((*counts.shape[:-1], 1)), np.cumsum(counts, axis=-1)], axis=-1)
    total = below[..., -1:]
    found = np.full((*counts.shape[:-1], len(QUANTILES)), np.nan)
    for place in np.ndindex(counts.shape[:-1]):
        if total[place][0]:
            found[place] = np.interp(np.array(QUANTILES) * total[place][0], below[place], edges)
    return found


def _dataset(
    c: DecoderConfig, name: str, N: int, n: int, totals: _Totals, windows: _Windows, sigma: np.ndarray, segment: int
) -> xr.Dataset:
    geometric = np.exp(totals.g / N)
    with np.errstate(divide="ignore"):
        horizon = 1 / np.abs(np.expm1(totals.g / N))  # infinite for a head that never forgets
    ranks = [s / k if k else np.full_like(s, np.nan) for s, k in zip(totals.short, totals.short_count, strict=True)]
    ranks += [s / k for s, k in zip(windows.sums[1:], windows.counts[1:], strict=True) if k]
    lengths = 2 ** np.arange(len(ranks))
    key_rank = np.stack(ranks, axis=-1)
    heads, axes = ("layer", "head"), ("document", "layer", "head")
    found = {
        "alpha": (heads, totals.alpha / N),
        "geometric_alpha": (heads, geometric),
        "horizon": (heads, horizon),
        "mean_key": (heads, np.linalg.norm(totals.mean, axis=-1) / (N * n)),
        "key_rank": ((*heads, "window"), key_rank),
        "key_rank_at_horizon": (heads, at_horizon(key_rank, lengths, horizon)),
        "decayed_key_rank": (heads, _rank_f64(totals.decayed)),
        "beta_count": ((*heads, "strength"), totals.beta_count),
        "beta": (heads, totals.beta / (N * n)),
        "error_before": ((*heads, "quantile"), _quantiles(totals.errors["before"], ERROR_EDGES)),
        "error_after": ((*heads, "quantile"), _quantiles(totals.errors["after"], ERROR_EDGES)),
    }
    found |= {x: (heads, values[0]) for x, values in spectra.measures(sigma, spectra.sizes_of(c)).items()}
    found = {x: (("document", *dims), np.asarray(values)[None]) for x, (dims, values) in found.items()}
    found["tokens"] = (axes[:1], [N])
    coords = {
        "document": [name],
        **head_coordinates(c),
        "window": lengths,
        "strength": (BETA_EDGES[:-1] + BETA_EDGES[1:]) / 2,
        "quantile": list(QUANTILES),
    }
    attrs = {"segment": segment, "num_householder": n, "key_dim": c.largest_state.key_dim}
    data = labelled(xr.Dataset(found, coords, attrs), DESCRIPTIONS | spectra.DESCRIPTIONS)
    return without_padding(c, data)


def at_horizon(
    key_rank: Float[np.ndarray, "*heads W"], lengths: Sequence[int] | np.ndarray, horizon: Float[np.ndarray, "*heads"]
) -> Float[np.ndarray, "*heads"]:
    """``key_rank`` at the horizon, linear in the logarithm of the window; the longest whole window for longer horizons."""
    found = np.full(horizon.shape, np.nan)
    for place in np.ndindex(horizon.shape):
        known = np.isfinite(key_rank[place])
        if known.any():
            found[place] = np.interp(np.log(horizon[place]), np.log(np.asarray(lengths)[known]), key_rank[place][known])
    return found


# Over documents and heads


HORIZONS = (0.0, 10.0, 100.0, 1000.0, np.inf)  # edges of groups of heads, in tokens
RESAMPLES = 1000


def head_variables(data: xr.Dataset) -> list[str]:
    """Names of the variables that have one number for each document, layer and head."""
    return [name for name, x in data.items() if x.dims == ("document", "layer", "head")]


def over_heads(data: xr.Dataset) -> dict[str, Float[np.ndarray, " heads"]]:
    """Each variable without further axes as a vector over heads: the median over documents, empty states left out."""
    counted = spectra.without_empty(data)
    found = {name: counted[name].median("document").values.ravel() for name in head_variables(data)}
    there = np.isfinite(found["effective_rank"])
    return {name: x[there] for name, x in found.items()}


def against_horizon(data: xr.Dataset, *, seed: int = 0) -> list[dict[str, float | str]]:
    """Spearman's correlation over heads of each rank measure with the horizon, with a 95 % interval.

    The interval is that of the percentiles of a bootstrap over heads; NaN for fewer than three heads.
    """
    heads = over_heads(data)
    n, rng = len(heads["horizon"]), np.random.default_rng(seed)
    draws = rng.integers(0, n, (RESAMPLES, n)) if n > 2 else np.zeros((0, n), int)
    rows = []
    for name in (*RANKS, "key_rank_at_horizon", "decayed_key_rank", "mean_key"):
        spread = np.array([spearman(heads[name][d], heads["horizon"][d]) for d in draws])
        spread = spread[np.isfinite(spread)]
        low, high = np.quantile(spread, (0.025, 0.975)) if len(spread) else (np.nan, np.nan)
        value = spearman(heads[name], heads["horizon"]) if n > 2 else np.nan
        rows.append({"measure": name, "spearman": value, "low": float(low), "high": float(high), "heads": n})
    return rows


def by_horizon(data: xr.Dataset) -> list[dict[str, float | int]]:
    """Groups of heads by horizon: how many, and medians and largest effective rank of each; no group without heads."""
    heads, rows = over_heads(data), []
    for low, high in pairwise(HORIZONS):
        inside = (heads["horizon"] >= low) & ((heads["horizon"] < high) | np.isinf(high))
        if inside.any():
            medians = {
                name: float(np.median(heads[name][inside]))
                for name in ("effective_rank", "key_rank_at_horizon", "decayed_key_rank", "mean_key")
            }
            largest = float(heads["effective_rank"][inside].max())
            rows.append({"from": low, "to": high, "heads": int(inside.sum()), **medians, "largest_effective_rank": largest})
    return rows


def forgetting_share(data: xr.Dataset) -> float:
    """Share of heads whose horizon is shorter than a segment."""
    return float(np.mean(over_heads(data)["horizon"] < data.attrs["segment"]))
