"""What can a product of n_h Householder factors freeze and turn, and where do a trained model's transitions sit?

    python -m experiments.frozenrank.run                          claims, and the embedded models; minutes on 2 CPU cores
    python -m experiments.frozenrank.run NAME ... --max-tokens 4096

One page: the study's claims on random matrices in f64 (``jaxdelta ledger``), then for every model a sheet of the same facts
on its own transitions, and its tables (``jaxdelta ledger NAME``). Expected: every claim holds under its condition; every
trained transition is at its pin, rho = alpha, as linear algebra says; what training decides, and no theorem, is where beta
and the keys sit.
"""

import argparse
from pathlib import Path

import numpy as np
import pyarrow as pa
import xarray as xr

import jaxdelta as jd
from jaxdelta.analysis.transitions.rows import transition_rows
from jaxdelta.documents import embedded_texts, tokenize
from jaxdelta.report import claims, transitions
from jaxdelta.report.page import report
from jaxdelta.report.sheet import Sheet
from jaxdelta.report.terminal import Terminal
from jaxdelta.results.folder import write_tables

FOLDER = Path("results") / "frozenrank"
PIN = 3e-15  # the study's largest |rho - 1|, in f64


def main() -> None:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("models", nargs="*", default=["control", "control-product"])
    top.add_argument("--max-tokens", type=int, default=2048)
    top.add_argument("--draws", type=int, default=200, help="of random matrices; default: 200")
    top.add_argument("--out", type=Path, default=FOLDER)
    arguments = top.parse_args()

    console = Terminal()
    console.print(claims.tables(jd.ledger(draws=arguments.draws, out=arguments.out / "claims")), highlight=False)
    for name in arguments.models:
        model = jd.load(name)
        documents = [d.head(arguments.max_tokens) for d in tokenize(embedded_texts(), model.tokenizer)]
        out = arguments.out / Path(name).name
        found = jd.ledger_of(model, documents, out=out, name=name)
        rows = facts(found)
        write_tables(pa.Table.from_pylist(rows), out, "sheet")
        console.print(sheet(name, found, rows))
        for table in transitions.tables(found):
            console.print(table)
        console.written(out, ["transitions.zarr", "sheet.parquet", "sheet.csv", report([out], out / "report.html").name])


def facts(ledger: xr.Dataset) -> list[dict[str, str]]:
    """Each fact of the study as claimed and as measured on a model's transitions."""
    every = transition_rows(ledger).to_pylist()[0]
    n, K = ledger.attrs["num_householder"], int(ledger.key_dim.min())
    off = max(every["defect"], every["whole_defect"])
    norm = 1 - every["key_norm2_smallest"]
    beta = ledger["beta"].values
    pin = _holds(off <= PIN) if n < K else "-"
    rank, turning = every["rank_numerical"], every["rotating"]
    rows = [
        ("largest |rho / alpha - 1|", f"at most {PIN:g} for n_h < K", f"{off:.1e}", pin),
        ("mean rank of A - alpha I", f"at most n_h = {n}", f"{rank:.3f}", _holds(rank <= n)),
        ("largest 1 - |k|^2", "5e-7: the eps of the l2 norm", f"{norm:.1e}", "-"),
        ("beta, 5 %, median, 95 %", "no claim", " ".join(f"{every[f'beta_{q}']:.2f}" for q in (5, 50, 95)), "-"),
        ("negative eigenvalues", "no claim", f"{every['negative']:.1%}", "-"),
        ("beta above 1.9, near a reflection", "no claim", f"{np.mean(beta[~np.isnan(beta)] > 1.9):.1%}", "-"),
        ("transitions that turn a plane", "none for n_h = 1", f"{turning:.2%}", _holds(not turning) if n == 1 else "-"),
    ]
    return [dict(zip(("fact", "claimed", "measured", "verdict"), row, strict=True)) for row in rows]


def sheet(name: str, ledger: xr.Dataset, rows: list[dict[str, str]]) -> Sheet:
    """The facts as a table."""
    count = transition_rows(ledger).to_pylist()[0]["transitions"]
    n, K = ledger.attrs["num_householder"], int(ledger.key_dim.min())
    view = Sheet(f"{name}: {count:,} transitions, n_h = {n}, K = {K}")
    view.add_column("of a trained transition")
    for heading in ("the study", "measured", "verdict"):
        view.add_column(heading, prose=True)
    for row in rows:
        view.add_row(*row.values())
    return view


def _holds(truth: bool) -> str:
    return "holds" if truth else "does not hold"


if __name__ == "__main__":
    main()
