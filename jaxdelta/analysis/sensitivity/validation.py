"""How far estimated effects of removals can be trusted: predicted against measured effects, on the same tokens.

The effect of each unit (a direction, a head, a layer) is averaged over documents, and then compared across units:

    spearman, pearson     correlations of predicted and measured effects
    precision             share of the true top k units that are among the predicted top k
    sum_ratio             sum of predicted over sum of measured effects: allocating a budget needs calibration
    cost                  units to measure in predicted order until all of the true top k are found

Intervals are from the jackknife over n documents: value +- t sqrt((n - 1) / n sum (leave-one-out - their mean)^2), with
Student's t for 95 % and n - 1 degrees of freedom, clipped to the range of the metric. They contain the value itself, which
quantiles of a bootstrap over half a dozen documents need not: a document drawn twice counts its noise twice and lowers
every correlation. Precision and cost are step functions, for which the jackknife fails, and have no interval. Source: Efron
and Tibshirani, An Introduction to the Bootstrap, chapter 11.

The ceiling compares measured effects in one half of the documents with those in the other, for random halves: an estimate
cannot be expected to agree with the measurement better than the measurement with itself. Its interval is the middle 95 %.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import scipy  # loads stats where it is used: every command would wait for it
import xarray as xr

from jaxdelta.analysis.sensitivity import ablation, estimators
from jaxdelta.analysis.sensitivity.ablation import Direction
from jaxdelta.analysis.sensitivity.importance import PARTS, head_sums, michel
from jaxdelta.analysis.sensitivity.maps import checked
from jaxdelta.analysis.sensitivity.objectives import objective_of
from jaxdelta.documents import Document
from jaxdelta.metrics import spearman
from jaxdelta.models.decoder import Decoder
from jaxdelta.results.documents import Documents, Item, of_document, opened, rows_of
from jaxdelta.runs.reverse import Tape, pull_back, record
from jaxdelta.runs.segments import in_document, text_of

SUBJECTS = {
    "direction": "one direction of one state",
    "head_output": "a head's output, whole text",
    "head_state": "a head's state, every boundary",
    "layer_output": "a layer's outputs, whole text",
    "layer_state": "a layer's states, every boundary",
}
Kind = Literal["direction", "head_output", "head_state", "layer_output", "layer_state"]
METRICS = ("spearman", "pearson", "precision", "sum_ratio", "cost")
STEPS = {"precision", "cost"}  # step functions, for which the jackknife fails
RANGES = {  # NaN: the number of units
    "spearman": (-1.0, 1.0),
    "pearson": (-1.0, 1.0),
    "precision": (0.0, 1.0),
    "sum_ratio": (-np.inf, np.inf),
    "cost": (1.0, np.nan),
}
CEILING = "measured, other half"
MEASURED = "measured"
UNITLESS = {"michel"}  # estimators without a meaningful sum
SCHEMA = pa.schema(
    [
        ("kind", pa.string()),
        ("document", pa.string()),
        ("layer", pa.int32()),
        ("head", pa.int32()),
        ("boundary", pa.int32()),
        ("direction", pa.int32()),
        ("estimator", pa.string()),
        ("effect", pa.float64()),
    ]
)


@dataclass(frozen=True)
class EffectComparison:
    """Predicted and measured effects of one kind of unit.

    Attributes:
        kind: of the units.
        units: (layer,), (layer, head) or (layer, head, direction) of each; ``layer`` is the model layer index.
        measured: f64 [documents, units], in nats a scored token.
        predicted: f64 [documents, units] by estimator.
    """

    kind: Kind
    units: list[tuple[int, ...]]
    measured: np.ndarray
    predicted: dict[str, np.ndarray]


@dataclass(frozen=True)
class Score:
    """One number of a validation, with its 95 % interval.

    Attributes:
        kind, estimator, metric: what was compared.
        value, low, high: the number and the ends of its interval; NaN where they do not exist, as with too few documents.
    """

    kind: Kind
    estimator: str
    metric: str
    value: float
    low: float
    high: float


def removals(
    model: Decoder,
    documents: Documents,
    maps: xr.Dataset,
    *,
    scored: Sequence[np.ndarray] | None = None,
    directions: int = 128,
    boundary: int | None = None,
    costly_estimators: bool = False,
    steps: int = 8,
    seed: int = 0,
    worlds: int = 64,
    out: Path | str | None = None,
    name: str = "model",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> pa.Table:
    """Measure the effects of removing directions, heads and layers, and compare them with the estimates of ``maps``.

    Args:
        documents: those of ``maps``, in the same order.
        maps: from :func:`jaxdelta.analysis.sensitivity.maps.sensitivity`, of next-token loss without an intervention.
        scored: Bool[N - 1] for each document, as for ``maps``.
        directions: how many to draw at random from one boundary, the same for all documents; only directions above the
            rounding of their state in every document; 0 is all of them.
        boundary: in tokens seen; None is the middle one of the shortest document.
        costly_estimators: for directions, also Gauss-Newton, exact local effects and integrated gradients.
        steps: midpoints of integrated gradients.
        seed: of the drawn directions.
        worlds: removals in one batch.
        out: results folder. Heads and layers of a document are not measured again, and neither are its directions if the
            same ones are drawn.
        name: of the model, for the manifest.
        progress: called with the number of items done and of all; a document has two items, its directions and its heads.

    Returns:
        A row for each kind, document, unit and estimator (one of them is "measured"): ``kind``, ``document``, ``layer``
        (model layer index), ``head``, ``boundary`` (tokens seen) and ``direction`` (null where the unit is larger),
        ``estimator``, ``effect``: the rise of the mean loss, in nats a scored token ("michel" has no unit).

    Raises:
        TypeError: ``model`` is not a Decoder, or ``documents`` or ``scored`` is of another type.
        ValueError: ``maps`` is of another loss, of other documents or under an intervention, or not all documents have the
            boundary.
        ResultsError: ``out`` cannot be used.
    """
    if maps.attrs["objective"] != "next_token":
        raise ValueError(f"maps are of {maps.attrs['objective']!r}; only the next-token loss is measured here")
    if maps.attrs["intervention"] != "none":
        raise ValueError(
            f"maps are of a model under {maps.attrs['intervention']}; removals are measured in the untouched one"
        )
    documents, _ = checked(model, documents, maps.attrs["segment_tokens"], scored)
    if [d.name for d in documents] != maps.document.values.tolist():
        raise ValueError(f"documents are {[d.name for d in documents]}, the maps of {maps.document.values.tolist()}")
    segment = maps.attrs["segment_tokens"]
    fewest = int((maps.sigma.isel(layer=0, head=0, direction=0).notnull()).sum("boundary").min())
    shared = maps.boundary.values[:fewest].tolist()
    boundary = shared[(fewest - 1) // 2] if boundary is None else boundary
    if boundary not in shared:
        raise ValueError(f"boundary is {boundary}, in tokens seen; the boundaries of every document are {shared}")
    chosen = draw_directions(known_directions(maps, boundary), directions, seed)
    options = dict(boundary=boundary, costly_estimators=costly_estimators, steps=steps)
    drawn = hashlib.sha256(json.dumps(chosen).encode()).hexdigest()
    about = dict(samples=maps.attrs["samples"], labels=maps.attrs["seed"], worlds=worlds)
    results = opened(out, model, name, "removals", segment=segment, **about)
    rows = {d.name: row for row, d in enumerate(documents)}
    items = []
    for d in documents:  # directions of other draws are added to these; heads are measured once
        items.append(Item(of_document(d, part="directions", drawn=drawn, **options), (d, True)))
        items.append(Item(of_document(d, part="heads"), (d, False)))

    def work(values: list[tuple[Document, bool]], progress) -> list[pa.Table]:
        found = []
        for _, group in groupby(values, key=lambda value: value[0].name):
            parts = list(group)
            document = parts[0][0]
            tape = record(model, text_of(model, document.tokens[None], segment=segment))
            own = maps.isel(document=rows[document.name])
            with in_document(document.name):
                for _, of_directions in parts:
                    if of_directions:
                        found.append(_of_directions(model, document, tape, own, chosen, worlds=worlds, **options))
                    else:
                        found.append(_of_heads(model, document, tape, own, worlds=worlds))
        return found

    return rows_of(items, work, results=results, at_once=2, progress=progress)


def known_directions(maps: xr.Dataset, boundary: int) -> list[Direction]:
    """The directions of a boundary that are above the rounding of their state in every document, in order."""
    above = ~maps.below_rounding.sel(boundary=boundary).any("document").transpose("layer", "head", "direction")
    return [
        Direction(int(maps.layer[layer]), int(maps["head"][head]), int(maps.direction[direction]))
        for layer, head, direction in zip(*np.nonzero(above.values), strict=True)
    ]


def draw_directions(known: Sequence[Direction], count: int, seed: int) -> list[Direction]:
    """``count`` random directions of ``known``, without repetition, in order; 0 is all."""
    if not count or count >= len(known):
        return list(known)
    return [known[i] for i in np.sort(np.random.default_rng(seed).choice(len(known), count, replace=False))]


def _of_directions(
    model: Decoder,
    document: Document,
    tape: Tape,
    maps: xr.Dataset,
    chosen: list[Direction],
    *,
    boundary: int,
    costly_estimators: bool,
    steps: int,
    worlds: int,
) -> pa.Table:
    """The rows of one document's directions; ``maps`` is that of the document."""
    measured = ablation.direction_effects(model, tape, document.mask, boundary, chosen, worlds=worlds)
    at = _places(Direction._fields, chosen)
    gates = [maps[n].sel(boundary=boundary, **at) if n in maps else None for n in ("gate", "gate_sample")]
    costly = _costly(model, tape, document.mask, boundary, chosen, steps, worlds) if costly_estimators else {}
    effects = {MEASURED: measured} | _cheap(*gates, maps.scored) | costly
    return _table(_rows("direction", document, chosen, effects, boundary))


