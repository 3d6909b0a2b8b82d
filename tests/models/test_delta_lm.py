"""The models of flash-linear-attention: splits, batches, padding, runs and sweeps, and what is refused."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxdelta as jd
from jaxdelta.models.config import FAMILIES, FIXED, DeltaLMConfig
from jaxdelta.models.delta_lm import DeltaLM
from jaxdelta.nn.sizes import AttentionSizes
from ports.compare import relative_error
from tests.helpers import randomised, run, run_in_segments, truncated

ALL = pytest.mark.parametrize("family", FAMILIES)
WINDOWED = (AttentionSizes(num_query_heads=4, num_kv_heads=2, head_dim=10, window=7, bias=True),)
N = 41


@cache
def model(family="gated_deltaproduct", **changes):
    """A linear, a windowed attention and a linear layer."""
    return randomised(DeltaLM(config(family, **changes), rngs=nnx.Rngs(0)))


def config(family="gated_deltaproduct", **changes):
    return DeltaLMConfig.tiny(family, **({"attention": WINDOWED} | changes))


def texts(T=N, B=1, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 97, (B, T)), jnp.int32)


in_segments = partial(run_in_segments, max_length=N)


@cache
def one_pass(family, seed=0):
    return in_segments(model(family), texts(seed=seed), (N,))


def assert_carries_agree(found, expected, row=slice(None)):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert relative_error(a[row], b) < 1e-5


@ALL
def test_any_split_equals_one_pass(family):
    """Segments that no chunk divides, of a single token, and longer than the window."""
    hidden, carry = in_segments(model(family), texts(), (1, 19, 20, 1))
    assert relative_error(hidden, one_pass(family)[0]) < 1e-5
    assert_carries_agree(carry, one_pass(family)[1])
    np.testing.assert_array_equal(carry.position, [N])


@ALL
def test_padded_rows_of_a_batch_equal_their_solo_runs(family):
    """Rows of 41, 20 and no tokens: hidden states of text, and the whole carry; the empty row's stays as it was."""
    tokens = jnp.concatenate([texts(), texts(seed=1), texts(seed=2)])
    before, lengths = model(family).init_carry(3, N), jnp.array([N, 20, 0])
    out = run(model(family), tokens, before, lengths)
    short, short_carry = in_segments(model(family), texts(seed=1)[:, :20], (20,))
    assert relative_error(out.hidden[:1], one_pass(family)[0]) < 1e-5
    assert relative_error(out.hidden[1:2, :20], short) < 1e-5
    assert_carries_agree(out.carry, one_pass(family)[1], slice(0, 1))
    assert_carries_agree(out.carry, short_carry, slice(1, 2))
    for a, b in zip(jax.tree.leaves(out.carry), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(a[2], b[2])
    np.testing.assert_array_equal(out.carry.position, lengths)


def test_norms_store_their_scale_itself():
    """Fresh ones are 1; a final norm of zeros gives zeros."""
    m = DeltaLM(config())
    np.testing.assert_array_equal(m.layers[1].input_norm[...], 1)
    m.final_norm[...] = jnp.zeros_like(m.final_norm[...])
    np.testing.assert_array_equal(run(m, texts(5), m.init_carry(1, 5)).hidden, 0)


def test_states_can_be_read_and_replaced():
    carry = one_pass("gated_deltaproduct")[1]
    S = jd.states(carry)
    assert [s.shape for s in S] == [(1, 3, 8, 12)] * 2
    doubled = jd.with_states(carry, [S[0], 2 * S[1]])
    np.testing.assert_array_equal(doubled.layers[2].S, 2 * S[1])
    assert doubled.layers[1] is carry.layers[1]
    with pytest.raises(ValueError, match=r"\(1, 3, 8, 12\)"):
        jd.with_states(carry, [S[0], jnp.swapaxes(S[1], -1, -2)])


def test_states_of_a_bf16_model_are_f32():
    m = DeltaLM(config(), dtype=jnp.bfloat16)
    out = run(m, texts(5), m.init_carry(1, 5))
    assert {s.dtype for s in jd.states(out.carry)} == {jnp.dtype("float32")}
    assert out.hidden.dtype == jnp.bfloat16
    assert m.logits(out.hidden).dtype == jnp.float32


# Runs and sweeps


def losses_of(logits, ids):
    logits = np.asarray(logits, np.float64)
    return np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(ids)), ids]


@ALL
def test_losses_of_a_run_are_those_of_one_pass(family):
    tokens = np.asarray(texts())
    found = jd.run(model(family), tokens, segment=16, max_length=48).losses
    logits = model(family).logits(one_pass(family)[0])[0]
    np.testing.assert_allclose(found[0], losses_of(logits[:-1], tokens[0, 1:]), rtol=0, atol=2e-5)


def test_forward_equals_a_run():
    tokens = texts()
    logits, carry = jd.forward(model(), tokens, jd.init_carry(model(), 1, N))
    assert relative_error(logits, model().logits(one_pass("gated_deltaproduct")[0])) < 1e-5
    assert_carries_agree(carry, one_pass("gated_deltaproduct")[1])


def test_a_cache_of_the_texts_length_is_enough_for_padded_segments():
    """The last segment's padding lies beyond the cache by more than the window, and no layer is called broken for it."""
    tokens = np.asarray(texts())
    tight = jd.run(model(), tokens[:, :34], segment=16, max_length=34).losses
    wide = jd.run(model(), tokens, segment=16, max_length=48).losses[:, :33]
    np.testing.assert_allclose(tight, wide, rtol=0, atol=2e-5)


