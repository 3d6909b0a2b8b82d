"""Truncation: three methods, one result; degenerate states; ranks known and traced; the derivative."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdelta.dims import HIGHEST
from jaxdelta.ops.low_rank import MAX_ROUNDS, has_gap, truncate, truncation
from jaxdelta.ops.spectra import singular_values
from ports.compare import relative_error
from tests.helpers import TOLERANCE, dot_precisions, matrices_of_spectrum, orthonormal_columns, truncated

METHODS = pytest.mark.parametrize("method", ("subspace", "eigh", "svd"))
EXACT = pytest.mark.parametrize("method", ("eigh", "svd"))
SHAPES = pytest.mark.parametrize("shape", [(24, 31), (31, 24)], ids=["K<V", "K>V"])

known = jax.jit(truncation, static_argnames=("rank", "method", "max_rank"))
traced = jax.jit(truncation, static_argnames=("method", "max_rank"))


def energy(S):
    return np.sum(np.asarray(S, np.float64) ** 2, axis=(-2, -1))


def decaying(seed, *, ratio, shape=(24, 31), batch=(3,), dtype=jnp.float32):
    """Matrices with singular values ratio^i."""
    return jnp.asarray(matrices_of_spectrum(seed, ratio ** np.arange(min(shape)), *shape, batch), dtype)


@METHODS
@SHAPES
@pytest.mark.parametrize("rank", (1, 4, 9))
def test_error_equals_the_tail_of_the_spectrum(method, shape, rank):
    """‖S − S_r‖² = Σ_{i>r} σ_i², and S_r has no more than r directions."""
    S = decaying(0, ratio=0.8, shape=shape)
    S_r = traced(S, rank, method=method, max_rank=9).state
    tail = np.sum(0.8 ** (2 * np.arange(rank, 24)))
    np.testing.assert_allclose(energy(S - S_r), tail, atol=1e-5 * energy(S).max(), rtol=0)
    assert np.linalg.svd(S_r, compute_uv=False)[:, rank:].max() < 1e-6


@EXACT
@SHAPES
@pytest.mark.parametrize("rank", (1, 4))
def test_exact_methods_give_the_best_approximation(method, shape, rank, dtype):
    S = decaying(1, ratio=0.5, shape=shape, dtype=dtype)
    out = traced(S, rank, method=method)
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
    S = jnp.asarray(matrices_of_spectrum(2, sigma, 128, 131), jnp.float32)
    out = known(S, rank, method="subspace")
    np.testing.assert_allclose(energy(out.state), np.sum(sigma[:rank] ** 2), rtol=1e-5)


@pytest.mark.parametrize("decades", (2, 4, 6, 8))
@pytest.mark.parametrize("rank", (12, 32))
def test_wide_spectra_keep_the_basis_orthonormal_and_the_tail_small(decades, rank):
    """A single Cholesky-QR loses orthogonality at a condition of 1e4 and fails at 1e5."""
    sigma = np.geomspace(1, 10.0**-decades, 128)
    S = jnp.asarray(matrices_of_spectrum(2, sigma, 128, 131), jnp.float32)
    out = known(S, rank, method="subspace")
    U = np.asarray(out.basis[:, :rank], np.float64)
    assert np.linalg.norm(U.T @ U - np.eye(rank)) < 1e-5
    assert energy(S - out.state) < 1.01**2 * np.sum(sigma[rank:] ** 2)


@METHODS
@SHAPES
def test_full_rank_is_the_identity_bit_for_bit(method, shape):
    S = decaying(4, ratio=0.8, shape=shape)
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
    S = decaying(6, ratio=0.6)
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
    S = decaying(8, ratio=0.6)
    assert known(S, 6).rounds >= 1
    assert known(S, 7).rounds == 0
    assert traced(S, 6).rounds == 0
    assert traced(S, 6, max_rank=6).rounds >= 1


@METHODS
def test_state_of_a_bf16_state_is_f32(method):
    S = decaying(9, ratio=0.6, dtype=jnp.bfloat16)
    out = known(S, 4, method=method)
    assert out.state.dtype == jnp.float32
    assert energy(out.state) == pytest.approx(energy(truncated(S, 4)), rel=1e-5)


@METHODS
def test_every_product_is_of_the_highest_precision(method):
    S = decaying(10, ratio=0.6)
    precisions = dot_precisions(jax.grad(lambda S: truncate(S, 4, method=method).sum()), S)
    assert len(precisions) >= 6
    assert set(precisions) == {(HIGHEST, HIGHEST)}


@METHODS
def test_every_head_has_its_own_rank(method):
    """Ranks known, traced, and one state at a time under vmap."""
    S, ranks = decaying(11, ratio=0.5, batch=(2, 3)), np.array([[1, 3, 24], [2, 4, 1]])
    mapped = jax.vmap(jax.vmap(partial(truncate, method=method, max_rank=4)))
    for found in (
        jax.jit(lambda S: truncate(S, ranks, method=method))(S),
        traced(S, ranks, method=method, max_rank=4).state,
        jax.jit(mapped)(S, ranks),
    ):
        for at, rank in np.ndenumerate(ranks):
            expected = truncated(S[at], rank)
            assert relative_error(found[at], expected) < 2e-3  # 3e-6 of the energy missed turns directions by its root
            np.testing.assert_allclose(energy(found[at]), energy(expected), rtol=1e-5)


@pytest.mark.parametrize(
    "rank", [3, np.int64(3), np.array(3), np.full((2, 3), 3, np.int64), jnp.full(3, 3)], ids=lambda r: type(r).__name__
)
def test_integers_of_any_kind_are_ranks(rank):
    S = decaying(13, ratio=0.5, batch=(2, 3))
    assert relative_error(truncate(S, rank, method="eigh"), known(S, 3, method="eigh").state) < 1e-6


@pytest.mark.parametrize(
    ("rank", "options", "message"),
    [
        (0, {}, r"rank 0 is outside of 1 to min\(K, V\) = 24"),
        (-1, {}, r"rank -1 is outside of 1 to min\(K, V\) = 24"),
        (25, {}, r"rank 25 is outside of 1 to min\(K, V\) = 24"),
        (np.array([3, 0, 24]), {}, r"rank 0 is outside of 1 to min\(K, V\) = 24"),
        (5, {"max_rank": 4}, r"rank 5 is above max_rank = 4"),
        (1, {"max_rank": 25}, r"max_rank is 25; expected 1 to min\(K, V\) = 24"),
        (1, {"max_rank": 0}, r"max_rank is 0; expected 1 to min\(K, V\) = 24"),
        (np.array([2.0]), {}, "dtype float64; expected integers"),
        (np.array([True]), {}, "dtype bool; expected integers"),
        (True, {}, "dtype bool; expected integers"),
    ],
    ids=str,
)
def test_wrong_ranks_are_named(rank, options, message):
    with pytest.raises(ValueError, match=message):
        truncate(decaying(14, ratio=0.5), rank, **options)


@METHODS
def test_full_ranks_are_free_of_max_rank(method):
    S = decaying(15, ratio=0.5)
    np.testing.assert_array_equal(known(S, 24, method=method, max_rank=2).state, S)


@METHODS
def test_traced_wrong_ranks_give_nan_in_their_state_alone(method):
    S = decaying(16, ratio=0.5, batch=(6,))
    out = traced(S, jnp.array([0, 3, -1, 5, 25, 24]), method=method, max_rank=4).state
    np.testing.assert_array_equal(jnp.isnan(out).all((1, 2)), [True, False, True, True, True, False])
    assert jnp.isfinite(out[jnp.array([1, 5])]).all()


@METHODS
@pytest.mark.parametrize("scale", (1e-20, 1e20))
def test_states_of_any_scale_truncate_alike(method, scale):
    S = decaying(17, ratio=0.5)
    assert relative_error(known(scale * S, 4, method=method).state / scale, known(S, 4, method=method).state) < 1e-5


@METHODS
@SHAPES
def test_states_of_low_rank_are_kept_whole(method, shape):
    """Ranks 0, 1, 3 and 4 cut at 4, beside a state of full rank: each is itself, and none is touched by the others."""
    rng = np.random.default_rng(18)
    low = [matrices_of_spectrum(19, np.ones(n), *shape) for n in (1, 3, 4)]
    S = jnp.asarray(np.stack([rng.standard_normal(shape), np.zeros(shape), *low]), jnp.float32)
    out = known(S, 4, method=method)
    for a, b in zip(out.state[1:], S[1:], strict=True):
        assert relative_error(a, b) < 1e-5
    np.testing.assert_array_equal(out.state[1], 0)
    np.testing.assert_allclose(energy(out.state[0]), energy(truncated(S[0], 4)), rtol=1e-5)
    assert jnp.isfinite(out.basis).all()
    assert jnp.isfinite(out.missed).all()


@METHODS
def test_states_of_unit_vectors_keep_the_largest(method):
    """σ = 6 … 1 on coordinate axes, where a random start is the only source of other directions."""
    S = np.zeros((3, 24, 31), np.float32)
    for b in range(3):
        S[b, np.arange(6) + 9 * b, np.arange(6)] = [6, 5, 4, 3, 2, 1]
    assert relative_error(known(jnp.asarray(S), 4, method=method).state, np.where(S >= 3, S, 0)) < 2e-3


@pytest.mark.parametrize(
    ("method", "faintest", "beside"),
    [("subspace", 1e-2, 1.03), ("eigh", 1e-2, 1.01), ("eigh", 1e-3, 1.3), ("svd", 1e-5, 1.01)],
)
def test_ranks_in_the_faint_part_leave_little_more_than_the_least(method, faintest, beside):
    """Of what each method says of itself in f32; the tail is beside the last sigma kept, whatever sigma_1 is."""
    sigma = np.logspace(0, -6.2, 24)
    S = matrices_of_spectrum(41, sigma, 24, 31, (4,)).astype(np.float32)
    rank = int((sigma > faintest).sum())
    left = [
        np.linalg.norm(S - np.asarray(x, np.float64), axis=(1, 2))
        for x in (known(S, rank, method=method).state, truncated(S, rank))
    ]
    assert (left[0] < beside * left[1]).all()


@METHODS
@pytest.mark.parametrize("shape", [(1, 7), (7, 1)])
def test_thin_states(method, shape):
    S = decaying(20, ratio=0.5, shape=shape)
    assert relative_error(known(S, 1, method=method).state, truncated(S, 1)) < 1e-5


@METHODS
@pytest.mark.parametrize("bad", (np.nan, np.inf))
def test_a_state_that_is_not_finite_stays_alone(method, bad):
    S = decaying(21, ratio=0.8)
    good = known(S, 4, method=method)
    out = known(S.at[1, 2, 3].set(bad), 4, method=method)
    assert jnp.isnan(out.state[1]).any()
    assert relative_error(out.state[::2], good.state[::2]) < 2e-3
    np.testing.assert_allclose(energy(out.state[::2]), energy(good.state[::2]), rtol=1e-5)
    assert out.rounds <= good.rounds


def turned(seed, angle, shape=(64, 71)):
    """A matrix whose leading 20 singular directions lie ``angle`` from the first 20 of a fixed basis, σ = 3 … 1, 0.1."""
    U, W = (orthonormal_columns(seed, (n, 64)).copy() for n in shape)
    U[:, :20], U[:, 20:40] = (
        np.cos(angle) * U[:, :20] + np.sin(angle) * U[:, 20:40],
        np.cos(angle) * U[:, 20:40] - np.sin(angle) * U[:, :20],
    )
    return (U * np.r_[np.linspace(3, 1, 20), np.full(44, 0.9)]) @ W.T


def test_a_near_basis_saves_rounds_and_changes_no_result():
    first, second = (jnp.asarray(turned(22, angle), jnp.float32) for angle in (0.0, 0.01))
    cold = known(second, 12, method="subspace")
    warm = known(second, 12, method="subspace", basis=known(first, 12, method="subspace").basis)
    assert warm.rounds < cold.rounds
    np.testing.assert_allclose(energy(warm.state), energy(truncated(second, 12)), rtol=1e-5)
    assert relative_error(warm.state, cold.state) < 5e-3


@pytest.mark.parametrize("axes", ("random", "coordinates"))
def test_a_basis_orthogonal_to_the_leading_directions_finds_them_all_the_same(axes, dtype):
    """The second state is large where the first was zero: none of its leading directions is in the first's basis."""
    U, W = (np.eye(n, 64) if axes == "coordinates" else orthonormal_columns(23, (n, 64)) for n in (64, 71))
    before = np.r_[np.linspace(2, 1, 20), np.zeros(44)]
    after = np.r_[np.full(20, 0.1), np.full(12, 10.0), np.full(32, 1e-3)]
    first, second = (jnp.asarray((U * sigma) @ W.T, dtype) for sigma in (before, after))
    warm = known(second, 12, method="subspace", basis=known(first, 12, method="subspace").basis)
    np.testing.assert_allclose(energy(warm.state), 12 * 100.0, rtol=1e-5)


