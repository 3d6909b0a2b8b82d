"""``jaxdelta ledger``: claims on products of Householder factors, or the transitions of a model."""

import argparse

from jaxdelta.analysis.transitions.claims import ledger
from jaxdelta.analysis.transitions.ledger import ledger_of
from jaxdelta.cli.arguments import MODEL_HELP, SEED, add_document_arguments, add_parameter, inputs_of
from jaxdelta.cli.progress import RUNNING, follow, progress
from jaxdelta.report.terminal import Terminal

# Options for a ledger without a model, and for one with a model.
OF_CLAIMS = ("dim", "draws", "seed")
OF_MODEL = ("documents", "tokenizer", "segment", "max_tokens", "dtype", "revision")


def add_ledger(commands) -> None:
    """Add the command to a parser's ``commands``."""
    command = commands.add_parser(
        "ledger",
        help="what a product of n_h Householder factors can forget and rotate, and where a model's transitions lie",
        description="Measure what is said of products of n_h Householder factors on matrices drawn at random, in float64. "
        "With a model: where its write strengths, keys and decays put every token's transition (eigenvalues, spectral "
        "radius, active rank), and what products over windows of tokens freeze, forget and mix.",
    )
    add_parameter(command, ledger, "dim", "size of the matrices, at least 8")
    add_parameter(command, ledger, "draws", "of keys and strengths, for each n_h")
    add_parameter(command, ledger, "seed", "of the draws", type=SEED)
    command.add_argument("model", nargs="?", help=f"{MODEL_HELP}; default: none, matrices drawn at random")
    command.add_argument("--model", dest="named", metavar="MODEL", help="the same")
    out = "the same command continues it; default: results/ledger-MODEL; without a model they are not kept"
    add_document_arguments(command, out, ledger_of)
    command.set_defaults(call=ledger_command, default=command.get_default)


def ledger_command(arguments: argparse.Namespace, console: Terminal) -> None:
    """Print the ledger of claims or, with a model, the ledger of its transitions."""
    if arguments.named is not None:
        if arguments.model not in (None, arguments.named):
            raise ValueError(f"two models are given: {arguments.model} and --model {arguments.named}")
        arguments.model = arguments.named
    has_model = arguments.model is not None
    other, where = (OF_CLAIMS, "without") if has_model else (OF_MODEL, "with")
    for name in other:
        if getattr(arguments, name) != arguments.default(name):
            raise ValueError(f"--{name.replace('_', '-')} is for a ledger {where} a model")
    (_model_ledger if has_model else _claims_ledger)(arguments, console)


def _claims_ledger(arguments: argparse.Namespace, console: Terminal) -> None:
    from jaxdelta.report.claims import tables

    rows = ledger(dim=arguments.dim, draws=arguments.draws, seed=arguments.seed, out=arguments.out)
    console.print(tables(rows), highlight=False)
    if arguments.out:
        console.written(arguments.out, ["rows.csv", "rows.parquet", "manifest.json"])


def _model_ledger(arguments: argparse.Namespace, console: Terminal) -> None:
    from jaxdelta.report import transitions as report

    out, model, documents = inputs_of(arguments, "ledger")
    with progress(console) as bar:
        found = ledger_of(
            model,
            documents,
            segment=arguments.segment,
            out=out,
            name=arguments.model,
            progress=follow(bar, RUNNING),
        )
    files = [*report.write_rows(out, found), *report.write_figures(out, found)]
    for table in report.tables(found):
        console.print(table)
    console.written(out, ["transitions.zarr", "manifest.json", *(file.name for file in files)])
