"""Truncation of states to their leading singular directions, and its derivative.

    S_r = U_r U_r^T S            U_r: the r left singular vectors (key directions) of the K x V state S

U_r comes from subspace iteration (fast, batched, warm-started), from eigh of the Gram matrix S S^T, or from an SVD. Each
takes any leading axes and a traced rank for every state, all in one call: several independent batched LAPACK calls in one
program can deadlock a CPU with few cores.

Subspace iteration applies S and S^T in two half steps, each followed by an orthonormalisation (shifted Cholesky-QR,
Fukaya, Kannan, Nakatsukasa, Yamamoto, Yanagisawa, arXiv 1809.11085); applying S S^T at once would square the condition
number and break f32. A Rayleigh-Ritz step gives the directions. After each round, the energy that the kept directions still
miss is estimated from the residuals of the Ritz pairs; iteration stops when it is at most ``TOLERANCE`` of the energy kept.
If a batch is not there after ``MAX_ROUNDS`` rounds, as with flat spectra, eigh truncates it.

The derivative of S -> S_r uses that of the spectral projector P (Daleckii-Krein). Only gaps between kept and discarded
eigenvalues enter, so equal singular values within either block do no harm:

    d(P S) = P dS + dP S,     dP = Q (F * (Q^T (dS S^T + S dS^T) Q)) Q^T,     F_ij = 1 / (sigma_i^2 - sigma_j^2)

for i kept and j discarded, F_ji = F_ij, and 0 within a block. Q and sigma come from an SVD, because the Gram matrix in f32
loses all sigma below 3e-4 sigma_1. Without a gap between sigma_r and sigma_{r+1} the derivative does not exist: where the
gap is at most ``GAP_TOLERANCE`` eps sigma_1, the term dP S is dropped and P dS remains. :func:`has_gap` tells where it
exists.
"""

from functools import partial
from typing import Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Shaped

from jaxdelta.dims import HIGHEST, Matrices, accumulation_dtype, along_last, first, is_traced, keeps_f64

Method = Literal["subspace", "eigh", "svd"]
Rank: TypeAlias = int | np.integer | np.ndarray | Shaped[Array, "..."]  # whole numbers, checked at run time

TOLERANCE = 3e-6  # energy missed over energy kept at which rounds stop
GAP_TOLERANCE = 100.0  # in units of eps * sigma_1
MAX_ROUNDS = 16
OVERSAMPLING = 8  # least number of directions carried beyond max_rank
PROBES = 4  # of these are random, to find directions that the basis lacks


class Truncation(NamedTuple):
    """A truncated state and how it was found.

    Attributes:
        state: S_r, in the dtype of S and at least f32.
        basis: Float[*batch K Q], approximate left singular vectors in descending order; can start the next truncation.
        missed: Float[*batch], estimated energy missed over energy kept; 0 for the exact methods (eigh, svd).
        rounds: Int[], rounds of subspace iteration; 0 for the exact methods, MAX_ROUNDS + 1 where eigh took over.
    """

    state: Array
    basis: Array
    missed: Array
    rounds: Array


@keeps_f64
def truncate(
    S: Matrices,
    rank: Rank,
    *,
    method: Method | None = None,
    max_rank: int | None = None,
) -> Matrices:
    """Keep the leading ``rank`` singular directions of every K x V matrix of ``S``.

    Args:
        S: states [*batch, K, V].
        rank: 1 .. min(K, V), a number or an array (traced or not) that broadcasts over the leading axes. min(K, V) is the
            identity.
        method: None takes subspace iteration where ``max_rank`` is at most a quarter of min(K, V), else eigh.
        max_rank: static bound of ``rank``, which sets the width of the subspace; ranks of min(K, V) may exceed it. None is
            the largest rank below min(K, V), or min(K, V) where ranks are traced.

    Accuracy in f32 by sigma_r / sigma_1 of the last direction kept: ||S - S_r|| relative to the least that any matrix of
    rank r leaves (log-spaced spectra of 32 x 32 and 128 x 128):

        sigma_r / sigma_1    1e-2     1e-3     1e-4     1e-5        error beyond the least, over sigma_1
        subspace             1.01     1.03     2        20          energy missed at most 3e-6 of that kept
        eigh                 1.00     1.08     3        25          1e-3 (an f32 Gram matrix)
        svd                  1.00     1.00     1.00     1.00        2e-6

    Take "svd" for a rank in the faint part of a spectrum, below 1e-3 sigma_1; for f64 states every method is exact there.

    Returns:
        The truncated states, in f32 or wider. First derivatives exist in both modes and are those of the module's text;
        second derivatives go through an SVD and are NaN at equal singular values. A traced rank out of bounds gives NaN,
        because a compiled function cannot raise.

    Raises:
        ValueError: a rank that is not traced is not an integer, is outside 1 .. min(K, V) or exceeds ``max_rank``;
            ``max_rank`` is outside 1 .. min(K, V); or ``method`` is unknown.
    """
    return truncation(S, rank, method=method, max_rank=max_rank).state


