"""Groups against their definitions: orders, products, inverses, words that spell their elements."""

import re

import numpy as np
import pytest

from jaxdelta.groups import Group, generated, group_of, shortest_words


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


KLEIN = np.bitwise_xor.outer(np.arange(4), np.arange(4))
LOOP = np.array([[0, 1, 2, 3, 4], [1, 0, 3, 4, 2], [2, 4, 0, 1, 3], [3, 2, 4, 0, 1], [4, 3, 1, 2, 0]])


@pytest.mark.parametrize(("table", "alphabet", "reason"), [
    (np.zeros((2, 3), int), [0], "has shape (2, 3)"),
    (np.add.outer(np.arange(121), np.arange(121)) % 121, [0], "has shape (121, 121)"),
    (np.array([[0, 1], [1, 1]]), [0], "does not hold each of 2 elements once"),
    (LOOP, [0], "is not associative"),
    (KLEIN, [], "is []; expected different elements of 0 .. 3"),
    (KLEIN, [1, 1], "is [1, 1]; expected different elements of 0 .. 3"),
    (KLEIN, [1, 4], "is [1, 4]; expected different elements of 0 .. 3"),
])  # fmt: skip
def test_tables_that_are_no_groups(table, alphabet, reason):
    with pytest.raises(ValueError, match=re.escape(reason)):
        Group("wrong", table, np.array(alphabet, int))
