"""The gated delta rule: its definition, the chunked form, splits, and derivatives."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jaxdelta.dims import HIGHEST
from jaxdelta.ops.delta_rule import gated_delta_rule, gated_delta_rule_chunked, inverse_unit_lower
from ports.compare import relative_error
from tests.helpers import DECAYS, KEYS, TOLERANCE, assert_agree, delta_inputs, delta_rule, dot_precisions, unit_keys

recurrent = jax.jit(gated_delta_rule, static_argnames="scale")
chunked = jax.jit(gated_delta_rule_chunked, static_argnames=("scale", "chunk_size"))
FORMS = pytest.mark.parametrize("rule", [recurrent, partial(chunked, chunk_size=2)], ids=["recurrent", "chunked"])
NAMES = ("q", "k", "v", "g", "beta", "state")


@FORMS
def test_one_step_is_the_matrix_form(rule, dtype):
    """S_1 = alpha (I - beta k k^T) S_0 + beta k v^T."""
    x = delta_inputs(0, 1, decay="-2", B=1, H=1, dtype=dtype)
    k, v, S = (np.asarray(x[name], np.float64).squeeze() for name in ("k", "v", "state"))
    alpha, beta = np.exp(float(x["g"][0, 0, 0])), float(x["beta"][0, 0, 0])
    expected = alpha * (np.eye(k.size) - beta * np.outer(k, k)) @ S + beta * np.outer(k, v)
    assert relative_error(rule(**x)[1][0, 0], expected) < TOLERANCE[dtype.name]


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("keys", KEYS)
def test_recurrence_equals_definition(keys, decay, dtype):
    x = delta_inputs(1, 70, keys=keys, decay=decay, dtype=dtype)
    assert_agree(recurrent(**x), delta_rule(**x), TOLERANCE[dtype.name])


@pytest.mark.parametrize("chunk_size", (16, 64))
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("keys", KEYS)
def test_chunked_equals_recurrence_for_all_keys_and_decays(keys, decay, chunk_size, dtype):
    x = delta_inputs(2, 70, keys=keys, decay=decay, dtype=dtype)
    found = chunked(**x, chunk_size=chunk_size)
    assert_agree(found, recurrent(**x), TOLERANCE[dtype.name])
    assert_agree(found, delta_rule(**x), TOLERANCE[dtype.name])


@pytest.mark.parametrize("chunk_size", (1, 16, 64, 1000))
@pytest.mark.parametrize("T", (1, 5, 63, 64, 65, 70, 229))
def test_chunk_size_never_changes_the_result(T, chunk_size):
    x = delta_inputs(3, T, keys="cosine 0.5", dtype=jnp.float32)
    assert_agree(chunked(**x, chunk_size=chunk_size), recurrent(**x), 1e-5)


@pytest.mark.parametrize("split", [(1, 2, 3, 1, 63), (64, 6), (0, 70), (69, 1)])
@pytest.mark.parametrize("rule", [recurrent, partial(chunked, chunk_size=16)], ids=["recurrent", "chunked"])
def test_any_split_equals_one_pass(rule, split):
    x = delta_inputs(4, 70, keys="cosine 0.9", dtype=jnp.float32)
    S, outputs = x.pop("state"), []
    expected = recurrent(**x, state=S)
    for start, stop in zip(np.cumsum((0, *split[:-1])), np.cumsum(split), strict=True):
        o, S = rule(**{name: a[:, start:stop] for name, a in x.items()}, state=S)
        outputs.append(o)
    assert_agree((jnp.concatenate(outputs, 1), S), expected, 1e-5)


@FORMS
def test_decay_comes_before_the_error_term(rule):
    """The same unit key twice, beta = 1: what is read back is the second value alone, whatever its decay."""
    x = delta_inputs(5, 2, dtype=jnp.float32)
    k = x["k"].at[:, 1].set(x["k"][:, 0])
    _, S = rule(**x | {"k": k, "g": jnp.full_like(x["g"], -1.0), "beta": jnp.ones_like(x["beta"])})
    read = jnp.einsum("bhkv,bhk->bhv", S, k[:, 1], precision=HIGHEST)
    assert relative_error(read, x["v"][:, 1]) < 1e-5


@FORMS
def test_queries_are_scaled_once_by_the_root_of_key_dim(rule):
    """One token, q = k a unit vector, beta = 1, v = 1: every output is 1 / sqrt(K)."""
    x = delta_inputs(6, 1, dtype=jnp.float32)
    one = {"q": x["k"], "v": jnp.ones_like(x["v"]), "beta": jnp.ones_like(x["beta"]), "state": None}
    assert relative_error(rule(**x | one)[0], np.full(x["v"].shape, 13**-0.5)) < 1e-6


@FORMS
def test_scale_multiplies_the_output_alone(rule):
    x = delta_inputs(7, 5, dtype=jnp.float32)
    (o, S), (o_unit, S_unit) = rule(**x, scale=0.3), rule(**x, scale=1.0)
    assert relative_error(o, 0.3 * o_unit) < 1e-6
    np.testing.assert_array_equal(S, S_unit)


@FORMS
@pytest.mark.parametrize("keys", KEYS)
def test_unit_write_strength_reads_back_the_value(rule, keys):
    """beta = 1: S_t^T k_t = v_t, whatever was there before."""
    x = delta_inputs(8, 5, keys=keys, dtype=jnp.float32)
    o, _ = rule(**x | {"q": x["k"], "beta": jnp.ones_like(x["beta"])}, scale=1.0)
    assert relative_error(o, x["v"]) < 1e-5


@FORMS
def test_no_write_strength_only_decays(rule):
    """beta = 0: S_T = exp(sum g) S_0."""
    x = delta_inputs(9, 5, decay="half 0, half -3", dtype=jnp.float32)
    _, S = rule(**x | {"beta": jnp.zeros_like(x["beta"])})
    assert relative_error(S, jnp.exp(x["g"].sum(1))[..., None, None] * x["state"]) < 1e-6


@FORMS
def test_no_state_is_a_zero_state(rule):
    x = delta_inputs(10, 5, dtype=jnp.float32)
    for a, b in zip(rule(**x | {"state": None}), rule(**x | {"state": jnp.zeros_like(x["state"])}), strict=True):
        np.testing.assert_array_equal(a, b)


@FORMS
def test_state_and_output_of_bf16_inputs_are_f32(rule):
    x = delta_inputs(11, 5, dtype=jnp.bfloat16)
    o, S = rule(**x)
    assert o.dtype == S.dtype == jnp.float32
    assert_agree((o, S), delta_rule(**x), 1e-5)


@FORMS
def test_every_product_is_of_the_highest_precision(rule):
    """Plain f32 products are TF32 on GPUs, which no CPU test would see."""
    x = delta_inputs(12, 5, dtype=jnp.float32)
    precisions = dot_precisions(jax.grad(lambda x: sum(a.sum() for a in rule(**x))), x)
    assert len(precisions) >= 6
    assert set(precisions) == {(HIGHEST, HIGHEST)}


def test_empty_chunks_are_refused():
    with pytest.raises(ValueError, match="chunk_size is 0"):
        gated_delta_rule_chunked(**delta_inputs(13, 5, dtype=jnp.float32), chunk_size=0)


def weighted(rule, seed=0, **options):
    """A scalar function of all six inputs that weighs every entry of o and S differently."""

    def loss(*inputs):
        outputs = rule(**dict(zip(NAMES, inputs, strict=True)), **options)
        rng = np.random.default_rng(seed)
        return sum(jnp.sum(rng.standard_normal(a.shape) * a) for a in outputs)

    return loss


@pytest.mark.parametrize("chunk_size", (16, 64))
@pytest.mark.parametrize("decay", ("0", "-2", "-20 beside -1e-3", "0 to -20"))
@pytest.mark.parametrize("keys", ("cosine 0.5", "near duplicates"))
def test_gradients_of_chunked_equal_those_of_the_recurrence(keys, decay, chunk_size, x64):
    x = delta_inputs(14, 70, keys=keys, decay=decay, dtype=jnp.float64)
    inputs = [x[name] for name in NAMES]
    found = chunked_gradients(chunk_size)(*inputs)
    expected = recurrent_gradients(*inputs)
    for name, a, b in zip(NAMES, found, expected, strict=True):
        assert relative_error(a, b) < 1e-10, name


@cache
def chunked_gradients(chunk_size):
    return jax.jit(jax.grad(weighted(chunked, chunk_size=chunk_size), argnums=range(6)))


recurrent_gradients = jax.jit(jax.grad(weighted(recurrent), argnums=range(6)))


@pytest.mark.parametrize("rule", [recurrent, partial(chunked, chunk_size=4)], ids=["recurrent", "chunked"])
def test_derivatives_in_both_modes_equal_central_differences(rule, x64):
    x = delta_inputs(15, 10, keys="cosine 0.9", decay="half 0, half -3", dtype=jnp.float64)
    check_grads(jax.jit(weighted(rule)), [x[name] for name in NAMES], order=1, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("g", (-1e-7, -2.0, -20.0, -100.0))
def test_gradients_stay_finite_under_strong_decay(g):
    """exp before the mask would be infinite above the diagonal, and its gradient NaN."""
    x = delta_inputs(16, 70, keys="cosine 0.9", dtype=jnp.float32) | {"g": jnp.full((2, 70, 3), g)}
    assert_agree(chunked(**x), delta_rule(**x), 1e-5)
    for name, gradient in zip(NAMES, chunked_gradients(64)(*(x[name] for name in NAMES)), strict=True):
        assert jnp.isfinite(gradient).all(), name


def unit_lower_system(keys, C=64, dtype=np.float32):
    """beta_i k_i.k_j below the diagonal, as inside a chunk."""
    rng = np.random.default_rng(17)
    k = unit_keys(rng, (2, C, 3, 29), keys)
    A = np.einsum("bihk,bjhk->bhij", k, k) * 2 * rng.random((2, 3, C, 1))
    return np.tril(A, -1).astype(dtype)


@pytest.mark.parametrize("C", (1, 2, 3, 17, 64, 100))
@pytest.mark.parametrize("keys", KEYS)
def test_inverse_of_unit_triangle_equals_lapack(keys, C):
    A = unit_lower_system(keys, C)
    found = jax.jit(inverse_unit_lower)(A)
    assert relative_error(found, np.linalg.inv(np.eye(C) + A.astype(np.float64))) < 1e-6


@pytest.mark.parametrize("keys", KEYS)
def test_derivative_of_inverse_equals_central_differences(keys, x64):
    A = unit_lower_system(keys, C=9, dtype=np.float64)
    check_grads(jax.jit(lambda A: inverse_unit_lower(jnp.tril(A, -1))), [A], order=1, atol=1e-6, rtol=1e-6)


def test_derivative_of_inverse_sees_the_lower_triangle_alone(x64):
    """dX = -X dA X for a tangent below the diagonal; what stands elsewhere is no part of A."""
    A = jnp.asarray(unit_lower_system("cosine 0.9", C=9, dtype=np.float64))
    dA = jnp.asarray(np.random.default_rng(18).standard_normal(A.shape))
    X, dX = jax.jvp(inverse_unit_lower, [A], [dA])
    assert relative_error(dX, -X @ np.tril(dA, -1) @ X) < 1e-12


# Resets


RESETS = pytest.mark.parametrize("low", (-1e3, -3e38, -np.inf))


def reset_inputs(low, dtype):
    """Two resets side by side within a chunk, one at the first token and one at the last."""
    x = delta_inputs(8, 40, decay="-0.05", dtype=dtype)
    return x | {"g": x["g"].at[:, jnp.array([0, 17, 18, 39])].set(low)}


@RESETS
@pytest.mark.parametrize("chunk_size", (1, 16, 64))
def test_a_decay_of_minus_infinity_empties_the_state_in_every_form(low, chunk_size, dtype):
    x = reset_inputs(low, dtype)
    expected = delta_rule(**x)
    assert_agree(recurrent(**x), expected, TOLERANCE[dtype.name])
    assert_agree(chunked(**x, chunk_size=chunk_size), expected, TOLERANCE[dtype.name])


@RESETS
def test_nothing_before_a_reset_is_read_after_it(low):
    x = reset_inputs(low, jnp.float32)
    alone = {name: a[:, 18:] for name, a in x.items() if name != "state"}
    o, S = chunked(**x, chunk_size=16)
    assert_agree((o[:, 18:], S), chunked(**alone, chunk_size=16), 1e-6)


@RESETS
@pytest.mark.parametrize("rule", [recurrent, partial(chunked, chunk_size=16)], ids=["recurrent", "chunked"])
def test_derivatives_at_a_reset_are_those_of_the_recurrence_with_decay_zero(rule, low, x64):
    """Against g = -1000, of which exp is 0 and whose derivative is; both modes."""
    x, finite = reset_inputs(low, jnp.float64), reset_inputs(-1e3, jnp.float64)

    def total(x):
        o, S = rule(**x)
        return jnp.sum(jnp.cos(jnp.arange(o.size)).reshape(o.shape) * o) + jnp.sum(S * S)

    expected, found = jax.grad(total)(finite), jax.grad(total)(x)
    for name in NAMES:
        assert relative_error(found[name], expected[name]) < 1e-9, name
    tangent = {name: jnp.ones_like(a) for name, a in x.items()}
    pushed = jax.jvp(total, (x,), (tangent,))[1]
    assert relative_error(pushed, sum(jnp.sum(found[name]) for name in NAMES)) < 1e-9
