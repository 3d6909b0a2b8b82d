"""Full or windowed causal attention with RoPE and a preallocated key/value cache.

    y = W_o softmax(q k^T / sqrt(head_dim)) v,   q and k rotated by their positions

Sources: RoPE of Su et al., arXiv 2104.09864, where entries i and i + rotary_dim / 2 form a pair; the layer is the attention
of the hybrid models of flash-linear-attention 0.6. The cache has ``max_length`` places and is only ever appended to. A
segment reads the shortest of a few static prefixes that holds all tokens so far, so the cost does not grow with
``max_length``.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxdelta.dims import accumulation_dtype, along_last, linear, precision_of
from jaxdelta.nn.mixer import Span
from jaxdelta.nn.parameters import constant, normal
from jaxdelta.nn.sizes import AttentionSizes

QUERY_BLOCK = 512  # queries whose scores exist at once
SHORTEST_PREFIX = 512
FEW_QUERIES = 16


class AttentionCarry(NamedTuple):
    """Key/value cache: ``keys`` (normalised and rotated) and ``values``, Float[B M G head_dim] in the model's dtype."""

    keys: Array
    values: Array


class AttentionMixer(nnx.Module):
    """An attention layer of ``sizes``. It passes these arrays, in this order, to the tap of its span:

    ================  ==================  ==========================================
    ``q``             Float[B T A d]      queries, normalised and rotated
    ``k``, ``v``      Float[B T G d]      as written to the cache
    ``head_output``   Float[B T A d]      output of each query head
    ``mixer_output``  Float[B T D]        added to the residual stream
    ================  ==================  ==========================================
    """

    NAMES = ("q", "k", "v", "head_output", "mixer_output")
    sizes: AttentionSizes

    def init_carry(self, batch: int, max_length: int, dtype) -> AttentionCarry:
        """An empty cache of ``max_length`` places for ``batch`` texts."""
        shape = (batch, max_length, self.sizes.num_kv_heads, self.sizes.head_dim)
        return AttentionCarry(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


class Attention(AttentionMixer):
    """Plain attention; weights are [out, in], biases f32."""

    def __init__(self, width: int, sizes: AttentionSizes, *, dtype, rngs: nnx.Rngs):
        A, G, d = sizes.num_query_heads, sizes.num_kv_heads, sizes.head_dim
        self.sizes = sizes
        for name, rows in (("q", A * d), ("k", G * d), ("v", G * d)):
            setattr(self, name, normal(rngs, (rows, width), dtype))
            if sizes.bias:
                setattr(self, name + "_bias", constant((rows,), 0.0))
        self.out = normal(rngs, (width, A * d), dtype)

    def __call__(
        self, x: Float[Array, "B T D"], carry: AttentionCarry, span: Span
    ) -> tuple[Float[Array, "B T D"], AttentionCarry]:
        """Run the tokens of a segment; padding is not written to the cache."""
        d, tap = self.sizes.head_dim, span.tap
        q, k, v = (self._projected(x, name).reshape(*x.shape[:2], -1, d) for name in ("q", "k", "v"))
        angles = rotary_angles(span.positions, self.sizes.rotated, self.sizes.rope_theta)
        q, k, v = tap("q", rotate(q, angles)), tap("k", rotate(k, angles)), tap("v", v)
        carry = append(carry, k, v, span)
        y = tap("head_output", attend(q, carry, span, window=self.sizes.window))
        return tap("mixer_output", linear(y.reshape(*x.shape[:2], -1), self.out[...])), carry

    def _projected(self, x: Array, name: str) -> Array:
        y = linear(x, getattr(self, name)[...])
        return (y + along_last(getattr(self, name + "_bias")[...], y)).astype(y.dtype) if self.sizes.bias else y


def append(carry: AttentionCarry, k: Float[Array, "B T G d"], v: Float[Array, "B T G d"], span: Span) -> AttentionCarry:
    """Write the tokens of text at their positions. Padding and positions beyond the cache are dropped."""
    positions = span.positions
    if span.length is not None:
        positions = jnp.where(span.is_text, positions, carry.keys.shape[1])
    rows = jnp.arange(len(positions))[:, None]

    def written(cache: Array, new: Array) -> Array:
        return cache.at[rows, positions].set(new.astype(cache.dtype), mode="drop")

    return AttentionCarry(written(carry.keys, k), written(carry.values, v))


def rotary_angles(positions: Int[Array, "B T"], rotary_dim: int, theta: float) -> Float[Array, "B T R"]:
    """Angle of each of the R = rotary_dim / 2 pairs, in f32; bf16 would be whole turns off after a few thousand tokens."""
    # Frequencies are computed on the host: one unit in the last place of a device's pow is 8e-3 rad at 131,071 tokens.
    frequencies = theta ** -(np.arange(0, rotary_dim, 2) / max(rotary_dim, 1))
    positions = positions[..., None].astype(jnp.float32)
    return positions * along_last(jnp.asarray(frequencies, jnp.float32), positions)


def rotate(x: Float[Array, "B T A d"], angles: Float[Array, "B T R"]) -> Float[Array, "B T A d"]:
    """Rotate the first 2R entries of each head in pairs (i, i + R); the rest stays."""
    R = angles.shape[-1]
    wide = accumulation_dtype(x)
    cos, sin = (f(angles)[:, :, None].astype(wide) for f in (jnp.cos, jnp.sin))
    first, second, rest = jnp.split(x, (R, 2 * R), axis=-1)
    first, second = first.astype(wide), second.astype(wide)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), rest], axis=-1)


