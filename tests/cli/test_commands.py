"""The command line: what it prints and writes, and that a mistake costs a line and nothing else."""

import csv
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import wraps

import jax
import numpy as np
import pyarrow.csv as pa_csv
import pytest
import xarray as xr

import jaxdelta as jd
from jaxdelta import cli
from jaxdelta.cli.verify import CHECKOUT
from tests.tiny import hub_tensors, model, nested_json, text, tokenizer, tokens, write

pytestmark = pytest.mark.timeout(900)  # the first test waits for all commands

# Runs commands one after another in one process, which imports the library as users do, without the tests' type checks.
CHILD = """
import contextlib, io, json, sys, traceback
from jaxdelta.cli import main
from jaxdelta.results.folder import Results

def killed(write):
    def once(self, index, data):
        if index == "0000-0001":
            raise SystemExit("killed")
        write(self, index, data)
    return once

def call(name, arguments):
    out, err, code, trace = io.StringIO(), io.StringIO(), 0, None
    write = Results.write_parts
    Results.write_parts = killed(write) if name == "killed" else write
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(arguments)
        except SystemExit as exit:
            code = exit.code
        except BaseException:
            trace = traceback.format_exc()
    Results.write_parts = write
    return dict(code=code, out=out.getvalue(), err=err.getvalue(), trace=trace)

print(json.dumps({name: call(name, arguments) for name, arguments in json.load(sys.stdin).items()}))
"""

SWEEP = ("sweep", "model", "--documents", "a.txt", "--segment", "16", "--method", "svd")
MAPS = ("sensitivity", "model", "--documents", "a.txt", "--segment", "16", "--samples", "2")
LEDGER = ("ledger", "model", "--documents", "a.txt", "--segment", "16")
THREE = (*MAPS[:3], "a.txt", "b.txt", "more.jsonl", *MAPS[4:], "--max-tokens", "33")


IDS = ("--documents", "ids.jsonl", "--segment", "16")


def to_out(name, *arguments):
    return [*arguments, "--out", f"out-{name}"]


