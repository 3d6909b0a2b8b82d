"""Results folders: whole parts or none, one configuration each, the same rows whatever happened on the way."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import xarray as xr

from jaxdelta.results import folder as results
from jaxdelta.results.folder import Results, ResultsError

CONFIGURATION = {"analysis": "sweep", "documents": {"a": "1f"}, "segment": 16}


def rows(index):
    return pa.table({"document": [f"d{index}"] * 2, "loss": [index + 1 / 3, float(index)], "copy_loss": [None, index / 7]})


def filled(folder, *indices):
    made = Results(folder, CONFIGURATION)
    for index in indices:
        write(made, index, rows(index))
    return made


def write(made, index, part):
    """A part of one item."""
    made.write_parts(f"{index:04d}", [part])


def read(made, index):
    found = made.parts(f"{index:04d}", 1)
    return None if found is None else found[0]


def finish(made, count):
    whole = pa.concat_tables([read(made, index) for index in range(count)])
    made.finish_rows(whole)
    return whole


def contents(folder):
    return {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


# Parts and rows


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)], ids=str)
def test_rows_are_in_the_order_of_the_parts_whenever_each_was_made(tmp_path, order):
    table = finish(filled(tmp_path, *order), 3)
    expected = pa.concat_tables([rows(i) for i in range(3)])
    assert table.equals(expected)
    assert pa.parquet.read_table(tmp_path / "rows.parquet").equals(expected)
    text = (tmp_path / "rows.csv").read_text().splitlines()
    assert text[0] == '"document","loss","copy_loss"'
    assert text[1] == '"d0",0.3333333333333333,'
    assert len(text) == 7


def test_a_part_is_none_until_it_is_finished(tmp_path):
    made = filled(tmp_path, 1)
    assert read(made, 0) is None
    assert read(made, 1).equals(rows(1))


def test_the_same_configuration_goes_on_with_the_parts_and_the_plans_that_are_there(tmp_path):
    assert filled(tmp_path, 0, 2).make_plan(0, [["a"], ["b", "c"]]) == [["a"], ["b", "c"]]
    again = Results(tmp_path, CONFIGURATION)
    assert again.make_plan(0, [["d"]]) == again.plan(0) == [["a"], ["b", "c"]]
    assert again.plan(1) is None
    assert [read(again, i) is not None for i in range(3)] == [True, False, True]


@pytest.mark.parametrize("content", ["[[", "5", "[5]", "null", '{"a": []}'])
def test_a_plan_that_is_broken_is_named_with_what_to_do(tmp_path, content):
    made = filled(tmp_path)
    made.make_plan(0, [["a"]])
    (tmp_path / "plans" / "0000.json").write_text(content)
    with pytest.raises(ResultsError, match=r"0000\.json cannot be read .* choose another folder or remove this one"):
        made.plan(0)


def test_a_part_of_several_items_comes_back_item_by_item(tmp_path):
    made, several = filled(tmp_path), [rows(0), rows(1).slice(0, 0), rows(2)]
    made.write_parts("0000-0000", several)
    assert all(a.equals(b) for a, b in zip(filled(tmp_path).parts("0000-0000", 3), several, strict=True))


def test_the_order_of_the_configurations_fields_does_not_matter(tmp_path):
    filled(tmp_path, 0)
    assert read(Results(tmp_path, dict(reversed(CONFIGURATION.items()))), 0) is not None


def test_a_finished_folder_can_be_finished_again_to_the_byte(tmp_path):
    finish(filled(tmp_path, 0, 1, 2), 3)
    before = contents(tmp_path)
    finish(Results(tmp_path, CONFIGURATION), 3)
    assert contents(tmp_path) == before


def test_folders_on_the_way_are_made(tmp_path):
    filled(tmp_path / "a" / "b c" / "ö", 0)
    assert (tmp_path / "a" / "b c" / "ö" / "parts" / "0000.parquet").exists()


def test_the_manifest_tells_the_configuration_versions_device_and_where_it_was_begun(tmp_path):
    finish(filled(tmp_path, 0, 1, 2), 3)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest.keys() == {"configuration", "started", "where", "finished"}
    assert manifest["configuration"].items() >= CONFIGURATION.items()
    assert manifest["configuration"]["commit"] == results.commit()
    environment = manifest["configuration"]["environment"]
    assert environment.keys() >= {"jaxdelta", "jax", "jaxlib", "flax", "numpy", "python", "device"}
    assert environment["device"].startswith("cpu") and "cores" not in environment
    assert manifest["where"].keys() == {"host", "cores"}


def test_another_host_with_other_cores_goes_on(tmp_path, monkeypatch):
    filled(tmp_path, 0)
    monkeypatch.setattr(results, "where", lambda: {"host": "elsewhere", "cores": 3})
    assert read(filled(tmp_path), 0) is not None


def test_a_run_in_a_checkout_has_its_commit_and_others_none(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "__file__", str(tmp_path / "results" / "folder.py"))
    assert results.commit() is None


# Names that end as this library's temporary ones do, and are not of its making.
OF_OTHERS = ("film.mp4.partial", "notes.partial", "film.mp4.1234.partial", "film.zarr.1234.partial", "0001.zarr.partial")


# Kills and failures


class Killed(BaseException):
    """Nothing catches it, as nothing catches SIGKILL."""


def kill(*arguments, **keywords):
    raise Killed


@pytest.mark.parametrize("of", ["part", "manifest"])
def test_a_kill_between_writing_and_renaming_leaves_no_file_under_its_name(tmp_path, monkeypatch, of):
    with monkeypatch.context() as patch:
        if of == "part":
            made = filled(tmp_path, 0)
        patch.setattr(results, "_place", kill)
        with pytest.raises(Killed):
            write(made, 1, rows(1)) if of == "part" else filled(tmp_path)
    left = [file.name for file in contents(tmp_path)]
    assert any(name.endswith(".partial") for name in left)
    again = filled(tmp_path)
    assert read(again, 1) is None
    assert (read(again, 0) is not None) == (of == "part")
    assert finish(filled(tmp_path, 0, 1), 2).equals(pa.concat_tables([rows(0), rows(1)]))


def test_half_written_files_of_a_killed_run_are_no_parts(tmp_path):
    filled(tmp_path, 0)
    for name in ("manifest.json", "rows.csv", "parts/0001.parquet"):
        (tmp_path / f"{name}.{results.host()}.4194304-0.partial").write_bytes(b"PAR1 half")
    again = filled(tmp_path)
    assert read(again, 1) is None
    assert finish(again, 1).equals(rows(0))
    assert not list(tmp_path.rglob("*.partial"))


def test_a_run_killed_before_its_first_manifest_can_start_again(tmp_path):
    (tmp_path / "parts").mkdir()
    (tmp_path / f"manifest.json.{results.host()}.4194304-0.partial").write_text("{")
    assert read(Results(tmp_path, CONFIGURATION), 0) is None


def test_a_full_disk_is_told_in_a_line_and_finished_parts_stay(tmp_path, monkeypatch):
    made = filled(tmp_path, 0)

    def full(table, file):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(pa.parquet, "write_table", full)
        with pytest.raises(ResultsError, match=r"0001\.parquet cannot be written: No space left on device; .* are kept"):
            write(made, 1, rows(1))
    assert read(Results(tmp_path, CONFIGURATION), 0).equals(rows(0))


def test_a_part_of_other_rows_is_named_with_what_to_do(tmp_path):
    made = filled(tmp_path, 0)
    pa.parquet.write_table(pa.table({"x": [1]}), tmp_path / "parts" / "0000.parquet")
    with pytest.raises(ResultsError, match=r"0000\.parquet cannot be read \(rows of something else\); remove it"):
        read(made, 0)


@pytest.mark.parametrize("content", [b"", b"PAR1", b"not parquet at all", None], ids=["empty", "4 bytes", "text", "cut"])
def test_a_part_that_is_broken_is_named_with_what_to_do(tmp_path, content):
    made = filled(tmp_path, 0, 1)
    file = tmp_path / "parts" / "0001.parquet"
    file.write_bytes(file.read_bytes()[:-10] if content is None else content)
    with pytest.raises(ResultsError, match=r"0001\.parquet.*remove it"):
        read(made, 1)


# Labelled arrays


def arrays(index):
    """As sensitivities have them: names with letters of every kind, NaN, whole numbers, attributes."""
    values = np.full((1, 2, 3), index / 7, np.float32)
    values[0, 1] = np.nan
    found = {"gate": (("document", "boundary", "head"), values), "scored": ("document", [index + 5])}
    coords = {"document": [f"dö {index}"], "boundary": [16, 32], "model_layer": ("layer", [1, 3])}
    return xr.Dataset(found, coords, {"unit": "nats", "samples": 8})


def test_labelled_arrays_come_back_as_they_were(tmp_path):
    made = filled(tmp_path)
    assert read(made, 0) is None
    write(made, 0, arrays(0))
    made.finish_arrays("maps", arrays(1))
    assert (tmp_path / "parts" / "0000.zarr").is_dir()
    back = read(filled(tmp_path), 0)
    xr.testing.assert_identical(back, arrays(0))
    assert {name: back[name].dtype for name in back.variables} == {
        name: arrays(0)[name].dtype for name in arrays(0).variables
    }
    with xr.open_zarr(tmp_path / "maps.zarr", consolidated=False) as whole:
        xr.testing.assert_identical(whole.load(), arrays(1))


def test_a_part_in_memory_outlives_its_folder(tmp_path):
    made = filled(tmp_path)
    write(made, 0, arrays(0))
    back = read(made, 0)
    shutil.rmtree(tmp_path / "parts" / "0000.zarr")
    write(made, 0, arrays(3))
    xr.testing.assert_identical(back, arrays(0))
    xr.testing.assert_identical(read(made, 0), arrays(3))


def test_parts_of_names_of_different_lengths_are_put_together_whole(tmp_path):
    """One read again, the other fresh; what is stored of the first must not cut the second's name."""
    made, longer = filled(tmp_path), arrays(1).assign_coords(document=["a much longer name"])
    write(made, 0, arrays(0))
    made.finish_arrays("maps", xr.concat([read(made, 0), longer], "document", data_vars="minimal"))
    with xr.open_zarr(tmp_path / "maps.zarr", consolidated=False) as whole:
        assert whole.document.values.tolist() == ["dö 0", "a much longer name"]


