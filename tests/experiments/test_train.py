"""Training of the control model: it learns, and goes on after an interruption as if there had been none."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from experiments.control_models.train import Recipe, restored, train
from jaxdelta.models.config import Qwen3_5Config

CONFIG = Qwen3_5Config.tiny(layer_kinds=("linear", "attention"), vocab_size=17)
RECIPE = Recipe(steps=12, batch_tokens=64, window=16, long_share=0, learning_rate=2e-2, warmup=2)
STREAM = np.resize(np.arange(17, dtype=np.uint16), 2000)  # each word follows from the one before


def leaves(model):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model))]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    out = tmp_path_factory.mktemp("training")
    return out, *train(RECIPE, CONFIG, STREAM, STREAM, out, every=4)


def test_loss_falls(uninterrupted):
    _, _, curve = uninterrupted
    assert [point["step"] for point in curve] == [4, 8, 12]
    assert curve[-1]["held_out"] < curve[0]["held_out"] - 0.3


def test_windows_grow_at_the_end():
    recipe = Recipe(steps=12, window=16, long_window=32, long_share=0.25)
    assert [recipe.window_at(step) for step in (0, 8, 9, 11)] == [16, 16, 32, 32]


def test_interrupted_training_ends_where_an_uninterrupted_one_does(uninterrupted, tmp_path):
    _, model, curve = uninterrupted

    class Interrupted(Recipe):
        def window_at(self, step):
            if step == 6:  # after the checkpoint at 4
                raise KeyboardInterrupt
            return super().window_at(step)

    with pytest.raises(KeyboardInterrupt):
        train(Interrupted(**dataclasses.asdict(RECIPE)), CONFIG, STREAM, STREAM, tmp_path, every=4)
    resumed, resumed_curve = train(RECIPE, CONFIG, STREAM, STREAM, tmp_path, every=4)
    assert resumed_curve == curve
    for a, b in zip(leaves(resumed), leaves(model), strict=True):
        np.testing.assert_array_equal(a, b)


def test_restored_gives_what_training_gave(uninterrupted):
    out, model, curve = uninterrupted
    params, restored_curve = restored(out, RECIPE, CONFIG)
    assert restored_curve == curve
    for a, b in zip(jax.tree.leaves(params), leaves(model), strict=True):
        np.testing.assert_array_equal(a, b)
