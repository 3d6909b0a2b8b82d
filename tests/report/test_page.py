"""The HTML report: one page of real results, self-contained, with the results' numbers; what is refused; escaping."""

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
import vl_convert
from flax import nnx

import jaxdelta as jd
from jaxdelta.report import keys as keys_report
from jaxdelta.report.page import report
from jaxdelta.report.terminal import Terminal
from jaxdelta.results.folder import ResultsError
from tests.helpers import randomised
from tests.tiny import fresh_model, tokens

SEGMENT = 8
NAME = "</script><b>model</b>"  # as a folder may be called
ANALYSES = ("spectrum", "keys", "reads", "sweep", "by head", "compare", "storage", "sensitivity", "transitions", "trace")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A results folder of every analysis, of documents whose names hold markup."""
    root = tmp_path_factory.mktemp("results")
    model = fresh_model(layer_kinds=("linear", "attention", "linear"))
    documents = dict(zip(("<i>one</i>", "two & </script>"), tokens(41, 30), strict=True))
    of = {name: dict(segment=SEGMENT, out=root / name, name=NAME) for name in ANALYSES}
    jd.spectrum(model, documents, **of["spectrum"])
    jd.keys(model, documents, **of["keys"])
    jd.state_reads(model, documents, **of["reads"])
    jd.sweep(model, documents, ranks=(1, 4), **of["sweep"])
    jd.sweep(model, documents, ranks=(1,), scope="head", **of["by head"])
    jd.compare(model, documents, {"noise <b>": jd.Noise(), "zero": jd.Zero()}, **of["compare"])
    jd.storage_costs(model, documents, ["int8", "rank=2"], **of["storage"])
    jd.sensitivity_maps(model, documents, samples=1, **of["sensitivity"])
    jd.ledger_of(model, documents, windows=(1, 4), **of["transitions"])
    jd.rank_trace(model, documents, **of["trace"])
    return [root / name for name in ANALYSES]


class Page(HTMLParser):
    """Tags, headings, and the JSON of charts."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.headings, self.charts, self._inside = [], [], {}, None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._inside = (tag, dict(attributes))

    def handle_data(self, data):
        tag, attributes = self._inside or (None, {})
        if tag == "h2":
            self.headings.append(data)
        if tag == "script" and attributes.get("type") == "application/json":
            self.charts[attributes["id"]] = json.loads(data)

    def handle_endtag(self, tag):
        self._inside = None


@pytest.fixture(scope="module")
def page(folders, tmp_path_factory):
    text = report(folders, tmp_path_factory.mktemp("page") / "report.html").read_text(encoding="utf-8")
    return text, Page(text)


def test_every_analysis_has_its_section(page):
    assert page[1].headings == [
        "Spectra of the states",
        "Horizons and keys",
        "What segments read of the states",
        "What a cut costs",
        "What a cut costs",
        "Interventions compared",
        "What a smaller state costs",
        "Sensitivity of the loss to heads",
        "Transitions",
        "Ranks token by token",
        "How it was made",
    ]


def test_nothing_is_asked_of_the_network(page):
    for _, attributes in page[1].tags:
        assert not {"src", "srcset", "action"} & attributes.keys()
        assert attributes.get("href", "#").startswith("#")
    assert "@import" not in page[0]
    assert not re.search(r"url\(\s*['\"]?http", page[0])


def test_names_with_markup_are_text(page):
    text, parsed = page
    assert not {"b", "i"} & {tag for tag, _ in parsed.tags}
    assert "&lt;/script&gt;&lt;b&gt;model&lt;/b&gt;" in text
    assert len(re.findall(r"</script>", text)) == sum(tag == "script" for tag, _ in parsed.tags)
    (bars,) = [c for c in parsed.charts.values() if "noise <b>" in json.dumps(c)]
    assert {row["intervention"] for row in _rows(bars)} == {"untouched", "noise <b>", "zero"}


def _rows(spec):
    """Data of a chart, or of its first layer that has any."""
    places = [spec, *spec.get("layer", [])]
    return next(p["data"]["values"] for p in places if "data" in p)


def test_every_chart_can_be_drawn(page):
    assert len(page[1].charts) == 2 + 3 + 2 + 1 + 1 + 1 + 4 + 3 + 3 + 2
    for spec in page[1].charts.values():
        drawn = vl_convert.vegalite_to_svg(spec)
        assert "<path" in drawn
        assert "NaN" not in drawn


def test_charts_hold_the_numbers_of_the_results(page, folders):
    by_name = {folder.name: jd.results.open(folder) for folder in folders}
    spectrum = by_name["spectrum"].arrays["spectrum"]["effective_rank"].sel(at="end").median("document")
    points = _rows(page[1].charts["c0-1"])
    assert len(points) == 12
    for point in points:
        expected = float(spectrum.sel(layer=point["layer"], head=point["head"]))
        assert point["effective_rank"] == pytest.approx(expected, rel=1e-12)
    rows = by_name["sweep"].tables["rows"].to_pylist()
    cut, whole = (np.mean([r["loss"] for r in rows if r["rank"] == rank]) for rank in (1, 8))
    (point,) = [p for p in _rows(page[1].charts["c3-0"]) if p["rank"] == 1 and p["tokens"] == "all"]
    assert point["difference"] == pytest.approx(cut - whole, rel=1e-9)


def test_fields_with_a_point_are_one_field(page):
    tips = json.dumps(page[1].charts["c0-1"])
    assert "energy_rank_99\\\\\\\\.9" in tips or "energy_rank_99\\\\.9" in tips


# What is refused


