"""``python -m ports.verify``: a sound checkpoint passes, a changed one is found and named, a mistake is told in a line."""

import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxdelta.models.config import Qwen3_5Config
from ports import compare, packages, sides, verify
from ports.compare import Comparison, compare_positions, worst_errors
from ports.packages import UnusableReference
from ports.qwen3_5.reference import Reference
from ports.reference import check_segments
from ports.report import write_report
from ports.sides import Job
from ports.verdict import broken, judge, rotation_allowance
from tests.ports.conftest import write_random_checkpoint
from tests.tiny import text, tokenizer, tokens

ROOT = Path(__file__).parents[2]
RUN = ("--tokens", "51", "--segments", "17")
LAYERS = ("0 linear: S", "0 linear: tail", "1 linear: S, worst head", "2 attention: keys", "2 attention: values")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A checkpoint with a tokenizer, one without, one of another family, and texts good and bad."""
    folder = tmp_path_factory.mktemp("place")
    kinds = ["linear_attention", "linear_attention", "full_attention"]
    write_random_checkpoint(folder / "bare", num_hidden_layers=3, layer_types=kinds)
    shutil.copytree(folder / "bare", folder / "model")
    tokenizer().save(str(folder / "model" / "tokenizer.json"))
    (folder / "llama").mkdir()
    (folder / "llama" / "config.json").write_text('{"model_type": "llama"}')
    (folder / "long.txt").write_text(text(tokens(60)[0]))
    (folder / "empty.txt").write_text("")
    (folder / "one.txt").write_text("w1")
    (folder / "binary.txt").write_bytes(b"\xff\xfe\x00")
    (folder / "ids.jsonl").write_text('{"ids": [5, 3, 0, 9], "name": "mine"}\n{"ids": [1, 2]}\n')
    (folder / "beyond.jsonl").write_text('{"ids": [5, 97]}')
    (folder / "theirs").mkdir()
    (folder / "theirs" / "report.md").write_text("# Their report")
    return folder


@pytest.fixture
def here(monkeypatch, tmp_path):
    """Both sides in this process, which has imported what they need; in a folder of the test's own."""

    def run_side(side, work, say):
        if code := sides.main(side, work):
            raise verify.failure(side, work, code, "")

    monkeypatch.setattr(verify, "run_side", run_side)
    monkeypatch.chdir(tmp_path)


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "ports.verify", *map(str, arguments)]


def environment(temporary: Path) -> dict[str, str]:
    temporary.mkdir()
    return os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(temporary), "JAX_PLATFORMS": "cpu"}


def altered(folder: Path, to: Path, name: str) -> Path:
    """A copy of a checkpoint with one tensor a hundredth larger."""
    shutil.copytree(folder, to)
    weights = load_file(to / "model.safetensors")
    save_file(weights | {name: weights[name] * np.float32(1.01)}, to / "model.safetensors", {"format": "pt"})
    return to


def test_a_run_in_processes_of_their_own(place, tmp_path):
    temporary = tmp_path / "temporary"
    out = subprocess.run(
        command(place / "bare", *RUN), env=environment(temporary), cwd=tmp_path, capture_output=True, text=True
    )
    assert out.returncode == verify.HOLDS, out.stderr
    folder = tmp_path / "equivalence-bare"
    report, found = (folder / "report.md").read_text(), json.loads((folder / "comparison.json").read_text())
    for text_ in (*LAYERS, "bounds hold", "51 random ids", "Segments: 3 of 17 tokens", "transformers 5.24.0"):
        assert text_ in report
    assert all(line["holds"] for line in found["lines"])
    assert found["jaxdelta"]["torch_imported"] is False
    assert found["control"] > 1e-2, "the states must matter for the comparison to say anything"
    assert 0 < found["reference"]["peak_bytes"] < 2**34
    assert (folder / "drift.png").read_bytes().startswith(b"\x89PNG") and "<svg" in (folder / "drift.svg").read_text()
    assert "reference (float32): segment 3 of 3" in out.stdout and "jaxdelta (float32): segment 3 of 3" in out.stdout
    assert not list(temporary.iterdir())


def test_bf16_on_a_text_is_held_against_the_references_own_bf16(here, place, tmp_path):
    arguments = [str(place / "model"), *RUN, "--dtype", "bfloat16", "--text", str(place / "long.txt"), "--output", "out"]
    assert verify.main(arguments) == verify.HOLDS
    report = (tmp_path / "out" / "report.md").read_text()
    assert "3 times the error that the reference's own bfloat16 run" in report and "process: yardstick" in report
    assert "long.txt, the first 51 of 60 tokens" in report
    found = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert 1e-3 < worst_errors(found)["logits of a segment"].error < 0.2


