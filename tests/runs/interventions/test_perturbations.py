"""Perturbations of the state: each map, for whom and when, worlds in a batch, programs shared, derivatives."""

from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxdelta as jd
from jaxdelta.analysis.sensitivity.maps import sensitivity
from jaxdelta.runs import segments
from jaxdelta.runs.interventions import Filter, Intervention, Noise, NoOp, Project, Quantise, Scale, Swap, Truncate, Zero
from jaxdelta.runs.reverse import record
from jaxdelta.runs.segments import text_of
from ports.compare import relative_error
from tests.helpers import matrices_of_spectrum, orthonormal_columns, truncated
from tests.tiny import fresh_model, model, tokens

KINDS = ("linear", "attention", "linear")
L, B, H = 2, 3, 6
WIDE, TALL = dict(key_dim=8, value_dim=11), dict(key_dim=11, value_dim=8)
SHAPES = pytest.mark.parametrize("sizes", [WIDE, TALL], ids=["K < V", "K > V"])
FACTORS = np.linspace(1.5, -0.5, 8)
SPECTRUM = 3 * 0.6 ** np.arange(8)
SEGMENT, LENGTH = 8, 30
TEXTS = np.stack(tokens(*[LENGTH] * B))


def basis(K, Q=3, batch=(1, 1, 1)):
    return orthonormal_columns(5, (*batch, K, Q))


def every(K=8):
    """One of each kind."""
    other = np.random.default_rng(9).standard_normal((1, L, 1, H, K, 19 - K))
    return {
        "NoOp": NoOp(),
        "Zero": Zero(),
        "Scale": Scale(FACTORS),
        "Project": Project(basis(K)),
        "Filter": Filter(2.0),
        "Noise": Noise(),
        "Quantise": Quantise(4),
        "Quantise with feedback": Quantise(4, error_feedback=True),
        "Swap": Swap(other),
    }


ALL = pytest.mark.parametrize("name", every())


@partial(jax.jit, static_argnums=0)
def boundary(intervention, carry, memory):
    return intervention(carry, memory)


def carried(sizes=WIDE, states=None, seed=0):
    """A carry of B rows whose states are random, or the given ones [L, B, H, K, V]."""
    m = model(layer_kinds=KINDS, **sizes)
    rng = np.random.default_rng(seed)
    carry = jax.tree.map(
        lambda a: jnp.asarray(rng.standard_normal(a.shape), a.dtype) if a.ndim > 1 else a, jd.init_carry(m, B, 5)
    )
    return carry if states is None else jd.with_states(carry, [jnp.asarray(S, jnp.float32) for S in states])


def perturbed(intervention, *carries):
    """States before and after each of successive boundaries, [boundary, L, B, H, K, V]."""
    settled, memory = intervention.start(carries[0], [SEGMENT * (i + 1) for i in range(len(carries))])
    before, after = [], []
    for carry in carries:
        changed, memory, record = boundary(settled, carry, memory)
        assert record is None
        before.append(np.stack(jd.states(carry)))
        after.append(np.stack(jd.states(changed)))
    return np.stack(before), np.stack(after)


def once(intervention, **options):
    before, after = perturbed(intervention, carried(**options))
    return before[0], after[0]


def of_spectrum(sizes, seed=1):
    """States whose singular values are well apart."""
    return matrices_of_spectrum(seed, SPECTRUM, sizes["key_dim"], sizes["value_dim"], (L, B, H))


# The maps


def test_a_no_op_and_zero_are_what_they_say():
    before, after = once(NoOp())
    np.testing.assert_array_equal(after, before)
    np.testing.assert_array_equal(once(Zero())[1], 0)


@SHAPES
def test_scale_multiplies_singular_values_the_largest_first(sizes):
    before, after = once(Scale(FACTORS), sizes=sizes, states=of_spectrum(sizes))
    U, sigma, Wt = np.linalg.svd(before.astype(np.float64), full_matrices=False)
    assert relative_error(after, (U * (sigma * FACTORS)[..., None, :]) @ Wt) < 1e-5


@SHAPES
def test_project_keeps_what_lies_in_the_span_of_the_key_directions(sizes):
    Q = basis(sizes["key_dim"], batch=(B, L, H))
    before, after = once(Project(Q), sizes=sizes)
    of_states = np.moveaxis(Q, 0, 1)
    assert relative_error(after, of_states @ (np.swapaxes(of_states, -1, -2) @ before)) < 1e-6
    assert relative_error(once(Project(np.eye(sizes["key_dim"])[None, None, None]), sizes=sizes)[1], before) < 1e-6


