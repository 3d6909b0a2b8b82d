"""Tables and figures of a model's ledger. Reads datasets only."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import xarray as xr
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxdelta.analysis.transitions.rows import distributions, transition_rows, window_rows
from jaxdelta.analysis.transitions.windows import ACTIVE, FORGOTTEN
from jaxdelta.report.figure import save_figures
from jaxdelta.report.sheet import Sheet
from jaxdelta.results.folder import write_csv

SHOWN_WINDOWS = (1, 16, 256)  # in the table by layer


def tables(ledger: xr.Dataset) -> list[Sheet]:
    """Tables of transitions by layer, and of products over windows by layer and by length."""
    transitions = [row for row in transition_rows(ledger).to_pylist() if row["head"] is None]
    windows = [row for row in window_rows(ledger).to_pylist() if row["head"] is None]
    return [
        transition_table(ledger, transitions),
        layer_table(windows),
        window_table(ledger, [row for row in windows if row["layer"] is None]),
    ]


def transition_table(ledger: xr.Dataset, rows: list[dict]) -> Sheet:
    """beta, eigenvalues, decays, spectral radius and active rank of each layer, then of all layers."""
    every, n, K = rows[0], ledger.attrs["num_householder"], _sizes(ledger.key_dim)
    documents = ledger.sizes["document"]
    view = Sheet(
        f"{every['transitions']:,} transitions of a token: n_h = {n}, K = {K}, {documents} documents",
        caption="5 %, median and 95 % over tokens, heads and steps. " + _pin(ledger, every) + _ranks(every, n),
    )
    for heading in ("layer", "beta", "1 - beta |k|²", "< 0", "alpha"):
        view.add_column(heading)
    for group, heading in (("pin", "off"), ("rank", "num."), ("rank", "eff.")):
        view.add_column(heading, group=group)
    for row in [*rows[1:], every]:
        view.add_row(
            _layer(row),
            _quantiles(row, "beta"),
            _quantiles(row, "eigenvalue"),
            f"{row['negative']:.0%}",
            _quantiles(row, "alpha"),
            f"{max(row['defect'], row['whole_defect']):.0e}",
            f"{row['rank_numerical']:.2f}",
            f"{row['rank_effective']:.2f}",
        )
    return view


def _sizes(of_layers: xr.DataArray) -> str:
    low, high = int(of_layers.min()), int(of_layers.max())
    return f"{low}" if low == high else f"{low} to {high}"


def _pin(ledger: xr.Dataset, every: dict) -> str:
    n, K = ledger.attrs["num_householder"], int(ledger.key_dim.min())
    off = f"off: the largest |rho / alpha - 1|, {every['taken_whole']:,} transitions taken whole as K x K. "
    keys = f"|k|² is {every['key_norm2_smallest']:.7f} to {every['key_norm2_largest']:.7f}. "
    if n >= K:
        return keys + f"n_h = {n} factors reach all K = {K} directions, so nothing pins rho to alpha; {off}"
    if every["expanding"]:
        told = f"{every['expanding']:,} transitions expand (beta |k|² beyond [0, 2]): rho = alpha does not hold for them; "
        return keys + told + off
    return keys + "n_h < K and beta |k|² in [0, 2], so rho = alpha, the pin; " + off


def _ranks(every: dict, n: int) -> str:
    turning = f" {every['rotating']:.2%} turn a plane (complex eigenvalues)." if n > 1 else ""
    deficient = f"less than n_h for {every['rank_deficient']:.2%}, a factor off or keys parallel."
    return f"Rank of A - alpha I, mean: {deficient}{turning}"


def layer_table(rows: list[dict]) -> Sheet:
    """Frozen dimension and extremes of the spectrum, for each layer and then all, at three lengths of window."""
    shown = [w for w in SHOWN_WINDOWS if any(row["window"] == w for row in rows)]
    lengths = {w: [row for row in rows if row["window"] == w] for w in shown}
    view = Sheet(
        "Products over windows, by layer",
        caption="Directions frozen: changed by at most K eps(f32), and by at most a tenth; mean over windows. Kept: "
        "smallest and largest singular value of the product without its decay, of any window; 0 below 1e-14, which is "
        "rounding.",
    )
    view.add_column("layer")
    for w in shown:
        for heading in ("frozen", "kept"):
            view.add_column(heading, group=f"{w} token{'s' * (w > 1)}")
    for at in [*range(1, len(lengths[shown[0]])), 0] if shown else []:
        cells = []
        for w in shown:
            row = lengths[w][at]
            cells += [f"{row['frozen_numerical']:.1f} {row['frozen_0.1']:.1f}"]
            cells += [f"{_small(row['kept_smallest'])} {row['kept_largest']:.3f}"]
        view.add_row(_layer(lengths[shown[0]][at]), *cells)
    return view


def window_table(ledger: xr.Dataset, rows: list[dict]) -> Sheet:
    """Frozen, forgotten and shared directions against the length of a window, over all layers and heads."""
    view = Sheet(
        "Products over windows, by length",
        caption="Window: tokens. Directions frozen: changed by at most K eps(f32), 1 %, 10 %; the bound is K - n_h tokens. "
        f"Forgotten: kept by less than {FORGOTTEN:g}. Overlap of those changed by more than {ACTIVE:g}, and of those "
        "forgotten: of successive windows, of windows apart, of random subspaces of as many dimensions. "
        "Log alpha: the decays' sum, mean. " + _too_short(ledger),
    )
    for heading in ("win-\ndow", "count", "bound", "K\neps", "1 %", "10 %", "for-\ngotten", "log\nalpha"):
        view.add_column(heading)
    for heading in ("changed", "for-\ngotten"):
        view.add_column(heading, group="overlap, %")
    for row in rows:
        frozen = [f"{row[name]:.1f}" for name in ("frozen_numerical", "frozen_0.01", "frozen_0.1", "forgotten")]
        overlaps = [
            " ".join(_share(row[f"{kind}_{name}"]) for name in ("overlap", "apart", "chance"))
            for kind in ledger.kind.values
        ]
        decay = f"{row['log_decay']:.{1 if row['log_decay'] > -10 else 0}f}"
        view.add_row(str(row["window"]), str(row["windows"]), str(row["frozen_bound"]), *frozen, decay, *overlaps)
    return view


def _too_short(ledger: xr.Dataset) -> str:
    """A text on how many documents are too short for which windows."""
    fits = (ledger["count"] > 0).sum("document").values
    documents = ledger.sizes["document"]
    said = [
        f"{documents - n} of {documents} for {w}" for w, n in zip(ledger.window.values, fits, strict=True) if n < documents
    ]
    return f"Documents too short for a window: {', '.join(said)}." if said else ""


def _layer(row: dict) -> str:
    return "all" if row["layer"] is None else str(row["layer"])


def _quantiles(row: dict, name: str) -> str:
    levels = [row[f"{name}_{q}"] for q in (5, 50, 95)]
    return " ".join(f"{x:.2f}".replace("0.", "." if abs(x) < 1 else "0.") for x in levels)  # a column less for each


def _small(x: float) -> str:
    return f"{x:.3f}" if x >= 1e-3 else f"{x:.0e}" if x >= 1e-14 else "0"


def _share(x: float | None) -> str:
    return "-" if x is None else f"{100 * x:.0f}"


def distribution_figure(ledger: xr.Dataset) -> Figure:
    """Histograms of beta, of the eigenvalue along the key and of 1 - alpha, a row for each layer, with medians of heads."""
    found = distributions(ledger)
    layers = found.layer.values
    figure = Figure(figsize=(9, 1.2 + 0.55 * len(layers)), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    labels = ("beta", "1 - beta ‖k‖², eigenvalue along the key", "1 - alpha, what a token's decay takes")
    for axes, quantity, label in zip(panels, found.quantity.values, labels, strict=True):
        edges = found.edges.sel(quantity=quantity).values
        counts = found.histogram.sel(quantity=quantity).values
        some = np.flatnonzero(counts.any(axis=(0, 1)))
        if quantity == "alpha":
            edges, counts = 1 - edges[::-1], counts[..., ::-1]
            axes.set_xscale("log")
        else:
            axes.set_xlim(edges[some[0]] - 0.02, edges[some[-1] + 1] + 0.02)
        for base, of_heads in zip(reversed(range(len(layers))), counts, strict=True):
            _ridge(axes, base, of_heads, edges)
        axes.set_yticks(np.arange(len(layers)), layers[::-1])
        axes.set_ylim(-0.1, len(layers))
        axes.set_xlabel(label, fontsize=9)
        axes.tick_params(labelsize=8)
    panels[0].set_ylabel("layer")
    return figure


def _ridge(axes: Axes, base: int, of_heads: np.ndarray, edges: np.ndarray) -> None:
    """A histogram on a line of its own, and a tick at each head's median."""
    heights = of_heads.sum(axis=0)
    axes.stairs(base + 0.9 * heights / max(heights.max(), 1), edges, baseline=base, fill=True, color="C0", alpha=0.5)
    medians = [_median(counts, edges) for counts in of_heads if counts.any()]
    axes.plot(medians, np.full(len(medians), base + 0.08), "|", color="0.15", markersize=6)


