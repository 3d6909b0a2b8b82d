"""Truncation of states to their leading singular directions, and its derivative.

    S_r = U_r U_r^T S            U_r: the r left singular vectors (key directions) of the K x V state S

Three ways to U_r: subspace iteration (fast, batched, warm-started), eigh of the Gram matrix S S^T, and SVD. Each takes any
leading axes and a traced rank for every state, and stacks all of them into one call: several independent batched LAPACK
calls in one program can deadlock a CPU with few cores.

Subspace iteration applies S and S^T in two half steps, each followed by an orthonormalisation (shifted Cholesky-QR,
Fukaya, Kannan, Nakatsukasa, Yamamoto, Yanagisawa, arXiv 1809.11085); applying S S^T at once would square the condition
number and break f32. A Rayleigh-Ritz step gives the directions. After each round the energy still missed by the kept
directions is estimated from the residuals of the Ritz pairs, and rounds go on until it is below ``TOLERANCE`` of the energy
kept, so the spectrum decides their number.

The derivative of S -> S_r is that of the spectral projector P (Daleckii-Krein), with gaps between kept and discarded
eigenvalues alone, so equal singular values within either block are no obstacle:

    d(P S) = P dS + dP S,     dP = Q (F * (Q^T (dS S^T + S dS^T) Q)) Q^T,     F_ij = 1 / (lambda_i - lambda_j)

for i kept and j discarded (and mirrored), 0 within a block; Q, lambda: eigh of S S^T. Without a gap between r and r + 1
the derivative does not exist: where lambda_r - lambda_{r+1} is at most ``GAP_TOLERANCE`` eps lambda_1, the resolution of
eigh, the projector's part is dropped and P dS alone remains. :class:`Truncation` says for which states.
"""

from functools import partial
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxdelta.dims import HIGHEST, Matrices, accumulation_dtype, is_traced

Method = Literal["subspace", "eigh", "svd"]

TOLERANCE = 3e-6  # energy missed over energy kept at which rounds stop
GAP_TOLERANCE = 100.0  # in units of eps * lambda_1
MAX_ROUNDS = 64
OVERSAMPLING = 8  # directions carried beyond max_rank, at least


class Truncation(NamedTuple):
    """What a truncation gives: the state, and how it was found.

    Attributes:
        state: S_r, in the dtype of the state given (f32 or wider).
        basis: Float[*batch K Q], approximate left singular vectors in descending order; starts the next truncation.
        missed: Float[*batch], estimate of the energy missed over the energy kept, 0 for the exact methods.
        smooth: Bool[*batch], whether the derivative exists: a gap between sigma_r and sigma_{r+1}, or full rank.
        rounds: Int[], rounds of subspace iteration run, 0 for the exact methods.
    """

    state: Array
    basis: Array
    missed: Array
    smooth: Array
    rounds: Array


def truncate(
    S: Matrices,
    rank: int | Int[Array, "..."] | np.ndarray,
    *,
    method: Method | None = None,
    max_rank: int | None = None,
) -> Matrices:
    """Keep the leading ``rank`` singular directions of every K x V matrix of ``S``.

    Args:
        S: states, any leading axes.
        rank: 1 .. min(K, V), one or an array (traced or not) broadcast over the leading axes. min(K, V) is the identity.
        method: None takes subspace iteration where ``max_rank`` is known and at most a quarter of min(K, V), else eigh.
        max_rank: static bound of ``rank``, from which the width of the subspace follows; ranks of min(K, V) are free of
            it. Default: the largest rank below min(K, V) where ranks are known, else min(K, V).

    Returns:
        The truncated states. Differentiable in both modes by the derivative above. A traced rank that breaks its bounds
        gives NaN, since a compiled function cannot raise.

    Raises:
        ValueError: a rank, known outside of jit, is below 1 or above min(K, V), or exceeds ``max_rank``.
    """
    return truncation(S, rank, method=method, max_rank=max_rank).state


def truncation(
    S: Matrices,
    rank: int | Int[Array, "..."] | np.ndarray,
    *,
    method: Method | None = None,
    max_rank: int | None = None,
    basis: Float[Array, "*batch K Q"] | None = None,
) -> Truncation:
    """:func:`truncate` with its basis and what is known of it; ``basis`` of an earlier call starts the subspace iteration.

    Only ``state`` carries a derivative.
    """
    full = min(S.shape[-2:])
    max_rank = largest_rank(rank, full) if max_rank is None else max_rank
    check_ranks(rank, full, max_rank)
    method = method or choose_method(max_rank, full)
    if method not in get_args(Method):
        raise ValueError(f"method is {method!r}; expected one of {', '.join(get_args(Method))}")
    rank = jnp.broadcast_to(jnp.asarray(rank, jnp.int32), S.shape[:-2])
    S = S.astype(accumulation_dtype(S))
    if basis is None:
        basis = initial_basis(S.shape, max_rank, method, S.dtype)
    return _truncation(method, max_rank, S, rank, basis)


