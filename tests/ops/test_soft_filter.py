"""The soft spectral filter: sigma^3 / (sigma^2 + tau) by the SVD, and both derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdelta.ops import soft_filter as ops
from ports.compare import relative_error
from tests.helpers import TOLERANCE, matrices_of_spectrum

soft_filter = jax.jit(ops.soft_filter)
SHAPES = pytest.mark.parametrize(("K", "V"), [(7, 11), (11, 7), (5, 1)], ids=lambda n: str(n))
SPECTRA = {
    "distinct": [3.0, 1.5, 1.0, 0.3, 0.01],
    "zeros": [2.0, 0.5],
    "repeated": [2.0, 2.0, 2.0, 0.5, 0.5],
    "nothing": [0.0],
}


def by_svd(S, tau):
    """Each singular value by its formula, in f64."""
    U, sigma, Wt = np.linalg.svd(np.asarray(S, np.float64), full_matrices=False)
    tau = np.broadcast_to(np.asarray(tau, np.float64), sigma.shape[:-1])[..., None]
    return (U * (sigma**3 / (sigma**2 + tau))[..., None, :]) @ Wt


def error(found, S, tau):
    """Against the formula, relative to the states that are filtered."""
    return np.linalg.norm(np.asarray(found, np.float64) - by_svd(S, tau)) / np.linalg.norm(np.asarray(S, np.float64))


def central(f, x, direction, step=1e-6):
    return (f(x + step * direction) - f(x - step * direction)) / (2 * step)


@jax.jit
def weighted(S, tau):
    """A sum of the filtered state's entries, each with a weight of its own."""
    return jnp.sum(jnp.cos(jnp.arange(S.size).reshape(S.shape)) * soft_filter(S, tau))


gradient = jax.jit(jax.grad(weighted, (0, 1)))

# Values


@SHAPES
def test_every_singular_value_shrinks_by_the_formula(dtype, K, V):
    S = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, K, V)), dtype)
    for tau in (1e-3, 0.7, 100.0):
        assert error(soft_filter(S, tau), S, tau) < TOLERANCE[dtype.name]
    assert soft_filter(S, 0.7).dtype == dtype


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize(("K", "V"), [(7, 11), (11, 7)])
def test_zero_and_repeated_singular_values_are_no_obstacle(dtype, spectrum, K, V):
    S = jnp.asarray(matrices_of_spectrum(1, SPECTRA[spectrum], K, V), dtype)
    np.testing.assert_allclose(soft_filter(S, 0.4), by_svd(S, 0.4), atol=3 * TOLERANCE[dtype.name])


@SHAPES
def test_tau_may_differ_from_state_to_state(dtype, K, V):
    S = jnp.asarray(np.random.default_rng(2).standard_normal((2, 3, K, V)), dtype)
    tau = np.array([[0.01, 1.0, 50.0], [3.0, 0.2, 7.0]])
    assert error(soft_filter(S, jnp.asarray(tau, dtype)), S, tau) < TOLERANCE[dtype.name]
    np.testing.assert_allclose(soft_filter(S, tau[:1])[1, 2], soft_filter(S[1, 2], 50.0), rtol=1e-5, atol=1e-6)


def test_the_scale_of_states_does_not_matter_where_tau_follows(dtype):
    """1e-18 to 1e18 in f32, whose tau has squares of them; 1e-20 to 1e20, and far beyond, in f64."""
    S = jnp.asarray(np.random.default_rng(3).standard_normal((4, 9)), dtype)
    for scale in (1e-18, 1e-9, 1e18) if dtype == jnp.float32 else (1e-20, 1e20, 1e-100, 1e100):
        found = np.asarray(soft_filter(S * scale, 0.5 * scale**2), np.float64) / scale
        assert relative_error(found, by_svd(S, 0.5)) < TOLERANCE[dtype.name]


@SHAPES
def test_a_small_tau_takes_nothing_and_a_large_one_all(x64, K, V):
    S = jnp.asarray(np.random.default_rng(4).standard_normal((K, V)))
    np.testing.assert_allclose(soft_filter(S, 1e-14), S, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(soft_filter(S, 1e14), 0, atol=1e-11)
    sizes = [float(jnp.sum(soft_filter(S, tau) ** 2)) for tau in 10.0 ** np.arange(-6, 7)]
    assert (np.diff(sizes) < 0).all()
    assert not soft_filter(jnp.zeros((K, V)), 1.0).any()


def test_bf16_states_are_filtered_in_f32():
    S = jnp.asarray(np.random.default_rng(5).standard_normal((6, 4)), jnp.bfloat16)
    assert soft_filter(S, 1.0).dtype == jnp.float32
    assert error(soft_filter(S, 1.0), S, 1.0) < 1e-5


def test_a_negative_tau_gives_no_number_and_zero_none_that_is_wrong():
    S = jnp.asarray(np.random.default_rng(6).standard_normal((6, 4)), jnp.float32)
    assert np.isnan(soft_filter(S, -1.0)).all()
    at_zero = np.asarray(soft_filter(S, 0.0))
    assert np.isnan(at_zero).any() or relative_error(at_zero, S) < 1e-6


# Derivatives


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize(("K", "V"), [(7, 11), (11, 7)])
def test_derivatives_in_state_and_tau_agree_with_central_differences(x64, spectrum, K, V):
    S, dS = jnp.asarray(matrices_of_spectrum(1, SPECTRA[spectrum], K, V)), np.random.default_rng(7).standard_normal((K, V))
    into_S, into_tau = gradient(S, 0.4)
    np.testing.assert_allclose(jnp.sum(into_S * dS), central(lambda x: weighted(x, 0.4), S, dS), rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(into_tau, central(lambda x: weighted(S, x), 0.4, 1.0), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(("K", "V"), [(7, 11), (11, 7)])
def test_forward_and_reverse_mode_agree(x64, K, V):
    rng = np.random.default_rng(8)
    S, dS, into = rng.standard_normal((3, 2, K, V))
    tau, dtau = np.array([0.3, 4.0]), np.array([1.0, -2.0])
    _, forward = jax.jvp(soft_filter, (S, tau), (dS, dtau))
    _, pull = jax.vjp(soft_filter, S, tau)
    into_S, into_tau = pull(jnp.asarray(into))
    np.testing.assert_allclose(np.sum(forward * into), np.sum(into_S * dS) + np.sum(into_tau * dtau), rtol=1e-10)


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_second_derivatives_are_finite_at_degenerate_spectra(x64, spectrum):
    S, dS = (
        jnp.asarray(matrices_of_spectrum(1, SPECTRA[spectrum], 7, 11)),
        np.random.default_rng(9).standard_normal((7, 11)),
    )
    _, second = jax.jvp(lambda x: gradient(x, 0.4)[0], (S,), (dS,))
    assert np.isfinite(second).all()
