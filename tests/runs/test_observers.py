"""What is kept of a segment and what is changed in it: against one pass by hand, other weights, and derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdelta as jd
from jaxdelta.runs import segments
from jaxdelta.runs.observers import check_names
from tests import plain
from tests.plain import SEGMENT

TEXT = plain.tokens(23)
CONFIGS = pytest.mark.parametrize("config", [plain.QWEN, plain.PRODUCT], ids=["deltanet", "deltaproduct"])


@pytest.fixture(scope="module", autouse=True)
def f64():
    with jax.enable_x64(True):
        yield


def losses(model, *edits):
    return jd.run(model, TEXT[None], segment=SEGMENT, edits=edits).losses[0]


@CONFIGS
def test_named_arrays_of_segments_are_those_of_one_pass(config):
    model, found = plain.model(config), {}

    def tap(name, layer, x):
        found[name, layer] = np.asarray(x)
        return x

    with jax.disable_jit():
        model(jnp.asarray(TEXT[None]), model.init_carry(1, len(TEXT)), None, tap)
    for layer in range(config.num_layers):
        names = tuple(name for name in model.names(layer) if name != "S")
        observers = (jd.Named(names, (layer,)), jd.Named(("S",), config.linear_layers))
        kept = jd.run(model, TEXT[None], segment=SEGMENT, observers=observers).observed
        for name in names:
            whole = np.concatenate([step[0][name][0] for step in kept], axis=1)
            expected = found[name, layer]
            np.testing.assert_allclose(whole[:, : expected.shape[1]], expected, rtol=1e-8, atol=1e-10)
        for i, linear in enumerate(config.linear_layers):
            np.testing.assert_allclose(kept[-1][1]["S"][i], found["S", linear], rtol=1e-8, atol=1e-10)


def test_what_is_kept_changes_no_loss():
    model = plain.model()
    kept = jd.run(model, TEXT[None], segment=SEGMENT, observers=(jd.Named(("beta", "residual_after")),))
    np.testing.assert_array_equal(kept.losses[0], losses(model))
    assert kept.observed[0][0]["residual_after"].shape == (3, 1, SEGMENT, 14)


@pytest.mark.parametrize("layer", [0, 1], ids=["linear", "attention"])
def test_a_layer_without_output_is_one_whose_output_matrix_is_zero(layer):
    silent = plain.fresh(plain.QWEN)
    silent.layers[layer].mixer.out[...] = 0 * silent.layers[layer].mixer.out[...]
    expected = losses(silent)
    model = plain.fresh(plain.QWEN)
    for name in ("mixer_output", "head_output"):
        edit = jd.Edit(name, jd.multiplied, layer, np.zeros(()))
        np.testing.assert_allclose(losses(model, edit), expected, rtol=1e-10)
    assert np.abs(expected - losses(model)).max() > 1e-2


def test_a_patched_residual_stream_carries_the_other_text():
    """The stream after the last layer taken from another run: the losses are those of that run's predictions."""
    model, other = plain.model(), plain.tokens(SEGMENT, seed=3)
    kept = jd.run(model, other[None], segment=SEGMENT, observers=(jd.Named(("residual_after",), (2,)),)).observed
    edit = jd.Edit("residual_after", jd.substituted, 2, kept[0][0]["residual_after"][0])
    text = TEXT[None, :SEGMENT]
    found = jd.run(model, text, segment=SEGMENT, edits=(edit,)).losses[0]
    logits, _ = jd.forward(model, other[None], jd.init_carry(model, 1, SEGMENT))
    log_p = jax.nn.log_softmax(logits[0])
    np.testing.assert_allclose(found, -log_p[np.arange(SEGMENT - 1), text[0, 1:]], rtol=1e-8)


@CONFIGS
@pytest.mark.parametrize("name", ["beta", "g"])
def test_derivatives_of_write_strengths_and_decays_can_be_checked_by_a_public_edit(config, name):
    model, layer, token, eps = plain.model(config), config.linear_layers[-1], 7, 1e-5
    maps = jd.sensitivity(model, TEXT, SEGMENT, samples=0)
    H = config.num_value_heads
    for head in range(H):
        amount = eps * np.eye(H)[head]
        high, low = (losses(model, jd.Edit(name, jd.added_at, layer, (token, sign * amount))).mean() for sign in (1, -1))
        found = maps[f"{name}_sensitivity"].sel(token=token, layer=layer, head=head).values.sum()
        np.testing.assert_allclose(found, (high - low) / (2 * eps), rtol=1e-5, atol=1e-9)


def test_derivatives_are_those_of_the_edited_run():
    model, edit = plain.model(), jd.Edit("head_output", jd.multiplied, 0, np.full((), 0.5))
    maps = jd.sensitivity(model, TEXT, SEGMENT, samples=0, edits=(edit,))
    np.testing.assert_allclose(maps.loss[0], losses(model, edit).mean(), rtol=1e-10)
    high, low = (losses(model, jd.Edit("head_output", jd.multiplied, 0, 0.5 * (1 + d))).mean() for d in (1e-5, -1e-5))
    np.testing.assert_allclose(maps.head_output.sel(layer=0).sum(), (high - low) / 2e-5, rtol=1e-6)


def test_edits_that_differ_in_their_values_share_a_program():
    model = plain.model()
    losses(model, jd.Edit("beta", jd.added, 0, np.zeros(())))
    before = segments._segment._cache_size()
    for value in (0.1, 0.2):
        losses(model, jd.Edit("beta", jd.added, 0, np.full((), value)))
    assert segments._segment._cache_size() == before


WRONG = {
    "a name that no layer has": (jd.Edit("betas", jd.added), ValueError, "'betas', which no layer has; known are"),
    "a name that the layer does not have": (jd.Edit("beta", jd.added, 1), ValueError, "layer 1, attention, not"),
    "a layer that is not there": (jd.Edit("beta", jd.added, 3), ValueError, "the model has layers 0 to 2"),
    "something else": (print, TypeError, "is no Edit"),
    "another shape": (jd.Edit("beta", lambda x, *_: x[..., :1], 0), ValueError, r"gives float64\[1, 5, 1\]; expected"),
}


@pytest.mark.usefixtures("as_for_users")
@pytest.mark.parametrize("what", WRONG)
def test_an_edit_that_does_not_fit_is_refused(what):
    edit, error, message = WRONG[what]
    with pytest.raises(error, match=message):
        losses(plain.model(), edit)


@pytest.mark.usefixtures("as_for_users")
@pytest.mark.parametrize(
    ("observer", "error", "message"),
    [(jd.Named(("keys",)), ValueError, "'keys', which no layer has"), (jd.Named, TypeError, "no observer")],
    ids=["a name that no layer has", "a class"],
)
def test_an_observer_that_does_not_fit_is_refused(observer, error, message):
    with pytest.raises(error, match=message):
        check_names(plain.model(), (), (observer,))
