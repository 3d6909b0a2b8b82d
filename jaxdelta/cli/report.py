"""``jaxdelta report``: results folders as one page."""

import argparse
from pathlib import Path

from jaxdelta.report.terminal import Terminal


def add_report(commands) -> None:
    """Add the command to a parser's ``commands``."""
    command = commands.add_parser(
        "report",
        help="one self-contained HTML page of results folders",
        description="Write a self-contained HTML page of the results of one model: spectra, horizons and keys, reads, "
        'losses of cuts, sensitivities, transitions. Needs pip install "jaxdelta[report]".',
    )
    command.add_argument("results", nargs="+", type=Path, metavar="RESULTS", help="results folders, all of one model")
    command.add_argument(
        "--out", type=Path, default=Path("report.html"), metavar="FILE", help="HTML file; default: %(default)s"
    )
    command.set_defaults(call=report_command, device=False)


def report_command(arguments: argparse.Namespace, console: Terminal) -> None:
    """Write the page."""
    try:
        from jaxdelta.report.page import report
    except ModuleNotFoundError as error:
        if error.name not in ("altair", "vl_convert"):
            raise
        raise ValueError(f'{error.name} is not installed; a report needs pip install "jaxdelta[report]"') from None

    written = report(arguments.results, arguments.out)
    console.say(f"Written: {written}")
