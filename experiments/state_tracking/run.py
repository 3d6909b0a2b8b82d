"""How many Householder steps for each token does a group need?

Question: with n_h = max rank(rho(g) - I) steps and eigenvalues down to -1, a one-layer Gated DeltaProduct can carry a
    representation rho of a group. Does training find it, in how many of ten seeds, and is less enough?
Command: ``python -m experiments.state_tracking.run`` trains Z2 and S3 with n_h of 1 to 3 and eigenvalues [0, 1] and
    [-1, 1], no forget gate, ten seeds each. ``--groups all --steps 1 2 3 4 5 --forget-gate both`` is the whole grid, for
    a GPU. Resumes with the same results if killed. Afterwards ``instruments`` examines what was learnt, and ``plot`` draws.
Wall time: 112 minutes on 2 CPU cores that had other work too. The whole grid has not been run; its time is not known.
Expected: no seed solves its task with eigenvalues [0, 1], or with [-1, 1] and fewer steps than predicted (S3 with n_h = 1).
    From the predicted n_h on, all ten seeds solve 32 tokens; 5, 3 and 6 of ten (Z2 with n_h = 1, 2, 3) and 7 and 8 of ten
    (S3 with n_h = 2, 3) also solve 128.

All cells have the same recipe (``cells.Recipe``): fresh words, short ones first, a constant learning rate, f32. Measured is
the exponential average of the parameters. A seed has solved a length if it names all prefix products of at least 99 % of
512 fresh words of that length. A cell ends early when the kept parameters of all its seeds pass this on the 128 validation
words at both lengths, the trained one and four times that.
"""

import argparse
import json
import time
from pathlib import Path

import pyarrow as pa
from rich.console import Console

from experiments.state_tracking import report
from experiments.state_tracking.cells import GROUPS, Cell, Recipe, configuration, grid
from experiments.state_tracking.training import Progress, save_parameters, tested, train
from jaxdelta.groups import group_of, predicted_householder
from jaxdelta.results.documents import Item, rows_of
from jaxdelta.results.folder import Results

FOLDER = Path("results") / "state_tracking"
CHOICES = {"no": (False,), "yes": (True,), "both": (False, True)}


def run(cells: list[Cell], recipe: Recipe, seeds: tuple[int, ...], folder: Path) -> pa.Table:
    """Train what is missing in ``folder``; returns the rows of all seeds of all cells."""
    results = Results(folder, configuration(cells, recipe, seeds))
    for name in ("training", "parameters"):
        (folder / name).mkdir(exist_ok=True)

    def work(values: list[tuple[int, Cell]], _) -> list[pa.Table]:
        ((index, cell),) = values
        begun, used = time.perf_counter(), time.process_time()
        progress = train(cell, recipe, seeds, folder / "training" / f"{index:04d}.npz")
        save_parameters(parameters_file(folder, index), progress.kept)
        took = f"{time.perf_counter() - begun:.0f} s, {time.process_time() - used:.0f} s of a core"
        print(f"{cell}: {progress.rounds * recipe.every} steps, {took}", flush=True)
        return [seed_rows(cell, recipe, seeds, progress)]

    rows = rows_of([Item((index,), (index, cell)) for index, cell in enumerate(cells)], work, results=results)
    for file in (folder / "training").glob("*.npz"):
        file.unlink()
    return rows


def seed_rows(cell: Cell, recipe: Recipe, seeds: tuple[int, ...], progress: Progress) -> pa.Table:
    """A row for each seed: the cell, the predicted n_h, and accuracies of its kept parameters on fresh words."""
    whole = vars(cell) | {
        "predicted": predicted_householder(group_of(cell.group)),
        "length": recipe.length,
        "length_long": recipe.long_length,
        "steps": progress.rounds * recipe.every,
    }
    columns = {name: [value] * len(seeds) for name, value in whole.items()}
    solved = [None if steps < 0 else int(steps) for steps in progress.steps_to_solve]
    columns |= {"seed": list(seeds), "steps_to_solve": pa.array(solved, pa.int64())}
    return pa.table(columns | tested(cell, recipe, progress.kept))


def parameters_file(folder: Path, index: int) -> Path:
    """The file with the parameters of a cell."""
    return folder / "parameters" / f"{index:04d}.npz"


def main() -> None:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--groups", nargs="+", default=["Z2", "S3"], help=f"names, or all: {' '.join(GROUPS)}")
    top.add_argument("--steps", nargs="+", type=int, default=[1, 2, 3], help="n_h; default: 1 2 3")
    top.add_argument("--negative-eigenvalues", choices=CHOICES, default="both")
    top.add_argument("--forget-gate", choices=CHOICES, default="no")
    top.add_argument("--seeds", type=int, default=10)
    top.add_argument("--recipe", type=json.loads, default={}, help="""changes as JSON, {"width": 128}""")
    top.add_argument("--out", type=Path, default=FOLDER)
    arguments = top.parse_args()

    if arguments.seeds < 1:
        top.error(f"--seeds is {arguments.seeds}; expected at least 1")
    groups = GROUPS if arguments.groups == ["all"] else arguments.groups
    choices = (CHOICES[arguments.negative_eigenvalues], CHOICES[arguments.forget_gate])
    cells = grid(groups, arguments.steps, *choices)
    rows = run(cells, Recipe.of(arguments.recipe), tuple(range(arguments.seeds)), arguments.out)
    Console(width=110).print(report.solved_table(rows))


if __name__ == "__main__":
    main()
