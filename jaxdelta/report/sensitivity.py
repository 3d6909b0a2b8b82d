"""Tables and figures of sensitivities and of their validation. Reads datasets and comparisons only."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np
import pyarrow as pa
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxdelta.analysis.sensitivity.importance import head_importance
from jaxdelta.analysis.sensitivity.maps import tail_effect, tail_gate
from jaxdelta.analysis.sensitivity.validation import METRICS, SUBJECTS, EffectComparison, Score
from jaxdelta.report.figure import save_figures
from jaxdelta.report.sheet import Sheet
from jaxdelta.report.sweep import left_out
from jaxdelta.results.folder import write_csv, write_tables

DEFAULT = "first order + fisher / 2"
NOT_VALIDATED = "Not validated: these are estimates. --validate measures removals and says how far to trust them."
MICHEL = "Michel: |derivative of the head's gate|, scaled to unit norm in its layer."
SCORED = (
    "top k: the tenth of the units that matter most; precision at k: the share of them among the k predicted; sum ratio: "
    "predicted over measured, summed; cost of top k: units to measure in predicted order until all k are found. "
)


def score_table(scores: Sequence[Score], comparison: EffectComparison) -> Sheet:
    """Estimators against metrics, each with its 95 % interval over documents."""
    documents, units = comparison.measured.shape
    intervals = "In brackets 95 % intervals of the jackknife over documents; of the other half, the middle 95 % of halves."
    intervals = intervals if documents > 2 else ""
    view = Sheet(
        f"Predicted against measured: {SUBJECTS[comparison.kind]}",
        caption=f"{units} units, {documents} documents. {SCORED}{intervals}",
    )
    view.add_column("estimator", prose=True)
    headings = {"precision": "precision at k", "sum_ratio": "sum ratio", "cost": "cost of top k"}
    for metric in METRICS:
        view.add_column(headings.get(metric, metric).replace(" ", "\n", 1))
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


def head_tables(maps: xr.Dataset, *, top: int = 10, trust: str | None = None) -> list[Sheet]:
    """The heads whose output, and those whose state, has the largest estimated effect; ``trust`` rates the estimate."""
    rows = [row for row in head_rows(maps).to_pylist() if row["document"] is None]
    measured = "output_measured" in rows[0]
    short = left_out(maps.attrs.get("without_boundary", []), maps.sizes["document"])
    views = []
    for part, said in (
        ("output", "its output is removed in the whole text"),
        ("state", "its state is removed at every boundary"),
    ):
        view = Sheet(
            f"Heads by estimated rise of the loss when {said}",
            caption=f"{maps.attrs['unit'].capitalize()}, mean over documents. {MICHEL} {trust or NOT_VALIDATED}" + short,
            keys=2,
        )
        for name in ("layer", "head"):
            view.add_column(name)
        for name in ("output", "state"):
            for heading in ("estimated", "measured") if measured else ("estimated",):
                view.add_column(heading, group=f"{name} removed")
        view.add_column("Michel")
        names = [f"{p}_{x}" for p in ("output", "state") for x in (("effect", "measured") if measured else ("effect",))]
        for row in sorted(rows, key=lambda row: -row[f"{part}_effect"])[:top]:
            cells = (f"{row[name]:+.5f}" for name in names)
            view.add_row(str(row["layer"]), str(row["head"]), *cells, f"{row['michel']:.3f}")
        views.append(view)
    return views


def head_rows(maps: xr.Dataset) -> pa.Table:
    """A row for each head in each document, and for the mean over documents (null): estimated and measured effects.

    ``layer`` is the model's layer; ``output_effect`` and ``state_effect`` are estimated rises of the loss in nats a scored
    token, ``output_measured`` and ``state_measured`` measured ones where there are any, ``michel`` has no unit.
    """
    importance = head_importance(maps)
    columns = {"output_effect": importance.head_output, "state_effect": importance.head_state, "michel": importance.michel}
    columns |= {
        f"{part}_measured": maps[f"head_{part}_measured"] for part in ("output", "state") if "head_output_measured" in maps
    }
    by_document = {name: x.transpose("document", "layer", "head").values for name, x in columns.items()}
    every = {name: np.concatenate([x.mean(axis=0, keepdims=True), x]) for name, x in by_document.items()}
    documents, layers, heads = [None, *map(str, maps.document.values)], maps.layer.values, maps["head"].values
    has = ~np.isnan(every["output_effect"][0])  # layers may have different numbers of heads
    return pa.Table.from_pylist(
        [
            {"document": documents[i], "layer": int(layers[l]), "linear_layer": l, "head": int(heads[h])}
            | {name: float(x[i, l, h]) for name, x in every.items()}
            for i in range(len(documents))
            for l, h in np.argwhere(has).tolist()
        ]
    )


def trust_line(scores: Sequence[Score]) -> str:
    """A line on how far the default estimates for heads' outputs and states agree with measurements."""
    said = []
    for part in ("output", "state"):
        of_heads = [s for s in scores if s.kind == f"head_{part}"]
        if not of_heads:
            return NOT_VALIDATED
        estimator = DEFAULT if any(s.estimator == DEFAULT for s in of_heads) else "first order"  # without samples
        found = {s.metric: s for s in of_heads if s.estimator == estimator}
        rho, ratio = found["spearman"], found["sum_ratio"]
        interval = "" if np.isnan(rho.low) else f" [{rho.low:.2f}, {rho.high:.2f}]"
        said.append(f"{part}s: Spearman {rho.value:.2f}{interval}, predicted over measured, summed, {ratio.value:.2f}")
    return f"Validated against measured removal of {'; of '.join(said)}."


