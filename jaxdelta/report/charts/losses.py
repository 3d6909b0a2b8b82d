"""Sections on losses: cuts, interventions, forms of storage. Read results only."""

from typing import Any

import altair as alt
import numpy as np

from jaxdelta.analysis.compare import UNTOUCHED, differences
from jaxdelta.analysis.storage import Cost, costs, spans
from jaxdelta.analysis.sweep import summarize
from jaxdelta.report.charts.drawing import DIVERGING, HEIGHT, LOG, SEQUENTIAL, WIDTH, Section, chart, heat, spec, tip
from jaxdelta.report.storage import by_head
from jaxdelta.results.opened import Opened


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
        base = chart(wide).encode(
            alt.X("rank:Q", title="directions kept at every boundary", scale=alt.Scale(type="log", base=2))
        )
        color = alt.Color("tokens:N", title="tokens")
        tips = ["tokens:N", "rank:Q", *(tip(n) for n in ("loss", "difference", "stderr", "percent"))]
        curve = base.mark_rule().encode(
            alt.Y("low:Q", title="loss above the untouched model (nats)"), alt.Y2("high:Q"), color
        ) + base.mark_line(point=alt.OverlayMarkDef(size=50)).encode(alt.Y("difference:Q"), color, tooltip=tips)
        charts.append(
            (
                "Loss by rank; bars are paired standard errors over documents.",
                spec(curve.properties(width=WIDTH, height=HEIGHT)),
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
        tips = ["layer:O", "head:O", *(tip(n) for n in ("loss", "difference", "stderr"))]
        charts.append(
            (
                f"Rise of the loss when a layer or a head keeps {rank} directions (nats).",
                spec(heat(cells, "difference", DIVERGING, tips)),
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
    base = chart(rows).encode(alt.Y("intervention:N", title=None, sort=None))
    tips = ["intervention:N", *(tip(n) for n in ("loss", "difference", "stderr", "percent"))]
    bars = base.mark_bar().encode(alt.X("difference:Q", title="loss above the untouched model (nats)"), tooltip=tips)
    bars += base.mark_rule(color="currentColor").encode(alt.X("low:Q"), alt.X2("high:Q"))
    prose = [
        "Every document runs under every intervention, on the same tokens; bars are paired standard errors over documents."
    ]
    body = [[str(s.world[0]), *_texts(s)] for s in found]
    table = (["intervention", "loss", "difference", "stderr", "%"], body)
    return [Section("Interventions compared", prose, [("Loss under each.", spec(bars.properties(width=WIDTH)))], table)]


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
    tips = ["form:N", *(tip(n) for n in ("KiB", "loss", "difference", "stderr", "kl", "agreement"))]
    color = alt.Color("form:N", title="form", sort=None)
    kl = alt.Y("kl:Q", title="KL from the untouched predictions (nats)", scale=LOG, axis=alt.Axis(format=".0e"))
    size = alt.X("KiB:Q", title="state of a text (KiB)", scale=alt.Scale(type="log", base=2))
    against = chart(points).mark_point(filled=True, size=70, opacity=1).encode(size, kl, color, tooltip=tips)
    growth = [
        {"form": c.form, "token": (low * high) ** 0.5, "kl": c.kl, "from": low, "to": high}
        for low, high in known[1:]
        for c in costs(rows, (low, high))
        if c.kl > 0
    ]
    along = alt.X("token:Q", title="distance from the start (tokens)", scale=alt.Scale(type="log", base=2))
    lines = chart(growth).mark_line(point=True).encode(along, kl, color, tooltip=["form:N", "from:Q", "to:Q", tip("kl")])
    prose = [
        f"Every state is stored in a smaller form {'after every token' if every else 'at every boundary'}, and read back. "
        "Divergence is from the predictions of the untouched model on the same text; where curves are flat, errors settle "
        "instead of growing."
    ]
    body = [[c.form, f"{c.bytes / 1024:.1f}", *_cost_texts(c)] for c in found]
    charts = [
        ("Divergence against the size of the state.", spec(against.properties(width=WIDTH, height=HEIGHT))),
        ("Divergence by distance from the start.", spec(lines.properties(width=WIDTH, height=220))),
    ]
    for one in found[1:]:
        errors, rounding = (by_head(rows, one.form, name) for name in ("state_error", "rounding"))
        cells = [dict(layer=l, head=h, error=x, rounding=rounding.get((l, h), np.nan)) for (l, h), x in errors.items()]
        tips = ["layer:O", "head:O", tip("error"), tip("rounding")]
        said = f"{one.form}: error of each state at the last boundary, over the norm of the untouched one."
        charts.append((said, spec(heat(cells, "error", SEQUENTIAL, tips))))
    table = (["form", "KiB", "loss", "difference", "stderr", "KL", "same first word"], body)
    return [Section("What a smaller state costs", prose, charts, table)]


def _cost_texts(cost: Cost) -> list[str]:
    stderr = "-" if np.isnan(cost.stderr) else f"{cost.stderr:.5f}"
    return [f"{cost.loss:.4f}", f"{cost.difference:+.5f}", stderr, f"{cost.kl:.2e}", f"{cost.agreement:.2%}"]
