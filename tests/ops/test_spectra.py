"""Ranks of known spectra, of zero states, and at extreme scales."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jaxdelta.ops.low_rank import truncate
from jaxdelta.ops.spectra import effective_rank, energy_rank, singular_values, stable_rank, threshold_rank
from ports.compare import relative_error
from tests.helpers import TOLERANCE, matrices_of_spectrum

RANKS = pytest.mark.parametrize(
    "rank_of",
    [effective_rank, stable_rank, partial(energy_rank, fraction=0.9), threshold_rank],
    ids=["effective", "stable", "energy", "threshold"],
)
SHAPES = pytest.mark.parametrize("shape", [(11, 17), (17, 11)], ids=["K<V", "K>V"])


def states(sigma, shape, dtype=jnp.float32):
    return jnp.asarray(matrices_of_spectrum(0, sigma, *shape, (2, 3)), dtype)


@SHAPES
def test_singular_values_are_those_of_the_matrix_descending(shape, dtype):
    sigma = np.linspace(4, 1, 11)
    found = singular_values(states(sigma, shape, dtype))
    assert relative_error(found, np.broadcast_to(sigma, (2, 3, 11))) < TOLERANCE[dtype.name]
    assert found.dtype == dtype


@RANKS
@SHAPES
def test_rank_of_one_outer_product_is_one(rank_of, shape):
    np.testing.assert_allclose(rank_of(states([3.0], shape)), 1, rtol=1e-4)


@pytest.mark.parametrize("rank_of", [effective_rank, stable_rank, partial(energy_rank, fraction=0.95), threshold_rank])
@SHAPES
def test_rank_of_a_flat_spectrum_is_full(rank_of, shape):
    np.testing.assert_allclose(rank_of(states(np.ones(11), shape)), 11, rtol=1e-5)


@RANKS
@SHAPES
def test_rank_of_a_zero_state_is_zero(rank_of, shape):
    np.testing.assert_array_equal(rank_of(jnp.zeros((2, 3, *shape))), 0)


@RANKS
@pytest.mark.parametrize("scale", (1e-20, 1e20))
def test_ranks_do_not_depend_on_the_scale(rank_of, scale):
    S = states(0.7 ** np.arange(11), (11, 17))
    np.testing.assert_allclose(rank_of(scale * S), rank_of(S), rtol=1e-5)


def test_effective_rank_is_of_the_singular_values_and_not_of_their_squares():
    """σ_i = 0.9^i: 25.8; of the squares it would be 12.9."""
    S = jnp.asarray(matrices_of_spectrum(2, 0.9 ** np.arange(128), 128, 131), jnp.float32)
    p = 0.9 ** np.arange(128) / np.sum(0.9 ** np.arange(128))
    assert effective_rank(S) == pytest.approx(np.exp(-np.sum(p * np.log(p))), rel=1e-4)
    assert effective_rank(S) == pytest.approx(25.8, abs=0.05)


def test_stable_rank_is_the_energy_over_the_largest_square():
    """σ = 4, 2, 2: (16 + 4 + 4) / 16."""
    np.testing.assert_allclose(stable_rank(states([4, 2, 2], (11, 17))), 1.5, rtol=1e-5)


@pytest.mark.parametrize(
    ("fraction", "expected"), [(1e-6, 1), (0.66, 1), (0.67, 2), (0.83, 2), (0.84, 3), (0.999, 3), (1.0, 3)]
)
def test_energy_rank_is_the_least_that_holds_the_fraction(fraction, expected):
    """σ = 4, 2, 2 holds 16, 20, 24 of 24."""
    np.testing.assert_array_equal(energy_rank(states([4, 2, 2], (11, 17)), fraction), expected)


@pytest.mark.parametrize("fraction", (0.0, -0.1, 1.1, float("nan")))
def test_fractions_outside_of_zero_to_one_are_refused(fraction):
    with pytest.raises(ValueError, match=f"fraction is {fraction}"):
        energy_rank(jnp.ones((3, 4)), fraction)


@pytest.mark.parametrize(("threshold", "expected"), [(0.6, 1), (0.4, 3), (0.05, 4), (1e-3, 5), (None, 5)])
def test_threshold_rank_counts_relative_to_the_largest(threshold, expected):
    np.testing.assert_array_equal(threshold_rank(states([4, 2, 2, 0.4, 0.01], (11, 17)), threshold), expected)


def test_ranks_of_bf16_states_are_f32():
    S = states([4, 2, 2], (11, 17), jnp.bfloat16)
    assert effective_rank(S).dtype == stable_rank(S).dtype == singular_values(S).dtype == jnp.float32


@pytest.mark.parametrize("mode", ("fwd", "rev"))
@pytest.mark.parametrize("rank_of", [effective_rank, stable_rank, singular_values])
def test_derivatives_equal_central_differences(rank_of, mode, x64):
    S = states(np.linspace(4, 1, 11), (11, 17), jnp.float64)[0]
    check_grads(jax.jit(rank_of), [S], order=1, modes=[mode], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("rank_of", [effective_rank, stable_rank])
@pytest.mark.parametrize("sigma", [[3, 2, 1], [1], [0], np.ones(11)], ids=["deficient", "outer product", "zero", "flat"])
def test_gradients_are_finite_at_degenerate_states(rank_of, sigma):
    S = states(sigma, (11, 17))
    assert jnp.isfinite(jax.grad(lambda S: rank_of(S).sum())(S)).all()


# What is not finite


@RANKS
@pytest.mark.parametrize("bad", (np.nan, np.inf, -np.inf))
@pytest.mark.parametrize("compiled", [False, True], ids=["", "jit"])
def test_the_rank_of_a_broken_state_is_nan_and_its_neighbours_keep_theirs(rank_of, bad, compiled):
    S = np.array(states([4, 2, 2], (11, 17)))
    expected = np.array(rank_of(S))
    S[0, 1, 2, 3], expected[0, 1] = bad, np.nan
    np.testing.assert_allclose((jax.jit(rank_of) if compiled else rank_of)(S), expected, rtol=1e-6)


@pytest.mark.parametrize("bad", (np.nan, np.inf, -np.inf))
def test_singular_values_of_a_broken_state_are_nan(bad):
    S = np.array(states([4, 2, 2], (11, 17)))
    expected = np.array(singular_values(S))
    S[0, 1, 2, 3], expected[0, 1] = bad, np.nan
    np.testing.assert_array_equal(singular_values(S), expected)


@pytest.mark.parametrize("rank_of", [partial(energy_rank, fraction=0.9), threshold_rank])
def test_counted_ranks_are_whole_and_become_integers(rank_of):
    S = states([4, 2, 2], (11, 17))
    assert rank_of(S).dtype == S.dtype
    np.testing.assert_array_equal(truncate(S, rank_of(S).astype(int)).shape, S.shape)