def _of_heads(model: Decoder, document: Document, tape: Tape, maps: xr.Dataset, *, worlds: int) -> pa.Table:
    """The rows of one document's heads and layers; ``maps`` is that of the document."""
    heads, layers = list(model.config.heads), [(layer,) for layer in model.config.linear_layers]
    at, rows = _places(("layer", "head"), heads), []
    for part in PARTS:
        first, drawn = head_sums(maps, part)
        for kind, units in (("head", heads), ("layer", layers)):
            measured = ablation.head_effects(model, tape, document.mask, units, part, worlds=worlds)
            sums = [None if x is None else x.sel(at) if kind == "head" else x.sum("head") for x in (first, drawn)]
            effects = {MEASURED: measured} | _cheap(*sums, maps.scored)
            if kind == "head":
                effects["michel"] = michel(first).sel(at).values
            rows += _rows(f"{kind}_{part}", document, units, effects)
    return _table(rows)


def _rows(
    kind: str,
    document: Document,
    units: Sequence[tuple[int, ...]],
    effects: dict[str, np.ndarray],
    boundary: int | None = None,
) -> list[tuple]:
    found = []
    for estimator, values in effects.items():
        for unit, value in zip(units, values, strict=True):
            layer, head, direction = (*unit, None, None)[:3]
            found.append((kind, str(document.name), layer, head, boundary, direction, estimator, float(value)))
    return found


