"""Sensitivities against central differences of the loss, the exact Fisher information, and identities between them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr
from flax import nnx

from jaxdelta.analysis.sensitivity.maps import (
    sensitivity,
    sensitivity_maps,
    tail_effect,
    tail_fisher,
    tail_gate,
)
from jaxdelta.analysis.sensitivity.objectives import LogitDifference, expected_and_sampled
from jaxdelta.nn.head import log_normalizer
from jaxdelta.ops.directions import gate_derivatives
from jaxdelta.runs.interventions import Truncate, Zero
from tests import plain
from tests.helpers import matrices_of_spectrum, orthonormal_columns
from tests.plain import EPS, PRODUCT, QWEN, SEGMENT

TEXT, SHORT = plain.tokens(23), plain.tokens(12, seed=1)  # five segments and three; four boundaries and two
SAMPLES = 512
# boundary, layer, head, direction
PICKS = {
    QWEN: [(0, 0, 1, 0), (0, 1, 0, 2), (1, 0, 1, 1), (1, 1, 0, 0), (1, 1, 1, 1), (2, 0, 0, 0), (2, 1, 1, 2), (3, 1, 0, 1)],
    PRODUCT: [
        (0, 0, 0, 0),
        (0, 0, 1, 2),
        (1, 0, 0, 1),
        (1, 0, 1, 0),
        (2, 0, 0, 2),
        (2, 0, 1, 1),
        (3, 0, 0, 0),
        (3, 0, 1, 1),
    ],
}
HEADS = [(0, 0, 1, None), (1, 1, 0, None)]
MASK = np.random.default_rng(5).random(len(TEXT) - 1) < 0.4
EVERY = np.ones(len(TEXT) - 1, bool)
TOLERANCE = dict(rtol=1e-6, atol=1e-9)


@pytest.fixture(scope="module", autouse=True)
def f64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def steps():
    """What is told of progress while ``maps`` are made."""
    return []


@pytest.fixture(scope="module")
def maps(steps):
    return sensitivity(plain.model(), TEXT, SEGMENT, samples=SAMPLES, progress=lambda *counts: steps.append(counts))


@pytest.fixture(scope="module")
def product():
    """Two documents of n_h = 2, with masks."""
    return sensitivity(
        plain.model(PRODUCT), {"a": TEXT, "b": SHORT}, SEGMENT, scored=[MASK, EVERY[: len(SHORT) - 1]], samples=2
    )


def first_order(text=TEXT, **options) -> xr.Dataset:
    return sensitivity(plain.model(), text, SEGMENT, samples=0, max_length=5 * SEGMENT, **options)


def picked(x: xr.DataArray, picks) -> np.ndarray:
    """Entries (boundary, layer, head, direction) of the first document, direction last."""
    x = x.isel(document=0)
    return np.stack([x.isel(boundary=b, layer=l, head=h, direction=i) for b, l, h, i in picks], axis=-1)


def slopes(config, picks, value) -> np.ndarray:
    """Central differences of ``value`` (of logits) with respect to the gates of ``picks``."""
    high, low = plain.nudged(plain.model(config), TEXT, picks)
    return (value(high) - value(low)) / (2 * EPS)


def mean_loss(z: np.ndarray, scored: np.ndarray) -> np.ndarray:
    return (plain.losses(z, TEXT) * scored).sum(axis=-1) / scored.sum()


# First order


def test_gates_are_central_differences_of_the_loss(maps):
    expected = slopes(QWEN, PICKS[QWEN], partial(mean_loss, scored=EVERY))
    assert np.abs(expected).max() > 0.01
    np.testing.assert_allclose(picked(maps.gate, PICKS[QWEN]), expected, **TOLERANCE)


def test_gates_of_deltaproduct_and_of_scored_tokens_are_central_differences(product):
    expected = slopes(PRODUCT, PICKS[PRODUCT], partial(mean_loss, scored=MASK))
    assert np.abs(expected).max() > 0.001
    np.testing.assert_allclose(picked(product.gate, PICKS[PRODUCT]), expected, **TOLERANCE)


def test_a_heads_state_has_the_derivative_of_its_factor(maps):
    expected = slopes(QWEN, HEADS, partial(mean_loss, scored=EVERY))
    found = [maps.head_state.values[0, b, l, h] for b, l, h, _ in HEADS]
    np.testing.assert_allclose(found, expected, **TOLERANCE)


def test_a_heads_output_has_the_derivative_of_a_factor_on_its_columns_of_the_output_matrix(maps):
    def loss(layer: int, head: int, factor: float) -> float:
        model = plain.fresh(QWEN)
        out, V = plain.linear_layers(model)[layer].mixer.out, QWEN.value_dim
        out[...] = out[...].at[:, head * V : (head + 1) * V].multiply(factor)
        return mean_loss(plain.logits(model, TEXT)[:1], EVERY)[0]

    for layer, head in np.ndindex(2, 2):
        expected = (loss(layer, head, 1 + EPS) - loss(layer, head, 1 - EPS)) / (2 * EPS)
        assert abs(expected) > 1e-3
        found = maps.head_output.isel(document=0, layer=layer, head=head).sum("segment")
        np.testing.assert_allclose(found, expected, **TOLERANCE)


@partial(jax.jit, static_argnums=0)
def _loss_of_pushed(graphdef, params, beta, g):
    """Mean loss of TEXT in one pass, with ``beta`` [L, P, H] and ``g`` [L, N, H] added to what layers make of it."""
    model = nnx.merge(graphdef, params)
    for layer, *push in zip(plain.linear_layers(model), beta, g, strict=True):
        made = layer.mixer.gates
        layer.mixer.gates = lambda x, tap, made=made, push=push: tuple(
            a + b for a, b in zip(made(x, tap), push, strict=True)
        )
    hidden = model(TEXT[None], model.init_carry(1, len(TEXT))).hidden
    logs = jax.nn.log_softmax(model.logits(hidden))[0, :-1]
    return -jnp.take_along_axis(logs, TEXT[1:, None], axis=-1)[:, 0]


def slope_of_push(config, name: str, entry, scored) -> float:
    c, parts = config, nnx.split(plain.model(config))
    shape = len(c.linear_layers), len(TEXT), c.num_value_heads

    def loss(push: float) -> float:
        both = {"beta": np.zeros((shape[0], shape[1] * c.num_householder, shape[2])), "g": np.zeros(shape)}
        both[name][entry] = push
        return (np.asarray(_loss_of_pushed(*parts, both["beta"], both["g"])) * scored).sum() / scored.sum()

    return (loss(EPS) - loss(-EPS)) / (2 * EPS)


@pytest.mark.parametrize(("layer", "token", "head"), [(0, 0, 1), (0, 9, 0), (1, 4, 0), (1, 17, 1), (0, 20, 1)], ids=str)
def test_write_strength_and_decay_of_a_token_are_central_differences(maps, layer, token, head):
    for name, of in (("beta_sensitivity", "beta"), ("g_sensitivity", "g")):
        found = maps[name].values[0, token, layer, head]
        np.testing.assert_allclose(found, slope_of_push(QWEN, of, (layer, token, head), EVERY), **TOLERANCE)


@pytest.mark.parametrize(("token", "head"), [(2, 0), (10, 1), (19, 0)], ids=str)
def test_every_write_of_a_token_and_its_one_decay_are_central_differences(product, token, head):
    for step in (0, 1):
        found = product.beta_sensitivity.values[0, token, 0, head, step]
        np.testing.assert_allclose(found, slope_of_push(PRODUCT, "beta", (0, 2 * token + step, head), MASK), **TOLERANCE)
    found = product.g_sensitivity.values[0, token, 0, head]
    np.testing.assert_allclose(found, slope_of_push(PRODUCT, "g", (0, token, head), MASK), **TOLERANCE)


def test_the_decay_of_a_segments_first_token_is_a_factor_on_the_state_it_reads(maps, product):
    """exp(g) S: dL/dg = <S, dL/dS>."""
    for x in (maps, product):
        at = x.g_sensitivity.sel(token=x.boundary.values)
        for row, boundaries in zip(range(x.sizes["document"]), (4, 2), strict=False):
            expected = x.head_state.values[row, :boundaries]
            np.testing.assert_allclose(at.values[row, :boundaries], expected, rtol=1e-9, atol=1e-13)


def test_sigmas_are_those_of_the_states(maps):
    expected = np.linalg.svd(plain.states(plain.model(), TEXT), compute_uv=False)
    np.testing.assert_allclose(maps.sigma.values[0], expected, rtol=1e-6, atol=1e-7)


def test_the_loss_is_the_mean_over_scored_tokens(maps, product):
    z = plain.logits(plain.model(), TEXT)
    np.testing.assert_allclose(maps.loss, mean_loss(z[:1], EVERY), rtol=1e-10)
    assert maps.scored.values.tolist() == [22]
    z = plain.logits(plain.model(PRODUCT), TEXT)
    np.testing.assert_allclose(product.loss[0], mean_loss(z[:1], MASK)[0], rtol=1e-10)
    assert product.scored.values.tolist() == [MASK.sum(), 11]


# Gauge

SPECTRA = {"repeated": [3.0, 2.0, 2.0, 2.0, 0.5], "repeated zeros": [2.0, 2.0, 1.0, 0.0, 0.0], "flat": [1.0] * 5}
SHAPES = {"K < V": (5, 8), "K > V": (8, 5), "K = V": (5, 5)}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("spectrum", SPECTRA.values(), ids=SPECTRA)
def test_a_block_of_equal_singular_values_has_one_sum_in_every_basis(shape, spectrum):
    """By hand: sum over the block of (U^T G S^T U)_ii, in the basis the state was made of and in that basis rotated."""
    (K, V), sigma = shape, np.array(spectrum)
    U, W = orthonormal_columns(3, (K, 5)), orthonormal_columns(4, (V, 5))
    S, G = (U * sigma) @ W.T, np.random.default_rng(6).standard_normal((2, K, V))
    found_sigma, found = gate_derivatives(jnp.asarray(S), jnp.asarray(G))
    np.testing.assert_allclose(found_sigma, sigma, atol=1e-7)

    def by_hand(U: np.ndarray) -> np.ndarray:
        return np.einsum("ki,rkv,wv,wi->ri", U, G, S, U)

    for value in np.unique(sigma):
        block = sigma == value
        rotated = U.copy()
        rotated[:, block] = U[:, block] @ orthonormal_columns(5, (int(block.sum()),) * 2)
        one, other = by_hand(U), by_hand(rotated)
        if block.sum() > 1 and value:
            assert np.abs(one - other).max() > 0.01
        for x in (one, other):
            np.testing.assert_allclose(found[:, block].sum(axis=-1), x[:, block].sum(axis=-1), atol=1e-12)
        for x in (one, other):  # what is cut together with the whole block, or left after it
            cut = sigma < value
            np.testing.assert_allclose(found[:, cut].sum(axis=-1), x[:, cut].sum(axis=-1), atol=1e-12)


def test_gates_are_of_the_directions_themselves():
    """sigma u^T G v of each, by LAPACK's SVD, for several states at once and both ways round."""
    for K, V in ((5, 7), (7, 5)):
        S = matrices_of_spectrum(1, [4.0, 2.0, 1.0, 0.5, 0.25], K, V, (3, 2))
        G = np.random.default_rng(2).standard_normal((2, *S.shape))
        U, sigma, W = np.linalg.svd(S, full_matrices=False)
        found_sigma, found = gate_derivatives(jnp.asarray(S), jnp.asarray(G))
        np.testing.assert_allclose(found_sigma, sigma, rtol=1e-10)
        expected = np.einsum("...i,...ki,r...kv,...iv->r...i", sigma, U, G, W)
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


