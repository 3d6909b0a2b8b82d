"""One rule for float64: numpy arrays of it are computed in it, whatever jax's setting, and come back as numpy arrays."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdelta as jd
from jaxdelta.ops.soft_filter import soft_filter

rng = np.random.default_rng(0)
B, T, H, K, V = 2, 5, 3, 7, 4
S = rng.standard_normal((B, H, K, V))
Q = np.linalg.qr(rng.standard_normal((2, K, K)))[0]


def unit(*shape):
    x = rng.standard_normal(shape)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def rule(steps=1):
    return (unit(B, T, H, K), unit(B, T * steps, H, K), rng.standard_normal((B, T * steps, H, V))), dict(
        beta=rng.uniform(0, 1, (B, T * steps, H)), g=-rng.uniform(0, 1, (B, T, H)), state=S
    )


q, gates = rule()
keys, strengths = unit(2, 3, K), rng.uniform(0, 2, (2, 3))
q2, gates2 = rule(2)
# Of every public function of arrays alone, arguments in f64. Those on the host run in numpy, in f64 too.
CALLS = {
    "active_rank": lambda: jd.householder.active_rank(Q, 1.0),
    "contributions": lambda: jd.contributions(S, q[0]),
    "effective_rank": lambda: jd.effective_rank(S),
    "energy_rank": lambda: jd.energy_rank(S, 0.9),
    "frozen_dimension": lambda: jd.householder.frozen_dimension(Q),
    "gated_delta_product": lambda: jd.gated_delta_product(*q2, **gates2, num_householder=2),
    "gated_delta_product_chunked": lambda: jd.gated_delta_product_chunked(*q2, **gates2, num_householder=2, chunk_size=4),
    "gated_delta_rule": lambda: jd.gated_delta_rule(*q, **gates, scale=0.3),
    "gated_delta_rule_chunked": lambda: jd.gated_delta_rule_chunked(*q, **gates, chunk_size=2),
    "nearest_product": lambda: jd.nearest_product(Q[0], 2, strengths="reflections"),
    "reads": lambda: jd.reads(*q2[:2], beta=gates2["beta"], g=gates2["g"], num_householder=2),
    "recall_errors": lambda: jd.recall_errors(*q2[1:], beta=gates2["beta"], g=gates2["g"], num_householder=2),
    "reflections": lambda: jd.reflections(Q),
    "singular_values": lambda: jd.singular_values(S),
    "spectral_radius": lambda: jd.householder.spectral_radius(Q),
    "stable_rank": lambda: jd.stable_rank(S),
    "threshold_rank": lambda: jd.threshold_rank(S),
    "transition": lambda: jd.householder.transition(keys, strengths, 0.7),
    "truncate": lambda: jd.truncate(S, 2),
    "truncate, subspace": lambda: jd.truncate(S, 1, method="subspace"),
    "truncate, svd": lambda: jd.truncate(S, np.array([1, 2, 4]), method="svd"),
    "soft_filter": lambda: soft_filter(S, 0.3),
}
# Public functions that are no functions of arrays alone: they compute in the dtype of a model or of a carry.
OF_MODELS = {
    *("embedded_models", "forward", "init_carry", "inspect", "ledger", "load", "run", "save", "sensitivity", "states"),
    *("sweep", "with_states", "compare", "storage_costs", "head_importance", "ledger_of", "sensitivity_maps"),
    *("keys", "rank_trace", "spectrum", "state_reads"),
    *("hook_names", "run_with_cache", "run_with_hooks"),
    *("tail_effect", "tail_fisher", "tail_gate"),
    *("added", "added_at", "multiplied", "substituted"),  # changes of an edit, inside of a compiled segment
}


def test_every_public_function_is_on_one_of_the_lists():
    functions = {name for name in jd.__all__ if inspect.isfunction(getattr(jd, name))}
    assert functions == OF_MODELS | {name for name in CALLS if name in functions}


@pytest.mark.parametrize("name", CALLS)
def test_float64_arrays_are_computed_in_float64_and_stay_numpys(name):
    assert not jax.config.jax_enable_x64
    found = jax.tree.leaves(CALLS[name]())
    with jax.enable_x64(True):
        expected = jax.tree.leaves(CALLS[name]())
    assert len(found) == len(expected) > 0
    for a, b in zip(found, expected, strict=True):
        assert isinstance(a, np.ndarray | np.generic | float | str)
        if isinstance(a, np.ndarray | np.generic) and a.dtype.kind == "f":
            assert a.dtype == np.float64
            # An f32 computation would be off by 1e-7.
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("rank_of", [jd.singular_values, partial(jd.energy_rank, fraction=1.0), jd.threshold_rank])
def test_what_f32_does_not_see_is_seen(rank_of):
    """The energy of diag(1, 1e-4) is 1 + 1e-8, which f32 rounds to 1."""
    found = rank_of(np.diag([1.0, 1e-4]))
    np.testing.assert_allclose(found, [1, 1e-4] if np.ndim(found) else 2, rtol=1e-12)


def test_single_numbers_in_float64_leave_f32_arrays_alone():
    """1 / np.sqrt(K) is one."""
    x = [jnp.asarray(a, jnp.float32) for a in q]
    more = {name: jnp.asarray(a, jnp.float32) for name, a in gates.items()}
    for x64 in (False, True):
        with jax.enable_x64(x64):
            o, state = jd.gated_delta_rule_chunked(*x, **more, scale=1 / np.sqrt(K))
        assert isinstance(o, jax.Array)
        assert o.dtype == state.dtype == jnp.float32


def test_inside_of_jit_arrays_are_jaxs():
    found = jax.jit(lambda x: jd.truncate(x, 2))(S)
    assert found.dtype == jnp.float32
