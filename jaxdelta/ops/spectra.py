"""Spectra of states, and the ranks that the literature derives from them.

    effective rank    exp(-sum p log p), p = sigma / sum(sigma)        Roy and Vetterli, EUSIPCO 2007; of sigma, not sigma^2
    stable rank       sum(sigma^2) / sigma_1^2
    energy rank       the least r with sum_{i<=r} sigma_i^2 >= fraction * sum(sigma^2)
    threshold rank    #{sigma_i > threshold * sigma_1}                 the numerical rank at max(K, V) * eps

Each takes states [*batch, K, V] and raises ValueError for fewer than two axes; its companion ``*_of`` takes their singular
values [*batch, R] instead, descending. Every rank of a zero state is 0. Where a state holds NaN or infinity, its singular
values and ranks are NaN, so that it does not count as an empty state; the rest of the batch is not affected. Ranks are
therefore of a floating dtype; ``.astype(int)`` gives the integers that ``truncate`` takes.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxdelta.dims import AnyArray, Matrices, Spectrum, as_matrices, keeps_f64


@keeps_f64
def singular_values(S: Matrices) -> Spectrum:
    """Singular values, descending, [*batch, min(K, V)], in f32 or wider; differentiable where they are distinct."""
    return _spectrum(S)


@keeps_f64
def effective_rank(S: Matrices) -> Float[Array, "*batch"]:
    """exp of the entropy of sigma / sum(sigma): 1 for an outer product, min(K, V) for a flat spectrum."""
    return effective_rank_of(_spectrum(S))


@keeps_f64
def effective_rank_of(sigma: Float[AnyArray, "*batch R"]) -> Float[Array, "*batch"]:
    """The effective rank of matrices with singular values ``sigma``."""
    sigma = jnp.asarray(sigma)
    total = jnp.sum(sigma, axis=-1)
    p = sigma / jnp.where(total > 0, total, 1)[..., None]
    entropy = -jnp.sum(jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, 1)), 0), axis=-1)
    return _of(sigma, jnp.where(total > 0, jnp.exp(entropy), 0))


@keeps_f64
def energy_effective_rank_of(sigma: Float[AnyArray, "*batch R"]) -> Float[Array, "*batch"]:
    """The effective rank with sigma^2 in the place of sigma, which some papers use: 12.9 for 0.9^i, not 25.8."""
    return effective_rank_of(_relative(jnp.asarray(sigma)) ** 2)


@keeps_f64
def stable_rank(S: Matrices) -> Float[Array, "*batch"]:
    """sum(sigma^2) over the largest sigma^2."""
    return stable_rank_of(_spectrum(S))


@keeps_f64
def stable_rank_of(sigma: Float[AnyArray, "*batch R"]) -> Float[Array, "*batch"]:
    """The stable rank of matrices with singular values ``sigma``."""
    sigma = jnp.asarray(sigma)
    return _of(sigma, jnp.sum(_relative(sigma) ** 2, axis=-1))


@keeps_f64
def energy_rank(S: Matrices, fraction: float) -> Float[Array, "*batch"]:
    """The least number of directions that hold ``fraction`` (in (0, 1]) of the energy.

    Raises:
        ValueError: ``fraction`` is outside (0, 1].
    """
    return energy_rank_of(_spectrum(S), fraction)


@keeps_f64
def energy_rank_of(sigma: Float[AnyArray, "*batch R"], fraction: float) -> Float[Array, "*batch"]:
    """The energy rank of matrices with singular values ``sigma``; raises ValueError as :func:`energy_rank`."""
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction is {fraction}; expected a share of the energy in (0, 1]")
    sigma = jnp.asarray(sigma)
    p = _relative(sigma)
    held = jnp.cumsum(p * p, axis=-1)
    total = held[..., -1:]
    return _of(sigma, jnp.sum((held < fraction * total) & (p > 0), axis=-1) + (p[..., 0] > 0).astype(int))


@keeps_f64
def threshold_rank(S: Matrices, threshold: float | None = None) -> Float[Array, "*batch"]:
    """How many singular values exceed ``threshold`` times the largest; None is max(K, V) * eps, the numerical rank."""
    sigma = _spectrum(S)
    return threshold_rank_of(sigma, numerical_threshold(jnp.shape(S), sigma.dtype) if threshold is None else threshold)


@keeps_f64
def threshold_rank_of(
    sigma: Float[AnyArray, "*batch R"], threshold: float | Float[AnyArray, "..."]
) -> Float[Array, "*batch"]:
    """The threshold rank of matrices with singular values ``sigma``."""
    sigma = jnp.asarray(sigma)
    return _of(sigma, jnp.sum(sigma > threshold * sigma[..., :1], axis=-1))


def numerical_threshold(shape: Sequence[int], dtype: DTypeLike) -> float:
    """The threshold of the numerical rank, max(K, V) * eps, for matrices of ``shape`` [..., K, V] stored in ``dtype``."""
    return max(shape[-2:]) * float(jnp.finfo(dtype).eps)


def _spectrum(S: Matrices) -> Spectrum:
    S = as_matrices(S)
    finite = jnp.isfinite(S).all(axis=(-2, -1))[..., None]
    # What a factorization makes of NaN depends on the device's library.
    return jnp.where(finite, jnp.linalg.svd(jnp.where(finite[..., None], S, 0), compute_uv=False), jnp.nan)


def _of(sigma: Spectrum, rank: Array) -> Float[Array, "*batch"]:
    """``rank`` in the dtype of its spectrum, NaN where the spectrum is."""
    return jnp.where(jnp.isnan(sigma).any(axis=-1), jnp.nan, rank.astype(sigma.dtype))


def _relative(sigma: Array) -> Array:
    """sigma / sigma_1, zeros for a zero spectrum. Squares of sigma near 1e20 would overflow f32."""
    largest = sigma[..., :1]
    return sigma / jnp.where(largest > 0, largest, 1)
