"""Tables and figures of sensitivities: what they state, and that they are written whole."""

import io
import xml.etree.ElementTree as ElementTree

import numpy as np
import pyarrow.csv as pa_csv
import pytest
import xarray as xr
from rich.console import Console

from jaxdelta.analysis.sensitivity.validation import METRICS, EffectComparison, Score, scores
from jaxdelta.report import sensitivity as report

DOCUMENTS, L, H, K = 3, 2, 4, 5
LAYERS = [1, 3]


def made(samples=4, seed=0):
    """Maps of random numbers over two linear layers, 1 and 3 of the model; the last document ends a segment early."""
    rng = np.random.default_rng(seed)
    found = {"scored": ("document", [20, 20, 12])}
    for name, along, size in (("head_output", "segment", 3), ("head_state", "boundary", 2), ("gate", "boundary", 2)):
        inner, dims = ((K,), ("direction",)) if name == "gate" else ((), ())
        shape, dims = (DOCUMENTS, size, L, H, *inner), ("document", along, "layer", "head", *dims)
        first, drawn = rng.standard_normal(shape), rng.standard_normal((samples, *shape))
        first[2, -1], drawn[:, 2, -1] = np.nan, np.nan
        found[name] = (dims, 0.01 * first)
        if samples:
            found[f"{name}_sample"] = (("sample", *dims), drawn)
    coords = {
        "layer": LAYERS,
        "linear_layer": ("layer", np.arange(L)),
        "document": list("abc"),
        "head": np.arange(H),
        "direction": np.arange(K),
    }
    return xr.Dataset(found, coords, {"unit": "nats a scored token"})


def compared(documents=DOCUMENTS, samples=4):
    """A comparison of each kind, predicted with some noise."""
    rng = np.random.default_rng(1)
    found = []
    directions, heads = [(1, 0, i) for i in range(30)], [(layer, head) for layer in LAYERS for head in range(H)]
    layers = [(layer,) for layer in LAYERS]
    kinds = {"direction": directions, "head_output": heads, "head_state": heads, "layer_output": layers}
    for kind, units in kinds.items():
        measured = rng.standard_normal((documents, len(units)))
        predicted = {"first order": measured + 0.5 * rng.standard_normal(measured.shape)}
        if samples:
            predicted["first order + fisher / 2"] = measured + 0.1 * rng.standard_normal(measured.shape)
        found.append(EffectComparison(kind, units, measured, predicted))
    return found


def scored(comparisons):
    return [s for c in comparisons for s in scores(c, halves=20)]


def printed(table):
    """Lines without what stands before and after them."""
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table)
    return "\n".join(line.strip() for line in console.export_text().splitlines())


# Tables


def test_a_score_table_has_a_row_for_each_estimator_and_a_column_for_each_metric():
    comparison = compared()[1]
    found = scores(comparison, halves=20)
    said = printed(report.score_table(found, comparison))
    for estimator in ("first order", "first order + fisher / 2", "measured, other half"):
        row = next(line for line in said.splitlines() if line.startswith(f"{estimator}  "))
        values = [s.value for s in found if s.estimator == estimator]
        assert row.split()[-len(METRICS) :] == [*(f"{v:.2f}" for v in values[:-1]), f"{values[-1]:.0f}"]
    assert "a head's output, whole text" in said
    assert "8 units, 3 documents" in said
    assert said.count("[") == 2 * 3 + len(METRICS)  # none of metrics that jump, but for the halves


def test_a_score_that_does_not_exist_is_a_dash():
    comparison = EffectComparison("direction", [(i,) for i in range(5)], np.ones((1, 5)), {"p": np.ones((1, 5))})
    said = printed(report.score_table(scores(comparison), comparison))
    row = next(line for line in said.splitlines() if line.startswith("p "))
    assert row.split()[1:] == ["-", "-", "1.00", "1.00", "1"]
    assert "[" not in said


@pytest.mark.parametrize(("part", "which"), [("output", 0), ("state", 1)])
def test_heads_are_in_the_order_of_each_estimate_by_their_layer_in_the_model(part, which):
    maps = made()
    importance = report.head_importance(maps).mean("document")
    said = printed(report.head_tables(maps, top=3)[which])
    rows = [line.split() for line in said.splitlines() if line.split() and line.split()[0].isdigit()]
    values = importance[f"head_{part}"].values
    for row, (layer, head) in zip(
        rows, zip(*np.unravel_index(np.argsort(-values, axis=None)[:3], (L, H)), strict=True), strict=True
    ):
        at = importance.isel(layer=layer, head=head)
        assert row == [
            str(LAYERS[layer]),
            str(head),
            f"{float(at.head_output):+.5f}",
            f"{float(at.head_state):+.5f}",
            f"{float(at.michel):.3f}",
        ]


