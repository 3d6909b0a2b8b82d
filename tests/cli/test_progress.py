"""How far a run is, without a terminal and with one."""

import io
import re
import sys
import time

import pytest
from rich.console import Console
from rich.progress import Progress

from jaxdelta.cli import progress as module
from jaxdelta.cli.progress import Lines, elapsed, progress


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.0, "0 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (70.0, "1 min 10 s"), (3599.6, "1 h 0 min"), (7500.0, "2 h 5 min")],
)
def test_times_are_read_as_on_a_clock(seconds, said):
    assert elapsed(seconds) == said


def test_lines_say_how_far_it_is_and_go_on_while_nothing_moves(capsys):
    with Lines(interval=0.05) as lines:
        task = lines.add_task("running segments", total=None)
        time.sleep(0.12)
        lines.update(task, completed=12, total=64)
        time.sleep(0.2)
        lines.add_task("measuring removals", total=3)
        time.sleep(0.2)
    found = capsys.readouterr()
    assert found.out == ""
    said = found.err.splitlines()
    assert "running segments, 0 s" in said
    assert "running segments: 12 of 64, 0 s" in said
    assert "measuring removals: 0 of 3, 0 s" in said


def test_a_short_run_says_nothing(capsys):
    with progress(Console(file=io.StringIO())) as lines:
        lines.update(lines.add_task("running segments", total=None), completed=1, total=1)
    assert capsys.readouterr() == ("", "")


def test_a_run_that_fails_ends_its_lines(capsys):
    with pytest.raises(ValueError, match="wrong"), Lines(interval=0.05) as lines:
        lines.add_task("running segments", total=2)
        raise ValueError("wrong")
    capsys.readouterr()
    time.sleep(0.15)
    assert capsys.readouterr().err == ""


def test_nobody_has_to_read_the_lines(monkeypatch):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Closed())
    with Lines(interval=0.02) as lines:
        lines.add_task("running segments", total=2)
        time.sleep(0.1)


@pytest.mark.parametrize(("out", "err", "shown"), [(True, True, "out"), (False, True, "err"), (False, False, None)])
def test_a_bar_is_where_the_terminal_is(monkeypatch, out, err, shown):
    monkeypatch.setenv("TERM", "xterm")
    files = {"out": io.StringIO(), "err": io.StringIO()}
    console = Console(file=files["out"], force_terminal=out)
    monkeypatch.setattr(module, "Console", lambda **options: Console(file=files["err"], force_terminal=err))
    with progress(console) as bar:
        assert isinstance(bar, Progress if shown else Lines)
        bar.update(bar.add_task("running segments", total=None), completed=1, total=2)
    for name, file in files.items():
        assert bool(re.search("running segments", file.getvalue())) == (name == shown)