def test_no_results_are_refused(tmp_path):
    with pytest.raises(ResultsError, match="there are no results folders"):
        report([], tmp_path / "r.html")


def test_a_folder_given_twice_is_refused(folders, tmp_path):
    with pytest.raises(ResultsError, match="given twice"):
        report([folders[0], folders[0]], tmp_path / "r.html")


@pytest.mark.parametrize(("content", "said"), [(None, "has no manifest.json"), ("{}", "no manifest"), ("[", "no manifest")])
def test_what_is_no_results_folder_is_refused(tmp_path, content, said):
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ResultsError, match=said):
        report([tmp_path], tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()


def test_an_unfinished_analysis_is_refused(folders, tmp_path):
    shutil.copytree(folders[0], tmp_path / "copy")
    manifest = json.loads((tmp_path / "copy" / "manifest.json").read_text())
    del manifest["finished"]
    (tmp_path / "copy" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ResultsError, match="unfinished spectrum; the command that began it continues it"):
        report([tmp_path / "copy"], tmp_path / "r.html")


def test_results_of_another_model_are_refused(folders, tmp_path):
    other = fresh_model(1, layer_kinds=("linear", "attention", "linear"))
    jd.keys(other, tokens(20), segment=SEGMENT, out=tmp_path / "other")
    with pytest.raises(ResultsError, match="are of different models: parameters is"):
        report([folders[0], tmp_path / "other"], tmp_path / "r.html")


def test_a_folder_of_another_version_is_told_by_name(folders, tmp_path):
    """Without a variable that this version has."""
    shutil.copytree(folders[0], tmp_path / "old")
    shutil.rmtree(tmp_path / "old" / "spectrum.zarr" / "stable_rank")
    with pytest.raises(ResultsError, match="old does not hold what a spectrum of this version holds"):
        report([tmp_path / "old"], tmp_path / "r.html")


def test_an_analysis_without_charts_is_refused(folders, tmp_path):
    shutil.copytree(folders[3], tmp_path / "removals")
    text = (tmp_path / "removals" / "manifest.json").read_text()
    (tmp_path / "removals" / "manifest.json").write_text(text.replace('"analysis": "sweep"', '"analysis": "removals"'))
    with pytest.raises(ResultsError, match="holds a removals; a report shows spectrum, keys"):
        report([tmp_path / "removals"], tmp_path / "r.html")


def test_results_of_several_segments_say_so(folders, tmp_path):
    model = fresh_model(layer_kinds=("linear", "attention", "linear"))
    jd.keys(model, tokens(20), segment=4, out=tmp_path / "four", name=NAME)
    text = report([folders[0], tmp_path / "four"], tmp_path / "r.html").read_text()
    assert "different segments (4, 8 tokens)" in text
    assert "The results are of different documents" in text


def test_every_head_has_its_row_of_numbers(page):
    """For those who do not hover."""
    assert page[0].count("<summary>Every head</summary>") == 4
    assert page[0].count("<td>2.5</td>") >= 4


def test_a_layer_cut_as_a_whole_is_no_head(folders, tmp_path):
    model = fresh_model(layer_kinds=("linear", "attention", "linear"))
    jd.sweep(model, tokens(20), ranks=(1,), scope="layer", segment=SEGMENT, out=tmp_path / "layers")
    charts = Page(report([tmp_path / "layers"], tmp_path / "r.html").read_text()).charts
    assert {row["head"] for row in _rows(charts["c0-0"])} == {"all"}


# Read by others


def test_pyarrow_and_xarray_read_results_without_this_library(folders):
    code = """
import sys
import pyarrow.parquet, xarray
rows = pyarrow.parquet.read_table(sys.argv[1] + "/sweep/rows.parquet")
data = xarray.open_zarr(sys.argv[1] + "/spectrum/spectrum.zarr", consolidated=False)
assert {"jax", "jaxdelta"}.isdisjoint(sys.modules)
print(rows.num_rows, data.effective_rank.attrs["units"], dict(data.sizes)["layer"])
"""
    root = str(folders[0].parent)
    found = subprocess.run([sys.executable, "-c", code, root], capture_output=True, text=True, timeout=120)
    assert found.stdout.split() == ["6", "directions", "2"], found.stderr


def test_results_are_opened_by_their_folder(folders):
    opened = jd.results.open(folders[0])
    assert opened.analysis == "spectrum"
    assert list(opened.arrays) == ["spectrum"]
    assert opened.manifest["configuration"]["segment"] == SEGMENT
    assert list(jd.results.open(folders[3]).tables) == ["rows"]


# A model without a forget gate, whose horizons are infinite


def test_horizons_without_end_are_told_drawn_and_reported(tmp_path, capsys):
    config = jd.DeltaLMConfig.tiny("delta_net", write_gate=False, output_gate=None, layer_kinds=("linear",), attention=())
    model = randomised(jd.DeltaLM(config, rngs=nnx.Rngs(1)), 2)
    data = jd.keys(model, tokens(40, 16, 1), segment=SEGMENT, out=tmp_path / "keys")
    assert np.isinf(data["horizon"]).all()
    for table in keys_report.tables(data):
        Terminal().print(table)
    said = capsys.readouterr().out
    assert "3 heads by horizon, 3 documents" in said
    assert "inf  inf  inf" in said
    assert all(file.stat().st_size > 0 for file in keys_report.write(data, tmp_path))
    text = report([tmp_path / "keys"], tmp_path / "r.html").read_text()
    points = [row for row in _rows(Page(text).charts["c0-1"]) if "drawn" in row]
    assert {row["drawn"] for row in points} == {40}
    assert {row["horizon"] for row in points} == {None}
