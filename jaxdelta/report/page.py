"""The HTML report: results folders on one self-contained page, which works offline, in light and dark, and printed."""

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import vl_convert

from jaxdelta.report.charts import SECTIONS, sections
from jaxdelta.report.charts.drawing import Section
from jaxdelta.results.folder import ResultsError, write_whole
from jaxdelta.results.opened import Opened, opened

STYLE = """
:root { color-scheme: light dark; --soft: color-mix(in srgb, currentColor 12%, transparent); }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.25rem; margin-top: 2.5rem; border-bottom: 1px solid var(--soft); }
figure { margin: 1.2rem 0; overflow-x: auto; } figcaption { font-size: .9rem; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid var(--soft); }
th:first-child, td:first-child { text-align: left; }
.wide { overflow-x: auto; } nav ol { padding-left: 1.2rem; } pre { font-size: .8rem; overflow-x: auto; }
#vg-tooltip-element { max-width: 24rem; }
@media print {
  :root { color-scheme: light; } body { max-width: none; } nav { display: none; }
  figure, table { break-inside: avoid; } h2 { break-after: avoid; }
}
@media screen and (prefers-color-scheme: dark) { body { background: #16181c; color: #e4e6ea; } }
"""
# Charts take the page's colours; the tooltip follows the reader's setting.
SCRIPT = """
const config = {
  background: null, font: "system-ui, sans-serif", view: { stroke: "currentColor", strokeOpacity: 0.25 },
  axis: { labelColor: "currentColor", titleColor: "currentColor", tickColor: "currentColor", domainColor: "currentColor",
          gridColor: "currentColor", gridOpacity: 0.12 },
  legend: { labelColor: "currentColor", titleColor: "currentColor" },
  header: { labelColor: "currentColor", titleColor: "currentColor" },
};
const dark = window.matchMedia("(prefers-color-scheme: dark)").matches;
for (const place of document.querySelectorAll("[data-chart]")) {
  const spec = JSON.parse(document.getElementById(place.dataset.chart).textContent);
  vegaEmbed(place, spec, { actions: false, renderer: "svg", config: config, tooltip: { theme: dark ? "dark" : "light" } })
    .catch(error => { place.textContent = "This chart could not be drawn: " + error; });
}
"""


def report(folders: Sequence[Path | str], file: Path | str) -> Path:
    """Write the report of results folders, all of one model; returns the file.

    Args:
        folders: of finished analyses.
        file: HTML file to write.

    Raises:
        ResultsError: no folder, one that cannot be read or is not finished, one without anything to show, the same one
            twice, or folders of different models.
    """
    if not len(folders):
        raise ResultsError("there are no results folders to report on")
    if len({Path(folder).resolve() for folder in folders}) < len(folders):
        raise ResultsError("a results folder is given twice")
    results = [opened(folder) for folder in folders]
    _check_one_model(results)
    found = [(one, section) for one in results for section in _sections(one)]
    text = page(results, found)
    file = Path(file)
    write_whole(file, lambda unfinished: Path(unfinished).write_text(text, encoding="utf-8"))
    return file


def _sections(results: Opened) -> list[Section]:
    try:
        found = sections(results)
    except (KeyError, IndexError, AttributeError, TypeError, ValueError) as error:
        raise ResultsError(
            f"{results.folder} does not hold what a {results.analysis} of this version holds ({type(error).__name__}: "
            f"{error}); run the analysis again in another folder"
        ) from None
    if not found:
        raise ResultsError(f"{results.folder} holds a {results.analysis}; a report shows {', '.join(SECTIONS)}")
    return found


def _check_one_model(results: Sequence[Opened]) -> None:
    """Raise ResultsError unless all results are of the same parameters and dtype."""
    first = results[0]
    for other in results[1:]:
        for name in ("parameters", "dtype"):
            a, b = (one.manifest["configuration"].get(name) for one in (first, other))
            if a != b:
                raise ResultsError(
                    f"{first.folder} and {other.folder} are of different models: {name} is {_short(a)} there, {_short(b)} "
                    "here; a report is of one model"
                )


def _short(value: Any) -> str:
    return f"{value}"[:16]


