"""The road over documents: what is a document, which units are worked on, and what is found in a folder."""

import numpy as np
import pyarrow as pa
import pytest

import jaxdelta as jd
from jaxdelta.results.documents import Item, as_documents, rows_of, worked
from jaxdelta.results.folder import Results
from tests.tiny import model, text, tokens

A, B = tokens(20, 9)


@pytest.mark.parametrize(
    ("documents", "names"),
    [
        ([text(A), text(B)], ["document_0", "document_1"]),
        ([A, B], ["document_0", "document_1"]),
        ([A.tolist(), B.tolist()], ["document_0", "document_1"]),
        ({"x": text(A), "y": B}, ["x", "y"]),
        ([jd.Document("x", A), jd.Document("y", B)], ["x", "y"]),
        ((A, text(B)), ["document_0", "document_1"]),
    ],
    ids=["texts", "arrays of ids", "lists of ids", "a mapping", "Documents", "some of each"],
)
def test_documents_of_any_kind(documents, names):
    found = as_documents(documents, model())
    assert [d.name for d in found] == names
    for document, ids in zip(found, (A, B), strict=True):
        np.testing.assert_array_equal(document.tokens, ids)


def test_a_document_keeps_which_of_its_predictions_count():
    scored = np.arange(19) % 2 == 0
    (found,) = as_documents([jd.Document("x", A, scored)], model())
    np.testing.assert_array_equal(found.mask, scored)
    np.testing.assert_array_equal(found.head(8).mask, scored[:7])
    assert jd.Document("x", A).mask.all()
    assert len({jd.Document("x", A, s).sha256() for s in (None, scored, ~scored)}) == 3


def table(value):
    return pa.table({"value": [value, 10 * value]})


def items(*values):
    return [Item((f"key {v}", None), v, cost=v) for v in values]


class Work:
    """Gives a table for each value, and remembers what it was given."""

    def __init__(self, breaks_at=None):
        self.units, self.breaks_at = [], breaks_at

    def __call__(self, values, progress):
        if self.breaks_at in values:
            raise KeyboardInterrupt
        self.units.append(values)
        progress(1, 2)
        return [table(v) for v in values]


def test_parts_come_in_the_order_of_the_items_in_units_of_some(tmp_path):
    for results in (None, Results(tmp_path, {})):
        work = Work()
        found = worked(items(3, 1, 2), work, results=results, at_once=2)
        assert [t["value"][0].as_py() for t in found] == [3, 1, 2]
        assert work.units == [[3, 1], [2]]


def test_progress_counts_costs():
    told = []
    worked(items(4, 2, 3), Work(), at_once=2, progress=lambda *counts: told.append(counts))
    assert told == [(3, 9), (6, 9), (7, 9), (9, 9)]


def test_a_run_that_broke_off_goes_on_with_the_same_units(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        worked(items(1, 2, 3, 4, 5), Work(breaks_at=3), results=Results(tmp_path, {}), at_once=2)
    again = Work()
    rows = rows_of(items(1, 2, 3, 4, 5), again, results=Results(tmp_path, {}), at_once=2)
    assert again.units == [[3, 4], [5]]
    assert rows["value"].to_pylist() == [1, 10, 2, 20, 3, 30, 4, 40, 5, 50]


def test_more_is_added_and_fewer_are_found(tmp_path):
    worked(items(1, 2), Work(), results=Results(tmp_path, {}), at_once=2)
    more, none = Work(), Work()
    found = worked(items(5, 2, 4, 1), more, results=Results(tmp_path, {}), at_once=2)
    assert more.units == [[5, 4]]
    assert [t["value"][0].as_py() for t in found] == [5, 2, 4, 1]
    (found,) = worked(items(4), none, results=Results(tmp_path, {}), at_once=2)
    assert found.equals(table(4)) and none.units == []


def test_a_unit_that_was_planned_and_not_finished_gives_way_to_what_is_wanted(tmp_path):
    """Some of its items are not asked for any more, or it is larger than what fits now."""
    with pytest.raises(KeyboardInterrupt):
        worked(items(1, 2, 3), Work(breaks_at=1), results=Results(tmp_path, {}), at_once=3)
    for wanted, at_once, units in ((items(2), 3, [[2]]), (items(1, 2, 3), 2, [[1, 3]])):
        work = Work()
        worked(wanted, work, results=Results(tmp_path, {}), at_once=at_once)
        assert work.units == units
