"""A model whose linear layers differ in heads, K and V: every analysis sees each layer's own states, and nothing else."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdelta as jd
from jaxdelta.analysis.sensitivity import validation
from jaxdelta.analysis.sweep import make_worlds
from jaxdelta.models import MODELS
from jaxdelta.models.carry import full_ranks, join, split, stacked, with_stacked
from jaxdelta.models.qwen3_5 import Qwen3_5
from jaxdelta.ops.low_rank import truncate
from jaxdelta.report.sensitivity import head_rows
from jaxdelta.runs.capacity import reverse_memory, run_memory
from jaxdelta.runs.observers import Named
from jaxdelta.runs.segments import run
from tests.helpers import randomised, truncated

N, SEGMENT = 23, 8
IDS = np.random.default_rng(3).integers(0, 90, N)
SHAPES = {0: (6, 8, 11), 2: (2, 5, 3), 3: (4, 4, 11)}  # H, K, V of each linear layer
CLOSE = dict(rtol=2e-4, atol=2e-6)


@dataclass(frozen=True)
class Uneven(jd.Qwen3_5Config):
    """Layers of SHAPES."""

    def linear_of(self, layer):
        H, K, V = SHAPES[layer]
        return replace(super().linear_of(layer), num_key_heads=2, num_value_heads=H, key_dim=K, value_dim=V)


@pytest.fixture(scope="module", autouse=True)
def known():
    MODELS[Uneven] = Qwen3_5
    yield
    del MODELS[Uneven]


@pytest.fixture(scope="module")
def model():
    return randomised(Qwen3_5(Uneven.tiny(layer_kinds=("linear", "attention", "linear", "linear"))), 2)


@pytest.fixture(scope="module")
def maps(model):
    return jd.sensitivity(model, [IDS], SEGMENT, samples=2)


def begun(model):
    """Carry after the first segment, by forward."""
    return jd.forward(model, IDS[None, :SEGMENT], jd.init_carry(model, 1, 24))[1]


def test_a_carry_keeps_each_layers_own_shape(model):
    carry = begun(model)
    assert [S.shape[1:] for S in jd.states(carry)] == list(SHAPES.values())
    S = stacked(carry)
    assert S.shape == (3, 1, 6, 8, 11)
    assert full_ranks(carry).tolist() == [[8] * 6, [3, 3, 0, 0, 0, 0], [4, 4, 4, 4, 0, 0]]
    for again in (with_stacked(carry, S), join(model.config, *split(carry))):
        jax.tree.map(np.testing.assert_array_equal, again, carry)
    assert not np.any(np.asarray(S[1, :, 2:])) and not np.any(np.asarray(S[1, :, :, 5:])) and np.any(np.asarray(S[1]))


def test_a_cut_is_that_of_each_layers_own_states(model):
    """Rank 3 cuts two of the layers; of the one with three directions it leaves everything."""
    found = run(model, IDS[None], segment=SEGMENT, intervention=jd.Truncate(3))
    carry, losses = jd.init_carry(model, 1, 24), []
    for begin in range(0, N - 1, SEGMENT):
        if begin:
            cut = [truncate(S, 3) if min(S.shape[-2:]) > 3 else S for S in jd.states(carry)]
            carry = jd.with_states(carry, cut)
        logits, carry = jd.forward(model, IDS[None, begin : begin + SEGMENT], carry)
        targets = IDS[None, begin + 1 : begin + 1 + logits.shape[1]]
        losses.append(
            -np.take_along_axis(jax.nn.log_softmax(logits)[:, : targets.shape[1]], targets[..., None], -1)[..., 0]
        )
    np.testing.assert_allclose(found.losses, np.concatenate(losses, axis=1), **CLOSE)


@pytest.mark.parametrize(
    "intervention",
    [
        jd.Zero(),
        jd.Scale(np.full((1, 1, 1, 1), 0.5)),
        jd.Filter(0.1),
        jd.Noise(seed=1),
        jd.Quantise(bits=4, error_feedback=True),
    ],
)
def test_perturbations_stay_inside_of_each_layers_states(model, intervention):
    carry = begun(model)
    settled, memory = intervention.start(carry, [SEGMENT])
    after, *_ = settled(carry, memory)
    for S, other in zip(jd.states(carry), jd.states(after), strict=True):
        sigma, changed = (np.linalg.svd(np.asarray(x), compute_uv=False) for x in (S, other))
        match intervention:
            case jd.Zero():
                assert not changed.any()
            case jd.Scale():
                np.testing.assert_allclose(changed, sigma / 2, rtol=1e-5)
            case jd.Filter():
                np.testing.assert_allclose(changed, sigma**3 / (sigma**2 + 0.1), rtol=1e-3, atol=1e-6)
            case jd.Noise():  # drawn within K x V, or part of it would be cut off
                np.testing.assert_allclose(changed, sigma, rtol=1e-4, atol=1e-6)
                assert not np.allclose(S, other)
            case jd.Quantise():
                assert np.abs(other - S).max() <= np.abs(S).max() / 7 / 2 * 1.001


def test_directions_and_gates_are_those_of_each_layers_own_states(model, maps):
    """Against an SVD of the states that forward gives, and the derivative of its loss."""
    carry = begun(model)

    def rest(S):
        after = jd.with_states(carry, S)
        total = 0.0
        for begin in range(SEGMENT, N - 1, SEGMENT):
            ids = IDS[None, begin : min(begin + SEGMENT, N - 1)]
            logits, after = jd.forward(model, ids, after)
            total += -jnp.sum(
                jnp.take_along_axis(jax.nn.log_softmax(logits), IDS[None, begin + 1 :][:, : ids.shape[1], None], -1)
            )
        return total / (N - 1)

    derivative = jax.grad(rest)(jd.states(carry))
    at = maps.isel(document=0).sel(boundary=SEGMENT)
    for layer, S, G in zip(SHAPES, jd.states(carry), derivative, strict=True):
        H, K, V = SHAPES[layer]
        here = at.sel(layer=layer)
        n = min(K, V)
        sigma = np.linalg.svd(np.asarray(S[0], np.float64), compute_uv=False)
        np.testing.assert_allclose(here.sigma.values[:H, :n], sigma, rtol=1e-4, atol=1e-7)
        np.testing.assert_allclose(
            here.gate.values[:H, :n].sum(-1), np.einsum("hkv,hkv->h", S[0], G[0]), rtol=2e-3, atol=1e-6
        )
        assert here.sigma.notnull().sum() == here.gate.notnull().sum() == H * n
        assert here.head_state.notnull().sum() == here.effect.isel(direction=0).notnull().sum() == H
        assert here.below_rounding.values[H:].all() and here.below_rounding.values[:, n:].all()
        assert maps.beta_sensitivity.sel(layer=layer).isel(document=0).notnull().all("token").sum() == H
    assert maps.sizes["direction"] == 8 and maps.sizes["head"] == 6


def test_tails_of_a_layer_with_fewer_directions_are_sums_of_what_it_has(maps):
    here = maps.isel(document=0, boundary=0).sel(layer=2, head=1)
    tail = jd.tail_gate(maps).isel(document=0, boundary=0).sel(layer=2, head=1)
    np.testing.assert_allclose(tail.values[:3], [-here.gate.values[r:3].sum() for r in range(3)], rtol=1e-5)
    assert not tail.values[3:].any()


def test_removals_are_measured_of_every_head_that_there_is(model, maps):
    rows = validation.removals(model, [IDS], maps, directions=6)
    found = {(r["layer"], r["head"]) for r in rows.to_pylist() if r["kind"] == "head_output"}
    assert found == {(layer, head) for layer, (H, *_) in SHAPES.items() for head in range(H)} == set(model.config.heads)
    table = head_rows(validation.joined(maps, rows)).to_pylist()
    assert len(table) == 2 * len(found)
    assert all(np.isfinite([v for k, v in row.items() if k != "document"]).all() for row in table)


def test_worlds_are_those_that_change_something():
    config = Uneven.tiny(layer_kinds=("linear", "attention", "linear", "linear"))
    worlds = make_worlds(config, [2, 4], "head")
    assert len(worlds) == 1 + (6 + 2 + 4) + 6  # rank 4 is all of two of the layers
    assert len(make_worlds(config, [3], "layer")) == 1 + 2
    assert config.max_rank == 8


def test_a_sweep_by_head_agrees_with_the_cut_by_hand(model):
    rows = jd.sweep(model, [IDS], ranks=[2], segment=SEGMENT, scope="head", layers=[2], heads=[1]).to_pylist()
    rank = np.full((1, 3, 6), 8)
    rank[0, 1, 1] = 2
    expected = run(model, IDS[None], segment=SEGMENT, intervention=jd.Truncate(rank)).losses.mean()
    assert rows[1]["loss"] == pytest.approx(expected, rel=1e-6)
    carry = begun(model)
    settled, memory = jd.Truncate(rank).start(carry)
    after, *_ = settled(carry, memory)
    np.testing.assert_allclose(jd.states(after)[1][0, 1], truncated(np.asarray(jd.states(carry)[1][0, 1]), 2), **CLOSE)


def test_transitions_are_those_of_each_layers_own_keys(model):
    ledger = jd.ledger_of(model, [IDS], windows=(1, 4))
    observer = Named(("k", "beta"), (2,))
    (seen,) = run(model, IDS[None], segment=N, observers=(observer,)).observed[0]
    k, beta = (np.asarray(seen[name][0, 0, :N], np.float64) for name in ("k", "beta"))
    assert k.shape == (N, 2, 5)
    here = ledger.isel(document=0).sel(layer=2)
    np.testing.assert_allclose(here.key_norm2.values[:, :2, 0], (k**2).sum(-1), rtol=1e-5)
    P = np.eye(5) - beta[..., None, None] * k[..., :, None] * k[..., None, :]
    kept = np.linalg.svd(P, compute_uv=False).mean(axis=0)
    np.testing.assert_allclose(here.kept.sel(window=1).values[:2, :5], kept, rtol=1e-5)
    assert here.kept.sel(window=1).notnull().sum() == 10
    assert ledger.key_dim.values.tolist() == [8, 5, 4]
    assert here.g.notnull().sum() == 2 * N


def test_memory_is_that_of_states_filled_up_to_the_largest(model):
    options = dict(dtype="float32", segment=SEGMENT, max_length=24)
    carry = sum(x.nbytes for x in jax.tree.leaves(jd.init_carry(model, 1, 24)))
    assert run_memory(model.config, **options).row_carry == carry + 2 * 4 * 3 * 6 * 8 * 11
    assert reverse_memory(model.config, **options, cotangents=2)[0] > 3 * 4 * 3 * 6 * 8 * 11


def test_measures_of_states_are_those_of_each_layers_own(model):
    """Spectra, keys, traces and reads; NaN for heads and directions that a layer lacks."""
    text = {"text": IDS}
    _, cache = jd.run_with_cache(model, IDS, lambda name: True, segment=SEGMENT)
    spectrum, keys = jd.spectrum(model, text, segment=SEGMENT), jd.keys(model, text, segment=SEGMENT)
    trace, reads = jd.rank_trace(model, text, segment=SEGMENT), jd.state_reads(model, text, segment=SEGMENT)
    for layer, (H, K, V) in SHAPES.items():
        at, n = f"blocks.{layer}.linear_attn.hook_", min(K, V)
        sigma = np.linalg.svd(cache[at + "state"][0, -1].astype(np.float64), compute_uv=False)
        found = spectrum["sigma"].isel(document=0).sel(at="end", layer=layer).values
        np.testing.assert_allclose(found[:H, :n], sigma, rtol=1e-4, atol=1e-6 * sigma.max())
        assert np.isnan(found[H:]).all()
        assert np.isnan(found[:, n:]).all()
        k = cache[at + "k_normed"][0].astype(np.float64)
        unit = k / np.linalg.norm(k, axis=-1, keepdims=True)
        here = keys.isel(document=0).sel(layer=layer)
        np.testing.assert_allclose(here["mean_key"].values[:H], np.linalg.norm(unit.mean(axis=0), axis=-1), rtol=1e-4)
        last = trace["effective_rank"].isel(document=0, step=0).sel(layer=layer, token=SEGMENT)
        expected = jd.effective_rank(cache[at + "state_before"][0, 1].astype(np.float64))
        np.testing.assert_allclose(last.values[:H], expected, rtol=1e-4)
        qbar, S = cache[at + "qbar"][0, SEGMENT : 2 * SEGMENT], cache[at + "state_before"][0, 1]
        read = np.sum(np.einsum("thk,hkv->thv", qbar, S) ** 2, axis=(0, 2))
        contribution = reads["contribution"].isel(document=0).sel(boundary=SEGMENT, layer=layer)
        np.testing.assert_allclose(contribution.sum("direction").values[:H], read, rtol=1e-3)
        for data in (here["horizon"], here["effective_rank"], last, contribution.isel(direction=0)):
            assert np.isnan(data.values[H:]).all()
            assert np.isfinite(data.values[:H]).all()
