"""Truncation at a boundary: what it changes in a carry, for whom, and what it says of it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdelta as jd
from jaxdelta.runs.interventions import Intervention, Truncate
from ports.compare import relative_error
from tests.helpers import truncated
from tests.tiny import fresh_model, model

KINDS = ("linear", "attention", "linear")
L, B, H, K, V = 2, 3, 6, 8, 11
METHODS = pytest.mark.parametrize("method", ["subspace", "eigh", "svd"])


def carried(seed=0, dtype=jnp.float32):
    """A carry of three rows with random states, tails and caches."""
    m = model(layer_kinds=KINDS) if dtype == jnp.float32 else fresh_model(layer_kinds=KINDS, dtype=dtype)
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda a: jnp.asarray(rng.standard_normal(a.shape), a.dtype) if a.ndim > 1 else a, jd.init_carry(m, B, 5)
    )


def started(carry, rank, **options):
    intervention, memory = Truncate(rank, **options).start(carry)
    return intervention, carry, memory


@partial(jax.jit, static_argnums=0)
def boundary(intervention, carry, memory):
    return intervention(carry, memory)


def cut(carry, rank, **options):
    """One boundary: the states before and after, [L, B, H, K, V], and the record."""
    after, _, record = boundary(*started(carry, rank, **options))
    return np.stack(jd.states(carry)), np.stack(jd.states(after)), record


def ranks_of(states):
    """Number of singular values that are not rounding."""
    sigma = np.linalg.svd(states, compute_uv=False)
    return (sigma > 1e-4 * sigma[..., :1]).sum(-1)


@pytest.mark.parametrize("method", ["eigh", "svd"])
def test_states_become_their_best_approximations(method):
    before, after, _ = cut(carried(), 3, method=method)
    assert relative_error(after, truncated(before, 3)) < 1e-5


@METHODS
@pytest.mark.parametrize(
    "shape",
    [(), (H,), (L, 1), (L, H), (B, 1, 1), (B, L, 1), (B, L, H)],
    ids=lambda shape: "x".join(map(str, shape)) or "one",
)
def test_ranks_spread_over_rows_layers_and_heads(method, shape):
    """Axes [B, L, H] in this order, each row, layer and head by its own number."""
    rank = np.asarray(np.random.default_rng(len(shape)).integers(1, 3, shape))
    _, after, _ = cut(carried(), rank, method=method)
    expected = np.moveaxis(np.broadcast_to(rank, (B, L, H)), 1, 0)
    np.testing.assert_array_equal(ranks_of(after), expected)


@METHODS
def test_heads_at_full_rank_are_untouched_bit_for_bit(method):
    rank = np.full((B, L, H), K)
    rank[1, 0, 4] = 2
    before, after, _ = cut(carried(), rank, method=method)
    np.testing.assert_array_equal(ranks_of(after), np.moveaxis(rank, 1, 0))
    cut_one = np.zeros((L, B, H), bool)
    cut_one[0, 1, 4] = True
    np.testing.assert_array_equal(after[~cut_one], before[~cut_one])


def test_nothing_but_the_states_changes():
    carry = carried()
    after, _, _ = boundary(*started(carry, 1, method="svd"))
    for layer, (a, b) in enumerate(zip(after.layers, carry.layers, strict=True)):
        for name in a._fields:
            changed = (np.asarray(getattr(a, name)) != np.asarray(getattr(b, name))).any()
            assert changed == (name == "S"), f"layer {layer}: {name}"
    np.testing.assert_array_equal(after.position, carry.position)


def test_states_stay_f32_beside_a_bf16_tail():
    carry = carried(dtype=jnp.bfloat16)
    after, _, _ = boundary(*started(carry, 2, method="svd"))
    assert {S.dtype for S in jd.states(after)} == {jnp.dtype("float32")}
    assert after.layers[0].tail.dtype == jnp.bfloat16
    assert relative_error(jd.states(after)[1], truncated(jd.states(carry)[1], 2)) < 1e-5


def test_a_warm_start_does_not_change_the_result():
    """The basis of another state, and of the same one, against none; spectra that decay, so that the subspace is found."""

    def decaying(carry):
        return jd.with_states(carry, [S * (0.3 ** jnp.arange(K))[:, None] for S in jd.states(carry)])

    first, second = decaying(carried(1)), decaying(carried(2))
    intervention, _, cold = started(first, 2, method="subspace")
    _, warm, _ = boundary(intervention, first, cold)
    expected = truncated(np.stack(jd.states(second)), 2)
    for memory in (cold, warm, boundary(intervention, second, warm)[1]):
        after, _, record = boundary(intervention, second, memory)
        assert relative_error(np.stack(jd.states(after)), expected) < 2e-3  # energy to 3e-6
        assert record.missed.max() <= 3e-6


def test_the_state_before_the_first_token_is_cut_to_zero():
    carry = jd.init_carry(model(layer_kinds=KINDS), B, 5)
    for method in ("subspace", "eigh", "svd"):
        np.testing.assert_array_equal(cut(carry, 2, method=method)[1], 0)


# What shapes the program


def test_truncations_that_differ_in_ranks_alone_are_one_program():
    settled = [Truncate(rank, max_rank=2).start(carried())[0] for rank in (1, 2, np.array([[[1]], [[8]], [[2]]]))]
    assert len({(hash(s), s) for s in settled}) == 1
    assert Truncate(1, max_rank=2).start(carried())[0] != Truncate(1, max_rank=1).start(carried())[0]
    assert Truncate(1, method="svd").start(carried())[0] != Truncate(1, method="eigh").start(carried())[0]


@pytest.mark.parametrize(
    ("rank", "method", "max_rank"), [(1, "subspace", 1), (2, "subspace", 2), (3, "eigh", 3), (8, "subspace", 1)]
)
def test_the_method_and_the_bound_follow_from_the_ranks(rank, method, max_rank):
    """Subspace iteration up to a quarter of min(K, V) = 8; full ranks are free of the bound."""
    settled, _ = Truncate(rank).start(carried())
    assert (settled.method, settled.max_rank) == (method, max_rank)


def test_a_truncation_is_an_intervention():
    assert isinstance(Truncate(1), Intervention)


# Bad ranks


@pytest.mark.parametrize(
    ("rank", "options", "message"),
    [
        (0, {}, r"rank 0 is outside of 1 to min\(K, V\) = 8"),
        (-1, {}, r"rank -1 is outside of 1 to min\(K, V\) = 8"),
        (9, {}, r"rank 9 is outside of 1 to min\(K, V\) = 8"),
        (np.array([[[1]], [[2]], [[11]]]), {}, "rank 11 is outside"),
        (3, {"max_rank": 2}, "rank 3 is above max_rank = 2"),
        (1, {"max_rank": 9}, "max_rank is 9; expected 1 to"),
        (1, {"max_rank": 0}, "max_rank is 0; expected 1 to"),
        (np.array([1.5]), {}, "float64; expected integers"),
        (np.ones((4, 1, 1), int), {}, r"\(4,1,1\).*\(3,2,6\)"),
        (np.ones((L, B, H), int), {}, r"\(2,3,6\).*\(3,2,6\)"),
    ],
    ids=["0", "-1", "9", "one row", "above max_rank", "max_rank 9", "max_rank 0", "float", "four rows", "axes swapped"],
)
def test_ranks_out_of_bounds_are_refused_before_the_run(rank, options, message):
    with pytest.raises(ValueError, match=message):
        Truncate(rank, **options).start(carried())


def test_an_unknown_method_is_refused():
    """Not taken for another one."""
    with pytest.raises((ValueError, TypeError), match="'qr'"):
        Truncate(1, method="qr").start(carried())