def page(results: Sequence[Opened], found: Sequence[tuple[Opened, Section]]) -> str:
    """The page as text."""
    configuration = results[0].manifest["configuration"]
    title = f"{configuration.get('model', 'model')}: the recurrent memory"
    segments = {one.manifest["configuration"].get("segment") for one in results} - {None}
    notes = []
    if len(segments) > 1:
        notes.append(
            f"The results have different segments ({', '.join(map(str, sorted(segments)))} tokens); numbers at boundaries "
            "are not comparable across them."
        )
    if len({_documents(one) for one in results} - {frozenset()}) > 1:
        notes.append("The results are of different documents; see the tables and manifests.")
    if len({json.dumps(one.manifest["configuration"].get("environment"), sort_keys=True) for one in results}) > 1:
        notes.append("The results were measured with different versions or devices; see the manifests.")
    contents = "".join(f'<li><a href="#s{i}">{_text(s.title)}</a></li>' for i, (_, s) in enumerate(found))
    body = "".join(_section(i, one, section, len(results) > 1) for i, (one, section) in enumerate(found))
    manifests = "".join(
        f"<details><summary>{_text(one.folder.name)}: {_text(one.analysis)}</summary><pre>"
        f"{_text(json.dumps(one.manifest, indent=2))}</pre></details>"
        for one in results
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{_text(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head><body><h1>{_text(title)}</h1>"
        f"<p>{_text(_about(results))}</p>{''.join(f'<p>{_text(note)}</p>' for note in notes)}"
        f'<nav aria-label="Contents"><ol>{contents}<li><a href="#made">How it was made</a></li></ol></nav>{body}'
        f'<section id="made"><h2>How it was made</h2>{manifests}</section>'
        f"<script>{vl_convert.javascript_bundle()}</script><script>{SCRIPT}</script></body></html>\n"
    )


def _about(results: Sequence[Opened]) -> str:
    configuration = results[0].manifest["configuration"]
    environment = configuration.get("environment", {})
    return (
        f"Model {configuration.get('model')}, {configuration.get('dtype')}, parameters "
        f"{_short(configuration.get('parameters'))}. Measured by jaxdelta {environment.get('jaxdelta')} with jax "
        f"{environment.get('jax')} on {environment.get('device')}. Hover over a mark, or open the tables, for numbers."
    )


def _section(index: int, results: Opened, section: Section, several: bool) -> str:
    charts = "".join(
        f'<figure><div data-chart="c{index}-{i}"></div><figcaption>{_text(caption)}</figcaption>'
        f'<script type="application/json" id="c{index}-{i}">{_json(spec)}</script></figure>'
        for i, (caption, spec) in enumerate(section.charts)
    )
    prose = "".join(f"<p>{_text(paragraph)}</p>" for paragraph in section.prose)
    configuration = results.manifest["configuration"]
    where = f"<p><small>{_text(results.folder.name)}, segments of {configuration.get('segment')} tokens</small></p>"
    tables = "" if section.table is None else _table("Numbers", *section.table, shown=True)
    tables += "" if section.heads is None else _table("Every head", *section.heads, shown=False)
    return (
        f'<section id="s{index}"><h2>{_text(section.title)}</h2>{where if several else ""}{prose}{charts}{tables}</section>'
    )


def _documents(results: Opened) -> frozenset[str]:
    """Names of the documents of results, as far as they are told."""
    labelled = [data["document"].values for data in results.arrays.values() if "document" in data.coords]
    arrays = [str(name) for names in labelled for name in names]
    rows = results.tables.get("rows")
    named = rows["document"].to_pylist() if rows is not None and "document" in rows.column_names else []
    return frozenset([*arrays, *named])


def _table(summary: str, names: Sequence[str], rows: Sequence[Sequence[str]], *, shown: bool) -> str:
    head = "".join(f'<th scope="col">{_text(name)}</th>' for name in names)
    body = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f'<details{" open" if shown else ""}><summary>{summary}</summary><div class="wide"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></details>"
    )


def _text(value: Any) -> str:
    """Text of HTML in which markup means nothing."""
    return html.escape(str(value))


def _json(value: Any) -> str:
    """JSON that cannot end the script element around it."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
