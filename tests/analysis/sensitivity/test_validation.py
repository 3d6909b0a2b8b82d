"""Scores of predictions whose worth is known, comparisons end to end, and importance against sums by hand."""

from dataclasses import astuple, replace

import numpy as np
import pytest
import xarray as xr

from jaxdelta.analysis.sensitivity import ablation
from jaxdelta.analysis.sensitivity.ablation import Direction
from jaxdelta.analysis.sensitivity.importance import head_importance
from jaxdelta.analysis.sensitivity.maps import sensitivity
from jaxdelta.analysis.sensitivity.validation import (
    CEILING,
    MEASURED,
    METRICS,
    STEPS,
    EffectComparison,
    draw_directions,
    from_rows,
    joined,
    known_directions,
    removals,
    scores,
)
from jaxdelta.documents import Document
from jaxdelta.runs.reverse import record
from jaxdelta.runs.segments import text_of
from tests.tiny import model, tokens

KINDS = ("linear", "attention", "linear")
LAYERS = [0, 2]
L, H, K, SEGMENT, SAMPLES = 2, 6, 8, 8, 3
TEXTS = tokens(30, 21)
DOCUMENTS = [Document(name, text) for name, text in zip("ab", TEXTS, strict=True)]
DRAWN = 5


def values(comparison, estimator="predicted", **options):
    """Values by metric."""
    return {s.metric: s.value for s in scores(comparison, **options) if s.estimator == estimator}


def comparison(predicted, measured):
    predicted, measured = (np.atleast_2d(np.asarray(x, np.float64)) for x in (predicted, measured))
    return EffectComparison("direction", [(0, 0, i) for i in range(measured.shape[1])], measured, {"predicted": predicted})


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
    """Predicted order 5 4 3 2 1 0, what truly matters most 5 and 2: one of two is hit; four are measured to have both."""
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


@pytest.mark.parametrize("measured", [[0.0, 0, 0], [1, np.nan, 2]], ids=["nothing measured", "one broken"])
def test_scores_of_nothing_and_of_broken_effects_are_nan(measured):
    assert np.isnan(list(values(comparison([1, 2, 3], measured)).values())).all()


def test_effects_that_cancel_have_no_sum_ratio():
    assert np.isnan(values(comparison([1, 2, 3], [1, -2, 1]))["sum_ratio"])


@pytest.mark.parametrize(("documents", "interval", "ceiling"), [(1, False, False), (2, False, True), (3, True, True)])
def test_intervals_need_three_documents_and_the_ceiling_two(documents, interval, ceiling):
    found = scores(comparison(effects(documents), effects(documents, seed=1)), halves=20)
    own = [s for s in found if s.estimator == "predicted"]
    smooth = [s for s in own if s.metric not in STEPS]
    assert all(np.isfinite([s.low, s.high]).all() == interval for s in smooth) and len(smooth) == 3
    assert all(s.low <= s.high for s in smooth) or not interval
    assert all(np.isnan([s.low, s.high]).all() and np.isfinite(s.value) for s in own if s.metric in STEPS)
    assert ({s.estimator for s in found} == {"predicted", CEILING}) == ceiling


def test_an_interval_covers_what_documents_do_not_agree_on():
    """Five documents say yes, three no: the correlation could be anything; documents that agree leave no doubt."""
    one = effects()
    mixed = np.concatenate([np.repeat(one, 5, axis=0), np.repeat(-one, 3, axis=0)])
    mixed = mixed + 3 * np.random.default_rng(2).standard_normal(mixed.shape)
    rho = next(s for s in scores(comparison(np.repeat(one, 8, axis=0), mixed)) if s.metric == "spearman")
    assert rho.high - rho.low > 0.5
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
    found = scores(comparison(predicted, measured), halves=30)
    again, other = (scores(comparison(predicted, measured), halves=30, seed=seed) for seed in (0, 1))
    assert str(found) == str(again) != str(other)
    mean = values(comparison(predicted.mean(0), measured.mean(0)))
    assert {s.metric: s.value for s in found if s.estimator == "predicted"} == pytest.approx(mean)


def test_the_interval_holds_the_number_itself_with_few_documents():
    """As a bootstrap's over six documents need not: an effect and its prediction, both with a document's own noise."""
    rng = np.random.default_rng(7)
    for _ in range(20):
        common = rng.standard_normal(24)
        measured, predicted = (common + 2 * rng.standard_normal((6, 24)) for _ in range(2))
        for s in scores(comparison(predicted, measured)):
            assert s.low <= s.value <= s.high or s.estimator == CEILING or s.metric in STEPS