# Arguments, and what the line must say.
MISTAKES = {
    "rank 0": ([*SWEEP, "--ranks", "0"], "ranks [0]: expected whole numbers from 1 to min(K, V) = 8"),
    "rank 9": ([*SWEEP, "--ranks", "1,9"], "ranks [1, 9]: expected whole numbers from 1 to min(K, V) = 8"),
    "rank -1": ([*SWEEP, "--ranks=-1"], "ranks [-1]"),
    "segment 0": ([*SWEEP, "--segment", "0"], "segment = 0"),
    "segment -16": ([*SWEEP, "--segment=-16"], "segment = -16"),
    "segment too long": (
        [*SWEEP, "--segment", "1000000000000"],
        "the longest document has 50 tokens: segments of 1000000000000 leave no boundary",
    ),
    "batch 0": ([*SWEEP, "--batch", "0"], "batch = 0"),
    "batch -2": ([*SWEEP, "--batch=-2"], "batch = -2"),
    "copy gap -1": ([*SWEEP, "--copy-gap=-1"], "copy_gap = -1"),
    "missing document": ([*SWEEP, "--documents", "nowhere.txt"], "nowhere.txt is missing"),
    "document in brackets": ([*SWEEP, "--documents", "no[bold]where.txt"], "no[bold]where.txt is missing"),
    "document in a closing tag": ([*SWEEP, "--documents", "no[/b]where.txt"], "no[/b]where.txt is missing"),
    "empty document": ([*SWEEP, "--documents", "empty.txt"], "empty.txt is empty"),
    "short document": ([*SWEEP, "--documents", "one.txt"], "one.txt has 1 tokens; at least 2"),
    "binary document": ([*SWEEP, "--documents", "binary.txt"], "binary.txt is not UTF-8"),
    "broken lines": ([*SWEEP, "--documents", "broken.jsonl"], "broken.jsonl, line 2: not JSON"),
    "deep JSON": ([*SWEEP, "--documents", "deep.jsonl"], "deep.jsonl, line 1: not JSON (nested too deeply)"),
    "huge JSON": ([*SWEEP, "--documents", "digits.jsonl"], "digits.jsonl, line 1: not JSON (a number has too many digits)"),
    "a table": (
        [*SWEEP, "--documents", "table.CSV"],
        "table.CSV is structured data, no text; write its texts as JSON lines",
    ),
    "text and ids": ([*SWEEP, "--documents", "both.ndjson"], 'both.ndjson, line 1: holds both "text" and "ids"'),
    "id without a row": (
        [*SWEEP, "--documents", "beyond.jsonl"],
        "beyond.jsonl:1 has the token id 97; the model's run from 0 to 96",
    ),
    "text without a tokenizer": (
        ["sweep", "bare", "--documents", "a.txt"],
        "the model has no tokenizer.json; give documents",
    ),
    "no such tokenizer": ([*SWEEP, "--tokenizer", "nowhere"], "nowhere is missing; expected a tokenizer.json"),
    "tokenizer of nothing": ([*SWEEP, "--tokenizer", "a.txt"], "a.txt is no tokenizer"),
    "half a surrogate": ([*SWEEP, "--documents", "surrogate.jsonl"], "surrogate.jsonl"),
    "folder of documents": ([*SWEEP, "--documents", "model"], "model is a folder"),
    "document twice": ([*SWEEP, "--documents", "a.txt", "a.txt"], "a.txt is given twice"),
    "no such model": (["sweep", "nowhere"], "nowhere is neither a folder, nor an embedded model"),
    "hub id without a network": (
        ["sweep", "owner/name"],
        "owner/name is no local folder and could not be had from the hub",
    ),
    "model is a file": (["sweep", "a.txt"], "a.txt is a file; expected the folder"),
    "no weights": (["sweep", "empty"], "config.json is missing"),
    "broken weights": (["sweep", "broken"], "model.safetensors cannot be read"),
    "info of nothing": (["info", "nowhere"], "nowhere is neither a folder"),
    "info of broken weights": (["info", "broken"], "model.safetensors cannot be read"),
    "info of a home that is none": (["info", "~a_user_that_is_none/x"], "~a_user_that_is_none/x"),
    "info of segment 0": (["info", "model", "--segment", "0"], "segment"),
    "info of length 0": (["info", "model", "--max-length", "0"], "max_length"),
    "info of length -7": (["info", "model", "--max-length=-7"], "max_length"),
    "maps, rank and validate": (
        [*MAPS, "--validate", "--rank", "2"],
        "--validate measures removals by the next-token loss",
    ),
    "maps, loss and validate": (
        [*MAPS, "--validate", "--loss", "kl"],
        "--validate measures removals by the next-token loss",
    ),
    "maps, costly estimators without validate": (
        [*MAPS, "--costly-estimators"],
        "--costly-estimators is for --validate",
    ),
    "maps, costly estimators by their other name": ([*MAPS, "--dear"], "--costly-estimators is for --validate"),
    "maps, segment too long": (
        [*MAPS, "--segment", "50"],
        "the longest document has 50 tokens: segments of 50 leave no boundary",
    ),
    "maps, few tokens": (
        [*MAPS, "--max-tokens", "16"],
        "the longest document has 16 tokens: segments of 16 leave no boundary",
    ),
    "maps, one token": ([*MAPS, "--max-tokens", "1"], "a.txt has 1 tokens; at least 2 are needed to score one"),
    "maps, no token": ([*MAPS, "--max-tokens=-5"], "--max-tokens is -5; expected at least 1"),
    "maps, segment 0": ([*MAPS, "--segment", "0"], "segment is 0"),
    "maps, samples -1": ([*MAPS, "--samples=-1"], "samples is -1"),
    "maps, divergence of no sample": ([*MAPS, "--samples", "0", "--loss", "kl"], "it needs samples of at least 1"),
    "maps, rank 9": ([*MAPS, "--rank", "9"], "rank 9 is outside of 1 to min(K, V) = 8"),
    "maps, frozen basis of nothing": (
        [*MAPS, "--frozen-basis"],
        "frozen_basis is for an intervention that has one",
    ),
    "maps, missing document": ([*MAPS, "--documents", "nowhere.txt"], "nowhere.txt is missing"),
    "ledger, dim of a million": (["ledger", "--dim", "1000000"], "dim = 1000000, draws = 200: about"),
    "ledger, dim 7": (["ledger", "--dim", "7"], "dim = 7, draws = 200, seed = 0; expected at least 8, 1 and 0"),
    "ledger, draws 0": (["ledger", "--draws", "0"], "draws = 0"),
    "maps of no such model": (["sensitivity", "nowhere"], "nowhere is neither a folder, nor an embedded model"),
    "ledger, dim of a model": ([*LEDGER, "--dim", "9"], "--dim is for a ledger without a model"),
    "ledger, tokens of no model": (["ledger", "--max-tokens", "9"], "--max-tokens is for a ledger with a model"),
    "ledger, segment 0": ([*LEDGER, "--segment", "0"], "segment is 0"),
    "ledger, no token": ([*LEDGER, "--max-tokens=-5"], "--max-tokens is -5; expected at least 1"),
    "no token of a sweep": ([*SWEEP, "--max-tokens", "0"], "--max-tokens is 0; expected at least 1"),
    "ledger of a model without a name": (
        ["ledger", "--model", ""],
        ". has no weights of its own; give one of the folders in it",
    ),
    "ledger, missing document": ([*LEDGER, "--documents", "nowhere.txt"], "nowhere.txt is missing"),
    "ledger of no such model": (["ledger", "--model", "nowhere"], "nowhere is neither a folder, nor an embedded model"),
}
# Of options that the parser knows to be wrong, in the manner of all commands: how it is used, then the line.
MISUSES = {
    "ranks a,b": ([*SWEEP, "--ranks", "a,b"], "argument --ranks: 'a,b'; expected whole numbers with commas"),
    "ranks 1.5": ([*SWEEP, "--ranks", "1.5"], "argument --ranks: '1.5'"),
    "ranks 1,,2": ([*SWEEP, "--ranks", "1,,2"], "argument --ranks: '1,,2'"),
    "no ranks": ([*SWEEP, "--ranks", ""], "argument --ranks: ''"),
    "dtype": ([*SWEEP, "--dtype", "float16"], "argument --dtype: invalid choice: 'float16'"),
    "method": ([*SWEEP, "--method", "qr"], "argument --method: invalid choice: 'qr'"),
    "segment of letters": ([*SWEEP, "--segment", "x"], "argument --segment: invalid int value: 'x'"),
    "unknown option": ([*SWEEP, "--rang", "1"], "--rang"),
    "no documents": (["sweep", "model", "--documents"], "argument --documents: expected at least one argument"),
    "unknown command": (["swep"], "'swep'"),
    "no command": ([], "{sweep,compare,sensitivity,spectrum,keys,reads,ledger,report,info,verify}"),
    "ledger, seed -1": (["ledger", "--seed=-1"], "argument --seed: -1 is not a whole number from 0 to 4294967295"),
    "seed of 33 bits": (
        [*MAPS, "--seed", "4294967296"],
        "argument --seed: 4294967296 is not a whole number from 0 to 4294967295",
    ),
    "seed of 67 bits": ([*MAPS, "--seed", "9" * 20], "argument --seed: 99999999999999999999 is not a whole number"),
    "seed of 5000 digits": ([*MAPS, "--seed", "9" * 5000], "is not a whole number from 0 to 4294967295"),
    "seed of letters": ([*MAPS, "--seed", "x"], "argument --seed: invalid int value: 'x'"),
    "info of nothing at all": (["info"], "model"),
}
FOLDERS = {
    "results folder is a file": ([*SWEEP, "--out", "a.txt"], "results folder a.txt cannot be used: "),
    "results folder below a file": ([*SWEEP, "--out", "a.txt/x"], "results folder a.txt/x cannot be used: "),
    "results folder of another": ([*SWEEP, "--out", "foreign"], "foreign is not empty and has no manifest.json"),
    "maps of another run": ([*MAPS, "--seed", "1", "--out", "out-maps"], "seed is 0 there, 1 now"),
    "maps where a sweep was": ([*MAPS, "--out", "out-first"], "out-first holds results of another configuration"),
    "ledger where a sweep was": (["ledger", "--out", "out-first"], "out-first holds results of another configuration"),
    "ledger of another run": ([*LEDGER, "--segment", "8", "--out", "out-transitions"], "segment is 16 there, 8 now"),
    "results of another run": ([*SWEEP, "--copy-gap", "9", "--out", "out-first"], "copy_gap is 8 there, 9 now"),
}
RUNS = {
    "first": to_out("first", *SWEEP, "--ranks", "1,2", "--copy-gap", "8"),
    "again": to_out("first", *SWEEP, "--ranks", "1,2", "--copy-gap", "8"),
    "several documents": to_out(
        "several", "sweep", "model", "--documents", "a.txt", "b.txt", "more.jsonl", "--ranks", "1", "--segment", "16"
    ),
    "bf16": to_out("bf16", *SWEEP, "--ranks", "1", "--dtype", "bfloat16"),
    "default folder": [*SWEEP, "--ranks", "1"],
    "info": ["info", "model"],
    "ids": to_out("ids", "sweep", "bare", *IDS, "--ranks", "1,2", "--method", "svd"),
    "text by a tokenizer": to_out(
        "texts",
        "sweep",
        "bare",
        "--tokenizer",
        "model",
        "--documents",
        "a.txt",
        "ids.jsonl",
        *IDS[2:],
        "--max-tokens",
        "40",
    ),
    "maps of ids": to_out("maps-ids", "sensitivity", "bare", *IDS, "--samples", "0"),
    "transitions of ids": to_out("transitions-ids", "ledger", "--model", "bare", *IDS),
    "info of a bare model": ["info", "bare"],
    "verify": ["verify", "--tokens", "5", "model"],
    "--version": ["--version"],
    "info of a hub folder": ["info", "hub", "--max-length", "100000"],
    "sweep --help": ["sweep", "--help"],
    "info --help": ["info", "--help"],
    "--help": ["--help"],
    "brackets": [*SWEEP, "--ranks", "1", "--out", "out-[bold]"],
    "maps": to_out("maps", *MAPS),
    "maps again": to_out("maps", *MAPS),
    "maps of first order through a cut": [*MAPS, "--samples", "0", "--rank", "2"],
    "validated": to_out("validated", *THREE, "--validate", "--directions", "6"),
    "validated before": to_out("validated", *THREE),
    "killed": to_out("killed", *THREE),
    "continued": to_out("killed", *THREE),
    "ledger": ["ledger", "--dim", "8", "--draws", "2"],
    "ledger kept": to_out("ledger", "ledger", "--dim", "8", "--draws", "2"),
    "sensitivity --help": ["sensitivity", "--help"],
    "transitions": to_out("transitions", *LEDGER),
    "transitions again": to_out("transitions", *LEDGER),
    "transitions of leading tokens": [*LEDGER[:3], "a.txt", "b.txt", "--max-tokens", "3"],
    "ledger --help": ["ledger", "--help"],
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with models, documents and what is none of them."""
    folder = tmp_path_factory.mktemp("place")
    jd.save(model(), folder / "model")
    mtp = {"mtp.norm.weight": hub_tensors()["model.language_model.norm.weight"]}
    tokenizer().save(str(write(folder / "hub", hub_tensors() | mtp, nested_json()) / "tokenizer.json"))
    shutil.copytree(folder / "model", folder / "bare")
    (folder / "bare" / "tokenizer.json").unlink()
    for name in ("empty", "foreign", "broken"):
        (folder / name).mkdir()
    write(folder / "broken", hub_tensors(), nested_json())
    weights = folder / "broken" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    (folder / "foreign" / "notes.txt").write_text("precious")
    for name, ids in zip(("a.txt", "b.txt"), tokens(50, 33), strict=True):
        (folder / name).write_text(text(ids))
    contents = {
        "more.jsonl": json.dumps({"text": text(tokens(40)[0])}),
        "empty.txt": "",
        "one.txt": "w1",
        "broken.jsonl": '"w1 w2"\n{"text": "w1\n',
        "surrogate.jsonl": '"w1 w2 \\ud800"',
        "ids.jsonl": json.dumps({"ids": tokens(50, 33)[0].tolist(), "name": "a"}),
        "beyond.jsonl": '{"ids": [1, 2, 97]}',
        "deep.jsonl": "[" * 100_000,
        "digits.jsonl": '{"text": "w1", "id": ' + "9" * 5000 + "}",
        "table.CSV": "text\nw1\n",
        "both.ndjson": '{"text": "w1 w2", "ids": [1, 2]}',
    }
    for name, content in contents.items():
        (folder / name).write_text(content)
    (folder / "binary.txt").write_bytes(bytes(range(256)))
    return folder


def environment():
    return os.environ | {"HF_HUB_OFFLINE": "1", "COLUMNS": "80", "TERM": "dumb", "PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.fixture(scope="module")
def outcomes(place):
    """What every command above printed, and its exit status, by name."""
    commands = RUNS | {name: a if a[0] == "info" else to_out(name, *a) for name, (a, _) in MISTAKES.items()}
    commands |= {name: arguments for name, (arguments, _) in (MISUSES | FOLDERS).items()}
    child = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        cwd=place,
        env=environment(),
        timeout=850,
    )
    assert child.returncode == 0, child.stderr
    found = json.loads(child.stdout)
    for outcome in found.values():
        outcome["err"] = re.sub(PROGRESS, "", outcome["err"], flags=re.MULTILINE)
    return found


# What a busy machine has to say between two documents.
PROGRESS = r"^(running segments \(the first compiles\)|measuring removals)(: \d+ of \d+)?, (\d+ h )?(\d+ min)?( ?\d+ s)?\n"


# Mistakes


@pytest.mark.parametrize("name", MISTAKES | FOLDERS)
def test_a_mistake_is_told_in_a_line(outcomes, name):
    """Status 1, one line on stderr that says what is wrong, no traceback."""
    found, message = outcomes[name], (MISTAKES | FOLDERS)[name][1]
    assert found["trace"] is None
    assert found["code"] == 1
    assert found["err"].startswith("error: ")
    assert message in found["err"]
    assert found["err"].count("\n") == 1
    assert found["out"].strip() == ""


@pytest.mark.parametrize("name", [name for name, (arguments, _) in MISTAKES.items() if arguments[0] != "info"])
@pytest.mark.usefixtures("outcomes")
def test_a_mistake_leaves_no_results_folder(place, name):
    assert not (place / f"out-{name}").exists()


def test_what_was_in_the_way_is_left_as_it_was(outcomes, place):
    assert (place / "foreign" / "notes.txt").read_text() == "precious"
    assert (place / "a.txt").read_text() == text(tokens(50, 33)[0])


@pytest.mark.parametrize("name", MISUSES)
def test_a_misuse_is_told_in_the_last_line(outcomes, name):
    """Status 2 and no traceback; the lines before say how the command is used."""
    found = outcomes[name]
    assert found["trace"] is None
    assert found["code"] == 2
    assert found["err"].startswith("usage: jaxdelta")
    assert MISUSES[name][1] in found["err"].splitlines()[-1]
    assert found["out"] == ""


def test_running_out_of_device_memory_is_told_in_a_line(monkeypatch, capsys, place):
    """XLA's own error, which is no MemoryError."""

    @wraps(jd.sweep)  # whose defaults the options take
    def exhausted(*arguments, **keywords):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 624000000000 bytes.")

    monkeypatch.setattr("jaxdelta.cli.sweep.sweep", exhausted)
    with pytest.raises(SystemExit) as exit:
        cli.main(["sweep", str(place / "model"), "--documents", str(place / "a.txt")])
    assert exit.value.code == 1
    assert "Out of memory allocating 624000000000 bytes" in capsys.readouterr().err


def test_an_interrupt_keeps_what_is_finished_and_says_how_to_go_on(place):
    """Ctrl-C once the first part is there."""
    (place / "many.jsonl").write_text("\n".join(json.dumps(text(ids)) for ids in tokens(*[50] * 300)))
    command = to_out("interrupted", *SWEEP, "--ranks", "1", "--documents", "many.jsonl", "--batch", "1")
    process = subprocess.Popen(
        [sys.executable, "-c", "from jaxdelta.cli import main; main()", *command],
        cwd=place,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    parts, deadline = place / "out-interrupted" / "parts", time.monotonic() + 200
    while not (parts / "0000-0000.parquet").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "the same command continues" in err
    assert "Traceback" not in err
    assert (parts / "0000-0000.parquet").exists()


# Streams


def again(place, environ=None, **streams):
    """The first sweep once more, as a process of its own; its figures are drawn anew."""
    for suffix in ("png", "svg"):
        (place / "out-first" / f"loss_by_rank.{suffix}").unlink(missing_ok=True)
    return subprocess.run(
        [sys.executable, "-c", "from jaxdelta.cli import main; main()", *RUNS["first"]],
        cwd=place,
        env=environment() | (environ or {}),
        stderr=subprocess.PIPE,
        **streams,
    )


def has_figures(place):
    return all((place / "out-first" / f"loss_by_rank.{suffix}").exists() for suffix in ("png", "svg"))


@pytest.mark.usefixtures("outcomes")
def test_a_closed_pipe_is_no_failure(place):
    read, write = os.pipe()
    os.close(read)
    found = again(place, stdout=write)
    os.close(write)
    assert (found.returncode, found.stderr) == (0, b"")
    assert has_figures(place)


@pytest.mark.usefixtures("outcomes")
def test_a_full_disk_below_stdout_is_told_after_the_files_are_written(place):
    with open("/dev/full", "w") as full:
        found = again(place, stdout=full)
    assert found.returncode == 1
    assert found.stderr.count(b"\n") == 1
    assert b"No space left on device" in found.stderr
    assert has_figures(place)


@pytest.mark.parametrize(
    "environ",
    [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}],
    ids=["ascii", "C"],
)
def test_a_table_is_printed_in_ascii_where_it_must_be(outcomes, place, environ):
    found = again(place, environ, stdout=subprocess.PIPE)
    assert (found.returncode, found.stderr) == (0, b"")
    assert has_figures(place)
    said = found.stdout.decode("ascii")
    assert "+-" in said
    numbers = [word for word in outcomes["first"]["out"].split() if re.fullmatch(r"[-+]?\d+\.\d+", word)]
    assert [word for word in said.split() if re.fullmatch(r"[-+]?\d+\.\d+", word)] == numbers


@pytest.mark.usefixtures("outcomes")
def test_no_colour_where_none_is_wanted(place):
    found = again(place, {"NO_COLOR": "1", "FORCE_COLOR": "1", "TERM": "xterm-256color"}, stdout=subprocess.PIPE)
    assert found.returncode == 0
    assert not re.search(rb"\x1b\[[0-9;]*(3[0-9]|4[0-9]|38|48)[0-9;]*m", found.stdout)


# What is printed and written


@pytest.mark.parametrize("name", ["first", "several documents", "bf16", "default folder"])
def test_a_sweep_prints_a_row_for_each_rank(outcomes, name):
    found = outcomes[name]
    assert (found["code"], found["trace"], found["err"]) == (0, None, "")
    printed = [line.split()[0] for line in found["out"].splitlines() if line.split() and line.split()[0].isdigit()]
    assert printed == (["8", "2", "1"] if name == "first" else ["8", "1"])
    assert max(map(len, found["out"].splitlines()[:-1])) <= 80


@pytest.mark.parametrize(
    ("name", "folder", "count"),
    [
        ("first", "out-first", 1),
        ("several documents", "out-several", 3),
        ("default folder", "results/sweep-model", 1),
        ("brackets", "out-[bold]", 1),
    ],
)
def test_a_sweep_writes_rows_manifest_and_figure_where_it_says(outcomes, place, name, folder, count):
    written = {"rows.csv", "rows.parquet", "manifest.json", "loss_by_rank.png"}
    assert {file.name for file in (place / folder).iterdir()} >= written
    last = outcomes[name]["out"].splitlines()[-1]
    assert all(name in last for name in (folder, *written))
    rows = (place / folder / "rows.csv").read_text().splitlines()
    assert len(rows) == 1 + count * (3 if name == "first" else 2)


def test_ids_are_swept_as_the_text_that_they_are_of(outcomes, place):
    """By a model without a tokenizer, and beside a text that another folder's tokenizer takes apart."""
    for name in ("ids", "text by a tokenizer"):
        assert (outcomes[name]["code"], outcomes[name]["trace"], outcomes[name]["err"]) == (0, None, "")
    rows = [pa_csv.read_csv(place / f"out-{name}" / "rows.csv").to_pylist() for name in ("first", "ids", "texts")]
    of_text, of_ids = ([(row["rank"], row["num_tokens"], row["loss"]) for row in found] for found in rows[:2])
    assert of_text == of_ids
    assert {row["document"] for row in rows[1]} == {"a"}
    both = {(row["document"], row["rank"]): (row["num_tokens"], row["loss"]) for row in rows[2]}
    assert both["a.txt", 1] == both["a", 1]
    assert both["a", 1][0] == 39


def test_ids_are_mapped_and_put_through_the_ledger(outcomes, place):
    for name in ("maps of ids", "transitions of ids"):
        assert said_by(outcomes[name])
    assert maps_in(place / "out-maps-ids").document.values.tolist() == ["a"]


def test_info_tells_how_a_model_without_a_tokenizer_is_run(outcomes):
    said = " ".join(outcomes["info of a bare model"]["out"].split())
    assert "none: give documents as token ids, or --tokenizer" in said


def test_the_version_is_told_and_is_that_of_the_package(outcomes):
    assert outcomes["--version"]["out"] == f"jaxdelta {jd.__version__}\n"
    assert jd.__version__ == importlib.metadata.version("jaxdelta")


def test_verify_says_where_the_comparison_is_run(outcomes):
    """It has compared nothing, which is no success."""
    found = outcomes["verify"]
    assert (found["code"], found["trace"], found["out"]) == (1, None, "")
    assert f"cd {CHECKOUT} && python -m ports.verify --tokens 5 model" in found["err"]


def test_verify_outside_of_a_checkout_says_what_it_takes(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("jaxdelta.cli.verify.CHECKOUT", tmp_path)
    with pytest.raises(SystemExit):
        cli.main(["verify"])
    said = capsys.readouterr().err
    assert "in a checkout of the repository" in said
    assert "python -m ports.verify MODEL" in said


def test_the_same_command_again_prints_the_same(outcomes):
    assert outcomes["again"]["out"] == outcomes["first"]["out"]
    assert outcomes["again"]["code"] == 0


def test_the_manifest_pins_model_documents_and_options(outcomes, place):
    configuration = json.loads((place / "out-bf16" / "manifest.json").read_text())["configuration"]
    assert (configuration["model"], configuration["dtype"]) == ("model", "bfloat16")
    assert re.fullmatch("[0-9a-f]{64}", configuration["parameters"])
    (unit,) = json.loads((place / "out-bf16" / "plans" / "0000.json").read_text())
    assert [(name, rank, len(sha)) for name, sha, rank, *_ in unit] == [("a.txt", rank, 64) for rank in (8, 1)]


def test_info_says_what_a_checkpoint_is_and_needs(outcomes):
    found = outcomes["info of a hub folder"]
    assert (found["code"], found["err"]) == (0, "")
    said = " ".join(found["out"].split())
    assert "2 layers: 1 Gated DeltaNet, 1 attention" in said
    assert "1 layers x 6 heads of 8 x 11 (K x V)" in said
    assert "44, 59, 97 (tied head)" in said
    assert f"{sum(a.size for a in hub_tensors().values()):,} in 27 tensors: 25 in BF16, 2 in F32" in said
    assert "1 of multi-token prediction" in said
    assert "for a row of 100,000 tokens" in said
    assert "tokenizer.json" in said


@pytest.mark.parametrize(("command", "count"), [("sweep", 16), ("sensitivity", 17), ("ledger", 13), ("info", 5)])
def test_help_explains_every_option(outcomes, command, count):
    """Each option begins a line and has a text beside or below it."""
    said = outcomes[f"{command} --help"]["out"]
    found = re.findall(r"^  (?:-h, )?(--?[a-z-]+|model)[^\n]*?(?:  |\n {10,})(\S[^\n]*)", said, re.MULTILINE)
    assert len(found) == count
    assert all(len(text.split()) > 1 for _, text in found)


def test_help_names_the_commands(outcomes):
    assert re.search(r"^ +sweep +\w+", outcomes["--help"]["out"], re.MULTILINE)
    assert re.search(r"^ +sensitivity +\w+", outcomes["--help"]["out"], re.MULTILINE)
    assert re.search(r"^ +ledger +\w+", outcomes["--help"]["out"], re.MULTILINE)
    assert re.search(r"^ +info +\w+", outcomes["--help"]["out"], re.MULTILINE)


def test_a_ledger_prints_a_verdict_for_every_line_and_keeps_its_rows(outcomes, place):
    found, kept = outcomes["ledger"], outcomes["ledger kept"]
    assert (found["code"], found["trace"], found["err"]) == (0, None, "")
    assert max(map(len, found["out"].splitlines())) <= 80
    rows = (place / "out-ledger" / "rows.csv").read_text().splitlines()[1:]
    assert len(re.findall(r"(?:holds|does not hold) *$", found["out"], re.MULTILINE)) == len(rows) > 50
    assert kept["out"].startswith(found["out"])
    assert kept["out"].splitlines()[-1] == "Written to out-ledger: rows.csv, rows.parquet, manifest.json"


# Sensitivities


def maps_in(folder):
    with xr.open_zarr(folder / "maps.zarr", consolidated=False) as found:
        return found.load()


def said_by(outcome):
    """What a command printed, on one line."""
    assert (outcome["code"], outcome["trace"], outcome["err"]) == (0, None, "")
    return " ".join(outcome["out"].split())


@pytest.mark.parametrize("name", ["maps", "maps of first order through a cut"])
def test_sensitivities_print_the_most_important_heads_and_that_nothing_was_validated(outcomes, name):
    said = said_by(outcomes[name])
    assert "Heads by estimated rise of the loss" in said
    assert "Not validated" in said
    rows = [line.split() for line in outcomes[name]["out"].splitlines() if re.match(r" *\d", line)]
    for column, ranked in ((2, rows[:6]), (3, rows[6:])):  # by output, then by state
        assert sorted(int(row[1]) for row in ranked) == list(range(6))
        effects = [float(row[column]) for row in ranked]
        assert effects == sorted(effects, reverse=True)
    assert max(map(len, outcomes[name]["out"].splitlines()[:-1])) <= 80


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("maps", "out-maps"),
        ("maps of first order through a cut", "results/sensitivity-model"),
        ("validated", "out-validated"),
    ],
)
def test_sensitivities_write_maps_manifest_and_figures_where_they_say(outcomes, place, name, folder):
    written = {
        "maps.zarr",
        "manifest.json",
        "heads.csv",
        "heads.parquet",
        "heads.png",
        "heads.svg",
        "by_rank.png",
        "by_rank.svg",
    }
    *_, before, last = outcomes[name]["out"].splitlines()
    if name == "validated":
        removals = {"rows.csv", "rows.parquet", "manifest.json", "validation.png", "validation.svg", "validation.csv"}
        assert {file.name for file in (place / folder / "removals").iterdir()} == removals | {"parts", "plans"}
        assert all(x in before for x in (f"{folder}/removals", *removals))
    assert {file.name for file in (place / folder).iterdir()} == written | {"parts", "plans"} | (
        {"removals"} if name == "validated" else set()
    )
    assert all(x in last for x in (folder, *written))


