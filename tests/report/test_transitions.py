"""Tables and figures of a trained model's ledger: what they state, and that they are written whole."""

import io
import xml.etree.ElementTree as ElementTree

import numpy as np
import pyarrow.csv as pa_csv
import pytest
from rich.console import Console

from jaxdelta.analysis.transitions.rows import transition_rows, window_rows
from jaxdelta.report import transitions as report
from tests.ledgers import ledger, random_text

WINDOWS = (1, 4, 16, 64)


@pytest.fixture(scope="module")
def made():
    """Two layers, model layers 1 and 2, of three heads; the second document has no window of 16."""
    return ledger([random_text(0, 40), random_text(1, 11)], WINDOWS)


def printed(table) -> str:
    """Lines without what stands before and after them, in a terminal of 80 columns."""
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table)
    said = console.export_text()
    assert "…" not in said
    return "\n".join(line.strip() for line in said.splitlines())


def cells(said: str, first: str) -> list[str]:
    """The row whose first column is ``first``."""
    (row,) = [line.split() for line in said.splitlines() if line.split()[:1] == [first] and "token" not in line]
    return row


def of_layers(rows) -> dict:
    return {row["layer"]: row for row in rows.to_pylist() if row["head"] is None}


def told(table) -> str:
    """What stands below a table, on one line."""
    return " ".join(printed(table).split())


def test_transitions_are_stated_by_layer_and_over_all(made):
    said = printed(report.tables(made)[0])
    rows = of_layers(transition_rows(made))
    for layer, name in ((1, "1"), (2, "2"), (None, "all")):
        row = rows[layer]
        found = cells(said, name)
        for at, quantity in ((1, "beta"), (4, "eigenvalue"), (8, "alpha")):
            assert found[at : at + 3] == [f"{row[f'{quantity}_{q}']:.2f}".replace("0.", ".") for q in (5, 50, 95)]
        assert found[7] == f"{row['negative']:.0%}"
        assert float(found[11]) == pytest.approx(max(row["defect"], row["whole_defect"]), rel=0.5)
        assert found[12:] == [f"{row['rank_numerical']:.2f}", f"{row['rank_effective']:.2f}"]
    assert "306 transitions of a token: n_h = 2, K = 8, 2 documents" in said
    assert "so rho = alpha, the pin" in said.replace("\n", " ")
    assert "12 transitions taken whole as K x K" in said.replace("\n", " ")
    assert "turn a plane" in said.replace("\n", " ")


def test_products_are_stated_by_layer_at_windows_that_there_are(made):
    said = printed(report.tables(made)[1])
    rows = {(row["window"], row["layer"]): row for row in window_rows(made).to_pylist() if row["head"] is None}
    for layer, name in ((1, "1"), (2, "2"), (None, "all")):
        found = cells(said, name)[1:]
        assert len(found) == 8
        for at, w in ((0, 1), (4, 16)):
            row = rows[w, layer]
            assert found[at : at + 2] == [f"{row['frozen_numerical']:.1f}", f"{row['frozen_0.1']:.1f}"]
            assert float(found[at + 2]) == pytest.approx(row["kept_smallest"], rel=0.5, abs=1e-14)
            assert found[at + 3] == f"{row['kept_largest']:.3f}"
    assert "256 tokens" not in said


def test_products_are_stated_by_length(made):
    said = printed(report.tables(made)[2])
    for row in (row for row in window_rows(made).to_pylist() if row["layer"] is None):
        found = cells(said, str(row["window"]))
        assert found[1:3] == [str(row["windows"]), str(max(0, 8 - 2 * row["window"]))]
        frozen = [f"{row[name]:.1f}" for name in ("frozen_numerical", "frozen_0.01", "frozen_0.1", "forgotten")]
        assert found[3:7] == frozen
        assert float(found[7]) == pytest.approx(row["log_decay"], abs=0.051)
        shares = [row[f"{kind}_{name}"] for kind in ("active", "forgotten") for name in ("overlap", "apart", "chance")]
        assert found[8:] == ["-" if x is None else f"{100 * x:.0f}" for x in shares]


def test_documents_too_short_for_a_window_are_told(made):
    assert "Documents too short for a window: 1 of 2 for 16, 2 of 2 for 64." in told(report.tables(made)[2])
    alone = ledger([random_text(0, 40)], (1, 4))
    assert "too short" not in told(report.tables(alone)[2])


def test_a_pin_that_does_not_hold_is_told():
    expanding = ledger([random_text(0, 20, n=1, largest=3.0)], (1, 4))
    count = transition_rows(expanding).to_pylist()[0]["expanding"]
    assert count > 10
    assert f"{count} transitions expand (beta |k|² beyond [0, 2])" in told(report.tables(expanding)[0])
    reached = ledger([random_text(0, 20, n=3, K=3)], (1, 4))
    assert "n_h = 3 factors reach all K = 3 directions, so nothing pins rho to alpha" in told(report.tables(reached)[0])
    one = ledger([random_text(0, 20, n=1)], (1, 4))
    assert "turn a plane" not in told(report.tables(one)[0])


@pytest.mark.parametrize("K", [2, 8])
def test_figures_are_written_as_png_and_svg(made, tmp_path, K):
    """The second ledger is of one token, without decay: no pair of windows, one length, alpha = 1."""
    (k, beta, g), *_ = random_text(3, 1, K=K)
    for name, found in (("made", made), ("little", ledger([[(k, beta, 0 * g)]], (1, 4)))):
        (tmp_path / name).mkdir()
        files = report.write_figures(tmp_path / name, found)
        assert [file.name for file in files] == [
            f"{figure}.{suffix}" for figure in ("distributions", "products", "angles") for suffix in ("png", "svg")
        ]
        for file in files:
            if file.suffix == ".svg":
                ElementTree.parse(file)
            else:
                assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_figure_of_products_shows_the_rows(made):
    rows = [row for row in window_rows(made).to_pylist() if row["layer"] is None]
    spectra, dims = report.spectrum_figure(made).axes
    assert len(spectra.lines) == len(rows) == 3
    for line, row in zip(spectra.lines, rows, strict=True):
        at = made.sel(window=row["window"])
        by_document = at.kept.mean(("layer", "head")).fillna(0).values
        count = at["count"].values
        np.testing.assert_allclose(line.get_ydata(), count @ by_document / count.sum())
    shown = {line.get_label(): line.get_ydata() for line in dims.lines}
    np.testing.assert_allclose(shown["frozen, to K eps(f32)"], [row["frozen_numerical"] for row in rows])
    np.testing.assert_allclose(shown["K - $n_h$ tokens, bound"], [6, 0, 0])


def test_medians_of_histograms_lie_in_their_bins():
    edges = np.linspace(0, 1, 5)
    assert report._median(np.array([0, 4, 0, 0]), edges) == pytest.approx(0.375)
    assert report._median(np.array([1, 0, 0, 3]), edges) == pytest.approx(0.75 + 0.25 / 3)


def test_rows_are_written_for_all_heads_each_layer_and_each_head(made, tmp_path):
    files = report.write_rows(tmp_path, made)
    assert [file.name for file in files] == ["transitions.csv", "windows.csv"]
    for file, rows in zip(files, (transition_rows(made), window_rows(made)), strict=True):
        found = pa_csv.read_csv(file)
        assert found.column_names == rows.column_names
        assert len(found) == len(rows) == (9 if file.name == "transitions.csv" else 27)
    assert found["frozen_0.1"].to_pylist() == pytest.approx(window_rows(made)["frozen_0.1"].to_pylist())
