"""Truncation: three methods, one result; degenerate states; ranks known and traced; the derivative."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdelta.dims import HIGHEST
from jaxdelta.ops.low_rank import truncate, truncation
from jaxdelta.ops.spectra import singular_values
from tests.helpers import TOLERANCE, dot_precisions, matrices_of_spectrum, relative_error, truncated

METHODS = pytest.mark.parametrize("method", ("subspace", "eigh", "svd"))
EXACT = pytest.mark.parametrize("method", ("eigh", "svd"))
SHAPES = pytest.mark.parametrize("shape", [(24, 31), (31, 24)], ids=["K<V", "K>V"])

known = jax.jit(truncation, static_argnames=("rank", "method", "max_rank"))
traced = jax.jit(truncation, static_argnames=("method", "max_rank"))


def energy(S):
    return np.sum(np.asarray(S, np.float64) ** 2, axis=(-2, -1))


def ones_and_scaled(seed, *, ratio, shape=(24, 31), batch=(3,), dtype=jnp.float32):
    """Matrices with singular values ratio^i."""
    return jnp.asarray(matrices_of_spectrum(seed, ratio ** np.arange(min(shape)), *shape, batch), dtype)


# What a truncation is


@METHODS
@SHAPES
@pytest.mark.parametrize("rank", (1, 5, 17, 23))
def test_error_equals_the_tail_of_the_spectrum(method, shape, rank):
    """‖S − S_r‖² = Σ_{i>r} σ_i², and S_r has no more than r directions."""
    S = ones_and_scaled(0, ratio=0.8, shape=shape)
    S_r = known(S, rank, method=method).state
    tail = np.sum(0.8 ** (2 * np.arange(rank, 24)))
    np.testing.assert_allclose(energy(S - S_r), tail, atol=1e-5 * energy(S).max(), rtol=0)
    assert np.linalg.svd(S_r, compute_uv=False)[:, rank:].max() < 1e-6


@EXACT
@SHAPES
@pytest.mark.parametrize("rank", (1, 4))
def test_exact_methods_give_the_best_approximation(method, shape, rank, dtype):
    S = ones_and_scaled(1, ratio=0.5, shape=shape, dtype=dtype)
    out = known(S, rank, method=method)
    assert relative_error(out.state, truncated(S, rank)) < TOLERANCE[dtype.name]
    assert out.state.dtype == dtype
    assert out.rounds == 0


SPECTRA = {
    "0.9^i": 0.9 ** np.arange(128),
    "0.97^i": 0.97 ** np.arange(128),
    "0.995^i": 0.995 ** np.arange(128),
    "flat": np.ones(128),
    "cliff": np.r_[np.ones(12), np.full(116, 1e-3)],
}


@pytest.mark.parametrize("rank", (1, 12, 32))
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_subspace_retains_the_energy_of_the_leading_directions(spectrum, rank):
    sigma = SPECTRA[spectrum]
    S = jnp.asarray(matrices_of_spectrum(2, sigma, 128, 131, (3,)), jnp.float32)
    out = known(S, rank, method="subspace")
    np.testing.assert_allclose(energy(out.state), np.sum(sigma[:rank] ** 2), rtol=1e-5)


@pytest.mark.parametrize("decades", (2, 4, 6, 8))
@pytest.mark.parametrize("rank", (12, 32))
def test_wide_spectra_keep_the_basis_orthonormal_and_the_tail_small(decades, rank):
    """A single Cholesky-QR loses orthogonality at a condition of 1e4 and fails at 1e5."""
    S = jnp.asarray(matrices_of_spectrum(3, np.geomspace(1, 10.0**-decades, 128), 128, 131), jnp.float32)
    out = known(S, rank, method="subspace")
    U = np.asarray(out.basis[:, :rank], np.float64)
    assert np.linalg.norm(U.T @ U - np.eye(rank)) < 1e-5
    assert energy(S - out.state) < 1.01**2 * energy(S - truncated(S, rank))


@METHODS
@SHAPES
def test_full_rank_is_the_identity_bit_for_bit(method, shape):
    S = ones_and_scaled(4, ratio=0.8, shape=shape)
    np.testing.assert_array_equal(known(S, 24, method=method).state, S)


@METHODS
def test_the_basis_holds_key_directions(method):
    """S = k v^T: the first column is k, up to its sign, and the state is found whole."""
    rng = np.random.default_rng(5)
    k, v = rng.standard_normal(24), rng.standard_normal(31)
    S = jnp.asarray(np.outer(k, v), jnp.float32)
    out = known(S, 1, method=method)
    assert abs(out.basis[:, 0] @ k) / np.linalg.norm(k) == pytest.approx(1, abs=1e-6)
    assert relative_error(out.state, S) < 1e-6


@METHODS
def test_truncating_twice_changes_nothing(method):
    S = ones_and_scaled(6, ratio=0.6)
    once = known(S, 4, method=method).state
    assert relative_error(known(once, 4, method=method).state, once) < 1e-5


@METHODS
def test_rotating_a_degenerate_block_changes_nothing(method):
    """σ = (3, 3, 3, 1, 1, …): other singular vectors of the same matrix, kept or discarded, give the same state."""
    rng = np.random.default_rng(7)
    U, W = (np.linalg.qr(rng.standard_normal((n, 9)))[0] for n in (24, 31))
    kept, discarded = (np.linalg.qr(rng.standard_normal((n, n)))[0] for n in (3, 6))
    R = np.block([[kept, np.zeros((3, 6))], [np.zeros((6, 3)), discarded]])
    sigma = np.r_[np.full(3, 3.0), np.full(6, 1.0)]
    one, other = ((u * sigma) @ w.T for u, w in ((U, W), (U @ R, W @ R)))
    states = [known(jnp.asarray(S, jnp.float32), 3, method=method).state for S in (one, other)]
    assert relative_error(*states) < 2e-6
    assert relative_error(states[0], truncated(one, 3)) < 1e-3


def test_method_follows_from_the_rank():
    """Subspace iteration, which counts rounds, up to a quarter of min(K, V); eigh above, and where ranks are traced."""
    S = ones_and_scaled(8, ratio=0.6)
    assert known(S, 6).rounds >= 1
    assert known(S, 7).rounds == 0
    assert traced(S, 6).rounds == 0
    assert traced(S, 6, max_rank=6).rounds >= 1


@METHODS
def test_state_of_a_bf16_state_is_f32(method):
    S = ones_and_scaled(9, ratio=0.6, dtype=jnp.bfloat16)
    out = known(S, 4, method=method)
    assert out.state.dtype == jnp.float32
    assert energy(out.state) == pytest.approx(energy(truncated(S, 4)), rel=1e-5)


@METHODS
def test_every_product_is_of_the_highest_precision(method):
    S = ones_and_scaled(10, ratio=0.6)
    precisions = dot_precisions(jax.grad(lambda S: truncate(S, 4, method=method).sum()), S)
    assert len(precisions) >= 8
    assert set(precisions) == {(HIGHEST, HIGHEST)}


# Ranks


@METHODS
def test_ranks_per_head_equal_solo_calls(method):
    S = ones_and_scaled(11, ratio=0.5, batch=(2, 3))
    ranks = np.array([1, 3, 24])
    out = known(S, tuple_rank := HashableRanks(ranks), method=method)
    del tuple_rank
    for h, rank in enumerate(ranks):
        assert relative_error(out.state[:, h], truncated(S[:, h], rank)) < 1e-3


class HashableRanks(np.ndarray):
    pass
