"""Gated attention: its definition in numpy, RoPE, and the cache across segments of any length."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxdelta.models.config import Qwen3_5Config
from jaxdelta.nn.attention import rotary_angles, rotate
from jaxdelta.nn.gated_attention import GatedAttention
from ports.compare import relative_error
from tests.helpers import mix, mixed_in_segments, parameters, randomised, rms_normalised

CONFIG = Qwen3_5Config.tiny()
A, G, d, D, R = CONFIG.num_query_heads, CONFIG.num_kv_heads, CONFIG.head_dim, CONFIG.width, CONFIG.rotary_dim


@cache
def attention():
    return randomised(GatedAttention(D, CONFIG.attention_of(3), CONFIG.norm_eps, dtype=jnp.float32, rngs=nnx.Rngs(0)))


def inputs(T, B=2, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((B, T, D)), jnp.float32)


def rotated(x, positions, theta=1e7, rotary_dim=R):
    """Pairs (i, i + R/2) of the last axis turned by position / theta^(2i/R), in f64; x is [T, d]."""
    x, half = np.array(x, np.float64), rotary_dim // 2
    for i in range(half):
        angle = positions / theta ** (2 * i / rotary_dim)
        pair = x[:, i].copy(), x[:, i + half].copy()
        x[:, i] = pair[0] * np.cos(angle) - pair[1] * np.sin(angle)
        x[:, i + half] = pair[1] * np.cos(angle) + pair[0] * np.sin(angle)
    return x


def definition(layer, x):
    """The whole text at once, head by head, in f64."""
    p, x = parameters(layer), np.asarray(x, np.float64)
    B, T, _ = x.shape
    rows_q, rows_k, rows_v = p["q"].reshape(A, 2, d, D), p["k"].reshape(G, d, D), p["v"].reshape(G, d, D)
    heads = np.zeros((B, T, A, d))
    for b, a in np.ndindex(B, A):
        g = a // (A // G)
        q = rotated(rms_normalised(x[b] @ rows_q[a, 0].T) * (1 + p["q_norm"]), np.arange(T))
        k = rotated(rms_normalised(x[b] @ rows_k[g].T) * (1 + p["k_norm"]), np.arange(T))
        scores = np.where(np.tri(T, dtype=bool), q @ k.T / np.sqrt(d), -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        attended = weights / weights.sum(-1, keepdims=True) @ (x[b] @ rows_v[g].T)
        heads[b, :, a] = attended / (1 + np.exp(-x[b] @ rows_q[a, 1].T))
    return heads.reshape(B, T, A * d) @ p["out"].T


def test_layer_equals_its_definition():
    layer, x = attention(), inputs(21)
    assert relative_error(mixed_in_segments(layer, x, (21,), 21)[0], definition(layer, x)) < 1e-5


def test_rows_of_queries_and_gates_alternate_head_by_head():
    """Gates of +20 for head 1 and −20 for all others: only the columns of head 1 in the output projection count."""
    layer = randomised(GatedAttention(D, CONFIG.attention_of(3), CONFIG.norm_eps, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    gates = np.where(np.arange(A) == 1, 20.0, -20.0)
    rows = np.array(layer.q[...]).reshape(A, 2, d, D)
    rows[:, 1] = 0
    rows[:, 1, :, 0] = gates[:, None]
    layer.q[...] = jnp.asarray(rows.reshape(A * 2 * d, D))
    x = inputs(9).at[..., 0].set(1.0)
    whole, _ = mixed_in_segments(layer, x, (9,), 9)
    columns = np.arange(A * d) // d == 1
    layer.out[...] = jnp.where(columns, layer.out[...], 0)
    assert relative_error(mixed_in_segments(layer, x, (9,), 9)[0], whole) < 1e-6
    assert relative_error(whole, definition(layer, x)) < 1e-5


def test_queries_of_a_segment_see_what_came_before_and_themselves():
    """Two tokens after five equal two single steps, and the last of them leaves the outputs of the others as they were."""
    layer, x = attention(), inputs(7)
    together, _ = mixed_in_segments(layer, x, (5, 2), 7)
    singly, _ = mixed_in_segments(layer, x, (5, 1, 1), 7)
    assert relative_error(together, singly) < 1e-6
    changed, _ = mixed_in_segments(layer, x.at[:, -1].add(1.0), (5, 2), 7)
    np.testing.assert_array_equal(changed[:, :-1], together[:, :-1])
    assert relative_error(changed[:, -1], together[:, -1]) > 1e-2


def test_the_cache_after_segments_equals_that_of_one_pass():
    layer, x = attention(), inputs(31)
    (y, carry), (y_whole, whole) = mixed_in_segments(layer, x, (12, 12, 7), 40), mixed_in_segments(layer, x, (31,), 40)
    assert relative_error(y, y_whole) < 1e-5
    for a, b in zip(carry, whole, strict=True):
        assert relative_error(a, b) < 1e-6
        np.testing.assert_array_equal(a[:, 31:], 0)


def test_prefixes_of_a_long_cache_hold_all_tokens_so_far():
    """Of 5,000 places the first 512 and 1,024 are filled to the last and crossed by single tokens."""
    layer, x = attention(), inputs(1100, B=1)
    expected = definition(layer, x)
    y, _ = mixed_in_segments(layer, x, (511, 1, 1, 510, 1, 1, 75), 5000)
    assert relative_error(y, expected) < 1e-5
    assert relative_error(y[:, 510:], expected[:, 510:]) < 1e-5


def test_blocks_of_queries_equal_shorter_segments():
    """600 queries in two blocks of 512, the second padded, forward and in reverse mode."""
    layer, x, weights = attention(), inputs(600, B=1), inputs(600, B=1, seed=1)

    def gradient(lengths):
        return jax.grad(lambda x: jnp.sum(weights * mixed_in_segments(layer, x, lengths, 600)[0]))(x)

    assert relative_error(mixed_in_segments(layer, x, (600,), 600)[0], definition(layer, x)) < 1e-5
    assert relative_error(gradient((600,)), gradient((300, 300))) < 1e-5


def test_rows_of_different_lengths_equal_their_solo_runs():
    """Three padded segments of a batch of two; what stands in the padding, were it NaN, reaches nothing."""
    layer, x = attention(), inputs(24)
    lengths = np.array([[8, 3], [5, 8], [0, 1]])
    carry, position, outputs = layer.init_carry(2, 30, x.dtype), np.zeros(2, int), [[], []]
    for length in lengths:
        segment = np.full((2, 8, D), np.nan, np.float32)
        for row, n in enumerate(length):
            segment[row, :n] = x[row, position[row] : position[row] + n]
        positions = jnp.asarray(position[:, None] + np.arange(8))
        y, carry = mix(layer, jnp.asarray(segment), carry, positions, jnp.asarray(length))
        for row, n in enumerate(length):
            outputs[row].append(y[row, :n])
        position += length
    for row, n in enumerate(position):
        y, solo = mixed_in_segments(layer, x[row : row + 1, :n], (int(n),), 30)
        assert relative_error(jnp.concatenate(outputs[row]), y[0]) < 1e-5
        for a, b in zip(carry, solo, strict=True):
            assert relative_error(a[row], b[0]) < 1e-6


def test_cache_and_output_of_bf16_are_bf16():
    layer = GatedAttention(D, CONFIG.attention_of(3), CONFIG.norm_eps, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    y, carry = mixed_in_segments(layer, inputs(5).astype(jnp.bfloat16), (5,), 5)
    assert y.dtype == carry.keys.dtype == carry.values.dtype == jnp.bfloat16
    assert layer.q_norm[...].dtype == layer.k_norm[...].dtype == jnp.float32


@pytest.mark.parametrize(
    ("position", "tolerance"), [(0, 0), (255, 1e-4), (256, 1e-4), (4095, 1e-3), (15962, 2e-3), (131071, 1.5e-2)]
)
def test_angles_of_long_texts_are_those_of_f64(position, tolerance):
    """bf16 has an error of 16 in position 15962; f32 angles are off by up to 8e-3 at 131071."""
    angles = np.asarray(rotary_angles(jnp.full((1, 1), position), 64, 1e7)[0, 0], np.float64)
    expected = position / 1e7 ** (np.arange(32) / 32)
    np.testing.assert_allclose(np.cos(angles), np.cos(expected), atol=tolerance, rtol=0)
    np.testing.assert_allclose(np.sin(angles), np.sin(expected), atol=tolerance, rtol=0)


def test_rotation_turns_the_two_halves_of_the_leading_entries():
    x = jnp.asarray(np.random.default_rng(2).standard_normal((1, 300, 3, d)), jnp.float32)
    y = rotate(x, rotary_angles(jnp.arange(300)[None], R, 1e7))
    for head in range(3):
        assert relative_error(y[0, :, head], rotated(x[0, :, head], np.arange(300))) < 1e-5
    np.testing.assert_array_equal(y[..., R:], x[..., R:])


def test_products_of_rotated_vectors_depend_on_the_distance_alone():
    q, k = jnp.asarray(np.random.default_rng(3).standard_normal((2, 1, 1, 1, d)), jnp.float32)

    def at(x, position):
        return np.asarray(rotate(x, rotary_angles(jnp.full((1, 1), position), R, 1e4)).squeeze(), np.float64)

    near, far = at(q, 5) @ at(k, 2), at(q, 205) @ at(k, 202)
    assert near == pytest.approx(far, rel=1e-4)
    assert abs(near - at(q, 5) @ at(k, 4)) > 0.1


def test_no_rotary_dim_is_no_rotation():
    x = jnp.asarray(np.random.default_rng(4).standard_normal((1, 3, 2, d)), jnp.float32)
    np.testing.assert_array_equal(rotate(x, rotary_angles(jnp.arange(3)[None], 0, 1e7)), x)