def largest_rank(rank, full: int) -> int:
    """The largest of known ranks that is below ``full``; ``full`` where ranks are traced."""
    if is_traced(rank):
        return full
    ranks = np.asarray(rank)
    return int(ranks[ranks < full].max(initial=1))


def choose_method(max_rank: int, full: int) -> Method:
    """Subspace iteration where the subspace is narrow, eigh of the Gram matrix elsewhere."""
    return "subspace" if 4 * max_rank <= full else "eigh"


def check_ranks(rank, full: int, max_rank: int) -> None:
    """Raise ValueError for known ranks outside of 1 .. full, or above ``max_rank`` and not full."""
    if not 1 <= max_rank <= full:
        raise ValueError(f"max_rank is {max_rank}; expected 1 to min(K, V) = {full}")
    if is_traced(rank):
        return
    ranks = np.asarray(rank)
    if not np.issubdtype(ranks.dtype, np.integer):
        raise ValueError(f"ranks are of dtype {ranks.dtype}; expected integers")
    wrong = ranks[(ranks < 1) | (ranks > full)]
    if wrong.size:
        raise ValueError(f"rank {wrong.flat[0]} is outside of 1 to min(K, V) = {full}")
    wrong = ranks[(ranks > max_rank) & (ranks < full)]
    if wrong.size:
        raise ValueError(f"rank {wrong.flat[0]} is above max_rank = {max_rank}")