def attend(
    q: Float[Array, "B T A d"],
    carry: AttentionCarry,
    span: Span,
    *,
    window: int | None = None,
) -> Float[Array, "B T A d"]:
    """Causal attention of a segment's queries to the cache; a query reads the last ``window`` tokens, all if None."""
    B, T, A, d = q.shape
    M, G = carry.keys.shape[1:3]
    lengths = _prefix_lengths(min(T, M), M)
    each = jax.lax.map if span.implementation.attention == "one by one" else _together
    positions = span.positions

    def over(length: int):
        # Without the checkpoint, reverse mode would keep the scores of every branch, filled with zeros.
        one = jax.checkpoint(lambda x: _attend(x[0], x[1][:length], x[2][:length], x[3], window))
        return lambda *x: each(one, x)

    branch = jnp.searchsorted(jnp.asarray(lengths), jnp.max(positions), side="right")
    q = jnp.moveaxis(q.reshape(B, T, G, A // G, d), 2, 1)
    keys, values = (jnp.moveaxis(x, 2, 1) for x in carry)
    groups = (x.reshape(B * G, *x.shape[2:]) for x in (q, keys, values))
    y = jax.lax.switch(branch, [over(n) for n in lengths], *groups, jnp.repeat(positions, G, axis=0))
    return jnp.moveaxis(y.reshape(B, G, T, A // G, d), 1, 2).reshape(B, T, A, d)


def _together(f, xs):
    return jax.vmap(f)(xs)


def _prefix_lengths(shortest: int, M: int) -> list[int]:
    """Lengths of cache prefixes, each at most one and a half times the one before; the last is the whole cache.

    For few queries compiling a prefix costs more than reading too much, so each is four times as long as the one before.
    """
    if shortest <= FEW_QUERIES:
        return [n for n in (4 * SHORTEST_PREFIX << 2 * i for i in range(M.bit_length())) if n < M] + [M]
    shortest = max(shortest, SHORTEST_PREFIX)
    doubled = [shortest << i for i in range(M.bit_length())]
    return [n for n in sorted({*doubled, *(3 * n // 2 for n in doubled)}) if n < M] + [M]


def _attend(
    q: Float[Array, "T r d"],
    keys: Float[Array, "M d"],
    values: Float[Array, "M d"],
    positions: Int[Array, " T"],
    window: int | None,
) -> Float[Array, "T r d"]:
    """Attention of one text and group in blocks of QUERY_BLOCK queries, so that the scores of one block exist at once."""
    T, r, d = q.shape
    if T <= QUERY_BLOCK:
        return _attend_block(q, keys, values, positions, window)
    pad = -T % QUERY_BLOCK
    q = jnp.pad(q, ((0, pad), (0, 0), (0, 0))).reshape(-1, QUERY_BLOCK, r, d)
    positions = jnp.pad(positions, (0, pad)).reshape(-1, QUERY_BLOCK)
    block = jax.checkpoint(lambda x: _attend_block(x[0], keys, values, x[1], window))
    return jax.lax.map(block, (q, positions)).reshape(T + pad, r, d)[:T]


def _attend_block(q: Array, keys: Array, values: Array, positions: Array, window: int | None) -> Array:
    T, r, d = q.shape
    M = len(keys)
    wide = accumulation_dtype(q)
    product = partial(jnp.matmul, preferred_element_type=wide, precision=precision_of(q))
    scores = product(q.reshape(T * r, d), keys.T) * d**-0.5
    # Padding may lie beyond the cache, where its window would be empty and the softmax NaN.
    age = jnp.minimum(positions, M - 1)[:, None] - jnp.arange(M)[None]
    read = age >= 0 if window is None else (age >= 0) & (age < window)
    visible = jnp.where(read, 0.0, -jnp.inf).astype(wide)
    weights = jax.nn.softmax(scores.reshape(T, r, M) + visible[:, None], axis=-1).astype(values.dtype)
    return product(weights.reshape(T * r, M), values).reshape(T, r, d).astype(q.dtype)
