"""Tables and figures of what a smaller state costs. Reads rows only."""

from pathlib import Path

import numpy as np
import pyarrow as pa
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from jaxdelta.analysis.compare import UNTOUCHED
from jaxdelta.analysis.storage import costs, growth, spans
from jaxdelta.report.figure import save_figures
from jaxdelta.report.sheet import Sheet


def tables(rows: pa.Table) -> list[Sheet]:
    """Costs by form, divergence by distance from the start, and the heads where errors are born."""
    return [cost_table(rows), distance_table(rows), head_table(rows)]


def cost_table(rows: pa.Table) -> Sheet:
    """Bytes, loss, divergence and agreement of each form."""
    found = costs(rows)
    full = found[0].bytes
    documents = len({r["document"] for r in rows.to_pylist() if r["num_boundaries"] > 0})
    view = Sheet(
        f"What a smaller state costs: {documents} documents",
        caption="State: KiB of all states of a text. Loss: nats a scored token, mean over documents; diff. to the "
        "untouched model, ± its paired standard error. KL from the untouched predictions, in nats a token. Same: share of "
        "equal first words.",
    )
    view.add_column("form", prose=True)
    for heading in ("state,\nKiB", "of\nfull", "loss", "diff.", "±", "KL", "same"):
        view.add_column(heading)
    for one in found:
        view.add_row(
            one.form,
            f"{one.bytes / 1024:.1f}",
            f"{one.bytes / full:.0%}",
            f"{one.loss:.4f}",
            f"{one.difference:+.5f}",
            "-" if np.isnan(one.stderr) else f"{one.stderr:.5f}",
            f"{one.kl:.2e}",
            f"{one.agreement:.2%}",
        )
    return view


def distance_table(rows: pa.Table) -> Sheet:
    """Divergence of each form by distance from the start: does the error grow or settle?"""
    known = spans(rows)
    view = Sheet(
        "Divergence by distance from the start",
        caption="KL in nats a token over tokens from ... to, mean over the documents that fill the span. Last over second: "
        "of those that fill both; above 1 the error grows with the text, near 1 it settles. The first segment comes before "
        "any boundary.",
    )
    view.add_column("form", prose=True)
    for low, high in known[1:]:
        view.add_column(f"{low:,}\nto {high:,}")
    view.add_column("last over\nsecond")
    by_span = {span: {c.form: c.kl for c in costs(rows, span)} for span in known}
    for one in costs(rows)[1:]:
        values = [by_span[span].get(one.form, np.nan) for span in known[1:]]
        ratio = growth(rows, one.form)
        view.add_row(one.form, *(f"{x:.1e}" for x in values), "-" if np.isnan(ratio) else f"{ratio:.2f}")
    return view


def head_table(rows: pa.Table) -> Sheet:
    """Errors of states over heads, and the head with the largest, for each form."""
    view = Sheet(
        "Where the error is born",
        caption="Rounding: what storing alone changes, over the norm of the arriving state, mean. Error: of the "
        "state at the last boundary, against the untouched one. Means over documents; median and largest head, which is "
        "named by layer and head.",
    )
    view.add_column("form", prose=True)
    for group in ("rounding", "error"):
        for heading in ("median", "largest", "head"):
            view.add_column(heading, group=group)
    for name in [c.form for c in costs(rows)[1:]]:
        cells = []
        for column in ("rounding", "state_error"):
            found = by_head(rows, name, column)
            layer, head = max(found, key=found.__getitem__)
            cells += [f"{np.median(list(found.values())):.1e}", f"{found[layer, head]:.1e}", f"{layer}.{head}"]
        view.add_row(name, *cells)
    return view


def by_head(rows: pa.Table, form: str, column: str) -> dict[tuple[int, int], float]:
    """Mean of a column over documents, by layer and head; empty states are left out."""
    found: dict[tuple[int, int], list[float]] = {}
    for row in rows.to_pylist():
        if row["form"] == form and row["layer"] is not None and row["num_boundaries"] > 0 and not np.isnan(row[column]):
            found.setdefault((row["layer"], row["head"]), []).append(row[column])
    return {place: float(np.mean(values)) for place, values in found.items()}


def figure(rows: pa.Table) -> Figure:
    """Divergence against bytes, and against distance from the start."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    found, known = costs(rows), spans(rows)
    by_span = {span: {c.form: c.kl for c in costs(rows, span)} for span in known}
    for i, one in enumerate(c for c in found if c.form != UNTOUCHED):
        left.plot(one.bytes / 1024, max(one.kl, 1e-12), "o", color=f"C{i % 10}")
        left.annotate(
            one.form, (one.bytes / 1024, max(one.kl, 1e-12)), fontsize=7, xytext=(4, 3), textcoords="offset points"
        )
        values = [by_span[span].get(one.form, np.nan) for span in known[1:]]
        middle = [np.sqrt(low * high) for low, high in known[1:]]
        right.plot(middle, values, "o-", markersize=3, color=f"C{i % 10}", label=one.form)
    left.set_xlabel("state of a text (KiB)")
    left.set_ylabel("KL from the untouched predictions (nats)")
    right.set_xlabel("distance from the start (tokens)")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.set_yscale("log")
    left.margins(x=0.15)
    figure.legend(*right.get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8)
    return figure


def write_figures(rows: pa.Table, folder: Path) -> list[Path]:
    """Write ``storage`` as PNG and SVG; returns the files."""
    return save_figures({"storage": figure(rows)}, folder)
