"""Command line; each command has its own module and turns its arguments into one call."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import jax

from jaxdelta import __version__
from jaxdelta.cli.backend import check_backend
from jaxdelta.cli.compare import add_compare
from jaxdelta.cli.info import add_info
from jaxdelta.cli.keys import add_keys
from jaxdelta.cli.ledger import add_ledger
from jaxdelta.cli.reads import add_reads
from jaxdelta.cli.report import add_report
from jaxdelta.cli.sensitivity import add_sensitivity
from jaxdelta.cli.spectrum import add_spectrum
from jaxdelta.cli.sweep import add_sweep
from jaxdelta.cli.verify import add_verify
from jaxdelta.report.terminal import Terminal, flush, tolerate

ADDED = (
    add_sweep,
    add_compare,
    add_sensitivity,
    add_spectrum,
    add_keys,
    add_reads,
    add_ledger,
    add_report,
    add_info,
    add_verify,
)


def parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    top = argparse.ArgumentParser(
        prog="jaxdelta", description="Recurrent states of delta-rule language models: run in segments, cut, measured."
    )
    top.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    top.set_defaults(device=True)
    commands = top.add_subparsers(title="commands", required=True)
    for add in ADDED:
        add(commands)
    return top


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command. Mistakes of the user are reported in a line, without a traceback; a closed pipe is not an error."""
    for stream in (sys.stdout, sys.stderr):
        tolerate(stream)
    status = 0
    try:
        _run(parser().parse_args(argv))
    except SystemExit as end:
        status = end.code or 0
    except BrokenPipeError:
        pass
    if (problem := flush(sys.stdout)) and not status:
        Terminal(stderr=True).fail(f"what there is to say could not be printed ({problem})")
        status = 1
    if status:
        sys.exit(status)


def _run(arguments: argparse.Namespace) -> None:
    try:
        if arguments.device:
            check_backend()
        arguments.call(arguments, Terminal())
    except BrokenPipeError:
        raise
    except (ValueError, OSError, MemoryError) as error:
        _fail(str(error))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        _fail(
            "the device ran out of memory; take shorter documents or segments (of a sweep, a smaller --batch) and another "
            f"--out ({str(error).splitlines()[0]})"
        )
    except KeyboardInterrupt:
        print("interrupted; the same command continues with what is missing", file=sys.stderr)
        sys.stderr.flush()
        os._exit(130)  # the device may still be computing; there is nothing to clean up


def _fail(message: str) -> NoReturn:
    Terminal(stderr=True).fail(message)
    sys.exit(1)
