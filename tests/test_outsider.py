"""A user's own intervention and objective, in a file of their own: compared, and differentiated through."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdelta as jd
from tests import plain
from tests.plain import EPS, SEGMENT

TEXT = plain.tokens(23)


@dataclass(frozen=True)
class Halved:
    """Every state times ``factor`` at every boundary."""

    factor: float

    def start(self, carry):
        return self, None

    def __call__(self, carry, memory):
        return jd.with_states(carry, [self.factor * S for S in jd.states(carry)]), memory, None


class Forgetful:
    """Undeclared: an ordinary class."""

    def __init__(self, layer):
        self.layer = layer

    def start(self, carry, boundaries):
        return self, jnp.zeros(())

    def __call__(self, carry, count):
        S = jd.states(carry)
        S[self.layer] = 0 * S[self.layer]
        return jd.with_states(carry, S), count + 1, count


@pytest.fixture(scope="module", autouse=True)
def f64():
    with jax.enable_x64(True):
        yield


def test_interventions_of_ones_own_are_compared():
    model, documents = plain.model(), {"a": TEXT, "b": TEXT[:14]}
    worlds = {
        "half": Halved(0.5),
        "same": Halved(1.0),
        "forgetful": Forgetful(0),
        "both": jd.Sequential([Halved(0.5), Forgetful(0)]),
    }
    rows = jd.compare(model, documents, worlds, segment=SEGMENT)
    found = {(r["document"], r["intervention"]): r["loss"] for r in rows.to_pylist()}
    assert list(found) == [(d, w) for d in "ab" for w in ("untouched", *worlds)]
    for name, text in documents.items():
        np.testing.assert_allclose(found[name, "same"], found[name, "untouched"], rtol=1e-12)
        for label, change in (
            ("half", lambda _, S: 0.5 * S),
            ("forgetful", lambda _, S: S.at[0].multiply(0)),
            ("both", lambda _, S: 0.5 * S.at[0].multiply(0)),
        ):
            expected = plain.losses(plain.logits(model, text, change, 1), text).mean()
            np.testing.assert_allclose(found[name, label], expected, rtol=1e-9)
            assert abs(expected - found[name, "untouched"]) > 1e-4


@pytest.mark.parametrize(
    "own",
    [Halved(0.5), Forgetful(0), jd.Sequential([Halved(0.5), jd.Truncate(2, method="svd")])],
    ids=["a dataclass", "a class", "in a sequence"],
)
def test_sensitivities_go_through_an_intervention_of_ones_own(own):
    """The derivative for a factor on a head's state after the intervention, against the run with that factor."""
    model = plain.model()
    maps = jd.sensitivity(model, TEXT, SEGMENT, samples=0, intervention=own)
    boundary, head, L = 2 * SEGMENT, 1, len(plain.QWEN.linear_layers)
    where = np.zeros((1, L, plain.QWEN.num_value_heads), bool)
    where[0, 1, head] = True

    def loss(factor):
        scaled = jd.Scale(np.full((1, 1, 1, 1), factor), where=where, at=boundary)
        return jd.run(model, TEXT[None], segment=SEGMENT, intervention=jd.Sequential([own, scaled])).losses.mean()

    expected = (loss(1 + EPS) - loss(1 - EPS)) / (2 * EPS)
    found = maps.head_state.sel(boundary=boundary, layer=plain.QWEN.linear_layers[1], head=head)[0]
    assert abs(expected) > 1e-5
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def surprise(logits, targets):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]


def first_entry(hidden, targets):
    return hidden[..., 0] ** 2


def test_an_objective_of_ones_own_has_the_derivatives_of_the_librarys():
    model = plain.model()
    expected = jd.sensitivity(model, TEXT, SEGMENT, samples=0)
    found = jd.sensitivity(model, TEXT, SEGMENT, loss=jd.OfLogits(surprise, name="surprise", unit="nats"))
    assert (found.attrs["objective"], found.attrs["unit"]) == ("surprise", "nats")
    assert "fisher" not in found
    for name in ("loss", "gate", "beta_sensitivity", "g_sensitivity", "head_output", "head_state"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-7, atol=1e-12)


def test_an_objective_of_hidden_states_is_differentiated_for_states():
    model, boundary = plain.model(), 2 * SEGMENT
    maps = jd.sensitivity(model, TEXT, SEGMENT, loss=jd.OfHidden(first_entry))

    def value(factor):
        cut = jd.Scale(np.full((1, 1, 1, 1), factor), at=boundary)
        kept = jd.run(model, TEXT[None], segment=SEGMENT, intervention=cut, observers=(Hidden(),)).observed
        hidden = np.concatenate([step[0] for step in kept], axis=1)[0, : len(TEXT) - 1]
        return np.mean(hidden[:, 0] ** 2)

    expected = (value(1 + EPS) - value(1 - EPS)) / (2 * EPS)
    np.testing.assert_allclose(maps.head_state.sel(boundary=boundary).sum(), expected, rtol=1e-5)


@dataclass(frozen=True)
class Hidden:
    names = ()

    def __call__(self, seen):
        return seen.hidden


def test_an_objective_that_gives_no_value_a_token_is_refused():
    with pytest.raises(ValueError, match=r"the objective gives \[1, 5, 14\]; expected a value for each token, \[1, 5\]"):
        jd.sensitivity(plain.model(), TEXT, SEGMENT, loss=jd.OfHidden(lambda hidden, targets: hidden))
