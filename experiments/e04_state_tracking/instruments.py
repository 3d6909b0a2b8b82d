"""What did the seeds that solved a cell learn? The instruments of ``jaxdelta.analysis.representation``.

Question: does the head that solves the task move as many directions as the representation has, do its transitions
    multiply as the group does, and as which representation?
Command: ``python -m experiments.e04_state_tracking.instruments``, after ``run``; looks at each seed that has solved the
    trained length.
Wall time: see below.
Expected: see below.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pa_parquet
from rich.console import Console

from experiments.e04_state_tracking import report
from experiments.e04_state_tracking.cells import Cell, Recipe
from experiments.e04_state_tracking.run import FOLDER, parameters_file
from experiments.e04_state_tracking.training import TEST, load_parameters, model_of
from jaxdelta.analysis.representation import (
    head_accuracies,
    homomorphism_error,
    moved_span,
    multiplicities,
    solving_head,
    token_steps,
    transitions,
)
from jaxdelta.models.decoder import Decoder, states
from jaxdelta.ops.spectra import effective_rank, threshold_rank
from jaxdelta.results import Results
from jaxdelta.tasks.state_tracking import generated, group_of, minimal_representation, real_irreps, words

COUNT, LENGTH = 64, 64  # words on which heads are ablated and states are made


def measure(folder: Path) -> pa.Table:
    """Instruments of all seeds of ``folder`` that have solved the trained length, a row each; none is an error."""
    about = json.loads((folder / "manifest.json").read_text())["configuration"]
    cells, recipe = [Cell(**cell) for cell in about["cells"]], Recipe.of(about["recipe"])
    rows = pa_parquet.read_table(folder / "rows.parquet")["solved"].to_numpy().reshape(len(cells), -1)
    solved = [(index, place) for index, place in np.argwhere(rows).tolist()]
    if not solved:
        raise ValueError(f"no seed of {folder} has solved its task")
    results = Results(folder / "instruments", {"experiment": "e04_state_tracking/instruments", "of": about}, {})
    for part, (index, place) in enumerate(solved):
        if results.part(part) is None:
            params = load_parameters(parameters_file(folder, index), cells[index], recipe)
            model = model_of(cells[index], recipe, params, place)
            results.write_part(part, pa.Table.from_pylist([instruments(cells[index], model, about["seeds"][place])]))
    return results.finish(len(solved))


def instruments(cell: Cell, model: Decoder, seed: int) -> dict:
    """The row of one seed: which head solves the task, what it moves, and as what its transitions multiply."""
    group = group_of(cell.group)
    drawn = words(group, count=COUNT, length=LENGTH, seed=(TEST, 1))
    accuracies = head_accuracies(model, drawn)
    head = solving_head(accuracies)
    steps = token_steps(model)
    A, span = transitions(steps)[:, head], moved_span(steps, head, group.alphabet)
    (S,) = states(model(drawn.tokens, model.init_carry(*drawn.tokens.shape)).carry)
    irreps = real_irreps(generated(group))
    counts = multiplicities(A, group, irreps)
    return vars(cell) | {
        "seed": seed,
        "head": head,
        "accuracy": accuracies.untouched,
        "accuracy_without": float(accuracies.without[head]),
        "accuracy_alone": float(accuracies.alone[head]),
        "representation_dimension": minimal_representation(group).dimension,
        "span_dimension": span.dimension,
        "span_numerical": span.numerical,
        "span_effective": span.effective,
        "homomorphism_error": homomorphism_error(A, group, span.basis),
        "irreps": " + ".join(f"{count:.2f}x{irrep.dimension}" for count, irrep in zip(counts, irreps, strict=True)),
        "state_rank": float(np.median(threshold_rank(S[:, head]))),
        "state_effective_rank": float(np.median(effective_rank(S[:, head]))),
    }


def main() -> None:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--out", type=Path, default=FOLDER)
    rows = measure(top.parse_args().out)
    Console(width=120).print(report.instrument_table(rows))


if __name__ == "__main__":
    main()
