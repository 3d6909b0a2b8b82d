"""``jaxdelta compare``: what a smaller state costs."""

import argparse

from jaxdelta.analysis.storage import GRAMMAR, storage_costs
from jaxdelta.cli.arguments import add_run_arguments, inputs_of
from jaxdelta.cli.progress import RUNNING, follow, progress
from jaxdelta.report.terminal import Terminal

DEFAULT = "bf16,int8,int4"


def add_compare(commands) -> None:
    """Add the command to a parser's ``commands``."""
    command = commands.add_parser(
        "compare",
        help="what a state stored in fewer bits or directions costs, and whether the error grows",
        description="Store every carried state in a smaller form at each boundary, and compare with the untouched model: "
        "loss, divergence and agreement of predictions, also by distance from the start; bytes; where errors are born.",
    )
    add_run_arguments(command, "compare", storage_costs)
    command.add_argument(
        "--state", default=DEFAULT, metavar="FORM,FORM,...", help=f"forms of storage: {GRAMMAR}; default: %(default)s"
    )
    command.add_argument(
        "--every-token", action="store_true", help="store the states after every token, as an engine that writes them does"
    )
    command.set_defaults(call=compare_command)


def compare_command(arguments: argparse.Namespace, console: Terminal) -> None:
    """Measure costs, write the figure and print the tables."""
    from jaxdelta.report import storage as report

    out, model, documents = inputs_of(arguments, "compare")
    with progress(console) as bar:
        rows = storage_costs(
            model,
            documents,
            arguments.state.split(","),
            segment=arguments.segment,
            every_token=arguments.every_token,
            out=out,
            name=arguments.model,
            progress=follow(bar, RUNNING),
        )
    figures = report.write_figures(rows, out)
    for table in report.tables(rows):
        console.print(table)
    console.written(out, ["rows.csv", "rows.parquet", "manifest.json", *(file.name for file in figures)])