def test_measured_effects_stand_beside_the_estimates_in_tables_and_rows(tmp_path):
    measured = xr.DataArray(np.random.default_rng(3).standard_normal((DOCUMENTS, L, H)), dims=("document", "layer", "head"))
    maps = made().assign(head_output_measured=measured, head_state_measured=2 * measured)
    _, csv = report.write_heads(maps, tmp_path)
    rows = pa_csv.read_csv(csv).to_pylist()
    assert len(rows) == (DOCUMENTS + 1) * L * H
    importance = report.head_importance(maps)
    for row in rows:
        of = "mean" if row["document"] in (None, "") else row["document"]
        at = (importance.mean("document") if of == "mean" else importance.sel(document=of)).sel(
            layer=row["layer"], head=row["head"]
        )
        m = (measured.mean("document") if of == "mean" else measured[list("abc").index(of)])[
            row["linear_layer"], row["head"]
        ]
        assert LAYERS[row["linear_layer"]] == row["layer"]
        np.testing.assert_allclose(
            [row["output_effect"], row["state_effect"], row["output_measured"], row["state_measured"]],
            [at.head_output, at.head_state, m, 2 * m],
        )
    best = max((r for r in rows if r["document"] in (None, "")), key=lambda r: r["state_effect"])
    first = next(
        line.split() for line in printed(report.head_tables(maps)[1]).splitlines() if line.split()[:1] in (["1"], ["3"])
    )
    assert first == [
        str(best["layer"]),
        str(best["head"]),
        *(f"{best[n]:+.5f}" for n in ("output_effect", "output_measured", "state_effect", "state_measured")),
        f"{best['michel']:.3f}",
    ]


def test_a_head_table_without_scores_says_that_it_is_not_validated():
    for trust in (None, report.trust_line([])):
        said = " ".join(printed(report.head_tables(made(), trust=trust)[0]).split())
        assert report.NOT_VALIDATED in said
        assert "Validated against" not in said


def test_a_head_table_with_scores_states_the_numbers():
    found = scored(compared())
    by = {s.metric: s for s in found if (s.kind, s.estimator) == ("head_output", report.DEFAULT)}
    said = " ".join(printed(report.head_tables(made(), trust=report.trust_line(found))[1]).split())
    rho = by["spearman"]
    assert (
        f"Validated against measured removal of outputs: Spearman {rho.value:.2f} [{rho.low:.2f}, {rho.high:.2f}]" in said
    )
    assert f"predicted over measured, summed, {by['sum_ratio'].value:.2f}; of states: Spearman" in said
    assert "Not validated" not in said


def test_one_document_is_stated_without_an_interval():
    said = report.trust_line(scored(compared(documents=1)))
    assert said.startswith("Validated")
    assert "nan" not in said
    assert "[" not in said


def test_estimates_without_samples_are_stated_by_the_first_order():
    found = scored(compared(samples=0))
    rho = next(s for s in found if (s.kind, s.estimator, s.metric) == ("head_output", "first order", "spearman"))
    assert f"Spearman {rho.value:.2f} [" in report.trust_line(found)


def test_scores_are_written_a_row_each(tmp_path):
    found = [*scored(compared()), Score("direction", "p", "spearman", float("nan"), float("nan"), float("nan"))]
    rows = pa_csv.read_csv(report.write_scores(found, tmp_path)).to_pylist()
    assert (tmp_path / "validation.csv").exists()
    assert len(rows) == len(found)
    assert rows[0] == {name: getattr(found[0], name) for name in ("kind", "estimator", "metric", "value", "low", "high")}


# Figures


@pytest.mark.parametrize(("documents", "samples"), [(0, 4), (1, 0), (3, 4)])
def test_figures_are_written_as_png_and_svg(tmp_path, samples, documents):
    comparisons = compared(documents, samples) if documents else []
    files = report.write_figures(tmp_path, made(samples), comparisons)
    files += report.write_validation(tmp_path, comparisons, scored(comparisons))[:-1] if documents else []
    names = ["heads", "by_rank", *(["validation"] if documents else [])]
    assert [file.name for file in files] == [f"{name}.{suffix}" for name in names for suffix in ("png", "svg")]
    for file in files:
        if file.suffix == ".svg":
            assert ElementTree.parse(file).getroot().tag.endswith("svg")
        else:
            assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_measured_maps_stand_below_the_estimates_of_the_same_layers():
    maps = made()
    assert len([a for a in report.head_figure(maps).axes if a.get_title()]) == 3
    axes = [a for a in report.head_figure(maps, compared()).axes if a.get_title()]
    assert [a.get_title().split(": ")[-1] for a in axes].count("measured") == 2
    for axis in axes:
        assert [label.get_text() for label in axis.get_yticklabels()] == ["1", "3"]
    measured = next(a for a in axes if a.get_title() == "output removed: measured")
    np.testing.assert_allclose(measured.images[0].get_array(), compared()[1].measured.mean(0).reshape(L, H))


@pytest.mark.parametrize("samples", [4, 0])
def test_the_curve_by_rank_ends_at_zero_with_all_directions(samples):
    axes = report.rank_figure(made(samples)).axes[0]
    curves = [line for line in axes.lines if len(line.get_xdata()) == K + 1]
    assert len(curves) == L * (2 if samples else 1)
    assert all(line.get_ydata()[-1] == 0 for line in curves)
    assert sum(line.get_label().startswith("layer") for line in curves) == L


def test_effects_of_nothing_can_be_drawn(tmp_path):
    zero = [
        EffectComparison(c.kind, c.units, 0 * c.measured, {n: 0 * x for n, x in c.predicted.items()}) for c in compared()
    ]
    maps = made()
    maps = maps.map(lambda x: 0 * x, keep_attrs=True).assign(scored=maps.scored)
    assert len(report.write_figures(tmp_path, maps, zero)) == 4
    assert len(report.write_validation(tmp_path, zero, scored(zero))) == 3
