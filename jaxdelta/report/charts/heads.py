"""Sections on heads: sensitivities of the loss, transitions. Read results only."""

from jaxdelta.analysis.transitions.rows import transition_rows
from jaxdelta.report.charts.drawing import DIVERGING, SEQUENTIAL, Section, head_table, heat, spec, tip
from jaxdelta.report.sensitivity import head_rows
from jaxdelta.results.opened import Opened


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
    tips = ["layer:O", "head:O", *(tip(n) for n in there)]
    charts = [(names[n], spec(heat(rows, n, SEQUENTIAL if n == "michel" else DIVERGING, tips))) for n in there]
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
        *(tip(n) for n in ("beta_50", "alpha_50", "negative", "rank_numerical", "rank_effective")),
    ]
    charts = [(said, spec(heat(rows, name, SEQUENTIAL, tips))) for name, said in names.items()]
    prose = [
        "A token multiplies the state by alpha times a product of n_h Householder factors, each with one eigenvalue "
        "1 - beta |k|^2. A negative one turns a direction over, which counting and tracking need."
    ]
    columns = ("beta_5", "beta_50", "beta_95", "alpha_50", "negative", "rotating", "rank_numerical", "rank_effective")
    return [Section("Transitions", prose, charts, None, head_table(rows, columns))]
