"""Real representations of a finite group, and the Householder steps that they need.

A token's transition is a product of n_h factors I - beta k k^T, so rank(A - I) <= n_h; by Scherk's theorem an orthogonal
matrix g is a product of rank(g - I) reflections and of no fewer. A head that carries a representation rho therefore needs
n_h = max rank(rho(g) - I) over the alphabet, and the least n_h that is known to suffice is

    min over real representations rho, faithful on the group that the alphabet generates, of max_g rank(rho(g) - I)

Whether a model can do with less by other means is a question for experiments. A reflection has beta = 2, a factor with
beta = 0 is switched off, and a forget gate must stay open (alpha = 1).

Irreducible representations are eigenspaces: a random symmetric matrix that commutes with the regular representation has,
with probability one, each of its eigenspaces irreducible, and every irreducible representation is among them.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxdelta.groups.tables import Group, generated

TOLERANCE = 1e-8  # between equal eigenvalues, characters and singular values, all of order 1 to 10 in f64


class Representation(NamedTuple):
    """Orthogonal matrices that multiply as the elements do.

    Attributes:
        matrices: Float[G d d], f64, in the order of the elements.
    """

    matrices: np.ndarray

    @property
    def dimension(self) -> int:
        return self.matrices.shape[-1]

    @property
    def character(self) -> Float[np.ndarray, " G"]:
        return np.trace(self.matrices, axis1=-2, axis2=-1)

    @property
    def kernel(self) -> Bool[np.ndarray, " G"]:
        """Elements that map to the identity matrix."""
        return self.character > self.dimension - TOLERANCE

    @property
    def ranks(self) -> Int[np.ndarray, " G"]:
        """rank(rho(g) - I): the fewest reflections whose product is rho(g)."""
        return np.linalg.matrix_rank(self.matrices - np.eye(self.dimension), tol=TOLERANCE)


def real_irreps(group: Group) -> list[Representation]:
    """All irreducible real representations up to equivalence, by ascending dimension."""
    regular = np.eye(len(group))[group.table].swapaxes(1, 2)  # e_h -> e_{g h}
    values, vectors = np.linalg.eigh(_commuting(group))
    starts = np.flatnonzero(np.diff(values, prepend=-np.inf) > TOLERANCE)
    found: list[Representation] = []
    for space in np.split(vectors, starts[1:], axis=1):
        irrep = Representation(space.T @ regular @ space)
        if not any(np.allclose(irrep.character, other.character, atol=TOLERANCE) for other in found):
            found.append(irrep)
    return sorted(found, key=lambda irrep: (irrep.dimension, *-irrep.character.round(6)))


def minimal_representation(group: Group, *, apart: bool = False) -> Representation:
    """The faithful representation of ``generated(group)`` with the least n_h; of several the one of least dimension.

    It is a direct sum of irreducible representations. One head carries all of them, so their ranks add up; with ``apart``
    each irreducible part has its own head.
    """
    return _minimal(group, apart)[1]


def predicted_householder(group: Group, *, apart: bool = False) -> int:
    """The n_h that :func:`minimal_representation` needs, at least 1."""
    return max(1, _minimal(group, apart)[0])


def direct_sum(irreps: Sequence[Representation]) -> Representation:
    """The representation whose matrices are block-diagonal, with those of ``irreps`` as blocks."""
    sizes = [irrep.dimension for irrep in irreps]
    matrices = np.zeros((len(irreps[0].matrices), sum(sizes), sum(sizes)))
    for irrep, end in zip(irreps, np.cumsum(sizes), strict=True):
        block = slice(end - irrep.dimension, end)
        matrices[:, block, block] = irrep.matrices
    return Representation(matrices)


def _minimal(group: Group, apart: bool) -> tuple[int, Representation]:
    """The least n_h and its representation."""
    inside = generated(group)
    irreps = real_irreps(inside)
    ranks = np.array([irrep.ranks[inside.alphabet] for irrep in irreps])
    dimensions = np.array([irrep.dimension for irrep in irreps])

    def cost(chosen: list[int]) -> tuple[int, int]:
        together = ranks[chosen].max(axis=0) if apart else ranks[chosen].sum(axis=0)
        return int(together.max()), int(dimensions[chosen].sum())

    best = min(_faithful_sums([irrep.kernel for irrep in irreps], np.ones(len(inside), bool)), key=cost)
    return cost(best)[0], direct_sum([irreps[index] for index in best])


def _faithful_sums(kernels: Sequence[np.ndarray], kernel: np.ndarray, first: int = 0) -> Iterator[list[int]]:
    """Sets of irreps, by index, that are faithful together; each one shrinks the common kernel of those before it."""
    for index in range(first, len(kernels)):
        common = kernel & kernels[index]
        if common.sum() == 1:
            yield [index]
        elif common.sum() < kernel.sum():
            yield from ([index, *others] for others in _faithful_sums(kernels, common, index + 1))


def _commuting(group: Group) -> np.ndarray:
    """A random symmetric matrix that commutes with e_h -> e_{g h}: sum_g c_g (e_h -> e_{h g}), c_g = c_{g^-1}."""
    weights = np.random.default_rng(0).standard_normal(len(group))
    weights = weights + weights[group.inverses]
    right = np.eye(len(group))[group.table.T].swapaxes(1, 2)  # of each g, e_h -> e_{h g}
    return np.einsum("g,gij->ij", weights, right)
