"""Factors and their products: the definition, what is exact about them, and dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jaxdelta.ops.delta_product import gated_delta_product
from jaxdelta.ops.householder import (
    active_rank,
    determinant,
    eigenvalues,
    expansion,
    factor,
    frozen_dimension,
    orthogonality_defect,
    parity,
    spectral_radius,
    transition,
)
from jaxdelta.ops.spectra import singular_values
from ports.compare import relative_error

D = 11
FACTORS = pytest.mark.parametrize("n", (1, 2, 4, 7))


def draws(seed, n, *batch, d=D):
    """Unit keys [*batch, n, d] and strengths [*batch, n] in [0, 2], float64."""
    rng = np.random.default_rng(seed)
    k = rng.standard_normal((*batch, n, d))
    return k / np.linalg.norm(k, axis=-1, keepdims=True), rng.uniform(0, 2, (*batch, n))


def turn(angle):
    return np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])


# The definition


@pytest.mark.parametrize("kind", (np.asarray, jnp.asarray))
def test_a_factor_is_the_identity_less_an_outer_product(kind, dtype):
    k, beta = (kind(x.astype(dtype.name)) for x in draws(0, 3, 2))
    expected = np.eye(D) - np.asarray(beta)[..., None, None] * np.asarray(k)[..., :, None] * np.asarray(k)[..., None, :]
    found = factor(k, beta)
    assert found.dtype == dtype
    assert found.shape == (2, 3, D, D)
    assert np.abs(found - expected).max() < 4 * np.finfo(dtype).eps


@FACTORS
def test_a_transition_is_the_product_with_the_first_factor_rightmost(n):
    k, beta = draws(1, n)
    expected = np.eye(D)
    for one, strength in zip(k, beta, strict=True):
        expected = (np.eye(D) - strength * np.outer(one, one)) @ expected
    assert relative_error(transition(k, beta, 0.7), 0.7 * expected) < 1e-14
    if n > 1:
        assert relative_error(transition(k[::-1], beta[::-1], 0.7), 0.7 * expected) > 1e-2


@FACTORS
def test_a_transition_is_what_the_gated_delta_product_applies_to_a_state(n, x64):
    """S' = A S where nothing is written: v = 0."""
    k, beta = draws(2, n)
    S = np.random.default_rng(3).standard_normal((D, 5))
    q, v, g = jnp.zeros((1, 1, 1, D)), jnp.zeros((1, n, 1, 5)), jnp.full((1, 1, 1), np.log(0.8))
    steps = (jnp.asarray(x)[None, :, None] for x in (k, beta))
    _, state = gated_delta_product(
        q, next(steps), v, beta=next(steps), g=g, num_householder=n, state=jnp.asarray(S)[None, None]
    )
    assert relative_error(state[0, 0], transition(k, beta, 0.8) @ S) < 1e-14


def test_a_batch_is_its_members():
    k, beta = draws(4, 3, 2, 5)
    alpha = np.linspace(0, 1, 10).reshape(2, 5)
    found = transition(k, beta, alpha)
    for i in np.ndindex(2, 5):
        np.testing.assert_allclose(found[i], transition(k[i], beta[i], float(alpha[i])), atol=1e-15)


def test_factors_of_no_strength_are_the_identity_whatever_their_keys():
    k, beta = draws(5, 3)
    k[1], beta[1] = 0, 0
    np.testing.assert_array_equal(transition(k, beta), transition(k[::2], beta[::2]))


# Dtypes and derivatives


def test_float64_arrays_are_computed_in_float64_whatever_the_setting():
    k, beta = draws(6, 4)
    assert not jax.config.jax_enable_x64
    found = transition(k, beta)
    assert isinstance(found, np.ndarray)
    assert found.dtype == np.float64
    assert orthogonality_defect(transition(k, 2.0)) < 1e-14
    assert not jax.config.jax_enable_x64
    assert jnp.asarray(found).dtype == jnp.float32


