"""Reverse mode over segments: derivatives against one program over the whole document, central differences, and splits."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxdelta as jd
from jaxdelta.analysis.sensitivity.ablation import _losses
from jaxdelta.analysis.sensitivity.objectives import objective_of
from jaxdelta.models.carry import with_states
from jaxdelta.runs import reverse
from jaxdelta.runs.interventions import Intervention
from jaxdelta.runs.reverse import branch, pull_back, record
from tests import plain
from tests.plain import EPS, SEGMENT, recorded

LENGTHS = np.array([23, 12])  # five segments and three, whose last hold three tokens and two
COUNT, R = 5, 3
TOKENS = np.stack([plain.tokens(COUNT * SEGMENT, seed) for seed in (0, 1)])
PARTS = ("state", "beta", "g", "output")
TOLERANCE = dict(rtol=1e-8, atol=1e-10)


@pytest.fixture(scope="module", autouse=True)
def f64():
    with jax.enable_x64(True):
        yield


@dataclass(frozen=True)
class Readouts:
    """R sums of the hidden states' entries, weighted by ``inputs`` [R, B, T, D]."""

    def __call__(self, model, hidden, inputs):
        return jnp.sum(hidden * inputs[0], axis=-1), inputs


class Probe(NamedTuple):
    """Added to beta and g; a factor on heads' outputs; added to what a layer gives."""

    beta: jax.Array
    g: jax.Array
    output: jax.Array
    residual: jax.Array


class Pushes(NamedTuple):
    """What every segment is pushed by: its state, and the probes; leaves [segments, L, B, ...]."""

    state: jax.Array
    probe: Probe


def coefficients(words: int) -> np.ndarray:
    """Of the logits, [R, B, tokens, words]; nothing of padding."""
    text = np.arange(TOKENS.shape[1]) < LENGTHS[:, None]
    return np.random.default_rng(7).standard_normal((R, *TOKENS.shape, words)) * text[..., None]


def weights(model) -> np.ndarray:
    """Of the hidden states, [R, B, tokens, D]."""
    return coefficients(model.config.vocab_size) @ np.asarray(model.head_weight)


def of_segment(w: np.ndarray, index: int) -> np.ndarray:
    return w[:, :, index * SEGMENT : (index + 1) * SEGMENT]


def pulled_back(model, tape, w: np.ndarray) -> dict[str, np.ndarray]:
    """Everything that a pull-back gives, by name; the first axis are segments in the order of the text."""
    found = list(pull_back(model, tape, Readouts(), partial(of_segment, w), cotangents=len(w)))[::-1]
    assert [p.index for p in found] == list(range(len(tape.starts)))
    return {name: np.stack([np.asarray(getattr(p, name)) for p in found]) for name in reverse.Pulled._fields[1:]}


def alone(model, row: int, cotangent: int, **options) -> dict[str, np.ndarray]:
    """One row's text and one of its cotangents."""
    length = LENGTHS[row : row + 1]
    options = {"max_length": COUNT * SEGMENT} | options
    tape = recorded(model, TOKENS[row : row + 1, : length[0]], lengths=length, **options)
    return pulled_back(model, tape, weights(model)[cotangent : cotangent + 1, row : row + 1])


def zeros(model) -> Pushes:
    c, shape = model.config, (COUNT, len(model.config.linear_layers), len(LENGTHS))
    H = c.num_value_heads
    probe = Probe(
        np.zeros((*shape, SEGMENT * c.num_householder, H)),
        np.zeros((*shape, SEGMENT, H)),
        np.ones((*shape, H)),
        np.zeros((*shape, SEGMENT, c.width)),
    )
    return Pushes(np.zeros((*shape, H, c.key_dim, c.value_dim)), probe)


