"""Which directions of a state does a head ever move, and how many are they?

A state moves along the keys, as far as their write strengths let it: rows beta_j k_j^T of the steps of all tokens, whose
right singular vectors are the directions, those along which most is moved first. What is orthogonal to all keys is frozen.
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
            singular values above the rounding of f32, in which keys are made.
        effective: effective dimension, exp of the entropy of sigma / sum(sigma).
    """

    directions: np.ndarray
    effective: float

    @property
    def dimension(self) -> int:
        """R."""
        return self.directions.shape[1]


def moved_span(steps: TokenSteps, head: int, tokens: Int[np.ndarray, " A"] | None = None) -> MovedSpan:
    """The span of one head's keys, over ``tokens``, all where None."""
    keys = (steps.beta[..., None] * steps.keys)[slice(None) if tokens is None else tokens, :, head]
    weighted = keys.reshape(-1, keys.shape[-1])
    directions = np.linalg.svd(weighted, full_matrices=False)[2].T
    narrow = jnp.asarray(weighted, jnp.float32)
    return MovedSpan(directions[:, : int(threshold_rank(narrow))], float(effective_rank(narrow)))