def test_a_basis_of_zeros_starts_anew():
    """What a zero state leaves behind."""
    zero = known(jnp.zeros((64, 71)), 12, method="subspace")
    S = decaying(24, ratio=0.9, shape=(64, 71), batch=())
    out = known(S, 12, method="subspace", basis=zero.basis)
    np.testing.assert_allclose(energy(out.state), energy(truncated(S, 12)), rtol=1e-5)


DEGENERACIES = {
    "gaps": [9, 7, 5, 3, 2, 1, 0.5],
    "kept degenerate": [9, 9, 9, 3, 2, 1, 0.5],
    "discarded degenerate": [9, 8, 7, 3, 3, 3, 3],
    "both degenerate": [9, 9, 9, 3, 3, 3, 3],
    "rank-deficient at r": [9, 8, 7],
    "kept degenerate, rest zero": [9, 9, 9],
}


@cache
def jvp(method):
    """(S, dS, rank) -> dS_r, for ranks up to 3 and the full one."""
    f = partial(truncate, method=method, max_rank=3)
    return jax.jit(lambda S, dS, rank: jax.jvp(lambda S: f(S, rank), [S], [dS])[1])


@cache
def vjp(method):
    """(S, cotangent of S_r, rank) -> cotangent of S, for ranks up to 3 and the full one."""
    f = partial(truncate, method=method, max_rank=3)
    return jax.jit(lambda S, cotangent, rank: jax.vjp(lambda S: f(S, rank), S)[1](cotangent)[0])


