"""Tables and the figure of the experiment. Reads rows only."""

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

import pyarrow as pa
from matplotlib.figure import Figure

from jaxdelta.report.sheet import Sheet

NEEDED = 0.01
CELL = ("group", "predicted", "negative_eigenvalues", "forget_gate", "num_householder")


def solved_table(rows: pa.Table) -> Sheet:
    """Predicted n_h beside the share of seeds that solve each length."""
    first = rows.slice(0, 1).to_pylist()[0]
    view = Sheet(
        "One layer, n_h Householder steps a token",
        caption="solved: no mistake in at least 99 % of fresh words of that length; steps: of the\n"
        "median seed that solved the trained length, when a validation first said so; right: by\n"
        "the median seed, at the trained length",
        keys=5,
    )
    headings = ["group", "predicted", "eigenvalues", "gate", "n_h", f"solved {first['length']}"]
    headings += [f"solved {first['length_long']}", "steps", "words right", "tokens right"]
    for heading in headings:
        view.add_column(heading)
    for cell, seeds in by_cell(rows).items():
        steps = [seed["steps_to_solve"] for seed in seeds if seed["steps_to_solve"] is not None]
        view.add_row(
            *_described(cell),
            *(f"{sum(seed[name] for seed in seeds)}/{len(seeds)}" for name in ("solved", "solved_long")),
            f"{median(steps):.0f}" if steps else "-",
            *(f"{median(seed[name] for seed in seeds):.3f}" for name in ("sequence_accuracy", "token_accuracy")),
        )
    return view


def instrument_table(rows: pa.Table) -> Sheet:
    """What the heads that the task needs do: a line for each of them, for each seed that solves it."""
    view = Sheet(
        f"Heads without which more than {NEEDED:.0%} of the tokens go wrong",
        caption="without, alone: tokens right when this head, or all others, are silent; keys: numerical and effective\n"
        "dimension of their span; d: of the smallest representation; error: of A(g) A(h) against A(g h) on the d\n"
        "directions moved most, and on d + 1; carried: directions on which it stays below 0.1, and the irreducible\n"
        "representations there, numbered by dimension; kept: of its size, a token; state: effective rank",
        keys=5,
    )
    headings = ("group", "eigenvalues", "n_h", "seed", "head", "without", "alone", "keys", "d", "error", "d + 1")
    for heading in (*headings, "carried", "irreps", "kept", "state"):
        view.add_column(heading)
    for row in rows.to_pylist():
        if row["accuracy"] - row["accuracy_without"] > NEEDED:
            view.add_row(*_instrument_cells(row))
    return view


def irreps_text(counts: Sequence[float], dimensions: Sequence[int]) -> str:
    """Irreducible representations that occur, such as "0.98 2a": multiplicity, dimension, letter; 1a is the trivial one."""
    names = [f"{d}{chr(ord('a') + list(dimensions[:i]).count(d))}" for i, d in enumerate(dimensions)]
    return " + ".join(f"{n:.2f} {name}" for n, name in zip(counts, names, strict=True) if abs(n) > 0.05) or "-"


def _instrument_cells(row: dict) -> list[str]:
    gate = " gate" if row["forget_gate"] else ""
    cells = [row["group"], _eigenvalues(row["negative_eigenvalues"]) + gate]
    cells += [str(row[name]) for name in ("num_householder", "seed", "head")]
    cells += [f"{row[name]:.3f}" for name in ("accuracy_without", "accuracy_alone")]
    cells += [f"{row['keys_numerical']}, {row['keys_effective']:.1f}", str(row["representation_dimension"])]
    cells += ["-" if row[name] is None else f"{row[name]:.3f}" for name in ("error_at_dimension", "error_after")]
    kept = "-" if row["retention"] is None else f"{row['retention']:.5f}"
    return [*cells, str(row["represented"]), row["irreps"], kept, f"{row['state_effective_rank']:.1f}"]


def by_cell(rows: pa.Table) -> dict[tuple, list[dict]]:
    """Rows by cell, in the order of ``rows``."""
    cells = defaultdict(list)
    for row in rows.to_pylist():
        cells[tuple(row[name] for name in CELL)].append(row)
    return dict(cells)


def figure(rows: pa.Table) -> Figure:
    """Share of seeds that solve each length against n_h; a panel for each group, the predicted n_h as a line."""
    groups = list(dict.fromkeys(rows["group"].to_pylist()))
    drawn = Figure(figsize=(max(5, 3.2 * len(groups)), 3.8), layout="constrained")
    panels = drawn.subplots(1, len(groups), sharey=True, squeeze=False)[0]
    for panel, group in zip(panels, groups, strict=True):
        _panel(panel, [(cell, seeds) for cell, seeds in by_cell(rows).items() if cell[0] == group])
        panel.set_title(group)
        panel.set_xlabel("Householder steps a token")
    panels[0].set_ylabel("share of seeds that solve it")
    drawn.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize="small"
    )
    return drawn


def _panel(axes, cells: Sequence[tuple[tuple, list[dict]]]) -> None:
    lines = defaultdict(list)
    for (_, _, negative, gate, steps), seeds in cells:
        for name in ("solved", "solved_long"):
            lines[negative, gate, name].append((steps, sum(seed[name] for seed in seeds) / len(seeds)))
    for (negative, gate, name), points in lines.items():
        long = name == "solved_long"
        length = cells[0][1][0]["length_long" if long else "length"]
        label = f"{_eigenvalues(negative)}{', gate' if gate else ''}, {length} tokens"
        style = {"color": "C0" if negative else "C1", "marker": "s" if gate else "o"}
        style |= {"linestyle": "--", "markersize": 4} if long else {"markersize": 8, "markerfacecolor": "none"}
        axes.plot(*zip(*points, strict=True), label=label, **style)
    predicted = cells[0][0][1]
    axes.axvline(predicted, color="0.7", linewidth=0.8, zorder=0, label="predicted to suffice, from here on")
    axes.set_xticks(sorted({cell[4] for cell, _ in cells}))
    axes.set_ylim(-0.05, 1.05)


def _described(cell: tuple) -> tuple[str, ...]:
    group, predicted, negative, gate, steps = cell
    return group, str(predicted), _eigenvalues(negative), "yes" if gate else "no", str(steps)


def _eigenvalues(negative: bool) -> str:
    return "[-1, 1]" if negative else "[0, 1]"
