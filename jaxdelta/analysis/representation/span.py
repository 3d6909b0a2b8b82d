"""Which directions of a state does a head ever move, and how many are there?

A state moves along the keys, in proportion to their write strengths. The directions are the right singular vectors of the
matrix with the rows beta_j k_j^T, for the steps of all tokens, the largest sigma first. Directions orthogonal to all keys
are frozen.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jaxdelta.analysis.representation.steps import TokenSteps
from jaxdelta.ops.spectra import effective_rank, threshold_rank


class MovedSpan(NamedTuple):
    """Directions in which a head's keys lie.

    Attributes:
        directions: Float[K R], orthonormal columns, those moved most first; R is the numerical dimension, the number of
            singular values above the rounding of f32, the dtype of the keys.
        effective: effective dimension, the effective rank of the matrix.
    """

    directions: np.ndarray
    effective: float

    @property
    def dimension(self) -> int:
        """R, the numerical dimension."""
        return self.directions.shape[1]


def moved_span(steps: TokenSteps, head: int, tokens: Int[np.ndarray, " A"] | None = None) -> MovedSpan:
    """The span of one head's keys over ``tokens``; None is all."""
    keys = (steps.beta[..., None] * steps.keys)[slice(None) if tokens is None else tokens, :, head]
    weighted = keys.reshape(-1, keys.shape[-1])
    directions = np.linalg.svd(weighted, full_matrices=False)[2].T
    narrow = jnp.asarray(weighted, jnp.float32)
    return MovedSpan(directions[:, : int(threshold_rank(narrow))], float(effective_rank(narrow)))
