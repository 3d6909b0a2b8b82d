"""The linear layer of flash-linear-attention's models: its definition in numpy under every option, segments and padding."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxdelta.models.config import DeltaLMConfig
from jaxdelta.nn.gated_deltaproduct import GatedDeltaProduct
from jaxdelta.nn.mixer import Span, untouched
from ports.compare import relative_error
from tests.helpers import delta_product, filled_carry, mix, parameters, randomised, rms_normalised, silu

D, G, K, V = 20, 2, 6, 5  # model width, key heads, key and value dim
B, T = 3, 19
OPTIONS = {
    "DeltaNet": dict(family="delta_net"),
    "no beta, twice": dict(family="delta_net", write_gate=False, negative_eigenvalues=True),
    "relu, sum, no conv": dict(family="delta_net", qk_activation="relu", qk_norm="sum", conv_width=1),
    "elu, sum, gate": dict(family="delta_net", qk_activation="elu", qk_norm="sum", output_gate="silu"),
    "silu, sum": dict(family="delta_net", qk_activation="silu", qk_norm="sum"),
    "identity, l2": dict(family="delta_net", qk_activation="identity", conv_width=3),
    "Gated DeltaNet": dict(family="gated_deltanet"),
    "sigmoid gate, two value heads a key head": dict(family="gated_deltanet", output_gate="sigmoid", num_value_heads=4),
    "no gate, no conv, negative": dict(family="gated_deltanet", output_gate=None, conv_width=1, negative_eigenvalues=True),
    "one step": dict(family="gated_deltaproduct", num_householder=1, forget_gate=True),
    "two steps": dict(family="gated_deltaproduct", num_householder=2, negative_eigenvalues=True),
    "three steps, no decay, two value heads": dict(
        family="gated_deltaproduct", num_householder=3, forget_gate=False, num_value_heads=4
    ),
    "three steps, no gate, no conv": dict(
        family="gated_deltaproduct", num_householder=3, negative_eigenvalues=True, output_gate=None, conv_width=1
    ),
}
GRID = pytest.mark.parametrize("options", OPTIONS)


def config(options="two steps", **changes):
    sizes = dict(layer_kinds=("linear",), attention=(), width=D, num_key_heads=G, num_value_heads=G, key_dim=K, value_dim=V)
    return DeltaLMConfig.tiny(**(sizes | OPTIONS[options] | changes))


@cache
def linear_layer(options="two steps"):
    return randomised(GatedDeltaProduct(config(options).linear_of(0), dtype=jnp.float32, rngs=nnx.Rngs(0)))


def inputs(T=T, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((B, T, D)), jnp.float32)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


ACTIVATIONS = {
    "silu": silu,
    "relu": lambda x: np.maximum(x, 0),
    "elu": lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))),
    "identity": lambda x: x,
}
NORMS = {
    "l2": lambda x: x / np.sqrt(np.sum(x**2, -1, keepdims=True) + 1e-6),
    "sum": lambda x: x / np.maximum(np.abs(x).sum(-1, keepdims=True), 1e-6),
}


def definition(layer, x, carry):
    """The layer's equations in f64, token by token, head by head and step by step; rows of a weight are step-major."""
    c, p = layer.sizes, parameters(layer)
    x, S, tail = (np.asarray(a, np.float64) for a in (x, *carry))
    n, H, W, T = c.num_householder, c.num_value_heads, c.conv_width, x.shape[1]
    history = np.concatenate([tail, np.concatenate([x @ p[name].T for name in "qkv"], -1)], axis=1)
    taps = np.concatenate([p["conv_" + name] for name in "qkv"]) if W > 1 else np.ones((history.shape[-1], 1))
    mixed = np.stack([np.einsum("bwe,ew->be", history[:, t : t + W], taps) for t in range(T)], axis=1)
    q, k, v = np.split(mixed, [G * K, (1 + n) * G * K], axis=-1)
    act, norm = ACTIVATIONS[c.qk_activation], NORMS[c.qk_norm]

    def entry(rows, t, j, h, heads, size):
        return rows[:, t, (j * heads + h) * size : (j * heads + h + 1) * size]

    tokens, steps = range(T), [(t, j) for t in range(T) for j in range(n)]
    shared = [h // (H // G) for h in range(H)]  # the key head of each value head
    q = np.stack([np.stack([norm(act(entry(q, t, 0, g, G, K))) for g in shared], 1) for t in tokens], 1)
    k = np.stack([np.stack([norm(act(entry(k, t, j, g, G, K))) for g in shared], 1) for t, j in steps], 1)
    v = np.stack([np.stack([silu(entry(v, t, j, h, H, V)) for h in range(H)], 1) for t, j in steps], 1)
    beta = np.ones((B, T * n, H))
    if c.write_gate:
        rows = sigmoid(x @ p["b"].T)
        beta = np.stack([rows[:, t, j * H : (j + 1) * H] for t, j in steps], 1)
    beta = beta * (2 if c.negative_eigenvalues else 1)
    g = -np.exp(p["A_log"]) * np.log1p(np.exp(x @ p["a"].T + p["dt_bias"])) if c.forget_gate else None
    o, S = delta_product(q, k, v, beta=beta, g=g, num_householder=n, state=S)
    y = rms_normalised(o) * p["norm"]
    if c.output_gate is not None:
        y = y * {"silu": silu, "sigmoid": sigmoid}[c.output_gate]((x @ p["z"].T).reshape(y.shape))
    return y.reshape(B, T, H * V) @ p["out"].T, S, history[:, T:]


def assert_carries_agree(found, expected, tolerance=1e-5):
    for name, a, b in zip(("S", "tail"), found, expected, strict=True):
        assert relative_error(a, b) < tolerance, name


@GRID
def test_layer_equals_its_definition(options):
    layer, x = linear_layer(options), inputs()
    carry = filled_carry(layer)
    y, found = mix(layer, x, carry)
    expected, *after = definition(layer, x, carry)
    assert relative_error(y, expected) < 1e-5
    assert_carries_agree(found, after)


@pytest.mark.parametrize("options", ["DeltaNet", "two steps"])
def test_a_single_token_equals_its_definition(options):
    """Of one step it takes the recurrence, of several the chunked form."""
    layer, x = linear_layer(options), inputs(1)
    carry = filled_carry(layer)
    y, found = mix(layer, x, carry)
    expected, *after = definition(layer, x, carry)
    assert relative_error(y, expected) < 1e-5
    assert_carries_agree(found, after)


@pytest.mark.parametrize("options", ["two steps", "three steps, no gate, no conv"])
def test_any_split_equals_one_pass(options):
    layer, x = linear_layer(options), inputs()
    expected, whole = mix(layer, x, filled_carry(layer))
    carry, outputs, start = filled_carry(layer), [], 0
    for n in (1, 2, 15, 1):
        y, carry = mix(layer, x[:, start : start + n], carry)
        outputs.append(y)
        start += n
    assert relative_error(jnp.concatenate(outputs, axis=1), expected) < 1e-5
    assert_carries_agree(carry, whole)


@pytest.mark.parametrize("padding", (1e3, np.nan))
@pytest.mark.parametrize("options", ["two steps", "no beta, twice", "relu, sum, no conv"])
def test_padding_leaves_the_carry_as_after_the_last_token_of_text(options, padding):
    """Neither NaN nor large values in the padding reach the carry or the text; an empty row keeps its carry bit for bit."""
    layer, x = linear_layer(options), inputs()
    carry, lengths = filled_carry(layer), np.array([T, 4, 0])
    padded = jnp.where((jnp.arange(T) < lengths[:, None])[..., None], x, padding)
    y, found = mix(layer, padded, carry, None, jnp.asarray(lengths))
    assert relative_error(y[0], definition(layer, x, carry)[0][0]) < 1e-5
    expected, *after = definition(layer, x[:, :4], carry)
    assert relative_error(y[1, :4], expected[1]) < 1e-5
    assert_carries_agree([a[1] for a in found], [a[1] for a in after])
    for a, b in zip(found, carry, strict=True):
        np.testing.assert_array_equal(a[2], b[2])


@pytest.mark.parametrize("options", [name for name in OPTIONS if name not in ("one step", "silu, sum", "DeltaNet")])
def test_every_parameter_has_a_gradient(options):
    layer = linear_layer(options)
    graphdef, state = nnx.split(layer, nnx.Param)
    x, carry = inputs(5), filled_carry(layer)

    @jax.jit
    @jax.grad
    def gradient(state):
        y, carry_after = nnx.merge(graphdef, state)(x, carry, Span(jnp.zeros(x.shape[:2], jnp.int32)))
        return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.sin(carry_after.S))

    for path, leaf in nnx.to_flat_state(gradient(state)):
        assert jnp.isfinite(leaf[...]).all(), path
        rows = jnp.abs(leaf[...].reshape(leaf[...].shape[0], -1)).max(-1)
        assert (rows > 0).all(), path