def _median(counts: np.ndarray, edges: np.ndarray) -> float:
    """Median of a histogram, interpolated within its bin."""
    return float(np.interp(0.5, np.concatenate([[0.0], np.cumsum(counts) / counts.sum()]), edges))


def spectrum_figure(ledger: xr.Dataset) -> Figure:
    """Singular values of the products for each length of window, and directions frozen and forgotten against the length."""
    rows = [row for row in window_rows(ledger).to_pylist() if row["head"] is None]
    lengths = sorted({row["window"] for row in rows})
    figure = Figure(figsize=(9, 4), layout="constrained")
    spectra, dims = figure.subplots(1, 2)
    for i, w in enumerate(lengths):
        at = ledger.sel(window=w)
        kept = at.kept.weighted(at["count"]).mean(("document", "layer", "head"))
        spectra.plot(np.arange(1, kept.size + 1), kept, color=_shade(i, lengths), label=f"{w}")
    spectra.set_xlabel("direction")
    spectra.set_ylabel("singular value of the product, mean")
    _legend_above(spectra, title="tokens of a window", ncols=len(lengths))
    layers = [int(x) for x in ledger.layer.values]
    for layer in [*layers, None]:
        of_layer = [row for row in rows if row["layer"] == layer]
        colour, width = ("0.6", 0.7) if layer is not None else ("C0", 2)
        dims.plot(lengths, [row["frozen_0.1"] for row in of_layer], color=colour, linewidth=width)
        colour = "0.6" if layer is not None else "C3"
        dims.plot(lengths, [row["forgotten"] for row in of_layer], "--", color=colour, linewidth=width)
    bounds = [row["frozen_bound"] for row in rows if row["layer"] is None]
    numerical = [row["frozen_numerical"] for row in rows if row["layer"] is None]
    dims.plot(lengths, numerical, "o", color="C0", markersize=4, label="frozen, to K eps(f32)")
    dims.plot(lengths, bounds, ":", color="0.2", label="K - $n_h$ tokens, bound")
    for style, colour, label in (
        ("-", "C0", "frozen to a tenth"),
        ("--", "C3", "more than halved"),
        ("-", "0.6", "one layer"),
    ):
        dims.plot([], [], style, color=colour, label=label)
    _by_length(dims, lengths, "directions of K")
    _legend_above(dims, ncols=2)
    return figure


