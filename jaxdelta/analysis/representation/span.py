"""Which directions of a state does a head ever move, and how many are they?

A state moves along the keys, as far as their write strengths let it: rows beta_j k_j^T of the steps of all tokens, whose
right singular vectors are the directions, in the order of how much is moved along them. Directions that no key has are
frozen.
"""

from typing import NamedTuple

import numpy as np

from jaxdelta.analysis.representation.steps import TokenSteps
from jaxdelta.ops.spectra import effective_rank, energy_rank, threshold_rank

ENERGY = 0.99


class Span(NamedTuple):
    """Directions in which a head's keys lie.

    Attributes:
        basis: Float[K dimension], orthonormal, those that hold ``ENERGY`` of the energy.
        sigma: Float[R], singular values of the weighted keys, descending.
        numerical: how many exceed rounding (that of f32, in which keys are made).
        effective: exp of the entropy of sigma / sum(sigma).
    """

    basis: np.ndarray
    sigma: np.ndarray
    numerical: int
    effective: float

    @property
    def dimension(self) -> int:
        return self.basis.shape[-1]


def moved_span(steps: TokenSteps, head: int, tokens: np.ndarray | None = None) -> Span:
    """The span of one head's keys, over ``tokens``, all where None."""
    kept = slice(None) if tokens is None else tokens
    keys = (steps.beta[..., None] * steps.keys)[kept, :, head]
    weighted = keys.reshape(-1, keys.shape[-1]).astype(np.float32)
    _, sigma, directions = np.linalg.svd(weighted, full_matrices=False)
    dimension = int(energy_rank(weighted, ENERGY))
    return Span(
        directions[:dimension].T.astype(np.float64), sigma, int(threshold_rank(weighted)), float(effective_rank(weighted))
    )