def _table(rows: list[tuple]) -> pa.Table:
    columns = zip(*rows, strict=True)
    return pa.table([pa.array(x, f.type) for x, f in zip(columns, SCHEMA, strict=True)], schema=SCHEMA)


def _places(names: Sequence[str], units: Sequence[tuple[int, ...]]) -> dict[str, xr.DataArray]:
    """An index that selects units by named axes, along a new axis ``unit``."""
    return {n: xr.DataArray(list(x), dims="unit") for n, x in zip(names, zip(*units, strict=True), strict=True)}


def joined(maps: xr.Dataset, rows: pa.Table) -> xr.Dataset:
    """``maps`` with measured effects added: ``direction_measured``, ``head_output_measured`` and so on.

    They are NaN where nothing was measured; the attribute ``validated`` tells what was.
    """
    named = {"direction": ("document", "boundary", "layer", "head", "direction")}
    named |= {f"head_{part}": ("document", "layer", "head") for part in PARTS}
    named |= {f"layer_{part}": ("document", "layer") for part in PARTS}
    place = {d: {value: i for i, value in enumerate(maps[d].values.tolist())} for d in named["direction"]}
    found = {kind: np.full([maps.sizes[d] for d in dims], np.nan) for kind, dims in named.items()}
    measured = [row for row in rows.to_pylist() if row["estimator"] == MEASURED]
    for row in measured:
        found[row["kind"]][tuple(place[d][row[d]] for d in named[row["kind"]])] = row["effect"]
    whole = maps.assign({f"{kind}_measured": (named[kind], x) for kind, x in found.items()})
    unit = maps.attrs["unit"]
    for kind in named:
        whole[f"{kind}_measured"].attrs |= {
            "long_name": f"measured rise of the loss: {SUBJECTS[kind]} removed",
            "units": unit,
        }
    count = len({tuple(row[d] for d in named["direction"][1:]) for row in measured if row["kind"] == "direction"})
    return whole.assign_attrs(validated=f"yes: removals of heads, layers and {count} directions were measured (*_measured)")


