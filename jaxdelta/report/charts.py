"""Charts of the HTML report, as Vega-Lite specifications. Read results only.

Colours of text and lines are ``currentColor``, so that the page decides between light and dark.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import altair as alt
import numpy as np
import xarray as xr

from jaxdelta.analysis.compare import UNTOUCHED, differences
from jaxdelta.analysis.keys import against_horizon, forgetting_share
from jaxdelta.analysis.spectrum import MEASURES, empty_states, over_documents, split_half
from jaxdelta.analysis.storage import Cost, costs, spans
from jaxdelta.analysis.sweep import summarize
from jaxdelta.analysis.transitions.rows import transition_rows
from jaxdelta.report.keys import HORIZON, drawn_horizon
from jaxdelta.report.reads import directions_for
from jaxdelta.report.sensitivity import head_rows
from jaxdelta.report.spectrum import empty_line, last_place
from jaxdelta.report.storage import by_head
from jaxdelta.results.opened import Opened

WIDTH, HEIGHT = 520, 300
CELL = 26
MOST_POINTS = 400  # of a line
LOG = alt.Scale(type="log")
MOST_LABELS = 60  # of an axis
DECADES = [1e-6, 1e-4, 1e-2, 1]
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


def sections(results: Opened) -> list[Section]:
    """The sections of one results folder; none for an analysis that has no charts."""
    make = SECTIONS.get(results.analysis)
    return [] if make is None else make(results)


def _spec(chart: alt.TopLevelMixin) -> dict[str, Any]:
    return chart.to_dict(validate=True)


def _chart(rows: Sequence[dict[str, Any]]) -> alt.Chart:
    return alt.Chart(alt.Data(values=[{k: _plain(v) for k, v in row.items()} for row in rows]))


def _plain(value: Any) -> Any:
    """A JSON value; what is not finite becomes null."""
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not np.isfinite(value) else value


def _number(x: float) -> str:
    return "-" if x is None or not np.isfinite(x) else f"{x:.3g}"


# Spectrum


def spectrum_sections(results: Opened) -> list[Section]:
    """Spectra per head, effective ranks by layer and head, every measure."""
    data = results.arrays["spectrum"]
    at, over = last_place(data), over_documents(data)
    documents = data.sizes["document"]
    lines, points = [], []
    sigma = data["sigma"].sel(at=at)
    ratio = (sigma / sigma.isel(direction=0).where(lambda x: x > 0)).median("document")
    heads = [(int(layer), int(head)) for layer in data["layer"].values for head in data["head"].values]
    for layer, head in heads:
        found = {name: over[name].sel(at=at, layer=layer, head=head) for name in MEASURES}
        if np.isnan(found["effective_rank"].sel(statistic="median")):
            continue
        place = {"layer": layer, "head": head}
        medians = {name: float(x.sel(statistic="median")) for name, x in found.items()}
        reach = {name: float(found["effective_rank"].sel(statistic=name)) for name in ("min", "max")}
        points.append(place | reach | medians | {"name": f"{layer}.{head}"})
        for i, value in enumerate(ratio.sel(layer=layer, head=head).values):
            if value > 1e-7:
                lines.append(place | {"direction": i + 1, "ratio": float(value), "rank": medians["effective_rank"]})
    spectra = (
        _chart(lines)
        .mark_line(strokeWidth=1.5)
        .encode(
            alt.X("direction:Q", title="singular direction"),
            alt.Y(
                "ratio:Q", title="sigma / largest", scale=alt.Scale(type="log"), axis=alt.Axis(format=".0e", values=DECADES)
            ),
            alt.Color("head:O", title="head"),
            tooltip=[
                "layer:O",
                "head:O",
                "direction:Q",
                alt.Tooltip("ratio:Q", format=".2e"),
                _tip("rank", "effective rank"),
            ],
        )
        .properties(width=170, height=130)
        .facet(facet=alt.Facet("layer:O", title="layer"), columns=3)
    )
    labels = alt.Axis(labelAngle=-90, labels=len(points) <= MOST_LABELS)
    base = _chart(points).encode(alt.X("name:N", title="layer.head", sort=None, axis=labels))
    ranks = base.mark_rule().encode(
        alt.Y("min:Q", title="effective rank"), alt.Y2("max:Q"), alt.Color("layer:O", title="layer")
    ) + base.mark_point(filled=True, size=45, opacity=1).encode(
        alt.Y("effective_rank:Q"), alt.Color("layer:O"), tooltip=["layer:O", "head:O", *(_tip(n) for n in MEASURES)]
    )
    agreement = split_half(data).sel(at=at)
    body = []
    for name in MEASURES:
        values = [p[name] for p in points]
        levels = [_number(x) for x in np.quantile(values, (0, 0.25, 0.5, 0.75, 1))] if values else ["-"] * 5
        body.append([name.replace("_", " "), *levels, _number(float(agreement[name]))])
    empty = empty_states(data.sel(at=[at]))
    named = [empty_line(empty).strip()] if empty else []
    prose = [
        "A state is a K x V matrix. Its numerical rank counts singular values above the rounding of float32, and is nearly "
        "full wherever old content has decayed without vanishing. Effective rank, the exponential of the entropy of the "
        "normalised singular values, says how many directions carry the norm; it does not say which are read.",
        f"Measured at {at if at == 'end' else at + ' tokens'} of {documents} documents; medians over documents, bars from "
        "the least to the largest document.",
        *named,
    ]
    charts = [
        ("Singular values of every head over the largest, by layer.", _spec(spectra)),
        (
            "Effective rank of every head, with its range over documents.",
            _spec(ranks.properties(width=WIDTH, height=HEIGHT)),
        ),
    ]
    table = (["measure", "min", "25 %", "median", "75 %", "max", "agreement of halves"], body)
    return [Section("Spectra of the states", prose, charts, table, _head_table(points, MEASURES))]


def _tip(name: str, title: str | None = None) -> alt.Tooltip:
    field = name.replace(".", "\\.")  # a bare point would ask for a part of a value
    return alt.Tooltip(field=field, type="quantitative", title=title or name.replace("_", " "), format=".4~g")


# Keys


def keys_sections(results: Opened) -> list[Section]:
    """Rank against horizon, the key cone, correlations."""
    data = results.arrays["keys"]
    counted = data.where(data["frobenius_norm"] != 0)
    names = [name for name, x in data.items() if x.dims == ("document", "layer", "head")]
    middle = counted[names].median("document")
    low, high = (getattr(counted["effective_rank"], f)("document") for f in ("min", "max"))
    points = []
    for layer in data["layer"].values:
        for head in data["head"].values:
            here = {name: float(middle[name].sel(layer=layer, head=head)) for name in names}
            if np.isfinite(here["effective_rank"]):
                reach = {"low": float(low.sel(layer=layer, head=head)), "high": float(high.sel(layer=layer, head=head))}
                drawn = {"drawn": float(drawn_horizon(data, here["horizon"]))}
                points.append({"layer": int(layer), "head": int(head)} | here | reach | drawn)
    full = int(data.attrs["key_dim"])
    tips = ["layer:O", "head:O", *(_tip(n) for n in ("horizon", "effective_rank", "mean_key", "key_rank_at_horizon"))]
    tips += [_tip("decayed_key_rank", "rank of P"), _tip("beta")]

    base = _chart(points).encode(alt.X("drawn:Q", title=HORIZON, scale=LOG), alt.Color("layer:O", title="layer"))
    diagonal = (
        _chart([{"x": 1, "y": 1}, {"x": full, "y": full}])
        .mark_line(strokeDash=[5, 4], color="currentColor", opacity=0.6)
        .encode(alt.X("x:Q"), alt.Y("y:Q"))
    )
    against = (
        diagonal
        + base.mark_rule().encode(alt.Y("low:Q", title="effective rank", scale=LOG), alt.Y2("high:Q"))
        + base.mark_point(filled=True, size=55, opacity=1).encode(alt.Y("effective_rank:Q"), tooltip=tips)
    )
    cone = base.mark_point(filled=True, size=55, opacity=1).encode(
        alt.Y("mean_key:Q", title="norm of the mean normalised key", scale=alt.Scale(domain=[0, 1])), tooltip=tips
    )
    keys = base.mark_point(filled=True, size=55, opacity=1).encode(
        alt.Y("key_rank_at_horizon:Q", title="effective rank of keys inside the horizon", scale=LOG), tooltip=tips
    )
    body = [
        [row["measure"].replace("_", " "), _number(row["spearman"]), f"{_number(row['low'])} to {_number(row['high'])}"]
        for row in against_horizon(data)
    ]
    prose = [
        "A head whose decay is alpha forgets in about 1 / (1 - alpha) tokens, its horizon. A state that is not limited by "
        "anything else holds as many directions as tokens inside the horizon: the dashed diagonal. Below it, something "
        "else is the limit: the size of the state, or keys that point into a narrow cone, whose mean has a norm near 1.",
        f"{forgetting_share(data):.0%} of the heads forget within a segment of {data.attrs['segment']} tokens.",
    ]
    charts = [
        (
            "Effective rank against the horizon; bars are the range over documents.",
            _spec(against.properties(width=WIDTH, height=HEIGHT)),
        ),
        ("How alike the keys of a head are: 1 if all are parallel.", _spec(cone.properties(width=WIDTH, height=220))),
        ("How many directions the keys inside the horizon span.", _spec(keys.properties(width=WIDTH, height=220))),
    ]
    table = (["against the horizon", "Spearman over heads", "95 % (bootstrap over heads)"], body)
    return [Section("Horizons and keys", prose, charts, table, _head_table(points, names))]


# Reads


def reads_sections(results: Opened) -> list[Section]:
    """Share of the carried state in outputs, and directions that are read."""
    data = results.arrays["reads"]
    over = ["document", "boundary"]
    found = {
        "carried": data["carried"].median(over),
        "directions": directions_for(data).median(over),
        "stored": data["stored_rank"].median(over),
        "both": data["balanced_rank"].median(over),
    }
    cells = _cells({name: x for name, x in found.items()})
    tips = ["layer:O", "head:O", _tip("carried"), _tip("directions", "directions read"), _tip("stored", "effective rank")]
    tips += [_tip("both", "rank of what is stored and read")]
    charts = [
        (
            "Share of the carried state in the energy of the head's outputs.",
            _spec(_heat(cells, "carried", SEQUENTIAL, tips)),
        ),
        ("Directions that give 99 % of what is read of the state.", _spec(_heat(cells, "directions", SEQUENTIAL, tips))),
    ]
    prose = [
        "Inside a segment the output of a head is exactly what it reads of the state at the last boundary plus what it "
        "reads of the segment's own writes. The share below is of energies, and may exceed 1 where the two cancel. Medians "
        "over documents and boundaries."
    ]
    return [Section("What segments read of the states", prose, charts, None, _head_table(cells, found))]


def _head_table(points: Sequence[dict[str, Any]], names: Iterable[str]) -> Table:
    """Numbers of every head, for those who do not hover."""
    names = list(names)
    body = [[f"{p['layer']}.{p['head']}", *(_number(p[name]) for name in names)] for p in points]
    return ["layer.head", *(name.replace("_", " ") for name in names)], body


def _cells(values: dict[str, xr.DataArray]) -> list[dict[str, Any]]:
    first = next(iter(values.values()))
    return [
        {"layer": int(layer), "head": int(head)} | {n: float(x.sel(layer=layer, head=head)) for n, x in values.items()}
        for layer in first["layer"].values
        for head in first["head"].values
    ]


def _heat(cells: list[dict[str, Any]], name: str, scheme: str, tips: list[Any]) -> alt.Chart:
    """A layer x head map; cells without a value are left out."""
    known = [cell for cell in cells if np.isfinite(cell[name])]
    largest = max((abs(cell[name]) for cell in known), default=0.0) or 1.0
    scale = alt.Scale(scheme=scheme, domain=[-largest, 0, largest] if scheme == DIVERGING else [0, largest])
    return (
        _chart(known)
        .mark_rect()
        .encode(
            alt.X("head:O", title="head", axis=alt.Axis(labelAngle=0)),
            alt.Y("layer:O", title="layer"),
            alt.Color(f"{name}:Q", title=name.replace("_", " "), scale=scale),
            tooltip=tips,
        )
        .properties(width=alt.Step(CELL), height=alt.Step(CELL))
    )


# Losses


def sweep_sections(results: Opened) -> list[Section]:
    """Loss against rank with standard errors; by layer and head for narrower scopes."""
    rows = results.tables["rows"]
    charts, body = [], []
    wide = [
        {"tokens": said} | _difference(s) | {"rank": s.world.rank}
        for copy, said in ((False, "all"), (True, "copy"))
        for s in summarize(rows, copy_tokens=copy)
        if s.world.layer is None
    ]
    if len({row["rank"] for row in wide}) > 1:
        base = _chart(wide).encode(
            alt.X("rank:Q", title="directions kept at every boundary", scale=alt.Scale(type="log", base=2))
        )
        color = alt.Color("tokens:N", title="tokens")
        tips = ["tokens:N", "rank:Q", *(_tip(n) for n in ("loss", "difference", "stderr", "percent"))]
        curve = base.mark_rule().encode(
            alt.Y("low:Q", title="loss above the untouched model (nats)"), alt.Y2("high:Q"), color
        ) + base.mark_line(point=alt.OverlayMarkDef(size=50)).encode(alt.Y("difference:Q"), color, tooltip=tips)
        charts.append(
            (
                "Loss by rank; bars are paired standard errors over documents.",
                _spec(curve.properties(width=WIDTH, height=HEIGHT)),
            )
        )
    body = [
        [str(s.world.rank), *("all" if x is None else str(x) for x in s.world[1:]), *_texts(s)] for s in summarize(rows)
    ]
    narrow = [
        {"layer": s.world.layer, "head": "all" if s.world.head is None else s.world.head, "rank": s.world.rank}
        | _difference(s)
        for s in summarize(rows)
        if s.world.layer is not None
    ]
    for rank in sorted({row["rank"] for row in narrow}):
        cells = [row for row in narrow if row["rank"] == rank]
        tips = ["layer:O", "head:O", *(_tip(n) for n in ("loss", "difference", "stderr"))]
        charts.append(
            (
                f"Rise of the loss when a layer or a head keeps {rank} directions (nats).",
                _spec(_heat(cells, "difference", DIVERGING, tips)),
            )
        )
    prose = [
        "At every boundary between two segments the states keep their leading singular directions, and the next segment "
        "reads what is left. The loss is the mean over scored tokens, then over documents. Copy tokens end a bigram that "
        "occurred long before. A loss on text does not show everything: text hardly asks for facts from far back."
    ]
    table = (["rank", "layer", "head", "loss", "difference", "stderr", "%"], body)
    return [Section("What a cut costs", prose, charts, table)]


def compare_sections(results: Opened) -> list[Section]:
    """Loss under each intervention."""
    found = differences(results.tables["rows"])
    rows = [{"intervention": str(s.world[0])} | _difference(s) for s in found]
    base = _chart(rows).encode(alt.Y("intervention:N", title=None, sort=None))
    tips = ["intervention:N", *(_tip(n) for n in ("loss", "difference", "stderr", "percent"))]
    bars = base.mark_bar().encode(alt.X("difference:Q", title="loss above the untouched model (nats)"), tooltip=tips)
    bars += base.mark_rule(color="currentColor").encode(alt.X("low:Q"), alt.X2("high:Q"))
    prose = [
        "Every document runs under every intervention, on the same tokens; bars are paired standard errors over documents."
    ]
    body = [[str(s.world[0]), *_texts(s)] for s in found]
    table = (["intervention", "loss", "difference", "stderr", "%"], body)
    return [Section("Interventions compared", prose, [("Loss under each.", _spec(bars.properties(width=WIDTH)))], table)]


def _difference(s: Any) -> dict[str, float]:
    error = 0.0 if np.isnan(s.stderr) else s.stderr
    return {
        "loss": s.loss,
        "difference": s.difference,
        "stderr": s.stderr,
        "percent": s.percent,
        "low": s.difference - error,
        "high": s.difference + error,
    }


def _texts(s: Any) -> list[str]:
    return [f"{s.loss:.4f}", f"{s.difference:+.4f}", "-" if np.isnan(s.stderr) else f"{s.stderr:.4f}", f"{s.percent:+.2f}"]


def storage_sections(results: Opened) -> list[Section]:
    """Divergence against bytes and against distance from the start."""
    rows = results.tables["rows"]
    found, known = costs(rows), spans(rows)
    every = results.manifest["configuration"].get("every_token", False)
    points = [c._asdict() | {"KiB": c.bytes / 1024} for c in found if c.form != UNTOUCHED and c.kl > 0]
    tips = ["form:N", *(_tip(n) for n in ("KiB", "loss", "difference", "stderr", "kl", "agreement"))]
    color = alt.Color("form:N", title="form", sort=None)
    kl = alt.Y("kl:Q", title="KL from the untouched predictions (nats)", scale=LOG, axis=alt.Axis(format=".0e"))
    size = alt.X("KiB:Q", title="state of a text (KiB)", scale=alt.Scale(type="log", base=2))
    against = _chart(points).mark_point(filled=True, size=70, opacity=1).encode(size, kl, color, tooltip=tips)
    growth = [
        {"form": c.form, "token": (low * high) ** 0.5, "kl": c.kl, "from": low, "to": high}
        for low, high in known[1:]
        for c in costs(rows, (low, high))
        if c.kl > 0
    ]
    along = alt.X("token:Q", title="distance from the start (tokens)", scale=alt.Scale(type="log", base=2))
    lines = _chart(growth).mark_line(point=True).encode(along, kl, color, tooltip=["form:N", "from:Q", "to:Q", _tip("kl")])
    prose = [
        f"Every state is stored in a smaller form {'after every token' if every else 'at every boundary'}, and read back. "
        "Divergence is from the predictions of the untouched model on the same text; where curves are flat, errors settle "
        "instead of growing."
    ]
    body = [[c.form, f"{c.bytes / 1024:.1f}", *_cost_texts(c)] for c in found]
    charts = [
        ("Divergence against the size of the state.", _spec(against.properties(width=WIDTH, height=HEIGHT))),
        ("Divergence by distance from the start.", _spec(lines.properties(width=WIDTH, height=220))),
    ]
    for one in found[1:]:
        errors, rounding = (by_head(rows, one.form, name) for name in ("state_error", "rounding"))
        cells = [dict(layer=l, head=h, error=x, rounding=rounding.get((l, h), np.nan)) for (l, h), x in errors.items()]
        tips = ["layer:O", "head:O", _tip("error"), _tip("rounding")]
        said = f"{one.form}: error of each state at the last boundary, over the norm of the untouched one."
        charts.append((said, _spec(_heat(cells, "error", SEQUENTIAL, tips))))
    table = (["form", "KiB", "loss", "difference", "stderr", "KL", "same first word"], body)
    return [Section("What a smaller state costs", prose, charts, table)]


def _cost_texts(cost: Cost) -> list[str]:
    stderr = "-" if np.isnan(cost.stderr) else f"{cost.stderr:.5f}"
    return [f"{cost.loss:.4f}", f"{cost.difference:+.5f}", stderr, f"{cost.kl:.2e}", f"{cost.agreement:.2%}"]


# Sensitivity, transitions


def sensitivity_sections(results: Opened) -> list[Section]:
    """Estimated and, where there are any, measured effects of removing heads."""
    maps = results.arrays["maps"]
    rows = [row for row in head_rows(maps).to_pylist() if row["document"] is None]
    names = {
        "output_effect": "Estimated rise of the loss when a head's output is removed in the whole text.",
        "state_effect": "Estimated rise of the loss when a head's state is removed at every boundary.",
        "output_measured": "Measured rise of the loss without the head's output.",
        "state_measured": "Measured rise of the loss without the head's state.",
        "michel": "Michel: |derivative of the head's gate|, of unit norm in its layer.",
    }
    there = [name for name in names if name in rows[0]]
    tips = ["layer:O", "head:O", *(_tip(n) for n in there)]
    charts = [(names[n], _spec(_heat(rows, n, SEQUENTIAL if n == "michel" else DIVERGING, tips))) for n in there]
    unit = maps.attrs.get("unit", "nats a scored token")
    prose = [
        f"From one backward pass: first order plus half the Fisher part, in {unit}; means over documents. "
        + (
            "Measured removals stand beside the estimates."
            if "output_measured" in there
            else "Not validated: these are estimates."
        )
    ]
    top = sorted(rows, key=lambda row: -row["output_effect"])[:20]
    table = (
        ["layer", "head", *there],
        [[str(row["layer"]), str(row["head"]), *(f"{row[n]:+.5f}" for n in there)] for row in top],
    )
    return [Section("Sensitivity of the loss to heads", prose, charts, table)]


def transitions_sections(results: Opened) -> list[Section]:
    """Write strengths, eigenvalues and active ranks by head."""
    rows = [row for row in transition_rows(results.arrays["transitions"]).to_pylist() if row["head"] is not None]
    names = {
        "beta_50": "Median write strength beta.",
        "negative": "Share of Householder factors with a negative eigenvalue.",
        "rank_effective": "Mean effective rank of A - alpha I.",
    }
    tips = [
        "layer:O",
        "head:O",
        *(_tip(n) for n in ("beta_50", "alpha_50", "negative", "rank_numerical", "rank_effective")),
    ]
    charts = [(said, _spec(_heat(rows, name, SEQUENTIAL, tips))) for name, said in names.items()]
    prose = [
        "A token multiplies the state by alpha times a product of n_h Householder factors, each with one eigenvalue "
        "1 - beta |k|^2. A negative one turns a direction over, which counting and tracking need."
    ]
    columns = ("beta_5", "beta_50", "beta_95", "alpha_50", "negative", "rotating", "rank_numerical", "rank_effective")
    return [Section("Transitions", prose, charts, None, _head_table(rows, columns))]


def trace_sections(results: Opened) -> list[Section]:
    """Effective rank by token, at most MOST_POINTS a head, of each text."""
    data = results.arrays["trace"]
    found = []
    for document in data["document"].values:
        here = data.sel(document=document).isel(step=0)
        here = here.isel(token=here["effective_rank"].notnull().any(("layer", "head")))
        here = here.isel(token=slice(None, None, -(-here.sizes["token"] // MOST_POINTS)))
        rank = here["effective_rank"].transpose("token", "layer", "head")
        points = [
            {"token": int(token), "layer": int(layer), "head": int(head), "rank": float(rank.values[t, l, h])}
            for t, token in enumerate(rank["token"].values)
            for l, layer in enumerate(rank["layer"].values)
            for h, head in enumerate(rank["head"].values)
            if not np.isnan(rank.values[t, l, h])
        ]
        tips = ["layer:O", "head:O", "token:Q", _tip("rank", "effective rank")]
        y = alt.Y("rank:Q", title="effective rank before the write")
        lines = _chart(points).mark_line(strokeWidth=1).encode(alt.X("token:Q"), y, alt.Color("head:O"), tooltip=tips)
        lines = lines.properties(width=170, height=130).facet(facet=alt.Facet("layer:O", title="layer"), columns=3)
        starts = [f"{x:,.0f}" for x in here["starts"].values[1:] if not np.isnan(x)]
        more = f" Documents start at tokens {', '.join(starts)}." if starts else ""
        found.append((f"{document}: effective rank by token.{more}", _spec(lines)))
    prose = [
        f"Effective rank of the state before the first write of a token. The model was made for {data.attrs['context']:,} "
        "tokens: a rank that goes on growing beyond tells of a state that does not forget."
    ]
    return [Section("Ranks token by token", prose, found, None)]


SECTIONS: dict[str, Callable[[Opened], list[Section]]] = {
    "spectrum": spectrum_sections,
    "keys": keys_sections,
    "reads": reads_sections,
    "sweep": sweep_sections,
    "compare": compare_sections,
    "storage": storage_sections,
    "trace": trace_sections,
    "sensitivity": sensitivity_sections,
    "transitions": transitions_sections,
}