def truncation(
    S: Matrices,
    rank: Rank,
    *,
    method: Method | None = None,
    max_rank: int | None = None,
    basis: Float[Array, "*batch K Q"] | None = None,
) -> Truncation:
    """:func:`truncate` with its basis and accuracy; the ``basis`` of an earlier call starts the subspace iteration.

    Only ``state`` has a derivative. The exact methods return as many basis vectors as they are given.

    Raises:
        ValueError: as :func:`truncate`.
    """
    S = jnp.asarray(S)
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
    return _compiled(method, max_rank, S, rank, basis)


def has_gap(S: Matrices, rank: Rank) -> Bool[Array, "*batch"]:
    """Whether the truncation of each matrix to ``rank`` has a derivative: a gap below sigma_r, or full rank."""
    S = jnp.asarray(S)
    rank = jnp.broadcast_to(jnp.asarray(rank, jnp.int32), S.shape[:-2])
    sigma = jnp.linalg.svd(S.astype(accumulation_dtype(S)), compute_uv=False)
    return _gap_at(sigma, rank) | (rank == min(S.shape[-2:]))


def largest_rank(rank, full: int) -> int:
    """The largest rank below ``full``, 1 if there is none; ``full`` where ranks are traced."""
    if is_traced(rank):
        return full
    ranks = np.asarray(rank)
    return int(ranks[ranks < full].max(initial=1))


def choose_method(max_rank: int, full: int) -> Method:
    """Subspace iteration where the subspace is narrow, eigh of the Gram matrix elsewhere."""
    return "subspace" if 4 * max_rank <= full else "eigh"


def check_ranks(rank, full: int, max_rank: int) -> None:
    """Raise ValueError for ranks that are not integers, outside 1 .. full, or above ``max_rank`` and not full.

    Values of traced ranks are not checked.
    """
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
    """Directions of a basis, Q: ``max_rank`` and some more, or all for the exact methods."""
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
        U, missed, rounds = _subspace(A, rank, basis)
    else:
        U = (_svd(A)[0] if method == "svd" else _gram_eigh(A))[..., :full]
        missed, rounds = jnp.zeros(S.shape[:-2], S.dtype), jnp.zeros((), jnp.int32)

    kept = jnp.where(first(rank, U.shape[-1])[..., None, :], U, 0)
    state = _mm(kept, _mm(kept, S, transpose_a=True))
    is_full = rank == full
    state = jnp.where(is_full[..., None, None], S, state)
    valid = (rank >= 1) & ((rank <= max_rank) | is_full)
    state = jnp.where(valid[..., None, None], state, jnp.nan)

    return Truncation(state, U[..., : basis.shape[-1]], jnp.where(is_full, 0, missed), rounds)


@_truncation.defjvp
def _truncation_jvp(method, max_rank, primals, tangents):
    S, rank, basis = primals
    dS = tangents[0]
    out = _truncation(method, max_rank, S, rank, basis)

    K, V = S.shape[-2:]
    A = S / _scale(S)
    Q, sigma, QA = _svd(A)
    kept = first(rank, K)
    pair = kept[..., :, None] & ~kept[..., None, :] & _gap_at(sigma, rank)[..., None, None]
    left, right = sigma[..., :, None], sigma[..., None, :]
    F = jnp.where(pair, 1 / jnp.where(pair, (left - right) * (left + right), 1), 0)
    F = F + jnp.swapaxes(F, -1, -2)

    QdS = _mm(Q, dS, transpose_a=True)
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
        rounds=none,
    )


_compiled = jax.jit(_truncation, static_argnums=(0, 1))  # a call outside jit would compile its loop every time


def _gap_at(sigma: Array, rank: Array) -> Array:
    """Whether sigma_r - sigma_{r+1} exceeds rounding; sigma beyond the last is 0."""
    sigma = jnp.pad(sigma, [(0, 0)] * (sigma.ndim - 1) + [(0, 1)])
    at = jnp.clip(rank, 1, sigma.shape[-1] - 1)[..., None]
    gap = jnp.take_along_axis(sigma, at - 1, -1) - jnp.take_along_axis(sigma, at, -1)
    return gap[..., 0] > GAP_TOLERANCE * jnp.finfo(sigma.dtype).eps * sigma[..., 0]


def _scale(S: Array) -> Array:
    """The largest absolute entry of each matrix, 1 for a zero matrix: states of 1e-20 and of 1e20 truncate alike."""
    largest = jax.lax.stop_gradient(jnp.max(jnp.abs(S), axis=(-2, -1), keepdims=True))
    return jnp.where(largest > 0, largest, 1)


def _gram_eigh(A: Array) -> Array:
    """Left singular vectors [*batch K K], descending."""
    return jnp.linalg.eigh(_mm(A, A, transpose_b=True))[1][..., ::-1]


def _svd(A: Array) -> tuple[Array, Array, Array]:
    """All K left singular vectors Q [*batch K K], their sigma [*batch K] with zeros beyond V, and Q^T A = sigma V^T."""
    K, V = A.shape[-2:]
    Q, sigma, W = jnp.linalg.svd(A, full_matrices=K > V)
    sigma = jnp.pad(sigma, [(0, 0)] * (sigma.ndim - 1) + [(0, K - sigma.shape[-1])])
    QA = jnp.pad(W[..., : min(K, V), :], [(0, 0)] * (W.ndim - 2) + [(0, max(0, K - V)), (0, 0)]) * sigma[..., None]
    return Q, sigma, QA


