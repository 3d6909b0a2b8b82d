"""The gated delta product: its definition, the chunked form, the delta rule as its first case, splits, and derivatives."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jaxdelta.dims import HIGHEST
from jaxdelta.ops import delta_product as op
from jaxdelta.ops.delta_product import gated_delta_product, gated_delta_product_chunked
from jaxdelta.ops.delta_rule import gated_delta_rule, gated_delta_rule_chunked
from ports.compare import relative_error
from tests.helpers import TOLERANCE, assert_agree, delta_inputs, delta_product, dot_precisions

recurrent = jax.jit(gated_delta_product, static_argnames=("num_householder", "scale"))
chunked = jax.jit(gated_delta_product_chunked, static_argnames=("num_householder", "scale", "chunk_size"))
FORMS = pytest.mark.parametrize("rule", [recurrent, partial(chunked, chunk_size=7)], ids=["recurrent", "chunked"])
STEPS = pytest.mark.parametrize("n", (1, 2, 3, 4))
T = 23
NAMES = ("q", "k", "v", "beta", "g", "state")
# Keys, and decays where there are any.
REGIMES = [("random", "0 to -20"), ("cosine 0.9", "half 0, half -3"), ("near duplicates", "-20 beside -1e-3")]


def product_inputs(seed, n, *, T=T, keys="cosine 0.5", decay="0 to -20", dtype, **sizes):
    """Arguments with a state to start from; k, v and beta of n steps a token."""
    x = delta_inputs(seed, T * n, keys=keys, decay=decay, dtype=dtype, **sizes)
    return x | {"q": x["q"][:, ::n], "g": x["g"][:, n - 1 :: n], "num_householder": n}


@pytest.mark.parametrize(("keys", "decay"), REGIMES)
@pytest.mark.parametrize("chunk_size", (None, 1, 7, 32, 1000))
@STEPS
def test_either_form_equals_the_definition(n, chunk_size, keys, decay, dtype):
    """No chunk size: the recurrence. Chunks below n, that n does not divide, of several tokens, and above T * n."""
    x = product_inputs(n, n, keys=keys, decay=decay, dtype=dtype)
    found = recurrent(**x) if chunk_size is None else chunked(**x, chunk_size=chunk_size)
    assert_agree(found, delta_product(**x), TOLERANCE[dtype.name])


@pytest.mark.parametrize("state", (True, False))
@FORMS
def test_no_decay_and_no_state_are_zeros(rule, state, dtype):
    x = product_inputs(5, 2, keys="near duplicates", dtype=dtype) | {"g": None}
    x |= {} if state else {"state": None}
    assert_agree(rule(**x), delta_product(**x), TOLERANCE[dtype.name])


@pytest.mark.parametrize("size", (None, 7))
def test_one_step_is_the_delta_rule_bit_for_bit(size, x64):
    x = product_inputs(6, 1, keys="cosine 0.9", dtype=jnp.float64)
    options = {} if size is None else {"chunk_size": size}
    product, rule = (recurrent, gated_delta_rule) if size is None else (chunked, gated_delta_rule_chunked)
    found = product(**x, **options)
    del x["num_householder"]
    for a, b in zip(found, jax.jit(partial(rule, **options))(**x), strict=True):
        np.testing.assert_array_equal(a, b)


@FORMS
@STEPS
def test_one_token_is_the_matrix_form(rule, n, x64):
    """S' = A S + sum_j R_j beta_j k_j v_j^T: A = exp(g) prod_j (I - beta_j k_j k_j^T), the first step rightmost; R_j: of
    the steps after j."""
    x = product_inputs(7, n, T=1, decay="-2", dtype=jnp.float64, B=1, H=1)
    x["beta"] = jnp.linspace(0.4, 1.9, n)[None, :, None]
    k, v, beta = (np.asarray(x[name])[0, :, 0] for name in ("k", "v", "beta"))
    S = np.asarray(x["state"])[0, 0]
    after, written = np.eye(S.shape[0]), 0  # from the last step to the first
    for j in reversed(range(n)):
        written = written + after @ np.outer(beta[j] * k[j], v[j])
        after = after @ (np.eye(S.shape[0]) - beta[j] * np.outer(k[j], k[j]))
    assert relative_error(rule(**x)[1][0, 0], np.exp(-2) * after @ S + written) < 1e-12


@FORMS
@STEPS
def test_full_write_strength_reflects_once_a_step(rule, n, x64):
    """beta = 2, unit keys, g = 0, v = 0: orthogonal; det -1 of one step is a reflection, +1 of two a rotation."""
    x = product_inputs(8, n, T=5, dtype=jnp.float64, K=6, V=6)
    x |= {"beta": jnp.full_like(x["beta"], 2.0), "v": jnp.zeros_like(x["v"]), "g": None}
    x["state"] = jnp.broadcast_to(jnp.eye(6), x["state"].shape)
    one = {name: a[:, : n if name in "kvbeta" else 1] if name in ("q", "k", "v", "beta") else a for name, a in x.items()}
    A = np.asarray(rule(**one)[1])
    np.testing.assert_allclose(np.swapaxes(A, -1, -2) @ A, np.broadcast_to(np.eye(6), A.shape), atol=1e-12)
    np.testing.assert_allclose(np.linalg.det(A), (-1.0) ** n, rtol=1e-12)
    np.testing.assert_allclose(np.linalg.det(rule(**x)[1]), (-1.0) ** (5 * n), rtol=1e-12)


@FORMS
def test_the_last_step_of_a_token_is_read_back(rule):
    """beta = 1: S_t^T k = v for the last step's key, whatever the steps before and the decay; not for the first's."""
    x = product_inputs(9, 3, dtype=jnp.float32)
    x["beta"] = jnp.ones_like(x["beta"])
    last, first = (rule(**x | {"q": x["k"][:, j::3]}, scale=1.0)[0] for j in (2, 0))
    assert relative_error(last, x["v"][:, 2::3]) < 1e-5
    assert relative_error(first, x["v"][:, ::3]) > 0.1


@FORMS
def test_the_decay_comes_once_a_token(rule):
    """beta = 0: S_T = exp(sum g) S_0."""
    x = product_inputs(10, 3, decay="-2", T=3, dtype=jnp.float32)
    _, S = rule(**x | {"beta": jnp.zeros_like(x["beta"])})
    assert relative_error(S, np.exp(-6) * x["state"]) < 1e-6


@pytest.mark.parametrize("split", [(1, 2, 20), (0, 16, 7), (22, 1)], ids=str)
@FORMS
def test_any_split_equals_one_pass(rule, split):
    x = product_inputs(11, 3, keys="cosine 0.9", dtype=jnp.float32)
    S, outputs, expected = x["state"], [], recurrent(**x)
    for start, stop in zip(np.cumsum((0, *split[:-1])), np.cumsum(split), strict=True):
        tokens, steps = slice(start, stop), slice(3 * start, 3 * stop)
        part = {name: x[name][:, tokens if name in "qg" else steps] for name in NAMES if name != "state"}
        o, S = rule(**part, num_householder=3, state=S)
        outputs.append(o)
    assert_agree((jnp.concatenate(outputs, 1), S), expected, 1e-5)


@FORMS
def test_state_and_output_of_bf16_inputs_are_f32(rule):
    x = product_inputs(12, 2, dtype=jnp.bfloat16)
    o, S = rule(**x)
    assert o.dtype == S.dtype == jnp.float32
    assert_agree((o, S), delta_product(**x), 1e-5)


@FORMS
def test_every_product_is_of_the_highest_precision(rule):
    x = product_inputs(13, 2, dtype=jnp.float32)
    n = x.pop("num_householder")
    precisions = dot_precisions(jax.grad(lambda x: sum(a.sum() for a in rule(**x, num_householder=n))), x)
    assert len(precisions) >= 6
    assert set(precisions) == {(HIGHEST, HIGHEST)}


# Derivatives


def weighted(rule, **options):
    """A scalar function of all six inputs that weighs every entry of o and S differently."""

    def loss(*inputs):
        outputs = rule(**dict(zip(NAMES, inputs, strict=True)), **options)
        rng = np.random.default_rng(0)
        return sum(jnp.sum(rng.standard_normal(a.shape) * a) for a in outputs)

    return loss


@cache
def gradients(n, chunk_size):
    form = partial(chunked, chunk_size=chunk_size) if chunk_size else recurrent
    rule = weighted(form, num_householder=n)
    return jax.jit(jax.grad(rule, argnums=range(6)))


@pytest.mark.parametrize(("keys", "decay"), REGIMES)
@pytest.mark.parametrize(("n", "chunk_size"), [(2, 7), (3, 32)])
def test_gradients_of_chunked_equal_those_of_the_recurrence(n, chunk_size, keys, decay, x64):
    x = product_inputs(14, n, keys=keys, decay=decay, dtype=jnp.float64)
    inputs = [x[name] for name in NAMES]
    for name, a, b in zip(NAMES, gradients(n, chunk_size)(*inputs), gradients(n, None)(*inputs), strict=True):
        assert relative_error(a, b) < 1e-10, name


@FORMS
def test_derivatives_in_both_modes_equal_central_differences(rule, x64):
    x = product_inputs(15, 2, T=5, keys="cosine 0.9", decay="half 0, half -3", dtype=jnp.float64)
    check_grads(jax.jit(weighted(rule, num_householder=2)), [x[name] for name in NAMES], order=1, atol=1e-6, rtol=1e-6)


def test_forward_mode_equals_reverse_mode(x64):
    x = product_inputs(16, 3, keys="near duplicates", dtype=jnp.float64)
    inputs, rng = [x[name] for name in NAMES], np.random.default_rng(17)
    tangents = [jnp.asarray(rng.standard_normal(a.shape)) for a in inputs]
    loss = weighted(chunked, num_householder=3, chunk_size=32)
    forward = jax.jit(lambda *tangents: jax.jvp(loss, tuple(inputs), tangents)[1])(*tangents)
    reverse = sum(jnp.vdot(a, b) for a, b in zip(gradients(3, 32)(*inputs), tangents, strict=True))
    assert float(forward) == pytest.approx(float(reverse), rel=1e-11)


def test_gradients_stay_finite_under_strong_decay(x64):
    """exp before the mask would be infinite above the diagonal, and its gradient NaN."""
    x = product_inputs(18, 3, keys="cosine 0.9", dtype=jnp.float64) | {"g": jnp.full((2, T, 3), -800.0)}
    for name, gradient in zip(NAMES, gradients(3, 32)(*(x[name] for name in NAMES)), strict=True):
        assert jnp.isfinite(gradient).all(), name


# What is refused


@pytest.mark.parametrize("n", (0, -2))
@pytest.mark.parametrize("rule", [gated_delta_product, gated_delta_product_chunked])
def test_no_step_is_refused(rule, n):
    with pytest.raises(ValueError, match=f"num_householder is {n}; expected at least 1"):
        rule(**product_inputs(19, 1, T=5, dtype=jnp.float32) | {"num_householder": n})


@pytest.mark.parametrize("rule", [gated_delta_product, gated_delta_product_chunked])
def test_steps_that_do_not_fit_the_tokens_are_refused(rule):
    with pytest.raises(ValueError, match="k has 10 steps; expected 5 tokens x 3 = 15"):
        rule(**product_inputs(20, 2, T=5, dtype=jnp.float32) | {"num_householder": 3})


@pytest.mark.parametrize("name", ("k", "v", "beta", "g"))
def test_an_input_that_alone_does_not_fit_is_named(name):
    """As callers without the tests' shape checks meet it; one entry would be broadcast."""
    x = product_inputs(21, 3, T=5, dtype=jnp.float32)
    x[name] = x[name][:, :1]
    with pytest.raises(ValueError, match=f"{name} has 1 .*; expected .*5 tokens"):
        op.decay_of_steps(x["q"], x["k"], x["v"], x["beta"], x["g"], 3)


def test_empty_chunks_are_refused():
    with pytest.raises(ValueError, match="chunk_size is 0"):
        gated_delta_product_chunked(**product_inputs(22, 2, dtype=jnp.float32), chunk_size=0)


# Resets


@pytest.mark.parametrize("low", (-3e38, -np.inf))
@pytest.mark.parametrize("n", (2, 3))
def test_a_decay_of_minus_infinity_empties_the_state(n, low, dtype):
    x = product_inputs(23, n, decay="-0.05", dtype=dtype)
    x["g"] = x["g"].at[:, jnp.array([0, 3, 4])].set(low)
    expected = delta_product(**x)
    for found in (recurrent(**x), chunked(**x, chunk_size=4 * n)):
        assert_agree(found, expected, TOLERANCE[dtype.name])
