"""Segmented runs: each token scored once, whatever the segments; rows that do not see each other; what is not finite."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdelta as jd
from jaxdelta.nn import head
from jaxdelta.runs import segments
from jaxdelta.runs.interventions import Truncate
from jaxdelta.runs.segments import NonFiniteError, forward, init_carry, run, segment_arguments
from ports.compare import relative_error
from tests.tiny import fresh_model, model, tokens

KINDS = ("linear", "attention", "linear")
N, SEGMENT, ROOM = 100, 16, 112  # shapes are few and shared: each is a compilation
LENGTHS = (100, 37, 2)
SHORT_ROOM = 22


def net():
    return model(layer_kinds=KINDS)


def text(length=N, seed=0):
    return tokens(N, seed=seed)[0][None, :length]


@cache
def whole():
    """Logits of a single pass, and the carry after it."""
    return forward(net(), jnp.asarray(text()), init_carry(net(), 1, ROOM))


@cache
def one_pass():
    """-log softmax of the next token's logit, in f64."""
    logits = np.asarray(whole()[0], np.float64)[0, :-1]
    logits -= logits.max(-1, keepdims=True)
    return np.log(np.exp(logits).sum(-1)) - logits[np.arange(N - 1), text()[0, 1:]]


@cache
def untouched():
    return run(net(), text(), segment=SEGMENT, max_length=ROOM)


def packed(lengths=LENGTHS, filler=0):
    """Texts of ``lengths`` in one batch, each with a seed of its own."""
    rows = np.full((len(lengths), max(lengths)), filler)
    for i, length in enumerate(lengths):
        rows[i, :length] = text(length, seed=i)[0]
    return rows


def leaves(carry):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(carry)]


# Losses


@pytest.mark.parametrize("segment", [1, 16, 99, 120])
def test_losses_are_those_of_one_pass(segment):
    """N tokens give N - 1 losses, each once, for segments that divide the text, that do not, and that are longer."""
    losses = run(net(), text(), segment=segment).losses
    assert losses.shape == (1, N - 1)
    assert losses.dtype == np.float32
    np.testing.assert_allclose(losses[0], one_pass(), rtol=0, atol=2e-5)
    assert losses.sum() == pytest.approx(one_pass().sum(), rel=1e-6)


@pytest.mark.parametrize("length", [2, 16, 17, 32, 33])
def test_texts_that_end_at_a_boundary_or_just_after_it(length):
    losses = run(net(), text(length), segment=SEGMENT, max_length=ROOM).losses
    assert losses.shape == (1, length - 1)
    np.testing.assert_allclose(losses[0], one_pass()[: length - 1], rtol=0, atol=2e-5)


def test_rows_of_different_lengths_equal_their_solo_runs():
    """To the last carry; what stands behind a text changes nothing."""
    lengths = np.array(LENGTHS)
    batch = run(net(), packed(), segment=SEGMENT, lengths=lengths, max_length=ROOM)
    other = run(net(), packed(filler=96), segment=SEGMENT, lengths=lengths, max_length=ROOM)
    np.testing.assert_array_equal(batch.losses, other.losses)
    for i, length in enumerate(LENGTHS):
        solo = run(net(), text(length, seed=i), segment=SEGMENT, max_length=ROOM)
        np.testing.assert_allclose(batch.losses[i, : length - 1], solo.losses[0], rtol=0, atol=2e-5)
        assert np.isnan(batch.losses[i, length - 1 :]).all()
        for a, b in zip(jax.tree.leaves(batch.carry), jax.tree.leaves(solo.carry), strict=True):
            assert relative_error(a[i], b[0]) < 1e-5
    np.testing.assert_array_equal(batch.carry.position, LENGTHS)


def test_losses_have_the_texts_width_where_every_row_ends_early():
    lengths = np.array([20, 17, 2])
    losses = run(net(), packed((N, N, N)), segment=SEGMENT, lengths=lengths, max_length=ROOM).losses
    assert losses.shape == (3, N - 1)
    np.testing.assert_array_equal(np.isfinite(losses), np.arange(N - 1) < lengths[:, None] - 1)


