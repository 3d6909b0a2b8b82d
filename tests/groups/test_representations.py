"""Representations against their definitions, and the predicted n_h against the character tables."""

import numpy as np
import pytest

from jaxdelta.groups import Group, Representation, group_of, minimal_representation, predicted_householder, real_irreps

NAMES = ("Z2", "Z3", "Z7", "Z12", "S2", "S3", "S4", "S5", "A3", "A4", "A5", "S5_limit_2")
KLEIN = Group("Klein", np.bitwise_xor.outer(np.arange(4), np.arange(4)), np.arange(4))
QUATERNIONS = 8  # the order


def quaternions():
    """Q8 as i^a j^b: (i^a j^b)(i^c j^d), with j i = i^-1 j and j^2 = i^2; its faithful irrep is of quaternionic type."""
    numbers = [(a, b) for a in range(4) for b in range(2)]

    def product(x, y):
        (a, b), (c, d) = x, y
        return (a + (-c if b else c) + (2 if b and d else 0)) % 4, (b + d) % 2

    table = np.array([[numbers.index(product(x, y)) for y in numbers] for x in numbers])
    return Group("Q8", table, np.arange(QUATERNIONS))


@pytest.fixture(scope="module", params=[*NAMES, "Klein", "Q8"])
def group(request):
    return {"Klein": KLEIN, "Q8": quaternions()}.get(request.param) or group_of(request.param)


@pytest.fixture(scope="module")
def irreps(group):
    return real_irreps(group)


def test_matrices_multiply_as_the_elements_do(group, irreps):
    for rho in irreps:
        products = np.einsum("aij,bjk->abik", rho.matrices, rho.matrices)
        np.testing.assert_allclose(rho.matrices[group.table], products, atol=1e-10)


def test_matrices_are_orthogonal(irreps):
    for rho in irreps:
        gram = rho.matrices.swapaxes(1, 2) @ rho.matrices
        np.testing.assert_allclose(gram, np.broadcast_to(np.eye(rho.dimension), gram.shape), atol=1e-10)


def test_irreps_are_irreducible_different_and_all(group, irreps):
    """(chi, chi) is 1, 2 or 4 for the real, complex and quaternionic type, and sum d^2 / (chi, chi) = |G|."""
    characters = np.array([rho.character for rho in irreps])
    products = characters @ characters.T / len(group)
    types = np.diag(products)
    np.testing.assert_allclose(products - np.diag(types), 0, atol=1e-10)
    np.testing.assert_allclose(types, types.round(), atol=1e-10)
    assert set(types.round()) <= {1, 2, 4}
    assert sum(rho.dimension**2 / kind for rho, kind in zip(irreps, types, strict=True)) == pytest.approx(len(group))


@pytest.mark.parametrize(("name", "dimensions"), [
    ("Z2", [1, 1]), ("Z7", [1, 2, 2, 2]), ("S3", [1, 1, 2]), ("S4", [1, 1, 2, 3, 3]), ("A4", [1, 2, 3]),
    ("A5", [1, 3, 3, 4, 5]), ("S5", [1, 1, 4, 4, 5, 5, 6]),
])  # fmt: skip
def test_dimensions_of_the_irreps(name, dimensions):
    assert [rho.dimension for rho in real_irreps(group_of(name))] == dimensions


def test_rank_and_kernel_of_a_rotation_beside_a_reflection():
    turn = np.array([[0.0, -1, 0], [1, 0, 0], [0, 0, -1]])
    powers = Representation(np.array([np.linalg.matrix_power(turn, n) for n in range(4)]))
    assert powers.ranks.tolist() == [0, 3, 2, 3]
    assert powers.kernel.tolist() == [True, False, False, False]


@pytest.mark.parametrize(("name", "steps", "dimension"), [
    ("Z2", 1, 1), ("Z3", 2, 2), ("Z4", 2, 2), ("Z7", 2, 2), ("Z60", 2, 2), ("S3", 2, 2), ("S4", 2, 3), ("A4", 2, 3),
    ("A5", 2, 3), ("S5", 4, 4), ("S3_limit_2", 1, 2), ("S5_limit_2", 1, 4), ("S5_limit_3", 2, 4), ("S5_limit_4", 3, 4),
    ("S5_limit_5", 4, 4),
])  # fmt: skip
def test_predicted_steps(name, steps, dimension):
    """S4 takes the rotations of the cube, A5 those of the icosahedron; a five-cycle of S5 has rank 4."""
    assert predicted_householder(group_of(name)) == steps
    assert predicted_householder(group_of(name), apart=True) == steps
    assert minimal_representation(group_of(name)).dimension == dimension


def test_the_standard_representation_of_s4_would_need_a_step_more():
    """A four-cycle permutes 4 axes in one cycle, rank 3; times the sign it is a rotation of the cube, rank 2."""
    found = sorted(rho.ranks.max() for rho in real_irreps(group_of("S4")) if rho.dimension == 3)
    assert found == [2, 3]


def test_heads_of_their_own_save_steps_where_no_irrep_is_faithful():
    """Two signs tell the four elements of the Klein group apart: one reflection each, or two in one head."""
    assert predicted_householder(KLEIN) == 2
    assert predicted_householder(KLEIN, apart=True) == 1
    rho = minimal_representation(KLEIN)
    assert rho.dimension == 2
    np.testing.assert_allclose(np.abs(rho.matrices), np.broadcast_to(np.eye(2), (4, 2, 2)), atol=1e-10)


def test_quaternions_need_all_four_dimensions():
    """-1 is -I in the only faithful irrep."""
    assert predicted_householder(quaternions()) == 4
    assert minimal_representation(quaternions()).dimension == 4


def test_only_what_the_alphabet_generates_must_be_told_apart():
    """The half turn of Z12 is a reflection on one axis, and -I where the twelve elements must be told apart."""
    Z12 = group_of("Z12")
    half = Group("half turn", Z12.table, np.array([0, 6]))
    assert predicted_householder(half) == minimal_representation(half).dimension == 1
    assert predicted_householder(Group("nothing", Z12.table, np.array([0]))) == 1
