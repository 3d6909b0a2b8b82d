"""Singular directions of states, accurate down to the faint ones.

    S = sum_i u_i (sigma_i v_i)^T,   i = 1 .. min(K, V)          u_i: key directions, K long; v_i: value directions, V long

The spectrum of a carried state spans many orders of magnitude, and f32 does not resolve its faint directions: noise covers
those below 3e-4 sigma_1 in the Gram matrix S S^T and below 1e-5 sigma_1 in an SVD. Here everything runs in f64, whatever
jax's setting, and is rounded once at the end:

    U from eigh(S S^T),   B = U^T S,   sigma_i = |B_i|,   sigma_i v_i = B_i

The Gram matrix is off by about eps sigma_1^2, so directions mix by eps (sigma_1 / sigma)^2. The rows of B show by how much:
they would be orthogonal without mixing. If it exceeds ``MIXED``, the rows below ``FAINT`` sigma_1 are separated again by
the eigh of their own Gram matrix, whose error is relative to the largest of them. No SVD is called: on a GPU it takes many
sweeps of small rotations.

Half a unit in the last place of the state itself moves sigma_i by eps(f32) sigma_1. :func:`below_rounding` tells which
directions of an f32 state cannot be told from its rounding.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Bool, Float, Shaped

from jaxdelta.dims import AnyArray, Matrices, along_last, as_matrices, matmul

FAINT = 1e-3  # of sigma_1; below it a second Gram matrix recovers what the first one lost
FAINTEST = 5e-7  # of sigma_1; directions below may stay mixed
MIXED = 1e-5  # sum of a direction's cosines with the others; the error of sigma is smaller
LOST = 1e-7  # share of a direction's square held by directions below FAINTEST; sigma lacks half of it


class Directions(NamedTuple):
    """A state as the sum of ``U[:, i] right[i]``, the largest sigma first; constants in derivatives.

    Attributes:
        U: Float[*batch K D], left singular vectors (key directions), D = min(K, V).
        sigma: Float[*batch D], descending.
        right: Float[*batch D V], sigma_i v_i^T.
    """

    U: Array
    sigma: Array
    right: Array


def directions(S: Matrices) -> Directions:
    """The singular directions of every K x V matrix of ``S``, in its dtype (f32 or wider).

    Inside a block of equal singular values the vectors are some orthonormal basis of the block.
    """
    return _directions(as_matrices(S))


def scaled(S: Matrices, factors: Shaped[AnyArray, "..."]) -> Matrices:
    """S with singular direction i multiplied by ``factors[..., i]``, which broadcast over the leading axes.

    The derivative takes the directions as constants:

        d scaled = sum_i (factor_i u_i u_i^T dS + d factor_i u_i sigma_i v_i^T)
    """
    S = as_matrices(S)
    factors = jnp.broadcast_to(jnp.asarray(factors, S.dtype), (*S.shape[:-2], min(S.shape[-2:])))
    U, exact = _scaled(S, factors)
    linear = matmul(U, factors[..., None] * matmul(jnp.swapaxes(U, -1, -2), S))
    return linear + jax.lax.stop_gradient(exact - linear)  # products with U in f32 lose the faint directions


def gate_derivatives(
    S: Matrices, G: Float[AnyArray, "R *batch K V"]
) -> tuple[Float[Array, "*batch D"], Float[Array, "R *batch D"]]:
    """sigma of each direction of S, descending, and for each cotangent G = dL/dS the derivative for a gate on it.

    gate_i = sigma_i u_i^T G v_i for D = min(K, V) directions; both results are constants in derivatives.
    """
    S = as_matrices(S)
    sigma, found = _gate_derivatives(S, jnp.moveaxis(jnp.asarray(G, S.dtype), 0, -3))
    return sigma, jnp.moveaxis(found, -2, 0)


def below_rounding(sigma: Float[AnyArray, "*batch D"], size: int | Float[np.ndarray, "..."]) -> Bool[AnyArray, "*batch D"]:
    """Which directions of f32 states are zero, NaN, or below max(K, V) eps(f32) sigma_1, the rounding of the state.

    ``size`` is max(K, V), or an array of such numbers that broadcasts against ``sigma``.
    """
    return ~((sigma >= size * np.finfo(np.float32).eps * sigma[..., :1]) & (sigma > 0))


def _in_f64(function: Callable) -> Callable:
    """``function`` of matrices computed in f64 and rounded to their dtype, with zero derivatives.

    jax cannot batch or differentiate a region of another precision, so both rules are given here: ``function`` takes any
    leading axes.
    """

    @custom_vmap
    def region(*arrays: Array):
        with jax.enable_x64(True):
            found = function(*(x.astype(jnp.float64) for x in arrays))
            return jax.tree.map(lambda x: x.astype(arrays[0].dtype), found)

    @region.def_vmap
    def batched(size, is_batched, *arrays):
        every = [x if b else jnp.broadcast_to(x, (size, *x.shape)) for x, b in zip(arrays, is_batched, strict=True)]
        found = region(*every)
        return found, jax.tree.map(lambda _: True, found)

    @jax.custom_jvp
    def constant(*arrays: Array):
        return region(*arrays)

    @constant.defjvp
    def derivative(primals, tangents):
        found = constant(*primals)
        return found, jax.tree.map(jnp.zeros_like, found)

    return constant


@_in_f64
def _directions(S: Array) -> Directions:
    largest = jnp.max(jnp.abs(S), axis=(-2, -1), keepdims=True)
    largest = jnp.where(largest > 0, largest, 1.0)
    S = S / largest
    U = _eigenvectors(matmul(S, jnp.swapaxes(S, -1, -2)))
    B = matmul(jnp.swapaxes(U, -1, -2), S)
    if S.shape[-2] > S.shape[-1]:  # U has more directions than S, and the faint ones of S leak into them
        U, B = _taken_apart(U, B)
    else:
        U, B = jax.lax.cond(_is_mixed(B), _taken_apart, lambda U, B: (U, B), U, B)
    sigma = _norms(B)
    order = jnp.argsort(-sigma, axis=-1, stable=True)[..., : min(S.shape[-2:])]
    sigma = jnp.take_along_axis(sigma, order, -1)
    U, B = jnp.take_along_axis(U, order[..., None, :], -1), jnp.take_along_axis(B, order[..., None], -2)
    return Directions(U, sigma * largest[..., 0], B * largest)


@_in_f64
def _scaled(S: Array, factors: Array) -> tuple[Array, Array]:
    U, _, right = _directions(S)
    return U, matmul(U, factors[..., None] * right)


@_in_f64
def _gate_derivatives(S: Array, G: Array) -> tuple[Array, Array]:
    U, sigma, right = _directions(S)
    G_right = matmul(G, jnp.swapaxes(right, -1, -2)[..., None, :, :])
    return sigma, jnp.sum(U[..., None, :, :] * G_right, axis=-2)


def _eigenvectors(G: Array) -> Array:
    """Eigenvectors of a symmetric matrix, the largest eigenvalue first."""
    return jnp.linalg.eigh(G, symmetrize_input=False)[1][..., ::-1]


def _is_mixed(B: Array) -> Bool[Array, ""]:
    """Whether rows of B are not orthogonal: a direction above ``FAINTEST`` shares more than ``MIXED`` with the others, or
    has lost more than ``LOST`` to directions below."""
    sigma = _norms(B)
    known = sigma > FAINTEST * jnp.max(sigma, axis=-1, keepdims=True)
    scale = jnp.where(known, 1 / jnp.where(known, sigma, 1.0), 0.0)[..., None]
    unit = scale * B
    cosines = jnp.abs(matmul(unit, jnp.swapaxes(unit, -1, -2)))
    shared = jnp.sum(cosines, axis=-1) - jnp.diagonal(cosines, axis1=-2, axis2=-1)
    below = scale * matmul(unit, jnp.swapaxes(jnp.where(known[..., None], 0.0, B), -1, -2))
    return jnp.any(shared > MIXED) | jnp.any(jnp.sum(below * below, axis=-1) > LOST)


def _taken_apart(U: Array, B: Array) -> tuple[Array, Array]:
    """U and B with the faint rows rotated among themselves by the eigh of their own Gram matrix."""
    sigma = _norms(B)
    faint = sigma <= FAINT * jnp.max(sigma, axis=-1, keepdims=True)
    largest = jnp.max(jnp.where(faint, sigma, 0.0), axis=-1)[..., None, None]
    rows = jnp.where(faint[..., None], B, 0.0) / jnp.where(largest > 0, largest, 1.0)
    # The other rows stay in place: they get distinct eigenvalues above those of the faint rows.
    n = sigma.shape[-1]
    kept = jnp.where(faint, 0.0, along_last(n + 1.0 + jnp.arange(n, 0.0, -1.0), faint))
    gram = matmul(rows, jnp.swapaxes(rows, -1, -2))
    W = _eigenvectors(gram + kept[..., None] * jnp.broadcast_to(jnp.eye(n), gram.shape))
    return matmul(U, W), matmul(jnp.swapaxes(W, -1, -2), B)


def _norms(B: Array) -> Array:
    return jnp.sqrt(jnp.sum(B * B, axis=-1))