def test_a_zero_state_has_no_gates():
    S, G = jnp.zeros((2, 5, 3)), jnp.ones((4, 2, 5, 3))
    sigma, found = gate_derivatives(S, G)
    assert not sigma.any() and not found.any() and found.shape == (4, 2, 3)
    assert not gate_derivatives(S.astype(jnp.float32), G.astype(jnp.float32))[1].any()


@pytest.mark.parametrize("scale", [1e-20, 1e-3, 1e20])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_a_state_scaled_up_whose_derivative_is_scaled_down_has_the_same_gates(scale, dtype):
    S = jnp.asarray(matrices_of_spectrum(1, [4.0, 2.0, 1.0], 5, 3, (2,)), dtype)
    G = jnp.asarray(np.random.default_rng(2).standard_normal((3, *S.shape)), dtype)
    sigma, found = gate_derivatives(S, G)
    scaled_sigma, scaled = gate_derivatives(S * dtype(scale), G / dtype(scale))
    tolerance = 1e-4 if dtype == jnp.float32 else 1e-10
    np.testing.assert_allclose(scaled, found, rtol=tolerance, atol=tolerance)
    if dtype == jnp.float64:  # the squares of 1e-20 and 1e20 are no f32
        np.testing.assert_allclose(scaled_sigma, sigma * scale, rtol=1e-10)