@pytest.mark.parametrize(
    ("options", "low", "high"),
    [("DeltaNet", 0, 1), ("two steps", 0, 2), ("one step", 0, 1), ("no beta, twice", 2, 2)],
)
def test_write_strengths_and_decays_lie_in_their_ranges(options, low, high):
    """Large inputs reach both ends; f32 in a bf16 model."""
    layer = randomised(GatedDeltaProduct(config(options).linear_of(0), dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    beta, g = layer.gates(100 * inputs(50).astype(jnp.bfloat16), untouched)
    assert beta.shape == (B, 50 * layer.sizes.num_householder, G)
    assert g.shape == (B, 50, G)
    assert beta.dtype == g.dtype == jnp.float32
    assert (float(beta.min()), float(beta.max())) == pytest.approx((low, high), abs=1e-3)
    assert jnp.all(g <= 0)
    assert bool((g < 0).any()) is layer.sizes.forget_gate


@pytest.mark.parametrize("options", ["DeltaNet", "two steps"])
def test_state_of_a_bf16_layer_is_f32(options):
    layer = GatedDeltaProduct(config(options).linear_of(0), dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    for T in (1, 5):
        y, carry = mix(layer, inputs(T).astype(jnp.bfloat16), layer.init_carry(B, 1, jnp.bfloat16))
        assert carry.S.dtype == jnp.float32
        assert y.dtype == carry.tail.dtype == jnp.bfloat16


def test_parameters_that_an_option_leaves_out_do_not_exist():
    names = {options: set(parameters(linear_layer(options))) for options in OPTIONS}
    assert names["DeltaNet"] == {"q", "k", "v", "conv_q", "conv_k", "conv_v", "b", "norm", "out"}
    assert names["no beta, twice"] == names["DeltaNet"] - {"b"}
    assert names["two steps"] == names["DeltaNet"] | {"a", "A_log", "dt_bias", "z"}
    assert names["relu, sum, no conv"] == {"q", "k", "v", "b", "norm", "out"}
