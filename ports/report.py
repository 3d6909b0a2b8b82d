"""Report of an equivalence run: tables for terminal and Markdown, and the drift figure. Reads a comparison only."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.markup import escape

from jaxdelta.report.figure import save_figures
from jaxdelta.report.sheet import Sheet
from ports.compare import ARRAYS, LOGITS_OF_POSITION, position_arrays, to_json
from ports.verdict import BF16_FACTOR, EXTREME, MARGINS, Verdict, broken

TITLE = "# Equivalence of jaxdelta and its torch reference"
FILES = ("report.md", "comparison.json", "drift.png", "drift.svg")
DRIFT_HEADINGS = ("layer", "first", "last", "worst", "at", "bound", "holds")
OTHER_HEADINGS = ("compared", "worst", "at", "bound", "holds")
STYLES = ("o-", "s:")
Rows = list[list[str]]

NOT_COMPARED = (
    "Gradients, padded rows, several rows at once, texts longer than this one and other cuts of it (see tests/ports).",
    "The tokenizer: both sides were given the same ids.",
    "Arrays inside a layer, and states at tokens between two boundaries; both only through what follows from them.",
    "Vision and multi-token-prediction tensors of the checkpoint, which neither side loads.",
    "Speed: wall times hold loading, compilation and the comparison itself.",
    "Correctness of the reference, beyond that its segments continue one another.",
)


def drift_rows(comparison: dict[str, Any], verdicts: Sequence[Verdict]) -> Rows:
    """A row for each carried array: its error after the first and the last segment, the worst, and its bound."""
    by_name = {verdict.name: verdict for verdict in verdicts}

    def ends(index: int, name: str) -> list[str]:
        return [_number(comparison["segments"][i]["layers"][index][name]) for i in (0, -1)]

    return [
        [f"{index} {kind}: {name}", *ends(index, name), *_judged(by_name[f"layer {index} ({kind}): {name}"])]
        for index, kind in enumerate(comparison["kinds"])
        for name in comparison["segments"][0]["layers"][index]
    ]


def other_rows(comparison: dict[str, Any], verdicts: Sequence[Verdict]) -> Rows:
    """A row for every other error with a bound: whole caches, logits, losses."""
    carried = sum(len(layer) for layer in comparison["segments"][0]["layers"])  # which come first
    return [[verdict.name, *_judged(verdict)] for verdict in verdicts[carried:]]


def facts(comparison: dict[str, Any], dtype: str) -> dict[str, str]:
    """Facts on the logits and on the sensitivity of the comparison itself, as text by name."""
    at = position_arrays(comparison)
    error, gap = at.difference / at.size, (at.loss_here - at.loss)[:-1]
    clear = at.margin > MARGINS[dtype]
    at_worst = int(np.argmax(error))
    found = {
        "Logit error of a position": f"median {np.median(error):.1e}, 99th percentile {np.quantile(error, 0.99):.1e}, "
        f"largest {_number(error[at_worst])} at token {at_worst}",
        "Next-token loss (nats)": f"reference {np.mean(at.loss[:-1]):.6f}, jaxdelta {np.mean(at.loss_here[:-1]):.6f}; "
        f"mean difference {np.mean(gap):+.1e}, largest {np.max(np.abs(gap)):.1e}",
        "Kullback-Leibler divergence of jaxdelta from the reference": f"mean {np.mean(at.kl):.1e}, "
        f"largest {np.max(at.kl):.1e} nats",
        "Most likely word": f"the same at {100 * np.mean(at.same):.2f} % of {len(clear)} positions, and at "
        + (f"{100 * np.mean(at.same[clear]):.2f} %" if clear.any() else "none")
        + f" of the {clear.sum()} where it leads by more than {MARGINS[dtype]} in the reference",
        "Reference against itself": f"{_number(comparison['reference']['probe'])} between logits of 40 tokens in two "
        "segments and in one pass, in float32",
    }
    if len(comparison["segments"]) == 1 or "linear" not in comparison["kinds"]:
        return found | {"Control": "none: with one segment, or no linear layer, it does not matter whether S is carried"}
    return found | {
        "Control": "with every S set to zero before the last segment its logits are "
        f"{_number(comparison['control'])} off, with S as carried {_number(comparison['segments'][-1]['logits'])}"
    }


def bounds_in_words(verdicts: Sequence[Verdict], dtype: str) -> str:
    """The origin of the bounds, in words."""
    if dtype == "bfloat16":
        return (
            f"{BF16_FACTOR} times the error that the reference's own bfloat16 run of the same text has against its float32 "
            "run. This bounds what bfloat16 costs; it is too wide to show that both compute the same: for that run float32."
        )
    bound = min(verdict.bound for verdict in verdicts)
    return (
        f"{bound:.0e} for carried arrays and logits of a segment, {EXTREME} times that for one position or one loss. Keys "
        "have an allowance that grows with the text, for the reference rounds the frequencies of the rotation in float32."
    )


def print_report(comparison: dict[str, Any], verdicts: Sequence[Verdict], dtype: str, console: Console) -> None:
    """Print tables, facts and verdict."""
    console.print(
        _table("Drift: relative error of what crosses a boundary", DRIFT_HEADINGS, drift_rows(comparison, verdicts))
    )
    console.print(_table("Logits, losses and caches", OTHER_HEADINGS, other_rows(comparison, verdicts)))
    for name, text in facts(comparison, dtype).items():
        console.print(f"[bold]{name}:[/] {escape(text)}", highlight=False, soft_wrap=True)
    console.print(f"[bold]Bounds:[/] {bounds_in_words(verdicts, dtype)}", highlight=False, soft_wrap=True)
    for text in (wrong := broken(comparison, verdicts)):
        console.print(f"[bold red]broken:[/] {escape(text)}", highlight=False, soft_wrap=True)
    if not wrong:
        console.print(f"[bold green]All {len(verdicts)} bounds hold.[/]", highlight=False)


def write_report(
    folder: Path, comparison: dict[str, Any], verdicts: Sequence[Verdict], subject: dict[str, str], dtype: str
) -> None:
    """Write FILES; ``subject`` tells what was compared, as text by name."""
    judged = [{**verdict._asdict(), "holds": verdict.holds} for verdict in verdicts]
    content = to_json({"subject": subject, "lines": judged, **comparison})
    (folder / "comparison.json").write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    drawn = figure(comparison, verdicts, f"{subject['Model']}, {dtype}: error against the reference in float32")
    save_figures({"drift": drawn}, folder)
    (folder / "report.md").write_text(markdown(comparison, verdicts, subject, dtype), encoding="utf-8")


def is_report(folder: Path) -> bool:
    """Whether a folder holds a report of :func:`write_report`, complete or not."""
    begins = {"report.md": f"{TITLE}: ", "comparison.json": '{\n "subject": '}
    files = {folder / name: text for name, text in begins.items() if (folder / name).is_file()}
    return bool(files) and all(file.read_bytes().startswith(text.encode()) for file, text in files.items())


def markdown(comparison: dict[str, Any], verdicts: Sequence[Verdict], subject: dict[str, str], dtype: str) -> str:
    """The report as Markdown."""
    wrong = broken(comparison, verdicts)
    outcome = [f"**Broken:** {text}" for text in wrong] or [f"**All {len(verdicts)} bounds hold.**"]
    warnings = [f"**Not a tested version:** {name}" for name in comparison["reference"]["untested"]]
    parts = [
        f"{TITLE}: {subject['Model']}",
        _bullets([*outcome, *warnings]),
        f"Bounds: {bounds_in_words(verdicts, dtype)}",
        "## What was compared",
        _bullets(f"{name}: {text}" for name, text in subject.items()),
        "Errors are relative Frobenius errors, computed in float64. Keys and values are compared where each segment wrote "
        'them, and the whole cache once more at the end. "First" and "last" are after the first and the last segment.',
        "## Logits and losses",
        _bullets(f"{name}: {text}" for name, text in facts(comparison, dtype).items()),
        _markdown_table(OTHER_HEADINGS, other_rows(comparison, verdicts)),
        "## Drift of what crosses a boundary",
        "![Drift by segment, and logit error by position](drift.png)",
        _markdown_table(DRIFT_HEADINGS, drift_rows(comparison, verdicts)),
        "## What was not compared",
        _bullets(NOT_COMPARED),
        "## Where it ran",
        _markdown_table(("what", "value"), environment_rows(comparison)),
    ]
    return "\n\n".join(parts) + "\n"


def environment_rows(comparison: dict[str, Any]) -> Rows:
    """Versions, device, checksums, wall times and memory of each process."""
    here, there = comparison["jaxdelta"], comparison["reference"]
    rows = [["jaxdelta's side", ", ".join(f"{k} {v}" for k, v in here["packages"].items())]]
    rows += [["reference's side", ", ".join(f"{k} {v}" for k, v in there["packages"].items())]]
    rows += [["jaxdelta's device", here["device"]], ["reference", there["implementation"]]]
    rows += [["jaxdelta's commit", str(here["commit"])], ["machine", here["machine"]]]
    rows += [[f"sha256 of {name}", f"`{digest}`"] for name, digest in here["checkpoint"].items()]
    for name in ("reference", "yardstick", "jaxdelta"):
        if comparison.get(name):
            rows.append([f"process: {name}", cost(comparison[name])])
    return rows


def cost(side: dict[str, Any]) -> str:
    """Wall times and peak memory of a process, in words."""
    seconds = ", ".join(f"{name} {value:.1f} s" for name, value in side["seconds"].items())
    return f"{seconds}; peak memory {side['peak_bytes'] / 2**30:.2f} GiB"


def figure(comparison: dict[str, Any], verdicts: Sequence[Verdict], title: str) -> Figure:
    """Drift of each layer after each segment, linear and attention layers apart, above the logit error of each position."""
    drawn = Figure(figsize=(9, 7), layout="constrained")
    drawn.suptitle(title)
    panels = drawn.subplot_mosaic([["linear", "attention"], ["logits", "logits"]])
    colours = ScalarMappable(Normalize(0, max(1, len(comparison["kinds"]) - 1)), colormaps["viridis"])
    for kind in ARRAYS:
        if comparison["yardstick"]:
            _draw_drift(panels[kind], comparison["yardstick"], kind, lambda layer: "0.8")
        _draw_drift(panels[kind], comparison, kind, colours.to_rgba)
        _finish_drift(panels[kind], kind, verdicts, bool(comparison["yardstick"]))
    drawn.colorbar(colours, ax=panels["attention"], label="layer").locator = MaxNLocator(integer=True)
    _draw_positions(panels["logits"], comparison, verdicts)
    return drawn


def _draw_drift(axes: Axes, result: dict[str, Any], kind: str, colour: Callable[[int], Any]) -> None:
    """A line for each layer: solid for the first array of ARRAYS, dotted for the second."""
    ends = [segment["end"] for segment in result["segments"]]
    for index in (i for i, found in enumerate(result["kinds"]) if found == kind):
        for name, style in zip(ARRAYS[kind], STYLES, strict=True):
            errors = np.array([segment["layers"][index][name] for segment in result["segments"]], float)
            axes.plot(ends, errors, style, color=colour(index), markersize=3, linewidth=1)


def _finish_drift(axes: Axes, kind: str, verdicts: Sequence[Verdict], has_yardstick: bool) -> None:
    for name, style in zip(ARRAYS[kind], STYLES, strict=True):
        axes.plot([], [], style, color="0.3", markersize=3, linewidth=1, label=name)
    if has_yardstick:
        axes.plot([], [], color="0.8", label="the reference in bfloat16")
    elif bounds := sorted({verdict.bound for verdict in verdicts if f"({kind})" in verdict.name}):
        axes.axhline(bounds[0], color="C3", linestyle="--", linewidth=1, label="bound")
        for bound in bounds[1:]:
            axes.axhline(bound, color="C3", linestyle="-.", linewidth=1, label="bound of keys")
    axes.set(yscale="log", xlabel="tokens at the boundary", ylabel="relative error", title=f"{kind} layers")
    axes.legend(framealpha=0.8, fontsize="small")


def _draw_positions(axes: Axes, comparison: dict[str, Any], verdicts: Sequence[Verdict]) -> None:
    at = position_arrays(comparison)
    axes.plot(at.difference / at.size, linewidth=0.6, color="C0")
    for segment in comparison["segments"][1:]:
        axes.axvline(segment["begin"], color="0.85", linewidth=0.8, zorder=0)
    bound = next(verdict.bound for verdict in verdicts if verdict.name == LOGITS_OF_POSITION)
    axes.axhline(bound, color="C3", linestyle="--", linewidth=1, label="bound")
    axes.set(yscale="log", xlabel="token", ylabel="relative error", title="logits of each position")
    axes.legend(framealpha=0.8, fontsize="small")


def _judged(verdict: Verdict) -> list[str]:
    return [_number(verdict.error), verdict.where, _number(verdict.bound), "yes" if verdict.holds else "NO"]


def _number(value: float | None) -> str:
    return "not finite" if value is None or not np.isfinite(value) else f"{value:.1e}"


def _table(title: str, headings: Sequence[str], rows: Rows) -> Sheet:
    view = Sheet(title)
    for heading in headings:
        view.add_column(heading, prose=heading in ("layer", "compared", "at", "holds"))
    for row in rows:
        view.add_row(*row, style="bold red" if row[-1] == "NO" else None)
    return view


def _markdown_table(headings: Sequence[str], rows: Rows) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [list(headings), ["---"] * len(headings), *rows])


def _bullets(texts) -> str:
    return "\n".join(f"- {text}" for text in texts)
