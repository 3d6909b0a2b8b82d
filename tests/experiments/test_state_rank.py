"""The acceptance sheets: each number is had from results, judged by its range, and missing ones say why."""

import numpy as np
import pytest
from flax import nnx

import jaxdelta as jd
from experiments.frozenrank.run import facts
from experiments.frozenrank.run import sheet as frozen_sheet
from experiments.state_rank import sheet
from experiments.state_rank.run import run
from jaxdelta.analysis.compare import Difference
from jaxdelta.analysis.sweep import World
from jaxdelta.report.terminal import Terminal
from jaxdelta.results.documents import as_documents
from tests.helpers import randomised
from tests.tiny import fresh_model, tokens


def difference(rank, amount, percent):
    return Difference(World(rank), 3.0 + amount, amount, 0.01, percent)


@pytest.fixture
def published():
    """Measurements as the study reports them: 100 heads, 61 of which forget in 256 tokens."""
    horizon = np.concatenate([np.full(30, 8.0), np.full(31, 100.0), np.full(29, 1000.0), np.full(10, 7000.0)])
    effective = np.concatenate([np.full(30, 2.5), np.full(31, 8.0), np.full(29, 20.0), np.full(10, 40.0)])
    effective[-1] = 44
    heads = dict(horizon=horizon, effective_rank=np.where(horizon < 10, 7.0, effective))
    heads |= dict(mean_key=np.full(100, 0.9), key_rank_at_horizon=np.full(100, 5.0), decayed_key_rank=np.full(100, 4.0))
    cut = {12: difference(12, 0.015, 0.5), 1: difference(1, 0.06, 2.0)}
    return dict(
        effective=effective, numerical=np.full(100, 127.0), spread=np.full(100, 0.1), heads=heads, spearman=0.91
    ) | {"all": cut, "copy": cut, "documents": 8, "directions": 128}


def by_number(rows):
    return {row["number"]: row for row in rows.to_pylist()}


def test_the_studys_own_numbers_agree(published):
    rows = by_number(sheet.lines(published, "qwen3.5-0.8b"))
    judged = {name: row["agrees"] for name, row in rows.items() if row["low"] is not None}
    assert len(judged) == 14
    assert all(judged.values()), judged
    assert rows["effective rank, largest head"]["measured"] == 44
    assert rows["heads that forget in 256 tokens"]["measured"] == pytest.approx(0.61)


@pytest.mark.parametrize(
    ("name", "value", "number"),
    [
        ("spearman", 0.5, "Spearman of it and the horizon"),
        ("numerical", np.full(100, 40.0), "heads of numerical rank 126 or 127"),
        ("all", {1: difference(1, 0.2, 6.0)}, "loss at rank 1, % above"),
    ],
)
def test_other_numbers_do_not_agree_and_say_why(published, name, value, number):
    row = by_number(sheet.lines(published | {name: value}, "qwen3.5-0.8b"))[number]
    assert row["agrees"] is False
    assert row["why"] == "8 other texts"


def test_a_model_of_another_size_is_not_judged(published):
    with pytest.raises(ValueError, match=r"states have 32 directions, those of qwen3\.5-0\.8b 128"):
        sheet.lines(published | {"directions": 32}, "qwen3.5-0.8b")


def test_there_is_no_verdict_on_another_model_and_none_without_a_measurement(published):
    rows = sheet.lines(published)
    assert {row["agrees"] for row in rows.to_pylist()} == {None}
    published["heads"]["horizon"] = np.full(100, 50.0)
    row = by_number(sheet.lines(published, "qwen3.5-0.8b"))["mean key, the same heads"]
    assert (row["measured"], row["agrees"], row["why"]) == (None, None, "no such head or rank")
    assert by_number(rows)["frequent words at 64K"]["why"] == "needs retrieval tasks"


def test_the_experiment_measures_what_the_sheet_asks_for(tmp_path, capsys):
    model = fresh_model(layer_kinds=("linear", "attention", "linear"))
    documents = as_documents(tokens(41, 30), model)
    run(model, documents, tmp_path, name="tiny", segment=8, ranks=[1, 4])
    rows = sheet.lines(sheet.measured(tmp_path))
    found = by_number(rows)
    assert found["loss at rank 1, nats above"]["measured"] != 0
    assert found["effective rank, median head"]["measured"] > 1
    assert found["loss at rank 12, % above"]["why"] == "no such head or rank"
    Terminal().print(sheet.sheet(rows))
    assert "No verdict: the published numbers are of another model." in capsys.readouterr().out


def test_the_second_studys_sheet_has_a_models_transitions(capsys):
    config = jd.DeltaLMConfig.tiny(num_householder=2, negative_eigenvalues=True, layer_kinds=("linear",), attention=())
    model = randomised(jd.DeltaLM(config, rngs=nnx.Rngs(1)), 2)
    found = jd.ledger_of(model, tokens(40), segment=8, windows=(1, 4))
    Terminal().print(frozen_sheet("mine", found, facts(found)))
    said = capsys.readouterr().out
    assert "mine: " in said
    assert "n_h = 2" in said
    for number in ("largest |rho / alpha - 1|", "mean rank of A - alpha I"):
        (line,) = [line for line in said.splitlines() if number in line]
        assert line.rstrip().endswith("holds")
