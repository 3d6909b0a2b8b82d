"""The Gated DeltaNet layer: its definition in numpy, heads, segments and padding."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxdelta.models.config import Qwen3_5Config
from jaxdelta.nn.gated_deltanet import GatedDeltaNet, log_decay
from jaxdelta.nn.mixer import LinearCarry, untouched
from jaxdelta.ops.delta_rule import LEAST
from ports.compare import relative_error
from tests.helpers import delta_rule, filled_carry, mix, parameters, randomised, rms_normalised, silu

D = Qwen3_5Config.tiny().width


@cache
def linear_layer(key_heads=2, value_heads=6):
    config = Qwen3_5Config.tiny(num_key_heads=key_heads, num_value_heads=value_heads)
    return randomised(GatedDeltaNet(config.linear_of(0), dtype=jnp.float32, rngs=nnx.Rngs(0)))


def inputs(T, B=3, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((B, T, D)), jnp.float32)


def in_segments(layer, x, carry, lengths):
    outputs, start = [], 0
    for n in lengths:
        y, carry = mix(layer, x[:, start : start + n], carry)
        outputs.append(y)
        start += n
    return jnp.concatenate(outputs, axis=1), carry


def definition(layer, x, carry):
    """The layer's equations in f64, the convolution and the recurrence token by token."""
    c, p = layer.sizes, parameters(layer)
    x, S, tail = (np.asarray(a, np.float64) for a in (x, *carry))
    B, T, _ = x.shape
    H, K, V = c.num_value_heads, c.key_dim, c.value_dim
    history = np.concatenate([tail, x @ p["in_qkv"].T], axis=1)
    mixed = silu(np.stack([np.einsum("bwe,ew->be", history[:, t : t + c.conv_width], p["conv"]) for t in range(T)], 1))
    q, k, v = np.split(mixed, [c.num_key_heads * K, 2 * c.num_key_heads * K], axis=-1)
    q, k = (a.reshape(B, T, -1, K) for a in (q, k))
    q, k = (a / np.sqrt(np.sum(a**2, -1, keepdims=True) + 1e-6) for a in (q, k))
    q, k = (np.stack([a[:, :, h // (H // c.num_key_heads)] for h in range(H)], axis=2) for a in (q, k))
    beta = 1 / (1 + np.exp(-x @ p["in_b"].T))
    g = -np.exp(p["A_log"]) * np.log1p(np.exp(x @ p["in_a"].T + p["dt_bias"]))
    o, S = delta_rule(q, k, v.reshape(B, T, H, V), g=g, beta=beta, state=S)
    y = rms_normalised(o) * p["norm"] * silu(x @ p["in_z"].T).reshape(B, T, H, V)
    return y.reshape(B, T, H * V) @ p["out"].T, S, history[:, -tail.shape[1] :]


@pytest.mark.parametrize(("key_heads", "value_heads", "T"), [(2, 4, 70), (2, 6, 70), (2, 6, 1)])
def test_layer_equals_its_definition(key_heads, value_heads, T):
    """Value head h reads key head h // (H / key heads): neighbours share, they do not alternate."""
    layer, x = linear_layer(key_heads, value_heads), inputs(T)
    carry = filled_carry(layer)
    y, (S, tail) = mix(layer, x, carry)
    for name, a, b in zip(("y", "S", "tail"), (y, S, tail), definition(layer, x, carry), strict=True):
        assert relative_error(a, b) < 1e-5, name


@pytest.mark.parametrize("lengths", [(1, 2, 3, 1, 64), (64, 7), (70, 1)], ids=str)
def test_any_split_equals_one_pass(lengths):
    layer, x = linear_layer(), inputs(71)
    found, expected = (in_segments(layer, x, filled_carry(layer), n) for n in (lengths, (71,)))
    assert relative_error(found[0], expected[0]) < 1e-5
    for a, b in zip(found[1], expected[1], strict=True):
        assert relative_error(a, b) < 1e-5


def test_weight_of_the_output_norm_is_no_offset():
    """Zeros give an output of exactly zero."""
    layer = randomised(GatedDeltaNet(Qwen3_5Config.tiny().linear_of(0), dtype=jnp.float32, rngs=nnx.Rngs(0)))
    layer.norm[...] = jnp.zeros_like(layer.norm[...])
    np.testing.assert_array_equal(mix(layer, inputs(5), filled_carry(layer))[0], 0)


def test_heads_are_normalised_each_for_itself():
    """The state of value head 0 a thousand times larger changes the output of head 0 alone."""
    layer = randomised(GatedDeltaNet(Qwen3_5Config.tiny().linear_of(0), dtype=jnp.float32, rngs=nnx.Rngs(0)))
    carry = filled_carry(layer)
    scaled = carry._replace(S=carry.S.at[:, 0].multiply(1000))
    x, V = inputs(5), layer.sizes.value_dim
    assert relative_error(mix(layer, x, scaled)[0], mix(layer, x, carry)[0]) > 1e-2
    layer.out[...] = layer.out[...].at[:, :V].set(0)
    np.testing.assert_array_equal(mix(layer, x, scaled)[0], mix(layer, x, carry)[0])


@pytest.mark.parametrize("padding", (1e3, np.nan))
def test_padding_leaves_the_carry_as_after_the_last_token_of_text(padding):
    """Neither NaN nor large values in the padding reach the carry, nor the outputs of text."""
    layer, x = linear_layer(), inputs(9)
    carry, lengths = filled_carry(layer), np.array([9, 4, 0])
    padded = jnp.where((jnp.arange(9) < lengths[:, None])[..., None], x, padding)
    y, found = mix(layer, padded, carry, None, jnp.asarray(lengths))
    for row, n in enumerate(lengths[:2]):
        one = slice(row, row + 1)
        y_solo, solo = mix(layer, x[one, :n], LinearCarry(*(a[one] for a in carry)))
        assert relative_error(y[one, :n], y_solo) < 1e-5
        for a, b in zip(found, solo, strict=True):
            assert relative_error(a[one], b) < 1e-5
    for a, b in zip(found, carry, strict=True):
        np.testing.assert_array_equal(a[2], b[2])


def test_gates_lie_in_their_ranges_and_are_f32_in_bf16():
    layer = GatedDeltaNet(Qwen3_5Config.tiny().linear_of(0), dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    beta, g = layer.gates(100 * inputs(50).astype(jnp.bfloat16), untouched)
    assert beta.dtype == g.dtype == jnp.float32
    assert jnp.all((beta >= 0) & (beta <= 1))
    assert jnp.all(g <= 0)


def test_fresh_decays_have_horizons_of_one_to_a_thousand_tokens():
    """g at zero input is A dt, with A in (1, 16) and dt in (1e-3, 1e-1), a different one for each head."""
    layer = GatedDeltaNet(Qwen3_5Config.tiny().linear_of(0), dtype=jnp.float32, rngs=nnx.Rngs(0))
    g = layer.gates(jnp.zeros((1, 1, D)), untouched)[1]
    assert jnp.all((g < -1e-3) & (g > -1.6))
    assert jnp.unique(g).size == 6


@pytest.mark.parametrize("A_log", (81.0, 100.0, 1e4, np.inf))
def test_a_rate_beyond_all_bounds_empties_the_state_whatever_the_step(A_log):
    """exp(100) is infinite in f32, and a step below x = -103 is 0: times each other they would be NaN."""
    x = jnp.array([-300.0, -104.0, -5.0, 0.0, 50.0])[None, :, None]

    def g(x, A_log):
        return log_decay(x, A_log, jnp.zeros(1))

    at = jnp.full(1, A_log)
    assert jnp.all(jnp.exp(g(x, at)) == 0)
    assert jnp.all(jnp.isfinite(g(x, at)))
    for derivative in (jax.grad(lambda *a: g(*a).sum(), (0, 1))(x, at), jax.jvp(g, (x, at), (x, jnp.ones(1)))[1]):
        for leaf in jax.tree.leaves(derivative):
            np.testing.assert_array_equal(leaf, 0)


def test_decays_of_trained_layers_are_their_formula():
    x = jnp.broadcast_to(jnp.linspace(-30, 30, 61)[None, :, None], (1, 61, 3))
    A_log, dt_bias = jnp.array([-5.0, 0.0, 3.0]), jnp.array([-7.0, 0.0, 2.0])
    expected = -np.exp(np.float64(A_log)) * np.log1p(np.exp(np.float64(x + dt_bias)))
    np.testing.assert_allclose(log_decay(x, A_log, dt_bias), np.maximum(expected, LEAST), rtol=1e-6)


def test_state_of_a_bf16_layer_is_f32():
    layer = GatedDeltaNet(Qwen3_5Config.tiny().linear_of(0), dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert layer.A_log[...].dtype == layer.dt_bias[...].dtype == layer.norm[...].dtype == jnp.float32
    for T in (1, 5):
        y, carry = mix(layer, inputs(T).astype(jnp.bfloat16), layer.init_carry(3, 1, jnp.bfloat16))
        assert carry.S.dtype == jnp.float32
        assert y.dtype == carry.tail.dtype == jnp.bfloat16
