"""The README's library example runs as printed."""

import re
from pathlib import Path

import jaxdelta as jd

README = Path(__file__).parents[1] / "README.md"


def test_library_example_runs(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names: dict = {}
    exec(example, names)
    assert capsys.readouterr().out
    assert names["rows"].num_rows == 3
    assert names["logits"].shape[-1] == names["model"].config.vocab_size


def test_what_is_to_be_cited_is_this_version():
    assert f"version = {{{jd.__version__}}}" in README.read_text()
