"""Command line: arguments to one call."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Recurrent states of delta-rule language models: run in segments, cut, measured.",
)
console = Console()

ModelName = Annotated[str, typer.Argument(help="Embedded model, folder in Hugging Face's format, or hub id (owner/name).")]
Dtype = Annotated[str, typer.Option(help="float32 or bfloat16, of parameters and activations; states are f32 in any case.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")]
Segment = Annotated[int, typer.Option(help="Tokens between two boundaries.")]


@app.command("sweep")
def sweep_command(
    model: ModelName = "control",
    documents: Annotated[
        list[Path] | None,
        typer.Option(help="Plain text, one document a file, or .jsonl, one a line. Default: the embedded held-out ones."),
    ] = None,
    ranks: Annotated[
        str | None, typer.Option(help="Directions kept, e.g. 1,4,12,32. Default: 1, 2, 4, 8, 12, 16, 32 below min(K, V).")
    ] = None,
    segment: Segment = 256,
    dtype: Dtype = "float32",
    out: Annotated[
        Path | None, typer.Option(help="Results folder; the same command continues it. Default: results/sweep-MODEL.")
    ] = None,
    scope: Annotated[str, typer.Option(help="all: cut every head at once; layer or head: one at a time.")] = "all",
    copy_gap: Annotated[int, typer.Option(help="Copy tokens end a bigram seen more than this many tokens earlier.")] = 512,
    method: Annotated[str | None, typer.Option(help="subspace, eigh or svd. Default: by rank.")] = None,
    batch: Annotated[
        int | None, typer.Option(help="Rows (document x rank) run together. Default: what fits the memory.")
    ] = None,
    revision: Revision = None,
) -> None:
    """Cut every carried state to r singular directions at each boundary, and print what the model loses."""
    from jaxdelta.analysis.sweep import sweep
    from jaxdelta.checkpoints import load
    from jaxdelta.report import sweep as report
    from jaxdelta.tasks.documents import embedded_texts, read_texts

    texts = read_texts(documents) if documents else embedded_texts()
    out = out or Path("results") / f"sweep-{Path(model).name}"
    loaded = load(model, dtype=dtype, revision=revision)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("compiling and running segments", total=None)
        rows = sweep(
            loaded,
            texts,
            ranks=_ranks(ranks, loaded.config.max_rank),
            segment=segment,
            scope=scope,
            copy_gap=copy_gap,
            method=method,
            batch=batch,
            out=out,
            name=model,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    console.print(report.table(rows))
    figures = report.write_figure(rows, out)
    console.print(
        f"Rows, manifest and figure: {out}/ (rows.csv, rows.parquet, manifest.json, {figures[0].name})", soft_wrap=True
    )


@app.command("info")
def info_command(
    model: ModelName,
    segment: Segment = 256,
    max_length: Annotated[int, typer.Option(help="Tokens of the longest text.")] = 16384,
    revision: Revision = None,
) -> None:
    """Say what a checkpoint is, what would be loaded, and how much memory a run needs."""
    from jaxdelta.checkpoints import inspect
    from jaxdelta.memory import gib, run_memory

    info = inspect(model, revision=revision)
    c = info.config
    attention = c.num_layers - len(c.linear_layers)
    ignored = ", ".join(f"{len(names)} of {group}" for group, names in info.ignored.items()) or "none"
    about = {
        "folder": str(info.folder) + (f" (revision {info.revision})" if info.revision else ""),
        "architecture": f"Qwen3.5 text model, {c.num_layers} layers: "
        f"{len(c.linear_layers)} Gated DeltaNet, {attention} attention",
        "states": f"{len(c.linear_layers)} x {c.num_value_heads} heads of {c.key_dim} x {c.value_dim} (K x V), "
        f"{c.num_key_heads} key heads",
        "width, MLP, vocabulary": f"{c.width}, {c.mlp_width}, {c.vocab_size} ({'tied' if c.tied else 'untied'} head)",
        "parameters": f"{info.num_parameters:,} in {info.num_tensors} tensors, stored as "
        + ", ".join(f"{kind} x {count}" for kind, count in info.stored_dtypes.items()),
        "ignored tensors": ignored,
        "tokenizer": "tokenizer.json" if info.has_tokenizer else "none; give documents as token ids through the library",
    }
    for dtype in ("float32", "bfloat16"):
        needed = run_memory(c, dtype=dtype, segment=segment, max_length=max_length)
        about[f"memory, {dtype}"] = (
            f"{gib(needed.total(1))} for one row of {max_length:,} tokens: parameters {gib(needed.parameters)}, "
            f"carry {gib(needed.row_carry)} and work {gib(needed.row_work)} a row, logits {gib(needed.logits)}"
        )
    view = Table(show_header=False, box=None)
    for name, value in about.items():
        view.add_row(f"[bold]{name}", value)
    console.print(view)


def _ranks(text: str | None, full: int) -> list[int]:
    if text is None:
        return [r for r in (1, 2, 4, 8, 12, 16, 32) if r < full]
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"ranks {text!r}: expected whole numbers with commas, e.g. 1,4,12,32") from None


def main() -> None:
    """Run the command; a user's mistake is told in a line, without a traceback."""
    try:
        app()
    except (ValueError, OSError, MemoryError) as error:
        Console(stderr=True).print(f"[bold red]error:[/] {error}", soft_wrap=True, highlight=False)
        sys.exit(1)
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted; the same command continues with what is missing")
        sys.exit(130)
