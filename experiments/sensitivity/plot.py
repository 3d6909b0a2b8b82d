"""Figures and the validation table of ``run.py``, from its files alone: ``python -m experiments.sensitivity.plot``."""

import argparse
from pathlib import Path

import xarray as xr
from rich.console import Console

from experiments.sensitivity.run import FOLDER
from jaxdelta.analysis.sensitivity import validation
from jaxdelta.report import sensitivity as report
from jaxdelta.results.folder import finished_rows


def main() -> None:
    top = argparse.ArgumentParser(description=__doc__)
    top.add_argument("--out", type=Path, default=FOLDER)
    folder = top.parse_args().out
    maps = xr.open_zarr(folder / "maps" / "maps.zarr", consolidated=False).load()
    rows = finished_rows(folder / "removals")
    compared = validation.from_rows(rows)
    scores = [s for comparison in compared for s in validation.scores(comparison)]
    console = Console(width=110)
    for comparison in compared:
        console.print(report.score_table([s for s in scores if s.kind == comparison.kind], comparison))
    for table in report.head_tables(validation.joined(maps, rows), trust=report.trust_line(scores)):
        console.print(table)
    for file in [*report.write_figures(folder, maps, compared), *report.write_validation(folder, compared, scores)]:
        console.print(str(file))


if __name__ == "__main__":
    main()
