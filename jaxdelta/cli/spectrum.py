"""``jaxdelta spectrum``: singular values and ranks of the states that a model carries."""

import argparse

from jaxdelta.analysis.spectrum import END, spectrum
from jaxdelta.analysis.trace import rank_trace
from jaxdelta.cli.arguments import add_run_arguments, inputs_of
from jaxdelta.cli.progress import RUNNING, follow, progress
from jaxdelta.report.terminal import Terminal


def add_spectrum(commands) -> None:
    """Add the command to a parser's ``commands``."""
    command = commands.add_parser(
        "spectrum",
        help="singular values of the carried states, and every rank in use of them",
        description="Measure the state of every head after chosen numbers of tokens: singular values; numerical, "
        "threshold, effective, stable and energy ranks; norms. Over documents: median, range, agreement of two halves.",
    )
    add_run_arguments(command, "spectrum", spectrum)
    command.add_argument(
        "--at",
        type=places,
        metavar="TOKENS,...",
        help=f"numbers of tokens, whole segments each, or {END!r}; default: every power of two of segments, and the end",
    )
    command.add_argument(
        "--trace",
        type=int,
        metavar="EVERY",
        help="also follow effective ranks over a text: before each write of every EVERY-th token, into OUT/trace",
    )
    command.add_argument(
        "--packed", action="store_true", help="the trace reads the documents one after another, as a single text"
    )
    command.set_defaults(call=spectrum_command)


def places(text: str) -> list[int | str]:
    """An option type: whole numbers or "end", separated by commas."""
    try:
        return [part if part == END else int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r}; expected numbers of tokens or {END!r}, e.g. 256,1024,end"
        ) from None


def spectrum_command(arguments: argparse.Namespace, console: Terminal) -> None:
    """Measure spectra, write rows and figures, and print the tables."""
    from jaxdelta.report import spectrum as report
    from jaxdelta.report.figure import save_figures

    if arguments.packed and arguments.trace is None:
        raise ValueError("--packed is for --trace")
    out, model, documents = inputs_of(arguments, "spectrum")
    with progress(console) as bar:
        found = spectrum(
            model,
            documents,
            segment=arguments.segment,
            at=arguments.at,
            out=out,
            name=arguments.model,
            progress=follow(bar, RUNNING),
        )
        traced = None
        if arguments.trace is not None:
            traced = rank_trace(
                model,
                documents,
                segment=arguments.segment,
                every=arguments.trace,
                packed=arguments.packed,
                out=out / "trace",
                name=arguments.model,
                progress=follow(bar, RUNNING),
            )
    files = report.write(found, out)
    for table in report.tables(found):
        console.print(table)
    console.written(out, ["spectrum.zarr", "manifest.json", *(file.name for file in files)])
    if traced is not None:
        files = save_figures({"effective_rank_by_token": report.trace_figure(traced)}, out / "trace")
        console.written(out / "trace", ["trace.zarr", "manifest.json", *(file.name for file in files)])
