"""What all charts share: sections, specifications from rows, layer x head maps.

Colours of text and lines are ``currentColor``, so that the page decides between light and dark.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import altair as alt
import numpy as np
import xarray as xr

WIDTH, HEIGHT = 520, 300
CELL = 26
LOG = alt.Scale(type="log")
DIVERGING, SEQUENTIAL = "blueorange", "viridis"

Table: TypeAlias = tuple[list[str], list[list[str]]]


class Section(NamedTuple):
    """A part of the report.

    Attributes:
        title: heading.
        prose: paragraphs, what the numbers mean.
        charts: Vega-Lite specifications, each with a caption.
        table: column names and rows of text; None if there is none.
        heads: the same for every head.
    """

    title: str
    prose: list[str]
    charts: list[tuple[str, dict[str, Any]]]
    table: Table | None
    heads: Table | None = None


def spec(chart: alt.TopLevelMixin) -> dict[str, Any]:
    """The specification, checked against Vega-Lite's schema."""
    return chart.to_dict(validate=True)


def chart(rows: Sequence[dict[str, Any]]) -> alt.Chart:
    """A chart of rows."""
    return alt.Chart(alt.Data(values=[{k: plain(v) for k, v in row.items()} for row in rows]))


def plain(value: Any) -> Any:
    """A JSON value; what is not finite becomes null."""
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not np.isfinite(value) else value


def number(x: float) -> str:
    """Three digits; "-" for what is not finite."""
    return "-" if x is None or not np.isfinite(x) else f"{x:.3g}"


def tip(name: str, title: str | None = None) -> alt.Tooltip:
    """The number of a field in a tooltip."""
    field = name.replace(".", "\\.")  # a bare point would ask for a part of a value
    return alt.Tooltip(field=field, type="quantitative", title=title or name.replace("_", " "), format=".4~g")


def head_table(points: Sequence[dict[str, Any]], names: Iterable[str]) -> Table:
    """Numbers of every head, for those who do not hover."""
    names = list(names)
    body = [[f"{p['layer']}.{p['head']}", *(number(p[name]) for name in names)] for p in points]
    return ["layer.head", *(name.replace("_", " ") for name in names)], body


def cells_of(values: dict[str, xr.DataArray]) -> list[dict[str, Any]]:
    """A row for each layer and head."""
    first = next(iter(values.values()))
    return [
        {"layer": int(layer), "head": int(head)} | {n: float(x.sel(layer=layer, head=head)) for n, x in values.items()}
        for layer in first["layer"].values
        for head in first["head"].values
    ]


def heat(cells: list[dict[str, Any]], name: str, scheme: str, tips: list[Any]) -> alt.Chart:
    """A layer x head map; cells without a value are left out."""
    known = [cell for cell in cells if np.isfinite(cell[name])]
    largest = max((abs(cell[name]) for cell in known), default=0.0) or 1.0
    scale = alt.Scale(scheme=scheme, domain=[-largest, 0, largest] if scheme == DIVERGING else [0, largest])
    return (
        chart(known)
        .mark_rect()
        .encode(
            alt.X("head:O", title="head", axis=alt.Axis(labelAngle=0)),
            alt.Y("layer:O", title="layer"),
            alt.Color(f"{name}:Q", title=name.replace("_", " "), scale=scale),
            tooltip=tips,
        )
        .properties(width=alt.Step(CELL), height=alt.Step(CELL))
    )
