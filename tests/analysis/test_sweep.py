"""Rank sweep: its rows against calculations by hand, and a results folder that gives the same rows whatever happens."""

import csv
import json
import signal
import subprocess
import sys
import time
from functools import cache

import numpy as np
import pyarrow as pa
import pytest
from rich.console import Console

import jaxdelta as jd
from jaxdelta.analysis.compare import Difference
from jaxdelta.analysis.sweep import SCHEMA, World, make_worlds, rank_array, summarize, sweep
from jaxdelta.documents import Document
from jaxdelta.models.config import Qwen3_5Config
from jaxdelta.report import sweep as report
from jaxdelta.results.folder import ResultsError
from jaxdelta.runs import capacity
from jaxdelta.runs.interventions import Truncate
from jaxdelta.runs.segments import NonFiniteError, num_boundaries, run
from tests.tiny import fresh_model, model, text, tokens

CONFIG = Qwen3_5Config.tiny()  # linear layers 0, 1, 2; six value heads; min(K, V) = 8
MIXED = Qwen3_5Config.tiny(layer_kinds=("attention", "linear", "attention", "linear"))
A, B = tokens(50, 33)
OPTIONS = dict(ranks=(1, 2), segment=16, copy_gap=8, method="svd")


def net():
    return model()


@cache
def table(batch=3):
    """Two documents, of 50 and 33 tokens, untouched and at two ranks; a batch of three is one document."""
    return sweep(net(), {"a": text(A), "b": text(B)}, batch=batch, **OPTIONS)


def columns(rows, *names):
    return list(zip(*(rows[name].to_pylist() for name in names), strict=True))


# Worlds


def test_the_untouched_world_comes_first_and_ranks_rise():
    assert make_worlds(CONFIG, [4, 1]) == [World(8), World(1), World(4)]


@pytest.mark.parametrize("ranks", [[4, 1, 4, 8, 8], [1, 8, 4], (1, 4), range(1, 5, 3)], ids=str)
def test_ranks_given_twice_or_in_full_are_run_once(ranks):
    assert make_worlds(CONFIG, ranks) == [World(8), World(1), World(4)]


def test_full_rank_alone_is_the_untouched_world():
    assert make_worlds(CONFIG, [8]) == [World(8)]


def test_scopes_take_every_layer_and_head_once():
    """Layers by their index in the model."""
    assert make_worlds(MIXED, [2], "layer") == [World(8), World(2, 1), World(2, 3)]
    assert make_worlds(MIXED, [2], "head") == [World(8), *(World(2, i, h) for i in (1, 3) for h in range(6))]


def test_a_world_touches_its_own_heads_alone():
    untouched = np.full((2, 6), 8)
    np.testing.assert_array_equal(rank_array(MIXED, World(8)), untouched)
    np.testing.assert_array_equal(rank_array(MIXED, World(3)), np.full((2, 6), 3))
    layer, head = untouched.copy(), untouched.copy()
    layer[1], head[0, 4] = 3, 3
    np.testing.assert_array_equal(rank_array(MIXED, World(3, 3)), layer)
    np.testing.assert_array_equal(rank_array(MIXED, World(3, 1, 4)), head)


@pytest.mark.parametrize("ranks", [[], [0], [-1], [9], [1, 33]], ids=str)
def test_ranks_out_of_bounds_are_refused(ranks):
    with pytest.raises(ValueError, match=r"expected whole numbers from 1 to min\(K, V\) = 8"):
        make_worlds(CONFIG, ranks)


# Rows


def test_one_row_for_each_document_and_rank_in_order():
    rows = table()
    assert rows.schema == SCHEMA
    assert columns(rows, "document", "rank") == [(d, r) for d in "ab" for r in (8, 1, 2)]
    assert set(columns(rows, "layer", "head")) == {(None, None)}
    assert columns(rows, "document", "num_tokens")[::3] == [("a", 49), ("b", 32)]