@SHAPES
def test_filter_shrinks_singular_values_by_its_formula(sizes):
    tau = np.random.default_rng(3).uniform(0.1, 9, (B, L, H))
    before, after = once(Filter(tau), sizes=sizes)
    U, sigma, Wt = np.linalg.svd(before.astype(np.float64), full_matrices=False)
    shrunk = sigma**3 / (sigma**2 + np.moveaxis(tau, 0, 1)[..., None])
    assert relative_error(after, (U * shrunk[..., None, :]) @ Wt) < 1e-5


@SHAPES
def test_truncation_is_a_scale_by_ones_and_zeros_and_a_projection_on_leading_key_directions(sizes):
    states, rank = of_spectrum(sizes), 3
    expected = truncated(states.astype(np.float32), rank)
    leading = np.linalg.svd(states, full_matrices=False)[0][..., :rank]
    for intervention in (Scale(np.arange(8) < rank), Project(np.moveaxis(leading, 1, 0))):
        assert relative_error(once(intervention, sizes=sizes, states=states)[1], expected) < 1e-5
    settled, memory = Truncate(rank, method="svd").start(carried(sizes))
    cut = np.stack(jd.states(boundary(settled, carried(sizes, states), memory)[0]))
    assert relative_error(cut, expected) < 1e-5


@SHAPES
def test_noise_keeps_the_spectrum_and_nothing_else(sizes):
    """Also that of a state of three directions, and of none."""
    states = of_spectrum(sizes)
    states[0, 0] = truncated(states[0, 0], 3)
    states[1, 2, 4] = 0
    before, after = once(Noise(), sizes=sizes, states=states)
    sigma = [np.linalg.svd(S.astype(np.float64), compute_uv=False) for S in (before, after)]
    np.testing.assert_allclose(sigma[1], sigma[0], atol=1e-5)
    cosine = np.sum(before * after, (-2, -1)) / np.maximum(np.sum(before**2, (-2, -1)), 1e-9)
    assert np.abs(cosine).max() < 0.8


@SHAPES
def test_noise_differs_by_world_head_boundary_and_seed(sizes):
    same = np.broadcast_to(of_spectrum(sizes)[:1, :1, :1], (L, B, H, sizes["key_dim"], sizes["value_dim"]))
    carry = carried(sizes, same)
    _, after = perturbed(Noise(), carry, carry, carry)
    _, other = perturbed(Noise(seed=1), carry)
    _, again = perturbed(Noise(), carry)
    drawn = np.concatenate([after, other]).reshape(4 * L * B * H, -1)
    distance = np.linalg.norm(drawn[:, None] - drawn[None], axis=-1) + 10 * np.eye(len(drawn))
    assert distance.min() > 1
    np.testing.assert_array_equal(again[0], after[0])


@SHAPES
def test_noise_has_singular_vectors_without_a_preferred_direction(sizes):
    """Of the states of one direction, u v^T: entries of mean 0, and u u^T, v v^T of mean I / K, I / V."""
    K, V = sizes["key_dim"], sizes["value_dim"]
    carry = carried(sizes, matrices_of_spectrum(2, [1.0], K, V, (L, B, H)))
    _, after = perturbed(Noise(), *[carry] * 30)
    drawn = after.reshape(-1, K, V).astype(np.float64)
    spread = 5 / np.sqrt(len(drawn))
    assert np.abs(drawn.mean(0)).max() < spread / np.sqrt(K * V)
    for outer, n in ((drawn @ np.swapaxes(drawn, 1, 2), K), (np.swapaxes(drawn, 1, 2) @ drawn, V)):
        np.testing.assert_allclose(outer.mean(0), np.eye(n) / n, atol=spread * np.sqrt(2) / n)


@pytest.mark.parametrize("bits", [2, 3, 8, 16])
def test_quantise_is_off_by_at_most_half_a_step_and_keeps_its_levels(bits):
    before, after = once(Quantise(bits))
    step = np.abs(before).max((-2, -1), keepdims=True) / (2 ** (bits - 1) - 1)
    assert (np.abs(after - before) <= step * (0.5 + 1e-4 * bits)).all()
    np.testing.assert_allclose(after / step, np.round(after / step), atol=1e-2)
    assert max(len(np.unique(S)) for S in after.reshape(-1, 8 * 11)) <= 2**bits - 1


