"""The ledger's table. Reads rows only."""

import math

import pyarrow as pa
from rich import box
from rich.console import Group
from rich.table import Table

WIDTHS = {"claim": 42, "claimed": 11, "measured": 11, "verdict": 14}  # with a blank


def tables(rows: pa.Table) -> Group:
    """A table for each condition: claim, claimed, measured (lowest to highest where they differ), verdict."""
    by_condition: dict[str, list[dict]] = {}
    for row in rows.to_pylist():
        by_condition.setdefault(row["condition"], []).append(row)
    count = sum(rows["holds"].to_pylist())
    verdict = (
        f"{count} of {rows.num_rows} lines hold. Of inequalities the worst draw is shown. Counts are exact,\n"
        "other equalities within 1e-10 or less; the rows have each tolerance."
    )
    return Group(*(_table(*item, header=i == 0) for i, item in enumerate(by_condition.items())), verdict)


def _table(condition: str, lines: list[dict], *, header: bool) -> Table:
    view = Table(
        title=condition,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_header=header,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for name, width in WIDTHS.items():
        view.add_column(name, width=width, justify="right" if name in ("claimed", "measured") else "left", no_wrap=True)
    for line in lines:
        view.add_row(
            line["claim"],
            f"{line['relation']} {number(line['claimed'])}",
            measured(line),
            "holds" if line["holds"] else "does not hold",
        )
    return view


def measured(line: dict) -> str:
    """The value that decides: the highest, for ">" the lowest, of an equality the range where its digits differ."""
    low, high = number(line["low"]), number(line["high"])
    if line["relation"] == "=" and low != high:
        return f"{low} to {high}"
    return low if line["relation"] == ">" else high


def number(x: float) -> str:
    """Whole numbers whole, others with four decimals or, when small, two digits."""
    if math.isfinite(x) and abs(x - round(x)) < 1e-9 and (round(x) or not x):
        return str(round(x))
    return f"{x:.1e}" if abs(x) < 1e-2 else f"{x:.4f}"
