"""Scores of predictions whose worth is known, comparisons end to end, and importance against sums by hand."""

from dataclasses import astuple, replace

import numpy as np
import pytest
import xarray as xr

from jaxdelta.analysis import ablation
from jaxdelta.analysis.ablation import Direction
from jaxdelta.analysis.importance import head_importance, truncation_importance
from jaxdelta.analysis.sensitivity import sensitivity
from jaxdelta.analysis.validation import CEILING, METRICS, Comparison, compare, draw_directions, from_rows, scores, to_rows
from jaxdelta.reverse import record
from tests.tiny import model, tokens

KINDS = ("linear", "linear")
L, H, K, SEGMENT, SAMPLES = 2, 6, 8, 8, 3
TEXTS = tokens(30, 21)
DRAWN = 5


def values(comparison, estimator="predicted", **options):
    """Values by metric."""
    return {s.metric: s.value for s in scores(comparison, **options) if s.estimator == estimator}


def comparison(predicted, measured):
    predicted, measured = (np.atleast_2d(np.asarray(x, np.float64)) for x in (predicted, measured))
    return Comparison("direction", [(0, 0, i) for i in range(measured.shape[1])], measured, {"predicted": predicted})


# Scores


def effects(documents=1, units=40, seed=0):
    return np.random.default_rng(seed).exponential(size=(documents, units)) ** 2


@pytest.mark.parametrize("top", [None, 1, 7, 40])
def test_a_perfect_prediction_has_perfect_scores(top):
    """In the order of METRICS; k is a tenth of the units where it is not given."""
    found = values(comparison(effects(), effects()), top=top)
    assert list(found) == list(METRICS)
    np.testing.assert_allclose(list(found.values()), [1, 1, 1, 1, top or 4])


def test_a_reversed_order_has_the_worst_scores():
    measured = np.sort(effects())
    found = values(comparison(-measured, measured))
    np.testing.assert_allclose(list(found.values()), [-1, -1, 0, -1, 40])


def test_a_monotone_map_keeps_the_ranks_and_the_sum_ratio_tells_the_calibration():
    found = values(comparison(np.sqrt(effects()) + 2, effects()))
    assert (found["spearman"], found["precision"], found["cost"]) == (pytest.approx(1), 1, 4)
    assert found["pearson"] < 0.95
    assert found["sum_ratio"] == pytest.approx((np.sqrt(effects()) + 2).sum() / effects().sum())


def test_a_sum_without_a_unit_is_not_compared():
    one = replace(
        comparison(effects(5), effects(5)), predicted={"michel": effects(5, seed=1), "first order": effects(5, seed=1)}
    )
    found = {(s.estimator, s.metric): s for s in scores(one)}
    np.testing.assert_array_equal(astuple(found["michel", "sum_ratio"])[3:], np.nan)
    assert found["first order", "sum_ratio"].value > 0
    assert found["michel", "spearman"].value == found["first order", "spearman"].value


def test_precision_and_cost_count_units():
    """Predicted order 5 4 3 2 1 0, truly dear 5 and 2: one of two is hit; four are measured to have both."""
    found = values(comparison([0, 1, 2, 3, 4, 5], [0, 0.1, 8, 0.2, 0.3, 9]), top=2)
    assert (found["precision"], found["cost"]) == (0.5, 4)


@pytest.mark.parametrize("documents", [1, 2, 5])
@pytest.mark.parametrize("constant", ["predicted", "measured"])
def test_what_is_constant_has_no_correlation(documents, constant):
    """And no warning."""
    flat, other = np.ones((documents, 20)), effects(documents, 20)
    found = values(comparison(flat, other) if constant == "predicted" else comparison(other, flat))
    assert np.isnan([found["spearman"], found["pearson"]]).all()
    assert np.isfinite([found["precision"], found["sum_ratio"], found["cost"]]).all()


def test_effects_that_cancel_have_no_sum_ratio():
    assert np.isnan(values(comparison([1, 2, 3], [1, -2, 1]))["sum_ratio"])


@pytest.mark.parametrize(("documents", "interval", "ceiling"), [(1, False, False), (2, False, True), (3, True, True)])
def test_intervals_need_three_documents_and_the_ceiling_two(documents, interval, ceiling):
    found = scores(comparison(effects(documents), effects(documents, seed=1)), draws=20)
    own = [s for s in found if s.estimator == "predicted"]
    assert all(np.isfinite([s.low, s.high]).all() == interval for s in own)
    assert all(s.low <= s.high for s in own) or not interval
    assert ({s.estimator for s in found} == {"predicted", CEILING}) == ceiling