def near_degenerate(spectrum, shape):
    S = jnp.asarray(matrices_of_spectrum(25, DEGENERACIES[spectrum], *shape, (3,)))
    return S, *(jnp.asarray(np.random.default_rng(seed).standard_normal(S.shape)) for seed in (26, 27))


@METHODS
@SHAPES
@pytest.mark.parametrize("spectrum", DEGENERACIES)
def test_derivative_equals_central_differences_of_the_exact_truncation(method, shape, spectrum, x64):
    S, dS, cotangent = near_degenerate(spectrum, shape)
    step = 1e-5
    expected = (truncated(S + step * dS, 3) - truncated(S - step * dS, 3)) / (2 * step)
    assert relative_error(jvp(method)(S, dS, 3), expected) < 1e-7
    pulled = vjp(method)(S, cotangent, 3)
    norms = np.linalg.norm(cotangent) * np.linalg.norm(expected)
    assert jnp.vdot(pulled, dS) == pytest.approx(np.vdot(cotangent, expected), abs=1e-7 * norms)


@METHODS
@pytest.mark.parametrize("spectrum", DEGENERACIES)
def test_derivative_in_f32_equals_that_in_f64(method, spectrum):
    with jax.enable_x64(True):
        S, dS, _ = near_degenerate(spectrum, (24, 31))
        expected = np.asarray(jvp(method)(S, dS, 3))
    S, dS = (jnp.asarray(np.asarray(a), jnp.float32) for a in (S, dS))
    assert relative_error(jvp(method)(S, dS, 3), expected) < 1e-5


