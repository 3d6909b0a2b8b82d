"""The JAX models compute what fla's do, from checkpoints that fla wrote; and fla reads what this library writes of them."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxdelta as jd
from ports.compare import carry_arrays, relative_error
from tests.ports.conftest import FlaProcess
from tests.ports.fla_cases import MODELS, model_inputs, read_arrays

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
    case, expected = MODELS[name], read_arrays(fla_models / f"{name}.npz")
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


STORED = [(name, "float32") for name in MODELS]
STORED += [(f"{name}, bf16", dtype) for name in MODELS for dtype in ("float32", "bfloat16")]


@pytest.mark.parametrize(("name", "dtype"), STORED)
def test_loaded_and_saved_bit_for_bit(fla_models, tmp_path, name, dtype):
    """A model whose weights are stored in bf16 survives in either dtype, its f32 A_log too."""
    old, new = fla_models / name, tmp_path / "saved"
    jd.save(jd.load(old, dtype=dtype), new)
    assert_same_tensors(new, old)
    found, expected = (json.loads((folder / "config.json").read_text()) for folder in (new, old))
    assert found == expected


def assert_same_tensors(found: Path, expected: Path):
    found, expected = load_file(found / "model.safetensors"), load_file(expected / "model.safetensors")
    assert found.keys() == expected.keys()
    for tensor in expected:
        assert found[tensor].dtype == expected[tensor].dtype, tensor
        np.testing.assert_array_equal(found[tensor].view(np.uint8), expected[tensor].view(np.uint8), err_msg=tensor)


@pytest.fixture(scope="module")
def fla_on_saved(fla_models, tmp_path_factory):
    """What fla gives for the checkpoints that this library wrote, in the first segment."""
    folder = tmp_path_factory.mktemp("written") / "saved"
    for name in MODELS:
        jd.save(jd.load(fla_models / name), folder / name)
    return FlaProcess("saved", folder).finished()


@pytest.mark.parametrize("name", MODELS)
def test_fla_gives_the_same_logits_for_a_saved_model(fla_models, fla_on_saved, name):
    found, expected = (read_arrays(folder / f"{name}.npz")["0 logits"] for folder in (fla_on_saved, fla_models))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", ["product", "product hybrid"])
def test_checkpoint_of_the_first_release_of_deltaproduct(fla_models, tmp_path, name):
    """A list of tensors a step for keys, values, write strengths and filters; ``use_gate`` for the output gate."""
    new, old = fla_models / name, tmp_path / "old"
    old.mkdir()
    raw = json.loads((new / "config.json").read_text())
    raw["use_gate"] = raw.pop("use_output_gate")
    (old / "config.json").write_text(json.dumps(raw))
    save_file(in_lists(load_file(new / "model.safetensors"), raw["num_householder"]), old / "model.safetensors")
    case = MODELS[name]
    here, there = (segments(jd.load(folder), case) for folder in (old, new))
    for (a, _), (b, _) in zip(here, there, strict=True):
        np.testing.assert_array_equal(a, b)
    jd.save(jd.load(old), tmp_path / "saved")
    assert_same_tensors(tmp_path / "saved", new)


def in_lists(tensors: dict[str, np.ndarray], steps: int) -> dict[str, np.ndarray]:
    """Tensors as the first release of DeltaProduct named them; of its query filters it used the first alone."""
    listed = {}
    for name, tensor in tensors.items():
        folder, _, leaf = name.removesuffix(".weight").rpartition(".")
        if f"{folder}.b_proj.weight" not in tensors:
            listed[name] = tensor
        elif leaf == "q_conv1d":
            listed |= {f"{folder}.q_conv1ds.{j}.weight": tensor + j for j in range(steps)}
        elif leaf in ("k_proj", "v_proj", "b_proj", "k_conv1d", "v_conv1d"):
            parts = np.split(tensor, steps)
            listed |= {f"{folder}.{leaf}s.{j}.weight": np.ascontiguousarray(part) for j, part in enumerate(parts)}
        else:
            listed[name] = tensor
    return listed