def test_a_kill_between_writing_and_renaming_leaves_no_labelled_part(tmp_path, monkeypatch):
    made = filled(tmp_path)
    write(made, 0, arrays(0))
    with monkeypatch.context() as patch:
        patch.setattr(results, "_place", kill)
        with pytest.raises(Killed):
            write(made, 1, arrays(1))
    again = filled(tmp_path)
    assert read(again, 1) is None
    xr.testing.assert_identical(read(again, 0), arrays(0))
    write(again, 1, arrays(1))
    xr.testing.assert_identical(read(again, 1), arrays(1))


def test_half_written_labelled_parts_of_a_killed_run_are_removed_in_the_end(tmp_path):
    """But not those of a process that lives."""
    made = filled(tmp_path)
    alive = f"0002.zarr.{results.host()}.{os.getpid()}-0.partial"
    for name in (f"0001.zarr.{results.host()}.4194304-0.partial", alive):
        arrays(1).to_zarr(tmp_path / "parts" / name, consolidated=False, zarr_format=2)
    assert read(made, 1) is None
    made.finished()
    assert [file.name for file in (tmp_path / "parts").iterdir()] == [alive]
    assert "finished" in json.loads((tmp_path / "manifest.json").read_text())


def test_only_leftovers_of_this_library_and_host_are_removed(tmp_path):
    """Another host's may be of a process that lives there."""
    made = filled(tmp_path, 0)
    dead = ("manifest.json.{}.4194304-0.partial", "maps.zarr.{}.4194304-3.partial", "heads.png.{}.4194304-1.partial")
    left = [name.format(results.host()) for name in dead] + [f"parts/0001.parquet.{results.host()}.4194304-9.partial"]
    alive = [f"rows.csv.{results.host()}.{os.getpid()}-0.partial", *(name.format("elsewhere-f0000000") for name in dead)]
    for name in (*left, *alive, *OF_OTHERS, "parts/film.mp4.partial"):
        (tmp_path / name).write_text("some")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / left[0]).write_text("in a folder that is not the library's")
    made.finished()
    stayed = {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*.partial")}
    assert stayed == {*alive, *OF_OTHERS, "parts/film.mp4.partial", f"sub/{left[0]}"}


def test_a_folder_of_leftovers_alone_is_empty(tmp_path):
    (tmp_path / "parts").mkdir()
    (tmp_path / f"manifest.json.{results.host()}.4194304-0.partial").write_text("{")
    (tmp_path / "parts" / "0000.zarr.elsewhere-0.1-0.partial").mkdir()
    assert read(filled(tmp_path), 0) is None


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path):
    made = filled(tmp_path)
    before = contents(tmp_path)

    def full(file):
        with open(file, "w") as stream:
            stream.write("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        results.write_whole(made.folder / "heads.csv", full)
    assert contents(tmp_path) == before


# Several processes

CHILD = """
import sys, time
from pathlib import Path
import numpy as np, pyarrow as pa, xarray as xr
from jaxdelta.results.folder import Results

folder, name = Path(sys.argv[1]), int(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
for turn in range(12):
    made = Results(folder / str(turn), {"a": 1})
    plan = made.make_plan(0, [[name]])
    arrays = xr.Dataset({"of": ("t", np.full(2000, name))})
    for index in range(3):
        made.write_parts(f"rows-{index}", [pa.table({"of": [name]})])
        made.write_parts(f"arrays-{index}", [arrays])
        assert len(set(made.parts(f"arrays-{index}", 1)[0]["of"].values)) == 1
    made.finish_arrays("maps", arrays)
    found = [made.parts(f"{kind}-{i}", 1)[0]["of"] for kind in ("rows", "arrays") for i in range(3)]
    made.finish_rows(pa.concat_tables([made.parts(f"rows-{i}", 1)[0] for i in range(3)]))
    print(plan[0][0], *(int(x[0].as_py() if hasattr(x[0], "as_py") else x[0]) for x in found))
"""


def test_processes_in_one_folder_all_end_well_and_read_the_same(tmp_path):
    """They begin at once, in folders that are empty, and write other things under the same names."""
    command = [sys.executable, "-c", CHILD, str(tmp_path)]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    children = [subprocess.Popen([*command, str(i)], **pipes, env=environment) for i in range(3)]
    for child in children:
        assert child.stdout.readline() == "ready\n"
    for child in children:
        child.stdin.write("go\n")
        child.stdin.flush()
    told = [child.communicate(timeout=200) for child in children]
    assert [child.returncode for child in children] == [0, 0, 0], "".join(error for _, error in told)
    assert told[0][0] == told[1][0] == told[2][0]
    assert len(told[0][0].splitlines()) == 12
    for turn in range(12):
        folder = tmp_path / str(turn)
        names = {file.name for file in folder.iterdir()} | {file.name for file in (folder / "parts").iterdir()}
        parts = {f"rows-{i}.parquet" for i in range(3)} | {f"arrays-{i}.zarr" for i in range(3)}
        assert names == {"manifest.json", "parts", "plans", "rows.parquet", "rows.csv", "maps.zarr", *parts}
        with xr.open_zarr(folder / "maps.zarr", consolidated=False) as whole:
            assert len(set(whole["of"].values)) == 1


@pytest.mark.parametrize("kind", ["rows", "rows without links", "arrays"])
def test_the_first_to_finish_a_part_keeps_it(tmp_path, monkeypatch, kind):
    """Whether the other is there before, or comes while this one is being written."""

    def no_links(*names):
        raise OSError(95, "Operation not supported")

    if kind == "rows without links":
        monkeypatch.setattr(results.os, "link", no_links)
    content = arrays if kind == "arrays" else rows
    one, other, place = filled(tmp_path), filled(tmp_path), results._place

    def late(new, file, *, replace):
        monkeypatch.setattr(results, "_place", place)
        write(other, 1, content(2))
        place(new, file, replace=replace)

    write(other, 0, content(0))
    write(one, 0, content(1))
    monkeypatch.setattr(results, "_place", late)
    write(one, 1, content(1))
    for index, expected in ((0, content(0)), (1, content(2))):
        for found in (read(one, index), read(other, index)):
            assert found.equals(expected)
    assert not list(tmp_path.rglob("*.partial"))


def test_the_first_manifest_holds_for_all(tmp_path, monkeypatch):
    """One that is written between the look for it and the writing of one's own."""
    refuse = Results._refuse_foreign_files

    def late(self):
        monkeypatch.setattr(Results, "_refuse_foreign_files", refuse)
        filled(tmp_path, 0)
        refuse(self)

    monkeypatch.setattr(Results, "_refuse_foreign_files", late)
    made = filled(tmp_path)
    assert read(made, 0).equals(rows(0))


def test_a_whole_is_replaced_by_another_and_left_by_its_like(tmp_path):
    made = filled(tmp_path)
    made.finish_arrays("maps", arrays(0))
    before = (tmp_path / "maps.zarr").stat().st_ino
    made.finish_arrays("maps", arrays(0))
    assert (tmp_path / "maps.zarr").stat().st_ino == before
    made.finish_arrays("maps", arrays(1))
    with xr.open_zarr(tmp_path / "maps.zarr", consolidated=False) as whole:
        xr.testing.assert_identical(whole.load(), arrays(1))
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.parametrize("damage", ["no group", "group", "chunk", "file in the way"])
def test_a_labelled_part_that_is_broken_is_named_with_what_to_do(tmp_path, damage):
    made = filled(tmp_path)
    write(made, 1, arrays(1))
    part = tmp_path / "parts" / "0001.zarr"
    if damage == "no group":
        (part / ".zgroup").unlink()
    elif damage == "group":
        (part / ".zgroup").write_text("{")
    elif damage == "chunk":
        (part / "gate" / "0.0.0").write_bytes(b"junk")
    else:
        for file in sorted(part.rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
        part.rmdir()
        part.write_text("a file")
    with pytest.raises(ResultsError, match=r"0001\.zarr cannot be read \(.*remove it, and the same command makes it anew"):
        read(made, 1)


def test_a_folder_without_a_manifest_but_with_a_labelled_part_is_left_alone(tmp_path):
    (tmp_path / "parts" / "0000.zarr").mkdir(parents=True)
    with pytest.raises(ResultsError, match=r"is not empty and has no manifest\.json"):
        filled(tmp_path)


# Folders that are no use


def test_results_of_another_configuration_are_refused_with_the_difference(tmp_path):
    filled(tmp_path, 0)
    before = contents(tmp_path)
    with pytest.raises(ResultsError) as error:
        Results(tmp_path, CONFIGURATION | {"segment": 32, "method": "svd"})
    assert 'method is null there, "svd" now; segment is 16 there, 32 now' in str(error.value)
    assert "choose another folder or remove it" in str(error.value)
    assert "documents" not in str(error.value)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("other", [{"b": "2e", "a": "1f"}, {"a": "2e"}, {}], ids=str)
def test_other_documents_are_refused(tmp_path, other):
    filled(tmp_path, 0)
    with pytest.raises(ResultsError, match="documents"):
        Results(tmp_path, CONFIGURATION | {"documents": other})


@pytest.mark.parametrize("name", ["jax", "tokenizers", "device"])
def test_results_of_another_version_or_device_are_refused_with_the_difference(tmp_path, monkeypatch, name):
    """The first and the last of a long list alike."""
    filled(tmp_path, 0)
    environment = results.environment()
    monkeypatch.setattr(results, "environment", lambda: environment | {name: "0.0.1"})
    with pytest.raises(ResultsError, match=r"environment.*0\.0\.1"):
        filled(tmp_path)


@pytest.mark.parametrize("place", ["notes.txt", "rows.csv", "parts/0000.parquet", *OF_OTHERS, "parts/film.mp4.partial"])
def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path, place):
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_text("precious")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ResultsError, match=r"is not empty and has no manifest\.json; choose another folder"):
        filled(tmp_path)
    assert list(contents(tmp_path).values()) == [b"precious"]
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "5",
        "{}",
        '{"started": 3}',
        '{"configuration": 5}',
        '{"configuration": null}',
        "[" * 100_000,
        '{"configuration": ' + "9" * 5000 + "}",
        b"\xff\xfe",
    ],
    ids=lambda text: ascii(text)[:40],
)
def test_a_manifest_that_is_none_is_refused_and_kept(tmp_path, text):
    file = tmp_path / "manifest.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    before = contents(tmp_path)
    with pytest.raises(ResultsError, match=r"manifest\.json is no manifest of a run; choose another folder"):
        filled(tmp_path)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("place", ["file", "file/below", "file/below/it"])
def test_a_file_in_the_way_is_told_in_a_line(tmp_path, place):
    (tmp_path / "file").write_text("precious")
    with pytest.raises(ResultsError, match=f"results folder {tmp_path / place} cannot be used: .*; choose another"):
        filled(tmp_path / place)
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize("place", ["manifest.json", "parts"])
def test_a_folder_or_file_under_one_of_the_names_is_told_in_a_line(tmp_path, place):
    if place == "parts":
        (tmp_path / place).write_text("a file")
    else:
        (tmp_path / place).mkdir()
    with pytest.raises(ResultsError, match="cannot be used"):
        filled(tmp_path)


def test_a_folder_that_may_not_be_written_to_is_told_in_a_line(tmp_path, monkeypatch):
    """Permissions do not hold root back, so the refusal is the system's own, put in its place."""

    def refuse(*arguments, **keywords):
        raise PermissionError(13, os.strerror(13))

    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    with pytest.raises(ResultsError, match="cannot be used: Permission denied; choose another"):
        filled(tmp_path / "new")
