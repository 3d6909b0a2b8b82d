"""``jaxdelta ledger``: what products of factors can do, and what a model's transitions do."""

import argparse

from jaxdelta.cli.arguments import MODEL_HELP, SEED, add_document_arguments, opened
from jaxdelta.cli.progress import progress
from jaxdelta.report.terminal import Terminal


def add_ledger(commands) -> None:
    """Add the command to a parser's ``commands``."""
    ledger = commands.add_parser(
        "ledger",
        help="what a product of n_h Householder factors can forget and rotate, and where a model's transitions lie",
        description="Measure what is said of products of n_h Householder factors on matrices drawn at random, in float64. "
        "With a model: where its write strengths, keys and decays put every token's transition (eigenvalues, spectral "
        "radius, active rank), and what products over windows of tokens freeze, forget and mix.",
    )
    ledger.set_defaults(call=ledger_command)
    ledger.add_argument("--dim", type=int, default=16, help="size of the matrices, at least 8; default: 16")
    ledger.add_argument("--draws", type=int, default=200, help="of keys and strengths, for each n_h; default: 200")
    ledger.add_argument("--seed", type=SEED, default=0, help="of the draws; default: 0")
    ledger.add_argument("model", nargs="?", help=f"{MODEL_HELP}; default: none, matrices drawn at random")
    ledger.add_argument("--model", dest="named", metavar="MODEL", help="the same")
    add_document_arguments(
        ledger, "the same command continues it; default: results/ledger-MODEL; without a model they are not kept"
    )


def ledger_command(arguments: argparse.Namespace, console: Terminal) -> None:
    """The ledger of products of Householder factors, or with a model that of its transitions."""
    of_claims = {"dim": 16, "draws": 200, "seed": 0}
    of_model = {
        "documents": None,
        "tokenizer": None,
        "segment": 256,
        "max_tokens": None,
        "dtype": "float32",
        "revision": None,
    }
    if arguments.named is not None:
        if arguments.model not in (None, arguments.named):
            raise ValueError(f"two models are given: {arguments.model} and --model {arguments.named}")
        arguments.model = arguments.named
    has_model = arguments.model is not None
    other, where = (of_claims, "without") if has_model else (of_model, "with")
    for name, default in other.items():
        if getattr(arguments, name) != default:
            raise ValueError(f"--{name.replace('_', '-')} is for a ledger {where} a model")
    (_model_ledger if has_model else _claims_ledger)(arguments, console)


def _claims_ledger(arguments: argparse.Namespace, console: Terminal) -> None:
    from jaxdelta.analysis.transitions.claims import ledger
    from jaxdelta.report.claims import tables

    rows = ledger(dim=arguments.dim, draws=arguments.draws, seed=arguments.seed, out=arguments.out)
    console.print(tables(rows), highlight=False)
    if arguments.out:
        console.written(arguments.out, ["rows.csv", "rows.parquet", "manifest.json"])


def _model_ledger(arguments: argparse.Namespace, console: Terminal) -> None:
    from jaxdelta.analysis.transitions.ledger import ledger_of
    from jaxdelta.report import transitions as report

    out, model, documents = opened(arguments, "ledger")
    with progress(console) as bar:
        task = bar.add_task("running segments (the first compiles)", total=None)
        ledger = ledger_of(
            model,
            documents,
            segment=arguments.segment,
            out=out,
            name=arguments.model,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    files = [*report.write_rows(out, ledger), *report.write_figures(out, ledger)]
    for table in report.tables(ledger):
        console.print(table)
    console.written(out, ["transitions.zarr", "manifest.json", *(file.name for file in files)])