def test_an_interval_covers_what_documents_do_not_agree_on():
    """Half the documents say yes, half no: the correlation could be anything; documents that agree leave no doubt."""
    one = effects()
    mixed = np.repeat(np.concatenate([one, -one]), 4, axis=0)
    rho = next(s for s in scores(comparison(np.repeat(one, 8, axis=0), mixed)) if s.metric == "spearman")
    assert (rho.low, rho.high) == (pytest.approx(-1), pytest.approx(1))
    rho = next(
        s for s in scores(comparison(np.repeat(one, 8, axis=0), np.repeat(one, 8, axis=0))) if s.metric == "spearman"
    )
    assert rho.low == pytest.approx(1)


def test_the_ceiling_of_equal_documents_is_one_and_that_of_noise_is_not():
    same = np.repeat(effects(), 6, axis=0)
    found = values(comparison(same, same), CEILING)
    np.testing.assert_allclose(list(found.values()), [1, 1, 1, 1, 4])
    noise = np.random.default_rng(3).standard_normal((6, 400))
    assert abs(values(comparison(noise, noise), CEILING)["spearman"]) < 0.2


def test_scores_are_of_means_over_documents_and_the_same_each_time():
    predicted, measured = effects(4, seed=1), effects(4, seed=2)
    found = scores(comparison(predicted, measured), draws=30)
    assert (
        found
        == scores(comparison(predicted, measured), draws=30)
        != scores(comparison(predicted, measured), draws=30, seed=1)
    )
    mean = values(comparison(predicted.mean(0), measured.mean(0)))
    assert {s.metric: s.value for s in found if s.estimator == "predicted"} == pytest.approx(mean)


# Drawn directions


def test_directions_are_drawn_without_repetition_in_order():
    drawn = draw_directions(L, H, K, 20, seed=1)
    assert drawn == sorted(set(drawn))
    assert len(drawn) == 20
    assert drawn == draw_directions(L, H, K, 20, seed=1) != draw_directions(L, H, K, 20, seed=2)
    everything = [Direction(*i) for i in np.ndindex(L, H, K)]
    assert set(drawn) < set(everything)
    for count in (0, L * H * K, 1000):
        assert draw_directions(L, H, K, count, seed=1) == everything


# A comparison, end to end


@pytest.fixture(scope="module")
def maps():
    return sensitivity(model(layer_kinds=KINDS), TEXTS, SEGMENT, samples=SAMPLES)


@pytest.fixture(scope="module")
def compared(maps):
    said = []
    found = compare(
        model(layer_kinds=KINDS), TEXTS, maps, directions=DRAWN, worlds=DRAWN, progress=lambda *a: said.append(a)
    )
    assert said == [(1, 2), (2, 2)]
    return {c.kind: c for c in found}


def test_predictions_are_those_of_the_maps_for_the_drawn_directions(compared, maps):
    """At the middle boundary of the shorter text, whose states are handed on twice: the first of them."""
    found = compared["direction"]
    assert [Direction(*unit) for unit in found.units] == draw_directions(L, H, K, DRAWN, seed=0)
    assert set(found.predicted) == {"first order", "|first order|", "fisher / 2", "first order + fisher / 2"}
    at = maps.isel(boundary=0)
    for i, (layer, head, direction) in enumerate(found.units):
        here = at.isel(layer=layer, head=head, direction=direction)
        np.testing.assert_allclose(found.predicted["first order"][:, i], -here.gate, rtol=1e-6)
        np.testing.assert_allclose(found.predicted["|first order|"][:, i], abs(here.gate), rtol=1e-6)
        np.testing.assert_allclose(found.predicted["fisher / 2"][:, i], here.fisher / 2, rtol=1e-5)
        np.testing.assert_allclose(found.predicted["first order + fisher / 2"][:, i], here.effect, rtol=1e-4, atol=1e-8)


