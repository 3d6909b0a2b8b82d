"""Ledgers of given keys, strengths and decays, without a model."""

from collections.abc import Sequence

import numpy as np
import xarray as xr

import jaxdelta as jd
from jaxdelta.analysis.transitions.ledger import _dataset, measures, whole_defects, window_streams
from tests.helpers import unit_keys

# k [T * n, H, K], beta [T * n, H] and g [T, H] of each linear layer
Text = Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]


def ledger(documents: Sequence[Text], windows: Sequence[int]) -> xr.Dataset:
    """Of documents d0, d1, ... of a tiny model with one attention layer before its linear ones."""
    k, _, g = documents[0][0]
    layers, n = len(documents[0]), len(k) // len(g)
    config = jd.DeltaLMConfig.tiny(
        layer_kinds=("attention", *["linear"] * layers),
        num_householder=n,
        key_dim=k.shape[-1],
        num_key_heads=k.shape[1],
        num_value_heads=k.shape[1],
    )
    parts = []
    for i, text in enumerate(documents):
        streams, of_layers = window_streams(config, windows), []
        for stream, arrays in zip(streams, text, strict=True):
            stream.add(*arrays)
            of_layers.append(measures(*arrays, n))
        tokens = {name: np.stack([m[name] for m in of_layers], axis=1) for name in of_layers[0]}
        defect = np.array([whole_defects(k[:n], beta[:n], g[0]) for k, beta, g in text])
        parts.append(_dataset(config, f"d{i}", tokens, 1, defect, [stream.finish() for stream in streams]))
    return xr.concat(parts, "document", join="outer", data_vars="minimal", coords="minimal", compat="override")


def random_text(seed: int, tokens: int, *, n: int = 2, layers: int = 2, heads: int = 3, K: int = 8, largest: float = 1.0):
    """Correlated unit keys, strengths up to ``largest``, decays down to exp(-1)."""
    rng = np.random.default_rng(seed)
    return [
        (
            unit_keys(rng, (1, tokens * n, heads, K), "cosine 0.5")[0],
            largest * rng.random((tokens * n, heads)),
            -rng.random((tokens, heads)),
        )
        for _ in range(layers)
    ]
