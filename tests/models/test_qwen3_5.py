"""The whole model: splits, batches, padding, what is carried, dtypes, and where something is not finite."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxdelta.models.carry import states, with_states
from jaxdelta.models.config import Qwen3_5Config
from jaxdelta.models.qwen3_5 import Qwen3_5
from jaxdelta.nn.attention import AttentionCarry
from jaxdelta.nn.mixer import LinearCarry
from ports.compare import relative_error
from tests.helpers import randomised, run, run_in_segments

VOCABULARY = 97
PADDING = 96  # a token that no text holds


@cache
def model(**changes):
    """A linear, an attention and a linear layer."""
    config = Qwen3_5Config.tiny(layer_kinds=("linear", "attention", "linear"), **changes)
    return randomised(Qwen3_5(config, rngs=nnx.Rngs(0)))


def texts(T, B=1, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, PADDING, (B, T)), jnp.int32)


in_segments = partial(run_in_segments, max_length=320)


def assert_carries_agree(found, expected, tolerance=1e-5):
    for i, (a, b) in enumerate(zip(found.layers, expected.layers, strict=True)):
        for name in a._fields:
            assert relative_error(getattr(a, name), getattr(b, name)) < tolerance, f"layer {i}: {name}"
    np.testing.assert_array_equal(found.position, expected.position)


def row(carry, index):
    """The carry of one text."""
    return jax.tree.map(lambda a: a[index : index + 1], carry)


@pytest.mark.parametrize("lengths", [(1, 2, 3, 1, 64, 229), (100, 200)], ids=str)
def test_any_split_equals_one_pass(lengths):
    """No segment need be a multiple of the chunk of 64, and one of a single token takes the recurrence."""
    tokens = texts(300)
    (hidden, carry), (expected, whole) = (in_segments(model(), tokens, n) for n in (lengths, (300,)))
    assert relative_error(hidden, expected) < 1e-5
    assert_carries_agree(carry, whole)


def test_positions_count_the_tokens_consumed():
    carry = model().init_carry(1, 320)
    for n, position in ((100, 100), (100, 200), (64, 264), (1, 265)):
        carry = run(model(), texts(n), carry).carry
        np.testing.assert_array_equal(carry.position, [position])


def test_rows_of_a_batch_equal_their_solo_runs():
    tokens = texts(100, B=2, seed=1)
    hidden, carry = in_segments(model(), tokens, (64, 36))
    for i in range(2):
        solo_hidden, solo = in_segments(model(), tokens[i : i + 1], (64, 36))
        assert relative_error(hidden[i : i + 1], solo_hidden) < 1e-5
        assert_carries_agree(row(carry, i), solo)


def test_a_fresh_carry_forgets_the_text_before():
    first = in_segments(model(), texts(64, seed=2), (64,))[0]
    in_segments(model(), texts(64, seed=3), (64,))
    np.testing.assert_array_equal(in_segments(model(), texts(64, seed=2), (64,))[0], first)


def test_later_tokens_do_not_change_earlier_outputs():
    tokens = texts(64, seed=4)
    hidden, _ = in_segments(model(), tokens, (64,))
    changed, _ = in_segments(model(), tokens.at[:, 40].add(1), (64,))
    np.testing.assert_array_equal(changed[:, :40], hidden[:, :40])
    assert (jnp.abs(changed - hidden)[:, 40:].max(-1) > 1e-6).all()


def padded_run(model, tokens, lengths, carry):
    """One segment of rows that end in padding, and the one after it, full."""
    T = tokens.shape[1] // 2
    lengths = jnp.asarray(lengths)
    text = jnp.arange(T) < lengths[:, None]
    first = run(model, jnp.where(text, tokens[:, :T], PADDING), carry, lengths)
    return first, run(model, tokens[:, T:], first.carry)


def test_padded_rows_equal_runs_without_the_padding():
    """Hidden states of text, S, tail, cache and position; the row of length 0 hands its carry on bit for bit."""
    tokens = texts(128, B=2, seed=5)
    before = run(model(), texts(64, B=2, seed=6), model().init_carry(2, 320)).carry
    first, second = padded_run(model(), tokens, (36, 0), before)
    solo = run(model(), tokens[:1, :36], row(before, 0))
    assert relative_error(first.hidden[:1, :36], solo.hidden) < 1e-5
    assert_carries_agree(row(first.carry, 0), solo.carry)
    for a, b in zip(*(jax.tree.leaves(row(carry, 1)) for carry in (first.carry, before)), strict=True):
        np.testing.assert_array_equal(a, b)
    for i, carry in enumerate((solo.carry, row(before, 1))):
        solo = run(model(), tokens[i : i + 1, 64:], carry)
        assert relative_error(second.hidden[i : i + 1], solo.hidden) < 1e-5
        assert_carries_agree(row(second.carry, i), solo.carry)


def test_embeddings_of_padding_have_no_gradient():
    """The loss of all text, here and in the next segment; no text holds the padding's token."""
    untied, tokens, lengths = model(tied=False), texts(128, B=2, seed=7), jnp.array([36, 0])
    text = jnp.arange(64) < lengths[:, None]
    graphdef, state = nnx.split(untied)

    @jax.jit
    @jax.grad
    def gradient(state):
        m = nnx.merge(graphdef, state)
        first, second = padded_run(m, tokens, lengths, m.init_carry(2, 128))
        logits = m.logits(jnp.where(text[..., None], first.hidden, 0)), m.logits(second.hidden)
        return sum(jnp.sum(jnp.sin(a)) for a in logits)

    found = gradient(state)
    assert all(jnp.isfinite(a).all() for a in jax.tree.leaves(found))
    rows = found["embed"][...]
    used = jnp.unique(jnp.concatenate([tokens[:, :64][text], tokens[:, 64:].ravel()]))
    assert (jnp.abs(rows[used]).max(-1) > 0).all()
    np.testing.assert_array_equal(rows[PADDING], 0)