def test_losses_are_means_of_the_runs_they_stand_for():
    """Each world by itself, over all scored tokens and over the copy tokens."""
    for document, ids in (("a", A), ("b", B)):
        copies = [any((ids[j - 1], ids[j]) == (ids[i - 1], ids[i]) for j in range(1, i - 8)) for i in range(1, len(ids))]
        assert 0 < sum(copies) < len(ids) - 1
        for rank in (8, 1, 2):
            cut = None if rank == 8 else Truncate(rank, method="svd", max_rank=2)
            losses = run(net(), ids[None], segment=16, max_length=64, intervention=cut).losses[0].astype(np.float64)
            row = next(r for r in table().to_pylist() if (r["document"], r["rank"]) == (document, rank))
            assert row["loss"] == pytest.approx(losses.mean(), abs=1e-5)
            assert row["copy_loss"] == pytest.approx(losses[copies].mean(), abs=1e-5)
            assert row["num_copy_tokens"] == sum(copies)
    by_rank = {rank: loss for (_, rank, loss) in columns(table(), "document", "rank", "loss")[:3]}
    assert min(abs(by_rank[r] - by_rank[s]) for r, s in ((1, 2), (1, 8), (2, 8))) > 1e-3


@pytest.mark.parametrize("batch", [2, 4, 64])
def test_the_batch_changes_no_row(batch):
    """Whether it splits documents, leaves a rest, which is filled up, or exceeds all there is."""
    rows = table(batch)
    assert rows.drop_columns(["loss", "copy_loss"]).equals(table().drop_columns(["loss", "copy_loss"]))
    for name in ("loss", "copy_loss"):
        np.testing.assert_allclose(rows[name].to_numpy(), table()[name].to_numpy(), rtol=0, atol=1e-5)


def test_documents_are_the_same_as_texts_arrays_and_documents():
    expected = table().drop_columns(["document"])
    for documents in ([text(A), text(B)], [A, B], [Document("a", A), Document("b", B)], [A.astype(np.uint16), B]):
        assert sweep(net(), documents, batch=3, **OPTIONS).drop_columns(["document"]).equals(expected)


def test_documents_without_names_are_numbered():
    rows = sweep(net(), [B, A], batch=3, **OPTIONS)
    assert rows["document"].to_pylist()[::3] == ["document_0", "document_1"]


def test_a_document_without_copy_tokens_has_no_copy_loss():
    rows = sweep(net(), {"a": text(np.arange(33)), "b": text(A)}, batch=3, **OPTIONS)
    assert columns(rows, "num_copy_tokens", "copy_loss")[:3] == [(0, None)] * 3
    assert all(loss is not None for loss in rows["copy_loss"].to_pylist()[3:])
    summaries = summarize(rows, copy_tokens=True)
    assert [s.loss for s in summaries] == [rows["copy_loss"].to_pylist()[3:][i] for i in (0, 2, 1)]


@pytest.mark.parametrize("length", [2, 16, 17, 48, 49])
def test_documents_that_end_at_a_boundary_or_just_after_it(length):
    """Padded to three segments by a longer one; up to one segment there is no boundary, and ranks change nothing."""
    rows = sweep(net(), [A[:length], A[:49]], batch=3, **OPTIONS).to_pylist()[:3]
    losses = run(net(), A[None, :length], segment=16, max_length=64).losses
    assert rows[0]["num_tokens"] == length - 1
    assert rows[0]["loss"] == pytest.approx(losses.mean(), abs=1e-5)
    assert (rows[1]["loss"] == rows[0]["loss"]) == (length <= 17)