@partial(jax.jit, static_argnums=0)
@partial(jax.value_and_grad, argnums=2)
def whole(graphdef, params, pushes: Pushes, w):
    """The weighted sum over all texts as one function: a scan over segments, whose derivative is JAX's own."""
    model = nnx.merge(graphdef, params)

    def step(carry, part):
        tokens, length, push, w = part
        carry = with_states(carry, [S + d for S, d in zip(jd.states(carry), push.state, strict=True)])

        def tap(name, layer, x):
            if layer not in model.config.linear_layers:
                return x
            probe = jax.tree.map(lambda x: x[model.config.linear_layers.index(layer)], push.probe)
            if name == "head_output":
                return x * probe.output[:, None, :, None]
            added = {"beta": probe.beta, "g": probe.g, "mixer_output": probe.residual}
            return x + added[name] if name in added else x

        out = model(tokens, carry, length, tap)
        return out.carry, jnp.sum(out.hidden * w)

    def by_segment(x):
        return jnp.moveaxis(x.reshape(len(x), COUNT, SEGMENT, *x.shape[2:]), 1, 0)

    lengths = np.clip(LENGTHS - SEGMENT * np.arange(COUNT)[:, None], 0, SEGMENT)
    parts = by_segment(jnp.asarray(TOKENS)), lengths, pushes, by_segment(w)
    return jnp.sum(jax.lax.scan(step, model.init_carry(len(LENGTHS), TOKENS.shape[1]), parts)[1])


@pytest.fixture(scope="module", params=[plain.QWEN, plain.PRODUCT], ids=["deltanet", "deltaproduct"])
def model(request):
    return plain.model(request.param)


@pytest.fixture(scope="module")
def tape(model):
    return recorded(model, TOKENS, lengths=LENGTHS)


@pytest.fixture(scope="module")
def found(model, tape):
    return pulled_back(model, tape, weights(model))


@pytest.fixture(scope="module")
def reference(model):
    """JAX's derivatives by name, as ``found``, and the value; of each cotangent by itself."""
    values, grads = zip(*(whole(*nnx.split(model), zeros(model), w) for w in weights(model)), strict=True)
    by_name = {"state": [g.state for g in grads], **{n: [getattr(g.probe, n) for g in grads] for n in PARTS[1:]}}
    return {n: np.stack(x, axis=1) for n, x in by_name.items()} | {
        "residual": np.asarray(grads[0].probe.residual),
        "value": np.array(values),
    }


@pytest.mark.parametrize("part", [*PARTS, "residual"])
def test_derivatives_are_those_of_one_program_over_the_whole_text(found, reference, part):
    assert found[part].shape == reference[part].shape
    assert np.abs(reference[part]).max() > 0.1
    np.testing.assert_allclose(found[part], reference[part], **TOLERANCE)


def test_values_are_the_objectives_own(found, reference):
    np.testing.assert_allclose(found["values"].sum(), reference["value"][0], rtol=1e-12)


def test_derivatives_of_a_state_are_central_differences_of_logits(model, found):
    entries = [(0, 0, 0, 0, 0), (1, 0, 1, 1, 2), (2, -1, 0, 2, 0), (3, -1, 1, 0, 1), (3, 0, 1, 2, 2)]
    worlds = 2 * len(entries)

    def change(boundary, S):
        for i, (at, layer, head, k, v) in enumerate(entries):
            if at == boundary:
                S = S.at[layer, 2 * i, head, k, v].add(EPS).at[layer, 2 * i + 1, head, k, v].add(-EPS)
        return S

    z = plain.logits(model, TOKENS[0, : LENGTHS[0]], change, worlds)
    sums = np.einsum("rty,xty->rx", coefficients(model.config.vocab_size)[:, 0, : LENGTHS[0]], z)
    expected = (sums[:, ::2] - sums[:, 1::2]) / (2 * EPS)
    for i, (at, layer, head, k, v) in enumerate(entries):
        np.testing.assert_allclose(found["state"][at + 1, :, layer, 0, head, k, v], expected[:, i], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("part", "entry"),
    [
        ("beta", (0, 0, 0, 3, 1)),
        ("beta", (4, -1, 0, 0, 0)),
        ("beta", (2, 0, 1, 1, 1)),
        ("g", (1, -1, 0, 4, 1)),
        ("g", (3, 0, 0, 2, 0)),
        ("output", (2, 0, 1, 1)),
        ("output", (4, -1, 0, 0)),
    ],
    ids=str,
)
def test_derivatives_of_probes_are_central_differences(model, found, part, entry):
    segment, *rest = entry
    parts = nnx.split(model)

    def value(push: float) -> float:
        pushes = zeros(model)
        getattr(pushes.probe, part)[entry] += push
        return float(whole(*parts, pushes, weights(model)[1])[0])

    expected = (value(EPS) - value(-EPS)) / (2 * EPS)
    np.testing.assert_allclose(found[part][(segment, 1, *rest)], expected, rtol=1e-6, atol=1e-8)


