"""Gated DeltaNet layer, as in the linear layers of Qwen3.5.

    q | k | v = silu(short_conv(W_qkv x))           q, k l2-normalised; value head h reads key head h // (H / key heads)
    beta = sigmoid(W_b x),    g = -exp(A_log) softplus(W_a x + dt_bias)
    o = gated_delta_rule(q, k, v, g, beta)
    y = W_out (RMSNorm(o) * w * silu(W_z x))

Sources: Yang, Kautz, Hatamizadeh, arXiv 2412.06464; layout of the projections from the Qwen3.5 model of transformers 5.24.
beta, g and S are f32 or wider in every dtype of the model; transformers rounds beta to the model's dtype.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxdelta.dims import linear
from jaxdelta.models.config import Qwen3_5Config
from jaxdelta.nn.parameters import normal, ones
from jaxdelta.ops.delta_rule import gated_delta_rule, gated_delta_rule_chunked
from jaxdelta.ops.norms import gated_rms_norm, l2norm
from jaxdelta.ops.short_conv import short_conv


class LinearCarry(NamedTuple):
    """What a linear layer hands to the next segment.

    Attributes:
        S: Float[B H K V], f32.
        tail: Float[B W-1 E], the last inputs of the short convolution, in the dtype of the activations.
    """

    S: Array
    tail: Array


class GatedDeltaNet(nnx.Module):
    """Linear layer; weights are [out, in], ``conv`` is [E, W], ``A_log``, ``dt_bias`` and ``norm`` are f32."""

    def __init__(self, config: Qwen3_5Config, *, dtype, rngs: nnx.Rngs):
        D, H, V = config.width, config.num_value_heads, config.value_dim
        self.config = config
        self.in_qkv = normal(rngs, (config.conv_channels, D), dtype)
        self.in_z = normal(rngs, (H * V, D), dtype)
        self.in_b = normal(rngs, (H, D), dtype)
        self.in_a = normal(rngs, (H, D), dtype)
        self.conv = normal(rngs, (config.conv_channels, config.conv_width), dtype, scale=config.conv_width**-0.5)
        # Horizons of about 10 to 1000 tokens, as Mamba-2 and fla start: rates A in (1, 16), steps dt in (1e-3, 1e-1).
        rate = jax.random.uniform(rngs.params(), (H,), jnp.float32, minval=1.0, maxval=16.0)
        step = jnp.exp(jax.random.uniform(rngs.params(), (H,), jnp.float32, minval=np.log(1e-3), maxval=np.log(1e-1)))
        self.A_log = nnx.Param(jnp.log(rate))
        self.dt_bias = nnx.Param(jnp.log(jnp.expm1(step)))
        self.norm = ones((V,))
        self.out = normal(rngs, (D, H * V), dtype)

    def init_carry(self, batch: int, dtype) -> LinearCarry:
        """The carry before the first token of ``batch`` texts."""
        c = self.config
        return LinearCarry(
            jnp.zeros((batch, c.num_value_heads, c.key_dim, c.value_dim), jnp.promote_types(dtype, jnp.float32)),
            jnp.zeros((batch, c.conv_width - 1, c.conv_channels), dtype),
        )

    def __call__(
        self, x: Float[Array, "B T D"], carry: LinearCarry, length: Int[Array, " B"] | None = None
    ) -> tuple[Float[Array, "B T D"], LinearCarry]:
        """Tokens of a segment; ``length``: how many leading ones of each row are text, all where None.

        Padding neither writes nor decays: the carry returned is that after the last token of text.
        """
        c = self.config
        B, T, _ = x.shape
        text = None if length is None else (jnp.arange(T) < length[:, None])[..., None]
        if text is not None:
            x = jnp.where(text, x, 0)
        qkv, tail = short_conv(linear(x, self.in_qkv[...]), self.conv[...], tail=carry.tail, length=length)
        qkv = jax.nn.silu(qkv)
        at = c.num_key_heads * c.key_dim
        q, k, v = jnp.split(qkv, (at, 2 * at), axis=-1)
        groups = c.num_value_heads // c.num_key_heads
        q, k = (jnp.repeat(l2norm(a.reshape(B, T, c.num_key_heads, c.key_dim)), groups, axis=2) for a in (q, k))
        v = v.reshape(B, T, c.num_value_heads, c.value_dim)

        beta, g = self.gates(x)
        if text is not None:
            beta, g = jnp.where(text, beta, 0), jnp.where(text, g, 0)
        rule = gated_delta_rule if T == 1 else gated_delta_rule_chunked
        o, S = rule(q, k, v, g=g, beta=beta, state=carry.S)
        z = linear(x, self.in_z[...]).reshape(v.shape)
        y = gated_rms_norm(o, self.norm[...], z, eps=c.norm_eps)
        return linear(y.reshape(B, T, -1), self.out[...]), LinearCarry(S, tail)

    def gates(self, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T H"], Float[Array, "B T H"]]:
        """beta in (0, 1) and g <= 0, in f32 or wider."""
        wide = self.A_log[...].dtype
        beta = jax.nn.sigmoid(linear(x, self.in_b[...], dtype=wide))
        step = jax.nn.softplus(linear(x, self.in_a[...], dtype=wide) + self.dt_bias[...])
        return beta, -jnp.exp(self.A_log[...]) * step