def test_scopes_cut_one_layer_or_head():
    """Rows carry the world; the run is that of its rank array."""
    options = OPTIONS | {"ranks": [1], "batch": 3}
    rows = sweep(net(), [A], scope="head", **options)
    assert columns(rows, "rank", "layer", "head") == [(8, None, None), *((1, 0, h) for h in range(6))]
    rank = np.full((1, 6), 8)
    rank[0, 4] = 1
    cut = Truncate(rank, method="svd")
    losses = run(net(), A[None], segment=16, max_length=64, intervention=cut).losses
    assert rows["loss"].to_pylist()[5] == pytest.approx(losses.mean(), abs=1e-5)
    assert len(set(rows["loss"].to_pylist())) == 7
    layer = sweep(net(), [A], scope="layer", **options)
    assert columns(layer, "rank", "layer", "head") == [(8, None, None), (1, 0, None)]
    everything = table()["loss"].to_pylist()[:2]  # the model has one linear layer
    np.testing.assert_allclose(layer["loss"].to_numpy(), everything, rtol=0, atol=1e-5)


def test_progress_rises_to_its_total():
    told = []
    sweep(net(), [A, B], batch=3, **OPTIONS, progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (24, 24)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert {total for _, total in told} == {24}


def test_a_sweep_that_does_not_fit_is_split(monkeypatch):
    """A device with room for four rows runs six in two batches of three."""
    needed = capacity.run_memory(net().config, dtype="float32", segment=16, max_length=64)
    monkeypatch.setattr(capacity, "device_memory", lambda: int(needed.total(4) / capacity.SHARE) + 1000)
    monkeypatch.setattr(capacity, "has_own_memory", lambda: True)
    told = []
    rows = sweep(net(), [A, B], **OPTIONS, progress=lambda done, total: told.append(done))
    assert told == [3, 6, 9, 12, 12, 16, 20, 24, 24]
    assert rows.drop_columns(["document"]).equals(table().drop_columns(["document"]))


# Summaries


def rows_by_hand():
    """Document a loses 1 and b loses 3 at rank 1; copy tokens of a alone."""
    rows = [
        dict(document="a", rank=1, loss=3.0, num_copy_tokens=2, copy_loss=7.0),
        dict(document="b", rank=1, loss=7.0, num_copy_tokens=0, copy_loss=None),
        dict(document="a", rank=8, loss=2.0, num_copy_tokens=2, copy_loss=5.0),
        dict(document="b", rank=8, loss=4.0, num_copy_tokens=0, copy_loss=None),
    ]
    rows = [dict(layer=None, head=None, num_tokens=10) | row for row in rows]
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def test_summaries_by_hand():
    """Mean 5 against 3: 2 nats, 66.7 %; differences 1 and 3 have sd sqrt(2), over sqrt(2) is 1."""
    untouched, cut = summarize(rows_by_hand())
    assert untouched == Difference(World(8), 3.0, 0.0, 0.0, 0.0)
    assert cut == (World(1), 5.0, 2.0, pytest.approx(1.0), pytest.approx(200 / 3))


def test_summaries_of_copy_tokens_leave_out_documents_without_any():
    untouched, cut = summarize(rows_by_hand(), copy_tokens=True)
    assert untouched[:3] == (World(8), 5.0, 0.0)
    assert cut[:3] == (World(1), 7.0, 2.0)
    assert np.isnan(cut.stderr)
    assert cut.percent == pytest.approx(40)


def test_summaries_are_sorted_by_rank_layer_and_head():
    worlds = [World(8), *(World(r, i, h) for r in (1, 2) for i in (0, 2) for h in (0, 1))]
    rows = [
        dict(document=d, **w._asdict(), num_tokens=9, loss=1.0 + w.rank, num_copy_tokens=0, copy_loss=None)
        for d in "ab"
        for w in reversed(worlds)
    ]
    found = [s.world for s in summarize(pa.Table.from_pylist(rows, schema=SCHEMA))]
    assert found == [World(8), *(World(r, i, h) for r in (2, 1) for i in (0, 2) for h in (0, 1))]
    assert summarize(pa.Table.from_pylist(rows, schema=SCHEMA), copy_tokens=True) == []


def printed(rows, width=80):
    console = Console(width=width)
    with console.capture() as capture:
        console.print(report.table(rows))
    return capture.get()


def test_the_table_gives_loss_difference_error_and_percent_of_both_kinds_of_tokens():
    lines = printed(rows_by_hand()).splitlines()
    assert "2 documents, 20 scored tokens" in lines[0]
    cut = next(line for line in lines if line.split()[:1] == ["1"])
    assert cut.split() == ["1", "5.0000", "+2.0000", "1.0000", "+66.67", "7.0000", "+2.0000", "-", "+40.00"]


def test_the_table_names_layer_and_head_and_fits_a_terminal():
    worlds = [World(8), *(World(1, 0, head) for head in range(6))]
    rows = [
        dict(document=d, **w._asdict(), num_tokens=9, loss=5.0 + i, num_copy_tokens=2, copy_loss=4.0 + i)
        for i, d in enumerate("ab")
        for w in worlds
    ]
    lines = printed(pa.Table.from_pylist(rows, schema=SCHEMA)).splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[:3] for line in lines if "5.5000" in line] == [
        ["8", "all", "all"],
        *(["1", "0", str(h)] for h in range(6)),
    ]