def test_two_documents_in_turn_do_not_see_each_other():
    first = untouched().losses
    run(net(), text(seed=5), segment=SEGMENT, max_length=ROOM)
    np.testing.assert_array_equal(run(net(), text(), segment=SEGMENT, max_length=ROOM).losses, first)


def test_the_last_carry_is_that_of_one_pass():
    for a, b in zip(jax.tree.leaves(untouched().carry), jax.tree.leaves(whole()[1]), strict=True):
        assert relative_error(a, b) < 1e-5
    np.testing.assert_array_equal(untouched().carry.position, [N])


def test_each_segment_is_told_once_in_order():
    told = []
    run(net(), text(), segment=SEGMENT, max_length=ROOM, progress=lambda *counts: told.append(counts))
    assert told == [(done, 7) for done in range(1, 8)]


def test_a_bf16_model_keeps_its_states_in_f32_at_boundaries():
    """Losses of three layers in bf16 are off by 0.7 % from those in f32."""
    narrow = fresh_model(dtype=jnp.bfloat16, layer_kinds=KINDS)
    done, wide = (
        run(m, text(48), segment=SEGMENT, max_length=ROOM, intervention=Truncate(2, method="svd")) for m in (narrow, net())
    )
    assert {S.dtype for S in jd.states(done.carry)} == {jnp.dtype("float32")}
    assert done.losses.dtype == np.float32
    assert relative_error(done.losses, wide.losses) < 0.02


# Interventions at boundaries


