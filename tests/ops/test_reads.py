"""The identity o = S_0^T qbar + A v, and what keys recall, against the recurrence in f64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdelta.ops.delta_product import gated_delta_product
from jaxdelta.ops.reads import contributions, reads, recall_errors
from ports.compare import relative_error
from tests.helpers import DECAYS, KEYS, TOLERANCE, delta_inputs

KINDS = pytest.mark.parametrize(("keys", "decay"), [*((k, "0 to -20") for k in KEYS), *(("cosine 0.5", d) for d in DECAYS)])


def inputs(T, n, dtype, **kinds):
    """Of T tokens with n writes each."""
    x = delta_inputs(1, T * n, dtype=dtype, **kinds)
    return x["q"][:, ::n], x["k"], x["v"], x["g"][:, ::n], x["beta"], x["state"]


@KINDS
@pytest.mark.parametrize("n", (1, 3))
def test_outputs_are_reads_of_the_state_before_and_of_the_spans_own_values(keys, decay, n, dtype):
    q, k, v, g, beta, S = inputs(37, n, dtype, keys=keys, decay=decay)
    o, _ = gated_delta_product(q, k, v, g=g, beta=beta, num_householder=n, state=S)
    found = reads(q, k, g=g, beta=beta, num_householder=n)
    parts = jnp.einsum("bthk,bhkv->bthv", found.qbar, S), jnp.einsum("bhtp,bphv->bthv", found.attention, v)
    assert relative_error(sum(parts), o) < TOLERANCE[dtype.name]


def test_the_attention_is_causal_and_a_token_reads_its_own_write(x64):
    q, k, _, g, beta, _ = inputs(11, 2, jnp.float64)
    A = np.asarray(reads(q, k, g=g, beta=beta, num_householder=2).attention)
    token, write = np.arange(11)[:, None], np.arange(22)[None] // 2
    assert (A[..., write > token] == 0).all()
    own = np.einsum("bthk,bthk,bth->bht", q, k[:, 1::2], beta[:, 1::2]) * 13**-0.5
    np.testing.assert_allclose(A[..., np.arange(11), 2 * np.arange(11) + 1], own, atol=1e-12)


def test_a_write_that_is_erased_is_not_attended_to(x64):
    """beta = 1 with the same key: the second write replaces the first."""
    k = jnp.zeros((1, 2, 1, 13)).at[..., 3].set(1.0)
    A = reads(k, k, beta=jnp.ones((1, 2, 1)), scale=1.0).attention
    np.testing.assert_allclose(A[0, 0], [[1, 0], [0, 1]], atol=1e-15)


def test_the_pulled_back_query_is_the_derivative_of_the_output_for_the_state(x64):
    q, k, v, g, beta, S = inputs(9, 2, jnp.float64)

    def output(S):
        return gated_delta_product(q, k, v, g=g, beta=beta, num_householder=2, state=S)[0][0, 8, 1, 4]

    found = reads(q, k, g=g, beta=beta, num_householder=2).qbar
    np.testing.assert_allclose(jax.grad(output)(S)[0, 1, :, 4], found[0, 8, 1], atol=1e-12)


@pytest.mark.parametrize("n", (1, 3))
@pytest.mark.parametrize("chunk_size", (1, 16, 64))
def test_recall_errors_are_those_of_the_states_before_and_after_each_write(n, chunk_size, x64):
    _, k, v, g, beta, S = inputs(19, n, jnp.float64, keys="cosine 0.9", decay="half 0, half -3")
    found = recall_errors(k, v, g=g, beta=beta, num_householder=n, state=S, chunk_size=chunk_size)
    k, v, g, beta, S = map(np.asarray, (k, v, g, beta, S))
    S = S.copy()
    for p in range(19 * n):
        if p % n == 0:
            S = np.exp(g[:, p // n])[..., None, None] * S
        error = np.einsum("bhkv,bhk->bhv", S, k[:, p]) - v[:, p]
        size = np.linalg.norm(v[:, p], axis=-1)
        np.testing.assert_allclose(found.before[:, p], np.linalg.norm(error, axis=-1) / size, rtol=1e-10)
        S = S - np.einsum("bhk,bhv->bhkv", beta[:, p][..., None] * k[:, p], error)
        after = np.linalg.norm(np.einsum("bhkv,bhk->bhv", S, k[:, p]) - v[:, p], axis=-1) / size
        np.testing.assert_allclose(found.after[:, p], after, rtol=1e-10, atol=1e-13)


def test_the_error_of_a_value_of_zero_is_nan(x64):
    _, k, v, g, beta, S = inputs(5, 1, jnp.float64)
    found = recall_errors(k, v.at[:, 2].set(0.0), g=g, beta=beta, state=S)
    assert np.isnan(found.before[:, 2]).all()
    assert np.isfinite(np.delete(np.asarray(found.after), 2, axis=1)).all()


@pytest.mark.parametrize("rank", (7, 3))
def test_contributions_of_directions_sum_to_what_is_read_of_the_state(rank, dtype):
    """Also of a state that lacks directions."""
    q, k, _, g, beta, S = inputs(9, 2, dtype)
    S = S.at[..., rank:].set(0.0)
    qbar = reads(q, k, g=g, beta=beta, num_householder=2).qbar
    found = contributions(S, qbar)
    whole = jnp.einsum("bthr,bhrv->bthv", found.amount, found.direction)
    assert relative_error(whole, jnp.einsum("bthk,bhkv->bthv", qbar, S)) < TOLERANCE[dtype.name]
    U, sigma, Vt = np.linalg.svd(np.asarray(S, np.float64), full_matrices=False)
    expected = np.einsum("bthk,bhk->bth", np.asarray(qbar, np.float64), U[..., 0]) * sigma[..., 0][:, None]
    np.testing.assert_allclose(np.abs(found.amount[..., 0]), np.abs(expected), rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(np.abs(np.sum(found.direction[..., 0, :] * Vt[..., 0, :], axis=-1)), 1, rtol=1e-5)
