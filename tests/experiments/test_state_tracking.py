"""The experiment on state tracking in small: parity is learnt where an eigenvalue can be -1, and a kill changes nothing."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pytest
from rich.console import Console

from experiments.e04_state_tracking import instruments, report, training
from experiments.e04_state_tracking.cells import Cell, Recipe, config_of, grid
from experiments.e04_state_tracking.run import run
from jaxdelta.results import ResultsError
from jaxdelta.tasks.state_tracking import group_of

RECIPE = Recipe(
    width=16,
    mlp_width=16,
    head_dim=4,
    stages=((3, 100), (8, 300)),
    every=50,
    learning_rate=5e-3,
    average=0.95,
    validated=64,
    tested=64,
)
CELLS = grid(["Z2"], [1], [False, True])
CONTROL, PARITY = range(2)
SEEDS = (0, 1, 5)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("state_tracking")
    return folder, run(CELLS, RECIPE, SEEDS, folder)


def of_cell(rows, index):
    return rows.slice(index * len(SEEDS), len(SEEDS)).to_pydict()


def text_of(table):
    console = Console(width=140)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


# What is learnt


def test_parity_is_learnt_where_an_eigenvalue_can_be_minus_one(finished):
    rows = of_cell(finished[1], PARITY)
    assert rows["solved"] == rows["solved_long"] == [True] * 3
    assert min(rows["sequence_accuracy_long"]) >= 0.99
    assert min(rows["token_accuracy_long"]) >= 0.99


def test_and_not_where_none_can(finished):
    rows = of_cell(finished[1], CONTROL)
    assert rows["solved"] == rows["solved_long"] == [False] * 3
    assert rows["steps_to_solve"] == [None] * 3
    assert max(rows["token_accuracy_long"]) < 0.8


def test_a_cell_ends_when_all_seeds_have_solved_it(finished):
    control, parity = (of_cell(finished[1], index) for index in (CONTROL, PARITY))
    assert control["steps"] == [400] * 3
    assert parity["steps"] == [max(parity["steps"])] * 3
    assert max(parity["steps_to_solve"]) <= parity["steps"][0] < 400


def test_rows_say_what_was_trained_and_predicted(finished):
    rows = finished[1]
    assert rows["seed"].to_pylist() == [*SEEDS, *SEEDS]
    assert rows["negative_eigenvalues"].to_pylist() == [False] * 3 + [True] * 3
    assert set(rows["predicted"].to_pylist()) == set(rows["num_householder"].to_pylist()) == {1}
    assert (rows["length"][0].as_py(), rows["length_long"][0].as_py()) == (8, 32)


def test_a_seed_is_trained_as_if_it_were_alone(tmp_path):
    """Up to rounding, which batched products are free to do otherwise."""
    short = Recipe.of(vars(RECIPE) | {"stages": ((3, 10),), "every": 10})
    together, alone = (
        training.train(CELLS[PARITY], short, seeds, tmp_path / f"{len(seeds)}.npz").kept for seeds in (SEEDS, SEEDS[1:2])
    )
    for ours, theirs in zip(jax.tree.leaves(alone), jax.tree.leaves(together), strict=True):
        np.testing.assert_allclose(ours[0], theirs[1], atol=1e-4)
        assert np.abs(theirs[1] - theirs[0]).max() > 1e-3


# Interruption


@pytest.mark.parametrize("rounds", [1, 3])
def test_a_killed_run_ends_with_the_rows_and_parameters_of_one_that_was_not(finished, tmp_path, monkeypatch, rounds):
    folder, rows = finished
    calls = []

    def killed(*arguments):
        calls.append(arguments)
        if len(calls) > rounds:  # in the midst of the round after
            raise KeyboardInterrupt
        return right(*arguments)

    right = training._right
    monkeypatch.setattr(training, "_right", killed)
    with pytest.raises(KeyboardInterrupt):
        run(CELLS[PARITY:], RECIPE, SEEDS, tmp_path)
    assert not list((tmp_path / "parts").iterdir())
    monkeypatch.setattr(training, "_right", right)
    resumed = run(CELLS[PARITY:], RECIPE, SEEDS, tmp_path)
    assert resumed.equals(rows.slice(len(SEEDS)))
    for ours, theirs in zip(
        jax.tree.leaves(training.load_parameters(tmp_path / "parameters" / "0000.npz", CELLS[PARITY], RECIPE)),
        jax.tree.leaves(training.load_parameters(folder / "parameters" / "0001.npz", CELLS[PARITY], RECIPE)),
        strict=True,
    ):
        np.testing.assert_array_equal(ours, theirs)


def test_what_was_best_before_a_kill_is_still_kept(tmp_path, monkeypatch):
    """The first of four validations is the best."""
    recipe = Recipe.of(vars(RECIPE) | {"stages": ((3, 40),), "every": 10})
    scores = [(1.0, 0.5), (0.5, 0.4), (0.5, 0.4), (0.5, 0.3)]

    def trained(file, remaining):
        monkeypatch.setattr(training, "_right", lambda *_: None)
        monkeypatch.setattr(training, "_faultless", lambda *_: np.array([remaining.pop(0)]))
        return training.train(CELLS[PARITY], recipe, (0,), file)

    whole = trained(tmp_path / "whole.npz", list(scores))
    with pytest.raises(IndexError):  # in the third round
        trained(tmp_path / "killed.npz", scores[:2])
    killed = trained(tmp_path / "killed.npz", scores[2:])
    for ours, theirs in zip(jax.tree.leaves(killed), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert killed.score.tolist() == [[0.5, 1.0]]
    assert killed.steps_to_solve.tolist() == [10]


def test_finished_cells_are_not_trained_again(finished, monkeypatch):
    folder, rows = finished
    monkeypatch.setattr("experiments.e04_state_tracking.run.train", None)
    assert run(CELLS, RECIPE, SEEDS, folder).equals(rows)
    assert not list((folder / "training").iterdir())


def test_a_folder_belongs_to_one_grid_and_recipe(finished):
    with pytest.raises(ResultsError, match="cells"):
        run(CELLS[:1], RECIPE, SEEDS, finished[0])
    with pytest.raises(ResultsError, match="recipe batch is 32 there, 16 now"):
        run(CELLS, Recipe.of(vars(RECIPE) | {"batch": 16}), SEEDS, finished[0])


def test_a_training_of_something_else_is_refused(tmp_path):
    short = Recipe.of(vars(RECIPE) | {"stages": ((3, 50),)})
    training.train(CELLS[PARITY], short, SEEDS, tmp_path / "0000.npz")
    with pytest.raises(ValueError, match="is of another training"):
        training.train(CELLS[PARITY], short, SEEDS[:2], tmp_path / "0000.npz")


# Parts of a training


def test_accuracies_count_words_up_to_each_length():
    """Of four words of length 8 one errs at 2, one at 7."""
    right = np.ones((1, 4, 8), bool)
    right[0, 0, 2] = right[0, 1, 7] = False
    recipe = Recipe.of(vars(RECIPE) | {"stages": ((2, 50),)})
    np.testing.assert_array_equal(training._faultless(right, recipe), [[1.0, 0.5]])


def test_the_kept_parameters_are_those_of_the_best_validation(monkeypatch):
    """By the long length, then the trained one, the latest of equals."""
    recipe = Recipe.of(vars(RECIPE) | {"stages": ((3, 250),)})
    scores = iter([(0.9, 0.2), (0.5, 0.3), (0.6, 0.3), (0.6, 0.3), (1.0, 0.1)])  # at the trained length, and the long one
    monkeypatch.setattr(training, "_right", lambda *_: None)
    monkeypatch.setattr(training, "_faultless", lambda *_: np.array([next(scores)]))
    averages, kept = [], []
    config = config_of(CELLS[PARITY], recipe)
    progress = training._fresh(config, recipe, (0,))
    for _ in range(5):
        progress = training._round(CELLS[PARITY], recipe, config, (0,), progress)
        averages.append(np.asarray(progress.trainee.average["embed"][...]))
        kept.append(np.asarray(progress.kept["embed"][...]))
    for found, expected in zip(kept, (0, 1, 2, 3, 3), strict=True):
        np.testing.assert_array_equal(found, averages[expected])
    assert progress.score.tolist() == [[0.3, 0.6]]
    assert progress.steps_to_solve.tolist() == [250]


def test_words_differ_by_seed_and_round_and_from_those_of_the_test():
    drawn = [training._training_words(CELLS[PARITY], RECIPE, SEEDS, round_) for round_ in (2, 3)]
    assert drawn[0].tokens.shape == (50, 3, 32, 8)
    seen = [words.tokens[:, seed].tobytes() for words in drawn for seed in range(3)]
    assert len(set(seen)) == 6
    np.testing.assert_array_equal(drawn[0].targets, np.cumsum(drawn[0].tokens, axis=-1) % 2)


def test_all_cells_share_the_recipe_but_for_what_the_cell_says():
    group, cells = group_of("S3"), grid(["S3"], [1, 2], [False, True], [False, True])
    assert len(cells) == len(set(cells)) == 8
    for cell in cells:
        config = config_of(cell, RECIPE)
        assert config.vocab_size == len(group)
        assert (config.num_householder, config.negative_eigenvalues, config.forget_gate) == (
            cell.num_householder,
            cell.negative_eigenvalues,
            cell.forget_gate,
        )
        assert (config.conv_width, config.output_gate, config.layer_kinds) == (1, None, ("linear",))


def test_a_loss_that_is_not_finite_ends_the_training(tmp_path):
    recipe = Recipe.of(vars(RECIPE) | {"learning_rate": 1e30})
    with pytest.raises(FloatingPointError, match="after 50 steps"):
        training.train(CELLS[PARITY], recipe, (0,), tmp_path / "0000.npz")


@pytest.mark.parametrize(("changes", "reason"), [
    ({"widht": 3}, "a recipe has no widht"),
    ({"stages": [[8, 120]]}, "120 steps at length 8; expected multiples of 50 steps"),
    ({"stages": [[0, 50]]}, "50 steps at length 0"),
    ({"stages": []}, "no stages"),
])  # fmt: skip
def test_recipes_that_do_not_fit(changes, reason):
    with pytest.raises(ValueError, match=reason):
        Recipe.of(vars(RECIPE) | changes)


@pytest.mark.parametrize(("cell", "reason"), [(("S9", 1), "S9: 9 is out of range"), (("S3", 0), "num_householder is 0")])
def test_cells_that_cannot_be(cell, reason):
    with pytest.raises(ValueError, match=reason):
        Cell(*cell, negative_eigenvalues=True)


def test_a_recipe_survives_json():
    assert Recipe.of(json.loads(json.dumps(vars(RECIPE)))) == RECIPE


# Tables, figure and instruments


def test_the_table_counts_seeds(finished):
    text = text_of(report.solved_table(finished[1]))
    control, parity = (line.split() for line in text.splitlines() if "Z2" in line)
    assert control[:8] == ["Z2", "1", "[0,", "1]", "no", "1", "0/3", "0/3"]
    assert parity[:8] == ["Z2", "1", "[-1,", "1]", "no", "1", "3/3", "3/3"]
    assert "solved 8" in text
    assert "solved 32" in text


def test_the_figure_has_a_panel_for_each_group(finished):
    other = finished[1].set_column(0, "group", pa.array(["S3"] * 6))
    panels = report.figure(pa.concat_tables([finished[1], other])).axes
    assert [panel.get_title() for panel in panels] == ["Z2", "S3"]
    shares = {line.get_label(): list(line.get_ydata()) for line in panels[0].lines}
    assert shares["[-1, 1], 8 tokens"] == shares["[-1, 1], 32 tokens"] == [1.0]
    assert shares["[0, 1], 32 tokens"] == [0.0]


def test_instruments_find_the_sign_in_a_head_that_parity_needs(finished):
    rows = instruments.measure(finished[0]).to_pylist()
    assert {row["seed"] for row in rows} == set(SEEDS)
    assert len(rows) == 3 * 4
    for seed in SEEDS:
        needed = max((row for row in rows if row["seed"] == seed), key=lambda row: row["represented"])
        assert needed["represented"] == 1
        assert needed["irreps"].endswith(" 1b")
        assert needed["error_at_dimension"] < 0.1
    text = text_of(report.instrument_table(instruments.measure(finished[0])))
    assert "1b" in text


def test_a_seed_whose_heads_represent_nothing_fits_beside_others():
    tables = [instruments.table_of([{"seed": 0, "retention": value}] * 2) for value in (None, 0.5)]
    assert pa.concat_tables(tables)["retention"].to_pylist() == [None, None, 0.5, 0.5]


def test_instruments_want_a_seed_that_has_solved_its_task(tmp_path):
    short = Recipe.of(vars(RECIPE) | {"stages": ((3, 50),)})
    run([Cell("Z2", 1, negative_eigenvalues=False)], short, (0,), tmp_path)
    with pytest.raises(ValueError, match="no seed of"):
        instruments.measure(tmp_path)


def test_irreps_are_named_by_dimension():
    assert report.irreps_text([2.0, 0.98, 0.01, 1.0], [1, 1, 2, 2]) == "2.00 1a + 0.98 1b + 1.00 2b"
    assert report.irreps_text([0.0, 0.04], [1, 1]) == "-"


def test_parameters_of_a_seed_are_its_own(finished):
    params = training.load_parameters(finished[0] / "parameters" / "0001.npz", CELLS[PARITY], RECIPE)
    model = training.model_of(CELLS[PARITY], RECIPE, params, 1)
    assert jnp.array_equal(model.embed[...], params["embed"][...][1])
    tokens = np.array([[1, 1, 0, 1, 0, 0, 1]])
    named = model.logits(model(tokens, model.init_carry(1, 7)).hidden).argmax(-1)
    assert named.tolist() == [[1, 0, 0, 1, 1, 1, 0]]
