"""Slips of the hand in the arguments of public functions: a sentence that names the argument, never an AttributeError."""

import numpy as np
import pytest

import jaxdelta as jd
from jaxdelta.runs.interventions import Truncate, Zero
from tests.tiny import model

IDS = np.arange(40)[None] % 8
SEGMENT = 16


pytestmark = pytest.mark.usefixtures("as_for_users")


def net():
    return model()


def carry():
    return jd.init_carry(net(), max_length=64)


MASK = np.ones((1, 40), bool)
FORWARD = {
    "a model's name": (lambda: jd.forward("control", IDS, carry()), TypeError, "model is 'control'; expected a Decoder"),
    "one axis": (lambda: jd.forward(net(), IDS[0], carry()), ValueError, r"tokens is int64\[40\]; expected .*\[B, T\]"),
    "three axes": (lambda: jd.forward(net(), IDS[None], carry()), ValueError, r"tokens is int64\[1, 1, 40\]"),
    "a list": (lambda: jd.forward(net(), [[1, 2]], carry()), ValueError, r"tokens is \[\[1, 2\]\]; expected an array"),
    "a text": (lambda: jd.forward(net(), "w1 w2", carry()), ValueError, "tokens is 'w1 w2'"),
    "a number": (lambda: jd.forward(net(), 3, carry()), ValueError, "tokens is 3"),
    "float ids": (lambda: jd.forward(net(), IDS / 1, carry()), ValueError, "dtype float64; expected whole numbers"),
    "bool ids": (lambda: jd.forward(net(), IDS > 3, carry()), ValueError, "dtype bool"),
    "a float mask": (
        lambda: jd.forward(net(), IDS, carry(), MASK / 1),
        ValueError,
        r"mask is float64\[1, 40\]; expected bool",
    ),
    "an int mask": (
        lambda: jd.forward(net(), IDS, carry(), 1 * MASK),
        ValueError,
        r"mask is int64\[1, 40\]",
    ),
    "a list as mask": (lambda: jd.forward(net(), IDS, carry(), MASK.tolist()), ValueError, "mask is a list; expected bool"),
    "a mask of one axis": (lambda: jd.forward(net(), IDS, carry(), MASK[0]), ValueError, r"mask is bool\[40\]"),
    "no carry": (lambda: jd.forward(net(), IDS, None), TypeError, "carry is None; expected a Carry"),
    "states for a carry": (lambda: jd.forward(net(), IDS, jd.states(carry())), TypeError, "carry is a list"),
}
CARRIES = {
    "a name": (lambda: jd.init_carry("control"), TypeError, "model is 'control'"),
    "half a batch": (lambda: jd.init_carry(net(), 1.5), TypeError, "batch is 1.5; expected a whole number"),
    "a float length": (lambda: jd.init_carry(net(), max_length=2e3), TypeError, "max_length is 2000.0"),
    "a text": (lambda: jd.init_carry(net(), max_length="64"), TypeError, "max_length is '64'"),
    "states of nothing": (lambda: jd.states(None), TypeError, "carry is None"),
    "states of states": (lambda: jd.states(jd.states(carry())), TypeError, "carry is a list"),
    "no states": (lambda: jd.with_states(carry(), [None]), TypeError, r"S is \[None\]; expected a list of 1 arrays"),
    "numbers": (lambda: jd.with_states(carry(), 3), TypeError, "S is 3; expected a list"),
    "one state": (lambda: jd.with_states(carry(), jd.states(carry())[0]), ValueError, "do not fit a carry"),
    "complex": (lambda: jd.with_states(carry(), [1j * s for s in jd.states(carry())]), ValueError, "complex"),
    "states, no carry": (lambda: jd.with_states(None, jd.states(carry())), TypeError, "carry is None"),
}
RUNS = {
    "a name": (lambda: jd.run("control", IDS), TypeError, "model is 'control'"),
    "rows of several lengths": (lambda: jd.run(net(), [[1, 2], [3]]), ValueError, "rows of several lengths"),
    "a text": (lambda: jd.run(net(), "w1 w2"), ValueError, r"tokens have shape \(\)"),
    "a float segment": (lambda: jd.run(net(), IDS, segment=16.0), TypeError, "segment is 16.0; expected a whole number"),
    "a float length": (lambda: jd.run(net(), IDS, max_length=64.0), TypeError, "max_length is 64.0"),
    "lengths of halves": (lambda: jd.run(net(), IDS, lengths=[20.5]), ValueError, "lengths are of dtype float64"),
    "one length": (lambda: jd.run(net(), IDS, lengths=20), ValueError, r"lengths have shape \(\)"),
    "a function": (
        lambda: jd.run(net(), IDS, segment=16, intervention=lambda c: c),
        TypeError,
        "intervention is <function",
    ),
    "a class": (lambda: jd.run(net(), IDS, segment=16, intervention=Truncate), TypeError, "intervention is <class"),
    "a word": (lambda: jd.run(net(), IDS, segment=16, intervention="cut"), TypeError, "intervention is 'cut'; expected"),
}


