"""Comparison of this library's runs with those of a reference."""

import numpy as np

from jaxdelta.models.decoder import Carry


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Relative Frobenius error, in f64; 0 where both are zero."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    if found.shape != expected.shape:
        raise ValueError(f"shapes differ: {found.shape} here, {expected.shape} in the reference")
    difference, size = np.linalg.norm(found - expected), np.linalg.norm(expected)
    return float(difference / size) if size else float(difference)


def carry_arrays(carry: Carry) -> list[tuple[np.ndarray, np.ndarray]]:
    """Of each layer (S, tail), or the used places of (keys, values) where all rows have the same length."""
    used = int(np.max(carry.position))
    return [
        (np.asarray(layer.S), np.asarray(layer.tail, np.float32))
        if hasattr(layer, "S")
        else (np.asarray(layer.keys[:, :used], np.float32), np.asarray(layer.values[:, :used], np.float32))
        for layer in carry.layers
    ]


def top_one_agreement(found: np.ndarray, expected: np.ndarray, margin: float) -> tuple[float, float]:
    """Share of positions with the same most likely word: of all, and of those where it leads by more than ``margin``."""
    same = found.argmax(-1) == expected.argmax(-1)
    two = np.partition(expected, -2, axis=-1)[..., -2:]
    clear = two[..., 1] - two[..., 0] > margin
    return float(same.mean()), float(same[clear].mean()) if clear.any() else 1.0
