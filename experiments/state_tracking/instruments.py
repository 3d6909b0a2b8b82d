"""What did the seeds that solved a cell learn? The instruments of ``jaxdelta.analysis.representation``.

Question: does the head that solves the task move as many directions as the representation has, do its transitions
    multiply as the group does, and as which representation?
Command: ``python -m experiments.state_tracking.instruments``, after ``run``; for each seed that has solved the trained
    length.
Wall time: one minute for the 50 seeds of the small grid, on a CPU.
Expected: S3 with n_h = 2: every seed has a head whose two most moved directions carry the two-dimensional irreducible
    representation once (homomorphism error 0.02 to 0.03, above 0.1 on the third), and seven seeds have a second head with
    the sign; the keys of either head span all 8 dimensions above rounding, and 2 to 5 effective ones. Z2 with n_h = 1: a
    head with the sign in nine seeds, just missed in the tenth; seeds that solve 128 tokens keep more than 0.993 of it at
    each token, the others mostly less. With more steps than needed, the directions moved most are not always those that
    carry the representation, so the instruments find it in fewer heads.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pa_parquet
from rich.console import Console

from experiments.state_tracking import report
from experiments.state_tracking.cells import Cell, Recipe
from experiments.state_tracking.run import FOLDER, parameters_file
from experiments.state_tracking.training import TEST, load_parameters, model_of
from jaxdelta.analysis.representation import (
    MovedSpan,
    head_accuracies,
    homomorphism_error,
    moved_span,
    multiplicities,
    represented_dimension,
    retention,
    token_steps,
    transitions,
)
from jaxdelta.groups import Group, generated, group_of, minimal_representation, real_irreps
from jaxdelta.models.carry import states
from jaxdelta.models.decoder import Decoder
from jaxdelta.ops.spectra import effective_rank, threshold_rank
from jaxdelta.results.documents import Item, rows_of
from jaxdelta.results.folder import Results
from jaxdelta.tasks.state_tracking import words

COUNT, LENGTH = 64, 64  # words for ablations and states


def measure(folder: Path) -> pa.Table:
    """A row for each head of each seed of ``folder`` that has solved the trained length.

    Raises:
        ValueError: no seed has.
    """
    about = json.loads((folder / "manifest.json").read_text())["configuration"]
    cells, recipe = [Cell(**cell) for cell in about["cells"]], Recipe.of(about["recipe"])
    solved = pa_parquet.read_table(folder / "rows.parquet")["solved"].to_numpy().reshape(len(cells), -1)
    if not solved.any():
        raise ValueError(f"no seed of {folder} has solved its task")
    results = Results(folder / "instruments", {"experiment": "state_tracking/instruments", "of": about})

    def work(values: list[list[int]], _) -> list[pa.Table]:
        ((index, place),) = values
        cell, params = cells[index], load_parameters(parameters_file(folder, index), cells[index], recipe)
        found = instruments(group_of(cell.group), model_of(cell, recipe, params, place))
        return [table_of([vars(cell) | {"seed": about["seeds"][place]} | row for row in found])]

    return rows_of([Item(tuple(place), place) for place in np.argwhere(solved).tolist()], work, results=results)


def table_of(rows: list[dict]) -> pa.Table:
    """Rows as a table; columns with only None are numbers too, so that the tables of all seeds fit together."""
    table = pa.Table.from_pylist(rows)
    types = [pa.float64() if pa.types.is_null(field.type) else field.type for field in table.schema]
    return table.cast(pa.schema(list(zip(table.column_names, types, strict=True))))


def instruments(group: Group, model: Decoder) -> list[dict]:
    """A row for each head of a one-layer model: whether the task needs it, what it moves, and what that represents."""
    drawn = words(group, count=COUNT, length=LENGTH, seed=(TEST, 1))
    accuracies = head_accuracies(model, *drawn)
    steps = token_steps(model)
    A = transitions(steps)
    (S,) = states(model(drawn.tokens, model.init_carry(*drawn.tokens.shape)).carry)
    return [
        {
            "head": head,
            "accuracy": accuracies.untouched,
            "accuracy_without": float(accuracies.without[head]),
            "accuracy_alone": float(accuracies.alone[head]),
            "state_rank": float(np.median(threshold_rank(S[:, head]))),
            "state_effective_rank": float(np.median(effective_rank(S[:, head]))),
        }
        | of_transitions(group, A[:, head], moved_span(steps, head, group.alphabet))
        for head in range(A.shape[1])
    ]


def of_transitions(group: Group, A: np.ndarray, span: MovedSpan) -> dict:
    """What the transitions [G, K, K] of one head represent, on the directions that it moves most."""
    d = minimal_representation(group).dimension
    irreps = real_irreps(generated(group))
    represented = represented_dimension(A, group, span.directions)
    carried = span.directions[:, :represented]
    counts = multiplicities(A, group, irreps, carried)
    errors = [homomorphism_error(A, group, span.directions[:, :n]) for n in range(1, span.dimension + 1)]
    return {
        "representation_dimension": d,
        "keys_numerical": span.dimension,
        "keys_effective": span.effective,
        "represented": represented,
        "retention": retention(A, group, carried) if represented else None,
        "error_at_dimension": errors[d - 1] if d <= len(errors) else None,
        "error_after": errors[d] if d < len(errors) else None,
        "irreps": report.irreps_text(counts, [irrep.dimension for irrep in irreps]),
    }


def main() -> None:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--out", type=Path, default=FOLDER)
    rows = measure(top.parse_args().out)
    Console(width=130).print(report.instrument_table(rows))


if __name__ == "__main__":
    main()
