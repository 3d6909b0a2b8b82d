"""Summaries of a model's ledger for all heads, each layer and each head: rows and histograms.

``ledger`` is a dataset of :func:`jaxdelta.analysis.transitions.ledger.ledger_of`.
"""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import xarray as xr
from jaxtyping import Bool, Float

from jaxdelta.analysis.labels import labelled
from jaxdelta.analysis.transitions.windows import numerical_tolerance
from jaxdelta.ops.spectra import effective_rank_of

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
EDGES = {  # of histograms; those of alpha, from 0 to 0.9999, are equally spaced in log(1 - alpha)
    "beta": np.linspace(0, 2, 101),
    "eigenvalue": np.linspace(-1, 1, 101),
    "alpha": 1 - np.logspace(0, -4, 101),
}


def values(ledger: xr.Dataset, quantity: str) -> Float[np.ndarray, " N"]:
    """beta, eigenvalue or alpha of all tokens, heads and steps, as a vector."""
    x = np.exp(ledger.g.values) if quantity == "alpha" else ledger[quantity].values
    return x[~np.isnan(x)]


def active_ranks(ledger: xr.Dataset) -> tuple[Float[np.ndarray, " N"], Float[np.ndarray, " N"]]:
    """rank(A - alpha I) of every transition: singular values above K eps(f32), and the effective rank."""
    change = _of_tokens(ledger, "change")
    numerical = (change > numerical_tolerance(ledger.attrs["key_dim"])).sum(axis=-1)
    return numerical.astype(float), effective_rank_of(change)


def radii(ledger: xr.Dataset) -> Float[np.ndarray, " N"]:
    """rho(A) / alpha of every transition, from the eigenvalues of its n_h x n_h problem."""
    active = np.hypot(_of_tokens(ledger, "real"), _of_tokens(ledger, "imag")).max(axis=-1)
    K = np.broadcast_to(ledger.key_dim.values[:, None], ledger.g.shape)[~np.isnan(ledger.g.values)]
    return np.where(ledger.attrs["num_householder"] < K, np.maximum(active, 1), active)


def rotates(ledger: xr.Dataset) -> Bool[np.ndarray, " N"]:
    """Whether each transition has a complex pair of eigenvalues: it turns a plane, which one factor cannot."""
    return (np.abs(_of_tokens(ledger, "imag")) > numerical_tolerance(ledger.attrs["key_dim"])).any(axis=-1)


def transition_rows(ledger: xr.Dataset) -> pa.Table:
    """A row for all heads (null layer and head), for each layer (null head) and for each head.

    Columns are quantiles of beta, 1 - beta ||k||^2 and alpha over tokens and steps; shares of negative eigenvalues and of
    transitions that rotate; extremes of ||k||^2; mean active ranks, and the share with a numerical rank below min(n_h, K);
    the largest |rho / alpha - 1| of all transitions, and of those formed as K x K matrices.
    """
    return pa.Table.from_pylist([place | _transitions(part) for place, part in _parts(ledger)])


def _transitions(ledger: xr.Dataset) -> dict[str, int | float]:
    found: dict[str, int | float] = {}
    for quantity in EDGES:
        levels = np.quantile(values(ledger, quantity), QUANTILES)
        found |= {f"{quantity}_{100 * q:.0f}": float(x) for q, x in zip(QUANTILES, levels, strict=True)}
    numerical, effective = active_ranks(ledger)
    radius = radii(ledger)
    return found | {
        "transitions": len(radius),
        "negative": float((values(ledger, "eigenvalue") < 0).mean()),
        "rotating": float(rotates(ledger).mean()),
        "key_norm2_smallest": float(ledger.key_norm2.min()),
        "key_norm2_largest": float(ledger.key_norm2.max()),
        "rank_numerical": float(numerical.mean()),
        "rank_effective": float(effective.mean()),
        "rank_deficient": float((numerical < ledger.sizes["active"]).mean()),
        "defect": float(np.abs(radius - 1).max()),
        "expanding": int((radius > 1 + numerical_tolerance(ledger.attrs["key_dim"])).sum()),
        "whole_defect": float(ledger.whole_defect.max()),
        "taken_whole": int((ledger.whole_count * ledger.whole_defect.notnull()).sum()),
    }