def test_float32_arrays_stay_and_bfloat16_becomes_float32():
    k, beta = (jnp.asarray(x, jnp.float32) for x in draws(7, 4))
    assert transition(k, beta).dtype == transition(k, 2.0).dtype == jnp.float32
    assert transition(k.astype(jnp.bfloat16), 1.0, unit=False).dtype == jnp.float32


def test_singular_values_of_float64_arrays_are_float64():
    found = singular_values(factor(*(x[0] for x in draws(8, 1))))
    assert found.dtype == np.float64
    np.testing.assert_allclose(found[1:-1], 1, atol=1e-14)


@pytest.mark.parametrize("mode", ("fwd", "rev"))
def test_derivatives_equal_central_differences(mode, x64):
    k, beta = (jnp.asarray(x) for x in draws(9, 3))
    moved = jax.jit(lambda k, beta, alpha: transition(k, beta, alpha, unit=False))
    check_grads(moved, (k, beta, jnp.asarray(0.9)), order=1, modes=[mode], atol=1e-6, rtol=1e-6)


def test_values_are_taken_as_they_are_inside_of_jit():
    k, beta = (jnp.asarray(x, jnp.float32) for x in draws(10, 3))
    assert jnp.isfinite(jax.jit(transition)(k, beta + 2)).all()


# What is exact


def test_spectrum_of_a_factor():
    """Eigenvalues 1 - beta and ones, det 1 - beta, singular values |1 - beta| and ones, for keys of any length."""
    k, _ = draws(11, 1, d=5)
    for beta, length in ((0.0, 1), (0.4, 1), (1.0, 1), (2.0, 1), (1.5, 0.9)):
        H = factor(length * k[0], beta, unit=False)
        along = 1 - beta * length**2
        np.testing.assert_allclose(np.sort(eigenvalues(H).real), [along, 1, 1, 1, 1], atol=1e-14)
        np.testing.assert_allclose(determinant(H), along, atol=1e-14)
        np.testing.assert_allclose(np.sort(singular_values(H)), np.sort([abs(along), 1, 1, 1, 1]), atol=1e-14)
        np.testing.assert_allclose(H @ k[0], along * k[0], atol=1e-14)


@pytest.mark.parametrize("alpha", (1.0, 0.6))
@FACTORS
def test_fewer_factors_than_dimensions_freeze_the_rest(n, alpha):
    A = transition(*draws(12, n, 50), np.full(50, alpha))
    assert np.abs(spectral_radius(A) - alpha).max() < 3e-15
    np.testing.assert_array_equal(active_rank(A, alpha), n)
    np.testing.assert_array_equal(frozen_dimension(A, np.full(50, alpha)), D - n)
    assert expansion(A).max() < alpha - 1 + 1e-14
    if alpha < 1:
        np.testing.assert_array_equal(active_rank(A), D)


@FACTORS
def test_full_strength_is_orthogonal_with_the_parity_of_the_factors(n):
    g = transition(draws(13, n, 50)[0], 2.0)
    assert orthogonality_defect(g).max() < 4e-15
    np.testing.assert_array_equal(parity(g), (-1) ** n)


def test_orthonormal_keys_of_all_dimensions_forget_everything():
    k = np.linalg.qr(np.random.default_rng(14).standard_normal((D, D)))[0]
    A = transition(k, 1.0)
    assert spectral_radius(A) < 1e-14
    assert active_rank(A) == D


# Measures of any matrix


def test_eigenvalues_come_by_descending_modulus_complex_ones_too():
    A = np.zeros((2, 4, 4))
    A[0, :2, :2], A[0, 2:, 2:] = 0.5 * turn(1.0), np.diag([-0.9, 0.1])
    A[1, 0, 3] = 7.0
    found = eigenvalues(A)
    np.testing.assert_allclose(np.abs(found[0]), [0.9, 0.5, 0.5, 0.1], atol=1e-15)
    np.testing.assert_allclose(np.sort(np.angle(found[0, 1:3])), [-1, 1], atol=1e-14)
    np.testing.assert_array_equal(spectral_radius(A), [np.abs(found[0, 0]), 0])


