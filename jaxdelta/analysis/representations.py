"""Finite groups as orthogonal matrices, and how many Householder factors their elements need.

A layer that tracks a group multiplies its state by rho(g) for a token g, with rho a faithful representation of its choice.
So it needs the least, over faithful representations, of max_g rank(rho(g) - I), and not what permutation matrices need. One
factor (at beta = 2) is enough only where every element other than the identity is a reflection: a group of two elements.
"""

from itertools import permutations

import numpy as np

from jaxdelta.ops.reflections import reflections

GOLDEN = (1 + 5**0.5) / 2


def permutation_matrices(points: int, *, even: bool = False) -> np.ndarray:
    """The permutations of ``points`` points as matrices [points!, points, points]; with ``even`` those of det 1."""
    matrices = np.stack([np.eye(points)[list(order)] for order in permutations(range(points))])
    return matrices[np.linalg.det(matrices) > 0] if even else matrices


def cube_rotations() -> np.ndarray:
    """The 24 rotations of a cube, [24, 3, 3]: S4, which permutes the four diagonals."""
    return generated(_rotation((0, 0, 1), 4), _rotation((1, 1, 1), 3))


def icosahedron_rotations() -> np.ndarray:
    """The 60 rotations of an icosahedron with a vertex at (0, 1, golden ratio), [60, 3, 3]: A5."""
    return generated(_rotation((0, 1, GOLDEN), 5), _rotation((1, 1, 1), 3))


def costliest_element(representation: np.ndarray) -> int:
    """max_g rank(rho(g) - I) over the elements [order, d, d]: the factors that the costliest of them needs."""
    return int(reflections(representation).num_householder.max())


def generated(*generators: np.ndarray, most: int = 1000) -> np.ndarray:
    """All products of the generators [d, d], each once, the identity first.

    Raises:
        ValueError: there are more than ``most``.
    """
    found = {}
    fresh = [np.eye(len(generators[0]))]
    while fresh:
        g = fresh.pop()
        name = (np.round(g, 6) + 0.0).tobytes()  # + 0: no negative zeros
        if name in found:
            continue
        found[name] = g
        fresh += [h @ g for h in generators]
        if len(found) > most:
            raise ValueError(f"the generators make more than {most} elements")
    return np.stack(list(found.values()))


def _rotation(axis: tuple[float | int, ...], parts: int) -> np.ndarray:
    """By one of ``parts`` equal parts of a turn about an axis (Rodrigues)."""
    x, y, z = np.asarray(axis) / np.linalg.norm(axis)
    K = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    angle = 2 * np.pi / parts
    return np.eye(3) + np.sin(angle) * K + (1 - np.cos(angle)) * K @ K