def test_maps_are_of_the_tokens_boundaries_and_samples_asked_for(outcomes, place):
    maps = maps_in(place / "out-maps")
    assert maps.document.values.tolist() == ["a.txt"]
    assert maps.boundary.values.tolist() == [16, 32, 48]
    assert (maps.sizes["token"], maps.sizes["sample"], maps.attrs["samples"]) == (50, 2, 2)
    cut = maps_in(place / "results" / "sensitivity-model")
    assert "fisher" not in cut
    np.testing.assert_allclose(cut.sigma.isel(direction=slice(2, None)), 0, atol=1e-4)
    three = maps_in(place / "out-validated")
    assert three.document.values.tolist() == ["a.txt", "b.txt", "more.jsonl:1"]
    assert three.scored.values.tolist() == [32, 32, 32]


def test_sensitivities_again_print_the_same(outcomes):
    assert outcomes["maps again"]["out"] == outcomes["maps"]["out"]


def test_sensitivities_killed_between_two_documents_go_on_to_the_same_maps(outcomes, place):
    """The first document was kept; the arrays are those of a run that nothing stopped."""
    assert outcomes["killed"]["code"] == "killed"
    assert said_by(outcomes["continued"])
    assert sorted(file.name for file in (place / "out-killed" / "parts").iterdir()) == [
        f"0000-{i:04d}.zarr" for i in range(3)
    ]
    ages = [(place / "out-killed" / "parts" / f"0000-{i:04d}.zarr" / ".zgroup").stat().st_mtime for i in range(2)]
    started = (place / "out-killed" / "manifest.json").stat().st_mtime
    assert ages[0] < ages[1] <= started
    whole = maps_in(place / "out-validated")
    estimates = whole.drop_vars([name for name in whole if name.endswith("_measured")])
    xr.testing.assert_equal(maps_in(place / "out-killed"), estimates)


