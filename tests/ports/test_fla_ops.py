"""The JAX operators compute what fla's do: its naive forms in f32 and, gradients too, in f64; its recurrent kernels in f32.

fla's naive forms cast to f32; the process that runs them turns these casts into casts to f64, and changes nothing else.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdelta as jd
from jaxdelta.ops.norms import l2norm
from ports.compare import relative_error
from tests.ports.fla_cases import OPS, WIDE_OPS, op_inputs, read_arrays

F32 = 1e-5
F64 = 1e-8
FORMS = {"recurrent": None, "chunks of 16": 16}

pytestmark = pytest.mark.timeout(900)  # the first test waits for fla


def run(form: str, op, q, k, v, g, beta, state):
    """o and S of a form; one write a token goes through the delta rule itself, without decay too."""
    if not op.normalised:
        q, k = l2norm(q), l2norm(k)
    chunk = {} if FORMS[form] is None else {"chunk_size": FORMS[form]}
    others = {"beta": beta, "state": state, "scale": op.scale} | chunk
    if op.steps > 1:
        rule = jd.gated_delta_product_chunked if chunk else jd.gated_delta_product
        return rule(q, k, v, g=g, num_householder=op.steps, **others)
    rule = jd.gated_delta_rule_chunked if chunk else jd.gated_delta_rule
    return rule(q, k, v, g=jnp.zeros_like(beta) if g is None else g, **others)


def inputs(op, dtype) -> list:
    arrays = op_inputs(op)
    return [jnp.asarray(arrays[x], dtype) if x in arrays else None for x in ("q", "k", "v", "g", "beta", "state")]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", OPS)
def test_outputs_and_state(fla_ops, case, form):
    o, S = jax.jit(partial(run, form, OPS[case]))(*inputs(OPS[case], jnp.float32))
    expected = read_arrays(fla_ops / f"{case}.npz")
    assert relative_error(o, expected["o"]) < F32
    assert relative_error(S, expected["S"]) < F32


@pytest.mark.parametrize("form", FORMS)
def test_one_step_a_token_is_the_delta_product_of_fla(fla_ops, form):
    """n_h = 1 through our delta product, which the other tests call for more steps alone."""
    op = OPS["product recurrent - 1"]
    q, k, v, g, beta, state = inputs(op, jnp.float32)
    rule = jd.gated_delta_product if FORMS[form] is None else jd.gated_delta_product_chunked
    o, S = jax.jit(partial(rule, scale=op.scale, num_householder=1))(q, k, v, g=g, beta=beta, state=state)
    expected = read_arrays(fla_ops / "product recurrent - 1.npz")
    assert relative_error(o, expected["o"]) < F32
    assert relative_error(S, expected["S"]) < F32


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", WIDE_OPS)
def test_outputs_and_every_gradient_in_f64(fla_ops, x64, case, form):
    op = WIDE_OPS[case]
    expected = read_arrays(fla_ops / f"{case}, f64.npz")
    arrays = inputs(op, jnp.float64)
    weights = [op_inputs(op)[x] for x in ("weight_o", "weight_S")]

    def total(arrays):
        o, S = run(form, op, *arrays)
        return jnp.sum(o * weights[0]) + jnp.sum(S * weights[1]), (o, S)

    gradients, (o, S) = jax.jit(jax.grad(total, has_aux=True))(arrays)
    assert expected["o"].dtype == o.dtype == np.float64
    assert relative_error(o, expected["o"]) < F64
    assert relative_error(S, expected["S"]) < F64
    for name, gradient in zip(("dq", "dk", "dv", "dg", "dbeta", "dstate"), gradients, strict=True):
        assert (gradient is None) == (name not in expected), name
        if gradient is not None:
            assert relative_error(gradient, expected[name]) < F64, name