def test_figures_are_written_for_rows_with_and_without_copy_tokens(tmp_path):
    report.write_figures(rows_by_hand(), tmp_path)
    assert (tmp_path / "loss_by_rank.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "loss_by_rank.svg").read_text()
    without = rows_by_hand().to_pylist()
    for row in without:
        row |= {"num_copy_tokens": 0, "copy_loss": None}
    report.write_figures(pa.Table.from_pylist(without, schema=SCHEMA), tmp_path)


# Results folders


class Stop(BaseException):
    """Raised in the middle of a run."""


def stopped(folder, after, documents=None, **options):
    """A run that is stopped at the ``after``-th report of progress."""
    told = []

    def progress(done, total):
        told.append(done)
        if len(told) == after:
            raise Stop

    with pytest.raises(Stop):
        swept(folder, documents, progress=progress, **options)


def swept(folder, documents=None, **options):
    return sweep(net(), documents or {"a": text(A), "b": text(B)}, out=folder, **({"batch": 2} | OPTIONS | options))


def parts(folder):
    return sorted(file.name for file in (folder / "parts").iterdir())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run that nothing interrupted: three parts of two rows."""
    folder = tmp_path_factory.mktemp("finished")
    swept(folder)
    return folder


def test_the_folder_holds_the_rows_that_are_returned(finished):
    rows = swept(finished)
    assert pa.parquet.read_table(finished / "rows.parquet").equals(rows)
    with (finished / "rows.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [float(line["loss"]) for line in lines] == rows["loss"].to_pylist()
    assert [line["layer"] for line in lines] == [""] * 6
    manifest = json.loads((finished / "manifest.json").read_text())
    configuration = manifest["configuration"]
    assert configuration.items() >= dict(analysis="sweep", segment=16, copy_gap=8, method="svd").items()
    assert configuration["implementation"] == net().implementation.described()


@pytest.mark.parametrize("after", [1, 4, 5, 6, 14])
def test_an_interrupted_run_goes_on_to_the_same_bytes(tmp_path, finished, after):
    """Stopped in its first part, just after it, in the second, and when only rows.csv is to be written."""
    stopped(tmp_path, after)
    kept = {name: (tmp_path / "parts" / name).stat().st_mtime_ns for name in parts(tmp_path)}
    assert len(kept) == {1: 0, 4: 0, 5: 1, 6: 1, 14: 3}[after]
    swept(tmp_path)
    for name in ("rows.csv", "rows.parquet"):
        assert (tmp_path / name).read_bytes() == (finished / name).read_bytes()
    assert {name: (tmp_path / "parts" / name).stat().st_mtime_ns for name in kept} == kept


def test_finished_parts_are_not_run_again(tmp_path, monkeypatch):
    swept(tmp_path)
    monkeypatch.setattr("jaxdelta.analysis.sweep.run", None)
    (tmp_path / "rows.csv").unlink()
    assert swept(tmp_path).num_rows == 6
    assert (tmp_path / "rows.csv").exists()


@pytest.mark.parametrize("batch", [1, 3, None])
def test_another_batch_goes_on_with_what_is_there(tmp_path, finished, batch):
    """What was planned and does not fit is planned anew."""
    stopped(tmp_path, 5)
    rows = swept(tmp_path, batch=batch)
    assert len(parts(tmp_path)) == {1: 5, 3: 3, None: 3}[batch]
    expected = pa.parquet.read_table(finished / "rows.parquet")
    assert rows.drop_columns(["loss", "copy_loss"]).equals(expected.drop_columns(["loss", "copy_loss"]))
    np.testing.assert_allclose(rows["loss"], expected["loss"], rtol=1e-6)


def test_documents_in_another_order_do_not_mix_up_the_rows(tmp_path, finished):
    stopped(tmp_path, 5)
    rows = swept(tmp_path, {"b": text(B), "a": text(A)})
    assert columns(rows, "document", "rank") == [(d, r) for d in "ba" for r in (8, 1, 2)]
    expected = pa.parquet.read_table(finished / "rows.parquet")
    by_place = dict(zip(columns(expected, "document", "rank"), expected["loss"].to_pylist(), strict=True))
    for row in rows.to_pylist():
        np.testing.assert_allclose(row["loss"], by_place[row["document"], row["rank"]], rtol=1e-6)


def test_more_ranks_and_documents_go_on_in_the_same_folder(tmp_path):
    """What is there stays; the rows are those asked for, in their order; fewer are read from what is there."""
    options = {"method": "svd", "ranks": (2,), "batch": None}
    first = swept(tmp_path, {"b": text(B)}, **options)
    kept = {name: (tmp_path / "parts" / name).stat().st_mtime_ns for name in parts(tmp_path)}
    rows = swept(tmp_path, **(options | {"ranks": (1, 2, 4)}))
    assert columns(rows, "document", "rank") == [(d, r) for d in "ab" for r in (8, 1, 2, 4)]
    assert {name: (tmp_path / "parts" / name).stat().st_mtime_ns for name in kept} == kept
    fresh = sweep(net(), {"a": text(A), "b": text(B)}, **(OPTIONS | options | {"ranks": (1, 2, 4)}))
    np.testing.assert_allclose(rows["loss"], fresh["loss"], rtol=1e-6)
    before = parts(tmp_path)
    assert swept(tmp_path, {"b": text(B)}, **options).equals(first)
    assert parts(tmp_path) == before


def test_a_document_of_the_same_name_with_other_tokens_is_another(tmp_path):
    first, other = (swept(tmp_path, {"a": text(ids)}, ranks=(2,)) for ids in (A, A[::-1]))
    assert first["loss"] != other["loss"]
    assert swept(tmp_path, {"a": text(A)}, ranks=(2,)).equals(first)


def test_a_killed_process_goes_on_to_the_same_bytes(tmp_path, finished):
    """SIGKILL once the first part is there; what it leaves is continued here."""
    jd.save(net(), tmp_path / "model")
    code = f"""
import time
import jaxdelta as jd
model = jd.load({str(tmp_path / "model")!r})
documents = {{"a": {text(A)!r}, "b": {text(B)!r}}}
wait = lambda done, total: time.sleep(0.2)
jd.sweep(model, documents, out={str(tmp_path / "out")!r}, batch=2, progress=wait, **{OPTIONS!r})
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    first = tmp_path / "out" / "parts" / "0000-0000.parquet"
    deadline = time.monotonic() + 200
    while not first.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, process.stdout.read().decode()
    process.stdout.close()
    assert not (tmp_path / "out" / "rows.csv").exists()
    assert "0000-0000.parquet" in parts(tmp_path / "out")
    sweep(jd.load(tmp_path / "model"), {"a": text(A), "b": text(B)}, out=tmp_path / "out", batch=2, **OPTIONS)
    assert (tmp_path / "out" / "rows.csv").read_bytes() == (finished / "rows.csv").read_bytes()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"segment": 32}, "segment is 16 there, 32 now"),
        ({"copy_gap": 9}, "copy_gap is 8 there, 9 now"),
        ({"method": "eigh"}, 'method is "svd" there, "eigh" now'),
        ({"name": "other"}, 'model is "model" there, "other" now'),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_folder_of_another_run_is_refused_with_the_difference(finished, changes, message):
    with pytest.raises(ResultsError, match=message):
        swept(finished, **changes)


