"""Tables on every width of terminal: no number is cut, no column is lost."""

import io

import numpy as np
import pyarrow as pa
import pytest
from rich.console import Console

from jaxdelta.analysis.sweep import SCHEMA as LOSSES
from jaxdelta.analysis.transitions.claims import SCHEMA as CLAIMS
from jaxdelta.report import claims, sweep, transitions
from jaxdelta.report.sheet import Facts, Sheet
from tests.ledgers import ledger, random_text


def printed(view, width: int, encoding: str = "utf-8", crop: bool = False) -> str:
    """What stands on a terminal of ``width`` columns."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    Console(width=width, file=file).print(view, crop=crop)
    file.flush()
    return file.buffer.getvalue().decode(encoding)


def losses(scoped: bool) -> pa.Table:
    """A sweep of large numbers: percentages of five digits, ranks of three."""
    worlds = (
        [(128, None, None), (16, 23, 15), (1, 0, 0)] if scoped else [(128, None, None), (16, None, None), (1, None, None)]
    )
    rows = [
        dict(
            document=document,
            rank=rank,
            layer=layer,
            head=head,
            num_tokens=1000,
            loss=3.1 + 123.4567 * i + shift,
            num_copy_tokens=50,
            copy_loss=2.5 + 987.6543 * i + shift,
        )
        for document, shift in (("a", 0.0), ("b", 0.1))
        for i, (rank, layer, head) in enumerate(worlds)
    ]
    return pa.Table.from_pylist(rows, schema=LOSSES)


def lines_of_claims() -> pa.Table:
    rows = [
        ("condition", "a claim of an ordinary length, n_h = 1", "=", 0.4203, 0.42031, 0.51234),
        ("condition", "another", "<=", 1.44e-14, 2e-15, 2e-15),
        ("another", "sqrt((1 - cos t)(3 + cos t)), t = 0.3", ">", 1234567.1234, 1234567.1234, 1.0),
    ]
    found = [
        dict(condition=c, claim=text, relation=r, claimed=x, tolerance=0.0, low=low, high=high, holds=r != ">")
        for c, text, r, x, low, high in rows
    ]
    return pa.Table.from_pylist(found, schema=CLAIMS)


@pytest.fixture(scope="module")
def sheets() -> dict[str, list[Sheet]]:
    """Every table of the commands that are made of rows."""
    rng = np.random.default_rng(0)
    wide = Sheet("Made up", caption="A caption.", keys=2)
    for heading in ("layer", "head"):
        wide.add_column(heading)
    for i in range(7):
        wide.add_column(f"column {i}", group=f"group of {i // 3}" if i < 6 else "")
    for i in range(3):
        wide.add_row(str(i), str(10 * i), *(f"{x:+.5f}" for x in 10.0 ** rng.uniform(0, 7, 7)))
    of_model = transitions.tables(ledger([random_text(0, 40), random_text(1, 11)], (1, 4, 16, 64)))
    of_claims = [view for view in claims.tables(lines_of_claims()).renderables if isinstance(view, Sheet)]
    return {
        "sweep": [sweep.table(losses(False))],
        "sweep of heads": [sweep.table(losses(True))],
        "ledger": of_claims,
        "ledger of a model": of_model,
        "made up": [wide],
    }


@pytest.mark.parametrize("name", ["sweep", "sweep of heads", "ledger", "ledger of a model", "made up"])
@pytest.mark.parametrize("width", range(20, 121, 4))
def test_every_number_is_whole_on_every_width(sheets, name, width):
    """As often as it is in the rows, keys in every band at least once."""
    for sheet in sheets[name]:
        said = printed(sheet, width).split()
        words = [word for row in sheet.rows for cell in row for word in cell.split() if any(c.isdigit() for c in word)]
        assert words
        for word in set(words):
            assert said.count(word) >= words.count(word), word
        assert "…" not in " ".join(said)


@pytest.mark.parametrize("name", ["sweep", "sweep of heads", "ledger of a model", "made up"])
@pytest.mark.parametrize("width", [40, 60, 80])
def test_columns_stand_below_rather_than_beyond_the_edge(sheets, name, width):
    for sheet in sheets[name]:
        said = printed(sheet, width)
        assert max(map(len, said.splitlines())) <= width
        assert said == printed(sheet, width, crop=True)


def rows_beginning(said: str, key: str) -> list[list[str]]:
    return [line.split() for line in said.splitlines() if line.split()[:1] == [key]]


def test_groups_stay_together_and_repeat_the_keys(sheets):
    """At 60 columns the two groups of a sweep stand below one another, at 100 beside one another."""
    (sheet,) = sheets["sweep"]
    cells = {row[0]: row for row in sheet.rows}
    for key, row in cells.items():
        assert rows_beginning(printed(sheet, 100), key) == [list(row)]
        assert rows_beginning(printed(sheet, 60), key) == [[key, *row[1:5]], [key, *row[5:]]]
    headings = [line.split() for line in printed(sheet, 60).splitlines() if "tokens" in line and "scored" not in line]
    assert headings == [["all", "tokens"], ["copy", "tokens"]]


def test_words_are_wrapped_between_them_and_numbers_beside_them_stay_whole():
    view = Sheet()
    view.add_column("claim", prose=True)
    view.add_column("measured")
    view.add_row("a claim of several words that is long", "0.4203 to 0.5123")
    lines = [line.rstrip() for line in printed(view, 40).splitlines() if line.strip() and "─" not in line]
    assert len(lines) == 3
    assert lines[1].endswith("0.4203 to 0.5123")
    assert " ".join(" ".join(lines[1:]).replace("0.4203 to 0.5123", "").split()) == "a claim of several words that is long"


def test_tables_of_a_ledger_stand_in_the_same_columns(sheets):
    """One cell is wider than its column was meant to be; the tables stay in line."""
    said = "".join(printed(view, 100) for view in sheets["ledger"])
    assert len({line.index("hold") - 9 * ("does not" in line) for line in said.splitlines() if "hold" in line}) == 1


def test_cells_with_brackets_are_no_markup():
    view = Sheet("t[bold]itle", caption="[red]caption")
    view.add_column("[b]h")
    view.add_row("[/b]1" + " " * 20 + ".")
    said = printed(view, 80)
    assert all(text in said for text in ("t[bold]itle", "[b]h", "[/b]1", "[red]caption"))


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8"])
def test_letters_that_the_encoding_lacks_are_spelled_in_line(sheets, encoding):
    said = printed(sheets["sweep"][0], 100, encoding)
    line = next(line for line in said.splitlines() if line.split()[:1] == ["rank"])
    below = next(line for line in said.splitlines() if line.split()[:1] == ["128"])
    assert ("+-" in line) == (encoding == "ascii")
    assert ("±" in line) == (encoding != "ascii")
    assert len(line.rstrip()) == len(below.rstrip())
    assert ("─" in said) == (encoding == "utf-8")


def test_a_row_needs_a_cell_for_every_column():
    view = Sheet()
    view.add_column("a")
    with pytest.raises(ValueError, match="2 cells for 1 columns"):
        view.add_row("1", "2")


ABOUT = {"folder": "/a/long/path/without/a/blank/in/it/model", "parameters": "1,234,567,890 in 27 tensors: 25 in BF16"}


@pytest.mark.parametrize("width", range(20, 121, 4))
def test_facts_are_whole_on_every_width(width):
    said = printed(Facts(ABOUT), width)
    assert "1,234,567,890" in said.split()
    assert "".join(ABOUT["folder"].split()) in "".join(said.split())
    assert max(map(len, said.splitlines())) <= width
    assert (said.splitlines()[0].strip() == "folder") == (width < 10 + 1 + len(ABOUT["folder"]))
