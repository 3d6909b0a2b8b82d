"""Normalisations, computed in f32 or wider and cast once at the end.

    rms_norm        y = x / sqrt(mean(x^2) + eps) * (offset + w)        residual stream; q and k of gated attention
    gated_rms_norm  y = x / sqrt(mean(x^2) + eps) * w * silu(z)         output of a linear layer, per value head
    l2norm          y = x / sqrt(sum(x^2) + eps)                        q and k of a linear layer

Sources: the Qwen3.5 text model of transformers 5.24, where ``w`` of ``rms_norm`` is an offset from one and that of
``gated_rms_norm`` is not; the layers of flash-linear-attention 0.6, where neither is. The eps of ``l2norm`` is under the
root, so a normalised key is shorter than one by about eps / (2 sum(x^2)).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxdelta.dims import accumulation_dtype, along_last


def _normalised(x: Array, eps: float) -> Array:
    x = x.astype(accumulation_dtype(x))
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def rms_norm(
    x: Float[Array, "*batch D"], weight: Float[Array, " D"], *, eps: float = 1e-6, offset: float = 1.0
) -> Float[Array, "*batch D"]:
    """RMSNorm over the last axis with scale ``offset + weight``, in the dtype of ``x``."""
    return (_normalised(x, eps) * along_last(offset + weight.astype(accumulation_dtype(x, weight)), x)).astype(x.dtype)


def gated_rms_norm(
    x: Float[Array, "*batch V"],
    weight: Float[Array, " V"],
    z: Float[Array, "*batch V"],
    *,
    eps: float = 1e-6,
    activation: Callable[[Array], Array] = jax.nn.silu,
) -> Float[Array, "*batch V"]:
    """RMSNorm of each head's output, times ``weight`` and ``activation(z)``, in the dtype of ``z``.

    A factor on ``x`` cancels in the norm, so a gate on a head acts only on the result.
    """
    gate = activation(z.astype(accumulation_dtype(x, z)))
    return (_normalised(x, eps) * along_last(weight, x) * gate).astype(z.dtype)


def l2norm(x: Float[Array, "*batch K"], *, eps: float = 1e-6) -> Float[Array, "*batch K"]:
    """``x / sqrt(sum(x^2) + eps)`` in f32 or wider. A zero vector stays zero, with a finite gradient."""
    x = x.astype(accumulation_dtype(x))
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + eps)
