"""Measured removals against plain re-runs, and the dearer estimates of them against what they stand for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdelta.analysis.sensitivity.ablation import Direction, direction_effects, direction_terms, head_effects, without
from jaxdelta.analysis.sensitivity.estimators import exact_local, gauss_newton, integrated_gradients
from jaxdelta.analysis.sensitivity.objectives import objective_of
from jaxdelta.nn.mixer import LinearCarry, Span
from jaxdelta.runs.reverse import Tape, branch, pull_back, record
from tests import plain
from tests.plain import SEGMENT

TEXT = plain.tokens(23)  # five segments, the last of three tokens
MASK = np.random.default_rng(5).random(len(TEXT) - 1) < 0.6
EVERY = np.ones(len(TEXT) - 1, bool)
BOUNDARY = 1  # index of the boundary
AT = (BOUNDARY + 1) * SEGMENT  # and the tokens seen there
LAYERS = plain.QWEN.linear_layers
PLACES = [(0, 1, 0), (0, 1, 2), (0, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1)]  # linear layer, head, direction
DIRECTIONS = [Direction(LAYERS[layer], *rest) for layer, *rest in PLACES]
PICKS = [(BOUNDARY, *place) for place in PLACES]


@pytest.fixture(scope="module", autouse=True)
def f64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def tape():
    return tape_of(plain.model())


@pytest.fixture(scope="module")
def pulled(tape):
    return pulled_back(plain.model(), tape, EVERY)


@pytest.fixture(scope="module")
def measured(tape):
    return direction_effects(plain.model(), tape, EVERY, AT, DIRECTIONS)


def tape_of(model) -> Tape:
    return plain.recorded(model, TEXT[None])


def pulled_back(model, tape: Tape, scored: np.ndarray):
    objective, inputs = objective_of("next_token", tape, scored[None], 0, 0)
    return list(pull_back(model, tape, objective, inputs, cotangents=1))


def mean_loss(z: np.ndarray, scored: np.ndarray) -> np.ndarray:
    return (plain.losses(z, TEXT) * scored).sum(axis=-1) / scored.sum()


def plain_effects(scored: np.ndarray, change: plain.Change, worlds: int, model=None) -> np.ndarray:
    """Change of the mean loss of each world of a run by hand, whose first is left as it is."""

    def beside(boundary, S):
        return jnp.concatenate([S[:, :1], jnp.asarray(change(boundary, S[:, 1:]))], axis=1)

    loss = mean_loss(plain.logits(model or plain.model(), TEXT, beside, 1 + worlds), scored)
    return loss[1:] - loss[0]


def slopes(scored: np.ndarray) -> np.ndarray:
    """Central differences of the mean loss with respect to the gates."""
    high, low = plain.nudged(plain.model(), TEXT, PICKS)
    return (mean_loss(high, scored) - mean_loss(low, scored)) / (2 * plain.EPS)


# Measured effects


@pytest.mark.parametrize("scored", [EVERY, MASK], ids=["every token", "scored tokens"])
def test_effects_of_directions_are_those_of_a_plain_run_without_them(tape, scored):
    found = direction_effects(plain.model(), tape, scored, AT, DIRECTIONS)
    expected = plain_effects(scored, plain.removed(PICKS), len(PICKS))
    assert np.abs(expected).max() > 0.01
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9)


def test_effects_of_directions_at_the_last_boundary_are_those_of_a_plain_run(tape):
    found = direction_effects(plain.model(), tape, MASK, 4 * SEGMENT, DIRECTIONS)
    picks = [(3, *place) for place in PLACES]
    np.testing.assert_allclose(found, plain_effects(MASK, plain.removed(picks), len(picks)), rtol=1e-6, atol=1e-9)


HEADS = [(0, 0), (0, 1), (1, 1), (0,), (1,), (1, 0)]  # linear layer, head
UNITS = [(LAYERS[layer], *head) for layer, *head in HEADS]


@pytest.mark.parametrize("scored", [EVERY, MASK], ids=["every token", "scored tokens"])
def test_effects_of_forgetting_a_heads_state_are_those_of_a_plain_run(tape, scored):
    def forget(boundary, S):
        for world, (layer, *head) in enumerate(HEADS):
            S = S.at[layer, world, head[0] if head else slice(None)].set(0)
        return S

    found = head_effects(plain.model(), tape, scored, UNITS, "state")
    expected = plain_effects(scored, forget, len(UNITS))
    assert np.abs(expected).max() > 0.01
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


def test_effects_of_silencing_a_head_are_those_of_a_model_without_its_columns_of_the_output_matrix(tape):
    found = head_effects(plain.model(), tape, MASK, UNITS, "output")
    V, untouched = plain.QWEN.value_dim, mean_loss(plain.logits(plain.model(), TEXT)[:1], MASK)[0]
    for effect, (layer, *head) in zip(found, HEADS, strict=True):
        model = plain.fresh(plain.QWEN)
        out = plain.linear_layers(model)[layer].mixer.out
        columns = slice(head[0] * V, (head[0] + 1) * V) if head else slice(None)
        out[...] = out[...].at[:, columns].set(0)
        expected = mean_loss(plain.logits(model, TEXT)[:1], MASK)[0] - untouched
        assert abs(expected) > 1e-3
        np.testing.assert_allclose(effect, expected, rtol=1e-9)


@pytest.mark.parametrize("worlds", [1, 4])
def test_worlds_at_once_change_no_effect(tape, measured, worlds):
    found = direction_effects(plain.model(), tape, EVERY, AT, DIRECTIONS, worlds=worlds)
    np.testing.assert_allclose(found, measured, rtol=1e-9, atol=1e-13)
    for kind in ("output", "state"):
        found = head_effects(plain.model(), tape, EVERY, UNITS, kind, worlds=worlds)
        expected = head_effects(plain.model(), tape, EVERY, UNITS, kind)
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-13)


def test_terms_of_all_directions_sum_to_the_state(tape):
    S = tape.starts[BOUNDARY + 1].recurrent.S
    for A in (S, jnp.swapaxes(S, -1, -2)):  # K > V and K < V
        terms = direction_terms(plain.QWEN, A, [Direction(LAYERS[1], 0, i) for i in range(3)])
        np.testing.assert_allclose(terms.sum(axis=0), A[1, 0, 0], atol=1e-12)
        expected = np.stack([plain.term(np.asarray(A[1, 0, 0]), i) for i in range(3)])
        np.testing.assert_allclose(terms, expected, atol=1e-9)


def test_a_share_of_a_direction_is_taken_from_its_own_world(tape):
    S = np.asarray(tape.starts[BOUNDARY + 1].recurrent.S)
    found = np.asarray(without(plain.QWEN, jnp.asarray(S), DIRECTIONS, share=np.linspace(0, 1, len(DIRECTIONS))))
    for world, (layer, head, direction) in enumerate(PLACES):
        expected = S[:, 0].copy()
        expected[layer, head] -= world / (len(DIRECTIONS) - 1) * plain.term(expected[layer, head], direction)
        np.testing.assert_allclose(found[:, world], expected, atol=1e-9)


def test_a_layer_without_a_state_and_a_boundary_that_is_none_are_refused(tape):
    with pytest.raises(ValueError, match=r"layer 1 is no linear layer; those of the model are \[0, 2\]"):
        direction_effects(plain.model(), tape, EVERY, AT, [Direction(1, 0, 0)])
    for boundary in (AT + 1, 5 * SEGMENT, -SEGMENT):
        with pytest.raises(ValueError, match=rf"boundary is {boundary}, in tokens seen; .* every 5 tokens to 20"):
            direction_effects(plain.model(), tape, EVERY, boundary, DIRECTIONS)


# Gauss-Newton


@pytest.mark.parametrize("scored", [EVERY, MASK], ids=["every token", "scored tokens"])
def test_gauss_newton_is_minus_the_gate_and_half_the_curvature_of_the_softmax(tape, scored):
    """1/2 dz^T (diag p - p p^T) dz / N, with dz by central differences and the matrix written out."""
    first, second = gauss_newton(plain.model(), tape, scored, AT, DIRECTIONS)
    np.testing.assert_allclose(first, -slopes(scored), rtol=1e-6, atol=1e-9)
    high, low = plain.nudged(plain.model(), TEXT, PICKS)
    dz = ((high - low) / (2 * plain.EPS))[:, :-1]
    p = np.exp(plain.log_softmax(plain.logits(plain.model(), TEXT)[0, :-1]))
    curvature = np.einsum("ty,yw->tyw", p, np.eye(p.shape[-1])) - p[:, :, None] * p[:, None, :]
    expected = np.einsum("xty,tyw,xtw,t->x", dz, curvature, dz, scored) / (2 * scored.sum())
    assert expected.max() > 1e-3
    np.testing.assert_allclose(second, expected, rtol=1e-6, atol=1e-12)


def test_gauss_newton_is_half_the_exact_fisher_information(tape):
    second = gauss_newton(plain.model(), tape, MASK, AT, DIRECTIONS)[1]
    np.testing.assert_allclose(2 * second, plain.fisher(plain.model(), TEXT, PICKS, MASK), rtol=1e-6, atol=1e-12)


def test_first_orders_of_forward_and_reverse_mode_agree(tape, pulled):
    first = gauss_newton(plain.model(), tape, EVERY, AT, DIRECTIONS)[0]
    into = next(p for p in pulled if p.index == BOUNDARY + 1).state[0]
    terms = direction_terms(plain.QWEN, tape.starts[BOUNDARY + 1].recurrent.S, DIRECTIONS)
    gates = [np.sum(into[layer, 0, head] * t) for (layer, head, _), t in zip(PLACES, terms, strict=True)]
    np.testing.assert_allclose(first, -np.array(gates), rtol=1e-10, atol=1e-14)


# Integrated gradients


@pytest.mark.parametrize("scored", [EVERY, MASK], ids=["every token", "scored tokens"])
def test_integrated_gradients_close_on_the_measured_effect_as_steps_rise(tape, scored):
    """The error of midpoints falls with the square of their number; what it extrapolates to is the effect."""
    effect = direction_effects(plain.model(), tape, scored, AT, DIRECTIONS)
    found = [integrated_gradients(plain.model(), tape, scored, AT, DIRECTIONS, steps=n) for n in (4, 8, 32, 64)]
    gaps = [x - effect for x in found]
    sizes = [np.abs(gap).max() for gap in gaps]
    assert sizes == sorted(sizes, reverse=True) and 1e-4 * np.abs(effect).max() < sizes[1] < 0.1 * np.abs(effect).max()
    np.testing.assert_allclose(gaps[3], gaps[2] / 4, rtol=0.05, atol=1e-14)
    np.testing.assert_allclose(found[3] + (found[3] - found[2]) / 3, effect, rtol=1e-6, atol=1e-9)


def test_integrated_gradients_count_the_tokens_before_the_boundary_too(tape):
    """A mask whose tokens lie half before it halves what those after it give."""
    scored = np.zeros(len(TEXT) - 1, bool)
    scored[[12, 17]] = True
    both = scored.copy()
    both[[0, 4]] = True
    one = integrated_gradients(plain.model(), tape, scored, AT, DIRECTIONS, steps=2)
    half = integrated_gradients(plain.model(), tape, both, AT, DIRECTIONS, steps=2)
    np.testing.assert_allclose(half, one / 2, rtol=1e-10)
    before = np.arange(len(TEXT) - 1) < 4
    assert not integrated_gradients(plain.model(), tape, before, AT, DIRECTIONS, steps=2).any()


# Exact local effects


def test_exact_local_effects_are_inner_products_with_the_layers_own_change(tape, pulled):
    """The layer is run without the direction over all the rest of the text at once."""
    model = plain.model()
    found = exact_local(model, tape, pulled, AT, DIRECTIONS)
    begin, end = (BOUNDARY + 1) * SEGMENT, len(TEXT)
    later = sorted((p for p in pulled if p.index > BOUNDARY), key=lambda p: p.index)
    start = tape.starts[BOUNDARY + 1].recurrent
    terms = direction_terms(plain.QWEN, start.S, DIRECTIONS)
    span = Span(jnp.zeros((1, end - begin), jnp.int32))
    run = jax.jit(
        lambda layer, x, S, tail: plain.linear_layers(model)[layer].mixer(x, LinearCarry(S, tail), span)[0],
        static_argnums=0,
    )
    for effect, (layer, head, _), term in zip(found, PLACES, terms, strict=True):
        x, into = (
            np.concatenate([np.asarray(getattr(p, name)[layer]) for p in later], axis=1)[:, : end - begin]
            for name in ("inputs", "residual")
        )
        S, tail = start.S[layer], start.tails[layer]
        change = run(layer, x, S.at[0, head].add(-term), tail) - run(layer, x, S, tail)
        np.testing.assert_allclose(effect, np.sum(change * into), rtol=1e-8, atol=1e-13)


def test_exact_local_effects_are_measured_ones_where_the_rest_of_the_model_is_all_but_linear():
    """A layer that adds a ten-thousandth of what it did: its norm is as curved as before, all else a straight line."""
    for layer, of_model in enumerate(LAYERS):
        model = plain.fresh(plain.QWEN)
        out = plain.linear_layers(model)[layer].mixer.out
        out[...] = 1e-4 * out[...]
        tape, chosen = tape_of(model), [d for d in DIRECTIONS if d.layer == of_model]
        chosen = [chosen[i % 3] for i in range(len(DIRECTIONS))]  # of one number, so that one program serves all
        effect = direction_effects(model, tape, MASK, AT, chosen)
        found = exact_local(model, tape, pulled_back(model, tape, MASK), AT, chosen)
        first = gauss_newton(model, tape, MASK, AT, chosen)[0]
        size = np.abs(effect).max()
        assert size > 1e-8
        np.testing.assert_allclose(found, effect, rtol=1e-2, atol=1e-3 * size)
        assert np.abs(first - effect).max() > 0.1 * size


def test_exact_local_effects_of_a_small_direction_are_of_first_order():
    """A text from the boundary on, whose direction is scaled down: the error falls with its share."""
    model, whole = plain.model(), tape_of(plain.model())
    S, errors = whole.starts[BOUNDARY + 1].recurrent.S, {}
    direction = Direction(LAYERS[1], 1, 0)
    term = direction_terms(plain.QWEN, S, [direction])[0]
    for share in (1e-3, 1e-4):
        changed = S.at[1, 0, 1].add((share - 1) * term)
        rest = record(model, *branch(whole, BOUNDARY + 1, changed))
        scored = EVERY[(BOUNDARY + 1) * SEGMENT :]
        last = [Direction(LAYERS[1], 1, 2)]  # the least of its state now
        np.testing.assert_allclose(
            direction_terms(plain.QWEN, changed, last)[0], share * term, rtol=1e-6, atol=1e-9 * share
        )
        local = exact_local(model, rest, pulled_back(model, rest, scored), 0, last)
        first = gauss_newton(model, rest, scored, 0, last)[0]
        errors[share] = abs(local / first - 1)[0]
    assert errors[1e-3] < 0.05
    assert errors[1e-4] < errors[1e-3] / 5
