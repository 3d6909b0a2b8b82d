"""The short convolution: order of its taps, its tail across splits, and padding."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jaxdelta.ops.short_conv import short_conv
from ports.compare import relative_error
from tests.helpers import TOLERANCE

conv = jax.jit(short_conv)


def inputs(T=8, *, B=3, E=5, W=4, dtype=jnp.float32):
    """x, taps and a tail to start from."""
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in ((B, T, E), (E, W), (B, W - 1, E)))


def definition(x, taps, tail):
    """y_t = Σ_i w_i x_{t−W+1+i}, token by token."""
    x = np.concatenate([tail, x], axis=1).astype(np.float64)
    W = taps.shape[1]
    y = [sum(np.asarray(taps[:, i], np.float64) * x[:, t + i] for i in range(W)) for t in range(x.shape[1] - W + 1)]
    return np.stack(y, axis=1), x[:, x.shape[1] - W + 1 :]


def in_segments(x, taps, tail, lengths):
    outputs, start = [], 0
    for n in lengths:
        y, tail = conv(x[:, start : start + n], taps, tail=tail)
        outputs.append(y)
        start += n
    return jnp.concatenate(outputs, axis=1), tail


@pytest.mark.parametrize("W", (1, 4))
@pytest.mark.parametrize("T", (1, 2, 3, 9))
def test_convolution_equals_its_definition(T, W, dtype):
    x, taps, tail = inputs(T, W=W, dtype=dtype)
    for found, expected in zip(conv(x, taps, tail=tail), definition(x, taps, tail), strict=True):
        assert relative_error(found, expected) < TOLERANCE[dtype.name]


def test_last_tap_multiplies_the_current_token():
    """Taps 1, 2, 3, 4 and an impulse at t = 0 give 4, 3, 2, 1, 0."""
    x = jnp.zeros((1, 5, 2)).at[0, 0, 1].set(1.0)
    y, _ = conv(x, jnp.array([[5.0, 6, 7, 8], [1, 2, 3, 4]]))
    np.testing.assert_array_equal(y[0, :, 1], [4, 3, 2, 1, 0])
    np.testing.assert_array_equal(y[0, :, 0], 0)


def test_no_tail_is_a_tail_of_zeros():
    x, taps, tail = inputs()
    for a, b in zip(conv(x, taps), conv(x, taps, tail=0 * tail), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("lengths", [(1, 7), (2, 6), (3, 5), (1, 2, 5), (1,) * 8, (0, 8), (8, 0)], ids=str)
def test_any_split_equals_one_pass(lengths):
    x, taps, tail = inputs()
    for a, b in zip(in_segments(x, taps, tail, lengths), conv(x, taps, tail=tail), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_derivatives_through_short_segments_equal_central_differences(x64):
    """Segments shorter than W - 1 hand on part of the tail that they were given."""
    split = jax.jit(lambda *args: in_segments(*args, (1, 2, 5)))
    check_grads(split, inputs(dtype=jnp.float64), order=1, atol=1e-8, rtol=1e-8)


def test_gradients_through_short_segments_equal_those_of_one_pass(x64):
    @partial(jax.jit, static_argnums=0)
    @partial(jax.grad, argnums=(1, 2, 3))
    def gradients(lengths, *args):
        return sum(jnp.vdot(a, jnp.cos(jnp.arange(a.size)).reshape(a.shape)) for a in in_segments(*args, lengths))

    args = inputs(dtype=jnp.float64)
    for a, b in zip(gradients((1, 2, 5), *args), gradients((8,), *args), strict=True):
        assert relative_error(a, b) < 1e-12


@pytest.mark.parametrize("length", (0, 1, 2, 3, 7, 8))
def test_tail_of_a_padded_row_ends_at_its_last_token(length):
    x, taps, tail = inputs()
    lengths = np.array([8, length, 4])
    y, tails = conv(x, taps, tail=tail, length=lengths)
    for row, n in enumerate(lengths):
        y_row, tail_row = conv(x[row : row + 1, :n], taps, tail=tail[row : row + 1])
        np.testing.assert_array_equal(tails[row], tail_row[0])
        np.testing.assert_allclose(y[row, :n], y_row[0], rtol=1e-6, atol=1e-6)


def test_a_row_of_length_zero_hands_its_tail_on():
    x, taps, tail = inputs()
    _, tails = conv(x, taps, tail=tail, length=jnp.zeros(3, jnp.int32))
    np.testing.assert_array_equal(tails, tail)


def test_padding_has_no_gradient():
    """Neither the tail handed on nor the outputs of text depend on what follows the text."""
    x, taps, tail = inputs()
    text = jnp.arange(8) < jnp.array([8, 5, 0])[:, None]

    def loss(x):
        y, tails = conv(x, taps, tail=tail, length=text.sum(1))
        return jnp.sum(jnp.where(text[..., None], y, 0)) + jnp.sum(tails**2)

    gradient = jax.jit(jax.grad(loss))(x)
    np.testing.assert_array_equal(jnp.where(text[..., None], 0, gradient), 0)
    assert jnp.all(gradient[text] != 0)


def test_outputs_and_tail_of_bf16_are_bf16():
    x, taps, tail = inputs(dtype=jnp.bfloat16)
    y, tails = conv(x, taps.astype(jnp.float32), tail=tail.astype(jnp.float32))
    assert y.dtype == tails.dtype == jnp.bfloat16
