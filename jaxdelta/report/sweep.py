"""Table and figure of a rank sweep. Reads rows only."""

from pathlib import Path

import numpy as np
import pyarrow as pa
from matplotlib.figure import Figure

from jaxdelta.analysis.compare import Difference, uncut
from jaxdelta.analysis.sweep import summarize
from jaxdelta.report.figure import save_figures
from jaxdelta.report.sheet import Sheet


def table(rows: pa.Table) -> Sheet:
    """Rank, loss and difference from the untouched model, over all tokens and over copy tokens."""
    summaries = summarize(rows)
    short = uncut(rows)
    tokens = {row["document"]: row["num_tokens"] for row in rows.to_pylist() if row["document"] not in short}
    copies = {s.world: s for s in summarize(rows, copy_tokens=True)}
    scopes = [name for name in ("layer", "head") if any(getattr(s.world, name) is not None for s in summaries)]
    view = Sheet(
        f"Loss by rank of the carried state: {len(tokens)} documents, {sum(tokens.values()):,} scored tokens",
        caption="Nats a scored token, mean over documents; diff. to the untouched\n"
        "model (first row), ± its paired standard error, % of the untouched loss." + left_out(short, len(tokens)),
        keys=1 + len(scopes),
    )
    for name in ("rank", *scopes):
        view.add_column(name)
    for group in ("all tokens", "copy tokens"):
        for heading in ("loss", "diff.", "±", "%"):
            view.add_column(heading, group=group)
    for summary in summaries:
        world = summary.world
        cells = [str(world.rank), *("all" if getattr(world, n) is None else str(getattr(world, n)) for n in scopes)]
        view.add_row(*cells, *_cells(summary), *_cells(copies.get(world)))
    return view


def left_out(short: list[str], counted: int) -> str:
    """A caption line on documents without a boundary, or an empty text."""
    if not short:
        return ""
    return f"\n{len(short)} of {counted + len(short)} documents have no boundary: no state is handed on, not counted."


def _cells(summary: Difference | None) -> list[str]:
    if summary is None:
        return ["-"] * 4
    stderr = "-" if np.isnan(summary.stderr) else f"{summary.stderr:.4f}"
    return [f"{summary.loss:.4f}", f"{summary.difference:+.4f}", stderr, f"{summary.percent:+.2f}"]


def figure(rows: pa.Table) -> Figure:
    """Difference from the untouched model against rank, on a log axis, with paired standard errors; scope "all"."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for copy_tokens, label, marker in ((False, "all tokens", "o"), (True, "copy tokens", "s")):
        points = [s for s in summarize(rows, copy_tokens=copy_tokens) if s.world.layer is None]
        if points:
            axes.errorbar(
                [s.world.rank for s in points],
                [s.difference for s in points],
                yerr=[s.stderr for s in points],
                label=label,
                marker=marker,
                capsize=3,
            )
    ranks = sorted({s.world.rank for s in summarize(rows)})
    axes.axhline(0, color="0.7", linewidth=0.8, zorder=0)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [str(r) for r in ranks])
    axes.minorticks_off()
    axes.set_xlabel("directions kept at every boundary")
    axes.set_ylabel("loss above the untouched model (nats a token)")
    axes.legend(frameon=False)
    return figure


def map_figure(rows: pa.Table) -> Figure:
    """Difference from the untouched model by layer, and by head for the scope "head"; a panel for each rank."""
    cut = summarize(rows)[1:]
    ranks = sorted({s.world.rank for s in cut})
    layers = sorted({s.world.layer for s in cut})
    heads = sorted({s.world.head for s in cut}, key=lambda head: -1 if head is None else head)
    found = {s.world[:]: s.difference for s in cut}
    limit = max((abs(x) for x in found.values()), default=0.0) or 1.0
    width = max(1.6, 0.3 * len(heads) + 1)
    figure = Figure(figsize=(1.2 + width * len(ranks), max(3.2, 1.4 + 0.28 * len(layers))), layout="constrained")
    panels = figure.subplots(1, len(ranks), squeeze=False, sharey=True)[0]
    for axes, rank in zip(panels, ranks, strict=True):
        values = [[found.get((rank, layer, head), np.nan) for head in heads] for layer in layers]
        image = axes.imshow(values, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto")
        axes.set_title(f"rank {rank}", fontsize=9)
        axes.set_xticks(range(len(heads)), ["all" if head is None else str(head) for head in heads], fontsize=7)
        axes.set_yticks(range(len(layers)), [str(layer) for layer in layers], fontsize=7)
        axes.set_xlabel("head")
    panels[0].set_ylabel("layer")
    figure.colorbar(image, ax=list(panels), label="loss above untouched (nats a token)")
    return figure


def write_figures(rows: pa.Table, folder: Path) -> list[Path]:
    """Write ``loss_by_rank`` for the scope "all", else ``loss_by_place``, as PNG and SVG; returns the files."""
    narrow = any(layer is not None for layer in rows["layer"].to_pylist())
    name, drawn = ("loss_by_place", map_figure(rows)) if narrow else ("loss_by_rank", figure(rows))
    return save_figures({name: drawn}, folder)
