"""Groups as matrices: which groups they are, and what their elements need."""

import numpy as np
import pytest

from jaxdelta.analysis.representations import (
    costliest_element,
    cube_rotations,
    generated,
    icosahedron_rotations,
    permutation_matrices,
)

GROUPS = {
    "S3": (permutation_matrices(3), 6),
    "S4": (permutation_matrices(4), 24),
    "A5": (permutation_matrices(5, even=True), 60),
    "cube": (cube_rotations(), 24),
    "icosahedron": (icosahedron_rotations(), 60),
}


def order_of(g):
    power, count = g, 1
    while not np.allclose(power, np.eye(len(g)), atol=1e-9):
        power, count = power @ g, count + 1
    return count


def spectrum_of_orders(group):
    return dict(zip(*map(np.ndarray.tolist, np.unique([order_of(g) for g in group], return_counts=True)), strict=True))


@pytest.mark.parametrize("name", GROUPS)
def test_matrices_are_a_group_of_its_order(name):
    """Orthogonal, distinct, closed under products; distinct matrices are a faithful representation."""
    group, order = GROUPS[name]
    assert len(group) == order
    np.testing.assert_allclose(
        group @ np.swapaxes(group, 1, 2), np.broadcast_to(np.eye(group.shape[-1]), group.shape), atol=1e-12
    )
    distances = np.abs(group[:, None] - group[None]).max(axis=(2, 3))
    assert (distances < 1e-6).sum() == order
    products = (group[:, None] @ group[None]).reshape(-1, *group.shape[1:])
    nearest = np.abs(products[:, None] - group[None]).max(axis=(2, 3)).min(axis=1)
    assert nearest.max() < 1e-9


def test_rotations_of_the_cube_are_the_permutations_of_its_diagonals():
    diagonals = np.array([[1, 1, 1], [1, 1, -1], [1, -1, 1], [-1, 1, 1]])
    group = cube_rotations()
    np.testing.assert_allclose(np.linalg.det(group), 1)
    moved = {tuple(np.argmax(np.abs(diagonals @ g.T @ diagonals.T), axis=1).tolist()) for g in group}
    assert len(moved) == 24


def test_rotations_of_the_icosahedron_are_a5():
    """The only group of order 60 with 15, 20 and 24 elements of orders 2, 3 and 5."""
    assert spectrum_of_orders(icosahedron_rotations()) == spectrum_of_orders(GROUPS["A5"][0]) == {1: 1, 2: 15, 3: 20, 5: 24}


def test_the_costliest_element_is_that_of_the_most_reflections():
    assert costliest_element(np.stack([np.eye(3), np.diag([1.0, -1, 1]), -np.eye(3)])) == 3
    assert costliest_element(permutation_matrices(4, even=True)) == 2
    assert costliest_element(permutation_matrices(4)) == 3


def test_generators_of_too_large_a_group_are_refused():
    c, s = np.cos(1), np.sin(1)
    with pytest.raises(ValueError, match="more than 50 elements"):
        generated(np.array([[c, -s], [s, c]]), most=50)