def test_an_altered_tensor_is_found_where_it_first_matters(here, place, tmp_path, monkeypatch, capsys):
    other = altered(place / "bare", tmp_path / "other", "model.layers.1.linear_attn.A_log")
    monkeypatch.setattr(verify, "Job", lambda reference, folder, *rest: Job(reference, str(other), *rest))
    assert verify.main([str(place / "bare"), *RUN, "--output", "out"]) == verify.BROKEN
    assert "broken: layer 1 (linear): S:" in capsys.readouterr().out
    lines = {line["name"]: line for line in json.loads((tmp_path / "out" / "comparison.json").read_text())["lines"]}
    assert lines["layer 0 (linear): S"]["holds"] and not lines["layer 1 (linear): S"]["holds"]
    assert not lines["logits of a segment"]["holds"] and not lines["layer 2 (attention): keys, whole cache"]["holds"]
    assert "**Broken:** layer 1 (linear): S:" in (tmp_path / "out" / "report.md").read_text()


MISTAKES = {
    "no such model": (["nowhere"], "nowhere is neither a folder, nor an embedded model"),
    "another family": (["llama"], "model_type 'llama'; supported: qwen3_5, qwen3_5_text"),
    "empty text": (["model", "--text", "empty.txt"], "empty.txt is empty"),
    "one token": (["model", "--text", "one.txt"], "one.txt has 1 tokens; at least 2"),
    "no such text": (["model", "--text", "nowhere.txt"], "nowhere.txt is missing"),
    "binary text": (["model", "--text", "binary.txt"], "binary.txt is not UTF-8"),
    "text without a tokenizer": (["bare", "--text", "long.txt"], "has no tokenizer.json, which --text needs"),
    "an id without a row": (
        ["bare", "--text", "beyond.jsonl"],
        "beyond.jsonl:1 has the token id 97; the model's run from 0",
    ),
    "no such tokenizer": (["bare", "--tokenizer", "nowhere"], "nowhere is missing; expected a tokenizer.json"),
    "somebody's report": (["bare", "--output", "theirs"], "theirs holds report.md, which no earlier run has written"),
    "one token asked for": (["model", "--tokens", "1"], "--tokens is 1; at least 2"),
    "output is a file": (["model", "--output", "long.txt"], "long.txt"),
}


