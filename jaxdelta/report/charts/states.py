"""Sections on states: spectra, ranks token by token, horizons and keys, reads. Read results only."""

import altair as alt
import numpy as np

from jaxdelta.analysis.keys import against_horizon, forgetting_share, head_variables
from jaxdelta.analysis.spectrum import MEASURES, empty_states, over_documents, split_half, without_empty
from jaxdelta.report.charts.drawing import (
    HEIGHT,
    LOG,
    SEQUENTIAL,
    WIDTH,
    Section,
    cells_of,
    chart,
    head_table,
    heat,
    number,
    spec,
    tip,
)
from jaxdelta.report.keys import HORIZON, drawn_horizon
from jaxdelta.report.reads import directions_for
from jaxdelta.report.spectrum import empty_line, last_place
from jaxdelta.results.opened import Opened

MOST_POINTS = 400  # of a line
MOST_LABELS = 60  # of an axis
DECADES = [1e-6, 1e-4, 1e-2, 1]


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
        chart(lines)
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
                tip("rank", "effective rank"),
            ],
        )
        .properties(width=170, height=130)
        .facet(facet=alt.Facet("layer:O", title="layer"), columns=3)
    )
    labels = alt.Axis(labelAngle=-90, labels=len(points) <= MOST_LABELS)
    base = chart(points).encode(alt.X("name:N", title="layer.head", sort=None, axis=labels))
    ranks = base.mark_rule().encode(
        alt.Y("min:Q", title="effective rank"), alt.Y2("max:Q"), alt.Color("layer:O", title="layer")
    ) + base.mark_point(filled=True, size=45, opacity=1).encode(
        alt.Y("effective_rank:Q"), alt.Color("layer:O"), tooltip=["layer:O", "head:O", *(tip(n) for n in MEASURES)]
    )
    agreement = split_half(data).sel(at=at)
    body = []
    for name in MEASURES:
        values = [p[name] for p in points]
        levels = [number(x) for x in np.quantile(values, (0, 0.25, 0.5, 0.75, 1))] if values else ["-"] * 5
        body.append([name.replace("_", " "), *levels, number(float(agreement[name]))])
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
        ("Singular values of every head over the largest, by layer.", spec(spectra)),
        (
            "Effective rank of every head, with its range over documents.",
            spec(ranks.properties(width=WIDTH, height=HEIGHT)),
        ),
    ]
    table = (["measure", "min", "25 %", "median", "75 %", "max", "agreement of halves"], body)
    return [Section("Spectra of the states", prose, charts, table, head_table(points, MEASURES))]


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
        tips = ["layer:O", "head:O", "token:Q", tip("rank", "effective rank")]
        y = alt.Y("rank:Q", title="effective rank before the write")
        lines = chart(points).mark_line(strokeWidth=1).encode(alt.X("token:Q"), y, alt.Color("head:O"), tooltip=tips)
        lines = lines.properties(width=170, height=130).facet(facet=alt.Facet("layer:O", title="layer"), columns=3)
        starts = [f"{x:,.0f}" for x in here["starts"].values[1:] if not np.isnan(x)]
        more = f" Documents start at tokens {', '.join(starts)}." if starts else ""
        found.append((f"{document}: effective rank by token.{more}", spec(lines)))
    prose = [
        f"Effective rank of the state before the first write of a token. The model was made for {data.attrs['context']:,} "
        "tokens: a rank that goes on growing beyond tells of a state that does not forget."
    ]
    return [Section("Ranks token by token", prose, found, None)]


def keys_sections(results: Opened) -> list[Section]:
    """Rank against horizon, the key cone, correlations."""
    data = results.arrays["keys"]
    counted, names = without_empty(data), head_variables(data)
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
    tips = ["layer:O", "head:O", *(tip(n) for n in ("horizon", "effective_rank", "mean_key", "key_rank_at_horizon"))]
    tips += [tip("decayed_key_rank", "rank of P"), tip("beta")]

    base = chart(points).encode(alt.X("drawn:Q", title=HORIZON, scale=LOG), alt.Color("layer:O", title="layer"))
    diagonal = (
        chart([{"x": 1, "y": 1}, {"x": full, "y": full}])
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
        [row["measure"].replace("_", " "), number(row["spearman"]), f"{number(row['low'])} to {number(row['high'])}"]
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
            spec(against.properties(width=WIDTH, height=HEIGHT)),
        ),
        ("How alike the keys of a head are: 1 if all are parallel.", spec(cone.properties(width=WIDTH, height=220))),
        ("How many directions the keys inside the horizon span.", spec(keys.properties(width=WIDTH, height=220))),
    ]
    table = (["against the horizon", "Spearman over heads", "95 % (bootstrap over heads)"], body)
    return [Section("Horizons and keys", prose, charts, table, head_table(points, names))]


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
    cells = cells_of(found)
    tips = ["layer:O", "head:O", tip("carried"), tip("directions", "directions read"), tip("stored", "effective rank")]
    tips += [tip("both", "rank of what is stored and read")]
    charts = [
        (
            "Share of the carried state in the energy of the head's outputs.",
            spec(heat(cells, "carried", SEQUENTIAL, tips)),
        ),
        ("Directions that give 99 % of what is read of the state.", spec(heat(cells, "directions", SEQUENTIAL, tips))),
    ]
    prose = [
        "Inside a segment the output of a head is exactly what it reads of the state at the last boundary plus what it "
        "reads of the segment's own writes. The share below is of energies, and may exceed 1 where the two cancel. Medians "
        "over documents and boundaries."
    ]
    return [Section("What segments read of the states", prose, charts, None, head_table(cells, found))]
