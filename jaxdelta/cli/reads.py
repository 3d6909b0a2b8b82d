"""``jaxdelta reads``: what segments read of the states that they start from."""

import argparse

from jaxdelta.analysis.reads import state_reads
from jaxdelta.cli.arguments import add_run_arguments, inputs_of
from jaxdelta.cli.progress import RUNNING, follow, progress
from jaxdelta.report.terminal import Terminal


def add_reads(commands) -> None:
    """Add the command to a parser's ``commands``."""
    command = commands.add_parser(
        "reads",
        help="what segments read of the states that they start from, direction by direction",
        description="Measure, for every head and boundary, how much of the outputs of the next segment comes from the "
        "carried state, and which of its singular directions are asked for. Exact inside the layer.",
    )
    add_run_arguments(command, "reads", state_reads)
    command.add_argument("--gramians", action="store_true", help="also keep the read and stored Gramians, K x K each")
    command.set_defaults(call=reads_command)


def reads_command(arguments: argparse.Namespace, console: Terminal) -> None:
    """Measure reads, write rows and figures, and print the table."""
    from jaxdelta.report import reads as report

    out, model, documents = inputs_of(arguments, "reads")
    with progress(console) as bar:
        found = state_reads(
            model,
            documents,
            segment=arguments.segment,
            gramians=arguments.gramians,
            out=out,
            name=arguments.model,
            progress=follow(bar, RUNNING),
        )
    files = report.write(found, out)
    console.print(report.table(found))
    console.written(out, ["reads.zarr", "manifest.json", *(file.name for file in files)])