def test_quantise_leaves_an_empty_state_empty():
    for feedback in (False, True):
        np.testing.assert_array_equal(once(Quantise(4, feedback), states=np.zeros((L, B, H, 8, 11)))[1], 0)


def test_error_feedback_makes_the_average_of_a_constant_state_right():
    """The sum of errors stays within a step, so the mean is off by step / n; without feedback nothing averages."""
    carry, n = carried(), 40
    before, after = perturbed(Quantise(3, error_feedback=True), *[carry] * n)
    step = np.abs(before[0]).max((-2, -1), keepdims=True) / 3
    assert (np.abs(np.cumsum(after - before, axis=0)) <= step).all()
    assert (np.abs(after.mean(0) - before[0]) <= step / n).all()
    _, plain = perturbed(Quantise(3), *[carry] * n)
    assert (np.abs(plain.mean(0) - before[0]) > 2 * step / n).any()


def test_error_feedback_adds_back_only_what_rounding_took():
    """Heads and boundaries that are left out have no error to add."""
    carry, where = carried(), np.arange(H) < 3
    _, plain = perturbed(Quantise(3), carry)
    before, after = perturbed(Quantise(3, error_feedback=True, where=where, at=[2 * SEGMENT, 3 * SEGMENT]), *[carry] * 3)
    np.testing.assert_array_equal(after[0], before[0])
    np.testing.assert_array_equal(after[1][..., :3, :, :], plain[0][..., :3, :, :])
    assert (after[2] != after[1])[..., :3, :, :].any()
    np.testing.assert_array_equal(after[..., 3:, :, :], before[..., 3:, :, :])


def test_swap_takes_the_states_of_each_boundary_or_one_for_all():
    rng = np.random.default_rng(4)
    of_each, of_all = rng.standard_normal((3, L, B, H, 8, 11)), rng.standard_normal((1, L, 1, 1, 8, 11))
    carry = carried()
    np.testing.assert_array_equal(perturbed(Swap(of_each), *[carry] * 3)[1], of_each.astype(np.float32))
    expected = np.broadcast_to(of_all.astype(np.float32), of_each.shape)
    np.testing.assert_array_equal(perturbed(Swap(of_all), *[carry] * 3)[1], expected)


def test_swap_has_no_state_for_a_boundary_beyond_its_last():
    with pytest.raises(jd.NonFiniteError):
        segments.run(model(layer_kinds=KINDS), TEXTS, segment=SEGMENT, intervention=Swap(np.zeros((2, 1, 1, 1, 1, 1))))


# For whom, and when


@ALL
@pytest.mark.parametrize(
    "shape", [(H,), (L, 1), (B, 1, 1), (B, L, H)], ids=["heads", "layers", "rows", "rows, layers and heads"]
)
def test_only_chosen_heads_change(name, shape):
    where = np.random.default_rng(len(shape)).random(shape) < 0.5
    where.flat[0], where.flat[-1] = True, False
    before, after = once(replace(every()[name], where=where))
    chosen = np.moveaxis(np.broadcast_to(where, (B, L, H)), 0, 1)
    np.testing.assert_array_equal(after[~chosen], before[~chosen])
    changed = (after != before).any((-2, -1))
    np.testing.assert_array_equal(changed, chosen & (name != "NoOp"))


@ALL
def test_only_chosen_boundaries_change(name):
    carries = [carried(seed=i) for i in range(4)]
    before, after = perturbed(replace(every()[name], at=[SEGMENT, 3 * SEGMENT]), *carries)
    np.testing.assert_array_equal(after[[1, 3]], before[[1, 3]])
    changed = (after[[0, 2]] != before[[0, 2]]).any((-2, -1))
    assert changed.all() or name == "NoOp"


@ALL
def test_nothing_but_the_states_changes(name):
    carry = carried()
    settled, memory = every()[name].start(carry, [SEGMENT])
    after, _, _ = boundary(settled, carry, memory)
    for a, b in zip(after.layers, carry.layers, strict=True):
        for part in set(a._fields) - {"S"}:
            np.testing.assert_array_equal(getattr(a, part), getattr(b, part))
    np.testing.assert_array_equal(after.position, carry.position)
    assert isinstance(settled, Intervention)