def test_the_interval_is_that_of_the_jackknife():
    """Of the sum ratio, by hand: Student's t of 3 degrees is 3.182."""
    predicted, measured = effects(4, seed=1), effects(4, seed=2)
    found = next(s for s in scores(comparison(predicted, measured)) if s.metric == "sum_ratio")
    left = [np.delete(predicted, i, 0).sum() / np.delete(measured, i, 0).sum() for i in range(4)]
    reach = 3.1824463 * np.sqrt(3 / 4 * np.sum((left - np.mean(left)) ** 2))
    np.testing.assert_allclose([found.low, found.high], found.value + np.array([-reach, reach]), rtol=1e-6)


# Drawn directions


def test_directions_are_drawn_without_repetition_in_order():
    everything = [Direction(LAYERS[layer], *rest) for layer, *rest in np.ndindex(L, H, K)]
    drawn = draw_directions(everything, 20, seed=1)
    assert drawn == sorted(set(drawn))
    assert len(drawn) == 20
    assert drawn == draw_directions(everything, 20, seed=1) != draw_directions(everything, 20, seed=2)
    assert set(drawn) < set(everything)
    for count in (0, L * H * K, 1000):
        assert draw_directions(everything, count, seed=1) == everything


def test_directions_below_the_rounding_of_a_state_in_any_document_are_not_drawn(maps):
    below = xr.zeros_like(maps.below_rounding)
    below[0, 0, 1, 2, 5] = below[1, 0, 0, 0, 7] = below[0, 1, 1, 1, 1] = True  # the last at another boundary
    known = known_directions(maps.assign(below_rounding=below), SEGMENT)
    everything = {Direction(LAYERS[layer], *rest) for layer, *rest in np.ndindex(L, H, K)}
    assert everything - set(known) == {(2, 2, 5), (0, 0, 7)} and known == sorted(known)


# A comparison, end to end


@pytest.fixture(scope="module")
def maps():
    return sensitivity(model(layer_kinds=KINDS), dict(zip("ab", TEXTS, strict=True)), SEGMENT, samples=SAMPLES)


@pytest.fixture(scope="module")
def rows(maps):
    said = []
    found = removals(
        model(layer_kinds=KINDS), DOCUMENTS, maps, directions=DRAWN, worlds=DRAWN, progress=lambda *a: said.append(a)
    )
    assert said == [(2, 4), (4, 4)]  # directions and heads of each
    return found


@pytest.fixture(scope="module")
def compared(rows):
    return {c.kind: c for c in from_rows(rows)}


def test_predictions_are_those_of_the_maps_for_the_drawn_directions(compared, maps):
    """At the middle boundary of the shorter text, whose states are handed on twice: the first of them."""
    found = compared["direction"]
    drawn = draw_directions(known_directions(maps, SEGMENT), DRAWN, seed=0)
    assert [Direction(*unit) for unit in found.units] == drawn
    assert set(found.predicted) == {"first order", "|first order|", "fisher / 2", "first order + fisher / 2"}
    at = maps.sel(boundary=SEGMENT)
    for i, (layer, head, direction) in enumerate(found.units):
        here = at.sel(layer=layer, head=head, direction=direction)
        np.testing.assert_allclose(found.predicted["first order"][:, i], -here.gate, rtol=1e-6)
        np.testing.assert_allclose(found.predicted["|first order|"][:, i], abs(here.gate), rtol=1e-6)
        np.testing.assert_allclose(found.predicted["fisher / 2"][:, i], here.fisher / 2, rtol=1e-5)
        np.testing.assert_allclose(found.predicted["first order + fisher / 2"][:, i], here.effect, rtol=1e-4, atol=1e-8)


