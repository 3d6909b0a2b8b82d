"""The written-down solution names every product in the predicted number of steps."""

import jax
import numpy as np
import pytest

from jaxdelta.groups import (
    Group,
    Representation,
    direct_sum,
    group_of,
    minimal_representation,
    predicted_householder,
    real_irreps,
)
from jaxdelta.tasks.state_tracking import solution, words


def orthogonal(seed, d, fixed):
    """A random orthogonal matrix that leaves ``fixed`` random directions alone."""
    rng = np.random.default_rng(seed)
    inner = np.linalg.qr(rng.standard_normal((d - fixed, d - fixed)))[0]
    basis = np.linalg.qr(rng.standard_normal((d, d)))[0]
    whole = np.eye(d)
    whole[fixed:, fixed:] = inner
    return basis @ whole @ basis.T


@jax.jit
def logits(model, tokens):
    return model.logits(model(tokens, model.init_carry(*tokens.shape)).hidden)


def named(model, tokens):
    return np.asarray(logits(model, tokens)).argmax(axis=-1)


@pytest.mark.parametrize("name", ["Z2", "Z3", "Z7", "S3", "S4", "A5", "S5", "S5_limit_2", "S5_limit_3", "S5_limit_4"])
def test_the_predicted_steps_suffice_for_one_layer(name):
    """Every product of words of 256 letters, no state longer than what the representation needs."""
    group = group_of(name)
    model = solution(group)
    assert model.config.num_householder == predicted_householder(group)
    assert model.config.key_dim == minimal_representation(group).dimension
    tokens, targets = words(group, count=8, length=256, seed=0)
    np.testing.assert_array_equal(named(model, tokens), targets)


def test_another_representation_takes_its_own_number_of_steps():
    """The four axes of S4 permuted: a four-cycle is three reflections."""
    S4 = group_of("S4")
    axes = max((rho for rho in real_irreps(S4) if rho.dimension == 3), key=lambda rho: rho.ranks.max())
    model = solution(S4, axes)
    assert model.config.num_householder == 3
    tokens, targets = words(S4, count=8, length=100, seed=0)
    np.testing.assert_array_equal(named(model, tokens), targets)


def test_an_alphabet_that_generates_a_part_of_the_group():
    Z12 = group_of("Z12")
    thirds = Group("thirds", Z12.table, np.array([0, 4]))
    tokens, targets = words(thirds, count=4, length=50, seed=0)
    assert set(targets.ravel()) == {0, 4, 8}
    np.testing.assert_array_equal(named(solution(thirds), tokens), targets)


def test_representations_that_cannot_solve_the_task():
    S3 = group_of("S3")
    trivial, sign, _ = real_irreps(S3)
    with pytest.raises(ValueError, match="6 elements with a kernel of 3; expected 6 and 1"):
        solution(S3, direct_sum([trivial, sign]))
    with pytest.raises(ValueError, match="2 elements with a kernel of 1; expected 6 and 1"):
        solution(S3, Representation(np.array([[[1.0]], [[-1.0]]])))
