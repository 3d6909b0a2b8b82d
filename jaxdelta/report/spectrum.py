"""Tables, rows and figures of spectra of states. Reads datasets only."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xarray as xr
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from jaxdelta.analysis.spectrum import END, MEASURES, empty_states, over_documents, split_half
from jaxdelta.report.figure import layer_panels, save_figures
from jaxdelta.report.sheet import Sheet, spread
from jaxdelta.results.folder import write_tables

QUARTILES = (0, 0.25, 0.5, 0.75, 1)
LEAST_SHOWN = 1e-7  # of sigma_1, in figures
MOST_NAMED = 10  # heads that a legend names


def last_place(data: xr.Dataset) -> str:
    """The place that tables and figures show: the end, or else the largest number of tokens."""
    return END if END in data["at"].values else str(data["at"].values[-1])


def tables(data: xr.Dataset) -> list[Sheet]:
    """Every measure over heads, and ranks by layer; at the end of documents."""
    return [measure_table(data), layer_table(data)]


def measure_table(data: xr.Dataset) -> Sheet:
    """Quartiles over heads of each measure's median over documents, its spread over documents and split-half agreement."""
    at = last_place(data)
    found, agreement = over_documents(data).sel(at=at), split_half(data).sel(at=at)
    documents = data.sizes["document"]
    lowest, highest = (int(f(data["tokens"].sel(at=at))) for f in (np.nanmin, np.nanmax))
    read = f"{lowest:,}" if lowest == highest else f"{lowest:,} to {highest:,}"
    heads = int(data["frobenius_norm"].sel(at=at).notnull().any("document").sum())
    view = Sheet(
        f"States of {heads} heads after {read} tokens, {documents} document{'s' * (documents > 1)}",
        caption="Over heads, of the median over documents. Spread: max - min over documents, median over heads. Halves: "
        "Spearman's correlation over heads between two halves of the documents." + empty_line(empty_states(data)),
    )
    view.add_column("measure", prose=True)
    for heading in ("min", "25 %", "median", "75 %", "max"):
        view.add_column(heading, group="over heads")
    for heading in ("spread", "halves"):
        view.add_column(heading, group="documents")
    for name in MEASURES:
        median, low, high = (found[name].sel(statistic=s).values for s in ("median", "min", "max"))
        levels = np.nanquantile(median, QUARTILES)
        spread, halves = np.nanmedian(high - low), float(agreement[name])
        view.add_row(
            name.replace("_", " "),
            *(f"{x:.3g}" for x in levels),
            f"{spread:.2g}" if documents > 1 else "-",
            "-" if np.isnan(halves) else f"{halves:.2f}",
        )
    return view


def empty_line(found: Sequence[tuple[Any, ...]]) -> str:
    """A caption's line that names empty states, given as (document, ..., layer, head); an empty text without any."""
    if not found:
        return ""
    named = [f"layer {layer} head {head} of {' at '.join(map(str, place))}" for *place, layer, head in found[:3]]
    return f" {len(found)} states are empty and left out: {', '.join(named)}{', ...' if len(found) > 3 else ''}."


def layer_table(data: xr.Dataset) -> Sheet:
    """Numerical, effective and stable rank of the heads of each layer."""
    found = over_documents(data).sel(at=last_place(data), statistic="median")
    view = Sheet("Ranks by layer: least, median and largest of its heads", caption="Each head's median over documents.")
    names = ("numerical_rank", "threshold_rank", "effective_rank", "stable_rank")
    view.add_column("layer")
    for name in names:
        view.add_column(name.replace("_", " "))
    for layer in found["layer"].values:
        view.add_row(str(layer), *(spread(found[name].sel(layer=layer).values) for name in names))
    return view


def rows(data: xr.Dataset) -> pa.Table:
    """A row a document, place, layer and head: document, tokens, is_end, layer, linear_layer, head, every measure."""
    found = []
    for document in data["document"].values:
        for at in data["at"].values:
            here = data.sel(document=document, at=at)
            if np.isnan(here["tokens"]):
                continue
            for layer, linear_layer in zip(data["layer"].values, data["linear_layer"].values, strict=True):
                there = here.sel(layer=layer)
                for head in np.flatnonzero(~np.isnan(there["frobenius_norm"].values)):
                    place = dict(
                        document=str(document),
                        tokens=int(here["tokens"]),
                        is_end=bool(at == END),
                        layer=int(layer),
                        linear_layer=int(linear_layer),
                        head=int(head),
                    )
                    found.append(place | {name: float(there[name].values[head]) for name in MEASURES})
    return pa.Table.from_pylist(found)