def test_removals_measured_once_stay_with_their_maps(outcomes, place):
    """The same command without --validate shows what is known, and measures nothing."""
    assert outcomes["validated before"]["out"] == outcomes["validated"]["out"]
    maps = maps_in(place / "out-validated")
    assert maps.attrs["validated"] == "yes: removals of heads, layers and 6 directions were measured (*_measured)"
    rows = list(csv.DictReader((place / "out-validated" / "removals" / "rows.csv").read_text().splitlines()))
    for row in rows:
        if (row["kind"], row["estimator"]) == ("head_state", "measured"):
            at = dict(document=row["document"], layer=int(row["layer"]), head=int(row["head"]))
            assert float(maps.head_state_measured.sel(at)) == float(row["effect"])
    assert {row["boundary"] for row in rows if row["kind"] == "direction"} == {"16"}


def test_a_validation_prints_a_table_for_each_kind_and_states_its_numbers(outcomes, place):
    said = said_by(outcomes["validated"])
    kinds = ("one direction", "a head's output", "a head's state", "a layer's outputs", "a layer's states")
    for kind in kinds:
        assert f"Predicted against measured: {kind}" in said
    assert "6 units, 3 documents" in said
    assert "Validated against measured removal of outputs: Spearman" in said
    assert "Not validated" not in said
    rows = (place / "out-validated" / "removals" / "validation.csv").read_text().splitlines()
    assert rows[0] == '"kind","estimator","metric","value","low","high"'
    assert {row.split(",")[0].strip('"') for row in rows[1:]} == {
        "direction",
        "head_output",
        "head_state",
        "layer_output",
        "layer_state",
    }