@METHODS
@SHAPES
@pytest.mark.parametrize("scale", (1e-20, 1.0, 1e20))
def test_gradient_of_half_the_energy_is_the_truncated_state(method, shape, scale):
    """d(½ Σ_{i≤r} σ_i²) / dS = S_r, at every scale: the cotangent of S_r is S_r itself."""
    S = decaying(28, ratio=0.5, shape=shape)
    S_r = truncated(S, 3)
    assert relative_error(vjp(method)(scale * S, jnp.asarray(S_r, jnp.float32), 3), S_r) < 1e-5


@METHODS
@SHAPES
def test_derivative_of_full_rank_is_the_identity(method, shape):
    S, dS = decaying(29, ratio=0.5, shape=shape), decaying(30, ratio=0.9, shape=shape)
    np.testing.assert_array_equal(jvp(method)(S, dS, 24), dS)


@pytest.mark.parametrize(
    ("sigma", "gap"),
    [
        ([3, 2, 1, 0.5], True),
        ([3, 3, 1, 1], True),
        ([3, 2], True),
        ([1, 1e-3, 9e-4], True),
        ([3, 2, 2, 1], False),
        ([3], False),
        ([0], False),
    ],
    ids=str,
)
def test_has_gap_says_where_a_derivative_exists(sigma, gap, dtype):
    S = jnp.asarray(matrices_of_spectrum(31, sigma, 24, 31), dtype)
    assert has_gap(S, 2) == gap
    assert has_gap(S, 24)


