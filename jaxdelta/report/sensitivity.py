"""Tables and figures of sensitivities and of their validation. Reads datasets and comparisons only."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich import box
from rich.table import Table

from jaxdelta.analysis.importance import head_importance
from jaxdelta.analysis.sensitivity import tail_effect, tail_gate
from jaxdelta.analysis.validation import METRICS, Comparison, Score

DEFAULT = "first order + fisher / 2"
KINDS = {
    "direction": "one direction of one state",
    "head_output": "a head's output, whole text",
    "head_state": "a head's state, every boundary",
    "layer_output": "a layer's outputs, whole text",
    "layer_state": "a layer's states, every boundary",
}
NOT_VALIDATED = "Not validated: these are estimates. --validate measures removals and says how far to trust them."


def score_table(scores: Sequence[Score], comparison: Comparison) -> Table:
    """Estimators against metrics, each with its 95 % interval over documents."""
    documents, units = comparison.measured.shape
    view = Table(
        title=f"Predicted against measured: {KINDS[comparison.kind]}",
        caption=f"{units} units, {documents} documents; top k = a tenth of the units; 95 % bootstrap over documents.",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    view.add_column("estimator", no_wrap=True)
    headings = {"precision": "precision at k", "sum_ratio": "sum ratio", "cost": "cost of top k"}
    for metric in METRICS:
        view.add_column(headings.get(metric, metric), justify="right")
    for estimator in dict.fromkeys(s.estimator for s in scores):
        row = {s.metric: s for s in scores if s.estimator == estimator}
        view.add_row(estimator, *(_cell(row[metric]) for metric in METRICS))
    return view


def _cell(score: Score) -> str:
    form = "{:.0f}" if score.metric == "cost" else "{:.2f}"
    if np.isnan(score.value):
        return "-"
    interval = "" if np.isnan(score.low) else f"\n[{form.format(score.low)}, {form.format(score.high)}]"
    return form.format(score.value) + interval


def head_table(maps: xr.Dataset, *, top: int = 10, trust: str | None = None) -> Table:
    """The heads whose removal is estimated to cost most, with what is known of the estimate's worth below."""
    importance = head_importance(maps).mean("document")
    view = Table(
        title=f"Heads by estimated rise of the loss ({maps.attrs['unit']})",
        caption=trust or NOT_VALIDATED,
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for name in ("layer", "head", "output removed", "state removed", "Michel"):
        view.add_column(name, justify="right", no_wrap=True)
    order = np.argsort(-importance.head_output.values, axis=None)[:top]
    for layer, head in zip(*np.unravel_index(order, importance.head_output.shape), strict=True):
        at = importance.isel(layer=layer, head=head)
        view.add_row(
            str(int(at.model_layer)),
            str(head),
            f"{float(at.head_output):+.5f}",
            f"{float(at.head_state):+.5f}",
            f"{float(at.michel):.3f}",
        )
    return view


def trust_line(scores: Sequence[Score]) -> str:
    """One line on the default estimate of heads' outputs."""
    of_heads = [s for s in scores if s.kind == "head_output"]
    if not of_heads:
        return NOT_VALIDATED
    estimator = DEFAULT if any(s.estimator == DEFAULT for s in of_heads) else "first order"  # without samples
    found = {s.metric: s for s in of_heads if s.estimator == estimator}
    rho, ratio = found["spearman"], found["sum_ratio"]
    interval = "" if np.isnan(rho.low) else f" [{rho.low:.2f}, {rho.high:.2f}]"
    return (
        f"Validated against measured removal of outputs: Spearman {rho.value:.2f}{interval}, "
        f"sum of predicted over measured {ratio.value:.2f}."
    )


def write_scores(scores: Sequence[Score], folder: Path) -> Path:
    """``validation.csv``, one row a kind, estimator and metric."""
    rows = pa.table({f.name: [getattr(s, f.name) for s in scores] for f in fields(Score)})
    pa_csv.write_csv(rows, folder / "validation.csv")
    return folder / "validation.csv"


def head_figure(maps: xr.Dataset, comparisons: Sequence[Comparison] = ()) -> Figure:
    """Layer x head maps of the estimates, and under each, where there is one, the measured map."""
    importance = head_importance(maps).mean("document")
    measured = {c.kind: c.measured.mean(axis=0) for c in comparisons}
    rows = 2 if {"head_output", "head_state"} <= measured.keys() else 1
    figure = Figure(figsize=(9, 1.2 + rows * (0.9 + 0.22 * importance.sizes["layer"])), layout="constrained")
    axes = figure.subplots(rows, 3, squeeze=False)
    panels = (("head_output", "output removed"), ("head_state", "state removed at every boundary"), ("michel", "Michel"))
    for column, (name, title) in enumerate(panels):
        predicted = importance[name].values
        values = [predicted] if name not in measured else [predicted, measured[name].reshape(predicted.shape)]
        largest = max(np.abs(v).max() for v in values)
        for row, shown in enumerate(values):
            label = f"{title}: {('estimated', 'measured')[row]}" if name != "michel" else "Michel, scaled within a layer"
            _heat(figure, axes[row, column], shown, importance.model_layer.values, label, largest, name != "michel")
        for row in range(len(values), rows):
            axes[row, column].axis("off")
    return figure


def _heat(figure: Figure, axes: Axes, values: np.ndarray, layers: np.ndarray, title: str, largest: float, signed: bool):
    low, colours = (-largest, "RdBu_r") if signed else (0, "viridis")
    image = axes.imshow(values, aspect="auto", cmap=colours, vmin=low, vmax=largest)
    axes.set_title(title, fontsize=8)
    axes.set_xlabel("head", fontsize=8)
    axes.set_ylabel("layer", fontsize=8)
    axes.set_yticks(range(len(layers)), layers, fontsize=7)
    axes.set_xticks(range(values.shape[1])[:: max(1, values.shape[1] // 8)])
    axes.tick_params(labelsize=7)
    bar = figure.colorbar(image, ax=axes)
    bar.ax.tick_params(labelsize=7)
    bar.set_label("nats a token" if signed else "relative", fontsize=7)


def rank_figure(maps: xr.Dataset) -> Figure:
    """Estimated rise of the loss when a layer is cut to r directions at one boundary; mean over boundaries, documents."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    lines = [(tail_effect(maps), "first order + Fisher / 2", "-")] if "gate_sample" in maps else []
    for values, label, style in [*lines, (tail_gate(maps), "first order", ":")]:
        by_layer = values.sum("head").mean(("document", "boundary"))
        for i, layer in enumerate(maps.model_layer.values):
            colour = f"C{i % 10}"
            name = f"layer {layer}" if style == (lines[0][2] if lines else ":") else None
            axes.plot(by_layer["rank"], by_layer.isel(layer=i), style, color=colour, label=name)
        axes.plot([], [], style, color="0.3", label=label)
    axes.axhline(0, color="0.7", linewidth=0.8, zorder=0)
    axes.set_xlabel("directions kept at one boundary")
    axes.set_ylabel("estimated rise of the loss (nats a token)")
    axes.legend(frameon=False, fontsize=7, ncols=2)
    return figure


def validation_figure(comparisons: Sequence[Comparison], scores: Sequence[Score]) -> Figure:
    """Predicted against measured effects: directions, heads' outputs, heads' states; first order beside the default."""
    shown = [c for c in comparisons if c.kind in ("direction", "head_output", "head_state")]
    figure = Figure(figsize=(3.6 * len(shown), 3.8), layout="constrained")
    for axes, comparison in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        measured = comparison.measured.mean(axis=0)
        largest = max(np.abs(measured).max(), 1e-9)  # of axes that effects of nothing have too
        for estimator, marker, colour in (("first order", "x", "0.6"), (DEFAULT, "o", "C0")):
            if estimator in comparison.predicted:
                rho = next(
                    s.value for s in scores if (s.kind, s.estimator, s.metric) == (comparison.kind, estimator, "spearman")
                )
                predicted = comparison.predicted[estimator].mean(axis=0)
                largest = max(largest, np.abs(predicted).max())
                label = f"{estimator} (Spearman {rho:.2f})"
                axes.scatter(measured, predicted, s=14, marker=marker, color=colour, label=label, alpha=0.7)
        threshold = 10.0 ** (np.floor(np.log10(max(largest, 1e-6))) - 3)
        ticks = [sign * threshold * 10**i for sign in (-1, 1) for i in (1, 3)]
        axes.set_xscale("symlog", linthresh=threshold)
        axes.set_yscale("symlog", linthresh=threshold)
        for axis, limits in ((axes.xaxis, axes.set_xlim), (axes.yaxis, axes.set_ylim)):
            axis.set_ticks([*ticks, 0])
            limits(-1.5 * largest, 1.5 * largest)
        limit = 1.5 * largest
        axes.plot([-limit, 0, limit], [-limit, 0, limit], color="0.7", linewidth=0.8, zorder=0)
        axes.set_title(KINDS[comparison.kind], fontsize=9)
        axes.set_xlabel("measured rise of the loss (nats a token)", fontsize=8)
        axes.set_ylabel("predicted", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.legend(frameon=False, fontsize=7, loc="upper left")
    return figure


def write_figures(folder: Path, maps: xr.Dataset, comparisons: Sequence[Comparison], scores: Sequence[Score]) -> list[Path]:
    """``heads``, ``by_rank`` and, where removals were measured, ``validation``, each as PNG and SVG."""
    figures = {"heads": head_figure(maps, comparisons), "by_rank": rank_figure(maps)}
    if comparisons:
        figures["validation"] = validation_figure(comparisons, scores)
    files = []
    for name, figure in figures.items():
        for suffix in ("png", "svg"):
            files.append(folder / f"{name}.{suffix}")
            figure.savefig(files[-1], dpi=150)
    return files