def _subspace(A: Array, rank: Array, basis: Array) -> tuple[Array, Array, Array]:
    """Left Ritz vectors [*batch K Q], the estimated energy missed, and the number of rounds.

    Residuals do not show directions that the subspace lacks altogether, as after a warm start from a basis orthogonal to
    what was written since. So each round tries random vectors outside the subspace; where one carries more energy than the
    last kept direction, they join the subspace for another round.
    """
    K, Q = basis.shape[-2:]
    kept = first(rank, Q)
    random = _random_columns(K, Q, A.dtype)
    # Vanished directions of an earlier basis are replaced by random ones, and so are the last ones.
    norms = jnp.sum(basis * basis, axis=-2)
    alive = (norms > 0.5) & along_last(jnp.arange(Q) < Q - PROBES, norms)
    start = jnp.where(alive[..., None, :], basis, jnp.broadcast_to(random, basis.shape))

    def one_round(rounds, Y):
        X = _orthonormalised(_mm(A, Y, transpose_a=True))
        Y = _orthonormalised(_mm(A, X))
        B = _mm(A, Y, transpose_a=True)
        lam, W = jnp.linalg.eigh(_mm(B, B, transpose_a=True))
        lam, W = lam[..., ::-1], W[..., ::-1]
        U = _mm(Y, W)
        residual = _mm(A, _mm(B, W)) - U * lam[..., None, :]
        missed = _missed(lam, jnp.sqrt(jnp.sum(residual * residual, axis=-2)), kept)

        probes = jnp.broadcast_to(jnp.roll(random[:, :PROBES], rounds + 1, axis=0), (*U.shape[:-1], min(PROBES, Q)))
        for _ in range(2):  # once more against rounding
            probes = probes - _mm(U, _mm(U, probes, transpose_a=True))
        image = _mm(A, probes, transpose_a=True)
        norms, images = (jnp.sum(x * x, axis=-2) for x in (probes, image))
        outside = jnp.max(images / jnp.where(norms > 0, norms, 1), axis=-1)
        last = jnp.take_along_axis(lam, jnp.clip(rank, 1, Q)[..., None] - 1, -1)[..., 0]
        gain = outside - last
        found = gain > 4 * jnp.finfo(lam.dtype).eps * lam[..., 0]
        energy = jnp.sum(jnp.where(kept, lam, 0), axis=-1)
        missed = missed + jnp.where(found, gain / jnp.where(energy > 0, energy, 1), 0)
        following = jnp.concatenate([U[..., : Q - PROBES], probes], axis=-1) if Q > PROBES else U
        return U, jnp.where(found[..., None, None], following, U), missed

    def far(missed):
        return jnp.any((missed > TOLERANCE) & (rank < min(A.shape[-2:])))

    def unfinished(carry):
        rounds, _, _, missed = carry
        return (rounds < MAX_ROUNDS) & far(missed)

    def body(carry):
        rounds, _, following, _ = carry
        return (rounds + 1, *one_round(rounds, following))

    one = jnp.ones((), jnp.int32)
    rounds, U, _, missed = jax.lax.while_loop(unfinished, body, (one, *one_round(jnp.zeros_like(one), start)))
    return jax.lax.cond(
        far(missed),
        lambda: (_gram_eigh(A)[..., :Q], jnp.zeros_like(missed), rounds + 1),
        lambda: (U, missed, rounds),
    )


def _missed(lam: Array, residual: Array, kept: Array) -> Array:
    """Energy that the kept Ritz directions miss, over the energy that they hold.

    The error of a Ritz value is at most its residual, and to second order residual^2 over its distance to the eigenvalues
    outside the subspace, here taken as the distance to the smallest Ritz value.
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

    The last shift is at rounding level: a rank-deficient Y gives columns shorter than one, not NaN; a zero Y gives zeros.
    """
    eps = float(jnp.finfo(Y.dtype).eps)
    for shift in (256 * eps, 8 * eps, eps):
        G = _mm(Y, Y, transpose_a=True)
        Q = G.shape[-1]
        level = jnp.trace(G, axis1=-2, axis2=-1)[..., None, None] / Q
        level = jnp.where(level > 0, level, 1)
        R = jnp.linalg.cholesky(G + shift * level * jnp.broadcast_to(jnp.eye(Q, dtype=Y.dtype), G.shape))
        Y = jax.lax.linalg.triangular_solve(R, Y, left_side=False, lower=True, transpose_a=True)
    return Y


def _mm(a: Array, b: Array, *, transpose_a: bool = False, transpose_b: bool = False) -> Array:
    subscripts = f"...{'ji' if transpose_a else 'ij'},...{'kj' if transpose_b else 'jk'}->...ik"
    return jnp.einsum(subscripts, a, b, precision=HIGHEST)