def test_states_of_a_carry_can_be_read_and_replaced():
    carry = in_segments(model(), texts(64), (64,))[1]
    S = states(carry)
    assert [s.shape for s in S] == [(1, 6, 8, 11)] * 2
    for a, b in zip(*(jax.tree.leaves(c) for c in (with_states(carry, S), carry)), strict=True):
        np.testing.assert_array_equal(a, b)
    doubled = with_states(carry, [1 * S[0], 2 * S[1]])
    np.testing.assert_array_equal(doubled.layers[0].S, S[0])
    np.testing.assert_array_equal(doubled.layers[2].S, 2 * S[1])
    assert doubled.layers[1] is carry.layers[1]
    np.testing.assert_array_equal(doubled.layers[2].tail, carry.layers[2].tail)


def test_states_keep_the_dtype_of_the_carry():
    carry = model().init_carry(1, 8)
    narrow = [s.astype(jnp.bfloat16) for s in states(carry)]
    assert {s.dtype for s in states(with_states(carry, narrow))} == {jnp.float32.dtype}


@pytest.mark.parametrize(
    "change",
    [lambda S: S[:1], lambda S: [*S, S[0]], lambda S: [S[0], jnp.swapaxes(S[1], -1, -2)], lambda S: [s[:, :5] for s in S]],
    ids=["too few", "too many", "transposed", "too few heads"],
)
def test_states_of_wrong_shapes_are_refused(change):
    carry = model().init_carry(1, 8)
    with pytest.raises(ValueError, match=r"\(1, 6, 8, 11\)"):
        with_states(carry, change(states(carry)))


def test_an_intervention_on_the_states_reaches_later_logits_alone():
    tokens, carry = texts(64), in_segments(model(), texts(64, seed=8), (64,))[1]
    kept = run(model(), tokens, with_states(carry, states(carry)))
    zeroed = run(model(), tokens, with_states(carry, [jnp.zeros_like(s) for s in states(carry)]))
    np.testing.assert_array_equal(kept.hidden, run(model(), tokens, carry).hidden)
    assert relative_error(zeroed.hidden, kept.hidden) > 1e-2


@pytest.mark.parametrize("tied", (True, False))
def test_logits_are_products_with_the_head(tied):
    m = model(tied=tied)
    hidden = jnp.asarray(np.random.default_rng(9).standard_normal((2, 3, m.config.width)), jnp.float32)
    weight = (m.embed if tied else m.head)[...]
    assert weight.shape == (VOCABULARY, m.config.width)
    assert relative_error(m.logits(hidden), np.asarray(hidden, np.float64) @ np.asarray(weight, np.float64).T) < 1e-6
    assert hasattr(m, "head") is not tied