def swept(documents=(IDS[0],), **options):
    return lambda: jd.sweep(net(), documents, **(dict(ranks=(1,), segment=SEGMENT) | options))


SWEEPS = {
    "a name": (lambda: jd.sweep("control", [IDS[0]]), TypeError, "model is 'control'"),
    "a text": (swept("w1 w2 w3"), TypeError, "documents is 'w1 w2 w3'; expected a list of texts"),
    "one row": (swept(IDS[0]), ValueError, r"documents is one row of token ids; expected .* \[ids\]"),
    "one list": (swept(IDS[0].tolist()), ValueError, "documents is one row of token ids"),
    "nothing": (swept(None), TypeError, "documents is None"),
    "a number": (swept(3), TypeError, "documents is 3"),
    "one rank": (swept(ranks=1), TypeError, r"ranks is 1; expected several whole numbers, such as \(1, 4\)"),
    "half a rank": (swept(ranks=(1.5,)), TypeError, "one of ranks is 1.5; expected a whole number"),
    "ranks in words": (swept(ranks="1,4"), TypeError, "ranks is '1,4'"),
    "a truth": (swept(ranks=(True,)), TypeError, "one of ranks is True"),
    "no ranks": (swept(ranks=None), TypeError, "ranks is None"),
    "a float segment": (swept(segment=16.0), TypeError, "segment is 16.0"),
    "a segment in words": (swept(segment="16"), TypeError, "segment is '16'"),
    "a float batch": (swept(batch=2.0), TypeError, "batch is 2.0"),
    "a gap in words": (swept(copy_gap="1"), TypeError, "copy_gap is '1'"),
    "float ids": (swept([IDS[0] / 1]), ValueError, "float64 of shape"),
}


def mapped(tokens=IDS[0], segment=SEGMENT, **options):
    return lambda: jd.sensitivity(net(), tokens, segment, **(dict(samples=0) | options))


