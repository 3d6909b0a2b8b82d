"""Metrics from token ids and losses, and of agreement."""

import numpy as np
import scipy
from jaxtyping import Float


def copy_mask(tokens: np.ndarray, gap: int = 512) -> np.ndarray:
    """Which tokens are copy tokens: the bigram that ends there first occurred more than ``gap`` tokens earlier.

    Args:
        tokens: ids [N] of one document.
        gap: tokens between the ends of the two occurrences; only a larger distance counts.

    Returns:
        bool [N - 1]; entry i is about token i + 1, as in the losses of a run.
    """
    tokens = np.asarray(tokens, np.int64)
    bigrams = tokens[:-1] * (tokens.max(initial=0) + 1) + tokens[1:]
    _, first, which = np.unique(bigrams, return_index=True, return_inverse=True)
    return np.arange(len(bigrams)) - first[which] > gap


def paired_difference(values: np.ndarray, untouched: np.ndarray) -> tuple[float, float]:
    """Mean over documents of ``values - untouched``, both [n], and its standard error sd / sqrt(n), NaN for n = 1."""
    difference = np.asarray(values) - np.asarray(untouched)
    n = len(difference)
    return float(difference.mean()), float(difference.std(ddof=1) / np.sqrt(n)) if n > 1 else float("nan")


def spearman(a: Float[np.ndarray, " n"], b: Float[np.ndarray, " n"]) -> float:
    """Spearman's rank correlation of the pairs without NaN; NaN if one side is constant or no pair is left."""
    both = ~(np.isnan(a) | np.isnan(b))
    a, b = a[both], b[both]
    if not len(a) or (a == a[0]).all() or (b == b[0]).all():
        return float("nan")
    return float(scipy.stats.spearmanr(a, b).statistic)