def test_all_gates_of_a_head_sum_to_the_gate_of_its_state(maps, product):
    for x in (maps, product):
        np.testing.assert_allclose(x.gate.sum("direction", skipna=False), x.head_state, rtol=1e-9, atol=1e-13)
        drawn = x.gate_sample.sum("direction", skipna=False)
        np.testing.assert_allclose(drawn, x.head_state_sample, rtol=1e-9, atol=1e-11)


def test_forgotten_states_have_no_gates():
    x = first_order(intervention=Zero())
    for name in ("sigma", "gate", "head_state", "effect"):
        assert (x[name] == 0).all(), name
    assert np.isfinite(x.beta_sensitivity).all() and (x.beta_sensitivity != 0).any()


@pytest.mark.parametrize("frozen", [False, True], ids=["exact", "frozen basis"])
def test_a_head_that_writes_nothing_has_no_gates_and_no_gap_where_it_is_cut(frozen):
    model, (head, V) = plain.fresh(QWEN), (1, QWEN.value_dim)
    values = slice(2 * QWEN.num_key_heads * QWEN.key_dim + head * V, None)
    weight = plain.linear_layers(model)[1].mixer.in_qkv
    weight[...] = weight[...].at[values].set(0)
    options = dict(samples=0, max_length=5 * SEGMENT, intervention=Truncate(2, method="svd"), frozen_basis=frozen)
    x = sensitivity(model, TEXT, SEGMENT, **options).isel(document=0)
    assert x.without_gap.values.tolist() == [1, 1, 1, 1]
    for name in ("gate", "sigma", "head_state"):
        assert (x[name].isel(layer=1, head=1) == 0).all(), name
        assert (x[name].isel(layer=1, head=0) != 0).any() and np.isfinite(x[name]).all(), name
    assert x.attrs["derivative"] == ("frozen basis" if frozen else "exact")