@pytest.mark.parametrize("method", ["subspace", "eigh", "svd"])
def test_truncation_at_full_rank_is_the_untouched_run_bit_for_bit(method):
    cut = Truncate(8, method=method, max_rank=2 if method == "subspace" else None)
    done = run(net(), text(), segment=SEGMENT, max_length=ROOM, intervention=cut)
    np.testing.assert_array_equal(done.losses, untouched().losses)
    for a, b in zip(leaves(done.carry), leaves(untouched().carry), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_truncation_acts_at_every_boundary_and_on_nothing_before_the_first():
    """The run by hand: forward over a segment, cut, and on."""
    done = run(net(), text(48), segment=SEGMENT, max_length=ROOM, intervention=Truncate(2, method="svd"))
    carry, losses = init_carry(net(), 1, ROOM), []
    ids = text(48)
    for i in range(3):
        if i:
            carry = jd.with_states(carry, [jd.truncate(S, 2, method="svd") for S in jd.states(carry)])
        logits, carry = forward(net(), jnp.asarray(ids[:, 16 * i : 16 * (i + 1)]), carry)
        targets = ids[0, 16 * i + 1 : 16 * (i + 1) + 1]
        log_p = jax.nn.log_softmax(logits[0, : len(targets)])
        losses.append(-log_p[np.arange(len(targets)), targets])
    np.testing.assert_allclose(done.losses[0], np.concatenate(losses), rtol=0, atol=2e-5)
    np.testing.assert_array_equal(done.losses[0, :16], untouched().losses[0, :16])
    assert np.abs(done.losses[0, 16:] - untouched().losses[0, 16:47]).max() > 1e-2


@pytest.mark.parametrize("method", ["subspace", "eigh"])
def test_ranks_of_a_batch_equal_separate_runs(method):
    """Every row has its own rank for each layer and head, among them rows untouched as a whole or in part."""
    ranks = np.full((3, 2, 6), 8)
    ranks[0], ranks[1], ranks[1, 1, 3] = 1, 2, 8
    ranks[2, 1, 3] = 1
    rows = np.repeat(text(50), 3, axis=0)

    def cut(rank):
        return Truncate(rank, method=method, max_rank=2)

    batch = run(net(), rows, segment=SEGMENT, max_length=ROOM, intervention=cut(ranks))
    for i in range(3):
        solo = run(net(), text(50), segment=SEGMENT, max_length=ROOM, intervention=cut(ranks[i]))
        np.testing.assert_allclose(batch.losses[i], solo.losses[0], rtol=0, atol=2e-5)
    losses = batch.losses[:, 20:]
    assert min(np.abs(losses[i] - losses[j]).max() for i in range(3) for j in range(i)) > 1e-3


def test_records_have_an_entry_for_each_boundary():
    done = run(net(), text(), segment=SEGMENT, max_length=ROOM, intervention=Truncate(2, method="svd"))
    assert done.records.missed.shape == (6, 1)
    assert done.records.rounds.shape == (6,)
    assert untouched().records is None


def test_a_text_of_one_segment_has_no_boundary():
    done = run(net(), text(16), segment=SEGMENT, max_length=ROOM, intervention=Truncate(1, method="svd"))
    np.testing.assert_array_equal(done.losses, untouched().losses[:, :15])
    assert done.records is None


# Compilation and memory


def test_one_program_for_each_shape_whatever_the_ranks_and_the_text():
    segment, boundary = segments._segment._cache_size, segments._boundary._cache_size
    before = segment(), boundary()
    for ranks, lengths in ((1, (52, 40)), (2, (60, 9)), (np.array([[[1]], [[8]]]), (17, 2))):
        run(
            net(),
            packed(lengths),
            segment=SEGMENT,
            lengths=np.array(lengths),
            max_length=ROOM,
            intervention=Truncate(ranks, method="eigh", max_rank=2),
        )
    assert (segment() - before[0], boundary() - before[1]) == (1, 1)
    for cut in (None, Truncate(3, method="svd")):
        run(net(), packed((52, 40)), segment=SEGMENT, max_length=ROOM, intervention=cut)
    assert segment() - before[0] == 1


def test_forward_is_compiled_once_for_each_shape():
    carry, before = init_carry(net(), 1, SHORT_ROOM + 1), segments._forward._cache_size()
    for i in range(3):
        _, carry = forward(net(), jnp.asarray(text(7, seed=i)), carry)
    assert segments._forward._cache_size() - before == 1


def sizes(jaxpr):
    """Shapes of all intermediate arrays of a program, inner functions and loops included."""
    for equation in jaxpr.eqns:
        yield from (tuple(v.aval.shape) for v in equation.outvars)
        for parameter in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from sizes(inner)


@pytest.mark.parametrize("most", (970, 97, 51 * 97), ids=("blocks and a rest", "single words", "all at once"))
def test_logits_exist_for_a_block_of_words_at_a_time(monkeypatch, most):
    """Qwen3.5's 248,320 words times 16,384 tokens would be 16 GB. The losses of the blocks are those of the whole."""
    monkeypatch.setattr(head, "LOGITS_AT_ONCE", most)
    hidden = jnp.asarray(np.random.default_rng(0).standard_normal((3, 17, 44)), jnp.float32)
    targets = jnp.asarray(packed((17, 17, 17)))

    def losses(hidden, targets):
        return head.token_losses(net().head_weight, hidden, targets)

    program = jax.make_jaxpr(losses)(hidden, targets)
    blocks = [shape for shape in sizes(program.jaxpr) if len(shape) == 2 and shape[0] == 51 and shape[1] not in (1, 44)]
    assert max((rows * words for rows, words in blocks), default=51) <= most
    log_p = jax.nn.log_softmax(net().logits(hidden))
    expected = -jnp.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]
    assert relative_error(jax.jit(losses)(hidden, targets), expected) < 1e-6


def test_no_array_of_a_run_grows_with_text_times_words():
    """The program of a segment, with room for 64 segments: the largest array with a row for each word."""
    arguments = segment_arguments(net(), 1, SEGMENT, 64 * SEGMENT)
    program = jax.make_jaxpr(segments.advance, static_argnums=0)(*arguments)
    with_words = [int(np.prod(shape)) for shape in sizes(program.jaxpr) if 97 in shape and 44 not in shape]
    assert max(with_words) == SEGMENT * 97


