"""Tables and the figure of the experiment. Reads rows only."""

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

import pyarrow as pa
from matplotlib.figure import Figure
from rich import box
from rich.table import Table

CELL = ("group", "predicted", "negative_eigenvalues", "forget_gate", "num_householder")


def solved_table(rows: pa.Table) -> Table:
    """Predicted n_h beside the share of seeds that solve each length."""
    first = rows.slice(0, 1).to_pylist()[0]
    view = Table(
        title="One layer, n_h Householder steps a token",
        caption="solved: no mistake in at least 99 % of fresh words of that length; steps: median of those that solved the\n"
        "trained length, when a validation first said so; accuracies of the median seed, by word and by token",
        box=box.SIMPLE,
    )
    headings = ["group", "predicted", "eigenvalues", "gate", "n_h", f"solved {first['length']}"]
    headings += [f"solved {first['length_long']}", "steps", "words right", "tokens right"]
    for heading in headings:
        view.add_column(heading, justify="right", no_wrap=True)
    for cell, seeds in by_cell(rows).items():
        steps = [seed["steps_to_solve"] for seed in seeds if seed["steps_to_solve"] is not None]
        view.add_row(
            *_described(cell),
            *(f"{sum(seed[name] for seed in seeds)}/{len(seeds)}" for name in ("solved", "solved_long")),
            f"{median(steps):.0f}" if steps else "-",
            *(f"{median(seed[name] for seed in seeds):.3f}" for name in ("sequence_accuracy", "token_accuracy")),
        )
    return view


def by_cell(rows: pa.Table) -> dict[tuple, list[dict]]:
    """Rows of each cell, in the order of the rows."""
    cells = defaultdict(list)
    for row in rows.to_pylist():
        cells[tuple(row[name] for name in CELL)].append(row)
    return dict(cells)


def figure(rows: pa.Table) -> Figure:
    """Share of seeds that solve each length against n_h; a panel for each group, the predicted n_h as a line."""
    groups = list(dict.fromkeys(rows["group"].to_pylist()))
    drawn = Figure(figsize=(3.2 * len(groups), 3.2), layout="constrained")
    panels = drawn.subplots(1, len(groups), sharey=True, squeeze=False)[0]
    for panel, group in zip(panels, groups, strict=True):
        _panel(panel, [(cell, seeds) for cell, seeds in by_cell(rows).items() if cell[0] == group])
        panel.set_title(group)
        panel.set_xlabel("Householder steps a token")
    panels[0].set_ylabel("share of seeds that solve it")
    panels[0].legend(frameon=False, fontsize="small")
    return drawn


def _panel(axes, cells: Sequence[tuple[tuple, list[dict]]]) -> None:
    lines = defaultdict(list)
    for (_, _, negative, gate, steps), seeds in cells:
        for name in ("solved", "solved_long"):
            lines[negative, gate, name].append((steps, sum(seed[name] for seed in seeds) / len(seeds)))
    for (negative, gate, name), points in lines.items():
        length = cells[0][1][0]["length" if name == "solved" else "length_long"]
        label = f"{_eigenvalues(negative)}{', gate' if gate else ''}, {length} tokens"
        style = {"color": "C0" if negative else "C1", "marker": "s" if gate else "o"}
        axes.plot(*zip(*points, strict=True), label=label, linestyle="-" if name == "solved" else "--", **style)
    axes.axvline(cells[0][0][1], color="0.7", linewidth=0.8, zorder=0)
    axes.set_xticks(sorted({cell[4] for cell, _ in cells}))
    axes.set_ylim(-0.05, 1.05)


def _described(cell: tuple) -> tuple[str, ...]:
    group, predicted, negative, gate, steps = cell
    return group, str(predicted), _eigenvalues(negative), "yes" if gate else "no", str(steps)


def _eigenvalues(negative: bool) -> str:
    return "[-1, 1]" if negative else "[0, 1]"