@pytest.mark.parametrize(
    ("intervention", "message"),
    [
        (Quantise(1), "bits is 1; expected 2 to 16"),
        (Quantise(17), "bits is 17; expected 2 to 16"),
        (Filter(0.0), r"tau is 0\.0; expected above 0"),
        (Filter(np.array([[1.0], [-2.0]])), r"tau is -2\.0; expected above 0"),
        (Scale(np.array(0.5)), r"factors have shape \(\); expected \[B, L, H, 8\]"),
        (Scale(np.ones(11)), r"factors have shape \(11,\); expected \[B, L, H, 8\]"),
        (Scale(np.ones((4, 1, 1, 8))), "broadcast"),
        (Project(np.eye(8)[None, None]), r"basis has shape \(1, 1, 8, 8\); expected \[B, L, H, 8, Q\]"),
        (Project(basis(11)), r"basis has shape \(1, 1, 1, 11, 3\)"),
        (Project(1.01 * basis(8)), r"not orthonormal: Q\^T Q is off the identity by 0\.02"),
        (Project(np.ones((1, 1, 1, 8, 2)) / np.sqrt(8)), "not orthonormal"),
        (Swap(np.zeros((1, L, B, H, 11, 8))), r"states have shape \(1, 2, 3, 6, 11, 8\); expected \[N-1, 2, 3, 6, 8, 11\]"),
        (Swap(np.zeros((1, L, B + 1, H, 8, 11))), r"states have shape \(1, 2, 4, 6, 8, 11\)"),
        (NoOp(where=np.ones((L, B, H), bool)), "broadcast"),
        (NoOp(at=[8, -1]), r"at is \[8, -1\], in tokens seen; the run has no boundary at -1: its boundaries are 8 to 24"),
        (NoOp(at=[0]), "no boundary at 0"),
        (NoOp(at=[]), "at is empty"),
        (Noise(seed=-1), "seed is -1; expected 0 to"),
        (Noise(seed=2**32), "seed is 4294967296; expected 0 to"),
        (NoOp(at=9), r"at is \[9\].*no boundary at 9"),
        (NoOp(at=32), "no boundary at 32"),
    ],
    ids=lambda x: type(x).__name__ if not isinstance(x, str) else "",
)
def test_what_does_not_fit_is_refused_before_the_run(intervention, message):
    with pytest.raises(ValueError, match=message):
        intervention.start(carried(), [8, 16, 24])


@pytest.mark.parametrize("where", [np.array([3]), np.array("no"), np.ones(H)], ids=["indices", "word", "numbers"])
def test_heads_are_chosen_by_true_and_false(where):
    with pytest.raises(TypeError, match=r"where is .*; expected Bool \[B, L, H\]"):
        Zero(where=where).start(carried(), [8])


def test_a_boundary_is_a_whole_number():
    with pytest.raises(TypeError):
        Zero(at=8.0).start(carried(), [8])


# Runs


@pytest.fixture(scope="module")
def plain():
    return jd.run(model(layer_kinds=KINDS), TEXTS, segment=SEGMENT).losses


def losses(intervention, texts=TEXTS):
    return jd.run(model(layer_kinds=KINDS), texts, segment=SEGMENT, intervention=intervention).losses


def test_a_run_with_a_no_op_is_the_plain_run_bit_for_bit(plain):
    np.testing.assert_array_equal(losses(NoOp()), plain)


@ALL
def test_a_run_changes_only_after_the_first_boundary_it_is_told(name, plain):
    """Chosen rows from the second boundary on."""
    found = losses(replace(every()[name], where=np.array([True, False, True])[:, None, None], at=2 * SEGMENT))
    np.testing.assert_array_equal(found[:, : 2 * SEGMENT], plain[:, : 2 * SEGMENT])
    np.testing.assert_array_equal(found[1], plain[1])
    assert (found[[0, 2], 2 * SEGMENT :] != plain[[0, 2], 2 * SEGMENT :]).any() == (name != "NoOp")


