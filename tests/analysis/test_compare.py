"""Worlds of interventions side by side, and tables and datasets that speak one language."""

import numpy as np
import pyarrow as pa
import pytest

import jaxdelta as jd
from jaxdelta.analysis.compare import differences
from jaxdelta.analysis.transitions.rows import transition_rows
from tests.tiny import model, tokens

SEGMENT = 16
KINDS = ("linear", "attention", "linear")
DOCUMENTS = dict(zip("ab", tokens(50, 36), strict=True))
WORLDS = {"rank 2": jd.Truncate(2, method="svd"), "noise": jd.Noise(), "nothing": jd.NoOp()}


def net():
    return model(layer_kinds=KINDS)


@pytest.fixture(scope="module")
def rows():
    return jd.compare(net(), DOCUMENTS, WORLDS, segment=SEGMENT)


def test_a_row_for_every_document_and_world_the_untouched_first(rows):
    found = [(row["document"], row["intervention"]) for row in rows.to_pylist()]
    assert found == [(d, w) for d in "ab" for w in ("untouched", *WORLDS)]
    losses = {place: row["loss"] for place, row in zip(found, rows.to_pylist(), strict=True)}
    for document, text in DOCUMENTS.items():
        alone = jd.run(net(), text[None], segment=SEGMENT, intervention=jd.Noise()).losses.mean(dtype=np.float64)
        np.testing.assert_allclose(losses[document, "noise"], alone, rtol=1e-6)
        assert losses[document, "nothing"] == losses[document, "untouched"]


def test_a_rank_is_that_of_a_sweep(rows):
    swept = jd.sweep(net(), DOCUMENTS, ranks=(2,), segment=SEGMENT, method="svd", batch=1)
    cut = [row["loss"] for row in swept.to_pylist() if row["rank"] == 2]
    expected = [row["loss"] for row in rows.to_pylist() if row["intervention"] == "rank 2"]
    np.testing.assert_allclose(cut, expected, rtol=1e-6)


def test_differences_are_paired_by_document(rows):
    untouched, *worlds = differences(rows)
    assert (untouched.world, untouched.difference) == (("untouched",), 0.0)
    by_world = {row["intervention"]: [] for row in rows.to_pylist()}
    for row in rows.to_pylist():
        by_world[row["intervention"]].append(row["loss"])
    for one in worlds:
        changes = np.subtract(by_world[one.world[0]], by_world["untouched"])
        np.testing.assert_allclose(one.difference, changes.mean(), atol=1e-12)
        np.testing.assert_allclose(one.stderr, changes.std(ddof=1) / 2**0.5, atol=1e-12)


def test_a_folder_goes_on_with_more_documents_and_worlds(tmp_path, rows):
    folder = tmp_path / "kept"
    first = jd.compare(net(), {"b": DOCUMENTS["b"]}, {"noise": WORLDS["noise"]}, segment=SEGMENT, out=folder)
    parts = {file.name: file.stat().st_mtime_ns for file in (folder / "parts").iterdir()}
    assert (first.num_rows, len(parts)) == (2, 2)
    whole = jd.compare(net(), DOCUMENTS, WORLDS, segment=SEGMENT, out=folder)
    assert whole.column_names == rows.column_names
    for a, b in zip(whole.to_pylist(), rows.to_pylist(), strict=True):
        assert {**a, "loss": 0, "copy_loss": 0} == {**b, "loss": 0, "copy_loss": 0}
        np.testing.assert_allclose(a["loss"], b["loss"], rtol=1e-6)
    now = {file.name: file.stat().st_mtime_ns for file in (folder / "parts").iterdir()}
    assert len(now) == 8 and parts.items() <= now.items()
    again = jd.compare(net(), {"b": DOCUMENTS["b"]}, {"noise": WORLDS["noise"]}, segment=SEGMENT, out=folder)
    assert again.equals(first)


def test_another_seed_of_noise_is_another_world(tmp_path):
    b = {"b": DOCUMENTS["b"]}
    one, other = (
        jd.compare(net(), b, {"noise": jd.Noise(seed)}, segment=SEGMENT, out=tmp_path)["loss"][1].as_py() for seed in (0, 1)
    )
    assert one != other


def test_only_scored_predictions_count_everywhere():
    text = DOCUMENTS["a"]
    scored = np.arange(len(text) - 1) >= 40
    document = jd.Document("answer", text, scored)
    losses = jd.run(net(), text[None], segment=SEGMENT).losses[0].astype(np.float64)
    (row, *_) = jd.compare(net(), [document], {}, segment=SEGMENT).to_pylist()
    assert row["num_tokens"] == scored.sum()
    np.testing.assert_allclose(row["loss"], losses[scored].mean(), rtol=1e-6)
    (row, *_) = jd.sweep(net(), [document], ranks=(2,), segment=SEGMENT).to_pylist()
    np.testing.assert_allclose(row["loss"], losses[scored].mean(), rtol=1e-6)
    maps = jd.sensitivity(net(), [document], SEGMENT, samples=0)
    assert (int(maps.scored[0]), maps.document.values.tolist()) == (scored.sum(), ["answer"])
    np.testing.assert_allclose(maps.loss[0], losses[scored].mean(), rtol=1e-6)


WRONG = {
    "interventions as a list": ([jd.Truncate(2)], TypeError, "expected a mapping from labels"),
    "a function": ({"f": lambda carry: carry}, TypeError, "intervention is"),
    "a rank beyond the states": ({"r": jd.Truncate(99)}, ValueError, "99"),
    "a boundary that is not there": ({"z": jd.Zero(at=17)}, ValueError, "no boundary at 17"),
}


@pytest.mark.usefixtures("as_for_users")
@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_is_refused_before_anything_runs(tmp_path, what):
    worlds, error, message = WRONG[what]
    with pytest.raises(error, match=message):
        jd.compare(net(), DOCUMENTS, worlds, segment=SEGMENT, out=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_sweep_a_map_and_a_table_of_transitions_join_on_document_layer_and_head():
    swept = jd.sweep(net(), DOCUMENTS, ranks=(2,), segment=SEGMENT, scope="head", layers=(2,))
    maps = jd.sensitivity(net(), DOCUMENTS, SEGMENT, samples=0)
    effect = maps.head_state_effect.isel(boundary=0, drop=True).to_dataframe().reset_index()
    ledger, keys = jd.ledger_of(net(), DOCUMENTS, segment=SEGMENT, windows=(1,)), ["document", "layer", "head"]
    transitions = pa.concat_tables(
        table.append_column("document", pa.array([name] * len(table)))
        for name in DOCUMENTS
        for table in [transition_rows(ledger.sel(document=[name]))]
    )
    sensitivities = pa.table({name: pa.array(effect[name], swept.schema.field(name).type) for name in keys})
    sensitivities = sensitivities.append_column("effect", pa.array(effect["head_state_effect"]))
    others = pa.table({name: transitions[name].cast(swept.schema.field(name).type) for name in keys})
    cut = swept.filter(pa.array([row["rank"] == 2 for row in swept.to_pylist()]))
    joined = cut.join(sensitivities, keys, join_type="inner").join(others, keys, join_type="inner")
    places = {tuple(row[key] for key in keys) for row in joined.to_pylist()}
    heads = range(net().config.num_value_heads)
    assert places == {(d, 2, h) for d in "ab" for h in heads} and joined.num_rows == len(places)
