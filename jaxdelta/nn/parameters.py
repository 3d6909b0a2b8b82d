"""Fresh parameters of the layers."""

import jax
import jax.numpy as jnp
from flax import nnx


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], dtype, *, scale: float = 0.02) -> nnx.Param:
    """Gaussian entries of standard deviation ``scale``."""
    return nnx.Param((scale * jax.random.normal(rngs.params(), shape)).astype(dtype))


def constant(shape: tuple[int, ...], value: float) -> nnx.Param:
    """Entries of one value, f32: the scale of a norm, or its offset from one."""
    return nnx.Param(jnp.full(shape, value, jnp.float32))
