"""The experiment on state tracking in small: parity is learnt where an eigenvalue can be -1, and a kill changes nothing.

Which seed learns how much is chaotic: another order of the same sums ends elsewhere. So what is learnt is said of a share
of seeds, far from the share measured, and what counts and draws is tested on rows and scores that are made up.
"""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pa_parquet
import pytest
from rich.console import Console

from experiments.state_tracking import instruments, report, training
from experiments.state_tracking.cells import Cell, Recipe, config_of, grid
from experiments.state_tracking.run import run
from jaxdelta.groups import group_of
from jaxdelta.implementation import FOR_CPU
from jaxdelta.results.folder import ResultsError
from jaxdelta.tasks.state_tracking import solution
from ports.compare import relative_error

RECIPE = Recipe(
    width=16,
    mlp_width=16,
    head_dim=4,
    stages=((3, 100), (8, 200)),
    every=50,
    learning_rate=1e-2,
    average=0.95,
    validated=64,
    tested=64,
)
CELLS = grid(["Z2"], [1], [False, True])
CONTROL, PARITY = range(2)
SEEDS = tuple(range(6))
SHORT = Recipe.of(vars(RECIPE) | {"stages": ((3, 60),), "every": 10})  # six rounds, and one program with PAIR
PAIR = (0, 1)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("state_tracking")
    return folder, run(CELLS, RECIPE, SEEDS, folder)


def of_cell(rows, index):
    return rows.slice(index * len(SEEDS), len(SEEDS)).to_pydict()


def flat(params, place):
    """All parameters of one seed, in one vector."""
    return np.concatenate([np.ravel(leaf[place]) for leaf in jax.tree.leaves(params)])


def made_up(solved, solved_long, **changes):
    """Rows of one cell as ``run`` gives them."""
    count = len(solved)
    cell = {"group": "Z2", "num_householder": 1, "negative_eigenvalues": True, "forget_gate": False, "predicted": 1}
    whole = cell | {"length": 8, "length_long": 32, "steps": 300} | changes
    rows = {name: [value] * count for name, value in whole.items()} | {"seed": list(range(count))}
    rows["steps_to_solve"] = pa.array([100 * (seed + 1) if solved[seed] else None for seed in range(count)], pa.int64())
    rows |= {"solved": solved, "solved_long": solved_long}
    for name, share in (("sequence", 0.2), ("token", 0.8)):
        rows |= {f"{name}_accuracy{suffix}": [share + seed / 100 for seed in range(count)] for suffix in ("", "_long")}
    return pa.table(rows)


def text_of(table):
    console = Console(width=140)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


# What is learnt


def test_parity_is_learnt_where_an_eigenvalue_can_be_minus_one(finished):
    """By 15 of 16 seeds at 8 tokens and 14 at 32 when measured, and the others nearly; by half and one of the six here."""
    rows = of_cell(finished[1], PARITY)
    assert sum(rows["solved"]) >= 3
    assert sum(rows["solved_long"]) >= 1
    assert np.median(rows["token_accuracy_long"]) >= 0.95
    for solved, accuracy in zip(rows["solved_long"], rows["sequence_accuracy_long"], strict=True):
        assert solved == (accuracy >= RECIPE.threshold)


def test_and_not_where_none_can(finished):
    rows = of_cell(finished[1], CONTROL)
    assert rows["solved"] == rows["solved_long"] == [False] * len(SEEDS)
    assert rows["steps_to_solve"] == [None] * len(SEEDS)
    assert rows["steps"] == [300] * len(SEEDS)
    assert max(rows["token_accuracy_long"]) < 0.8


def test_a_cell_ends_when_all_seeds_have_solved_it(tmp_path, monkeypatch):
    """Both lengths, each seed in its own time; what one loses again afterwards is kept from before."""
    scores = [[(0.5, 0.1), (1.0, 0.2)], [(1.0, 1.0), (1.0, 0.3)], [(0.9, 0.9), (1.0, 1.0)]]  # short, long, of two seeds
    remaining = [np.array(score) for score in scores]
    monkeypatch.setattr(training, "_right", lambda *_: None)
    monkeypatch.setattr(training, "_faultless", lambda *_: remaining.pop(0))
    progress = training.train(CELLS[PARITY], SHORT, PAIR, tmp_path / "0000.npz")
    assert (progress.rounds, remaining) == (3, [])
    assert progress.steps_to_solve.tolist() == [20, 10]
    assert progress.score.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_rows_say_what_was_trained_and_predicted(finished):
    rows = finished[1]
    assert rows["seed"].to_pylist() == [*SEEDS, *SEEDS]
    assert rows["negative_eigenvalues"].to_pylist() == [False] * len(SEEDS) + [True] * len(SEEDS)
    assert set(rows["predicted"].to_pylist()) == set(rows["num_householder"].to_pylist()) == {1}
    assert (rows["length"][0].as_py(), rows["length_long"][0].as_py()) == (8, 32)


