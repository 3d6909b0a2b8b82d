"""Tables and figure of the costs of storage, from made-up rows."""

import pyarrow as pa
import pytest

from jaxdelta.analysis.storage import SCHEMA
from jaxdelta.report import storage as report
from jaxdelta.report.terminal import Terminal


@pytest.fixture
def rows():
    """Two documents and a form whose divergence triples from the second segment on; head 1 of layer 4 is worst."""
    found = []
    for document, loss in (("a", 3.0), ("b", 4.0)):
        for form, size, more, kl in (("untouched", 4096.0, 0.0, 0.0), ("int4", 520.0, 0.5, 0.01)):
            base = dict.fromkeys(SCHEMA.names) | dict(document=document, form=form, num_boundaries=5, bytes=size)
            for low, high, factor in ((None, None, 2), (0, 8, 0), (8, 16, 1), (16, 32, 3)):
                cells = dict(num_tokens=8, loss=loss + more, kl=factor * kl, agreement=1 - kl)
                found.append(base | cells | {"from": low, "to": high})
            for layer, head, x in ((0, 0, 0.1), (0, 1, 0.2), (4, 0, 0.3), (4, 1, 0.9)):
                found.append(base | dict(layer=layer, head=head, rounding=x, state_error=2 * x))
    return pa.Table.from_pylist(found, schema=SCHEMA)


def printed(sheet, capsys):
    Terminal().print(sheet)
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_costs_are_means_over_documents(rows, capsys):
    lines = printed(report.cost_table(rows), capsys)
    assert ["untouched", "4.0", "100%", "3.5000", "+0.00000", "0.00000", "0.00e+00", "100.00%"] in lines
    assert ["int4", "0.5", "13%", "4.0000", "+0.50000", "0.00000", "2.00e-02", "99.00%"] in lines


def test_growth_is_the_last_span_over_the_second(rows, capsys):
    assert ["int4", "1.0e-02", "3.0e-02", "3.00"] in printed(report.distance_table(rows), capsys)


def test_the_worst_head_is_named(rows, capsys):
    assert ["int4", "2.5e-01", "9.0e-01", "4.1", "5.0e-01", "1.8e+00", "4.1"] in printed(report.head_table(rows), capsys)


def test_files_are_written(rows, tmp_path):
    assert {file.name for file in report.write_figures(rows, tmp_path)} == {"storage.png", "storage.svg"}
    left, right = report.figure(rows).axes
    assert [line.get_ydata().tolist() for line in right.lines] == [[0.01, 0.03]]
    assert left.lines[0].get_xdata()[0] == pytest.approx(520 / 1024)
