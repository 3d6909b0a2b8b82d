"""Spectra of states and the ranks that the literature reads from them.

    effective rank    exp(-sum p log p), p = sigma / sum(sigma)        Roy and Vetterli, EUSIPCO 2007; of sigma, not sigma^2
    stable rank       sum(sigma^2) / sigma_1^2
    energy rank       the least r with sum_{i<=r} sigma_i^2 >= fraction * sum(sigma^2)
    threshold rank    #{sigma_i > threshold * sigma_1}                 the numerical rank at max(K, V) * eps

All take states [*batch, K, V]; every rank of a zero state is 0.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxdelta.dims import Matrices, Spectrum, accumulation_dtype, keeps_f64


@keeps_f64
def singular_values(S: Matrices) -> Spectrum:
    """Singular values, descending, [*batch, min(K, V)], in f32 or wider; differentiable where they are distinct."""
    S = jnp.asarray(S)
    return jnp.linalg.svd(S.astype(accumulation_dtype(S)), compute_uv=False)


def effective_rank(S: Matrices) -> Float[Array, "*batch"]:
    """exp of the entropy of sigma / sum(sigma): 1 for one outer product, min(K, V) for a flat spectrum."""
    sigma = singular_values(S)
    total = jnp.sum(sigma, axis=-1)
    p = sigma / jnp.where(total > 0, total, 1)[..., None]
    entropy = -jnp.sum(jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, 1)), 0), axis=-1)
    return jnp.where(total > 0, jnp.exp(entropy), 0)


def stable_rank(S: Matrices) -> Float[Array, "*batch"]:
    """Energy over the largest squared singular value."""
    p = _relative(singular_values(S))
    return jnp.sum(p * p, axis=-1)


def energy_rank(S: Matrices, fraction: float) -> Int[Array, "*batch"]:
    """The least number of directions that hold ``fraction`` (in (0, 1]) of the energy.

    Raises:
        ValueError: ``fraction`` is outside of (0, 1].
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction is {fraction}; expected a share of the energy in (0, 1]")
    p = _relative(singular_values(S))
    held = jnp.cumsum(p * p, axis=-1)
    total = held[..., -1:]
    return jnp.sum((held < fraction * total) & (p > 0), axis=-1) + (p[..., 0] > 0)


def threshold_rank(S: Matrices, threshold: float | None = None) -> Int[Array, "*batch"]:
    """How many singular values exceed ``threshold`` times the largest; None is max(K, V) * eps, the numerical rank."""
    sigma = singular_values(S)
    if threshold is None:
        threshold = max(S.shape[-2:]) * float(jnp.finfo(sigma.dtype).eps)
    return jnp.sum(sigma > threshold * sigma[..., :1], axis=-1)


def _relative(sigma: Array) -> Array:
    """sigma / sigma_1, zeros for a zero spectrum; squares of states near 1e20 would overflow f32."""
    largest = sigma[..., :1]
    return sigma / jnp.where(largest > 0, largest, 1)
