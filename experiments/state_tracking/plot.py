"""Figure and tables of ``run.py`` and ``instruments.py``, from their files alone.

python -m experiments.state_tracking.plot
"""

import argparse
from pathlib import Path

import pyarrow.parquet as pa_parquet
from rich.console import Console

from experiments.state_tracking import report
from experiments.state_tracking.run import FOLDER
from jaxdelta.report.figure import save_figures


def main() -> None:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--out", type=Path, default=FOLDER)
    folder = top.parse_args().out
    rows = pa_parquet.read_table(folder / "rows.parquet")
    console = Console(width=130)
    console.print(report.solved_table(rows))
    instruments = folder / "instruments" / "rows.parquet"
    if instruments.exists():
        console.print(report.instrument_table(pa_parquet.read_table(instruments)))
    save_figures({"solved": report.figure(rows)}, folder)


if __name__ == "__main__":
    main()
