"""The JAX model computes what transformers computes: logits, every carried array, every gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxdelta as jd
from jaxdelta.checkpoints import qwen3_5
from ports.compare import carry_arrays, relative_error
from ports.qwen3_5.reference import Reference

LOGITS = 2e-5
STATES = 2e-5
LOSS = 1e-5  # relative, in f32: two tokens of a loss of 4.9 gave 1.1e-6, for logits within 2e-5
GRADIENTS = 1e-4
SPLITS = ([300], [1, 2, 3, 1, 64, 229], [100, 100, 100], [37, 128, 135])


@pytest.fixture(scope="module")
def pair(checkpoint):
    return jd.load(checkpoint), Reference(checkpoint)


def text(batch: int = 2, length: int = 300, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 97, (batch, length))


def run(model, tokens, splits):
    """Logits, and the carried arrays of every layer after every segment."""
    carry, logits, snapshots, begin = jd.init_carry(model, len(tokens), tokens.shape[1]), [], [], 0
    for length in splits:
        out, carry = jd.forward(model, jnp.asarray(tokens[:, begin : begin + length]), carry)
        logits.append(np.asarray(out))
        snapshots.append(carry_arrays(carry))
        begin += length
    return np.concatenate(logits, axis=1), snapshots


@pytest.mark.parametrize("splits", SPLITS, ids=str)
def test_logits_and_carried_arrays_of_any_split(pair, splits):
    model, reference = pair
    expected_logits, expected = reference.run(text(), splits)
    logits, found = run(model, text(), splits)
    assert relative_error(logits, expected_logits) < LOGITS
    for segment, (here, there) in enumerate(zip(found, expected, strict=True)):
        for layer, (arrays, snapshot) in enumerate(zip(here, there, strict=True)):
            for a, b in zip(arrays, snapshot, strict=True):
                assert relative_error(a, b) < STATES, (segment, layer)


def test_padding_on_the_left(pair):
    model, reference = pair
    tokens, mask = text(3, 90), np.arange(90) >= np.array([0, 7, 41])[:, None]
    expected, _ = reference.run(tokens, None, mask)
    logits, _ = jd.forward(model, jnp.asarray(tokens), jd.init_carry(model, 3, 90), jnp.asarray(mask))
    assert relative_error(np.asarray(logits)[mask], expected[mask]) < LOGITS


def test_twenty_greedy_tokens_after_a_prompt(pair):
    """Teacher-forced on the reference's own choices; a choice may differ only where two words are as good as equal."""
    model, reference = pair
    tokens = text(1, 64)
    for _ in range(20):
        tokens = np.concatenate([tokens, reference.run(tokens)[0][:, -1:].argmax(-1)], axis=1)
    expected, _ = reference.run(tokens, [64] + [1] * 20)
    logits, _ = run(model, tokens, [64] + [1] * 20)
    top = expected[:, 63:].max(-1)
    chosen = np.take_along_axis(expected[:, 63:], logits[:, 63:].argmax(-1)[..., None], -1)[..., 0]
    np.testing.assert_allclose(chosen, top, atol=1e-4)


def test_gradient_of_the_loss_for_every_parameter(pair):
    model, reference = pair
    tokens = text(2, 71)
    expected_loss, expected = reference.loss_gradients(tokens)

    def loss(params):
        live = nnx.merge(graphdef, params)
        hidden = live(jnp.asarray(tokens), live.init_carry(*tokens.shape)).hidden
        logp = jax.nn.log_softmax(live.logits(hidden)[:, :-1])
        return -jnp.take_along_axis(logp, jnp.asarray(tokens[:, 1:, None]), -1).mean()

    graphdef, params = nnx.split(model)
    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    leaves = dict(nnx.to_flat_state(grads))
    assert float(value) == pytest.approx(expected_loss, rel=LOSS)
    compared = set()
    for entry in qwen3_5.entries(model.config):
        name = entry.name if entry.name == "lm_head.weight" else "model." + entry.name
        found = np.asarray(leaves[entry.path][...]).reshape(entry.shape)
        assert relative_error(found, expected[name]) < GRADIENTS, name
        compared.add(name)
    assert compared == set(expected)


def test_saved_model_gives_the_references_logits(pair, checkpoint, tmp_path):
    model, reference = pair
    jd.save(model, tmp_path / "saved")
    np.testing.assert_array_equal(Reference(tmp_path / "saved").run(text())[0], reference.run(text())[0])