@pytest.mark.parametrize("change", ["dtype", "parameters"])
def test_a_folder_of_other_weights_is_refused(tmp_path, change):
    """The same name, with one number of one tensor changed, on disk or in memory."""
    first = fresh_model()
    jd.save(first, tmp_path / "model")
    documents = [A]
    sweep(jd.load(tmp_path / "model"), documents, out=tmp_path / "out", **OPTIONS)
    if change == "dtype":
        other = jd.load(tmp_path / "model", dtype="bfloat16")
    else:
        first.final_norm[...] = first.final_norm[...].at[3].add(1e-3)
        jd.save(first, tmp_path / "other")
        other = jd.load(tmp_path / "other")
        with pytest.raises(ResultsError, match=change):
            sweep(first, documents, out=tmp_path / "out", **OPTIONS)
    with pytest.raises(ResultsError, match=change):
        sweep(other, documents, out=tmp_path / "out", **OPTIONS)


def test_a_broken_part_is_told_or_run_again_but_never_taken(tmp_path, finished):
    swept(tmp_path)
    part = tmp_path / "parts" / "0000-0001.parquet"
    part.write_bytes(part.read_bytes()[:-20])
    try:
        swept(tmp_path)
    except ResultsError as error:
        assert "0000-0001.parquet" in str(error)
        part.unlink()
        swept(tmp_path)
    assert (tmp_path / "rows.csv").read_bytes() == (finished / "rows.csv").read_bytes()


