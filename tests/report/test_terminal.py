"""What a stream takes: letters, whole lines, readers who leave."""

import io
import os
import subprocess
import sys

import pytest

from jaxdelta.report.terminal import SPELLED, Terminal, flush, spelled


@pytest.mark.parametrize("letter", SPELLED)
def test_letters_are_spelled_in_ascii(letter):
    assert spelled(letter, "ascii").isascii()
    assert "?" not in spelled(letter, "ascii")
    assert spelled(letter, "utf-8") == letter


def test_only_letters_that_an_encoding_lacks_are_spelled():
    assert spelled("1 ± 2², ‖k‖, 漢", "latin-1") == "1 ± 2², ||k||, ?"
    assert spelled("1 ± 2², ‖k‖, 漢", "ascii") == "1 +- 2^2, ||k||, ?"
    assert spelled("name \udcff", "utf-8") == "name ?"


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_an_output_prints_what_its_stream_has_no_letters_for(monkeypatch, encoding):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    Terminal().say("ö ‖k‖ \udcff")
    stream.flush()
    assert stream.buffer.getvalue().decode(encoding) == ("ö ‖k‖ ?\n" if encoding == "utf-8" else "? ||k|| ?\n")


def test_a_line_is_not_cut(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "20")
    Terminal().say("x" * 200 + " [bold]")
    assert capsys.readouterr().out == "x" * 200 + " [bold]\n"


def test_there_may_be_no_stream_at_all(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    Terminal().say("nobody hears this")
    assert flush(None) is None


CHILD = """
import sys
from jaxdelta.report.terminal import Terminal, flush
console = Terminal(stderr="stderr" in sys.argv)
for _ in range(3):
    console.say("x" * 100_000)
print("still here", file=sys.stdout if "stderr" in sys.argv else sys.stderr)
sys.exit(3)
"""


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_reader_who_leaves_does_not_end_the_command(name):
    """Neither its status nor its other stream changes, and the interpreter does not complain when it ends."""
    read, write = os.pipe()
    os.close(read)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | {name: write}
    child = subprocess.run(
        [sys.executable, "-c", CHILD, name], **pipes, text=True, env=os.environ | {"PYTHONPATH": os.getcwd()}
    )
    os.close(write)
    assert child.returncode == 3
    assert (child.stderr if name == "stdout" else child.stdout) == "still here\n"


def test_a_stream_that_takes_nothing_is_told_once():
    with open("/dev/full", "w") as stream:
        stream.write("some")
        assert flush(stream) == "No space left on device"
        assert flush(stream) is None
