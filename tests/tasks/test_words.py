"""Words and their prefix products against the definition of the word problem."""

import numpy as np
import pytest

from jaxdelta.groups import group_of
from jaxdelta.tasks.state_tracking import prefix_products, words


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