def test_padding_has_no_derivative(model, found):
    """The second row ends after two tokens of the third segment."""
    n = model.config.num_householder
    for part, of_token in (("beta", n), ("g", 1)):
        ended = found[part][:, :, :, 1]
        assert ended[2, :, :, : 2 * of_token].any() and found[part][3:, :, :, 0].any()
        assert not ended[2, :, :, 2 * of_token :].any() and not ended[3:].any()
    for part in ("state", "output"):
        assert found[part][2, :, :, 1].any() and not found[part][3:, :, :, 1].any()
    assert found["residual"][2, :, 1, :2].any() and not found["residual"][2, :, 1, 2:].any()


# One model from here on, to compile less.


@pytest.fixture(scope="module")
def net():
    return plain.model()


@pytest.fixture(scope="module")
def both(net):
    """Both rows and all cotangents at once."""
    return pulled_back(net, recorded(net, TOKENS, lengths=LENGTHS), weights(net))


@pytest.mark.parametrize(("row", "cotangent"), [(0, 0), (0, 2), (1, 0), (1, 1)])
def test_a_text_and_a_cotangent_are_those_of_a_batch_with_others(net, both, row, cotangent):
    one = alone(net, row, cotangent)
    for part in PARTS:
        expected = both[part][: len(one[part]), cotangent : cotangent + 1, :, row : row + 1]
        np.testing.assert_allclose(one[part], expected, **TOLERANCE)


def test_states_kept_on_the_host_give_the_same(net):
    length = LENGTHS[:1]
    tape = recorded(net, TOKENS[:1, : length[0]], lengths=length, on_host=True)
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(tape.starts))
    here, there = alone(net, 0, 1), alone(net, 0, 1, on_host=True)
    assert all(np.array_equal(here[part], there[part]) for part in here)


def test_a_longer_cache_gives_the_same(net):
    short, long = alone(net, 0, 1), alone(net, 0, 1, max_length=4 * SEGMENT * COUNT)
    for part in PARTS:
        np.testing.assert_allclose(long[part], short[part], **TOLERANCE)


def test_texts_of_one_cache_share_a_program_however_many_their_segments(net):
    alone(net, 0, 0)
    programs = reverse._pull_segment._cache_size()
    alone(net, 1, 0)
    assert reverse._pull_segment._cache_size() == programs


def test_memory_of_a_segment_grows_with_the_cache_alone():
    """Temporary memory at a cache of 25 places and of 400: at most six copies of it, keys and values, in f64."""
    net, (few, many) = plain.model(plain.PRODUCT), (COUNT * SEGMENT, 400)

    def temporary(places: int) -> int:
        tape = recorded(net, TOKENS[:1, :SEGMENT], max_length=places)
        (at, *_), w = tape.starts[0], of_segment(weights(net)[:1, :1], 0)
        program, values = reverse._program(net, tape)
        (state, into), part = reverse._no_cotangents(tape, 1), tape.text.part(0)
        lowered = reverse._pull_segment.lower(
            program, Readouts(), nnx.state(net), at, tape.caches, part, (), values, w, state, into
        )
        return lowered.compile().memory_analysis().temp_size_in_bytes

    (sizes,) = net.config.attention_sizes
    place = 2 * sizes.num_kv_heads * sizes.head_dim * 8 + SEGMENT * sizes.num_query_heads * 8  # and its scores
    assert temporary(many) - temporary(few) <= 6 * (many - few) * place


# Worlds that branch off