# What is not finite


def broken(path, value=jnp.nan, *, layer=None):
    """A model with one bad entry; ``layer`` None: outside of the layers."""
    made = fresh_model(layer_kinds=KINDS)
    at = made if layer is None else made.layers[layer]
    for name in path[:-1]:
        at = getattr(at, name)
    parameter = getattr(at, path[-1])
    parameter[...] = parameter[...].at[(0,) * parameter[...].ndim].set(value)
    return made


def with_a_broken_word(word):
    """Its embedding is infinite; the head, which every token reads, is not."""
    made = fresh_model(layer_kinds=KINDS, tied=False)
    made.embed[...] = made.embed[...].at[word].set(jnp.inf)
    return made


@pytest.mark.parametrize(
    ("layer", "path", "where"),
    [
        (0, ("mixer", "A_log"), r"layer 0 \(linear\), in the state of head 0, in row 0, tokens 0 to 15"),
        (1, ("mixer", "v"), r"layer 1 \(attention\), in row 0, tokens 0 to 15"),
        (2, ("mlp", "down"), r"layer 2 \(linear\), in row 0, tokens 0 to 15"),
        (None, ("final_norm",), r"the logits, in row 0, tokens 0 to 15"),
    ],
    ids=str,
)
def test_a_nan_is_told_with_its_layer(layer, path, where):
    with pytest.raises(NonFiniteError, match=f"NaN or infinity first after {where}; look for broken weights there"):
        run(broken(path, layer=layer), text(48), segment=SEGMENT, max_length=ROOM)


def test_an_infinity_is_told_with_its_row_and_segment():
    """A word that only the second text holds, in its third segment."""
    rows = packed((N, N, N))
    rows[1, 40] = 95
    with pytest.raises(NonFiniteError, match="the embedding, in row 1, tokens 32 to 47"):
        run(with_a_broken_word(95), rows, segment=SEGMENT, max_length=ROOM)


class Poison:
    """NaN in the state of one head of the last linear layer of row 1, at the boundary before token 32."""

    def start(self, carry):
        return self, jnp.zeros((), jnp.int32)

    def __call__(self, carry, memory):
        first, last = jd.states(carry)
        bad = jnp.where(memory == 1, jnp.nan, last[1, 3, 0, 0])
        return jd.with_states(carry, [first, last.at[1, 3, 0, 0].set(bad)]), memory + 1, None


def test_a_broken_state_is_told_with_its_layer_row_and_segment():
    with pytest.raises(NonFiniteError, match=r"layer 2 \(linear\), in the state of head \d, in row 1, tokens 32 to 47"):
        run(net(), packed((50, 50, 50)), segment=SEGMENT, max_length=ROOM, intervention=Poison())


# One call of the model


@cache
def started():
    """The carry of two texts after 11 tokens each."""
    return forward(net(), jnp.asarray(packed((11, 11))), init_carry(net(), 2, SHORT_ROOM))[1]


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_padding_on_either_side_changes_neither_logits_nor_carry(side):
    """Rows of 11 and of 7 tokens among 14; positions count per row."""
    mask = np.zeros((2, 14), bool)
    for row, length in enumerate((11, 7)):
        first = {"left": 14 - length, "right": 0, "both": 2}[side]
        mask[row, first : first + length] = True
    ids = np.full((2, 14), 96)
    ids[mask] = np.concatenate([text(11, seed=8)[0], text(7, seed=9)[0]])
    logits, carry = forward(net(), jnp.asarray(ids), started(), jnp.asarray(mask))
    np.testing.assert_array_equal(carry.position, [22, 18])
    for row, length in enumerate((11, 7)):
        start = jax.tree.map(lambda a, row=row: a[row : row + 1], started())
        alone, after = forward(net(), jnp.asarray(text(length, seed=8 + row)), start)
        assert relative_error(logits[row][mask[row]], alone[0]) < 1e-5
        for a, b in zip(jax.tree.leaves(carry), jax.tree.leaves(after), strict=True):
            assert relative_error(a[row], b[0]) < 1e-5