def test_measured_effects_are_the_ablations(compared):
    """Of the second, shorter text."""
    tape = record(model(layer_kinds=KINDS), text_of(model(layer_kinds=KINDS), TEXTS[1][None], segment=SEGMENT))
    mask = np.ones(20, bool)
    expected = ablation.direction_effects(
        model(layer_kinds=KINDS), tape, mask, SEGMENT, [Direction(*u) for u in compared["direction"].units], worlds=DRAWN
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
        np.testing.assert_array_equal(found.units, [(0,), (2,)])
    assert (np.abs(found.measured) > 1e-6).all()
    assert ("michel" in found.predicted) == kind.startswith("head")


def test_rows_name_documents_layers_of_the_model_and_boundaries_in_tokens_seen(rows, compared):
    assert set(rows["document"].to_pylist()) == {"a", "b"}
    assert set(rows["layer"].to_pylist()) == set(LAYERS)
    for row in rows.to_pylist():
        assert row["boundary"] == (SEGMENT if row["kind"] == "direction" else None)
        assert (row["head"] is None) == row["kind"].startswith("layer")
        assert (row["direction"] is None) == (row["kind"] != "direction")
    of_heads = [r["effect"] for r in rows.to_pylist() if (r["kind"], r["estimator"]) == ("head_state", MEASURED)]
    np.testing.assert_array_equal(np.reshape(of_heads, (2, L * H)), compared["head_state"].measured)


def test_measured_effects_stand_in_the_map_beside_their_estimates(rows, maps, compared):
    whole = joined(maps, rows)
    np.testing.assert_array_equal(whole.head_output_measured.values.reshape(2, L * H), compared["head_output"].measured)
    np.testing.assert_array_equal(whole.layer_state_measured, compared["layer_state"].measured)
    for unit, values in zip(compared["direction"].units, compared["direction"].measured.T, strict=True):
        at = dict(zip(("layer", "head", "direction"), unit, strict=True)) | {"boundary": SEGMENT}
        np.testing.assert_array_equal(whole.direction_measured.sel(at), values)
    assert int(whole.direction_measured.notnull().sum()) == 2 * DRAWN
    assert whole.attrs["validated"].startswith("yes") and maps.attrs["validated"].startswith("no")
    assert all({"long_name", "units"} <= set(x.attrs) for x in whole.variables.values())


def test_removals_are_kept_and_not_measured_again(maps, rows, tmp_path, monkeypatch):
    run = lambda: removals(  # noqa: E731
        model(layer_kinds=KINDS), DOCUMENTS, maps, directions=DRAWN, worlds=DRAWN, out=tmp_path / "removals"
    )
    assert run().equals(rows)
    (tmp_path / "removals" / "parts" / "0000-0001.parquet").unlink()
    measured = []
    found = ablation.direction_effects
    monkeypatch.setattr(ablation, "direction_effects", lambda *a, **o: measured.append(1) or found(*a, **o))
    assert run().equals(rows) and len(measured) == 1
    assert run().equals(rows) and len(measured) == 1


def test_other_directions_stand_beside_those_measured_before(maps, rows, tmp_path, monkeypatch):
    """Heads and layers are measured once, whatever number of directions is asked for; a short document is passed over."""
    documents = [*DOCUMENTS, Document("short", TEXTS[0][: SEGMENT + 1])]

    def run(directions):
        return removals(
            model(layer_kinds=KINDS), documents, maps, directions=directions, worlds=DRAWN, out=tmp_path / "removals"
        )

    assert run(DRAWN).equals(rows)
    heads, found = [], ablation.head_effects
    monkeypatch.setattr(ablation, "head_effects", lambda *a, **o: heads.append(1) or found(*a, **o))
    more = run(DRAWN + 2)
    assert not heads and len({row["direction"] for row in more.to_pylist()}) > 1
    of_heads = [row for row in rows.to_pylist() if row["kind"] != "direction"]
    assert [row for row in more.to_pylist() if row["kind"] != "direction"] == of_heads
    units = {(r["layer"], r["head"], r["direction"]) for r in more.to_pylist() if r["kind"] == "direction"}
    assert units == set(draw_directions(known_directions(maps, SEGMENT), DRAWN + 2, seed=0))
    monkeypatch.setattr(ablation, "direction_effects", None)  # nothing is left to measure
    assert run(DRAWN).equals(rows) and run(DRAWN + 2).equals(more)


@pytest.mark.parametrize("boundary", [0, 1, 24])
def test_a_boundary_that_some_document_lacks_is_refused(maps, boundary):
    with pytest.raises(ValueError, match=rf"boundary is {boundary}, in tokens seen; .* of every document are \[8, 16\]"):
        removals(model(layer_kinds=KINDS), DOCUMENTS, maps, boundary=boundary)


def test_maps_of_other_documents_and_of_an_intervention_are_refused(maps):
    with pytest.raises(ValueError, match=r"documents are \['b', 'a'\], the maps of \['a', 'b'\]"):
        removals(model(layer_kinds=KINDS), DOCUMENTS[::-1], maps)
    with pytest.raises(ValueError, match="maps are of a model under Truncate"):
        removals(model(layer_kinds=KINDS), DOCUMENTS, maps.assign_attrs(intervention="Truncate"))


def test_maps_of_another_loss_are_refused(maps):
    with pytest.raises(ValueError, match="maps are of 'kl'; only the next-token loss"):
        removals(model(layer_kinds=KINDS), DOCUMENTS, maps.assign_attrs(objective="kl"))


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


def test_every_variable_says_what_it_is_and_in_which_units(maps):
    for data in (maps, head_importance(maps)):
        for name, variable in data.variables.items():
            assert {"long_name", "units"} <= set(variable.attrs), name


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
