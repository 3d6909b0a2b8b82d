"""Tables, rows and figures of horizons and keys. Reads datasets only."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import xarray as xr
from matplotlib.figure import Figure

from jaxdelta.analysis.keys import against_horizon, by_horizon, forgetting_share, head_variables, over_heads
from jaxdelta.analysis.spectrum import empty_states, without_empty
from jaxdelta.report.figure import save_figures
from jaxdelta.report.sheet import Sheet, spread
from jaxdelta.report.spectrum import empty_line
from jaxdelta.results.folder import write_tables

HORIZON = "horizon (tokens; at most the text)"


def tables(data: xr.Dataset) -> list[Sheet]:
    """Heads by horizon, every measure against the horizon, and writes by layer."""
    return [horizon_table(data), correlation_table(data), layer_table(data)]


def horizon_table(data: xr.Dataset) -> Sheet:
    """Ranks and keys of heads grouped by horizon."""
    groups = by_horizon(data)
    view = Sheet(
        f"{sum(row['heads'] for row in groups)} heads by horizon, {data.sizes['document']} documents",
        caption=f"{forgetting_share(data):.0%} of heads forget within a segment of {data.attrs['segment']} tokens. Medians "
        "over heads of their medians over documents. Mean key: norm of the mean normalised key. Keys: effective rank of "
        "their plain covariance inside the horizon; P: of their decayed covariance." + empty_line(empty_states(data)),
    )
    for heading in ("horizon,\ntokens", "heads"):
        view.add_column(heading)
    for heading in ("median", "largest"):
        view.add_column(heading, group="effective rank")
    for heading in ("mean\nkey", "keys", "P"):
        view.add_column(heading)
    for row in groups:
        upto = "" if np.isinf(row["to"]) else f" to {row['to']:g}"
        view.add_row(
            f"{row['from']:g}{upto}" if upto else f"above {row['from']:g}",
            str(row["heads"]),
            f"{row['effective_rank']:.1f}",
            f"{row['largest_effective_rank']:.1f}",
            f"{row['mean_key']:.2f}",
            f"{row['key_rank_at_horizon']:.1f}",
            f"{row['decayed_key_rank']:.1f}",
        )
    return view


def correlation_table(data: xr.Dataset) -> Sheet:
    """Spearman's correlation over heads of each measure with the horizon."""
    rows = against_horizon(data)
    view = Sheet(
        f"Against the horizon, over {rows[0]['heads']} heads",
        caption="Spearman's correlation, with the 95 % interval of a bootstrap over heads.",
    )
    view.add_column("measure", prose=True)
    view.add_column("Spearman")
    view.add_column("95 %")
    for row in rows:
        interval = "-" if np.isnan(row["low"]) else f"{row['low']:.2f} to {row['high']:.2f}"
        view.add_row(
            row["measure"].replace("_", " "), "-" if np.isnan(row["spearman"]) else f"{row['spearman']:.2f}", interval
        )
    return view


def layer_table(data: xr.Dataset) -> Sheet:
    """Horizons, write strengths and recall errors by layer."""
    view = Sheet(
        "Writes by layer",
        caption="Horizon: least, median and largest of its heads. Recall error: ||S^T k - v|| / ||v||, median over writes, "
        "before and after each; median over heads and documents.",
    )
    for heading in ("layer", "horizon, tokens", "beta"):
        view.add_column(heading)
    for heading in ("before", "after"):
        view.add_column(heading, group="recall error")
    for layer in data["layer"].values:
        here = data.sel(layer=layer)
        errors = [np.nanmedian(here[name].sel(quantile=0.5).values) for name in ("error_before", "error_after")]
        beta = np.nanmedian(here["beta"].values)
        horizons = spread(here["horizon"].median("document").values.ravel())
        view.add_row(str(layer), horizons, f"{beta:.2f}", *(f"{x:.2f}" for x in errors))
    return view


def rows(data: xr.Dataset) -> pa.Table:
    """A row a document, layer and head, with every variable that has no further axis."""
    names = head_variables(data)
    found = []
    for document in data["document"].values:
        for layer, linear_layer in zip(data["layer"].values, data["linear_layer"].values, strict=True):
            here = data.sel(document=document, layer=layer)
            for head in np.flatnonzero(~np.isnan(here["frobenius_norm"].values)):
                place = dict(document=str(document), layer=int(layer), linear_layer=int(linear_layer), head=int(head))
                found.append(place | {name: float(here[name].values[head]) for name in names})
    return pa.Table.from_pylist(found)


def figures(data: xr.Dataset) -> dict[str, Figure]:
    """``rank_by_horizon`` and ``key_cone``."""
    return {"rank_by_horizon": horizon_figure(data), "key_cone": cone_figure(data)}


def drawn_horizon(data: xr.Dataset, horizon: np.ndarray | float) -> np.ndarray | float:
    """Horizons as drawn: one longer than the longest text, which may be infinite, at the length of the text."""
    return np.minimum(horizon, float(data["tokens"].max()))


def horizon_figure(data: xr.Dataset) -> Figure:
    """Effective rank of every head against its horizon, with the range over documents and the diagonal."""
    figure = Figure(figsize=(6, 4.2), layout="constrained")
    axes = figure.subplots()
    counted = without_empty(data)
    for i, layer in enumerate(data["layer"].values):
        here = counted.sel(layer=layer)
        rank, horizon = here["effective_rank"], drawn_horizon(data, here["horizon"].median("document").values)
        middle = rank.median("document").values
        reach = [middle - rank.min("document").values, rank.max("document").values - middle]
        axes.errorbar(
            horizon, middle, yerr=reach, fmt="o", markersize=4, linewidth=0.8, color=f"C{i % 10}", label=f"layer {layer}"
        )
    full = int(data.attrs["key_dim"])
    axes.plot([1, full], [1, full], color="0.6", linewidth=1, linestyle="--", label="rank = horizon")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(HORIZON)
    axes.set_ylabel("effective rank of the state at the end")
    axes.legend(frameon=False, fontsize=7, ncols=2)
    return figure


def cone_figure(data: xr.Dataset) -> Figure:
    """Norm of the mean key, and effective rank of keys inside the horizon, against the horizon."""
    heads = over_heads(data)
    horizon = drawn_horizon(data, heads["horizon"])
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(horizon, heads["mean_key"], "o", markersize=4)
    left.set_ylim(0, 1)
    left.set_ylabel("norm of the mean normalised key")
    for name, label, marker in (
        ("effective_rank", "state", "o"),
        ("key_rank_at_horizon", "keys inside the horizon", "s"),
        ("decayed_key_rank", "decayed covariance P", "^"),
    ):
        right.plot(horizon, heads[name], marker, markersize=4, label=label, alpha=0.8)
    right.set_yscale("log")
    right.set_ylabel("effective rank")
    right.legend(frameon=False, fontsize=8)
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xlabel(HORIZON)
    return figure


def write(data: xr.Dataset, folder: Path) -> list[Path]:
    """Write ``heads`` as Parquet and CSV, and the figures as PNG and SVG; returns the files."""
    return [*write_tables(rows(data), folder, "heads"), *save_figures(figures(data), folder)]
