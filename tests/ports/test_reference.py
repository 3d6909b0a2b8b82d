"""What every reference follows, the choice of one for a checkpoint, and a family added by one module and one entry."""

import importlib
import inspect
import shutil
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ports import reference
from ports.packages import TESTED, UnusableReference
from ports.qwen3_5.reference import Reference
from ports.reference import MODULES, Snapshot, check_segments, load_reference
from tests.ports.conftest import write_random_checkpoint

TOKENS = np.arange(9)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A Qwen3.5 checkpoint of a linear layer and an attention layer."""
    kinds = ["linear_attention", "full_attention"]
    return write_random_checkpoint(tmp_path_factory.mktemp("model"), num_hidden_layers=2, layer_types=kinds)


@pytest.fixture
def unknown(tmp_path) -> Path:
    """A checkpoint of a family that has no reference."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


class Sums(reference.Reference):
    """A linear layer whose state is the sum of all tokens, in a language of three words."""

    implementation = "a sum"
    layer_kinds = ("linear",)

    def __init__(self, folder, dtype="float32", *, any_version=False):
        self.packages, self.asked = {}, (folder, dtype, any_version)

    def segments(self, tokens, splits=None, mask=None):
        assert mask is None
        S, begin = np.zeros((len(tokens), 1, 1, 1), np.float32), 0
        for length in splits or [tokens.shape[1]]:
            sums = S + tokens[:, begin : begin + length, None, None].cumsum(1)
            S, begin = sums[:, -1:], begin + length
            yield sums[..., 0] + np.arange(3), [Snapshot(S, np.zeros((len(tokens), 0, 1), np.float32))]


@pytest.mark.parametrize("module", sorted(set(MODULES.values())))
def test_references_follow_one_protocol(module):
    found = importlib.import_module(module).Reference
    assert reference.Reference in found.__mro__
    for name in ("__init__", "segments"):
        assert inspect.signature(getattr(found, name)) == inspect.signature(getattr(reference.Reference, name)), name


def test_a_family_is_added_by_a_module_and_an_entry(unknown, monkeypatch):
    with pytest.raises(UnusableReference, match=r"no reference for model_type 'llama'; there is for qwen3_5, .*delta_net"):
        load_reference(unknown)
    module = ModuleType("ports.sums")
    module.Reference = Sums
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(MODULES, "llama", module.__name__)
    found = load_reference(unknown, "bfloat16", any_version=True)
    assert found.asked == (unknown, "bfloat16", True)
    assert check_segments(found, TOKENS) == 0
    logits, snapshots = found.run(TOKENS, (4, 5))
    np.testing.assert_array_equal(logits[0, :, 0], np.cumsum(TOKENS[0]))
    assert [layers[0].first.item() for layers in snapshots] == [6, 36]


def test_what_qwen3_5_gives(folder):
    """A snapshot holds all keys so far; a run is its segments one after the other."""
    found = load_reference(folder)
    assert type(found) is Reference and found.layer_kinds == ("linear", "attention")
    assert found.packages.keys() <= TESTED.keys()
    logits, snapshots = found.run(TOKENS, (4, 5))
    assert logits.shape == (1, 9, 97) and logits.dtype == np.float32
    for (linear, attention), end in zip(snapshots, (4, 9), strict=True):
        assert linear.first.shape == (1, 4, 8, 11) and linear.second.shape == (1, 3, 2 * 2 * 8 + 4 * 11)
        assert attention.first.shape == attention.second.shape == (1, end, 2, 24)
    steps = list(found.segments(TOKENS, (4, 5)))
    np.testing.assert_array_equal(np.concatenate([words for words, _ in steps], axis=1), logits)


def test_a_reference_with_tensors_left_random_is_refused(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "lacking")
    weights = load_file(tmp_path / "lacking" / "model.safetensors")
    del weights["model.layers.0.linear_attn.dt_bias"]
    save_file(weights, tmp_path / "lacking" / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnusableReference, match=r"missing_keys.*layers\.0\.linear_attn\.dt_bias"):
        Reference(tmp_path / "lacking")
