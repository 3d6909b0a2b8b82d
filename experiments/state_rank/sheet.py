"""The acceptance sheet of the state-rank study: each of its numbers, published and measured. Reads results only.

    python -m experiments.state_rank.sheet results/state_rank/control [--published qwen3.5-0.8b]

A range is the one that the study states; a single published number agrees within 20 % (a share or a correlation within
0.05, a loss in percent within 0.5); "nearly all" is 90 %, "on the diagonal" a factor of two. Other texts move these
numbers: the study names none of its eight documents.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from jaxdelta.analysis.keys import against_horizon, over_heads
from jaxdelta.analysis.spectrum import END, over_documents
from jaxdelta.analysis.sweep import summarize
from jaxdelta.report.sheet import Sheet
from jaxdelta.report.terminal import Terminal
from jaxdelta.results.opened import opened

SCHEMA = pa.schema(
    [
        ("number", pa.string()),
        ("published", pa.string()),
        ("low", pa.float64()),
        ("high", pa.float64()),
        ("measured", pa.float64()),
        ("agrees", pa.bool_()),
        ("why", pa.string()),
    ]
)
LONG = (5_000, 10_000)  # horizons of the heads that level off, in tokens


class Number(NamedTuple):
    """A number of the study: what it is, as published, the range that agrees, and how it is had from what was measured.

    ``low`` and ``high`` are None where the study gives no number; ``of`` is None for what this experiment cannot measure.
    """

    name: str
    published: str
    low: float | None
    high: float | None
    of: Callable[[dict[str, Any]], float] | None


def _median(name: str, low: float, high: float) -> Callable[[dict[str, Any]], float]:
    """Median over the heads with a horizon from ``low`` to ``high``; NaN without any."""

    def of(found: dict[str, Any]) -> float:
        heads = found["heads"]
        inside = (heads["horizon"] >= low) & (heads["horizon"] < high)
        return float(np.median(heads[name][inside])) if inside.any() else float("nan")

    return of


def _loss(rank: int, column: str, *, copy: bool = False) -> Callable[[dict[str, Any]], float]:
    return lambda found: getattr(found["copy" if copy else "all"].get(rank), column, float("nan"))


def _nearly_full(found: dict[str, Any]) -> float:
    return float(np.mean((found["numerical"] >= 126) & (found["numerical"] < 128)))


def _forgetting(found: dict[str, Any]) -> float:
    return float(np.mean(found["heads"]["horizon"] < 256))


def _ratio(found: dict[str, Any]) -> float:
    heads = found["heads"]
    short = heads["horizon"] < 10
    return float(np.median(heads["effective_rank"][short] / heads["horizon"][short])) if short.any() else float("nan")


STUDY = (
    Number("heads of numerical rank 126 or 127", "nearly all", 0.9, 1.0, _nearly_full),
    Number("effective rank, largest head", "44", 35, 53, lambda m: float(m["effective"].max())),
    Number("effective rank, median head", "8", 6.4, 9.6, lambda m: float(np.median(m["effective"]))),
    Number("effective rank, first quartile", "under 3", 0, 3, lambda m: float(np.quantile(m["effective"], 0.25))),
    Number("spread over documents, median", "tight", None, None, lambda m: float(np.median(m["spread"]))),
    Number("Spearman of it and the horizon", "0.91", 0.86, 0.96, lambda m: m["spearman"]),
    Number("heads that forget in 256 tokens", "0.61", 0.56, 0.66, _forgetting),
    Number("rank / horizon, horizons under 10", "on the diagonal", 0.5, 2, _ratio),
    Number("effective rank, horizons 5K to 10K", "30 to 47", 30, 47, _median("effective_rank", *LONG)),
    Number("mean key, the same heads", "0.8 to 0.94", 0.8, 0.94, _median("mean_key", *LONG)),
    Number("rank of keys in it, the same heads", "3 to 6", 3, 6, _median("key_rank_at_horizon", *LONG)),
    Number("rank of P, the same heads", "2 to 6", 2, 6, _median("decayed_key_rank", *LONG)),
    Number("loss at rank 12, % above", "0.5", 0.0, 1.0, _loss(12, "percent")),
    Number("loss at rank 1, % above", "2", 1.5, 2.5, _loss(1, "percent")),
    Number("loss at rank 1, nats above", "0.06", 0.048, 0.072, _loss(1, "difference")),
    Number("copy tokens at rank 1, % above", "as all tokens", None, None, _loss(1, "percent", copy=True)),
    *(
        Number(name, text, None, None, None)
        for name, text in (
            ("one needle at 64K, 128K, rank 1", "loses a quarter"),
            ("variable tracking, rank 1; 4; 12", "lost; collapses; kept"),
            ("common words at 16K, rank 12; 32", "-22; -5 points"),
            ("common words at 64K, rank 32", "-18 of 27 points"),
            ("frequent words at 64K", "1 direction"),
            ("variable tracking at 64K, 12 to 32", "+8 to +19 points"),
        )
    ),
)
PUBLISHED = {"qwen3.5-0.8b": STUDY}
DIRECTIONS = {"qwen3.5-0.8b": 128}


def measured(folder: Path) -> dict[str, Any]:
    """What the numbers are made of, from the results in ``folder``.

    Raises:
        ResultsError: an analysis is missing or unfinished.
    """
    spectrum = opened(folder / "spectrum").arrays["spectrum"]
    keys = opened(folder / "keys").arrays["keys"]
    rows = opened(folder / "sweep").tables["rows"]
    over = over_documents(spectrum).sel(at=END)
    middle, low, high = (over["effective_rank"].sel(statistic=s).values.ravel() for s in ("median", "min", "max"))
    there = np.isfinite(middle)
    numerical = over["numerical_rank"].sel(statistic="median").values.ravel()[there]
    (row,) = [row for row in against_horizon(keys) if row["measure"] == "effective_rank"]
    return {
        "effective": middle[there],
        "numerical": numerical,
        "spread": ((high - low) / middle)[there],
        "heads": over_heads(keys),
        "spearman": row["spearman"],
        "all": {s.world.rank: s for s in summarize(rows) if s.world.layer is None},
        "copy": {s.world.rank: s for s in summarize(rows, copy_tokens=True) if s.world.layer is None},
        "documents": spectrum.sizes["document"],
        "directions": spectrum.sizes["direction"],
    }


def lines(found: dict[str, Any], published: str | None = None) -> pa.Table:
    """A row for each number; ``agrees`` is null without ``published``, a published number, or a measurement.

    Raises:
        ValueError: the measured states are not of the published model's size.
    """
    if published is not None and found["directions"] != DIRECTIONS[published]:
        raise ValueError(
            f"states have {found['directions']} directions, those of {published} {DIRECTIONS[published]}; leave out "
            "--published"
        )
    rows = []
    for number in STUDY if published is None else PUBLISHED[published]:
        value = float("nan") if number.of is None else number.of(found)
        known = np.isfinite(value)
        judged = published is not None and known and number.low is not None
        agrees = bool(number.low <= value <= number.high) if judged else None
        rows.append(
            {
                "number": number.name,
                "published": number.published,
                "low": number.low,
                "high": number.high,
                "measured": value if known else None,
                "agrees": agrees,
                "why": _why(number, found["documents"], agrees, known=known),
            }
        )
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def _why(number: Number, documents: int, agrees: bool | None, *, known: bool) -> str:
    if number.of is None:
        return "needs retrieval tasks"
    if not known:
        return "no such head or rank"
    return f"{documents} other texts" if agrees is False else ""


def sheet(rows: pa.Table) -> Sheet:
    """The sheet as a table."""
    judged = [row["agrees"] for row in rows.to_pylist() if row["agrees"] is not None]
    said = "No verdict: the published numbers are of another model."
    if judged:
        said = f"{sum(judged)} of {len(judged)} numbers agree: they are within the range in the rows."
    view = Sheet("The state-rank study, published and measured", caption=said)
    view.add_column("number")
    view.add_column("published", prose=True)
    view.add_column("measured")
    view.add_column("verdict", prose=True)
    for row in rows.to_pylist():
        verdict = {None: row["why"] or "-", True: "agrees", False: f"no ({row['why']})"}[row["agrees"]]
        view.add_row(row["number"], row["published"], "-" if row["measured"] is None else f"{row['measured']:.3g}", verdict)
    return view


def main() -> None:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("folder", type=Path)
    top.add_argument("--published", choices=PUBLISHED)
    arguments = top.parse_args()
    try:
        found = lines(measured(arguments.folder), arguments.published)
    except ValueError as error:
        top.error(str(error))
    Terminal().print(sheet(found))


if __name__ == "__main__":
    main()
