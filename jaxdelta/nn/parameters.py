"""Fresh parameters of the layers."""

import jax
import jax.numpy as jnp
from flax import nnx


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], dtype, *, scale: float = 0.02) -> nnx.Param:
    """Gaussian entries of standard deviation ``scale``."""
    return nnx.Param((scale * jax.random.normal(rngs.params(), shape)).astype(dtype))


def ones(shape: tuple[int, ...]) -> nnx.Param:
    """Scale of a norm, f32."""
    return nnx.Param(jnp.ones(shape, jnp.float32))


def zeros(shape: tuple[int, ...]) -> nnx.Param:
    """Offset from one of a norm's scale, f32."""
    return nnx.Param(jnp.zeros(shape, jnp.float32))