def test_a_row_of_padding_alone_leaves_its_carry_as_it_was():
    mask = jnp.asarray(np.arange(14) < np.array([[11], [0]]))
    _, carry = forward(net(), jnp.asarray(packed((14, 14))), started(), mask)
    for a, b in zip(leaves(carry), leaves(started()), strict=True):
        np.testing.assert_array_equal(a[1], b[1])


def test_a_carry_stays_valid_after_its_use():
    """Two branches from one carry, equal; it is read only after both, since what numpy has seen is never donated."""
    ids = jnp.asarray(text(11))
    _, carry = forward(net(), ids, init_carry(net(), 1, SHORT_ROOM))
    first, second = (forward(net(), jnp.asarray(text(11, seed=1)), carry) for _ in range(2))
    np.testing.assert_array_equal(first[0], second[0])
    for a, b in zip(leaves(carry), leaves(forward(net(), ids, init_carry(net(), 1, SHORT_ROOM))[1]), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_carry_of_a_run_can_be_used_on():
    done = run(net(), text(48), segment=SEGMENT, max_length=ROOM, intervention=Truncate(8, method="svd"))
    logits, _ = forward(net(), jnp.asarray(text()[:, 48:64]), done.carry)
    assert relative_error(logits, whole()[0][:, 48:64]) < 1e-5


def test_a_runs_ranks_are_not_taken_from_its_caller():
    ranks = np.full((1, 2, 6), 2, np.int32)
    cut = Truncate(ranks, method="svd")
    first = run(net(), text(48), segment=SEGMENT, max_length=ROOM, intervention=cut).losses
    np.testing.assert_array_equal(ranks, 2)
    again = run(net(), text(48), segment=SEGMENT, max_length=ROOM, intervention=cut).losses
    np.testing.assert_array_equal(first, again)


# Bad input


@pytest.mark.parametrize("bad", [-1, 97, 2**31 - 1, 2**32 + 3, -(2**32)])
def test_ids_out_of_range_are_refused(bad):
    """JAX would clip them; a cast to int32 would turn 2^32 + 3 into 3."""
    ids = text(20).copy()
    ids[0, 7] = bad
    with pytest.raises(ValueError, match=r"token ids run from .* to .*; expected 0 to 96"):
        run(net(), ids, segment=SEGMENT)


@pytest.mark.parametrize("mask", [None, np.array([[True, True]])], ids=["no mask", "mask"])
@pytest.mark.parametrize("bad", [-1, 97, 2**32 + 3])
def test_forward_refuses_ids_out_of_range(bad, mask):
    with pytest.raises(ValueError, match="expected 0 to 96"):
        forward(net(), np.array([[1, bad]]), init_carry(net(), 1, 8), mask)


def test_forward_does_not_look_at_ids_of_padding():
    ids, mask = packed((14, 14)), np.arange(14) < np.array([[11], [0]])
    first, _ = forward(net(), ids, started(), mask)
    second, _ = forward(net(), np.where(mask, ids, -1), started(), mask)
    np.testing.assert_array_equal(np.asarray(first)[mask], np.asarray(second)[mask])


def test_forward_takes_arrays_of_numpy_and_of_jax():
    mask = np.arange(14) < np.array([[11], [7]])
    first, _ = forward(net(), packed((14, 14)), started(), mask)
    second, _ = forward(net(), jnp.asarray(packed((14, 14))), started(), jnp.asarray(mask))
    np.testing.assert_array_equal(first, second)


def test_forward_of_no_tokens_is_refused():
    with pytest.raises(ValueError, match="no tokens"):
        forward(net(), np.zeros((2, 0), int), started())


def test_ids_behind_a_text_are_not_looked_at():
    rows = packed(filler=10**9)
    losses = run(net(), rows, segment=SEGMENT, lengths=np.array(LENGTHS), max_length=ROOM).losses
    expected = run(net(), packed(), segment=SEGMENT, lengths=np.array(LENGTHS), max_length=ROOM).losses
    np.testing.assert_array_equal(losses, expected)


@pytest.mark.parametrize("ids", [np.array([[1.0, 2.0]]), np.array([1, 2]), np.zeros((0, 5), int), np.array(3)], ids=repr)
def test_what_is_no_batch_of_ids_is_refused(ids):
    with pytest.raises(ValueError, match="token"):
        run(net(), ids, segment=SEGMENT)


@pytest.mark.parametrize(
    ("length", "options", "message"),
    [
        (20, {"segment": 0}, "segment is 0; expected at least 1"),
        (20, {"segment": -16}, "segment is -16; expected at least 1"),
        (20, {"segment": 65, "max_length": 64}, "segment of 65 tokens is longer than max_length = 64"),
        (20, {"segment": 16, "max_length": 19}, "text of 20 tokens is longer than max_length = 19"),
        (1, {"segment": 16}, "texts have 1 to 1 tokens; expected 2 to 1"),
        (20, {"segment": 16, "lengths": np.array([1])}, "texts have 1 to 1 tokens; expected 2 to 20"),
        (20, {"segment": 16, "lengths": np.array([21])}, "texts have 21 to 21 tokens; expected 2 to 20"),
        (20, {"segment": 16, "lengths": np.array([20, 20])}, "lengths"),
        (20, {"segment": 16, "intervention": Truncate(9)}, r"rank 9 is outside of 1 to min\(K, V\) = 8"),
        (20, {"segment": 16, "intervention": Truncate(0)}, r"rank 0 is outside of 1 to min\(K, V\) = 8"),
    ],
    ids=str,
)
def test_a_run_that_makes_no_sense_is_refused(length, options, message):
    with pytest.raises(ValueError, match=message):
        run(net(), text(length), **options)


def test_more_tokens_than_the_carry_has_room_for_are_refused():
    """Counted from what each row has consumed; padding needs no room."""
    ids, mask = jnp.asarray(packed((14, 14))), np.arange(14) < np.array([[11], [0]])
    with pytest.raises(ValueError, match="25 tokens do not fit the carry's max_length = 22"):
        forward(net(), ids, started())
    with pytest.raises(ValueError, match="23 tokens do not fit"):
        forward(net(), ids, started(), jnp.asarray(np.roll(mask, 1, axis=0) | (np.arange(14) < 12)))
    _, carry = forward(net(), ids, started(), jnp.asarray(mask))
    np.testing.assert_array_equal(carry.position, [22, 11])


def test_a_batch_that_is_not_the_carrys_is_refused():
    with pytest.raises(ValueError, match="tokens have 1 rows, the carry 2"):
        forward(net(), jnp.array([[1, 2]]), init_carry(net(), 2, 8))


@pytest.mark.parametrize("shape", [(2, 4), (2, 6), (1, 5)], ids=str)
def test_a_mask_of_another_shape_is_refused(shape):
    """A shorter one would drop tokens, a single row would be taken for all."""
    with pytest.raises((ValueError, TypeError), match=r"mask|dimension"):
        forward(net(), jnp.asarray(packed((5, 5))), init_carry(net(), 2, 8), jnp.ones(shape, bool))


@pytest.mark.parametrize(("batch", "max_length"), [(0, 8), (-1, 8), (1, 0), (1, -8)])
def test_a_carry_of_nothing_is_refused(batch, max_length):
    with pytest.raises(ValueError, match=f"batch = {batch} and max_length = {max_length}"):
        init_carry(net(), batch, max_length)
