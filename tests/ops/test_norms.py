"""RMSNorm with an offset scale, gated RMSNorm with a plain one, and l2norm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jaxdelta.ops.norms import gated_rms_norm, l2norm, rms_norm
from ports.compare import relative_error
from tests.helpers import TOLERANCE, rms_normalised, silu


def rows(seed, dtype=jnp.float32, scale=1.0, shape=(5, 3, 11)):
    return jnp.asarray(scale * np.random.default_rng(seed).standard_normal(shape), dtype)


def rms(x):
    return np.sqrt(np.mean(np.asarray(x, np.float64) ** 2, -1))


def test_rms_norm_equals_its_formula(dtype):
    x, weight = rows(0, dtype), rows(1, dtype, shape=(11,))
    assert (
        relative_error(rms_norm(x, weight), rms_normalised(np.asarray(x, np.float64)) * (1 + np.asarray(weight)))
        < TOLERANCE[dtype.name]
    )


def test_rms_norm_of_zero_weight_has_unit_rms():
    np.testing.assert_allclose(rms(rms_norm(rows(2), jnp.zeros(11))), 1, rtol=1e-5)


def test_rms_norm_of_weight_minus_one_is_zero():
    np.testing.assert_array_equal(rms_norm(rows(3), jnp.full(11, -1.0)), 0)


def test_one_plus_weight_is_not_rounded_to_bf16():
    """In bf16 1 + 0.003 is 1."""
    x, weight = rows(4), jnp.full(11, 0.003, jnp.bfloat16)
    ratio = rms_norm(x, weight) / rms_norm(x, jnp.zeros(11, jnp.bfloat16))
    np.testing.assert_allclose(ratio, 1.003, atol=1e-4)


def test_gated_norm_equals_its_formula(dtype):
    x, weight, z = rows(5, dtype), rows(6, dtype, shape=(11,)), rows(7, dtype)
    expected = rms_normalised(np.asarray(x, np.float64)) * np.asarray(weight) * silu(np.asarray(z, np.float64))
    assert relative_error(gated_rms_norm(x, weight, z), expected) < TOLERANCE[dtype.name]


def test_weight_of_the_gated_norm_is_no_offset():
    """Ones give silu(z) times rows of unit rms, zeros give zero."""
    x, z = rows(8), jnp.full((5, 3, 11), 0.7)
    np.testing.assert_allclose(rms(gated_rms_norm(x, jnp.ones(11), z)), silu(0.7), rtol=1e-5)
    np.testing.assert_array_equal(gated_rms_norm(x, jnp.zeros(11), z), 0)


def test_gate_comes_after_the_norm():
    """A gate of one value for a head would cancel in the norm; here it scales the result."""
    x, z = rows(9), jnp.full((5, 3, 11), 3.0)
    ratio = gated_rms_norm(x, jnp.ones(11), z) / gated_rms_norm(x, jnp.ones(11), z / 3)
    np.testing.assert_allclose(ratio, silu(3.0) / silu(1.0), rtol=1e-5)


def test_heads_are_normalised_each_for_itself():
    x, weight, z = rows(10), rows(11, shape=(11,)), rows(12)
    scaled = gated_rms_norm(x.at[:, 0].multiply(1000), weight, z)
    np.testing.assert_array_equal(scaled[:, 1:], gated_rms_norm(x, weight, z)[:, 1:])


@pytest.mark.parametrize("eps", (1e-6, 1e-5))
def test_eps_of_rms_norms_is_added_to_the_mean_square(eps):
    """Rows of rms 1e-3: their square is 1e-6, so eps decides the result."""
    x, ones, z = jnp.full((2, 11), 1e-3), jnp.ones(11), jnp.ones((2, 11))
    expected = 1e-3 / np.sqrt(1e-6 + eps)
    np.testing.assert_allclose(rms_norm(x, 0 * ones, eps=eps), expected, rtol=1e-6)
    np.testing.assert_allclose(gated_rms_norm(x, ones, z, eps=eps), expected * silu(1.0), rtol=1e-6)


def test_default_eps_of_rms_norms():
    x, ones, z = jnp.full((2, 11), 1e-3), jnp.ones(11), jnp.ones((2, 11))
    np.testing.assert_array_equal(rms_norm(x, ones), rms_norm(x, ones, eps=1e-6))
    np.testing.assert_array_equal(gated_rms_norm(x, ones, z), gated_rms_norm(x, ones, z, eps=1e-6))


def test_bf16_rows_are_normalised_in_f32_and_rounded_once():
    x, weight, z = rows(13, jnp.bfloat16), rows(14, shape=(11,)), rows(15, jnp.bfloat16)
    wide = x.astype(jnp.float32)
    for found, expected in [
        (rms_norm(x, weight), rms_norm(wide, weight)),
        (gated_rms_norm(x, weight, z), gated_rms_norm(wide, weight, z.astype(jnp.float32))),
    ]:
        assert found.dtype == jnp.bfloat16
        np.testing.assert_array_equal(found, expected.astype(jnp.bfloat16))


def test_gated_norm_has_the_dtype_of_its_gate():
    assert gated_rms_norm(rows(16), jnp.ones(11), rows(17, jnp.bfloat16)).dtype == jnp.bfloat16


def test_l2norm_has_unit_length_by_the_sum_of_squares():
    """By the mean, keys of dimension K would have length sqrt(K) and the state would explode."""
    np.testing.assert_allclose(np.linalg.norm(l2norm(rows(18, shape=(64, 128))), axis=-1), 1, rtol=1e-5)


@pytest.mark.parametrize(("length", "expected"), [(1e-3, 0.5**0.5), (1.0, 1 / np.sqrt(1 + 1e-6)), (0.0, 0.0), (1e3, 1.0)])
def test_eps_of_l2norm_stands_inside_the_root(length, expected):
    x = length * np.linalg.qr(np.random.default_rng(19).standard_normal((11, 3)))[0].T
    np.testing.assert_allclose(np.linalg.norm(l2norm(jnp.asarray(x, jnp.float32)), axis=-1), expected, rtol=3e-7)


def test_l2norm_of_bf16_is_computed_and_returned_in_f32():
    x = rows(20, jnp.bfloat16)
    assert l2norm(x).dtype == jnp.float32
    np.testing.assert_array_equal(l2norm(x), l2norm(x.astype(jnp.float32)))


def test_gradient_of_l2norm_at_zero_is_one_over_the_root_of_eps():
    """x / ‖x‖ has none: NaN."""
    np.testing.assert_allclose(jax.jacobian(l2norm)(jnp.zeros(11)), 1e3 * np.eye(11), rtol=1e-6)


@pytest.mark.parametrize("mode", ("fwd", "rev"))
@pytest.mark.parametrize("scale", (1e-3, 1.0))
def test_derivatives_equal_central_differences(scale, mode, x64):
    x, weight, z = rows(21, jnp.float64, scale), rows(22, jnp.float64, shape=(11,)), rows(23, jnp.float64)
    for norm, *args in ((rms_norm, x, weight), (gated_rms_norm, x, weight, z), (l2norm, x)):
        check_grads(jax.jit(norm), args, order=1, modes=[mode], atol=1e-6, rtol=1e-6, eps=1e-4 * scale)


def test_gradients_at_zero_rows_are_finite():
    zero, ones = jnp.zeros((2, 11)), jnp.ones(11)
    for norm in (lambda x: rms_norm(x, ones), lambda x: gated_rms_norm(x, ones, zero + 1), l2norm):
        assert jnp.isfinite(jax.grad(lambda x: norm(x).sum())(zero)).all()  # noqa: B023