def write_heads(maps: xr.Dataset, folder: Path) -> list[Path]:
    """Write the rows of :func:`head_rows` as ``heads``, Parquet and CSV; returns the files."""
    return write_tables(head_rows(maps), folder, "heads")


def write_scores(scores: Sequence[Score], folder: Path) -> Path:
    """Write ``validation.csv``, a row for each kind, estimator and metric; returns the file."""
    rows = pa.table({f.name: [getattr(s, f.name) for s in scores] for f in fields(Score)})
    return write_csv(rows, folder / "validation.csv")


def head_figure(maps: xr.Dataset, comparisons: Sequence[EffectComparison] = ()) -> Figure:
    """Layer x head maps of the estimates, and below each the measured map if there is one."""
    importance = head_importance(maps).mean("document")
    measured = {c.kind: _by_head(importance, c) for c in comparisons if c.kind in importance}
    rows = 2 if {"head_output", "head_state"} <= measured.keys() else 1
    figure = Figure(figsize=(9, 1.2 + rows * (0.9 + 0.22 * importance.sizes["layer"])), layout="constrained")
    axes = figure.subplots(rows, 3, squeeze=False)
    panels = (("head_output", "output removed"), ("head_state", "state removed at every boundary"), ("michel", "Michel"))
    for column, (name, title) in enumerate(panels):
        predicted = importance[name].values
        values = [predicted] if name not in measured else [predicted, measured[name]]
        largest = max(np.nanmax(np.abs(v)) for v in values)
        for row, shown in enumerate(values):
            label = f"{title}: {('estimated', 'measured')[row]}" if name != "michel" else "Michel, scaled within a layer"
            _heat(figure, axes[row, column], shown, importance.layer.values, label, largest, name != "michel")
        for row in range(len(values), rows):
            axes[row, column].axis("off")
    return figure


def _by_head(importance: xr.Dataset, comparison: EffectComparison) -> np.ndarray:
    """Measured effects of heads or layers, in the shape of the estimates; NaN where nothing was measured."""
    like = importance[comparison.kind]
    found = np.full(like.shape, np.nan)
    effects = comparison.measured.mean(axis=0)
    for unit, effect in zip(comparison.units, effects, strict=True):
        found[tuple(like[d].values.tolist().index(x) for d, x in zip(like.dims, unit, strict=True))] = effect
    return found


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
    """Estimated rise of the loss when a layer keeps r directions at one boundary; mean over boundaries and documents."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    lines = [(tail_effect(maps), "first order + Fisher / 2", "-")] if "gate_sample" in maps else []
    for values, label, style in [*lines, (tail_gate(maps), "first order", ":")]:
        by_layer = values.sum("head").mean(("document", "boundary"))
        for i, layer in enumerate(maps.layer.values):
            colour = f"C{i % 10}"
            name = f"layer {layer}" if style == (lines[0][2] if lines else ":") else None
            axes.plot(by_layer["rank"], by_layer.isel(layer=i), style, color=colour, label=name)
        axes.plot([], [], style, color="0.3", label=label)
    axes.axhline(0, color="0.7", linewidth=0.8, zorder=0)
    axes.set_xlabel("directions kept at one boundary")
    axes.set_ylabel("estimated rise of the loss (nats a token)")
    axes.legend(frameon=False, fontsize=7, ncols=2)
    return figure


def validation_figure(comparisons: Sequence[EffectComparison], scores: Sequence[Score]) -> Figure:
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
        axes.set_title(SUBJECTS[comparison.kind], fontsize=9)
        axes.set_xlabel("measured rise of the loss (nats a token)", fontsize=8)
        axes.set_ylabel("predicted", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.legend(frameon=False, fontsize=7, loc="upper left")
    return figure


def write_figures(folder: Path, maps: xr.Dataset, comparisons: Sequence[EffectComparison] = ()) -> list[Path]:
    """Write ``heads`` and ``by_rank``, each as PNG and SVG; returns the files."""
    return save_figures({"heads": head_figure(maps, comparisons), "by_rank": rank_figure(maps)}, folder)


def write_validation(folder: Path, comparisons: Sequence[EffectComparison], scores: Sequence[Score]) -> list[Path]:
    """Write ``validation`` as PNG and SVG, and ``validation.csv``; returns the files."""
    return [*save_figures({"validation": validation_figure(comparisons, scores)}, folder), write_scores(scores, folder)]
