"""Singular directions against numpy's SVD in f64 of the same f32 arrays, down to 1e-6 of the largest."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdelta.ops.directions import below_rounding, directions, gate_derivatives, scaled
from ports.compare import relative_error
from tests.helpers import matrices_of_spectrum, truncated

SHAPES = pytest.mark.parametrize("shape", [(24, 31), (31, 24), (128, 128)], ids=["K<V", "K>V", "128"])
SCALES = pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])


def clustered(n: int, gap: float) -> np.ndarray:
    """Groups of four neighbours, from 1 to 1e-6."""
    groups = np.repeat(np.logspace(0, -6, -(-n // 4)), 4)[:n]
    return np.sort(groups * (1 + gap * (np.arange(n) % 4)))[::-1]


SPECTRA = {
    "0.8^i": lambda n: 0.8 ** np.arange(n),
    "to 1e-7": lambda n: np.logspace(0, -7, n),
    "clusters within 3e-4": lambda n: clustered(n, 3e-4),
    "clusters within 2e-3": lambda n: clustered(n, 2e-3),
    "one strong, others 1e-5": lambda n: np.r_[1, 1e-5 * np.linspace(2, 1, n - 1)],
    "one strong, others 1e-6": lambda n: np.r_[1, 1e-6 * np.linspace(2, 1, n - 1)],
    "rank 5": lambda n: np.r_[1, 0.9, 1e-3, 1e-4, 1e-5, np.zeros(n - 5)],
}
SPECTRUM = pytest.mark.parametrize("spectrum", SPECTRA)
_directions, _gates = jax.jit(directions), jax.jit(gate_derivatives)


def states(spectrum: str, shape: tuple[int, int], scale: float = 1.0) -> np.ndarray:
    return (scale * matrices_of_spectrum(1, SPECTRA[spectrum](min(shape)), *shape, (4,))).astype(np.float32)


def svd(S: np.ndarray) -> tuple[np.ndarray, ...]:
    return np.linalg.svd(S.astype(np.float64), full_matrices=False)


def known(sigma: np.ndarray) -> np.ndarray:
    return sigma > 1e-6 * sigma[..., :1]


@SPECTRUM
@SHAPES
@SCALES
def test_sigma_is_that_of_an_svd_in_f64(spectrum, shape, scale):
    S = states(spectrum, shape, scale)
    found, expected = np.asarray(_directions(S).sigma, np.float64), svd(S)[1]
    off = np.abs(found - expected) / np.where(known(expected), expected, np.inf)
    assert off.max() < 1e-6
    assert (np.diff(found) <= 0).all()
    assert found.max() < 1.001 * expected.max()


@SPECTRUM
@SHAPES
def test_gates_summed_between_gaps_are_those_of_an_svd_in_f64(spectrum, shape):
    """A gap is sigma_i - sigma_{i+1} > 1e-3 sigma_i; off by at most 1e-5 of the head's largest gate."""
    S = states(spectrum, shape)
    G = np.random.default_rng(2).standard_normal((2, *S.shape)).astype(np.float32)
    U, sigma, W = svd(S)
    expected = np.einsum("bi,bki,rbkv,biv->rbi", sigma, U, G.astype(np.float64), W)
    off = np.cumsum(np.asarray(_gates(S, G)[1], np.float64) - expected, axis=-1)
    largest = np.abs(expected).max(axis=-1)
    for b in range(len(S)):
        gap = np.r_[sigma[b, :-1] - sigma[b, 1:] > 1e-3 * sigma[b, :-1], True] & known(sigma[b])
        ends = np.flatnonzero(gap)
        blocks = np.diff(np.concatenate([np.zeros((2, 1)), off[:, b, ends]], axis=-1))
        assert (np.abs(blocks) < 1e-5 * largest[:, b, None]).all()


def test_the_last_rounding_is_the_only_one():
    """Gates of faint directions are right beside their own size: 1e-6 of a gate that is 1e-5 of the largest."""
    S = states("0.8^i", (24, 31))[:1] * 1.0
    S = (matrices_of_spectrum(3, np.logspace(0, -5.5, 24), 24, 31, (3,))).astype(np.float32)
    G = np.random.default_rng(4).standard_normal((1, *S.shape)).astype(np.float32)
    U, sigma, W = svd(S)
    each = np.einsum("bki,rbkv,biv->rbi", U, G.astype(np.float64), W)
    found = np.asarray(_gates(S, G)[1], np.float64) / sigma
    assert np.abs(found - each).max() < 1e-5


@SHAPES
def test_a_state_is_the_sum_of_its_directions(shape):
    S = states("to 1e-7", shape)
    U, sigma, right = (np.asarray(x, np.float64) for x in _directions(S))
    assert relative_error(U @ right, S) < 1e-7
    assert relative_error(np.linalg.norm(right, axis=-1), sigma) < 1e-7
    np.testing.assert_allclose(
        np.swapaxes(U, -1, -2) @ U, np.broadcast_to(np.eye(min(shape)), (4, *[min(shape)] * 2)), atol=1e-6
    )