@pytest.mark.parametrize("kind", [Scale, Filter, Project, Zero])
def test_worlds_in_a_batch_are_separate_runs(kind):
    """One text in three worlds, each with its own factors, tau, basis or heads."""
    rng = np.random.default_rng(6)
    text = TEXTS[:1]
    asked = {
        Scale: ("factors", rng.uniform(0, 1, (B, L, H, 8))),
        Filter: ("tau", rng.uniform(0.01, 1, (B, L, H))),
        Project: ("basis", basis(8, batch=(B, L, H))),
        Zero: ("where", rng.random((B, L, H)) < 0.5),
    }
    name, value = asked[kind]
    together = losses(kind(**{name: value}), np.repeat(text, B, axis=0))
    assert len(np.unique(together, axis=0)) == B
    for world in range(B):
        alone = losses(kind(**{name: value[world : world + 1]}), text)
        np.testing.assert_allclose(together[world], alone[0], rtol=1e-4, atol=1e-5)


def test_zeroed_states_make_a_segment_what_a_recurrent_model_reads_alone():
    """Without attention, and with a convolution of one tap, nothing else crosses the boundary."""
    alone = fresh_model(layer_kinds=("linear",), conv_width=1)
    found = jd.run(alone, TEXTS, segment=SEGMENT, intervention=Zero()).losses
    again = jd.run(alone, TEXTS[:, SEGMENT : 2 * SEGMENT + 1], segment=SEGMENT + 1).losses
    np.testing.assert_allclose(found[:, SEGMENT : 2 * SEGMENT], again, rtol=1e-5, atol=1e-5)


def test_a_swap_with_the_states_of_the_same_run_changes_nothing_and_can_be_used_again(plain):
    """States on the device, which a run must not give away."""
    m = model(layer_kinds=KINDS)
    carries = [
        jnp.stack(jd.states(jd.run(m, TEXTS[:, : SEGMENT * i], segment=SEGMENT, max_length=32).carry)) for i in (1, 2, 3)
    ]
    swap = Swap(jnp.stack(carries))
    for _ in range(2):
        np.testing.assert_allclose(losses(swap), plain, rtol=1e-5, atol=1e-5)


# Programs


@pytest.mark.parametrize(
    "one, other",
    [
        (Scale(np.ones(8)), Scale(np.zeros((B, 1, 1, 8)))),
        (Filter(1.0), Filter(np.full((B, L, H), 2.0))),
        (Project(basis(8)), Project(orthonormal_columns(6, (1, 1, 1, 8, 3)))),
        (Noise(), Noise(seed=3)),
        (Zero(), Zero(where=np.zeros(H, bool))),
        (Zero(at=[SEGMENT]), Zero(at=3 * SEGMENT)),
        (Swap(np.zeros((1, 1, 1, 1, 8, 11))), Swap(np.ones((1, L, B, H, 8, 11)))),
        (Quantise(4), Quantise(4, where=np.arange(H) < 2)),
    ],
    ids=lambda x: type(x).__name__,
)
def test_runs_that_differ_in_arrays_alone_are_one_program(one, other):
    assert one == other
    assert hash(one) == hash(other)
    losses(one)
    before = segments._boundary._cache_size()
    losses(other)
    assert segments._boundary._cache_size() == before


def test_perturbations_of_other_kinds_or_bits_are_other_programs():
    made = [*every().values(), Quantise(5), Quantise(5, error_feedback=True)]
    assert len(set(made)) == len(made)
    assert Truncate(1, max_rank=1, method="svd") not in made


# Derivatives: sensitivities against central differences of runs, both through the perturbation, in f64

ONE = TEXTS[:1]


@cache
def double():
    """All of it f64, decays too: roundings to f32 would drown the differences."""
    made = fresh_model(dtype=jnp.float64, layer_kinds=("linear", "linear"), num_value_heads=2)
    nnx.update(made, jax.tree.map(lambda x: x.astype(jnp.float64), nnx.state(made)))
    return made


@dataclass(frozen=True)
class Affine:
    """S <- M S + C with constants of each boundary: what a derivative with a frozen basis, or straight through, is of."""

    maps: np.ndarray = field(compare=False)
    offsets: np.ndarray = field(compare=False)

    def start(self, carry, boundaries):
        return self, (jnp.zeros((), jnp.int32), jnp.asarray(self.maps), jnp.asarray(self.offsets))

    def __call__(self, carry, memory):
        index, maps, offsets = memory
        S = maps[index] @ jnp.stack(jd.states(carry)) + offsets[index]
        return jd.with_states(carry, list(S)), (index + 1, maps, offsets), None


