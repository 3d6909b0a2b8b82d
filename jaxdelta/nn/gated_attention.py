"""Gated full attention with partial RoPE, as in Qwen3.5.

    q, gate = split(W_q x) per head;   q, k RMS-normalised per head, then their first rotary_dim entries rotated
    y = W_o (softmax(q k^T / sqrt(head_dim)) v * sigmoid(gate))

Source: the Qwen3.5 model of transformers 5.24.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxdelta.dims import linear
from jaxdelta.models.config import Qwen3_5Config
from jaxdelta.nn.attention import AttentionCarry, append, attend, empty_cache, rotary_angles, rotate
from jaxdelta.nn.parameters import constant, normal
from jaxdelta.ops.norms import rms_norm


class GatedAttention(nnx.Module):
    """Full attention; weights are [out, in]; rows of ``q`` are, per head, head_dim for the query, then for the gate."""

    def __init__(self, config: Qwen3_5Config, *, dtype, rngs: nnx.Rngs):
        D, A, G, d = config.width, config.num_query_heads, config.num_kv_heads, config.head_dim
        self.config = config
        self.q = normal(rngs, (A * 2 * d, D), dtype)
        self.k = normal(rngs, (G * d, D), dtype)
        self.v = normal(rngs, (G * d, D), dtype)
        self.out = normal(rngs, (D, A * d), dtype)
        self.q_norm = constant((d,), 0.0)
        self.k_norm = constant((d,), 0.0)

    def init_carry(self, batch: int, max_length: int, dtype) -> AttentionCarry:
        """An empty cache of ``max_length`` places for ``batch`` texts."""
        return empty_cache(batch, max_length, self.config.num_kv_heads, self.config.head_dim, dtype)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        carry: AttentionCarry,
        positions: Int[Array, "B T"],
        length: Int[Array, " B"] | None = None,
    ) -> tuple[Float[Array, "B T D"], AttentionCarry]:
        """Tokens of a segment at ``positions`` of their texts; ``length``: leading ones that are text, all where None."""
        c = self.config
        B, T, _ = x.shape
        q, gate = jnp.split(linear(x, self.q[...]).reshape(B, T, c.num_query_heads, 2 * c.head_dim), 2, axis=-1)
        k, v = (linear(x, w[...]).reshape(B, T, c.num_kv_heads, c.head_dim) for w in (self.k, self.v))
        angles = rotary_angles(positions, c.rotary_dim, c.rope_theta)
        q = rotate(rms_norm(q, self.q_norm[...], eps=c.norm_eps), angles)
        k = rotate(rms_norm(k, self.k_norm[...], eps=c.norm_eps), angles)
        carry = append(carry, k, v, positions, length)
        y = attend(q, carry, positions, last=jnp.max(positions))
        y = y * jax.nn.sigmoid(gate)
        return linear(y.reshape(B, T, -1), self.out[...]), carry
