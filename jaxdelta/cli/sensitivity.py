"""``jaxdelta sensitivity``: estimated effects on the loss and, on request, measured ones."""

import argparse

from jaxdelta.analysis.sensitivity import validation
from jaxdelta.analysis.sensitivity.maps import sensitivity_maps
from jaxdelta.cli.arguments import SEED, add_parameter, add_run_arguments, default_of, inputs_of
from jaxdelta.cli.progress import RUNNING, follow, progress
from jaxdelta.report.terminal import Terminal


def add_sensitivity(commands) -> None:
    """Add the command to a parser's ``commands``."""
    maps = commands.add_parser(
        "sensitivity",
        help="what the loss would do to every singular direction, write strength, decay and head",
        description="Derivatives of the loss from one backward pass, estimated effects of removals, and on request how "
        "far the estimates agree with measured removals.",
    )
    maps.set_defaults(call=sensitivity_command)
    add_run_arguments(maps, "sensitivity", sensitivity_maps)
    said = "kl: divergence from the untouched model, whose first order is zero"
    add_parameter(maps, sensitivity_maps, "loss", said, choices=("next_token", "kl"))
    add_parameter(maps, sensitivity_maps, "samples", "labels drawn for the Fisher part")
    add_parameter(maps, sensitivity_maps, "seed", "of the labels", type=SEED)
    maps.add_argument("--rank", type=int, help="cut every state to this rank at every boundary, and derive through the cut")
    maps.add_argument(
        "--frozen-basis", action="store_true", help="with --rank: take the kept directions as constants in the derivative"
    )
    maps.add_argument("--validate", action="store_true", help="measure removals on the same tokens")
    maps.add_argument(
        "--directions",
        type=int,
        help="with --validate: directions measured, drawn at random; 0: all; "
        f"default: {default_of(validation.removals, 'directions')}",
    )
    maps.add_argument(
        "--costly-estimators",
        "--dear",
        action="store_true",
        help="with --validate: also Gauss-Newton, exact local effects and integrated gradients, for directions",
    )


def sensitivity_command(arguments: argparse.Namespace, console: Terminal) -> None:
    """Compute sensitivities and, on request, measured removals; write and print the results."""
    from jaxdelta.report import sensitivity as report
    from jaxdelta.results.folder import finished_rows, to_zarr, write_whole
    from jaxdelta.runs.interventions import Truncate

    if arguments.validate and (arguments.loss != "next_token" or arguments.rank is not None):
        raise ValueError("--validate measures removals by the next-token loss of the untouched model: no --loss, no --rank")
    for option in ("directions", "costly_estimators"):
        if getattr(arguments, option) not in (None, False) and not arguments.validate:
            raise ValueError(f"--{option.replace('_', '-')} is for --validate, which measures removals")
    chosen = {} if arguments.directions is None else {"directions": arguments.directions}
    if arguments.directions is not None and arguments.directions < 0:
        raise ValueError(f"--directions is {arguments.directions}; expected at least 1, or 0 for all")
    out, model, documents = inputs_of(arguments, "sensitivity")
    with progress(console) as bar:
        maps = sensitivity_maps(
            model,
            documents,
            segment=arguments.segment,
            loss=arguments.loss,
            samples=arguments.samples,
            seed=arguments.seed,
            intervention=None if arguments.rank is None else Truncate(arguments.rank),
            frozen_basis=arguments.frozen_basis,
            out=out,
            name=arguments.model,
            progress=follow(bar, RUNNING),
        )
        removals = out / "removals"
        rows = finished_rows(removals)  # of an earlier call: what was measured of these maps
        if arguments.validate:
            rows = validation.removals(
                model,
                documents,
                maps,
                **chosen,
                costly_estimators=arguments.costly_estimators,
                seed=arguments.seed,
                out=removals,
                name=arguments.model,
                progress=follow(bar, "measuring removals", total=len(documents)),
            )
    comparisons = [] if rows is None else validation.from_rows(rows)
    scores = [s for c in comparisons for s in validation.scores(c)]
    if rows is not None:
        maps = validation.joined(maps, rows)
        write_whole(out / "maps.zarr", lambda folder: to_zarr(maps, folder))
    figures = report.write_figures(out, maps, comparisons)
    files = ["maps.zarr", "manifest.json", *(file.name for file in [*figures, *report.write_heads(maps, out)])]
    measured = report.write_validation(removals, comparisons, scores) if comparisons else []
    for comparison in comparisons:
        console.print(report.score_table([s for s in scores if s.kind == comparison.kind], comparison))
    for table in report.head_tables(maps, trust=report.trust_line(scores)):
        console.print(table)
    if measured:
        console.written(removals, ["rows.csv", "rows.parquet", "manifest.json", *(file.name for file in measured)])
    console.written(out, files)