@pytest.mark.parametrize("sigma", [[2.0, 2.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [1.0]], ids=str)
def test_directions_are_orthonormal_at_equal_and_missing_singular_values(sigma):
    S = matrices_of_spectrum(1, sigma, 3, 5, (4,)).astype(np.float32)
    U, found, _ = directions(S)
    np.testing.assert_allclose(np.swapaxes(U, -1, -2) @ U, np.broadcast_to(np.eye(3), U.shape), atol=1e-6)
    np.testing.assert_allclose(found, np.broadcast_to(np.resize([*sigma, 0, 0], 3), found.shape), atol=1e-6)


def test_a_broken_state_stays_alone():
    S = states("0.8^i", (24, 31))
    whole = directions(S).sigma
    S[1, 2, 3] = np.nan
    found = np.asarray(directions(S).sigma)
    assert np.isnan(found[1]).all()
    np.testing.assert_array_equal(found[[0, 2, 3]], whole[np.array([0, 2, 3])])


def test_f64_states_keep_their_digits(x64):
    S = jnp.asarray(matrices_of_spectrum(1, 0.5 ** np.arange(20), 20, 23))
    found = directions(S)
    assert found.sigma.dtype == jnp.float64
    np.testing.assert_allclose(found.sigma, 0.5 ** np.arange(20), rtol=1e-9)


# Scaled directions


@SHAPES
def test_the_faint_tail_alone_is_exact(shape):
    """The strong directions taken away: what is left is right beside its own size, at 1e-4 of theirs."""
    sigma = np.r_[np.ones(4), 1e-4 * 0.5 ** np.arange(min(shape) - 4)]
    S = matrices_of_spectrum(5, sigma, *shape, (2,)).astype(np.float32)
    found = jax.jit(scaled)(S, np.arange(min(shape)) >= 4)
    tail = S.astype(np.float64) - truncated(S, 4)
    assert relative_error(found, tail) < 1e-6


def test_its_derivative_takes_the_directions_as_constants():
    rng = np.random.default_rng(6)
    S = matrices_of_spectrum(7, [3, 2, 1, 0.5, 0.1], 5, 7, (3,)).astype(np.float32)
    factors, dS, df = (rng.standard_normal(s).astype(np.float32) for s in ((3, 5), S.shape, (3, 5)))
    U, sigma, W = svd(S)
    expected = np.einsum("bki,bi,bji,bjv->bkv", U, factors, U, dS) + np.einsum("bki,bi,biv->bkv", U, df * sigma, W)
    assert relative_error(jax.jvp(scaled, (S, factors), (dS, df))[1], expected) < 1e-5
    cotangent = rng.standard_normal(S.shape).astype(np.float32)
    pulled = jax.vjp(scaled, S, factors)[1](cotangent)
    both = np.vdot(pulled[0], dS) + np.vdot(pulled[1], df)
    np.testing.assert_allclose(both, np.vdot(cotangent, expected), rtol=1e-4)


TRANSFORMED = {
    "jit": lambda f, S: jax.jit(f)(S),
    "vmap": lambda f, S: jax.vmap(f)(S),
    "vmap of jit": lambda f, S: jax.vmap(jax.jit(f))(S),
    "scan": lambda f, S: jax.lax.scan(lambda c, s: (c, f(s)), 0, S)[1],
    "map": lambda f, S: jax.lax.map(f, S),
    "checkpoint": lambda f, S: jax.checkpoint(f)(S),
    "while": lambda f, S: jax.lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, f(c[1])), (0, jnp.asarray(S)))[1],
}


@pytest.mark.parametrize("how", TRANSFORMED)
def test_it_goes_through_every_transformation(how):
    """f64 inside of an f32 program, without a warning; the derivative too."""
    S = states("0.8^i", (24, 31))
    halved = partial(scaled, factors=jnp.linspace(1, 0, 24))
    np.testing.assert_allclose(TRANSFORMED[how](halved, S), halved(S), atol=1e-6)
    if how != "while":
        gradient = jax.grad(lambda S: jnp.sum(jnp.sin(TRANSFORMED[how](halved, S))))(S)
        np.testing.assert_allclose(gradient, jax.grad(lambda S: jnp.sum(jnp.sin(halved(S))))(S), atol=1e-6)


def test_below_rounding_is_relative_to_the_largest():
    sigma = np.array([[2.0, 1e-5, 1e-6], [0.0, 0.0, 0.0], [np.nan, np.nan, np.nan]])
    assert below_rounding(sigma, 31).tolist() == [[False, False, True], [True, True, True], [True, True, True]]