def test_measured_effects_are_the_ablations(compared):
    """Of the second, shorter text."""
    tape = record(model(layer_kinds=KINDS), TEXTS[1][None], lengths=np.array([21]), segment=SEGMENT)
    mask = np.ones(20, bool)
    expected = ablation.direction_effects(
        model(layer_kinds=KINDS), tape, mask, 0, [Direction(*u) for u in compared["direction"].units], worlds=DRAWN
    )
    np.testing.assert_allclose(compared["direction"].measured[1], expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("kind", ["head_output", "head_state", "layer_output", "layer_state"])
def test_heads_and_layers_are_compared_by_the_same_effects_as_importance(compared, maps, kind):
    found, importance = compared[kind], head_importance(maps)
    count = L * H if kind.startswith("head") else L
    assert found.measured.shape == (2, count) == (2, len(found.units))
    expected = importance[kind].values.reshape(2, count)
    np.testing.assert_allclose(found.predicted["first order + fisher / 2"], expected, rtol=1e-4, atol=1e-8)
    if kind == "layer_output":
        np.testing.assert_array_equal(found.units, [(0,), (1,)])
    assert (np.abs(found.measured) > 1e-6).all()
    assert ("michel" in found.predicted) == kind.startswith("head")


def test_rows_of_comparisons_and_back(compared):
    found = from_rows(to_rows(list(compared.values()), ["a", "b"]))
    for a, b in zip(found, compared.values(), strict=True):
        assert (a.kind, a.units) == (b.kind, [tuple(u) for u in b.units])
        np.testing.assert_array_equal(a.measured, b.measured)
        assert a.predicted.keys() == b.predicted.keys()
        for name in a.predicted:
            np.testing.assert_array_equal(a.predicted[name], b.predicted[name])


@pytest.mark.parametrize("boundary", [-1, 2, 9])
def test_a_boundary_that_some_document_lacks_is_refused(maps, boundary):
    with pytest.raises(ValueError, match=rf"boundary is {boundary}; every document has boundaries 0 to 1"):
        compare(model(layer_kinds=KINDS), TEXTS, maps, boundary=boundary)


def test_maps_of_another_loss_are_refused(maps):
    with pytest.raises(ValueError, match="maps are of 'kl'; only the next-token loss"):
        compare(model(layer_kinds=KINDS), TEXTS, maps.assign_attrs(objective="kl"))


# Importance


def by_hand(samples=4):
    """Maps of two documents, the second of which ends early, with numbers for which sums can be said."""
    rng = np.random.default_rng(8)
    dims = {"document": 2, "layer": L, "head": H}
    found = {"scored": ("document", [10, 4])}
    for name, along, size in (("head_output", "segment", 3), ("head_state", "boundary", 2)):
        shape = (2, size, L, H)
        first, drawn = rng.standard_normal(shape), rng.standard_normal((samples, *shape))
        first[1, -1], drawn[:, 1, -1] = np.nan, np.nan
        order = ("document", along, "layer", "head")
        found[name] = (order, first)
        found[f"{name}_sample"] = (("sample", *order), drawn)
    assert dims["layer"] == L
    return xr.Dataset(found, attrs={"unit": "nats a scored token"})


@pytest.mark.parametrize("part", ["output", "state"])
def test_importance_sums_over_the_text_within_a_sample_before_squares(part):
    maps = by_hand()
    found = head_importance(maps)
    first, drawn = maps[f"head_{part}"].values, maps[f"head_{part}_sample"].values
    for document in range(2):
        for layer in range(L):
            for head in range(H):
                expected = -np.nansum(first[document, :, layer, head])
                sums = np.nansum(drawn[:, document, :, layer, head], axis=1)
                expected += 0.5 * np.mean(sums**2) / [10, 4][document]
                np.testing.assert_allclose(found[f"head_{part}"][document, layer, head], expected)
            expected = -np.nansum(first[document, :, layer])
            sums = np.nansum(drawn[:, document, :, layer], axis=(1, 2))
            expected += 0.5 * np.mean(sums**2) / [10, 4][document]
            np.testing.assert_allclose(found[f"layer_{part}"][document, layer], expected)


def test_importance_without_samples_is_of_first_order():
    maps = by_hand().drop_vars(["head_output_sample", "head_state_sample"])
    np.testing.assert_allclose(head_importance(maps).head_state, -maps.head_state.sum("boundary"))


def test_michel_importance_is_of_unit_norm_within_a_layer():
    maps = by_hand()
    maps["head_output"] = maps.head_output.where(xr.DataArray([True, False], dims="layer"), 0)  # a layer of no effect
    michel = head_importance(maps).michel
    np.testing.assert_allclose((michel**2).sum("head"), [[1, 0], [1, 0]])
    ratio = michel[:, 0] / abs(maps.head_output.sum("segment"))[:, 0]
    np.testing.assert_allclose(ratio, np.repeat(ratio.values[:, :1], H, axis=1))


def test_importance_of_a_truncation_is_the_tails_sum(maps):
    found = truncation_importance(maps, 2)
    cut = slice(2, None)
    for document in range(2):
        first = -np.nansum(maps.gate.values[document, ..., cut], axis=(0, -1))
        tails = maps.gate_sample.values[:, document, ..., cut].sum(-1)
        expected = first + 0.5 * np.nansum(np.mean(tails**2, axis=0), axis=0) / len(TEXTS[document][1:])
        np.testing.assert_allclose(found[document], expected, rtol=1e-4, atol=1e-7)
    np.testing.assert_array_equal(truncation_importance(maps, K), 0)