def window_rows(ledger: xr.Dataset) -> pa.Table:
    """For each length of window that fits a document, a row for all heads, each layer and each head; means over windows.

    ``frozen_bound`` is max(0, K - n_h * length) for the smallest K; ``frozen_numerical``, ``frozen_0.01`` and
    ``frozen_0.1`` are for the tolerances; overlaps and their chance values are means over the pairs of windows that have
    such a subspace, null without pairs.
    """
    fits = ledger["count"].sum("document") > 0
    lengths = [w for w in ledger.window.values if fits.sel(window=w)]
    return pa.Table.from_pylist(
        [place | _windows(part, int(w)) for w in lengths for place, part in _parts(ledger.sel(window=w))]
    )


def _windows(ledger: xr.Dataset, length: int) -> dict[str, int | float | None]:
    count = ledger["count"].values
    frozen = [_mean(ledger.frozen.isel(tolerance=i), count) for i in range(ledger.sizes["tolerance"])]
    names = ["frozen_numerical", *(f"frozen_{t:g}" for t in ledger.tolerance.values[1:])]
    found = {
        "window": length,
        "windows": int(count.sum()),
        "documents": int((count > 0).sum()),
        "frozen_bound": max(0, int(ledger.key_dim.min()) - ledger.attrs["num_householder"] * length),
        **dict(zip(names, frozen, strict=True)),
        "forgotten": _mean(ledger.forgotten, count),
        "kept_smallest": float(ledger.kept_smallest.min()),
        "kept_largest": float(ledger.kept_largest.max()),
        "log_decay": _mean(ledger.log_decay, count),
    }
    for kind in ledger.kind.values:
        for name, weight in (("overlap", "pairs"), ("chance", "pairs"), ("apart", "pairs_apart")):
            pairs, x = (ledger[n].sel(kind=kind).values for n in (weight, name))
            found[f"{kind}_{name}"] = float(np.sum(np.where(pairs, x, 0) * pairs) / pairs.sum()) if pairs.any() else None
    return found


def _mean(x: xr.DataArray, count: np.ndarray) -> float:
    """Mean over windows and heads, documents weighted by their number of windows."""
    values = x.values.reshape(len(count), -1)
    there = ~np.isnan(values)
    by_document = np.where(there, values, 0).sum(axis=1) / np.maximum(there.sum(axis=1), 1)
    return float(np.sum(np.where(count, by_document, 0) * count) / count.sum())


def distributions(ledger: xr.Dataset) -> xr.Dataset:
    """Histograms over (quantity, layer, head, bin) of beta, eigenvalue and alpha; end bins include values beyond."""
    counts = np.zeros((len(EDGES), ledger.sizes["layer"], ledger.sizes["head"], 100), int)
    for i, layer, head in np.ndindex(counts.shape[:3]):
        quantity, edges = list(EDGES.items())[i]
        x = values(ledger.isel(layer=layer, head=head), quantity)
        counts[i, layer, head] = np.histogram(np.clip(x, edges[0], edges[-1]), edges)[0]
    found = {
        "histogram": (("quantity", "layer", "head", "bin"), counts),
        "edges": (("quantity", "edge"), np.stack(list(EDGES.values()))),
    }
    descriptions = {
        "histogram": ("tokens and steps in the bin", "count"),
        "edges": ("edges of the bins", "1"),
        "quantity": ("quantity", "name"),
    }
    return labelled(xr.Dataset(found, {"quantity": list(EDGES), "layer": ledger.layer}), descriptions)


def _of_tokens(ledger: xr.Dataset, name: str) -> Float[np.ndarray, "N A"]:
    """A variable of active directions, for all tokens of text."""
    x = ledger[name].values.reshape(-1, ledger.sizes["active"]).astype(np.float64)
    return np.nan_to_num(x[~np.isnan(x[:, 0])])  # layers may have fewer active directions than others


def _parts(ledger: xr.Dataset) -> Iterator[tuple[dict[str, int | None], xr.Dataset]]:
    """The ledger of all heads, of the heads of each layer, and of each head."""
    yield {"layer": None, "head": None}, ledger
    for layer, name in enumerate(ledger.layer.values):
        yield {"layer": int(name), "head": None}, ledger.isel(layer=[layer])
    for layer, name in enumerate(ledger.layer.values):
        for head in np.flatnonzero(ledger.whole_defect.isel(layer=layer).notnull().any("document")).tolist():
            yield {"layer": int(name), "head": head}, ledger.isel(layer=[layer], head=[head])
