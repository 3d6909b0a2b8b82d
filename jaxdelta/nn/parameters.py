"""Fresh parameters of the layers."""

import jax
import jax.numpy as jnp
from flax import nnx


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], dtype, *, scale: float = 0.02) -> nnx.Param:
    """Gaussian entries with standard deviation ``scale``."""
    return nnx.Param((scale * jax.random.normal(rngs.params(), shape)).astype(dtype))


def constant(shape: tuple[int, ...], value: float) -> nnx.Param:
    """f32 entries that all equal ``value``, for norms and biases."""
    return nnx.Param(jnp.full(shape, value, jnp.float32))