def test_a_seed_is_trained_as_if_it_were_alone():
    """Up to rounding, which batched products are free to do otherwise.

    Of all parameters together: AdamW moves one whose gradient is nothing but rounding as far as any other.
    """
    config = config_of(CELLS[PARITY], SHORT)

    def trained(seeds):
        begun = training._fresh(config, SHORT, seeds)
        start = flat(begun.trainee.params, -1)  # before the round takes its memory over
        return start, training._round(CELLS[PARITY], SHORT, config, seeds, begun).trainee.params

    (start, together), (_, alone) = trained(PAIR), trained(PAIR[1:])
    moved = np.linalg.norm(flat(together, 1) - start)
    assert np.linalg.norm(flat(alone, 0) - flat(together, 1)) < 1e-2 * moved
    assert np.linalg.norm(flat(alone, 0) - flat(together, 0)) > moved


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
    """The first of six validations is the best."""
    scores = [(1.0, 0.5), (0.5, 0.4), (0.5, 0.4), (0.5, 0.3), (0.4, 0.3), (0.5, 0.2)]

    def trained(file, remaining):
        monkeypatch.setattr(training, "_right", lambda *_: None)
        monkeypatch.setattr(training, "_faultless", lambda *_: np.array([remaining.pop(0)] * 2))
        return training.train(CELLS[PARITY], SHORT, PAIR, file)

    whole = trained(tmp_path / "whole.npz", list(scores))
    with pytest.raises(IndexError):  # in the third round
        trained(tmp_path / "killed.npz", scores[:2])
    killed = trained(tmp_path / "killed.npz", scores[2:])
    for ours, theirs in zip(jax.tree.leaves(killed), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert killed.score.tolist() == [[0.5, 1.0]] * 2
    assert killed.steps_to_solve.tolist() == [10] * 2


def test_finished_cells_are_not_trained_again(finished, monkeypatch):
    folder, rows = finished
    monkeypatch.setattr("experiments.state_tracking.run.train", None)
    assert run(CELLS, RECIPE, SEEDS, folder).equals(rows)
    assert not list((folder / "training").iterdir())


def test_a_folder_belongs_to_one_grid_and_recipe(finished):
    with pytest.raises(ResultsError, match="cells"):
        run(CELLS[:1], RECIPE, SEEDS, finished[0])
    with pytest.raises(ResultsError, match="recipe batch is 32 there, 16 now"):
        run(CELLS, Recipe.of(vars(RECIPE) | {"batch": 16}), SEEDS, finished[0])


def test_a_training_of_something_else_is_refused(tmp_path):
    training.train(CELLS[PARITY], SHORT, PAIR, tmp_path / "0000.npz")
    with pytest.raises(ValueError, match="is of another training"):
        training.train(CELLS[PARITY], SHORT, PAIR[:1], tmp_path / "0000.npz")


# Parts of a training


def test_accuracies_count_words_up_to_each_length():
    """Of four words of length 8 one errs at 2, one at 7."""
    right = np.ones((1, 4, 8), bool)
    right[0, 0, 2] = right[0, 1, 7] = False
    recipe = Recipe.of(vars(RECIPE) | {"stages": ((2, 50),)})
    np.testing.assert_array_equal(training._faultless(right, recipe), [[1.0, 0.5]])


def test_the_kept_parameters_are_those_of_the_best_validation(monkeypatch):
    """By the long length, then the trained one, the latest of equals."""
    scores = iter([(0.9, 0.2), (0.5, 0.3), (0.6, 0.3), (0.6, 0.3), (1.0, 0.1)])  # at the trained length, and the long one
    monkeypatch.setattr(training, "_right", lambda *_: None)
    monkeypatch.setattr(training, "_faultless", lambda *_: np.array([next(scores)] * 2))
    averages, kept = [], []
    config = config_of(CELLS[PARITY], SHORT)
    progress = training._fresh(config, SHORT, PAIR)
    for _ in range(5):
        progress = training._round(CELLS[PARITY], SHORT, config, PAIR, progress)
        averages.append(np.asarray(progress.trainee.average["embed"][...]))
        kept.append(np.asarray(progress.kept["embed"][...]))
    for found, expected in zip(kept, (0, 1, 2, 3, 3), strict=True):
        np.testing.assert_array_equal(found, averages[expected])
    assert progress.score.tolist() == [[0.3, 0.6]] * 2
    assert progress.steps_to_solve.tolist() == [50] * 2


def test_words_differ_by_seed_and_round_and_from_those_of_the_test():
    drawn = [training._training_words(CELLS[PARITY], RECIPE, SEEDS[:3], round_) for round_ in (2, 3)]
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


MADE_UP = [
    made_up([False] * 3, [False] * 3, negative_eigenvalues=False),
    made_up([True, True, False], [False, True, False]),
    made_up([True] * 3, [True] * 3, group="S3", predicted=2, num_householder=2),
]


def test_the_table_counts_seeds():
    text = text_of(report.solved_table(pa.concat_tables(MADE_UP)))
    control, parity, other = (line.split() for line in text.splitlines() if line.split()[:1] in (["Z2"], ["S3"]))
    assert control == ["Z2", "1", "[0,", "1]", "no", "1", "0/3", "0/3", "-", "0.210", "0.810"]
    assert parity == ["Z2", "1", "[-1,", "1]", "no", "1", "2/3", "1/3", "150", "0.210", "0.810"]
    assert other[:9] == ["S3", "2", "[-1,", "1]", "no", "2", "3/3", "3/3", "200"]
    assert "solved 8" in text
    assert "solved 32" in text


def test_the_figure_has_a_panel_for_each_group():
    panels = report.figure(pa.concat_tables(MADE_UP)).axes
    assert [panel.get_title() for panel in panels] == ["Z2", "S3"]
    shares = {line.get_label(): list(line.get_ydata()) for line in panels[0].lines}
    assert shares["[-1, 1], 8 tokens"] == [2 / 3]
    assert shares["[-1, 1], 32 tokens"] == [1 / 3]
    assert shares["[0, 1], 8 tokens"] == shares["[0, 1], 32 tokens"] == [0.0]


def test_made_up_rows_have_the_columns_of_trained_ones(finished):
    """In the order of a table's columns or in another, and of the same types."""
    trained = finished[1].schema
    assert {field.name: field.type for field in MADE_UP[0].schema} == {field.name: field.type for field in trained}


def test_instruments_find_the_sign_in_a_head_that_parity_needs(finished):
    """In all of 15 seeds when measured, in half here: a trained head carries it nearly, and a threshold has two sides."""
    rows = instruments.measure(finished[0]).to_pylist()
    solved = [seed for seed, it in zip(SEEDS, of_cell(finished[1], PARITY)["solved"], strict=True) if it]
    assert [row["seed"] for row in rows] == [seed for seed in solved for _ in range(RECIPE.num_heads)]
    needed = {row["seed"] for row in rows if row["accuracy"] - row["accuracy_without"] > report.NEEDED}
    assert len(needed) >= len(solved) / 2
    signed = {row["seed"] for row in rows if row["represented"] and "1b" in row["irreps"]}
    assert len(signed) >= len(solved) / 2
    assert text_of(report.instrument_table(instruments.measure(finished[0]))).count("Z2") >= len(needed)


@pytest.mark.parametrize(("name", "dimension", "irreps"), [("Z2", 1, "1.00 1b"), ("S3", 2, "1.00 2a")])
def test_instruments_of_a_solution_that_is_written_down(name, dimension, irreps):
    """Of its two heads the first carries the representation, and the second writes a constant."""
    first, second = instruments.instruments(group_of(name), solution(group_of(name)))
    assert first["accuracy"] == second["accuracy"] == 1
    assert first["accuracy_without"] < 0.8
    assert (first["represented"], first["irreps"]) == (dimension, irreps)
    assert first["error_at_dimension"] < 1e-3
    assert first["retention"] == pytest.approx(1, abs=1e-3)
    assert "1b" not in second["irreps"]


def test_a_seed_whose_heads_represent_nothing_fits_beside_others():
    tables = [instruments.table_of([{"seed": 0, "retention": value}] * 2) for value in (None, 0.5)]
    assert pa.concat_tables(tables)["retention"].to_pylist() == [None, None, 0.5, 0.5]


def test_instruments_want_a_seed_that_has_solved_its_task(finished, tmp_path):
    folder, rows = finished
    shutil.copy(folder / "manifest.json", tmp_path)
    solved = rows.schema.get_field_index("solved")
    pa_parquet.write_table(rows.set_column(solved, "solved", [[False] * len(rows)]), tmp_path / "rows.parquet")
    with pytest.raises(ValueError, match="no seed of"):
        instruments.measure(tmp_path)


def test_irreps_are_named_by_dimension():
    assert report.irreps_text([2.0, 0.98, 0.01, 1.0], [1, 1, 2, 2]) == "2.00 1a + 0.98 1b + 1.00 2b"
    assert report.irreps_text([0.0, 0.04], [1, 1]) == "-"


def test_parameters_of_a_seed_are_its_own(finished):
    """The model of a place has the parameters of that place, and names what these name among those of all seeds."""
    params = training.load_parameters(finished[0] / "parameters" / "0001.npz", CELLS[PARITY], RECIPE)
    config, tokens = config_of(CELLS[PARITY], RECIPE), np.array([[1, 1, 0, 1, 0, 0, 1]])
    together = jax.vmap(lambda p: training._logits(config, FOR_CPU, p, tokens))(params)
    for place in range(len(SEEDS)):
        model = training.model_of(CELLS[PARITY], RECIPE, params, place)
        assert jnp.array_equal(model.embed[...], params["embed"][...][place])
        logits = model.logits(model(tokens, model.init_carry(1, 7)).hidden)
        assert relative_error(logits, together[place]) < 1e-4
    assert relative_error(together[0], together[1]) > 1e-2
    best = int(np.argmax(of_cell(finished[1], PARITY)["token_accuracy_long"]))
    assert together[best].argmax(-1).tolist() == [[1, 0, 0, 1, 1, 1, 0]]