@pytest.mark.parametrize("arguments, told", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_costs_a_line(place, monkeypatch, capsys, arguments, told):
    monkeypatch.chdir(place)
    assert verify.main(arguments) == verify.UNUSABLE
    found = capsys.readouterr().err
    assert told in found and found.startswith("error: ") and len(found.splitlines()) == 1


def test_what_was_in_the_way_of_a_report_is_left_as_it_was(place):
    with pytest.raises(ValueError, match="choose another --output"):
        verify._clear(place / "theirs")
    assert (place / "theirs" / "report.md").read_text() == "# Their report"


def test_an_earlier_report_is_removed_whole_or_begun(tmp_path):
    (tmp_path / "comparison.json").write_text('{\n "subject": {')
    verify._clear(tmp_path)
    assert not list(tmp_path.iterdir())


def test_ids_are_run_by_a_model_without_a_tokenizer(place):
    """Of several documents in a file the first, which is said."""
    ids, told = verify.read_tokens(verify.inspect(place / "bare"), place / "ids.jsonl", 3)
    assert ids.tolist() == [[5, 3, 0]]
    assert told == f"mine, the first of 2 documents in {place / 'ids.jsonl'}, the first 3 of 4 tokens"


def test_a_text_is_taken_apart_by_the_tokenizer_that_is_given(place):
    by_model = verify.read_tokens(verify.inspect(place / "model"), place / "long.txt", 60)
    assert by_model[0].tolist() == [tokens(60)[0].tolist()]
    for tokenizer_ in (place / "model", place / "model" / "tokenizer.json"):
        found = verify.read_tokens(verify.inspect(place / "bare"), place / "long.txt", 60, tokenizer_)
        assert found[1] == by_model[1]
        assert found[0].tolist() == by_model[0].tolist()


@pytest.mark.parametrize("lengths", ["0", "-1", "x", "1,,2", "4,0"])
def test_segments_of_no_length_are_refused(lengths, capsys):
    with pytest.raises(SystemExit) as exit:
        verify.main(["control", f"--segments={lengths}"])
    assert exit.value.code == verify.UNUSABLE and "expected tokens of a segment, at least 1" in capsys.readouterr().err


def test_a_full_disk_is_told_beforehand(here, place, monkeypatch, capsys):
    monkeypatch.setattr(verify.shutil, "disk_usage", lambda _: namedtuple("Usage", "free")(1000))
    assert verify.main([str(place / "bare"), *RUN]) == verify.UNUSABLE
    assert "too little room: 0.00 GiB" in capsys.readouterr().err


def test_disk_estimate_is_what_is_written(here, place, tmp_path):
    info = verify.inspect(place / "bare")
    Job(str(place / "bare"), str(place / "bare"), "float32", (17, 17)).write(tmp_path, np.zeros((1, 34)))
    assert sides.main("reference", tmp_path) == 0
    written = sum(np.load(file).nbytes for file in tmp_path.glob("logits_*.npy"))
    written += sum(a.nbytes for file in tmp_path.glob("carry_*.npz") for a in np.load(file).values())
    assert verify.disk_bytes(info, (17, 17)) == written


def test_segments_are_cut_to_the_text():
    assert verify.cut(10, (4,)) == (4, 4, 2)
    assert verify.cut(10, (1, 3)) == (1, 3, 3, 3)
    assert verify.cut(3, (256,)) == (3,)
    assert verify.in_words((4, 4, 2)) == "3 of 4 tokens, the last of 2"
    assert verify.in_words((3,)) == "1 of 3 tokens"
    assert verify.in_words((1, 3, 3, 3)) == "4 of 1, 3, 3, 3 tokens"


def test_untested_versions_are_refused_unless_asked_for(here, place, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(packages.TESTED, "torch", "9.9.9")
    arguments = [str(place / "bare"), *RUN, "--output", "out"]
    assert verify.main(arguments) == verify.UNUSABLE
    told = capsys.readouterr().err
    assert f"torch is {importlib.metadata.version('torch').split('+')[0]}" in told
    assert "9.9.9 was tested" in told and "pip install" in told
    assert verify.main([*arguments, "--any-version"]) == verify.HOLDS
    assert "**Not a tested version:** torch" in (tmp_path / "out" / "report.md").read_text()


def test_a_reference_that_restarts_its_segments_is_refused(here, place, monkeypatch, capsys):
    whole = Reference.segments

    def restarting(self, tokens, splits=None, mask=None):
        begin = 0
        for length in splits or [tokens.shape[1]]:
            yield from whole(self, tokens[:, begin : begin + length])
            begin += length

    assert check_segments(Reference(place / "bare"), tokens(9)[0][None]) < 1e-5
    monkeypatch.setattr(Reference, "segments", restarting)
    with pytest.raises(UnusableReference, match="does not carry its state"):
        check_segments(Reference(place / "bare"), tokens(9)[0][None])
    assert verify.main([str(place / "bare"), *RUN, "--any-version"]) == verify.UNUSABLE
    assert "huggingface/transformers#45513" in capsys.readouterr().err


@pytest.mark.parametrize(
    "script, told",
    [
        ("kill -9 $$", "the reference process was ended by SIGKILL; was there too little memory?"),
        ("echo noise; echo boom >&2; exit 3", "the reference process ended with 3: noise\nboom"),
        ("exit 4", "the reference process ended with 4: it said nothing"),
    ],
)
def test_a_process_that_dies_is_told_with_what_it_said(monkeypatch, tmp_path, script, told):
    shell = tmp_path / "python"
    shell.write_text(f"#!/bin/sh\n{script}\n")
    shell.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(shell))
    with pytest.raises(verify.SideFailed) as error:
        verify.run_side("reference", tmp_path, lambda text: None)
    assert str(error.value) == told


def test_an_error_of_a_side_is_told_without_its_traceback_unless_asked_for(here, place, monkeypatch, capsys):
    monkeypatch.setattr(Reference, "run", lambda *_: 1 / 0)
    assert verify.main([str(place / "bare"), *RUN]) == verify.UNUSABLE
    told = capsys.readouterr().err
    assert told.endswith("error: the reference side failed with ZeroDivisionError: division by zero\n")
    assert "Traceback" not in told
    assert verify.main([str(place / "bare"), *RUN, "--debug"]) == verify.UNUSABLE
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing(place, tmp_path, signum):
    temporary = tmp_path / "temporary"
    process = subprocess.Popen(
        command(place / "bare", *RUN), env=environment(temporary), cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    with process:
        next(line for line in process.stdout if "reference (float32): loading" in line)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(signum)
    assert process.returncode == verify.INTERRUPTED
    assert children and not any(Path(f"/proc/{child}").exists() for child in children)
    assert not list(temporary.iterdir())


KINDS = ("linear", "attention")


def runs(num_segments: int = 3, length: int = 4, vocab: int = 7):
    """A synthetic run: of each segment its logits and carried arrays, keys and values only of the segment."""
    rng = np.random.default_rng(0)
    shapes = ((1, 3, 2, 5), (1, 3, 6)), ((1, length, 2, 3), (1, length, 2, 3))
    return [
        (rng.standard_normal((1, length, vocab)), [[rng.standard_normal(s) for s in layer] for layer in shapes])
        for _ in range(num_segments)
    ]


def compared(found, expected) -> dict:
    comparison = Comparison(KINDS, np.zeros((1, 12), int))
    for index, ((logits, arrays), (expected_logits, expected_arrays)) in enumerate(zip(found, expected, strict=True)):
        comparison.add(4 * index, logits, arrays, expected_logits, expected_arrays)
    whole = [np.concatenate([arrays[1][slot] for _, arrays in found], axis=1) for slot in (0, 1)]
    result = comparison.result([found[-1][1][0], whole]) | {"run_losses": None, "control": None, "yardstick": None}
    return json.loads(json.dumps(compare.to_json(result), allow_nan=False))


def test_equal_runs_have_no_error():
    assert all(worst.error == 0 for worst in worst_errors(compared(runs(), runs())).values())


@pytest.mark.parametrize(
    "change, name, where",
    [
        (lambda found: found[1][1][0][0].__imul__(1.001), "layer 0 (linear): S", "segment 2"),
        (lambda found: found[1][1][0][0][:, 2].__imul__(1.001), "layer 0 (linear): S, worst head", "segment 2"),
        (lambda found: found[0][1][0][1].__imul__(1.001), "layer 0 (linear): tail", "segment 1"),
        (lambda found: found[2][1][1][0].__imul__(1.001), "layer 1 (attention): keys", "segment 3"),
        (lambda found: found[2][1][1][1].__imul__(1.001), "layer 1 (attention): values", "segment 3"),
        (lambda found: found[1][0][:, 2].__imul__(1.001), "logits of a position", "token 6"),
    ],
)
def test_an_error_is_placed(change, name, where):
    found = runs()
    change(found)
    worst = worst_errors(compared(found, runs()))[name]
    assert worst.error == pytest.approx(1e-3) and worst.where == where


@pytest.mark.parametrize("side, value", [("jaxdelta", np.inf), ("reference", np.nan)])
def test_what_is_not_finite_is_broken_and_named(side, value, tmp_path):
    bad = runs()
    bad[1][1][0][0][0, 1, 0, 0] = value
    bad[2][0][0, 0, 0] = value
    result = compared(*((bad, runs()) if side == "jaxdelta" else (runs(), bad)))
    lines = judge(result, num_parameters=10, dtype="float32")
    assert f"NaN or infinity in layer 0 (linear): S of {side}, segment 2" in broken(result, lines)
    assert any(text.startswith("layer 0 (linear): S, worst head: nan at segment 2") for text in broken(result, lines))
    cost = {"seconds": {"run": 1.0}, "peak_bytes": 2**30}
    result["reference"] = cost | {"probe": None, "untested": [], "packages": {}, "implementation": "none"}
    result["jaxdelta"] = cost | {"packages": {}, "checkpoint": {}, "device": "cpu", "machine": "this", "commit": None}
    write_report(tmp_path, result, lines, {"Model": "synthetic"}, "float32")
    assert f"**Broken:** NaN or infinity in layer 0 (linear): S of {side}" in (tmp_path / "report.md").read_text()


def test_positions_by_hand(monkeypatch):
    monkeypatch.setattr(compare, "LOGITS_AT_ONCE", 7)  # blocks of three rows, the last of one
    found, expected = np.log([[0.5, 0.5]] * 4), np.log([[0.25, 0.75]] * 4)
    at = compare_positions(found, expected, np.array([1, 0, 1, -1]))
    np.testing.assert_allclose(at.loss, [-np.log(0.75), -np.log(0.25), -np.log(0.75), np.nan])
    np.testing.assert_allclose(at.loss_here, [np.log(2)] * 3 + [np.nan])
    np.testing.assert_allclose(at.kl, 0.25 * np.log(0.25 / 0.5) + 0.75 * np.log(0.75 / 0.5))
    np.testing.assert_allclose(at.margin, np.log(3))
    np.testing.assert_allclose(at.difference, np.linalg.norm(found[0] - expected[0]))
    assert list(at.same) == [0, 0, 0, 0]


def test_bounds_follow_the_size_and_keys_the_length():
    result = compared(runs(), runs())
    small, large = (
        {line.name: line.bound for line in judge(result, num_parameters=n, dtype="float32", rotation=1.0)}
        for n in (49_999_999, 50_000_000)
    )
    assert small["layer 0 (linear): S"] == 2e-5 and large["layer 0 (linear): S"] == 1e-4
    assert small["logits of a position"] == 2e-4 and small["layer 1 (attention): values"] == 2e-5
    assert small["layer 1 (attention): keys"] == small["layer 1 (attention): keys, whole cache"] == 1 + 2e-5
    config = Qwen3_5Config.tiny(rope_theta=1e4, rotary_dim=4)
    assert rotation_allowance(config, 1000) == pytest.approx(1000 * 0.01 * 2**-23)
    assert rotation_allowance(Qwen3_5Config.tiny(rotary_dim=0), 1000) == 0