def test_a_run_that_is_not_finite_reports_nothing_and_keeps_what_is_whole(tmp_path):
    """The second document holds a word whose embedding is broken."""
    m = fresh_model(tied=False)
    m.embed[...] = m.embed[...].at[60].set(np.inf)
    bad = B.copy()
    bad[20] = 60
    with pytest.raises(NonFiniteError, match=r"document document_1, rank 8: .* the embedding, in row 0, tokens 16 to 31"):
        sweep(m, [A, bad], out=tmp_path, batch=3, **OPTIONS)
    assert parts(tmp_path) == ["0000-0000.parquet"]
    assert not (tmp_path / "rows.csv").exists()


# Bad input, refused before anything is written


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"segment": 0}, "segment"),
        ({"segment": -16}, "segment"),
        ({"segment": 50}, "the longest document has 50 tokens"),
        ({"segment": 10**12}, "the longest document has 50 tokens"),
        ({"batch": 0}, "batch"),
        ({"batch": -2}, "batch"),
        ({"copy_gap": -1}, "copy_gap|copy gap"),
        ({"ranks": (0,)}, "ranks"),
        ({"ranks": ()}, "ranks"),
        ({"ranks": (1, 9)}, "ranks"),
        ({"documents": {}}, "no documents"),
        ({"documents": {"a": "w1"}}, "a has 1 tokens"),
        ({"documents": [np.array([1, 97])]}, "document_0 has the token id 97; the model's run from 0 to 96"),
        ({"documents": [np.array([-1, 5])]}, "document_0 has the token id -1;"),
        ({"documents": [np.array([2**32 + 3, 5])]}, "document_0 has the token id 4294967299;"),
        ({"documents": [Document("a", A), Document("a", B)]}, "names.*a"),
        ({"documents": [Document("a", A[:1])]}, "a has 1 tokens"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_a_sweep_that_makes_no_sense_is_refused_and_writes_nothing(tmp_path, changes, message):
    options = {"documents": {"a": text(A)}} | changes
    with pytest.raises(ValueError, match=message):
        sweep(net(), options.pop("documents"), out=tmp_path / "out", **(OPTIONS | options))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("changes", [{"scope": "heads"}, {"method": "qr"}], ids=str)
def test_an_unknown_scope_or_method_is_refused_and_writes_nothing(tmp_path, changes):
    with pytest.raises((ValueError, TypeError), match=next(iter(changes.values()))):
        sweep(net(), [A], out=tmp_path / "out", **(OPTIONS | changes))
    assert not (tmp_path / "out").exists()


SEGMENT = 16


@pytest.mark.parametrize(("scope", "places"), [("layer", [(0, None)]), ("head", [(0, 0), (0, 4)])])
def test_a_narrower_sweep_is_drawn_by_layer_and_head(tmp_path, scope, places):
    heads = None if scope == "layer" else (4, 0)
    rows = sweep(net(), [A], ranks=(1,), segment=SEGMENT, scope=scope, layers=(0,), heads=heads)
    assert columns(rows, "layer", "head") == [(None, None), *places]
    (axes, _) = report.map_figure(rows).axes
    drawn = np.asarray(axes.images[0].get_array())[0]
    np.testing.assert_allclose(drawn, [one.difference for one in summarize(rows)[1:]])
    assert [label.get_text() for label in axes.get_xticklabels()] == ["all" if h is None else str(h) for _, h in places]
    assert [file.name for file in report.write_figures(rows, tmp_path)] == ["loss_by_place.png", "loss_by_place.svg"]


@pytest.mark.parametrize(
    "options",
    [
        dict(scope="all", layers=(1,)),
        dict(scope="layer", heads=(0,)),
        dict(scope="head", heads=(6,)),
        dict(scope="layer", layers=(9,)),
    ],
    ids=str,
)
def test_layers_and_heads_that_a_scope_does_not_go_through_are_refused(options):
    with pytest.raises(ValueError, match=r"layers|heads"):
        sweep(net(), [A], ranks=(1,), segment=SEGMENT, **options)


def test_documents_without_a_boundary_are_counted_apart():
    """Nine short texts beside a long one: the rise is the long one's, and the table says what was left out."""
    texts = tokens(50, *[SEGMENT] * 5, *[SEGMENT + 1] * 4)
    rows = sweep(model(), texts, ranks=[1], segment=SEGMENT)
    alone = sweep(model(), texts[:1], ranks=[1], segment=SEGMENT)
    assert [num_boundaries(n, SEGMENT) for n in (2, SEGMENT, SEGMENT + 1, SEGMENT + 2, 2 * SEGMENT + 2)] == [0, 0, 0, 1, 2]
    assert set(zip(rows["document"].to_pylist(), rows["num_boundaries"].to_pylist(), strict=True)) == {
        ("document_0", 48 // SEGMENT),
        *((f"document_{i}", 0) for i in range(1, 10)),
    }
    for row in rows.to_pylist():
        if row["num_boundaries"] == 0:  # nothing of theirs is cut
            whole = next(r for r in rows.to_pylist() if r["document"] == row["document"] and r["rank"] == 8)
            assert row["loss"] == pytest.approx(whole["loss"], abs=1e-6)
    for with_uncut, share in ((False, 1), (True, 10)):
        found, expected = summarize(rows, with_uncut=with_uncut)[-1], summarize(alone)[-1]
        assert found.difference == pytest.approx(expected.difference / share, abs=1e-5)
    said = " ".join(printed(rows).split())
    assert "1 documents, 49 scored tokens" in said
    assert "9 of 10 documents have no boundary" in said and "no boundary" not in printed(alone)
