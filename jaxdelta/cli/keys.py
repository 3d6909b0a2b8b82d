"""``jaxdelta keys``: horizons, keys, write strengths and recall errors of every head."""

import argparse

from jaxdelta.analysis.keys import keys
from jaxdelta.cli.arguments import add_run_arguments, inputs_of
from jaxdelta.cli.progress import RUNNING, follow, progress
from jaxdelta.report.terminal import Terminal


def add_keys(commands) -> None:
    """Add the command to a parser's ``commands``."""
    command = commands.add_parser(
        "keys",
        help="what sets the rank of a state: decay horizons, how alike keys are, write strengths, recall",
        description="Measure, for every head, how long it remembers, how alike the keys are that it writes along, how "
        "strongly it writes and how well a key recalls its value, beside every rank of its state.",
    )
    add_run_arguments(command, "keys", keys)
    command.set_defaults(call=keys_command)


def keys_command(arguments: argparse.Namespace, console: Terminal) -> None:
    """Measure keys, write rows and figures, and print the tables."""
    from jaxdelta.report import keys as report

    out, model, documents = inputs_of(arguments, "keys")
    with progress(console) as bar:
        found = keys(
            model, documents, segment=arguments.segment, out=out, name=arguments.model, progress=follow(bar, RUNNING)
        )
    files = report.write(found, out)
    for table in report.tables(found):
        console.print(table)
    console.written(out, ["keys.zarr", "manifest.json", *(file.name for file in files)])
