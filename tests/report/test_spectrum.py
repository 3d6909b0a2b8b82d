"""Tables, rows and figures of spectra, from a made-up dataset."""

import numpy as np
import pyarrow.csv as pa_csv
import pytest
import xarray as xr

from jaxdelta.analysis.labels import labelled
from jaxdelta.analysis.spectrum import DESCRIPTIONS, MEASURES, Sizes, measures
from jaxdelta.report import spectrum as report
from jaxdelta.report.terminal import Terminal


@pytest.fixture
def data():
    """Two documents, the second shorter; layers 0 and 3; head 1 of layer 3 is empty in the first document."""
    rng = np.random.default_rng(0)
    sigma = np.sort(rng.random((2, 2, 2, 2, 5)))[..., ::-1].copy()  # document, at, layer, head, direction
    sigma[0, :, 1, 1] = 0
    sigma[1, 0] = np.nan
    axes = ("document", "at", "layer", "head")
    sizes = Sizes(np.array([[5], [5]]), np.full((2, 1), 8 * 2.0**-23))
    found = {"tokens": (axes[:2], np.array([[16.0, 21.0], [np.nan, 9.0]])), "sigma": ((*axes, "direction"), sigma)}
    found |= {name: (axes, x.reshape(2, 2, 2, 2)) for name, x in measures(sigma.reshape(4, 2, 2, 5), sizes).items()}
    coords = {
        "document": ["a", "b"],
        "at": ["16", "end"],
        "layer": [0, 3],
        "linear_layer": ("layer", [0, 1]),
        "head": [0, 1],
    }
    return labelled(xr.Dataset(found, coords | {"direction": np.arange(5)}), DESCRIPTIONS)


def printed(sheet, capsys):
    Terminal().print(sheet)
    return capsys.readouterr().out


def test_the_table_has_every_measure_and_names_empty_states(data, capsys):
    said = printed(report.measure_table(data), capsys)
    assert "States of 4 heads after 9 to 21 tokens, 2 documents" in said
    for name in MEASURES:
        assert name.replace("_", " ").split()[0] in said
    flat = " ".join(said.split())
    assert "2 states are empty and left out: layer 3 head 1 of a at 16, layer 3 head 1 of a at end." in flat


def test_the_table_by_layer_has_the_models_layers(data, capsys):
    said = printed(report.layer_table(data), capsys)
    assert [line.split()[0] for line in said.splitlines() if line.split() and line.split()[0].isdigit()] == ["0", "3"]


def test_a_row_for_every_head_at_every_place_that_is_reached(data):
    rows = report.rows(data).to_pylist()
    assert len(rows) == 3 * 4
    assert {(r["document"], r["tokens"], r["is_end"]) for r in rows} == {
        ("a", 16, False),
        ("a", 21, True),
        ("b", 9, True),
    }
    row = next(r for r in rows if (r["document"], r["layer"], r["head"]) == ("b", 3, 1))
    assert row["linear_layer"] == 1
    expected = data.sel(document="b", at="end", layer=3, head=1)
    assert {name: row[name] for name in MEASURES} == {name: expected[name].item() for name in MEASURES}


def test_files_are_written_and_read_by_others(data, tmp_path):
    files = report.write(data, tmp_path)
    assert {file.name for file in files} == {
        "heads.csv",
        "heads.parquet",
        *(f"{n}.{s}" for n in ("spectra", "effective_rank") for s in ("png", "svg")),
    }
    assert pa_csv.read_csv(tmp_path / "heads.csv").num_rows == 12


def test_spectra_are_drawn_for_heads_that_have_a_state(data):
    panels = [axes for axes in report.spectra_figure(data).axes if axes.get_visible()]
    assert [axes.get_title() for axes in panels] == ["layer 0", "layer 3"]
    assert [len(axes.lines) for axes in panels] == [2, 2]
    first = data["sigma"].sel(at="end", layer=0, head=1).values
    expected = np.median(first / first[:, :1], axis=0)
    np.testing.assert_allclose(panels[0].lines[1].get_ydata(), expected)


def test_a_trace_marks_starts_and_the_end_of_the_trained_context():
    rank = np.random.default_rng(0).random((1, 5, 2, 2, 3))
    axes = ("document", "token", "step", "layer", "head")
    found = {"effective_rank": (axes, rank), "starts": (("document", "start"), [[0.0, 6.0]])}
    coords = {"document": ["packed"], "token": 2 * np.arange(5), "layer": [1, 4]}
    figure = report.trace_figure(xr.Dataset(found, coords, {"context": 7}))
    panel = figure.axes[1]
    assert panel.get_title() == "layer 4"
    heads, marks = panel.lines[:3], panel.lines[3:]
    np.testing.assert_array_equal(heads[1].get_xdata(), np.arange(0, 10, 2)[:, None].repeat(2, 1).ravel() + [0, 0.5] * 5)
    np.testing.assert_array_equal(heads[1].get_ydata(), rank[0, :, :, 1, 1].ravel())
    assert [mark.get_xdata()[0] for mark in marks] == [6, 7]
