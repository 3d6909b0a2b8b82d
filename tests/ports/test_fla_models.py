"""The JAX models compute what fla's do, from checkpoints that fla wrote; and fla reads what this library writes of them."""

import numpy as np
import pytest

import jaxdelta as jd
from ports.compare import carry_arrays, relative_error
from tests.ports.fla_cases import MODELS, model_inputs

LOGITS = 2e-5
STATES = 2e-5

pytestmark = pytest.mark.timeout(900)  # the first test waits for fla


def segments(model, case):
    """Logits and carry after each segment."""
    tokens, mask = model_inputs(case)
    carry, begin = jd.init_carry(model, *tokens.shape), 0
    for length in case.splits:
        segment = slice(begin, begin + length)
        logits, carry = jd.forward(model, tokens[:, segment], carry, None if mask is None else mask[:, segment])
        yield np.asarray(logits), carry
        begin += length


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_carried_arrays_after_every_segment(fla_models, name):
    case, expected = MODELS[name], np.load(fla_models / f"{name}.npz")
    model, end = jd.load(fla_models / name), 0
    _, mask = model_inputs(case)
    for i, (logits, carry) in enumerate(segments(model, case)):
        begin, end = end, end + logits.shape[1]
        text = np.ones(logits.shape[:2], bool) if mask is None else mask[:, begin:end]
        assert relative_error(logits[text], expected[f"{i} logits"][text]) < LOGITS
        for j, arrays in enumerate(carry_arrays(carry)):
            for a, kind in zip(arrays, ("first", "second"), strict=True):
                b = expected[f"{i} layer {j} {kind}"]
                if model.config.layer_kinds[j] == "attention":
                    a, b = read_places(a, b, None if mask is None else mask[:, :end])
                assert relative_error(a, b) < STATES, (i, j, kind)


def read_places(ours: np.ndarray, theirs: np.ndarray, mask: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Keys or values that both keep, [places, G, d]: fla drops what its window has passed, and keeps padding."""
    kept = theirs.shape[1]
    if mask is None:
        return ours[:, -kept:], theirs
    counts = mask[:, -kept:].sum(1)
    rows = [row[n - count : n] for row, n, count in zip(ours, mask.sum(1), counts, strict=True)]
    return np.concatenate(rows), theirs[mask[:, -kept:]]
