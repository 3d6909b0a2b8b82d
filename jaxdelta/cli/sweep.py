"""``jaxdelta sweep``: the loss of a model whose carried states are truncated."""

import argparse

from jaxdelta.analysis.sweep import sweep
from jaxdelta.cli.arguments import add_parameter, add_run_arguments, inputs_of, ranks
from jaxdelta.cli.progress import RUNNING, follow, progress
from jaxdelta.report.terminal import Terminal

DEFAULT_RANKS = (1, 2, 4, 8, 12, 16, 32)


def add_sweep(commands) -> None:
    """Add the command to a parser's ``commands``."""
    cut = commands.add_parser(
        "sweep",
        help="cut every carried state to r directions and print what the model loses",
        description="Cut every carried state to r singular directions at each boundary, and print what the model loses.",
    )
    cut.set_defaults(call=sweep_command)
    add_run_arguments(cut, "sweep", sweep)
    cut.add_argument(
        "--ranks",
        type=ranks,
        metavar="R,R,...",
        help="directions kept, 1 to min(K, V); the untouched model is always run; "
        f"default: those of {','.join(map(str, DEFAULT_RANKS))} below min(K, V)",
    )
    said = "what is cut together: all heads, those of one linear layer at a time, or one head at a time"
    add_parameter(cut, sweep, "scope", said, choices=("all", "layer", "head"))
    cut.add_argument(
        "--layers",
        type=ranks,
        metavar="L,L,...",
        help="layers of the model that a narrower scope goes through",
    )
    cut.add_argument("--heads", type=ranks, metavar="H,H,...", help="heads that the scope head goes through")
    said = "a copy token ends a bigram that occurred more than this many tokens earlier"
    add_parameter(cut, sweep, "copy_gap", said, metavar="TOKENS")
    cut.add_argument(
        "--method",
        choices=("subspace", "eigh", "svd"),
        help="of the truncation; default: subspace iteration for ranks up to a quarter of min(K, V), else eigh",
    )
    cut.add_argument(
        "--batch", type=int, metavar="ROWS", help="rows (document x rank) run together; default: what fits the memory"
    )


def sweep_command(arguments: argparse.Namespace, console: Terminal) -> None:
    """Run a sweep, write its figures and print its table."""
    from jaxdelta.report import sweep as report

    out, model, documents = inputs_of(arguments, "sweep")
    kept = arguments.ranks or [r for r in DEFAULT_RANKS if r < model.config.max_rank]
    with progress(console) as bar:
        rows = sweep(
            model,
            documents,
            ranks=kept,
            segment=arguments.segment,
            scope=arguments.scope,
            layers=arguments.layers,
            heads=arguments.heads,
            copy_gap=arguments.copy_gap,
            method=arguments.method,
            batch=arguments.batch,
            out=out,
            name=arguments.model,
            progress=follow(bar, RUNNING),
        )
    figures = report.write_figures(rows, out)
    console.print(report.table(rows))
    console.written(out, ["rows.csv", "rows.parquet", "manifest.json", *(file.name for file in figures)])
