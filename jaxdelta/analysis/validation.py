"""How far an estimate of a removal's effect can be trusted: predicted against measured, on the same tokens.

Effects are averaged over documents, unit by unit (a direction, a head, a layer), and compared across units:

    spearman, pearson     correlations of predicted and measured effects
    precision             share of the k units that matter most which are among the k predicted to
    sum_ratio             sum of predicted over sum of measured effects: an allocation of a budget needs calibration
    cost                  units measured in predicted order until the true top k are all among them

Intervals are percentiles of a bootstrap over documents. The ceiling compares measured effects of one half of the documents
with those of the other, over random halves: no estimate need agree with the measurement better than it does with itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pyarrow as pa
import xarray as xr
from scipy import stats

from jaxdelta.analysis import ablation, estimators
from jaxdelta.analysis.ablation import Direction
from jaxdelta.analysis.importance import PARTS, head_sums, michel
from jaxdelta.analysis.objectives import objective_of
from jaxdelta.analysis.sensitivity import as_batch
from jaxdelta.models.decoder import Decoder
from jaxdelta.reverse import pull_back, record

Kind = Literal["direction", "head_output", "head_state", "layer_output", "layer_state"]
METRICS = ("spearman", "pearson", "precision", "sum_ratio", "cost")
CEILING = "measured, other half"
MEASURED = "measured"
UNITLESS = {"michel"}  # estimators whose sum means nothing


@dataclass(frozen=True)
class Comparison:
    """Predicted and measured effects of one kind of unit.

    Attributes:
        kind: of the units.
        units: what each is.
        measured: f64 [documents, units], in nats a scored token.
        predicted: f64 [documents, units] by estimator.
    """

    kind: Kind
    units: list[tuple[int, ...]]
    measured: np.ndarray
    predicted: dict[str, np.ndarray]


@dataclass(frozen=True)
class Score:
    """One number of a validation, with a 95 % interval over documents; NaN where there are too few.

    Attributes:
        kind, estimator, metric: what it is of.
        value, low, high: the number and its interval.
    """

    kind: Kind
    estimator: str
    metric: str
    value: float
    low: float
    high: float


def compare(
    model: Decoder,
    tokens: Sequence[np.ndarray],
    maps: xr.Dataset,
    *,
    scored: Sequence[np.ndarray] | None = None,
    directions: int = 128,
    boundary: int | None = None,
    dear: bool = False,
    steps: int = 8,
    seed: int = 0,
    worlds: int = 64,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Comparison]:
    """Measure removals and set the estimates of ``maps`` beside them.

    Args:
        tokens: the documents of ``maps``, in its order.
        maps: of :func:`jaxdelta.analysis.sensitivity.sensitivity`, for next-token loss without an intervention.
        directions: how many, drawn at random from all of one boundary, the same in every document; 0 is all of them.
        boundary: by index; None is the middle one of the shortest document.
        dear: also Gauss-Newton, exact local effects and integrated gradients (``steps`` midpoints), for directions.
        worlds: removed at once.
        progress: called with the documents done and their number.

    Raises:
        ValueError: ``maps`` is of another loss, or the boundary is not one of every document.
    """
    if maps.attrs["objective"] != "next_token":
        raise ValueError(f"maps are of {maps.attrs['objective']!r}; only the next-token loss is measured here")
    segment, c = maps.attrs["segment_tokens"], model.config
    fewest = int((maps.sigma.isel(layer=0, head=0, direction=0).notnull()).sum("boundary").min())
    boundary = (fewest - 1) // 2 if boundary is None else boundary
    if not 0 <= boundary < fewest:
        raise ValueError(f"boundary is {boundary}; every document has boundaries 0 to {fewest - 1}")
    chosen = draw_directions(len(c.linear_layers), c.num_value_heads, c.max_rank, directions, seed)
    heads = [(layer, head) for layer in range(len(c.linear_layers)) for head in range(c.num_value_heads)]
    layers = [(layer,) for layer in range(len(c.linear_layers))]
    measured: dict[str, list[np.ndarray]] = {}
    dearer: dict[str, list[np.ndarray]] = {}
    for row, document in enumerate(tokens):
        batch, lengths, mask = as_batch(model, document, None if scored is None else scored[row], segment)
        tape, mask = record(model, batch, lengths=lengths, segment=segment), mask[0]
        found = {"direction": ablation.direction_effects(model, tape, mask, boundary, chosen, worlds=worlds)}
        for part in PARTS:
            found[f"head_{part}"] = ablation.head_effects(model, tape, mask, heads, part, worlds=worlds)
            found[f"layer_{part}"] = ablation.head_effects(model, tape, mask, layers, part, worlds=worlds)
        for kind, effects in found.items():
            measured.setdefault(kind, []).append(effects)
        if dear:
            for name, effects in _dear(model, tape, mask, boundary, chosen, steps, worlds).items():
                dearer.setdefault(name, []).append(effects)
        progress(row + 1, len(tokens))
    at = maps.isel(boundary=boundary)
    picked = {name: np.array(x) for name, x in zip(("layer", "head", "direction"), zip(*chosen, strict=True), strict=True)}
    picked = {name: xr.DataArray(x, dims="unit") for name, x in picked.items()}
    cheap = _cheap(at.gate.isel(picked), at.gate_sample.isel(picked) if "gate_sample" in maps else None, maps.scored)
    dearer = {name: np.stack(effects) for name, effects in dearer.items()}
    compared = [Comparison("direction", list(map(tuple, chosen)), np.stack(measured["direction"]), cheap | dearer)]
    for part in PARTS:
        first, drawn = head_sums(maps, part)
        for kind, units in (("head", heads), ("layer", layers)):
            sums = [x if x is None or kind == "head" else x.sum("head") for x in (first, drawn)]
            flat = [x if x is None else x.stack(unit=("layer", "head")) if kind == "head" else x for x in sums]
            predicted = _cheap(*flat, maps.scored)
            if kind == "head":
                predicted["michel"] = michel(first).stack(unit=("layer", "head")).transpose("document", "unit").values
            name = f"{kind}_{part}"
            compared.append(Comparison(name, units, np.stack(measured[name]), predicted))
    return compared


def draw_directions(layers: int, heads: int, directions: int, count: int, seed: int) -> list[Direction]:
    """``count`` of all directions of a boundary, without repetition, in order; 0 is all."""
    everything = [Direction(*map(int, i)) for i in np.ndindex(layers, heads, directions)]
    if not count or count >= len(everything):
        return everything
    picked = np.sort(np.random.default_rng(seed).choice(len(everything), count, replace=False))
    return [everything[i] for i in picked]


def _cheap(gate: xr.DataArray, drawn: xr.DataArray | None, scored: xr.DataArray) -> dict[str, np.ndarray]:
    """Estimates from summed gates [document, unit] and their samples."""
    first = -np.asarray(gate.transpose("document", ...), np.float64)
    found = {"first order": first, "|first order|": np.abs(first)}
    if drawn is not None:
        half = 0.5 * np.mean(np.square(np.asarray(drawn.transpose("sample", "document", ...), np.float64)), axis=0)
        half = half / np.asarray(scored)[:, None]
        found |= {"fisher / 2": half, "first order + fisher / 2": first + half}
    return found


def _dear(model, tape, mask, boundary, chosen, steps, worlds) -> dict[str, np.ndarray]:
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


def scores(comparison: Comparison, *, top: int | None = None, draws: int = 1000, seed: int = 0) -> list[Score]:
    """All metrics of all estimators, and the ceiling; ``top`` is k, a tenth of the units where None."""
    rng = np.random.default_rng(seed)
    documents, units = comparison.measured.shape
    top = max(1, units // 10) if top is None else top
    resampled = [rng.integers(0, documents, documents) for _ in range(draws if documents > 2 else 0)]
    found = []
    for estimator, predicted in comparison.predicted.items():
        value = _metrics(predicted.mean(axis=0), comparison.measured.mean(axis=0), top)
        spread = [_metrics(predicted[r].mean(axis=0), comparison.measured[r].mean(axis=0), top) for r in resampled]
        of_estimator = _with_interval(comparison.kind, estimator, value, spread)
        found += [_without_value(s) if s.metric == "sum_ratio" and estimator in UNITLESS else s for s in of_estimator]
    if documents > 1:
        halves = []
        for _ in range(min(draws, 200)):
            order = rng.permutation(documents)
            one, other = order[: documents // 2], order[documents // 2 :]
            halves.append(_metrics(comparison.measured[one].mean(axis=0), comparison.measured[other].mean(axis=0), top))
        found += _with_interval(comparison.kind, CEILING, _over_finite(np.mean, halves), halves)
    return found


def _without_value(score: Score) -> Score:
    return replace(score, value=np.nan, low=np.nan, high=np.nan)


def _with_interval(kind: Kind, estimator: str, value: Sequence[float], spread: Sequence) -> list[Score]:
    low, high = (_over_finite(np.percentile, spread, q) for q in (2.5, 97.5))
    return [
        Score(kind, estimator, *row)
        for row in zip(METRICS, map(float, value), map(float, low), map(float, high), strict=True)
    ]


def _over_finite(statistic: Callable[..., float], spread: Sequence, *arguments: float) -> list[float]:
    """A statistic of each metric over the draws in which it exists; NaN where it does in none."""
    columns = np.asarray(spread, np.float64).reshape(-1, len(METRICS)).T
    kept = (column[np.isfinite(column)] for column in columns)
    return [float(statistic(x, *arguments)) if len(x) else float("nan") for x in kept]


def _metrics(predicted: np.ndarray, measured: np.ndarray, top: int) -> tuple[float, ...]:
    constant = np.ptp(predicted) == 0 or np.ptp(measured) == 0
    spearman = np.nan if constant else stats.spearmanr(predicted, measured).statistic
    pearson = np.nan if constant else np.corrcoef(predicted, measured)[0, 1]
    true = set(np.argsort(-measured, kind="stable")[:top].tolist())
    order = np.argsort(-predicted, kind="stable").tolist()
    hit = len(true.intersection(order[:top])) / top
    cost = max(order.index(unit) for unit in true) + 1
    total = measured.sum()
    return spearman, pearson, hit, predicted.sum() / total if total else np.nan, float(cost)


def to_rows(comparisons: Sequence[Comparison], documents: Sequence[str]) -> pa.Table:
    """One row an effect in nats: kind, layer, head, direction (null where the unit is wider), document, estimator."""
    rows = []
    for comparison in comparisons:
        named = {MEASURED: comparison.measured} | comparison.predicted
        for estimator, effects in named.items():
            for document, values in zip(documents, effects, strict=True):
                for unit, value in zip(comparison.units, values, strict=True):
                    layer, head, direction = (*unit, None, None)[:3]
                    rows.append((comparison.kind, layer, head, direction, document, estimator, float(value)))
    names = ("kind", "layer", "head", "direction", "document", "estimator", "effect")
    types = (pa.string(), pa.int32(), pa.int32(), pa.int32(), pa.string(), pa.string(), pa.float64())
    columns = zip(*rows, strict=True)
    return pa.table({n: pa.array(x, t) for n, x, t in zip(names, columns, types, strict=True)})


def from_rows(rows: pa.Table) -> list[Comparison]:
    """The comparisons of :func:`to_rows`, of all documents of the rows together."""
    found: dict[str, dict[str, dict[str, dict[tuple[int, ...], float]]]] = {}
    for row in rows.to_pylist():
        unit = tuple(row[name] for name in ("layer", "head", "direction") if row[name] is not None)
        of_kind = found.setdefault(row["kind"], {}).setdefault(row["estimator"], {})
        of_kind.setdefault(row["document"], {})[unit] = row["effect"]
    comparisons = []
    for kind, estimators_of in found.items():
        effects = {e: np.array([list(units.values()) for units in d.values()]) for e, d in estimators_of.items()}
        units = list(next(iter(estimators_of[MEASURED].values())))
        comparisons.append(Comparison(kind, units, effects.pop(MEASURED), effects))
    return comparisons