# Fisher information


def test_fisher_is_the_exact_one_within_the_error_of_its_samples(maps):
    picks = PICKS[QWEN]
    squares = picked(maps.gate_sample, picks) ** 2 / 22
    error = squares.std(axis=0) / np.sqrt(SAMPLES)
    exact = plain.fisher(plain.model(), TEXT, picks, EVERY)
    assert exact.max() > 0.01 and (error < 0.3 * exact).all()
    np.testing.assert_allclose(picked(maps.fisher, picks), squares.mean(axis=0), rtol=1e-10)
    assert (np.abs(squares.mean(axis=0) - exact) < 4 * error).all()


def test_fisher_of_a_heads_state_is_the_exact_one_within_the_error_of_its_samples(maps):
    exact = plain.fisher(plain.model(), TEXT, HEADS, EVERY)
    for (b, l, h, _), expected in zip(HEADS, exact, strict=True):
        at = dict(document=0, boundary=b, layer=l, head=h)
        squares = maps.head_state_sample.isel(at).values ** 2 / 22
        assert abs(squares.mean() - expected) < 4 * squares.std() / np.sqrt(SAMPLES)
        np.testing.assert_allclose(maps.head_state_fisher.isel(at), squares.mean(), rtol=1e-10)


def test_scores_of_sampled_labels_average_to_zero(maps):
    drawn = maps.gate_sample.values.reshape(SAMPLES, -1)
    error = drawn.std(axis=0) / np.sqrt(SAMPLES)
    assert (np.abs(drawn.mean(axis=0)) < 4.5 * error + 1e-12).all()