def figures(data: xr.Dataset) -> dict[str, Figure]:
    """``spectra``, sigma / sigma_1 of every head, and ``effective_rank`` by layer and head."""
    return {"spectra": spectra_figure(data), "effective_rank": rank_figure(data)}


def spectra_figure(data: xr.Dataset) -> Figure:
    """A panel a layer, a line a head: the median over documents of sigma / sigma_1, on a log axis."""
    sigma = data["sigma"].sel(at=last_place(data)).values  # document, layer, head, direction
    first = sigma[..., :1]
    ratio = sigma / np.where(first > 0, first, np.nan)
    layers = data["layer"].values
    figure, panels = layer_panels(layers)
    for i, axes in enumerate(panels):
        for head in range(ratio.shape[2]):
            of_head = ratio[:, i, head]
            of_head = of_head[~np.isnan(of_head[:, 0])]
            if len(of_head):
                middle = np.median(of_head, axis=0)
                direction = 1 + np.flatnonzero(middle > LEAST_SHOWN)
                axes.plot(
                    direction, middle[direction - 1], linewidth=1, color=f"C{head % 10}", alpha=0.8, label=f"head {head}"
                )
        axes.set_yscale("log")
    if ratio.shape[2] <= MOST_NAMED:
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8)
    figure.supxlabel("singular direction", fontsize=10)
    figure.supylabel("sigma / largest sigma, median over documents", fontsize=10)
    return figure


def rank_figure(data: xr.Dataset) -> Figure:
    """Effective rank of every head at the end: median over documents, and the range over documents."""
    found = over_documents(data)["effective_rank"].sel(at=last_place(data))
    layers, heads = found["layer"].values, found["head"].values
    figure = Figure(figsize=(max(6.0, 0.1 * len(layers) * len(heads) + 2), 3.6), layout="constrained")
    axes = figure.subplots()
    spacing = len(heads) + 2
    for i, layer in enumerate(layers):
        low, middle, high = (found.sel(layer=layer, statistic=s).values for s in ("min", "median", "max"))
        order = np.argsort(middle)
        x = i * spacing + np.arange(len(heads))
        reach = [middle[order] - low[order], high[order] - middle[order]]
        axes.errorbar(x, middle[order], yerr=reach, fmt="o", markersize=3, linewidth=1, capsize=2, color=f"C{i % 10}")
    axes.set_xticks(np.arange(len(layers)) * spacing + (len(heads) - 1) / 2, [str(layer) for layer in layers])
    axes.set_xlabel("layer; its heads in ascending order")
    axes.set_ylabel("effective rank")
    axes.set_ylim(bottom=0)
    return figure


def trace_figure(trace: xr.Dataset) -> Figure:
    """A panel a layer, a line a head: effective rank before each write, of the first document.

    Red: where a document of the text starts; grey: the longest text that the model was made for.
    """
    first = trace.isel(document=0)
    layers, steps = trace["layer"].values, trace.sizes["step"]
    position = (trace["token"].values[:, None] + np.arange(steps) / steps).ravel()
    figure, panels = layer_panels(layers, columns=3, width=3.6)
    for axes, layer in zip(panels, layers, strict=True):
        here = first["effective_rank"].sel(layer=layer).transpose("token", "step", "head").values
        for head, rank in enumerate(here.reshape(len(position), -1).T):
            axes.plot(position, rank, linewidth=0.8, color=f"C{head % 10}", alpha=0.8)
        for start in first["starts"].values[1:]:
            axes.axvline(start, color="red", linewidth=0.8, linestyle="--")
        if position[-1] > trace.attrs["context"]:
            axes.axvline(trace.attrs["context"], color="0.5", linewidth=0.8)
        axes.xaxis.set_major_locator(MaxNLocator(4))
    panels[0].set_ylim(bottom=0)  # of all, after the last line
    figure.supxlabel("token", fontsize=10)
    figure.supylabel(f"effective rank before each write, {first['document'].item()}", fontsize=10)
    return figure


def write(data: xr.Dataset, folder: Path) -> list[Path]:
    """Write ``heads`` as Parquet and CSV, and the figures as PNG and SVG; returns the files."""
    return [*write_tables(rows(data), folder, "heads"), *save_figures(figures(data), folder)]