def test_the_manifest_of_maps_pins_what_decides_them(outcomes, place):
    configuration = json.loads((place / "results" / "sensitivity-model" / "manifest.json").read_text())["configuration"]
    assert (configuration["analysis"], configuration["samples"], configuration["seed"]) == ("sensitivity", 0, 0)
    assert configuration["intervention"]["name"] == "Truncate"
    assert configuration["intervention"]["rank"] == 2
    ((key,), *_) = json.loads((place / "results" / "sensitivity-model" / "plans" / "0000.json").read_text())
    assert key[0] == "a.txt"


# The ledger of a model


def test_a_models_ledger_prints_three_tables_and_what_did_not_fit(outcomes):
    said = said_by(outcomes["transitions"])
    assert "300 transitions of a token: n_h = 1, K = 8, 1 documents" in said
    assert "so rho = alpha, the pin" in said
    assert "Products over windows, by layer" in said
    assert "Products over windows, by length" in said
    assert "Documents too short for a window: 1 of 1 for 64" in said
    assert max(map(len, outcomes["transitions"]["out"].splitlines()[:-1])) <= 80
    assert "…" not in outcomes["transitions"]["out"]


def test_a_models_ledger_again_prints_the_same(outcomes):
    assert outcomes["transitions again"]["out"] == outcomes["transitions"]["out"]