def gap_after(S, rank):
    """The least (sigma_r - sigma_{r+1}) / sigma_1 of all heads: rounding turns what is kept by eps over this."""
    sigma = np.linalg.svd(np.asarray(S, np.float64), compute_uv=False)
    return np.min((sigma[..., rank - 1] - sigma[..., rank]) / sigma[..., 0])


@pytest.mark.parametrize("rank", (1, 2, 3))
def test_a_run_is_truncated_at_boundaries_by_hand(rank):
    """Two programs add in another order, so states differ by some eps, and losses after a cut by some eps / gap."""
    tokens = np.asarray(texts())
    done = jd.run(model(), tokens, segment=16, max_length=48, intervention=jd.Truncate(rank, method="svd"))
    carry, losses, gap = jd.init_carry(model(), 1, 48), [], 1.0
    for start in (0, 16, 32):
        if start:
            gap = min(gap, *(gap_after(S, rank) for S in jd.states(carry)))
            carry = jd.with_states(carry, [jnp.asarray(truncated(S, rank), jnp.float32) for S in jd.states(carry)])
        logits, carry = jd.forward(model(), jnp.asarray(tokens[:, start : start + 16]), carry)
        losses.append(losses_of(logits[0, : N - 1 - start], tokens[0, start + 1 : start + 17]))
    by_hand = np.concatenate(losses)
    np.testing.assert_allclose(done.losses[0, :16], by_hand[:16], rtol=0, atol=2e-5)
    np.testing.assert_allclose(done.losses[0], by_hand, rtol=0, atol=20 * np.finfo(np.float32).eps / gap)
    untouched = jd.run(model(), tokens, segment=16, max_length=48).losses
    np.testing.assert_array_equal(done.losses[:, :16], untouched[:, :16])
    assert np.abs(done.losses - untouched)[:, 16:].max() > 0.1


def test_a_sweep_over_token_arrays_gives_a_table():
    tokens = np.asarray(texts())[0]
    rows = jd.sweep(model(), [tokens, tokens[:30]], ranks=(1, 2), segment=16, method="svd", copy_gap=8)
    assert list(zip(*(rows[name].to_pylist() for name in ("rank", "num_tokens")), strict=True)) == [
        (rank, n) for n in (N - 1, 29) for rank in (8, 1, 2)
    ]
    whole = jd.run(model(), tokens[None], segment=16, max_length=48).losses
    assert rows["loss"][0].as_py() == pytest.approx(whole.mean(), abs=1e-5)
    assert len({round(loss.as_py(), 6) for loss in rows["loss"]}) == 6


@pytest.mark.parametrize(
    ("layer", "name", "message"), [(0, "q", r"layer 0 \(linear\)"), (1, "v", r"layer 1 \(attention\)")]
)
def test_a_layer_that_is_not_finite_is_named(layer, name, message):
    m = DeltaLM(config(), rngs=nnx.Rngs(0))
    parameter = getattr(m.layers[layer].mixer, name)
    parameter[...] = parameter[...].at[0, 0].set(jnp.nan)
    with pytest.raises(jd.NonFiniteError, match=f"NaN or infinity first after {message}, in row 0"):
        jd.run(m, np.asarray(texts()), segment=16, max_length=48)


# Configurations


@pytest.mark.parametrize(("field", "family", "value"), FIXED, ids=str)
def test_what_a_family_cannot_choose_is_refused(as_for_users, field, family, value):
    other = not value if isinstance(value, bool) else {1: 2, "silu": "relu", "l2": "sum"}[value]
    with pytest.raises(ValueError, match=f"{field} is {other!r}; {family} models always have {value!r}"):
        DeltaLMConfig.tiny(family, **{field: other})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "mamba"}, "family is 'mamba'; expected one of delta_net, gated_deltanet, gated_deltaproduct"),
        ({"attention": ()}, "0 sizes for 1 attention layers"),
        ({"attention": 2 * WINDOWED}, "2 sizes for 1 attention layers"),
        ({"num_value_heads": 4}, "4 value heads are no multiple of 3 key heads"),
        ({"num_householder": 0}, "num_householder is 0"),
        ({"conv_width": 0}, "conv_width is 0"),
        ({"output_gate": "relu"}, "output_gate is 'relu'; expected one of None, silu, sigmoid"),
        ({"layer_kinds": ("linear", "mamba")}, "mamba"),
        ({"layer_kinds": ()}, "layer_kinds"),
    ],
    ids=str,
)
def test_sizes_that_contradict_one_another_are_refused(as_for_users, changes, message):
    with pytest.raises(ValueError, match=message):
        DeltaLMConfig.tiny(**changes)


@pytest.mark.parametrize(("field", "value"), [("qk_activation", "gelu"), ("qk_norm", "l1"), ("qk_norm", None)])
def test_options_of_delta_net_that_are_none_are_refused(as_for_users, field, value):
    with pytest.raises(ValueError, match=f"{field} is {value!r}; expected one of"):
        DeltaLMConfig.tiny("delta_net", **{field: value})


def test_derived_sizes():
    c = DeltaLMConfig.tiny(
        layer_kinds=("attention", "linear", "attention"), attention=(AttentionSizes(2, 1, 4), AttentionSizes(6, 3, 8))
    )
    assert (c.num_query_heads, c.linear_layers, c.max_rank) == (6, (1,), 8)
    assert c.linear_of(0).conv_channels == 3 * 3 * 8 + 2 * 3 * 12
    assert (c.attention_of(0).head_dim, c.attention_of(2).head_dim) == (4, 8)
    assert DeltaLMConfig.tiny(layer_kinds=("linear",), attention=()).num_query_heads == 0
