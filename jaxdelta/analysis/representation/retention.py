"""How much of a represented state does a token keep?

    retention = exp(mean over the letters a of log |det P^T A(a) P| / d)

on d directions P: 1 for orthogonal transitions. A state tracked over T tokens fades to retention^T of its size, so a model
that is right over its trained length may fail at some multiple of it: beta = 2 sigmoid(.) stays below 2, the eps of the
keys' norm keeps eigenvalues above -1, and a forget gate multiplies by alpha.
"""

import numpy as np
from jaxtyping import Float

from jaxdelta.groups import Group


def retention(A: Float[np.ndarray, "G K K"], group: Group, basis: Float[np.ndarray, "K d"]) -> float:
    """The geometric mean above, 0 if a letter deletes a direction. ``basis`` has at least one column, all orthonormal."""
    _, log_determinants = np.linalg.slogdet(basis.T @ A[group.alphabet] @ basis)
    return float(np.exp(np.mean(log_determinants) / basis.shape[-1]))