@pytest.mark.parametrize(
    ("name", "folder"), [("transitions", "out-transitions"), ("transitions of leading tokens", "results/ledger-model")]
)
def test_a_models_ledger_writes_arrays_rows_manifest_and_figures_where_it_says(outcomes, place, name, folder):
    written = {"transitions.zarr", "manifest.json", "transitions.csv", "windows.csv"}
    written |= {f"{figure}.{suffix}" for figure in ("distributions", "products", "angles") for suffix in ("png", "svg")}
    assert said_by(outcomes[name])
    assert {file.name for file in (place / folder).iterdir()} == written | {"parts", "plans"}
    last = outcomes[name]["out"].splitlines()[-1]
    assert all(name in last for name in (folder, *written))


def test_a_models_ledger_is_of_the_tokens_asked_for(outcomes, place):
    with xr.open_zarr(place / "results" / "ledger-model" / "transitions.zarr", consolidated=False) as found:
        assert found.document.values.tolist() == ["a.txt", "b.txt"]
        assert found.beta.shape == (2, 3, 1, 6, 1)
        assert found["count"].values[:, :2].tolist() == [[3, 0], [3, 0]]
    manifest = json.loads((place / "out-transitions" / "manifest.json").read_text())
    assert manifest["configuration"]["analysis"] == "transitions"
    assert manifest["finished"]
