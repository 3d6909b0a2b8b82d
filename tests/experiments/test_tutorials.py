"""The tutorials run as they stand, and say what they claim."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SAID = {  # in what each prints
    "cut_and_compare": r"rank  1: loss .*\+0\.0",
    "find_heads": r"Spearman of estimate and measurement over 24 heads: 0\.[5-9]",
    "own_checkpoint": r"logits: relative error \d\.\de-0[6-9]",
    "own_intervention": r"by the backward pass, .* by hand",
}


def test_every_tutorial_is_tried():
    found = {file.stem for file in (ROOT / "experiments" / "tutorials").glob("*.py")} - {"__init__"}
    assert found == SAID.keys()


@pytest.mark.parametrize("name", SAID)
def test_a_tutorial_runs(name):
    found = subprocess.run(
        [sys.executable, "-m", f"experiments.tutorials.{name}"], capture_output=True, text=True, cwd=ROOT, timeout=280
    )
    assert found.returncode == 0, found.stderr[-2000:]
    assert re.search(SAID[name], found.stdout), found.stdout


@pytest.mark.parametrize("name", SAID)
def test_a_tutorial_opens_as_a_notebook(name):
    """Percent format: a title in the first cell, and code in at least two."""
    cells = (ROOT / "experiments" / "tutorials" / f"{name}.py").read_text().split("# %%")[1:]
    assert re.match(r" \[markdown\]\n# # \w", cells[0])
    assert sum(not cell.startswith(" [markdown]") for cell in cells) > 2