@dataclass(frozen=True)
class Gated:
    """A perturbation, and after it a factor on each head's state: what ``head_state`` is the derivative of."""

    inner: Any
    gates: np.ndarray = field(compare=False)

    def start(self, carry, boundaries):
        inner, memory = self.inner.start(carry, boundaries)
        return replace(self, inner=inner), (jnp.zeros((), jnp.int32), jnp.asarray(self.gates), memory)

    def __call__(self, carry, memory):
        index, gates, inner = memory
        carry, inner, _ = self.inner(carry, inner)
        S = jnp.stack(jd.states(carry)) * gates[index][..., None, None]
        return jd.with_states(carry, list(S)), (index + 1, gates, inner), None


def mean_loss(intervention):
    return jd.run(double(), ONE, segment=SEGMENT, intervention=intervention).losses.mean()


def differences(inner, step=1e-5):
    """Central differences of the mean loss in the gates, [boundary, layer, head]."""
    found = np.zeros((3, 2, 2))
    for where in np.ndindex(found.shape):
        gates = np.zeros((2, 3, 2, 1, 2))
        gates[:, where[0], where[1], 0, where[2]] = step, -step
        up, down = (mean_loss(Gated(inner, 1 + g)) for g in gates)
        found[where] = (up - down) / (2 * step)
    return found


def head_states(intervention):
    maps = sensitivity(double(), ONE[0], SEGMENT, samples=0, intervention=intervention)
    np.testing.assert_allclose(maps.loss, mean_loss(intervention), rtol=1e-10)
    return maps.head_state.values[0]


@pytest.mark.parametrize(
    "intervention", [Filter(0.05), Project(basis(8)), Zero(at=[2 * SEGMENT])], ids=lambda x: type(x).__name__
)
def test_derivatives_go_through_a_perturbation(x64, intervention):
    expected = differences(intervention)
    np.testing.assert_allclose(head_states(intervention), expected, rtol=1e-5, atol=1e-8)
    assert (expected[1] == 0).all() == isinstance(intervention, Zero)


def arriving(intervention):
    """States before and after each boundary, [boundary, L, 1, H, K, V]."""
    tape = record(double(), text_of(double(), ONE, segment=SEGMENT), intervention=intervention)
    starts = tape.starts[1:]
    return np.stack([s.arriving for s in starts]), np.stack([s.recurrent.S for s in starts])


def test_derivatives_of_a_scale_take_its_directions_for_constants(x64):
    scale = Scale(FACTORS)
    before, after = arriving(scale)
    U = np.linalg.svd(before, full_matrices=False)[0]
    frozen = Affine((U * FACTORS) @ np.swapaxes(U, -1, -2), np.zeros_like(before))
    np.testing.assert_allclose(frozen.maps @ before, after, atol=1e-8)
    found = head_states(scale)
    np.testing.assert_allclose(found, differences(frozen), rtol=1e-4, atol=1e-7)
    assert relative_error(found, differences(scale)) > 1e-3  # the directions do turn


def test_derivatives_of_a_quantisation_pass_straight_through_the_rounding(x64):
    coarse = Quantise(3)
    before, after = arriving(coarse)
    identity = Affine(np.broadcast_to(np.eye(8), (*before.shape[:-1], 8)), after - before)
    np.testing.assert_allclose(head_states(coarse), differences(identity), rtol=1e-5, atol=1e-8)


def test_nothing_is_handed_on_through_zero_or_a_swap(x64):
    """What a segment did to its state is lost at the next boundary, in reverse mode too."""
    other = np.random.default_rng(2).standard_normal((1, 2, 1, 2, 8, 11))
    for intervention in (Zero(at=[3 * SEGMENT]), Swap(other, at=[3 * SEGMENT])):
        maps = sensitivity(
            double(), ONE[0], SEGMENT, samples=0, intervention=intervention, scored=np.arange(LENGTH - 1) >= 24
        )
        # Of the last layer, which only hands on states.
        np.testing.assert_array_equal(maps.g_sensitivity.values[:, :24, -1], 0)
        assert (maps.g_sensitivity.values[:, 24, -1] != 0).any() == isinstance(intervention, Swap)