def subspace_width(max_rank: int, full: int, method: Method) -> int:
    """How many directions a basis holds: an oversampled ``max_rank``, or all of them for the exact methods."""
    if method != "subspace":
        return full
    return min(full, max_rank + max(OVERSAMPLING, max_rank // 4))


def initial_basis(shape: tuple[int, ...], max_rank: int, method: Method, dtype) -> Array:
    """A fixed random start, [*batch, K, Q], the same for every state."""
    K, V = shape[-2:]
    Q = subspace_width(max_rank, min(K, V), method)
    return jnp.broadcast_to(_random_columns(K, Q, dtype), (*shape[:-2], K, Q))


def _random_columns(K: int, Q: int, dtype) -> Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal((K, Q)) / np.sqrt(K), dtype)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _truncation(method: Method, max_rank: int, S: Array, rank: Array, basis: Array) -> Truncation:
    K, V = S.shape[-2:]
    full = min(K, V)
    scale = _scale(S)
    A = S / scale
    if method == "subspace":
        U, energies, missed, rounds = _subspace(A, rank, basis)
    else:
        U, energies = _left_svd(A) if method == "svd" else _gram_eigh(A)
        U, energies = U[..., :full], energies[..., :full]
        missed, rounds = jnp.zeros(S.shape[:-2], S.dtype), jnp.zeros((), jnp.int32)

    kept = U * (jnp.arange(U.shape[-1]) < rank[..., None])[..., None, :]
    state = _mm(kept, _mm(kept, S, transpose_a=True))
    is_full = rank == full
    state = jnp.where(is_full[..., None, None], S, state)
    valid = (rank >= 1) & ((rank <= max_rank) | is_full)
    state = jnp.where(valid[..., None, None], state, jnp.nan)

    smooth = is_full | _has_gap(energies, rank)
    return Truncation(state, U, jnp.where(is_full, 0, missed), smooth, rounds)


@_truncation.defjvp
def _truncation_jvp(method, max_rank, primals, tangents):
    S, rank, basis = primals
    dS = tangents[0]
    out = _truncation(method, max_rank, S, rank, basis)

    K, V = S.shape[-2:]
    scale = _scale(S)
    A = jax.lax.stop_gradient(S / scale)
    Q, lam = _gram_eigh(A)
    kept = jnp.arange(K) < rank[..., None]
    pair = kept[..., :, None] & ~kept[..., None, :]
    difference = lam[..., :, None] - lam[..., None, :]
    pair &= _has_gap(lam, rank)[..., None, None]
    F = jnp.where(pair, 1 / jnp.where(pair, difference, 1), 0)
    F = F + jnp.swapaxes(F, -1, -2)

    QdS, QA = _mm(Q, dS, transpose_a=True), _mm(Q, A, transpose_a=True)
    dM = _mm(QdS, QA, transpose_b=True)
    dM = dM + jnp.swapaxes(dM, -1, -2)
    moved = _mm(Q, jnp.where(kept[..., None], QdS, 0) + _mm(F * dM, QA))
    is_full = (rank == min(K, V))[..., None, None]
    d_state = jnp.where(is_full, dS, moved)
    none = np.zeros((), jax.dtypes.float0)
    return out, Truncation(
        state=d_state,
        basis=jnp.zeros_like(out.basis),
        missed=jnp.zeros_like(out.missed),
        smooth=np.broadcast_to(none, out.smooth.shape),
        rounds=none,
    )


def _has_gap(lam: Array, rank: Array) -> Array:
    """Whether lambda_r - lambda_{r+1} stands above the rounding of eigh. Beyond the last, lambda is 0."""
    lam = jnp.pad(lam, [(0, 0)] * (lam.ndim - 1) + [(0, 1)])
    at = jnp.clip(rank, 1, lam.shape[-1] - 1)[..., None]
    gap = jnp.take_along_axis(lam, at - 1, -1) - jnp.take_along_axis(lam, at, -1)
    return gap[..., 0] > GAP_TOLERANCE * jnp.finfo(lam.dtype).eps * jnp.abs(lam[..., 0])


def _scale(S: Array) -> Array:
    """The largest absolute entry of each matrix, 1 for a zero matrix: states of 1e-20 and of 1e20 truncate alike."""
    largest = jax.lax.stop_gradient(jnp.max(jnp.abs(S), axis=(-2, -1), keepdims=True))
    return jnp.where(largest > 0, largest, 1)


def _gram_eigh(A: Array) -> tuple[Array, Array]:
    """Left singular vectors and squared singular values, descending."""
    lam, Q = jnp.linalg.eigh(_mm(A, A, transpose_b=True))
    return Q[..., ::-1], lam[..., ::-1]


def _left_svd(A: Array) -> tuple[Array, Array]:
    U, sigma, _ = jnp.linalg.svd(A, full_matrices=False)
    return U, sigma * sigma


def _subspace(A: Array, rank: Array, basis: Array) -> tuple[Array, Array, Array, Array]:
    """Left Ritz vectors [*batch K Q], their energies, the estimate of the energy missed, and the rounds it took."""
    K, Q = basis.shape[-2:]
    index = jnp.arange(Q)
    kept = index < rank[..., None]
    # A direction of an earlier basis that has died out, and the oversampled ones, start anew.
    fresh = _random_columns(K, Q, A.dtype)
    alive = (jnp.sum(basis * basis, axis=-2) > 0.5) & (index < Q - OVERSAMPLING // 2)
    start = jnp.where(alive[..., None, :], basis, fresh)

    def one_round(Y):
        X = _orthonormalised(_mm(A, Y, transpose_a=True))
        Y = _orthonormalised(_mm(A, X))
        B = _mm(A, Y, transpose_a=True)
        lam, W = jnp.linalg.eigh(_mm(B, B, transpose_a=True))
        lam, W = lam[..., ::-1], W[..., ::-1]
        U = _mm(Y, W)
        residual = _mm(A, _mm(B, W)) - U * lam[..., None, :]
        residual = jnp.sqrt(jnp.sum(residual * residual, axis=-2))
        return U, lam, _missed(lam, residual, kept)

    def unfinished(carry):
        rounds, _, _, missed = carry
        return (rounds < MAX_ROUNDS) & jnp.any((missed > TOLERANCE) & (rank < min(A.shape[-2:])))

    def body(carry):
        rounds, U, _, _ = carry
        return (rounds + 1, *one_round(U))

    first = (jnp.ones((), jnp.int32), *one_round(start))
    rounds, U, lam, missed = jax.lax.while_loop(unfinished, body, first)
    return U, lam, missed, rounds


def _missed(lam: Array, residual: Array, kept: Array) -> Array:
    """Energy that the kept Ritz directions miss, over the energy that they hold.

    A Ritz value is off by at most its residual, and to second order by residual^2 over its distance to what lies outside
    of the subspace, here that to the smallest Ritz value.
    """
    distance = jnp.maximum(lam - lam[..., -1:], 0)
    quadratic = residual * residual / jnp.where(distance > 0, distance, 1)
    bound = jnp.where(distance > 0, jnp.minimum(quadratic, residual), residual)
    floor = 4 * jnp.finfo(lam.dtype).eps * lam[..., :1]
    missed = jnp.sum(jnp.where(kept & (bound > floor), bound, 0), axis=-1)
    energy = jnp.sum(jnp.where(kept, lam, 0), axis=-1)
    return missed / jnp.where(energy > 0, energy, 1)


def _orthonormalised(Y: Array) -> Array:
    """Orthonormal columns with the span of Y, by Cholesky-QR three times with a falling shift.

    The last shift is at rounding level: a rank-deficient Y gets columns shorter than one, not NaN, and a zero one zeros.
    """
    eps = float(jnp.finfo(Y.dtype).eps)
    for shift in (256 * eps, 8 * eps, eps):
        G = _mm(Y, Y, transpose_a=True)
        Q = G.shape[-1]
        level = jnp.trace(G, axis1=-2, axis2=-1)[..., None, None] / Q
        level = jnp.where(level > 0, level, 1)
        R = jnp.linalg.cholesky(G + shift * level * jnp.eye(Q, dtype=Y.dtype))
        Y = jax.lax.linalg.triangular_solve(R, Y, left_side=False, lower=True, transpose_a=True)
    return Y


def _mm(a: Array, b: Array, *, transpose_a: bool = False, transpose_b: bool = False) -> Array:
    subscripts = f"...{'ji' if transpose_a else 'ij'},...{'kj' if transpose_b else 'jk'}->...ik"
    return jnp.einsum(subscripts, a, b, precision=HIGHEST)
