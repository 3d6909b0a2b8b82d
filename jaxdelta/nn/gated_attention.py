"""Gated full attention with partial RoPE, as in Qwen3.5.

    q, gate = split(W_q x) per head;   q, k RMS-normalised per head, then their first rotary_dim entries rotated
    y = W_o (softmax(q k^T / sqrt(head_dim)) v * sigmoid(gate))

Source: the Qwen3.5 model of transformers 5.24.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxdelta.dims import linear
from jaxdelta.nn.attention import AttentionCarry, AttentionMixer, append, attend, rotary_angles, rotate
from jaxdelta.nn.mixer import Span
from jaxdelta.nn.parameters import constant, normal
from jaxdelta.nn.sizes import AttentionSizes
from jaxdelta.ops.norms import rms_norm


class GatedAttention(AttentionMixer):
    """Gated full attention; weights are [out, in]. Per head, ``q`` has head_dim rows of the query, then of the gate."""

    def __init__(self, width: int, sizes: AttentionSizes, norm_eps: float, *, dtype, rngs: nnx.Rngs):
        A, G, d = sizes.num_query_heads, sizes.num_kv_heads, sizes.head_dim
        self.sizes, self.norm_eps = sizes, norm_eps
        self.q = normal(rngs, (A * 2 * d, width), dtype)
        self.k = normal(rngs, (G * d, width), dtype)
        self.v = normal(rngs, (G * d, width), dtype)
        self.out = normal(rngs, (width, A * d), dtype)
        self.q_norm = constant((d,), 0.0)
        self.k_norm = constant((d,), 0.0)

    def __call__(
        self, x: Float[Array, "B T D"], carry: AttentionCarry, span: Span
    ) -> tuple[Float[Array, "B T D"], AttentionCarry]:
        """Run the tokens of a segment; padding is not written to the cache."""
        c, tap = self.sizes, span.tap
        B, T, _ = x.shape
        q, gate = jnp.split(linear(x, self.q[...]).reshape(B, T, c.num_query_heads, 2 * c.head_dim), 2, axis=-1)
        k, v = (linear(x, w[...]).reshape(B, T, c.num_kv_heads, c.head_dim) for w in (self.k, self.v))
        angles = rotary_angles(span.positions, c.rotated, c.rope_theta)
        q = tap("q", rotate(rms_norm(q, self.q_norm[...], eps=self.norm_eps), angles))
        k = tap("k", rotate(rms_norm(k, self.k_norm[...], eps=self.norm_eps), angles))
        carry = append(carry, k, tap("v", v), span)
        y = tap("head_output", attend(q, carry, span) * jax.nn.sigmoid(gate))
        return tap("mixer_output", linear(y.reshape(B, T, -1), self.out[...])), carry