@pytest.mark.parametrize("index", [0, 1, 4])
def test_branched_worlds_run_on_as_the_untouched_text(net, index):
    length = LENGTHS[:1]
    tape = recorded(net, TOKENS[:1, : length[0]], lengths=length)
    S = jnp.repeat(tape.starts[index].recurrent.S, 2, axis=1)
    losses = jd.run(net, TOKENS[:1, : length[0]], segment=SEGMENT).losses[0, index * SEGMENT :]
    np.testing.assert_allclose(_losses(net, *branch(tape, index, S)), np.stack([losses] * 2), rtol=1e-10)
    rest = record(net, *branch(tape, index, S))
    assert len(rest.starts) == COUNT - index
    for start, expected in zip(rest.starts, tape.starts[index:], strict=True):
        for x, y in zip(jax.tree.leaves(start.recurrent), jax.tree.leaves(expected.recurrent), strict=True):
            axis = 1 if x.ndim == 5 else 0
            np.testing.assert_allclose(x, np.repeat(y, 2, axis=axis), rtol=1e-10, atol=1e-12)
    for x, y in zip(jax.tree.leaves(rest.caches), jax.tree.leaves(tape.caches), strict=True):
        np.testing.assert_allclose(x, np.repeat(y, 2, axis=0), rtol=1e-10, atol=1e-12)


def test_a_changed_world_has_the_losses_of_its_states(net):
    text, index = TOKENS[0, : LENGTHS[0]], 2
    tape = recorded(net, text[None], lengths=LENGTHS[:1])
    S = tape.starts[index].recurrent.S
    found = _losses(net, *branch(tape, index, jnp.concatenate([S, 0.3 * S], axis=1)))

    def change(boundary, S):
        return S.at[:, 1].multiply(0.3) if boundary == index - 1 else S

    expected = plain.losses(plain.logits(net, text, change, 2), text)[:, index * SEGMENT :]
    assert np.abs(expected[1] - expected[0]).max() > 0.01
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_worlds_branch_off_from_one_untouched_text_alone(net):
    for tape in (
        recorded(net, TOKENS, lengths=LENGTHS),
        recorded(net, TOKENS[:1], lengths=LENGTHS[:1], intervention=cut()),
        recorded(net, TOKENS[:1], lengths=LENGTHS[:1])._replace(edits=(jd.Edit("beta", jd.multiplied, values=0.5),)),
    ):
        with pytest.raises(ValueError, match="one text without an intervention"):
            branch(tape, 1, tape.starts[1].recurrent.S)


# An intervention in the loop


def cut() -> Intervention:
    return jd.Truncate(2, method="svd")


@dataclass(frozen=True)
class Pushed:
    """A truncation at every boundary; the states of one are pushed ahead of the cut or after it."""

    inner: Intervention
    push: np.ndarray = None
    boundary: int = 0
    ahead: bool = True

    def __hash__(self):
        return hash((self.inner, self.ahead))

    def __eq__(self, other):
        return (self.inner, self.ahead) == (other.inner, other.ahead)

    def start(self, carry, boundaries):
        inner, memory = self.inner.start(carry, boundaries)
        push = jnp.asarray(self.push)
        return Pushed(inner, ahead=self.ahead), (memory, push, jnp.asarray(self.boundary), jnp.asarray(0))

    def __call__(self, carry, memory):
        inner, push, boundary, index = memory
        here = jnp.where(index == boundary, push, 0)

        def pushed(carry):
            return with_states(carry, [S + d for S, d in zip(jd.states(carry), here, strict=True)])

        carry, inner, record = self.inner(pushed(carry) if self.ahead else carry, inner)
        return carry if self.ahead else pushed(carry), (inner, push, boundary, index + 1), record


@pytest.fixture(scope="module")
def cut_text(net):
    """A text cut to rank 2 of 3 at every boundary, and the derivative of its mean loss, segment by segment."""
    text = TOKENS[:1, : LENGTHS[0]]
    tape = recorded(net, text, lengths=LENGTHS[:1], intervention=cut())
    objective, inputs = objective_of("next_token", tape, np.ones((1, text.shape[1] - 1), bool), 0, 0)
    return text, tape, list(pull_back(net, tape, objective, inputs, cotangents=1))[::-1]