def _cheap(gate: xr.DataArray, drawn: xr.DataArray | None, scored: xr.DataArray) -> dict[str, np.ndarray]:
    """Estimates from the summed gates of units and their samples, in one document."""
    first = -np.asarray(gate, np.float64)
    found = {"first order": first, "|first order|": np.abs(first)}
    if drawn is not None:
        half = 0.5 * np.mean(np.square(np.asarray(drawn.transpose("sample", ...), np.float64)), axis=0)
        half = half / float(scored)
        found |= {"fisher / 2": half, "first order + fisher / 2": first + half}
    return found


def _costly(model, tape, mask, boundary, chosen, steps, worlds) -> dict[str, np.ndarray]:
    objective, inputs = objective_of("next_token", tape, mask[None], 0, 0)
    pulled = list(pull_back(model, tape, objective, inputs, cotangents=1))
    parts: dict[str, list[np.ndarray]] = {"Gauss-Newton": [], "exact local": [], "integrated gradients": []}
    for begin in range(0, len(chosen), worlds):
        part = chosen[begin : begin + worlds]
        first, second = estimators.gauss_newton(model, tape, mask, boundary, part)
        parts["Gauss-Newton"].append(first + second)
        parts["exact local"].append(estimators.exact_local(model, tape, pulled, boundary, part))
        path = estimators.integrated_gradients(model, tape, mask, boundary, part, steps=steps)
        parts["integrated gradients"].append(path)
    return {name: np.concatenate(x) for name, x in parts.items()}