def test_fisher_and_effect_are_made_of_the_samples(maps, product):
    for x in (maps, product):
        for gate, stem in (("gate", ""), ("head_state", "head_state_"), ("head_output", "head_output_")):
            fisher = (x[gate + "_sample"] ** 2).mean("sample", skipna=False) / x.scored
            np.testing.assert_allclose(x[stem + "fisher"].transpose(*fisher.dims), fisher, rtol=1e-10)
            np.testing.assert_allclose(x[stem + "effect"], -x[gate] + x[stem + "fisher"] / 2, rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize("words_at_once", [8192, 4], ids=["one block", "blocks of four words"])
def test_labels_follow_the_predictive_distribution(monkeypatch, words_at_once):
    """With uniforms on a grid each word comes n p times, give or take one; drawn at random a chi-square is as expected."""
    monkeypatch.setattr("jaxdelta.nn.head.WORDS_AT_ONCE", words_at_once)
    model, n = plain.model(), 5000
    hidden = jnp.asarray(np.random.default_rng(3).standard_normal((2, 3, QWEN.width)))
    logs = plain.log_softmax(np.asarray(hidden) @ np.asarray(model.head_weight).T)
    p = np.exp(logs)
    sampled = jax.jit(
        lambda uniforms: expected_and_sampled(model, hidden, log_normalizer(model.head_weight, hidden), uniforms)
    )

    def counts(uniforms: np.ndarray) -> np.ndarray:
        mean, labels = sampled(np.broadcast_to(uniforms, (n, 2, 3)))
        np.testing.assert_allclose(mean, p @ np.asarray(model.head_weight), rtol=1e-10)
        assert labels.shape == (n, 2, 3)
        return (np.asarray(labels)[..., None] == np.arange(QWEN.vocab_size)).sum(axis=0)

    grid = counts((np.arange(n)[:, None, None] + 0.5) / n)
    assert np.abs(grid - n * p).max() <= 1
    drawn = counts(np.random.default_rng(4).random((n, 2, 3)))
    chi_square = ((drawn - n * p) ** 2 / (n * p)).sum(axis=-1)
    assert (chi_square < QWEN.vocab_size - 1 + 4 * np.sqrt(2 * (QWEN.vocab_size - 1))).all()


def test_labels_at_the_ends_of_the_unit_interval_are_words():
    model, hidden = plain.model(), jnp.asarray(np.random.default_rng(3).standard_normal((1, 2, QWEN.width)))
    uniforms = jnp.broadcast_to(jnp.array([0.0, 1.0])[:, None, None], (2, 1, 2))
    labels = expected_and_sampled(model, hidden, log_normalizer(model.head_weight, hidden), uniforms)[1]
    assert np.asarray(labels)[:, 0].tolist() == [[0, 0], [16, 16]]


def test_labels_follow_from_the_seed(maps):
    again = sensitivity(plain.model(), TEXT, SEGMENT, samples=SAMPLES)
    other = sensitivity(plain.model(), TEXT, SEGMENT, samples=SAMPLES, seed=1)
    assert maps.identical(again)
    np.testing.assert_array_equal(other.gate, maps.gate)
    assert (other.fisher != maps.fisher).all()


# Other losses


def test_the_divergence_from_the_untouched_model_has_no_first_order_and_the_same_fisher(maps):
    kl = sensitivity(plain.model(), TEXT, SEGMENT, samples=SAMPLES, loss="kl")
    for name in ("gate", "head_state", "head_output", "beta_sensitivity", "g_sensitivity"):
        assert (kl[name] == 0).all(), name
    for name in ("fisher", "head_state_fisher", "head_output_fisher", "gate_sample", "sigma"):
        np.testing.assert_array_equal(kl[name], maps[name])
    np.testing.assert_allclose(kl.effect, maps.fisher / 2, rtol=1e-12)
    assert kl.attrs["objective"] == "kl"


def test_a_difference_of_logits_has_gates_and_no_fisher():
    rng = np.random.default_rng(8)
    words, others = rng.integers(0, QWEN.vocab_size, (2, len(TEXT) - 1))
    x = sensitivity(plain.model(), TEXT, SEGMENT, loss=LogitDifference(words, others), scored=MASK)
    tokens = np.arange(len(TEXT) - 1)

    def difference(z: np.ndarray) -> np.ndarray:
        return ((z[:, tokens, words] - z[:, tokens, others]) * MASK).sum(axis=-1) / MASK.sum()

    expected = slopes(QWEN, PICKS[QWEN], difference)
    np.testing.assert_allclose(picked(x.gate, PICKS[QWEN]), expected, **TOLERANCE)
    z = plain.logits(plain.model(), TEXT)
    np.testing.assert_allclose(x.loss, difference(z[:1]), rtol=1e-10)
    assert not any("fisher" in name or "sample" in name for name in x.data_vars)
    np.testing.assert_array_equal(x.effect, -x.gate)
    assert x.attrs["unit"] == "logits" and "no Fisher" in x.attrs["fisher"]


def test_a_difference_of_logits_takes_one_word_for_all_tokens():
    model, n = plain.model(), len(TEXT) - 1
    one = sensitivity(model, TEXT, SEGMENT, loss=LogitDifference(3, 5))
    arrays = sensitivity(model, TEXT, SEGMENT, loss=LogitDifference(np.full(n, 3), np.full(n, 5)))
    assert one.identical(arrays)
    swapped = sensitivity(model, TEXT, SEGMENT, loss=LogitDifference(5, 3))
    np.testing.assert_allclose(swapped.gate, -one.gate, rtol=1e-10)


# Which tokens count, and whose


def test_scored_tokens_alone_count():
    x = first_order(scored=MASK)
    expected = slopes(QWEN, PICKS[QWEN], partial(mean_loss, scored=MASK))
    np.testing.assert_allclose(picked(x.gate, PICKS[QWEN]), expected, **TOLERANCE)
    assert x.scored.item() == MASK.sum()


def test_states_that_no_scored_token_reads_have_no_gates():
    """The last scored prediction is made by token 9, the last of the second segment."""
    scored = np.arange(len(TEXT) - 1) < 10
    x = first_order(scored=scored).isel(document=0)
    assert (x.gate[0] != 0).any() and (x.gate[1:] == 0).all()
    assert (x.head_output[:2] != 0).all() and (x.head_output[2:] == 0).all()
    assert (
        (x.beta_sensitivity[:10] != 0).any() and (x.beta_sensitivity[10:] == 0).all() and (x.g_sensitivity[10:] == 0).all()
    )


def test_masks_add_up():
    """Mean losses over two sets of tokens, weighted by their numbers, are that over both."""
    parts, whole = [first_order(scored=m) for m in (MASK, ~MASK)], first_order()
    for name in ("gate", "head_output", "beta_sensitivity", "g_sensitivity", "loss"):
        total = sum(part[name] * part.scored for part in parts) / whole.scored
        np.testing.assert_allclose(total.transpose(*whole[name].dims), whole[name], rtol=1e-9, atol=1e-13)


def test_documents_together_are_each_alone(product):
    for row, (text, mask) in enumerate(((TEXT, MASK), (SHORT, EVERY[: len(SHORT) - 1]))):
        one = sensitivity(plain.model(PRODUCT), text, SEGMENT, scored=mask, samples=0, max_length=5 * SEGMENT)
        both = product.isel(document=[row])
        for name in ("sigma", "gate", "head_state", "head_output", "beta_sensitivity", "g_sensitivity", "loss"):
            sizes = {d: slice(n) for d, n in one[name].sizes.items()}
            np.testing.assert_allclose(one[name], both[name].isel(sizes), rtol=1e-8, atol=1e-12, err_msg=name)


def test_what_lies_beyond_the_end_of_a_document_is_nan(product):
    """SHORT has 12 tokens: states are handed on at 5 and 10, and the third segment is its last."""
    ended = product.isel(document=1)
    for name in ("sigma", "gate", "fisher", "effect", "head_state", "head_state_fisher", "head_state_effect"):
        assert np.isfinite(ended[name][:2]).all() and np.isnan(ended[name][2:]).all(), name
    for name in ("head_output", "head_output_fisher", "head_output_effect"):
        assert np.isfinite(ended[name][:3]).all() and np.isnan(ended[name][3:]).all(), name
    for name in ("beta_sensitivity", "g_sensitivity"):
        assert np.isfinite(ended[name][:12]).all() and np.isnan(ended[name][12:]).all(), name
    for name in ("gate_sample", "head_state_sample"):
        assert np.isfinite(ended[name][:, :2]).all() and np.isnan(ended[name][:, 2:]).all(), name
    assert all(
        np.isfinite(product[name][0]).all()
        for name in ("sigma", "gate", "beta_sensitivity", "g_sensitivity", "head_output")
    )
    for tail in (tail_gate, tail_fisher, tail_effect):
        assert np.isfinite(tail(ended)[:2]).all() and np.isnan(tail(ended)[2:]).all()


def test_documents_without_a_boundary_are_left_out_and_named(tmp_path):
    texts = {"a": TEXT, "short": TEXT[: SEGMENT + 1], "shorter": TEXT[:2]}
    alone = first_order({"a": TEXT})
    assert alone.attrs["without_boundary"] == []
    with pytest.raises(ValueError, match="maps have no samples"):
        tail_fisher(alone)
    together = first_order(texts)
    assert together.attrs["without_boundary"] == ["short", "shorter"]
    xr.testing.assert_equal(together, alone)
    for _ in range(2):  # anew, and from the folder
        kept = sensitivity_maps(plain.model(), texts, segment=SEGMENT, samples=0, out=tmp_path / "out")
        assert kept.attrs["without_boundary"] == ["short", "shorter"]
        xr.testing.assert_equal(kept, alone)


def test_a_document_that_ends_with_a_segment_hands_no_state_on():
    x = first_order(TEXT[: 2 * SEGMENT])
    assert x.boundary.values.tolist() == [5] and x.sizes["segment"] == 2 and x.sizes["token"] == 10


def test_a_boundary_that_only_the_last_token_lies_behind_is_none():
    """Of 11 tokens nothing is predicted after the tenth; the shorter of two texts has NaN there."""
    assert first_order(TEXT[: 2 * SEGMENT + 1]).boundary.values.tolist() == [5]
    both = first_order([TEXT, TEXT[: 2 * SEGMENT + 1]])
    assert np.isfinite(both.gate[1, 0]).all() and np.isnan(both.gate[1, 1:]).all()
    assert both.below_rounding.dtype == bool and both.below_rounding[1, 1:].all()


# The dataset


def test_arrays_have_names_dimensions_and_coordinates(product):
    where = ("document", "boundary", "layer", "head")
    dims = {
        "sigma": (*where, "direction"),
        "gate": (*where, "direction"),
        "fisher": (*where, "direction"),
        "effect": (*where, "direction"),
        "gate_sample": ("sample", *where, "direction"),
        "head_state": where,
        "head_state_fisher": where,
        "head_state_effect": where,
        "head_state_sample": ("sample", *where),
        "head_output": ("document", "segment", "layer", "head"),
        "head_output_fisher": ("document", "segment", "layer", "head"),
        "head_output_effect": ("document", "segment", "layer", "head"),
        "head_output_sample": ("sample", "document", "segment", "layer", "head"),
        "below_rounding": (*where, "direction"),
        "beta_sensitivity": ("document", "token", "layer", "head", "step"),
        "g_sensitivity": ("document", "token", "layer", "head"),
        "loss": ("document",),
        "scored": ("document",),
    }
    assert {name: x.dims for name, x in product.data_vars.items()} == dims
    sizes = dict(document=2, boundary=4, segment=5, token=23, layer=1, head=2, direction=3, step=2, sample=2)
    assert dict(product.sizes) == sizes
    assert product.boundary.values.tolist() == [5, 10, 15, 20]
    assert product.document.values.tolist() == ["a", "b"]
    assert product.attrs["segment_tokens"] == SEGMENT and product.attrs["samples"] == 2
    assert product.attrs["effect"] == "-gate + fisher / 2"


def test_a_layer_is_the_models_and_its_index_among_linear_layers_stands_beside_it(maps):
    assert maps.layer.values.tolist() == [0, 2] and maps.linear_layer.values.tolist() == [0, 1]
    assert maps.sel(layer=2).linear_layer == 1
    assert maps.beta_sensitivity.dims == ("document", "token", "layer", "head")
    assert maps.document.values.tolist() == ["document_0"]


def test_progress_counts_both_directions(maps, steps):
    assert steps == [(done, 10) for done in range(1, 11)]


# Tails


def test_tails_are_sums_over_the_directions_cut(maps):
    first, second = tail_gate(maps), tail_fisher(maps)
    assert first.sizes["rank"] == 4 and first["rank"].values.tolist() == [0, 1, 2, 3]
    for rank in range(4):
        cut = dict(direction=slice(rank, None))
        expected = -maps.gate.isel(cut).sum("direction")
        np.testing.assert_allclose(first.isel(rank=rank), expected, rtol=1e-10, atol=1e-15)
        expected = (maps.gate_sample.isel(cut).sum("direction") ** 2).mean("sample") / 22
        np.testing.assert_allclose(second.isel(rank=rank), expected, rtol=1e-10, atol=1e-15)
    np.testing.assert_allclose(tail_effect(maps), first + second / 2, rtol=1e-12)


def test_nothing_kept_is_the_whole_state_and_full_rank_is_nothing_cut(maps):
    np.testing.assert_allclose(tail_gate(maps).isel(rank=0), -maps.head_state, rtol=1e-9, atol=1e-13)
    np.testing.assert_allclose(tail_fisher(maps).isel(rank=0), maps.head_state_fisher, rtol=1e-9, atol=1e-13)
    np.testing.assert_allclose(tail_effect(maps).isel(rank=0), maps.head_state_effect, rtol=1e-9, atol=1e-13)
    for tail in (tail_gate, tail_fisher, tail_effect):
        assert (tail(maps).isel(rank=3) == 0).all()


def test_one_direction_cut_is_that_direction(maps):
    np.testing.assert_allclose(tail_gate(maps).isel(rank=2), -maps.gate.isel(direction=2), rtol=1e-12)
    np.testing.assert_allclose(tail_fisher(maps).isel(rank=2), maps.fisher.isel(direction=2), rtol=1e-10)


def test_without_samples_tails_are_of_first_order():
    x = first_order()
    assert x.attrs["effect"] == "-gate" and "fisher" not in x
    np.testing.assert_array_equal(tail_effect(x), tail_gate(x))
    np.testing.assert_array_equal(x.effect, -x.gate)


# Errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(scored=np.zeros(22, bool)), "no token of document_0 is scored"),
        (dict(documents=TEXT[:SEGMENT]), "the longest document has 5 tokens: segments of 5 leave no boundary"),
        (dict(documents=TEXT[: SEGMENT + 1]), "the longest document has 6 tokens: segments of 5 leave no boundary"),
        (dict(documents=TEXT[:1], segment=1), "has 1 tokens; at least 2 are needed"),
        (dict(documents=[TEXT, TEXT[None]]), r"document_1 is int64 of shape \(1, 23\); expected one row of token ids"),
        (dict(documents=[]), "there are no documents"),
        (dict(scored=np.ones(23, bool)), r"scored of document_0 is bool\[23\]; expected bool\[22\]"),
        (dict(scored=np.ones(22, int)), r"scored of document_0 is int64\[22\]"),
        (dict(documents=[TEXT, SHORT], scored=[MASK]), "2 documents and 1 masks"),
        (dict(loss="kl", samples=0), "needs samples of at least 1"),
        (dict(samples=-1), "samples is -1"),
        (dict(segment=0), "segment is 0"),
        (dict(frozen_basis=True), "such as a truncation"),
        (dict(frozen_basis=True, intervention=Zero()), "such as a truncation"),
        (dict(documents=np.append(TEXT, 17)), "has the token id 17; the model's run from 0 to 16"),
        (dict(documents=np.append(TEXT, -1)), "has the token id -1"),
        (dict(documents=TEXT / 2), "is float64 of shape .* expected one row of token ids"),
        (dict(loss=LogitDifference(17, 0)), "run from 17 to 17; expected 0 to 16"),
        (dict(loss=LogitDifference(0, np.full(22, -1))), "run from -1"),
    ],
    ids=lambda x: x if isinstance(x, str) else ",".join(x),
)
def test_wrong_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        sensitivity(plain.model(), **(dict(documents=TEXT, segment=SEGMENT) | options))