def test_faint_directions_have_their_derivative_in_f32(x64):
    """At sigma_12 = 4e-3 sigma_1 the Gram matrix of an f32 state no longer tells neighbours apart; an SVD does."""
    S = matrices_of_spectrum(36, 0.6 ** np.arange(24), 24, 31)
    dS = np.random.default_rng(37).standard_normal(S.shape)
    exact = jax.jvp(lambda S: truncate(S, 12), (jnp.asarray(S),), (jnp.asarray(dS),))[1]
    found = jax.jvp(lambda S: truncate(S, 12), *(((jnp.asarray(a, jnp.float32),)) for a in (S, dS)))[1]
    assert found.dtype == jnp.float32
    assert relative_error(found, exact) < 1e-2


def test_second_derivatives_equal_central_differences_of_the_first(x64):
    S = jnp.asarray(matrices_of_spectrum(38, [3, 2, 1, 0.5, 0.2], 5, 7))
    direction = jnp.asarray(np.random.default_rng(39).standard_normal(S.shape))
    gradient = jax.grad(lambda S: jnp.sum(jnp.sin(truncate(S, 2))))
    found = jax.jvp(gradient, (S,), (direction,))[1]
    h = 1e-5
    expected = (gradient(S + h * direction) - gradient(S - h * direction)) / (2 * h)
    assert jnp.linalg.norm(expected) > 0.1
    assert relative_error(found, expected) < 1e-6


def test_spectra_too_flat_to_converge_are_cut_exactly():
    S = jnp.asarray(matrices_of_spectrum(40, 0.999 ** np.arange(48), 48, 50), jnp.float32)
    out = known(S, 5, method="subspace")
    assert out.rounds == MAX_ROUNDS + 1
    np.testing.assert_allclose(energy(out.state), energy(truncated(S, 5)), rtol=1e-5)


@METHODS
def test_without_a_gap_the_derivative_is_the_projection_of_the_tangent(method, x64):
    """P dS: it stays in a subspace of dimension 2, which holds the direction of S above the tie."""
    sigmas = [[3, 2, 2, 1], [3], [0]]
    S = jnp.asarray(np.stack([matrices_of_spectrum(32, sigma, 24, 31) for sigma in sigmas]))
    dS = jnp.asarray(np.random.default_rng(33).standard_normal(S.shape))
    forward, reverse = jvp(method)(S, dS, 2), vjp(method)(S, dS, 2)
    U = np.linalg.svd(forward)[0][..., :2]
    P = U @ np.swapaxes(U, -1, -2)
    np.testing.assert_array_equal(np.linalg.matrix_rank(forward, tol=1e-9), 2)
    assert relative_error(forward, P @ dS) < 1e-10
    assert relative_error(reverse, P @ dS) < 1e-10
    above = np.linalg.svd(S[:2])[0][..., :1]
    assert relative_error(P[:2] @ above, above) < 1e-10


@METHODS
@pytest.mark.parametrize("sigma", [(3, 2, 1, 1), (2, 2, 1, 0.5), (2, 2, 2, 2), (0, 0, 0, 0)], ids=str)
def test_derivatives_are_finite_at_diagonal_matrices(method, sigma):
    """Where reverse mode through an SVD or an eigh is NaN."""
    S = jnp.asarray(np.diag(sigma) @ np.eye(4, 5), jnp.float32)
    weights = jnp.asarray(np.random.default_rng(34).standard_normal((4, 5)), jnp.float32)
    for rank in (1, 2, 3):
        assert jnp.isfinite(vjp(method)(S, weights, rank)).all()
    assert jnp.isfinite(jax.grad(lambda S: jnp.sum(singular_values(S)))(S)).all()


@METHODS
@pytest.mark.timeout(120, method="thread")
def test_all_layers_in_one_program_do_not_deadlock(method):
    """18 layers of 16 heads, stacked, with their derivative; as many LAPACK calls at once as cores would hang XLA's CPU."""
    S = [decaying(seed, ratio=0.5, shape=(32, 40), batch=(1, 16)) for seed in range(18)]

    @jax.jit
    @jax.grad
    def gradient(S):
        return 0.5 * jnp.sum(truncate(jnp.stack(S), 3, method=method) ** 2)

    for a, b in zip(gradient(S), S, strict=True):
        assert relative_error(a, truncated(b, 3)) < 2e-3