def scores(comparison: EffectComparison, *, top: int | None = None, halves: int = 200, seed: int = 0) -> list[Score]:
    """All metrics of all estimators, and the ceiling.

    Args:
        top: k of precision and cost; None is a tenth of the units.
        halves: number of random halves for the ceiling.
        seed: of the halves.
    """
    documents, units = comparison.measured.shape
    top = max(1, units // 10) if top is None else top
    found = []
    for estimator, predicted in comparison.predicted.items():

        def over(rows: np.ndarray, predicted=predicted) -> tuple[float, ...]:
            return _metrics(predicted[rows].mean(axis=0), comparison.measured[rows].mean(axis=0), top)

        every = np.arange(documents)
        value = over(every)
        left_out = [over(np.delete(every, i)) for i in every] if documents > 2 else []
        of_estimator = _with_interval(comparison.kind, estimator, value, _jackknife(value, left_out, units))
        found += [_without_value(s) if s.metric == "sum_ratio" and estimator in UNITLESS else s for s in of_estimator]
    if documents > 1:
        rng = np.random.default_rng(seed)
        split = []
        for _ in range(halves):
            order = rng.permutation(documents)
            one, other = order[: documents // 2], order[documents // 2 :]
            split.append(_metrics(comparison.measured[one].mean(axis=0), comparison.measured[other].mean(axis=0), top))
        interval = [_over_finite(np.percentile, split, q) for q in (2.5, 97.5)]
        found += _with_interval(comparison.kind, CEILING, _over_finite(np.mean, split), interval)
    return found


def _jackknife(value: Sequence[float], left_out: Sequence[Sequence[float]], units: int) -> list[np.ndarray]:
    """Ends of the 95 % interval of every metric; NaN where a leave-one-out value does not exist."""
    n = len(left_out)
    if not n:
        return [np.full(len(METRICS), np.nan)] * 2
    spread = np.asarray(left_out, np.float64)
    error = np.sqrt((n - 1) / n * np.sum((spread - spread.mean(axis=0)) ** 2, axis=0))
    reach = scipy.stats.t.ppf(0.975, n - 1) * np.where([metric in STEPS for metric in METRICS], np.nan, error)
    lowest, highest = np.array([RANGES[metric] for metric in METRICS]).T
    return [
        np.clip(np.asarray(value) + sign * reach, lowest, np.where(np.isnan(highest), units, highest)) for sign in (-1, 1)
    ]


def _without_value(score: Score) -> Score:
    return replace(score, value=np.nan, low=np.nan, high=np.nan)


def _with_interval(kind: Kind, estimator: str, value: Iterable[float], interval: Sequence[Iterable[float]]) -> list[Score]:
    return [
        Score(kind, estimator, *row)
        for row in zip(METRICS, map(float, value), map(float, interval[0]), map(float, interval[1]), strict=True)
    ]


def _over_finite(statistic: Callable[..., float], spread: Sequence, *arguments: float) -> list[float]:
    """A statistic of each metric over the draws in which it is finite; NaN where none is."""
    columns = np.asarray(spread, np.float64).reshape(-1, len(METRICS)).T
    kept = (column[np.isfinite(column)] for column in columns)
    return [float(statistic(x, *arguments)) if len(x) else float("nan") for x in kept]


def _metrics(predicted: np.ndarray, measured: np.ndarray, top: int) -> tuple[float, ...]:
    if not np.isfinite([*predicted, *measured]).all() or not measured.any():
        return (np.nan,) * len(METRICS)  # no measured effect to compare with
    constant = np.ptp(predicted) == 0 or np.ptp(measured) == 0
    pearson = np.nan if constant else np.corrcoef(predicted, measured)[0, 1]
    true = set(np.argsort(-measured, kind="stable")[:top].tolist())
    order = np.argsort(-predicted, kind="stable").tolist()
    hit = len(true.intersection(order[:top])) / top
    cost = max(order.index(unit) for unit in true) + 1
    total = measured.sum()
    return spearman(predicted, measured), pearson, hit, predicted.sum() / total if total else np.nan, float(cost)


def from_rows(rows: pa.Table) -> list[EffectComparison]:
    """The comparisons, one for each kind, of rows of :func:`removals` over all their documents."""
    found: dict[str, dict[str, dict[str, dict[tuple[int, ...], float]]]] = {}
    for row in rows.to_pylist():
        unit = tuple(row[name] for name in ("layer", "head", "direction") if row[name] is not None)
        of_kind = found.setdefault(row["kind"], {}).setdefault(row["estimator"], {})
        of_kind.setdefault(row["document"], {})[unit] = row["effect"]
    comparisons = []
    for kind, estimators_of in found.items():
        effects: dict[str, Any] = {
            e: np.array([list(units.values()) for units in d.values()]) for e, d in estimators_of.items()
        }
        units = list(next(iter(next(iter(estimators_of.values())).values())))
        comparisons.append(EffectComparison(kind, units, effects.pop(MEASURED), effects))
    return comparisons
