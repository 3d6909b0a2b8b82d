"""Groups, words and representations against their definitions, and the predicted n_h against the character tables."""

import re

import numpy as np
import pytest

from jaxdelta.tasks.state_tracking import (
    Group,
    Representation,
    generated,
    group_of,
    minimal_representation,
    predicted_householder,
    prefix_products,
    real_irreps,
    shortest_words,
    words,
)

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


# Groups


@pytest.mark.parametrize(("name", "order", "letters"), [
    ("Z2", 2, 2), ("Z7", 7, 7), ("S3", 6, 6), ("S4", 24, 24), ("A4", 12, 12), ("A5", 60, 60), ("S5", 120, 120),
    ("S5_limit_2", 120, 1 + 10), ("S5_limit_3", 120, 1 + 10 + 20), ("S5_limit_4", 120, 1 + 10 + 20 + 30 + 15),
    ("S5_limit_5", 120, 120), ("A5_limit_3", 60, 1 + 20),
])  # fmt: skip
def test_orders_and_alphabets(name, order, letters):
    """Permutations of 5 points that move 2: 10 swaps; 3: 20 cycles; 4: 30 cycles and 15 double swaps."""
    group = group_of(name)
    assert (len(group), len(group.alphabet), group.identity) == (order, letters, 0)
    assert group.name == name


def test_a_product_of_permutations_takes_the_right_one_first():
    """Of S3 in lexicographic order 1 swaps points 1 and 2, 2 swaps 0 and 1; first 1 and then 2 sends 0, 1, 2 to 1, 2, 0."""
    assert group_of("S3").table[2, 1] == 3
    assert group_of("S3").table[1, 2] == 4


def test_inverses_and_identity_of_any_numbering():
    shifted = (group_of("Z7").table + 2) % 7  # element x stands for x + 2, 5 for the identity
    group = Group("shifted", shifted, np.arange(7))
    assert group.identity == 5
    assert (group.table[np.arange(7), group.inverses] == 5).all()


@pytest.mark.parametrize("name", ["S5_limit_2", "S5_limit_4", "A5_limit_3", "Z12"])
def test_shortest_words_spell_every_element(name):
    group = group_of(name)
    spelled = shortest_words(group)
    assert sorted(spelled) == list(range(len(group)))
    for element, word in spelled.items():
        product = group.identity
        for letter in reversed(word):
            product = group.table[letter, product]
        assert product == element
        assert set(word) <= set(group.alphabet.tolist())


def test_shortest_words_are_shortest():
    """A permutation of 5 points with c cycles takes 5 - c swaps, a five-cycle 4."""
    lengths = [len(word) for word in shortest_words(group_of("S5_limit_2")).values()]
    assert np.bincount(lengths).tolist() == [1, 10, 35, 50, 24]


def test_the_subgroup_that_an_alphabet_generates():
    """Sums of 4 and 6 modulo 12 are the even numbers."""
    Z12 = group_of("Z12")
    inside = generated(Group("evens", Z12.table, np.array([4, 6])))
    assert len(inside) == 6
    assert (inside.table == group_of("Z6").table).all()
    assert inside.alphabet.tolist() == [2, 3]


@pytest.mark.parametrize(("name", "reason"), [
    ("S3x", "unknown group 'S3x'; known: Z2"), ("D4", "unknown group 'D4'"), ("", "unknown group ''"),
    ("Z6_limit_2", "unknown group 'Z6_limit_2'"), ("Z1", "Z1: 1 is out of range; expected Z2 .. Z120"),
    ("Z121", "Z121: 121 is out of range"), ("S6", "S6: 6 is out of range; expected S2 .. S5"),
    ("A2", "A2: 2 is out of range; expected A3 .. A5"), ("S5_limit_1", "moves of at most 1 points; expected 2 .. 5"),
    ("S5_limit_6", "moves of at most 6 points; expected 2 .. 5"), ("A5_limit_2", "at most 2 points; expected 3 .. 5"),
])  # fmt: skip
def test_unknown_groups_and_numbers_out_of_range(name, reason):
    with pytest.raises(ValueError, match=re.escape(reason)):
        group_of(name)


LOOP = np.array([[0, 1, 2, 3, 4], [1, 0, 3, 4, 2], [2, 4, 0, 1, 3], [3, 2, 4, 0, 1], [4, 3, 1, 2, 0]])


@pytest.mark.parametrize(("table", "alphabet", "reason"), [
    (np.zeros((2, 3), int), [0], "has shape (2, 3)"),
    (np.add.outer(np.arange(121), np.arange(121)) % 121, [0], "has shape (121, 121)"),
    (np.array([[0, 1], [1, 1]]), [0], "does not hold each of 2 elements once"),
    (LOOP, [0], "is not associative"),
    (KLEIN.table, [], "is []; expected different elements of 0 .. 3"),
    (KLEIN.table, [1, 1], "is [1, 1]; expected different elements of 0 .. 3"),
    (KLEIN.table, [1, 4], "is [1, 4]; expected different elements of 0 .. 3"),
])  # fmt: skip
def test_tables_that_are_no_groups(table, alphabet, reason):
    with pytest.raises(ValueError, match=re.escape(reason)):
        Group("wrong", table, np.array(alphabet, int))


# Words


@pytest.mark.parametrize("name", ["S3", "S5_limit_3", "Z7"])
def test_targets_are_products_with_the_newest_on_the_left(name):
    group = group_of(name)
    tokens, targets = words(group, count=5, length=9, seed=3)
    for word, named in zip(tokens.tolist(), targets.tolist(), strict=True):
        product = group.identity
        for letter, target in zip(word, named, strict=True):
            product = group.table[letter, product]
            assert target == product


def test_parity_and_counting():
    tokens, targets = words(group_of("Z2"), count=4, length=50, seed=0)
    np.testing.assert_array_equal(targets, np.cumsum(tokens, axis=1) % 2)
    tokens, targets = words(group_of("Z7"), count=4, length=50, seed=0)
    np.testing.assert_array_equal(targets, np.cumsum(tokens, axis=1) % 7)


def test_letters_are_of_the_alphabet_and_all_of_it():
    group = group_of("S5_limit_2")
    tokens, targets = words(group, count=100, length=20, seed=(1, 2))
    assert set(tokens.ravel()) == set(group.alphabet)
    assert len(set(targets.ravel())) == 120


def test_words_are_those_of_their_seed():
    group = group_of("S4")
    first, again, other = (words(group, count=3, length=8, seed=seed) for seed in (5, 5, 6))
    np.testing.assert_array_equal(first, again)
    assert (first.tokens != other.tokens).any()


@pytest.mark.parametrize(("sizes", "reason"), [
    ({"count": 1, "length": 0}, "length is 0; expected at least 1"),
    ({"count": -2, "length": 3}, "count is -2; expected at least 1"),
])  # fmt: skip
def test_sizes_below_one(sizes, reason):
    with pytest.raises(ValueError, match=reason):
        words(group_of("Z2"), seed=0, **sizes)


@pytest.mark.parametrize("token", [-1, 6])
def test_tokens_outside_of_the_group(token):
    with pytest.raises(ValueError, match=r"tokens reach from .*; S3 has elements 0 .. 5"):
        prefix_products(group_of("S3"), np.array([[0, token, 5]]))


# Representations


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
