"""Command line: arguments to one call."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import jax
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

MODEL_HELP = "embedded model, folder in Hugging Face's format, or hub id (owner/name, downloaded whole)"
DEFAULT_RANKS = (1, 2, 4, 8, 12, 16, 32)


def sweep_command(arguments: argparse.Namespace, console: Console) -> None:
    """Run a sweep and print its table."""
    from jaxdelta.analysis.sweep import sweep
    from jaxdelta.checkpoints import load
    from jaxdelta.report import sweep as report
    from jaxdelta.tasks.documents import embedded_texts, read_texts

    texts = read_texts(arguments.documents) if arguments.documents else embedded_texts()
    out = arguments.out or Path("results") / f"sweep-{Path(arguments.model).name}"
    model = load(arguments.model, dtype=arguments.dtype, revision=arguments.revision)
    ranks = arguments.ranks or [r for r in DEFAULT_RANKS if r < model.config.max_rank]
    with _progress(console) as bar:
        task = bar.add_task("running segments (the first compiles)", total=None)
        rows = sweep(
            model,
            texts,
            ranks=ranks,
            segment=arguments.segment,
            copy_gap=arguments.copy_gap,
            method=arguments.method,
            batch=arguments.batch,
            out=out,
            name=arguments.model,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    console.print(report.table(rows))
    figures = report.write_figure(rows, out)
    names = ", ".join(["rows.csv", "rows.parquet", "manifest.json", *(file.name for file in figures)])
    console.print(f"Written to {escape(str(out))}: {names}", soft_wrap=True, highlight=False)


def sensitivity_command(arguments: argparse.Namespace, console: Console) -> None:
    """Run sensitivities, and on request measured removals, and print what they say."""
    from jaxdelta.analysis import validation
    from jaxdelta.analysis.sensitivity import sensitivity_maps
    from jaxdelta.checkpoints import load
    from jaxdelta.interventions import Truncate
    from jaxdelta.report import sensitivity as report
    from jaxdelta.tasks.documents import embedded_texts, read_texts, tokenize

    texts = read_texts(arguments.documents) if arguments.documents else embedded_texts()
    if arguments.validate and (arguments.loss != "next_token" or arguments.rank is not None):
        raise ValueError("--validate measures removals by the next-token loss of the untouched model: no --loss, no --rank")
    if arguments.directions < 0:
        raise ValueError(f"--directions is {arguments.directions}; expected at least 1, or 0 for all")
    out = arguments.out or Path("results") / f"sensitivity-{Path(arguments.model).name}"
    model = load(arguments.model, dtype=arguments.dtype, revision=arguments.revision)
    documents = [d.head(arguments.max_tokens) for d in tokenize(texts, model.tokenizer)]
    with _progress(console) as bar:
        task = bar.add_task("running segments (the first compiles)", total=None)
        maps = sensitivity_maps(
            model,
            documents,
            segment=arguments.segment,
            loss=arguments.loss,
            samples=arguments.samples,
            seed=arguments.seed,
            intervention=None if arguments.rank is None else Truncate(arguments.rank),
            frozen_basis=arguments.frozen_basis,
            out=out,
            name=arguments.model,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
        comparisons, scores = [], []
        if arguments.validate:
            task = bar.add_task("measuring removals", total=len(documents))
            comparisons = validation.compare(
                model,
                [d.tokens for d in documents],
                maps,
                directions=arguments.directions,
                dear=arguments.dear,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
            scores = [s for c in comparisons for s in validation.scores(c)]
    for comparison in comparisons:
        console.print(report.score_table([s for s in scores if s.kind == comparison.kind], comparison))
    console.print(report.head_table(maps, trust=report.trust_line(scores)))
    files = report.write_figures(out, maps, comparisons, scores)
    if scores:
        files.append(report.write_scores(scores, out))
    names = ", ".join(["maps.zarr", "manifest.json", *(file.name for file in files)])
    console.print(f"Written to {escape(str(out))}: {names}", soft_wrap=True, highlight=False)


def ledger_command(arguments: argparse.Namespace, console: Console) -> None:
    """The ledger of products of Householder factors, or with a model that of its transitions."""
    of_claims = {"dim": 16, "draws": 200, "seed": 0}
    of_model = {"documents": None, "segment": 256, "max_tokens": None, "dtype": "float32", "revision": None}
    other, where = (of_claims, "without") if arguments.model else (of_model, "with")
    for name, default in other.items():
        if getattr(arguments, name) != default:
            raise ValueError(f"--{name.replace('_', '-')} is for a ledger {where} --model")
    (_model_ledger if arguments.model else _claims_ledger)(arguments, console)


def _claims_ledger(arguments: argparse.Namespace, console: Console) -> None:
    from jaxdelta.analysis.ledger import ledger
    from jaxdelta.report.ledger import tables

    rows = ledger(dim=arguments.dim, draws=arguments.draws, seed=arguments.seed, out=arguments.out)
    console.print(tables(rows), highlight=False)
    if arguments.out:
        names = "rows.csv, rows.parquet, manifest.json"
        console.print(f"Written to {escape(str(arguments.out))}: {names}", soft_wrap=True, highlight=False)


def _model_ledger(arguments: argparse.Namespace, console: Console) -> None:
    from jaxdelta.analysis.transitions import ledger_of
    from jaxdelta.checkpoints import load
    from jaxdelta.report import transitions as report
    from jaxdelta.tasks.documents import embedded_texts, read_texts, tokenize

    texts = read_texts(arguments.documents) if arguments.documents else embedded_texts()
    out = arguments.out or Path("results") / f"ledger-{Path(arguments.model).name}"
    model = load(arguments.model, dtype=arguments.dtype, revision=arguments.revision)
    documents = [d.head(arguments.max_tokens) for d in tokenize(texts, model.tokenizer)]
    with _progress(console) as bar:
        task = bar.add_task("running segments (the first compiles)", total=None)
        ledger = ledger_of(
            model,
            documents,
            segment=arguments.segment,
            out=out,
            name=arguments.model,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    for table in report.tables(ledger):
        console.print(table)
    files = [*report.write_rows(out, ledger), *report.write_figures(out, ledger)]
    names = ", ".join(["transitions.zarr", "manifest.json", *(file.name for file in files)])
    console.print(f"Written to {escape(str(out))}: {names}", soft_wrap=True, highlight=False)


def _progress(console: Console) -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn()
    return Progress(*columns, TimeRemainingColumn(), console=console, transient=True)


def info_command(arguments: argparse.Namespace, console: Console) -> None:
    """Describe a checkpoint."""
    from jaxdelta.checkpoints import inspect
    from jaxdelta.memory import gib, run_memory

    info = inspect(arguments.model, revision=arguments.revision)
    c = info.config
    linear, attention = len(c.linear_layers), c.num_layers - len(c.linear_layers)
    writes = f", {c.num_householder} writes a token" if c.num_householder > 1 else ""
    ignored = ", ".join(f"{len(names)} of {group}" for group, names in info.ignored.items()) or "none"
    stored = ", ".join(f"{count} in {kind}" for kind, count in info.stored_dtypes.items())
    about = {
        "folder": str(info.folder) + (f" (revision {info.revision})" if info.revision else ""),
        "architecture": f"{c.title}, {c.num_layers} layers: {linear} {c.linear_title}, {attention} attention",
        "states": f"{linear} layers x {c.num_value_heads} heads of {c.key_dim} x {c.value_dim} (K x V){writes}",
        "width, MLP, vocabulary": f"{c.width}, {c.mlp_width}, {c.vocab_size} ({'tied' if c.tied else 'untied'} head)",
        "parameters": f"{info.num_parameters:,} in {info.num_tensors} tensors: {stored}",
        "ignored tensors": ignored,
        "tokenizer": "tokenizer.json" if info.has_tokenizer else "none: documents can only be given as ids, in Python",
    }
    for dtype in ("float32", "bfloat16"):
        needed = run_memory(c, dtype=dtype, segment=arguments.segment, max_length=arguments.max_length)
        about[f"memory, {dtype}"] = (
            f"{gib(needed.total(1))} for a row of {arguments.max_length:,} tokens: parameters {gib(needed.parameters)}, "
            f"logits {gib(needed.logits)}; for each row carry {gib(needed.row_carry)}, work {gib(needed.row_work)}"
        )
    view = Table(show_header=False, box=None)
    for name, value in about.items():
        view.add_row(f"[bold]{name}", escape(value))
    console.print(view)


def parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    top = argparse.ArgumentParser(
        prog="jaxdelta", description="Recurrent states of delta-rule language models: run in segments, cut, measured."
    )
    commands = top.add_subparsers(title="commands", required=True)

    cut = commands.add_parser(
        "sweep",
        help="cut every carried state to r directions and print what the model loses",
        description="Cut every carried state to r singular directions at each boundary, and print what the model loses.",
    )
    cut.set_defaults(call=sweep_command)
    _add_run_arguments(cut, "sweep")
    cut.add_argument(
        "--ranks",
        type=_ranks,
        metavar="R,R,...",
        help="directions kept, 1 to min(K, V); the untouched model is always run; "
        f"default: those of {','.join(map(str, DEFAULT_RANKS))} below min(K, V)",
    )
    cut.add_argument(
        "--copy-gap",
        type=int,
        default=512,
        metavar="TOKENS",
        help="a copy token ends a bigram that occurred more than this many tokens earlier; default: 512",
    )
    cut.add_argument(
        "--method",
        choices=("subspace", "eigh", "svd"),
        help="of the truncation; default: subspace iteration for ranks up to a quarter of min(K, V), else eigh",
    )
    cut.add_argument(
        "--batch", type=int, metavar="ROWS", help="rows (document x rank) run together; default: what fits the memory"
    )

    maps = commands.add_parser(
        "sensitivity",
        help="what the loss would do to every singular direction, write strength, decay and head",
        description="Derivatives of the loss from one backward pass, estimated effects of removals, and on request how "
        "far the estimates agree with measured removals.",
    )
    maps.set_defaults(call=sensitivity_command)
    _add_run_arguments(maps, "sensitivity")
    maps.add_argument("--max-tokens", type=int, metavar="TOKENS", help="use this many leading tokens of each document")
    maps.add_argument(
        "--loss",
        choices=("next_token", "kl"),
        default="next_token",
        help="kl: divergence from the untouched model, whose first order is zero; default: next_token",
    )
    maps.add_argument("--samples", type=int, default=8, help="labels drawn for the Fisher part; default: 8")
    maps.add_argument("--seed", type=int, default=0, help="of the labels; default: 0")
    maps.add_argument("--rank", type=int, help="cut every state to this rank at every boundary, and derive through the cut")
    maps.add_argument(
        "--frozen-basis", action="store_true", help="with --rank: take the kept directions for constants in the derivative"
    )
    maps.add_argument("--validate", action="store_true", help="measure removals on the same tokens")
    maps.add_argument(
        "--directions", type=int, default=128, help="directions measured, drawn at random; 0: all; default: 128"
    )
    maps.add_argument(
        "--dear",
        action="store_true",
        help="with --validate: also Gauss-Newton, exact local effects and integrated gradients, for directions",
    )

    ledger = commands.add_parser(
        "ledger",
        help="what a product of n_h Householder factors can forget and rotate, and where a model's transitions lie",
        description="Measure what is said of products of n_h Householder factors on matrices drawn at random, in float64. "
        "With --model: where its write strengths, keys and decays put every token's transition (eigenvalues, spectral "
        "radius, active rank), and what products over windows of tokens freeze, forget and mix.",
    )
    ledger.set_defaults(call=ledger_command)
    ledger.add_argument("--dim", type=int, default=16, help="size of the matrices, at least 8; default: 16")
    ledger.add_argument("--draws", type=int, default=200, help="of keys and strengths, for each n_h; default: 200")
    ledger.add_argument("--seed", type=int, default=0, help="of the draws; default: 0")
    ledger.add_argument("--model", help=f"{MODEL_HELP}; default: none, matrices drawn at random")
    _add_document_arguments(
        ledger, "the same command continues it; default: results/ledger-MODEL; without a model they are not kept"
    )
    ledger.add_argument("--max-tokens", type=int, metavar="TOKENS", help="use this many leading tokens of each document")

    info = commands.add_parser(
        "info",
        help="say what a checkpoint is and what a run needs",
        description="Say what a checkpoint is, what would be loaded, and how much memory a run needs.",
    )
    info.set_defaults(call=info_command)
    info.add_argument("model", help=MODEL_HELP)
    info.add_argument("--segment", type=int, default=256, help="tokens between two boundaries; default: 256")
    info.add_argument("--max-length", type=int, default=16384, help="tokens of the longest text; default: 16384")
    info.add_argument("--revision", help="branch, tag or commit of a hub id; default: its main branch")
    return top


def _add_run_arguments(command: argparse.ArgumentParser, name: str) -> None:
    """What every command that runs a model over documents takes."""
    command.add_argument("model", nargs="?", default="control", help=f"{MODEL_HELP}; default: control")
    _add_document_arguments(command, f"the same command continues it; default: results/{name}-MODEL")


def _add_document_arguments(command: argparse.ArgumentParser, out: str) -> None:
    command.add_argument(
        "--documents",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="plain text, one document a file, or .jsonl, one a line (a string, or an object with a string 'text'); "
        "default: the embedded held-out documents",
    )
    command.add_argument("--segment", type=int, default=256, help="tokens between two boundaries; default: 256")
    command.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of parameters and activations; gates, norms and states are float32 in any case; default: float32",
    )
    command.add_argument("--out", type=Path, help=f"results folder; {out}")
    command.add_argument("--revision", help="branch, tag or commit of a hub id; default: its main branch")


def _ranks(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}; expected whole numbers with commas, e.g. 1,4,12,32") from None


def _fail(message: str) -> NoReturn:
    Console(stderr=True).print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True, highlight=False)
    sys.exit(1)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; a user's mistake is told in a line, without a traceback."""
    arguments = parser().parse_args(argv)
    try:
        arguments.call(arguments, Console())
    except (ValueError, OSError, MemoryError) as error:
        _fail(str(error))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        _fail(f"the device ran out of memory; take a smaller --batch and another --out ({str(error).splitlines()[0]})")
    except KeyboardInterrupt:
        print("interrupted; the same command continues with what is missing", file=sys.stderr)
        sys.stderr.flush()
        os._exit(130)  # the device may still be computing; nothing that matters is left to clean up
