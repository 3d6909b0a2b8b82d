"""The model in bf16, on checkpoints stored as on the hub, against transformers in f32 and in bf16.

transformers' ``.to(bfloat16)`` also rounds A_log and the weight of the gated norm, which are stored in f32, and its forward
pass rounds beta and the output of the rule; this library keeps gates, norm weights and that output in f32. Both keep S in
f32. One rounding of a tensor is a relative error of 1.7e-3. In these random models the error of either implementation grows
from 0.006 in S of the first layer to 0.05 in the fourth.
"""

from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxdelta as jd
from ports.compare import carry_arrays, relative_error
from ports.qwen3_5.reference import Reference
from tests.ports.conftest import CHECKPOINTS, write_random_checkpoint

SPLITS = (100, 1, 99)

# Bounds on relative errors, about twice the largest that was seen.
LOGITS = 0.1  # against f32 0.047, against bf16 0.045: two sets of roundings, each as far from f32
CARRIED = 0.1  # against f32 0.050, against bf16 0.045
FIRST_LAYER = 0.012  # against f32: S 0.0058, keys 0.0030; tail and values 0.0025
FIRST_PROJECTION = 1e-3  # against bf16: 3e-8, a single entry; one rounding more or less would be above 1.7e-3
OVER_THEIRS = 1.5  # our error over transformers', against f32: 1.07 for logits, 1.09 for carried arrays


class Runs(NamedTuple):
    """Of each of three runs the logits and, after each segment, the two arrays that each layer carries."""

    ours: tuple
    theirs: tuple
    exact: tuple


def stored_as_on_the_hub(source: Path, folder: Path) -> Path:
    """The checkpoint with every tensor in BF16 but A_log and the weights of the gated norms."""
    tensors = {
        name: a if name.endswith(("A_log", "linear_attn.norm.weight")) else a.astype(ml_dtypes.bfloat16)
        for name, a in load_file(source / "model.safetensors").items()
    }
    (folder / "config.json").write_text((source / "config.json").read_text())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def run(model, tokens):
    carry, logits, snapshots = jd.init_carry(model, *tokens.shape), [], []
    for segment in np.split(tokens, np.cumsum(SPLITS)[:-1], axis=1):
        out, carry = jd.forward(model, segment, carry)
        logits.append(np.asarray(out))
        snapshots.append(carry_arrays(carry))
    return np.concatenate(logits, axis=1), snapshots


@pytest.fixture(
    scope="module",
    params=["tied, 2 value heads a key head", "3 value heads a key head, K > V", "attention alone"],
)
def runs(request, tmp_path_factory) -> Runs:
    source = write_random_checkpoint(tmp_path_factory.mktemp("source"), **CHECKPOINTS[request.param])
    folder = stored_as_on_the_hub(source, tmp_path_factory.mktemp("stored"))
    tokens = np.random.default_rng(0).integers(0, 97, (2, sum(SPLITS)))
    return Runs(
        run(jd.load(folder, dtype="bfloat16"), tokens),
        Reference(folder, "bfloat16").run(tokens, SPLITS),
        Reference(folder).run(tokens, SPLITS),
    )


def errors(found: tuple, expected: tuple) -> np.ndarray:
    """Relative error of every carried array, by segment, layer and which of the two."""
    return np.array(
        [
            [[relative_error(a, b) for a, b in zip(*layers, strict=True)] for layers in zip(*segments, strict=True)]
            for segments in zip(found[1], expected[1], strict=True)
        ]
    )


def root_mean_square(a: np.ndarray) -> float:
    return float(np.sqrt(np.mean(a**2)))


@pytest.mark.parametrize("reference", ["exact", "theirs"])
def test_logits_and_carried_arrays(runs, reference):
    expected = getattr(runs, reference)
    assert relative_error(runs.ours[0], expected[0]) < LOGITS
    assert errors(runs.ours, expected).max() < CARRIED


def test_first_layer_has_the_error_of_a_few_roundings(runs):
    assert errors(runs.ours, runs.exact)[:, 0].max() < FIRST_LAYER


def test_first_projection_rounds_as_transformers_does(runs):
    """The conv tail, or the values, of the first layer: embedding, norm and one product, each rounded once."""
    assert errors(runs.ours, runs.theirs)[:, 0, 1].max() < FIRST_PROJECTION


def test_error_is_not_larger_than_that_of_transformers_in_bf16(runs):
    """Over all layers and segments: which of the two is nearer in one array is chance."""
    ours, theirs = (relative_error(run[0], runs.exact[0]) for run in (runs.ours, runs.theirs))
    assert ours < OVER_THEIRS * theirs
    ours, theirs = (root_mean_square(errors(run, runs.exact)) for run in (runs.ours, runs.theirs))
    assert ours < OVER_THEIRS * theirs


def test_states_stay_f32(runs):
    """In dtype, and in value: had they been rounded on the way, all entries would be numbers of bf16."""
    layers = [layer for segment in runs.ours[1] for layer in segment]
    states = [first for first, second in layers if second.ndim == 3]
    for S in states:
        assert S.dtype == np.float32
        assert np.mean(S.astype(ml_dtypes.bfloat16) == S) < 0.1
    assert states or all(second.ndim == 4 for _, second in layers)
