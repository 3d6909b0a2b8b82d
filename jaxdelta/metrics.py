"""Metrics of a run, from the losses of its tokens."""

import numpy as np


def copy_mask(tokens: np.ndarray, gap: int = 512) -> np.ndarray:
    """Which scored tokens are copy tokens: the bigram that they end occurred more than ``gap`` tokens earlier.

    Args:
        tokens: ids [N] of one document.
        gap: distance in tokens between the two ends that an earlier occurrence must exceed.

    Returns:
        bool [N - 1]; entry i speaks of token i + 1, as the losses of a run do.
    """
    tokens = np.asarray(tokens, np.int64)
    bigrams = tokens[:-1] * (tokens.max(initial=0) + 1) + tokens[1:]
    _, first, which = np.unique(bigrams, return_index=True, return_inverse=True)
    return np.arange(len(bigrams)) - first[which] > gap


def paired_difference(values: np.ndarray, untouched: np.ndarray) -> tuple[float, float]:
    """Mean over documents of ``values - untouched`` and its standard error, sd / sqrt(n); NaN for a single document."""
    difference = np.asarray(values) - np.asarray(untouched)
    n = len(difference)
    return float(difference.mean()), float(difference.std(ddof=1) / np.sqrt(n)) if n > 1 else float("nan")