def test_states_gates_norms_and_logits_of_a_bf16_model_are_f32():
    config = Qwen3_5Config.tiny(layer_kinds=("linear", "attention", "linear"))
    m = Qwen3_5(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    wide = {"A_log", "dt_bias", "norm", "q_norm", "k_norm", "input_norm", "post_norm", "final_norm"}
    for path, parameter in nnx.to_flat_state(nnx.state(m, nnx.Param)):
        assert parameter.dtype == (jnp.float32 if path[-1] in wide else jnp.bfloat16), path
    for T in (64, 1):
        out = run(m, texts(T), m.init_carry(1, 320))
        assert {s.dtype for s in states(out.carry)} == {jnp.float32.dtype}
        assert out.hidden.dtype == jnp.bfloat16
        assert m.logits(out.hidden).dtype == jnp.float32
        for layer in out.carry.layers:
            rest = [layer.tail] if isinstance(layer, LinearCarry) else list(layer)
            assert {a.dtype for a in rest} == {jnp.bfloat16.dtype}


def test_a_bf16_model_is_near_its_f32_twin():
    """Measured 4.9e-2 after three layers, of which the rounding of the parameters alone makes 2.4e-2."""
    m = model()
    half = Qwen3_5(m.config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    nnx.update(half, jax.tree.map(lambda a, b: a.astype(b.dtype), nnx.state(m, nnx.Param), nnx.state(half, nnx.Param)))
    found, expected = (in_segments(x, texts(64), (64,))[0] for x in (half, m))
    assert relative_error(found, expected) < 0.1


def assert_one_structure(dtype):
    m = Qwen3_5(model().config, dtype=dtype, rngs=nnx.Rngs(0))
    before = m.init_carry(2, 320)
    after = jax.eval_shape(lambda carry: run(m, texts(5, B=2), carry).carry, before)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), before) == jax.tree.map(lambda a: (a.shape, a.dtype), after)


@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16))
def test_carries_have_one_structure_before_and_after(dtype):
    """So that a loop over segments can hold them, and one compiled function serves them all."""
    assert_one_structure(dtype)


@pytest.mark.parametrize("dtype", (jnp.float32, jnp.float64))
def test_carries_have_one_structure_where_f64_is_on(dtype, x64):
    assert_one_structure(dtype)


def test_kinds_of_layers_have_their_kinds_of_carry():
    kinds = [type(layer) for layer in model().init_carry(1, 8).layers]
    assert kinds == [LinearCarry, AttentionCarry, LinearCarry]


def set_nan(m, layer, path):
    parameter = m.layers[layer]
    for name in path:
        parameter = getattr(parameter, name)
    parameter[...] = parameter[...].at[(0,) * parameter[...].ndim].set(jnp.nan)


@pytest.mark.parametrize(
    ("layer", "path"),
    [
        (0, ("mixer", "A_log")),
        (0, ("mlp", "down")),
        (1, ("mixer", "k")),
        (1, ("input_norm",)),
        (2, ("mixer", "in_qkv")),
        (2, ("mixer", "in_b")),
        (2, ("mlp", "gate")),
    ],
    ids=str,
)
def test_finite_names_the_first_layer_with_a_nan(layer, path):
    """Everything before the broken layer is finite, for every row; nothing from it on is."""
    m = randomised(Qwen3_5(model().config, rngs=nnx.Rngs(0)))
    set_nan(m, layer, path)
    finite = run(m, texts(64, B=2), m.init_carry(2, 320)).finite
    np.testing.assert_array_equal(finite, np.broadcast_to(np.arange(4)[:, None] <= layer, (4, 2)))


def test_finite_names_the_embedding():
    m = randomised(Qwen3_5(model().config, rngs=nnx.Rngs(0)))
    m.embed[...] = m.embed[...].at[PADDING, 0].set(jnp.inf)
    tokens = texts(64, B=2).at[1, 5].set(PADDING)
    np.testing.assert_array_equal(run(m, tokens, m.init_carry(2, 320)).finite, [[True, False]] * 4)


def test_finite_names_the_row_whose_state_is_broken():
    carry = model().init_carry(2, 320)
    S = states(carry)
    carry = with_states(carry, [S[0], S[1].at[1, 2, 3, 4].set(jnp.nan)])
    finite = run(model(), texts(64, B=2), carry).finite
    np.testing.assert_array_equal(finite, [[True, True]] * 3 + [[True, False]])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_value_heads": 3}, "3 value heads are no multiple of 2 key heads"),
        ({"num_query_heads": 5}, "5 query heads are no multiple of 2 key/value heads"),
        ({"rotary_dim": 13}, "13 entries rotate"),
        ({"rotary_dim": 28}, "28 entries rotate"),
        ({"layer_kinds": ("linear", "mamba")}, "mamba"),
        ({"layer_kinds": ()}, "layer_kinds"),
        ({"width": 0}, "width is 0"),
        ({"key_dim": -1}, "key_dim is -1"),
    ],
    ids=str,
)
def test_sizes_that_contradict_one_another_are_refused(changes, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Qwen3_5Config.tiny(**changes)


def test_derived_sizes():
    config = Qwen3_5Config.tiny()
    assert config.linear_layers == (0, 1, 2)
    assert config.num_layers == 4
    assert config.linear_of(0).conv_channels == 2 * 2 * 8 + 6 * 11
    assert config.max_rank == 8
