"""Table, rows and figure of what segments read of their states. Reads datasets only."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import xarray as xr
from matplotlib.figure import Figure

from jaxdelta.analysis.spectrum import empty_states
from jaxdelta.report.figure import layer_panels, save_figures
from jaxdelta.report.sheet import Sheet, spread
from jaxdelta.report.spectrum import empty_line
from jaxdelta.results.folder import write_tables

HELD = 0.99  # share of the energy that is read


def directions_for(data: xr.Dataset, share: float = HELD) -> xr.DataArray:
    """How many directions, the largest contribution first, give ``share`` of what is read of the state; NaN if nothing."""
    contribution = data["contribution"]
    order = -np.sort(-contribution.values, axis=-1)
    total = order.sum(axis=-1)
    held = np.cumsum(order, axis=-1) < share * total[..., None]
    count = np.where(total > 0, 1 + held.sum(axis=-1), np.nan)
    return xr.DataArray(count, {x: contribution[x] for x in contribution.dims[:-1]}, contribution.dims[:-1])


def table(data: xr.Dataset) -> Sheet:
    """Carried share and ranks by layer."""
    count = directions_for(data)
    view = Sheet(
        f"What segments read of the states they start from: {data.sizes['document']} documents",
        caption="Carried: energy of what is read of the state over that of the head's outputs, least, median and largest "
        "head; above 1 where the segment's own writes cancel a part. Effective ranks of the state, of the root of the read "
        f"Gramian, and of both together; directions that give {HELD:.0%} of what is read. Medians over documents and "
        "boundaries." + empty_line(empty_states(data.isel(direction=0), norm="sigma")),
    )
    for heading in ("layer", "carried"):
        view.add_column(heading)
    for heading in ("stored", "read", "both"):
        view.add_column(heading, group="effective rank")
    view.add_column("directions\nread")
    for layer in data["layer"].values:
        here = data.sel(layer=layer)
        ranks = [np.nanmedian(here[f"{name}_rank"].values) for name in ("stored", "read", "balanced")]
        view.add_row(
            str(layer),
            spread(here["carried"].median(["document", "boundary"]).values, "{:.2f}"),
            *(f"{x:.1f}" for x in ranks),
            f"{np.nanmedian(count.sel(layer=layer).values):.0f}",
        )
    return view


def rows(data: xr.Dataset) -> pa.Table:
    """A row a document, boundary, layer and head: carried, the ranks, and the directions that are read."""
    count, found = directions_for(data), []
    names = ("carried", "stored_rank", "read_rank", "balanced_rank")
    for d, document in enumerate(data["document"].values):
        for b, boundary in enumerate(data["boundary"].values):
            for i, (layer, linear) in enumerate(zip(data["layer"].values, data["linear_layer"].values, strict=True)):
                for head in np.flatnonzero(~np.isnan(data["stored_rank"].values[d, b, i])):
                    place = dict(document=str(document), boundary=int(boundary), layer=int(layer))
                    place |= dict(linear_layer=int(linear), head=int(head))
                    values = {name: float(data[name].values[d, b, i, head]) for name in names}
                    found.append(place | values | {"directions_read": float(count.values[d, b, i, head])})
    return pa.Table.from_pylist(found)


def figure(data: xr.Dataset) -> Figure:
    """A panel a layer: energy of directions in the state and in what is read, median over boundaries and heads' sum 1."""
    layers = data["layer"].values
    figure, panels = layer_panels(layers)
    stored = data["sigma"] ** 2
    for axes, layer in zip(panels, layers, strict=True):
        for values, label in ((stored, "stored"), (data["contribution"], "read")):
            here = values.sel(layer=layer)
            share = (here / here.sum("direction").where(lambda x: x > 0)).median(["document", "boundary", "head"])
            axes.plot(1 + share["direction"].values, share.values, label=label, linewidth=1.2)
        axes.set_yscale("log")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8)
    figure.supxlabel("singular direction of the state", fontsize=10)
    figure.supylabel("share of the energy, median", fontsize=10)
    return figure


def write(data: xr.Dataset, folder: Path) -> list[Path]:
    """Write ``heads`` as Parquet and CSV, and ``reads`` as PNG and SVG; returns the files."""
    return [*write_tables(rows(data), folder, "heads"), *save_figures({"reads": figure(data)}, folder)]