def test_rank_counts_what_stands_above_the_rounding_of_the_matrix():
    """A - I = 1e-12 e e^T is known to 1e-16: rank 1, and 0 where the tolerance says so."""
    A = np.eye(6)
    A[2, 4] = 1e-12
    assert active_rank(A) == 1
    assert active_rank(A, tolerance=1e-11) == 0
    assert frozen_dimension(A, tolerance=1e-11) == 6
    assert active_rank(A + 1e-15 * np.random.default_rng(0).standard_normal((6, 6))) == 1
    assert active_rank(1e-9 * np.eye(6), 1e-9) == 0
    assert active_rank(1e-9 * A, 1e-9) == 1


def test_expansion_is_the_longest_a_unit_vector_gets():
    assert expansion(np.diag([0.3, -1.25])) == pytest.approx(0.25)


@pytest.mark.parametrize(("A", "defect"), [(np.diag([1.0, -1.0, 1.1]), 0.21), (np.diag([0.0, 1.0]), 1.0)])
def test_orthogonality_defect_is_the_most_a_squared_length_changes(A, defect):
    assert orthogonality_defect(A) == pytest.approx(defect)


# Mistakes

K, BETA = draws(20, 3)
BAD = {
    "beta above": (lambda: transition(K, BETA + 2), r"beta is [23]\.\d+; expected a number in \[0, 2\]"),
    "beta below": (lambda: factor(K, np.array([1, -0.25, 1])), r"beta is -0\.25; expected a number in \[0, 2\]"),
    "beta NaN": (lambda: factor(K[0], np.nan), r"beta is nan; expected a number in \[0, 2\]"),
    "alpha": (lambda: transition(K, BETA, 1.5), r"alpha is 1\.5; expected a number in \[0, 1\]"),
    "alpha NaN": (lambda: transition(K, BETA, np.nan), "alpha is nan"),
    "long key": (lambda: transition(1.5 * K, BETA), r"a key has norm 1\.5; expected unit norm, or unit=False"),
    "short key": (lambda: factor((1 - 5e-7) * K, BETA), r"a key has norm 0\.9999995"),
    "zero key": (lambda: factor(0 * K, BETA), "a key has norm 0"),
    "key NaN": (lambda: factor(np.nan * K, BETA, unit=False), "33 of 33 entries of k are not finite"),
    "no factor": (
        lambda: transition(K[:0], BETA[:0]),
        r"k has shape \(0, 11\); expected \[..., n_h, d\] with at least one",
    ),
    "lengths": (lambda: transition(K, BETA[:2]), r"beta has shape \(2,\); expected \(3,\), for k has shape \(3, 11\)"),
    "alphas": (lambda: transition(K, BETA, np.ones(3)), r"alpha has shape \(3,\); expected \(\)"),
    "not square": (lambda: spectral_radius(np.ones((3, 4))), r"A has shape \(3, 4\); expected square matrices"),
    "a vector": (lambda: expansion(np.ones(4)), r"A has shape \(4,\)"),
    "of nothing": (lambda: determinant(np.ones((0, 0))), r"A has shape \(0, 0\)"),
    "matrix NaN": (lambda: active_rank(np.full((2, 2), np.nan)), "4 of 4 entries of A are not finite"),
    "alphas of matrices": (lambda: active_rank(np.eye(3), np.ones(2)), r"alpha has shape \(2,\); expected \(\)"),
    "not orthogonal": (lambda: parity(0.5 * np.eye(4)), r"\|\|g\^T g - I\|\|_F is 1\.5; expected an orthogonal matrix"),
}


@pytest.mark.parametrize("name", BAD)
def test_mistakes_are_refused_with_their_numbers(name):
    call, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        call()


def test_keys_shortened_by_an_eps_are_told_from_unit_keys_in_float64_and_admitted_on_request():
    """||k|| = 1 - 5e-7 of the layers' l2 norm: the eigenvalue is 1 - beta ||k||^2."""
    short = K[0] / np.sqrt(1 + 1e-6)
    with pytest.raises(ValueError, match=r"a key has norm 0\.9999995"):
        factor(short, 2.0)
    assert eigenvalues(factor(short, 2.0, unit=False)).real.min() == pytest.approx(-1 + 2e-6, abs=1e-11)
