"""Gated full attention with partial RoPE and a preallocated key/value cache, as in Qwen3.5.

    q, gate = split(W_q x) per head;   q, k RMS-normalised per head, then their first rotary_dim entries rotated
    y = W_o (softmax(q k^T / sqrt(head_dim)) v * sigmoid(gate))

Source: the Qwen3.5 model of transformers 5.24; RoPE of Su et al., arXiv 2104.09864, with halves (i, i + rotary_dim / 2) as
pairs. The cache holds ``max_length`` places and is only ever appended to; a segment reads the shortest of a few static
prefixes that holds all tokens so far, so that neither compilation nor cost follows ``max_length``.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxdelta.dims import HIGHEST, accumulation_dtype, linear
from jaxdelta.models.config import Qwen3_5Config
from jaxdelta.nn.parameters import normal, zeros
from jaxdelta.ops.norms import rms_norm

QUERY_BLOCK = 512  # queries whose scores are held at once
SHORTEST_PREFIX = 512


class AttentionCarry(NamedTuple):
    """Key/value cache: ``keys`` (normalised and rotated) and ``values``, Float[B M G head_dim] in the model's dtype."""

    keys: Array
    values: Array


class GatedAttention(nnx.Module):
    """Full attention; weights are [out, in]; rows of ``q`` are, per head, head_dim for the query, then for the gate."""

    def __init__(self, config: Qwen3_5Config, *, dtype, rngs: nnx.Rngs):
        D, A, G, d = config.width, config.num_query_heads, config.num_kv_heads, config.head_dim
        self.config = config
        self.q = normal(rngs, (A * 2 * d, D), dtype)
        self.k = normal(rngs, (G * d, D), dtype)
        self.v = normal(rngs, (G * d, D), dtype)
        self.out = normal(rngs, (D, A * d), dtype)
        self.q_norm = zeros((d,))
        self.k_norm = zeros((d,))

    def init_carry(self, batch: int, max_length: int, dtype) -> AttentionCarry:
        """An empty cache of ``max_length`` places for ``batch`` texts."""
        shape = (batch, max_length, self.config.num_kv_heads, self.config.head_dim)
        return AttentionCarry(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

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
        carry = AttentionCarry(*(_append(cache, new, positions, length) for cache, new in zip(carry, (k, v), strict=True)))
        y = attend(q, carry, positions, last=jnp.max(positions))
        y = y * jax.nn.sigmoid(gate)
        return linear(y.reshape(B, T, -1), self.out[...]), carry


def _append(cache: Array, new: Array, positions: Array, length: Array | None) -> Array:
    """Write the tokens of text at their positions; padding, and what lies beyond the cache, is dropped."""
    B, T = positions.shape
    if length is not None:
        positions = jnp.where(jnp.arange(T) < length[:, None], positions, cache.shape[1])
    return cache.at[jnp.arange(B)[:, None], positions].set(new.astype(cache.dtype), mode="drop")


def rotary_angles(positions: Int[Array, "B T"], rotary_dim: int, theta: float) -> Float[Array, "B T R"]:
    """Angle of each of the rotary_dim / 2 pairs, in f32; bf16 would be off by whole turns at a few thousand tokens."""
    # On the host: one unit in the last place of a device's pow is 8e-3 rad at 131,071 tokens.
    frequencies = theta ** -(np.arange(0, rotary_dim, 2) / max(rotary_dim, 1))
    return positions[..., None].astype(jnp.float32) * jnp.asarray(frequencies, jnp.float32)


def rotate(x: Float[Array, "B T A d"], angles: Float[Array, "B T R"]) -> Float[Array, "B T A d"]:
    """Rotate the first 2R entries of each head, as the pairs (i, i + R); the rest stays."""
    R = angles.shape[-1]
    wide = accumulation_dtype(x)
    cos, sin = (f(angles)[:, :, None].astype(wide) for f in (jnp.cos, jnp.sin))
    first, second, rest = jnp.split(x, (R, 2 * R), axis=-1)
    first, second = first.astype(wide), second.astype(wide)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), rest], axis=-1)


def attend(
    q: Float[Array, "B T A d"], carry: AttentionCarry, positions: Int[Array, "B T"], *, last: Int[Array, ""]
) -> Float[Array, "B T A d"]:
    """Causal attention of queries at ``positions`` to the cache; ``last``: the highest position that any query has."""
    T, M = q.shape[1], carry.keys.shape[1]
    lengths = _prefix_lengths(min(T, M), M)

    def over(length: int):
        return lambda q, keys, values, positions: _attend(q, keys[:, :length], values[:, :length], positions)

    branch = jnp.searchsorted(jnp.asarray(lengths), last, side="right")
    return jax.lax.switch(branch, [over(n) for n in lengths], q, *carry, positions)


def _prefix_lengths(shortest: int, M: int) -> list[int]:
    """Prefixes of the cache, each up to half as long again as the one before, the last the whole."""
    shortest = max(shortest, SHORTEST_PREFIX)
    doubled = [shortest << i for i in range(M.bit_length())]
    return [n for n in sorted({*doubled, *(3 * n // 2 for n in doubled)}) if n < M] + [M]


def _attend(q: Array, keys: Array, values: Array, positions: Array) -> Array:
    """Attention in blocks of queries, so that scores of at most QUERY_BLOCK queries exist at once, in reverse mode too."""
    B, T, A, d = q.shape
    if T <= QUERY_BLOCK:
        return _attend_block(q, keys, values, positions)
    pad = -T % QUERY_BLOCK
    q = jnp.pad(q, ((0, 0), (0, pad), (0, 0), (0, 0)))
    positions = jnp.pad(positions, ((0, 0), (0, pad)))
    blocks = (
        jnp.moveaxis(q.reshape(B, -1, QUERY_BLOCK, A, d), 1, 0),
        jnp.moveaxis(positions.reshape(B, -1, QUERY_BLOCK), 1, 0),
    )
    y = jax.lax.map(jax.checkpoint(lambda block: _attend_block(block[0], keys, values, block[1])), blocks)
    return jnp.moveaxis(y, 0, 1).reshape(B, T + pad, A, d)[:, :T]


def _attend_block(q: Array, keys: Array, values: Array, positions: Array) -> Array:
    B, T, A, d = q.shape
    G, M = keys.shape[2], keys.shape[1]
    wide = accumulation_dtype(q)
    precision = HIGHEST if q.dtype != jnp.bfloat16 else None
    product = partial(jnp.einsum, preferred_element_type=wide, precision=precision)
    # Axes stay in the order that the products give: the scores are the largest array and are never transposed.
    scores = product("btgad,bsgd->bgtas", q.reshape(B, T, G, A // G, d), keys) * d**-0.5
    visible = jnp.where(jnp.arange(M) <= positions[:, :, None], 0.0, -jnp.inf).astype(wide)
    weights = jax.nn.softmax(scores + visible[:, None, :, None], axis=-1).astype(values.dtype)
    y = product("bgtas,bsgd->bgtad", weights, values)
    return jnp.moveaxis(y, 1, 2).reshape(B, T, A, d).astype(q.dtype)
