"""Table, rows and figure of reads, from a made-up dataset."""

import numpy as np
import pytest
import xarray as xr

from jaxdelta.analysis.reads import of_boundary
from jaxdelta.report import reads as report
from jaxdelta.report.terminal import Terminal


@pytest.fixture
def data():
    """One document, two boundaries, layers 0 and 3 of two heads; nothing is read of head 1 of layer 3."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(2):
        q = rng.standard_normal((2, 2, 7, 3))
        q[1, 1] = 0
        O = np.einsum("lhtk,lhtm->lhkm", q, q)
        found.append(of_boundary(rng.standard_normal((2, 2, 3, 4)), O, np.full((2, 2), 30.0)))
    axes = ("document", "boundary", "layer", "head", "direction")
    arrays = {x: np.stack([f[x] for f in found])[None] for x in found[0]}
    coords = {"document": ["a"], "boundary": [8, 16], "layer": [0, 3], "linear_layer": ("layer", [0, 1]), "head": [0, 1]}
    return xr.Dataset({x: (axes[: v.ndim], v) for x, v in arrays.items()}, coords | {"direction": np.arange(3)})


def test_directions_are_counted_by_what_they_give(data):
    made = data.copy(deep=True)
    made["contribution"][:] = [1.0, 97.0, 2.0]
    made["contribution"][0, 0, 0, 0] = 0.0
    found = report.directions_for(made, 0.98)
    assert np.isnan(found.values[0, 0, 0, 0])
    assert set(found.values[0, 1].ravel()) == {2}


def test_the_table_has_a_row_a_layer(data, capsys):
    Terminal().print(report.table(data))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines if len(line) == 8] == ["0", "3"]


def test_a_row_for_every_head_at_every_boundary(data):
    rows = report.rows(data).to_pylist()
    assert len(rows) == 8
    row = rows[-1]
    assert (row["document"], row["boundary"], row["layer"], row["linear_layer"], row["head"]) == ("a", 16, 3, 1, 1)
    assert row["carried"] == 0
    assert np.isnan(row["directions_read"])


def test_files_are_written(data, tmp_path):
    assert {file.name for file in report.write(data, tmp_path)} == {"heads.csv", "heads.parquet", "reads.png", "reads.svg"}
    panels = [axes for axes in report.figure(data).axes if axes.get_visible()]
    assert [axes.get_title() for axes in panels] == ["layer 0", "layer 3"]
    assert [line.get_label() for line in panels[0].lines] == ["stored", "read"]
