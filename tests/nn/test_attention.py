"""Plain and windowed attention: dense softmax in numpy, segments, prefixes and blocks, padding beyond the cache."""

from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxdelta.nn.attention import Attention
from jaxdelta.nn.sizes import AttentionSizes
from ports.compare import relative_error
from tests.helpers import mix, mixed_in_segments, parameters, randomised

D, d = 14, 6
THETA = 1e3


@cache
def attention(window=None, bias=False, heads=(4, 2)):
    sizes = AttentionSizes(*heads, head_dim=d, rope_theta=THETA, window=window, bias=bias)
    return randomised(Attention(D, sizes, dtype=jnp.float32, rngs=nnx.Rngs(0)))


def inputs(T, B=2, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((B, T, D)), jnp.float32)


def rotated(x):
    """[T, d]: the complex numbers x_i + j x_{i + d/2}, turned by position / theta^(2i/d)."""
    z = x[:, : d // 2] + 1j * x[:, d // 2 :]
    z = z * np.exp(1j * np.arange(len(x))[:, None] / THETA ** (2 * np.arange(d // 2) / d))
    return np.concatenate([z.real, z.imag], axis=-1)


def definition(layer, x):
    """The whole text at once, head by head, in f64: token t reads t - window + 1 .. t."""
    s, p, x = layer.sizes, parameters(layer), np.asarray(x, np.float64)
    B, T, _ = x.shape
    age = np.arange(T)[:, None] - np.arange(T)
    hidden = (age < 0) | (age >= (s.window or T))
    q, k, v = (x @ p[name].T + p.get(name + "_bias", 0) for name in "qkv")
    heads = np.zeros((B, T, s.num_query_heads, d))
    for b, a in np.ndindex(B, s.num_query_heads):
        at, own = (slice(i * d, (i + 1) * d) for i in (a // (s.num_query_heads // s.num_kv_heads), a))
        scores = rotated(q[b][:, own]) @ rotated(k[b][:, at]).T / np.sqrt(d)
        weights = np.exp(np.where(hidden, -np.inf, scores))
        heads[b, :, a] = weights / weights.sum(-1, keepdims=True) @ v[b][:, at]
    return heads.reshape(B, T, -1) @ p["out"].T


@pytest.mark.parametrize("heads", [(4, 2), (3, 1), (2, 2)], ids=str)
@pytest.mark.parametrize(("window", "bias"), [(None, False), (None, True), (1, False), (5, True), (21, False), (99, False)])
def test_segments_equal_a_dense_softmax(window, bias, heads):
    """Windows of one token, across boundaries, of the text and longer; query head a reads key head a // (A / G)."""
    layer, x = attention(window, bias, heads), inputs(21)
    y, _ = mixed_in_segments(layer, x, (8, 8, 5), 30)
    assert relative_error(y, definition(layer, x)) < 1e-5


def test_a_window_of_one_token_reads_its_value_alone():
    layer, x = attention(1, False, (2, 2)), inputs(7)
    p = parameters(layer)
    assert relative_error(mixed_in_segments(layer, x, (7,), 7)[0], np.asarray(x, np.float64) @ p["v"].T @ p["out"].T) < 1e-5


def test_a_window_ends_at_its_last_token():
    """Of five tokens: a change four tokens back is seen, one five back is not."""
    layer, x = attention(5), inputs(12)
    before, after = (mixed_in_segments(layer, a, (12,), 12)[0] for a in (x, x.at[:, 3].add(1.0)))
    changed = np.abs(after - before).max((0, 2)) > 1e-6
    np.testing.assert_array_equal(np.flatnonzero(changed), np.arange(3, 8))


@pytest.mark.parametrize("window", (None, 5))
def test_any_split_equals_one_pass(window):
    layer, x = attention(window, True), inputs(21)
    (y, carry), (expected, whole) = (mixed_in_segments(layer, x, n, 25) for n in ((1, 3, 16, 1), (21,)))
    assert relative_error(y, expected) < 1e-5
    for a, b in zip(carry, whole, strict=True):
        assert relative_error(a, b) < 1e-6
        np.testing.assert_array_equal(a[:, 21:], 0)


@pytest.mark.parametrize("window", (3, 520))
def test_prefixes_of_a_long_cache_hold_the_window(window):
    """Of 2,000 places the prefixes of 512 and 768 are filled to the last and crossed by single tokens."""
    layer, x = attention(window, False, (2, 1)), inputs(780, B=1)
    y, _ = mixed_in_segments(layer, x, (511, 1, 1, 254, 1, 1, 11), 2000)
    expected = definition(layer, x)
    assert relative_error(y[:, :510], expected[:, :510]) < 1e-5
    assert relative_error(y[:, 510:], expected[:, 510:]) < 1e-5


@pytest.mark.parametrize("window", (None, 7))
def test_blocks_of_queries_keep_the_window(window):
    """600 queries in two blocks of 512, the second padded."""
    layer, x = attention(window, False, (2, 1)), inputs(600, B=1)
    y, expected = mixed_in_segments(layer, x, (600,), 600)[0], definition(layer, x)
    assert relative_error(y, expected) < 1e-5
    assert relative_error(y[:, 512:519], expected[:, 512:519]) < 1e-5


@pytest.mark.parametrize("window", (1, 3, None))
def test_padding_beyond_the_cache_gives_numbers(window):
    """A text of 5 in a cache of 5, padded to 12: all that the windows of padding could read lies beyond the cache."""
    layer, x = attention(window), inputs(12)
    positions = jnp.broadcast_to(jnp.arange(12), (2, 12))
    y, carry = mix(layer, x, layer.init_carry(2, 5, x.dtype), positions, jnp.array([5, 3]))
    expected, solo = mixed_in_segments(layer, x[:, :5], (5,), 5)
    assert jnp.isfinite(y).all()
    assert relative_error(y[0, :5], expected[0]) < 1e-5
    assert relative_error(y[1, :3], expected[1, :3]) < 1e-5
    for a, b in zip(carry, solo, strict=True):
        assert relative_error(a[0], b[0]) < 1e-6
        np.testing.assert_array_equal(a[1, 3:], 0)


def test_cache_and_output_of_bf16_are_bf16_and_biases_f32():
    layer = Attention(D, AttentionSizes(4, 2, d, bias=True), dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    y, carry = mixed_in_segments(layer, inputs(5).astype(jnp.bfloat16), (5,), 5)
    assert y.dtype == carry.keys.dtype == carry.values.dtype == jnp.bfloat16
    assert layer.q_bias[...].dtype == layer.v_bias[...].dtype == jnp.float32


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(num_query_heads=3), "no multiple"),
        (dict(num_kv_heads=0), "num_kv_heads is 0; expected at least 1"),
        (dict(head_dim=7), "7 entries rotate; expected an even number"),
        (dict(head_dim=0), "head_dim is 0; expected at least 1"),
        (dict(window=0), "window is 0; expected at least 1"),
    ],
    ids=str,
)
def test_sizes_that_contradict_one_another_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        AttentionSizes(**(dict(num_query_heads=4, num_kv_heads=2, head_dim=6) | sizes))
