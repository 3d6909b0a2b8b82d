"""Do a head's transitions multiply as the elements of the group do, and as which representation?

    error = sqrt(mean over a of the alphabet and h of the group of ||(A(a) A(h) - A(a h)) P||_F^2 / d)

for the d directions P that the head moves: 0 for a representation, of the order of 1 for unrelated reflections. Where the
alphabet is not the whole group, A(h) is the product along a shortest word. Which representation it is, its character says:
the real irreducible chi occurs (tr A, chi) / (chi, chi) times, a whole number where A is a representation. Directions
that no token moves count to the trivial one.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from jaxdelta.tasks.state_tracking import Group, Representation, generated, shortest_words


def extended(A: Float[np.ndarray, "G K K"], group: Group) -> Float[np.ndarray, "E K K"]:
    """Transitions of all elements of ``generated(group)``, in its order: products of letters along shortest words."""
    words = shortest_words(group) | {letter: (letter,) for letter in group.alphabet.tolist()}
    eye = np.eye(A.shape[-1])
    return np.array([_product(A, words[element], eye) for element in sorted(words)])


def homomorphism_error(A: Float[np.ndarray, "G K K"], group: Group, basis: Float[np.ndarray, "K d"] | None = None) -> float:
    """The error above, relative to that of an orthogonal matrix against zero; ``basis`` None is the whole space.

    Args:
        A: transition of each element of ``group`` as a token; those outside of the alphabet are not used.
    """
    inside, all_ = generated(group), extended(A, group)
    P = np.eye(A.shape[-1]) if basis is None else basis
    letters = inside.alphabet
    products = np.einsum("aij,gjk,kd->agid", all_[letters], all_, P, optimize=True)
    defect = products - (all_ @ P)[inside.table[letters]]
    return float(np.sqrt(np.mean(np.sum(defect**2, axis=(-2, -1))) / P.shape[-1]))


def multiplicities(
    A: Float[np.ndarray, "G K K"], group: Group, irreps: Sequence[Representation]
) -> Float[np.ndarray, " irreps"]:
    """How often each of ``irreps`` (of ``generated(group)``) occurs in A."""
    character = np.trace(extended(A, group), axis1=-2, axis2=-1)
    return np.array([character @ rho.character / (rho.character @ rho.character) for rho in irreps])


def _product(A: np.ndarray, word: tuple[int, ...], eye: np.ndarray) -> np.ndarray:
    product = eye
    for letter in word:
        product = product @ A[letter]
    return product