@pytest.mark.parametrize("boundary", [0, 2])
@pytest.mark.parametrize("ahead", [True, False], ids=["ahead of the cut", "after the cut"])
def test_derivatives_through_a_truncation_are_central_differences_of_the_loss(net, cut_text, boundary, ahead):
    text, tape, pulled = cut_text
    start, into = tape.starts[boundary + 1], pulled[boundary + 1].state
    if ahead:
        into = reverse._pull_cut(tape.intervention, net.config, start, tape.caches, into, False)
    sigma = np.linalg.svd(start.arriving, compute_uv=False)
    gap = (sigma[..., 1] - sigma[..., 2])[..., None, None]  # that the cut needs: pushes are small beside it
    rng = np.random.default_rng(boundary)
    pushes = [rng.standard_normal(start.arriving.shape) * gap for _ in range(2)]
    one = np.zeros(start.arriving.shape)
    one[1, 0, 1, 4, 1] = 1.0
    for push in (*pushes, one):
        both = [Pushed(cut(), sign * EPS * push, boundary, ahead) for sign in (1, -1)]
        high, low = (jd.run(net, text, segment=SEGMENT, intervention=x).losses.mean() for x in both)
        expected = (high - low) / (2 * EPS)
        assert abs(expected) > 1e-5
        np.testing.assert_allclose(np.sum(into[0] * push), expected, rtol=1e-5)


def test_a_frozen_basis_leaves_out_how_the_directions_turn(net, cut_text):
    """U_r U_r^T of the derivative after the cut."""
    _, tape, pulled = cut_text
    start, into = tape.starts[3], pulled[3].state
    found = reverse._pull_cut(tape.intervention, net.config, start, tape.caches, into, True)
    U = np.linalg.svd(start.arriving)[0][..., :2]
    np.testing.assert_allclose(found[0], U @ np.swapaxes(U, -1, -2) @ into[0], rtol=1e-6, atol=1e-10)
    exact = reverse._pull_cut(tape.intervention, net.config, start, tape.caches, into, False)
    assert np.abs(found - exact).max() > 1e-3 * np.abs(exact).max()


def test_the_recorded_run_is_the_truncated_one(net, cut_text):
    text, tape, pulled = cut_text
    expected = jd.run(net, text, segment=SEGMENT, intervention=cut()).losses[0]
    found = np.concatenate([p.values[0] for p in pulled])[: len(expected)]
    np.testing.assert_allclose(found, expected, rtol=1e-10)
    assert np.abs(expected - jd.run(net, text, segment=SEGMENT).losses[0]).max() > 1e-3
    for start in tape.starts[1:]:
        np.testing.assert_allclose(start.recurrent.S, jd.truncate(start.arriving, 2, method="svd"), atol=1e-12)


# Broken weights


def broken(layer: int, weight: str, rows):
    model = plain.fresh(plain.QWEN)
    parameter = getattr(model.layers[layer].mixer, weight)
    parameter[...] = parameter[...].at[rows].set(jnp.nan)
    return model


def test_broken_weights_of_a_head_are_named_with_layer_head_and_boundary():
    text = TOKENS[:1, : LENGTHS[0]]
    with pytest.raises(jd.NonFiniteError, match=r"layer 2 \(linear\), in the state of head 1, in row 0, tokens 0 to 4"):
        recorded(broken(2, "in_b", 1), text, lengths=LENGTHS[:1])


def test_a_residual_stream_that_breaks_later_is_named_with_its_layer_row_and_tokens():
    model = plain.fresh(plain.QWEN)
    texts = np.where(TOKENS == 16, 0, TOKENS)
    texts[1, 7] = 16
    model.embed[...] = model.embed[...].at[16].set(jnp.inf)
    with pytest.raises(jd.NonFiniteError, match="first after the embedding, in row 1, tokens 5 to 9") as error:
        recorded(model, texts, lengths=LENGTHS)
    assert error.value.row == 1


def test_an_output_gate_that_breaks_is_named_with_its_layer():
    """It touches no state: the residual stream after the last linear layer is what breaks."""
    with pytest.raises(jd.NonFiniteError, match=r"first after layer 2 \(linear\), in row 0, tokens 0 to 4"):
        recorded(broken(2, "in_z", 0), TOKENS[:1, : LENGTHS[0]], lengths=LENGTHS[:1])


def test_derivatives_that_break_are_named_with_layer_head_and_boundary():
    """A cotangent that is infinite; all derivatives break, the last boundary's first."""
    model, text = plain.fresh(plain.QWEN), TOKENS[:1, : LENGTHS[0]]
    tape = recorded(model, text, lengths=LENGTHS[:1])
    w = np.full_like(weights(model)[:1, :1], np.inf)
    with pytest.raises(jd.NonFiniteError, match="the derivative of layer 0, head 0, after 20 tokens, in row 0"):
        pulled_back(model, tape, w)