def angle_figure(ledger: xr.Dataset) -> Figure:
    """Principal angles between successive windows' subspaces, and their overlap against the length of the window."""
    rows = [row for row in window_rows(ledger).to_pylist() if row["layer"] is None]
    lengths = [row["window"] for row in rows]
    titles = {"active": f"changed by more than {ACTIVE:g}", "forgotten": f"kept by less than {FORGOTTEN:g}"}
    figure = Figure(figsize=(9, 5.6), layout="constrained")
    panels = figure.subplots(2, 2, sharey="row")
    for kind, (angles, overlaps) in zip(titles, panels.T, strict=True):
        for i, w in enumerate(lengths):
            counts = ledger.angles.sel(window=w, kind=kind).sum(("document", "layer", "head")).values
            if counts.any():
                upto = np.concatenate([[0], np.cumsum(counts) / counts.sum()])
                angles.plot(np.linspace(0, 90, upto.size), upto, color=_shade(i, lengths), label=f"{w}")
        angles.set_title(f"directions {titles[kind]}", fontsize=9)
        angles.set_xlabel("principal angle, successive windows (degrees)", fontsize=8)
        for name, style, label in (
            ("overlap", "o-", "successive windows"),
            ("apart", "s--", "windows apart"),
            ("chance", ":", "random subspaces"),
        ):
            found = {row["window"]: row[f"{kind}_{name}"] for row in rows if row[f"{kind}_{name}"] is not None}
            overlaps.plot(list(found), list(found.values()), style, label=label)
        _by_length(overlaps, lengths, "")
        overlaps.set_ylim(0, 1.02)
    panels[0, 0].set_ylabel("share of angles up to this", fontsize=8)
    panels[1, 0].set_ylabel("overlap of subspaces", fontsize=8)
    drawn = [axes for axes in panels[0] if axes.get_legend_handles_labels()[0]]
    if drawn:
        drawn[-1].legend(title="tokens", frameon=False, fontsize=7, title_fontsize=7)
    panels[1, 0].legend(frameon=False, fontsize=7)
    return figure


def _legend_above(axes: Axes, **options) -> None:
    small = dict(frameon=False, fontsize=7, title_fontsize=7, columnspacing=1, handlelength=1.5)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), **small, **options)


def _shade(index: int, of: list) -> tuple:
    return colormaps["viridis"](0.9 * index / max(1, len(of) - 1))


def _by_length(axes: Axes, lengths: list[int], label: str) -> None:
    axes.set_xscale("log", base=4)
    axes.set_xticks(lengths, [str(w) for w in lengths])
    axes.minorticks_off()
    axes.set_xlabel("tokens of a window", fontsize=8)
    axes.set_ylabel(label)
    axes.tick_params(labelsize=8)


def write_figures(folder: Path, ledger: xr.Dataset) -> list[Path]:
    """Write ``distributions``, ``products`` and ``angles``, each as PNG and SVG; returns the files."""
    figures = {
        "distributions": distribution_figure(ledger),
        "products": spectrum_figure(ledger),
        "angles": angle_figure(ledger),
    }
    return save_figures(figures, folder)


def write_rows(folder: Path, ledger: xr.Dataset) -> list[Path]:
    """Write ``transitions.csv`` and ``windows.csv``, rows for all heads, each layer and each head; returns the files."""
    found: dict[str, pa.Table] = {"transitions": transition_rows(ledger), "windows": window_rows(ledger)}
    return [write_csv(rows, folder / f"{name}.csv") for name, rows in found.items()]