MAPS = {
    "a name": (lambda: jd.sensitivity("control", IDS), TypeError, "model is 'control'"),
    "a text": (mapped("w1 w2 w3"), TypeError, "documents is 'w1 w2 w3'; expected a list of texts"),
    "nothing": (mapped(None), TypeError, "documents is None"),
    "a number": (mapped(3), TypeError, "documents is 3"),
    "a mask of one axis for rows": (
        mapped(IDS, scored=MASK[0, 1:]),
        ValueError,
        r"1 documents and 39 masks",
    ),
    "a mask of rows for one": (mapped(scored=MASK[:, 1:]), ValueError, r"scored of document_0 is bool\[1, 39\]"),
    "a mask in a word": (mapped(scored="all"), TypeError, "scored is 'all'"),
    "a truth as mask": (mapped(scored=True), TypeError, "scored is True"),
    "a function": (mapped(intervention=lambda c: c), TypeError, "intervention is <function"),
    "a class": (mapped(intervention=Zero), TypeError, "intervention is <class"),
    "a function as loss": (mapped(loss=lambda x: x), ValueError, "loss is <function"),
    "an array as loss": (mapped(loss=np.ones(3)), ValueError, r"loss is float64\[3\]; expected 'next_token'"),
    "float samples": (mapped(samples=2.0), TypeError, "samples is 2.0"),
    "no samples": (mapped(samples=None), TypeError, "samples is None"),
    "a float segment": (mapped(segment=16.0), TypeError, "segment is 16.0"),
    "a float seed": (mapped(seed=1.5), TypeError, "seed is 1.5"),
    "a seed of 70 bits": (mapped(seed=2**70), ValueError, "seed is 1180591620717411303424"),
    "a float length": (mapped(max_length=64.0), TypeError, "max_length is 64.0"),
}
Q, V, G = np.ones((1, 5, 2, 3)), np.ones((1, 5, 2, 4)), np.zeros((1, 5, 2))
OPS = {
    "q of two axes": (lambda: jd.gated_delta_rule(Q[0, 0], Q, V, g=G, beta=G), ValueError, r"q has shape \(2, 3\)"),
    "one beta": (lambda: jd.gated_delta_rule(Q, Q, V, g=G, beta=1.0), ValueError, r"beta has shape \(\)"),
    "g of one token": (
        lambda: jd.gated_delta_rule_chunked(Q, Q, V, g=G[:, :1], beta=G),
        ValueError,
        r"g has shape \(1, 1, 2\)",
    ),
    "g of one head": (lambda: jd.gated_delta_rule_chunked(Q, Q, V, g=G[..., :1], beta=G), ValueError, "g has shape"),
    "a state of another batch": (
        lambda: jd.gated_delta_rule_chunked(Q, Q, V, g=G, beta=G, state=np.ones((2, 2, 3, 4))),
        ValueError,
        r"state has shape \(2, 2, 3, 4\); expected \(1, 2, 3, 4\)",
    ),
    "a transposed state": (
        lambda: jd.gated_delta_rule(Q, Q, V, g=G, beta=G, state=np.ones((1, 2, 4, 3))),
        ValueError,
        r"state has shape",
    ),
    "half a chunk": (
        lambda: jd.gated_delta_rule_chunked(Q, Q, V, g=G, beta=G, chunk_size=1.5),
        TypeError,
        "chunk_size is 1.5",
    ),
    "half a step": (
        lambda: jd.gated_delta_product(Q, Q, V, beta=G, num_householder=1.5),
        TypeError,
        "num_householder is 1.5",
    ),
    "one axis": (lambda: jd.effective_rank(np.ones(3)), ValueError, r"S has shape \(3,\); expected matrices"),
    "a number": (lambda: jd.singular_values(1.0), ValueError, r"S has shape \(\)"),
}
ALL = {
    f"{group}: {name}": case
    for group, cases in dict(forward=FORWARD, carry=CARRIES, run=RUNS, sweep=SWEEPS, map=MAPS, ops=OPS).items()
    for name, case in cases.items()
}


@pytest.mark.parametrize("case", ALL.values(), ids=ALL)
def test_a_slip_is_named(case):
    call, error, message = case
    with pytest.raises(error, match=message) as found:
        call()
    assert found.type is error


def test_lists_of_ids_are_documents():
    first = jd.sensitivity(net(), IDS[0], SEGMENT, samples=0)
    np.testing.assert_array_equal(jd.sensitivity(net(), IDS[0].tolist(), SEGMENT, samples=0).gate, first.gate)
    np.testing.assert_array_equal(jd.sensitivity(net(), IDS, SEGMENT, samples=0, scored=MASK[:, 1:]).gate, first.gate)
