"""Tables of the ledger of claims. Reads rows only."""

import math

import pyarrow as pa
from rich import box
from rich.console import Group

from jaxdelta.report.sheet import Sheet

CLAIM, NUMBER, VERDICT = 40, 9, 13  # widths of columns if there is room, so that the tables align


def tables(rows: pa.Table) -> Group:
    """A table for each condition: claim, claimed and measured value, verdict."""
    by_condition: dict[str, list[dict]] = {}
    for row in rows.to_pylist():
        by_condition.setdefault(row["condition"], []).append(row)
    count = sum(rows["holds"].to_pylist())
    verdict = (
        f"{count} of {rows.num_rows} lines hold. Of inequalities the worst draw is shown. Counts are exact,\n"
        "other equalities within 1e-10 or less; the rows have each tolerance."
    )
    widths = [max([NUMBER, *(len(form(row)) for row in rows.to_pylist())]) for form in (claimed, measured)]
    return Group(*(_table(*item, *widths, header=i == 0) for i, item in enumerate(by_condition.items())), verdict)


def _table(condition: str, lines: list[dict], of_claimed: int, of_measured: int, *, header: bool) -> Sheet:
    view = Sheet(condition, header=header, frame=box.SIMPLE_HEAD, left=True)
    view.add_column("claim", prose=True, width=CLAIM)
    view.add_column("claimed", width=of_claimed)
    view.add_column("measured", width=of_measured)
    view.add_column("verdict", prose=True, width=VERDICT)
    for line in lines:
        view.add_row(
            line["claim"],
            claimed(line),
            measured(line),
            "holds" if line["holds"] else "does not hold",
        )
    return view


def claimed(line: dict) -> str:
    """The claimed value with its relation."""
    return f"{line['relation']} {number(line['claimed'])}"


def measured(line: dict) -> str:
    """The measured value that decides: the highest, for ">" the lowest, for "=" the range if its ends differ."""
    low, high = number(line["low"]), number(line["high"])
    if line["relation"] == "=" and low != high:
        return f"{low} to {high}"
    return low if line["relation"] == ">" else high


def number(x: float) -> str:
    """``x`` as text: whole numbers without decimals, others with four decimals, or two digits if small."""
    if math.isfinite(x) and abs(x - round(x)) < 1e-9 and (round(x) or not x):
        return str(round(x))
    return f"{x:.1e}" if abs(x) < 1e-2 else f"{x:.4f}"
