"""Sensitivity of the loss to every singular direction of every carried state, to every write strength, decay and head.

A gate on direction i of a state S = sum_i sigma_i u_i v_i^T is a factor on its term. The derivative of the loss L with
respect to it, at 1, is with G = dL/dS

    gate_i = sigma_i u_i^T G v_i

u_i and v_i are constants: no SVD is differentiated. They are computed in f64 (:mod:`jaxdelta.ops.directions`), so faint
directions are as accurate as strong ones. Directions with ``below_rounding`` cannot be told from the rounding of the f32
state; datasets keep them, rankings leave them out. Within a block of equal singular values, single gates depend on the
choice of basis and only their sum is meaningful, so figures by rank use sums (:func:`tail_gate`, :func:`tail_fisher`). If a
state is only read, all its gates together scale o, and the norm of o cancels this: their sum has almost no first-order
signal.

The effect of removing a direction is estimated as -gate + fisher / 2. For a model that fits its text the first order
vanishes; the second is the Fisher information of the gate, from labels y that the model itself draws:

    fisher_i = E[(d sum_t l_t(y_t) / d gate_i)^2] / N        for N scored tokens

Labels of different tokens are independent, so cross terms vanish in expectation, and one backward pass of the summed loss
suffices for each sample. fisher is the Gauss-Newton curvature of the mean loss. Sources: optimal brain damage, LeCun,
Denker, Solla 1990; gates of heads, Michel, Levy, Neubig, arXiv 1905.10650; Fisher masks, Kwon et al., arXiv 2204.09656.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

from jaxdelta.analysis.compare import padded_length, with_boundary
from jaxdelta.analysis.labels import head_coordinates, labelled, without_padding
from jaxdelta.analysis.sensitivity.objectives import LogitDifference, Loss, OfHidden, OfLogits, has_fisher, objective_of
from jaxdelta.arguments import shown, whole_number
from jaxdelta.dims import HIGHEST
from jaxdelta.documents import Document, in_rows
from jaxdelta.models.config import DecoderConfig
from jaxdelta.models.decoder import Decoder, check_model
from jaxdelta.ops.directions import below_rounding, gate_derivatives
from jaxdelta.results.documents import Documents, Item, as_documents, joined_documents, of_document, opened, worked
from jaxdelta.runs.capacity import reverse_on_host
from jaxdelta.runs.interventions import Intervention, check_intervention, described, started
from jaxdelta.runs.observers import Edit
from jaxdelta.runs.reverse import Pulled, Tape, pull_back, record
from jaxdelta.runs.segments import check_tokens, in_document, num_boundaries, text_of

GAUGE = (
    "gates of single directions inside a block of equal singular values depend on the basis; use tail_gate, tail_fisher. "
    "All gates of a head together have almost no first-order signal where its state is only read: the norm cancels them."
)


def sensitivity(
    model: Decoder,
    documents: Documents | np.ndarray,
    segment: int = 256,
    *,
    scored: np.ndarray | Sequence[np.ndarray] | None = None,
    loss: Loss = "next_token",
    samples: int = 8,
    seed: int = 0,
    intervention: Intervention | None = None,
    frozen_basis: bool = False,
    edits: Sequence[Edit] = (),
    max_length: int | None = None,
    on_host: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> xr.Dataset:
    """Derivatives of the loss with respect to every direction of every carried state, every beta, g and head.

    Args:
        documents: token ids of one document, or several (texts, rows of ids, Documents, or a mapping from names) that run
            together as rows of a batch.
        segment: tokens between two boundaries.
        scored: Bool[N - 1] for each document, whether the prediction of token i + 1 counts, for example only the answer of
            a task; None is all. A Document may have its own mask.
        loss: "next_token", the mean over scored tokens; "kl", the divergence from the untouched model, whose first order is
            identically zero and whose second is the Fisher part; a :class:`LogitDifference`; or a custom objective,
            :class:`OfHidden` or :class:`OfLogits`.
        samples: labels drawn for the Fisher part; with 0 there is none, and effects are of first order.
        seed: of the labels, 0 .. 2^64 - 1.
        intervention: at every boundary; derivatives pass through it, for a truncation the exact ones.
        frozen_basis: take the directions that a truncation keeps as constants instead, which is not the exact derivative.
        edits: of named arrays in every segment; derivatives are those of the edited run.
        max_length: least number of places of the key/value cache; calls with the same number share a compiled program.
        on_host: keep the states of the boundaries in host memory.
        progress: called with the number of segments done, forward and backward, and of all.

    Returns:
        A dataset with axes as in :mod:`jaxdelta.analysis.labels`, NaN where a document has ended. Derivatives are in nats a
        scored token, or in the unit of the objective.

        - (document): ``loss``, the mean of the objective (for "kl" the next-token loss), and ``scored``, the scored tokens;
        - (document, boundary, layer, head, direction): ``sigma``, ``below_rounding``, ``gate``, ``fisher``, ``effect``;
        - (document, token, layer, head): ``beta_sensitivity`` = dL/dbeta (with a ``step`` axis if n_h > 1) and
          ``g_sensitivity`` = dL/dg;
        - (document, segment, layer, head): ``head_output``, the derivative for a gate on a head's output after its norm;
        - (document, boundary, layer, head): ``head_state``, the derivative for a gate on its carried state;
        - with a leading ``sample``: ``*_sample``, derivatives of the summed loss of sampled labels;
        - (document, boundary), with a truncation: ``without_gap``, the number of states whose exact derivative does not
          exist; it is then taken with constant directions.

        Documents without a boundary are left out; the attribute ``without_boundary`` names them.

    Raises:
        TypeError: an argument is of another type, for example a model's name.
        ValueError: no token is scored, no document has a boundary, or an argument is out of range.
        NonFiniteError: a NaN or an infinity; names layer, head and boundary.
    """
    documents, without = checked(model, documents, segment, scored)
    names = [d.name for d in documents]
    tokens, lengths = in_rows([d.tokens for d in documents])
    counts, _ = in_rows([d.mask for d in documents])
    _check_options(loss, samples, intervention, frozen_basis)
    seed, max_length = whole_number("seed", seed), None if max_length is None else whole_number("max_length", max_length)
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed is {seed}; expected a number from 0 to 2^64 - 1")
    drawn = samples if has_fisher(loss) else 0
    if isinstance(loss, LogitDifference):
        for words in (loss.words, loss.others):
            check_tokens(np.asarray(words), model.config.vocab_size)
    text = text_of(model, tokens, segment=segment, lengths=lengths)
    tape = record(
        model,
        text,
        intervention=intervention,
        edits=edits,
        max_length=max_length,
        on_host=on_host,
        progress=lambda done, total: progress(done, 2 * total),
    )
    objective, inputs = objective_of(loss, tape, counts, drawn, seed)
    collected = _Collected(tape, drawn)
    for pulled in pull_back(model, tape, objective, inputs, cotangents=1 + drawn, frozen_basis=frozen_basis):
        collected.add(pulled)
        progress(2 * text.count - pulled.index, 2 * text.count)
    maps = _dataset(model, tape, collected, counts.sum(axis=1), loss, seed, names)
    maps.attrs["without_boundary"] = without
    if hasattr(intervention, "frozen"):
        maps.attrs["derivative"] = "frozen basis" if frozen_basis else "exact"
    return maps


def sensitivity_maps(
    model: Decoder,
    documents: Documents,
    *,
    segment: int = 256,
    loss: Literal["next_token", "kl"] = "next_token",
    samples: int = 8,
    seed: int = 0,
    intervention: Intervention | None = None,
    frozen_basis: bool = False,
    out: Path | str | None = None,
    name: str = "model",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> xr.Dataset:
    """:func:`sensitivity` of documents one after the other, which needs the least memory, and resumable.

    Args:
        out: results folder; documents that are finished there are not run again.
        name: of the model, for the manifest.

    Raises:
        TypeError, ValueError: as :func:`sensitivity`.
        NonFiniteError: as :func:`sensitivity`; also names the document.
        MemoryError: not even one document fits; names a setting that would.
        ResultsError: ``out`` cannot be used.
    """
    _check_options(loss, samples, intervention, frozen_basis)
    documents, without = checked(model, documents, segment)
    length = padded_length(documents, segment)
    if intervention is not None:
        started(intervention, model.init_carry(1, 1), range(segment, length, segment))
    on_host = reverse_on_host(
        model.config,
        dtype=model.dtype.name,
        segment=segment,
        max_length=max(len(d.tokens) for d in documents),
        cotangents=1 + samples,
    )
    options = dict(segment=segment, loss=loss, samples=samples, seed=seed, frozen_basis=frozen_basis)
    kept = dict(intervention=described(intervention)) if out is not None else {}
    results = opened(out, model, name, "sensitivity", **options, **kept)

    def work(values: list[Document], progress) -> list[xr.Dataset]:
        (document,) = values
        memory = dict(max_length=length, on_host=on_host)
        with in_document(document.name):
            return [sensitivity(model, [document], intervention=intervention, progress=progress, **memory, **options)]

    items = [Item(of_document(d), d, 2 * -(-len(d.tokens) // segment)) for d in documents]
    whole = joined_documents(worked(items, work, results=results, progress=progress))
    whole["below_rounding"] = whole.below_rounding.fillna(True).astype(bool).assign_attrs(whole.below_rounding.attrs)
    whole.attrs["without_boundary"] = without
    if results is not None:
        results.finish_arrays("maps", whole)
    return whole


def _check_options(loss: Loss, samples: int, intervention: Intervention | None, frozen_basis: bool) -> None:
    if not isinstance(loss, LogitDifference | OfHidden | OfLogits) and not (
        isinstance(loss, str) and loss in ("next_token", "kl")
    ):
        raise ValueError(f"loss is {shown(loss)}; expected 'next_token', 'kl', a LogitDifference, OfHidden or OfLogits")
    check_intervention(intervention)
    if whole_number("samples", samples) < 0:
        raise ValueError(f"samples is {samples}; expected at least 0")
    if frozen_basis and not hasattr(intervention, "frozen"):
        raise ValueError(
            f"frozen_basis is for an intervention that has one, such as a truncation; intervention is {shown(intervention)}"
        )
    if loss == "kl" and not samples:
        raise ValueError("the first order of the KL divergence is identically zero; it needs samples of at least 1")


def checked(model: Decoder, documents: Any, segment: int, scored: Any = None) -> tuple[list[Document], list[str]]:
    """Documents from any kind of input, also one row of ids, with their masks, and the names of those left out.

    Documents are left out if they have no boundary after which a token is predicted.

    Raises:
        TypeError: ``scored`` is not a list of masks, or ``documents`` is not documents.
        ValueError: no document has a boundary, or a mask does not fit.
    """
    check_model(model)
    if scored is not None and (not np.iterable(scored) or isinstance(scored, str | bytes)):
        raise TypeError(f"scored is {shown(scored)}; expected Bool[N - 1] for each document, or None")
    if not isinstance(documents, str | bytes | Mapping) and np.iterable(documents):
        rows = list(np.asarray(documents) if hasattr(documents, "shape") else documents)
        if rows and not isinstance(rows[0], str | Document) and not np.shape(rows[0]):
            documents, scored = [np.asarray(rows)], None if scored is None else [scored]
    segment = whole_number("segment", segment)
    if segment < 1:
        raise ValueError(f"segment is {segment}; expected at least 1 token")
    found = as_documents(documents, model)
    if scored is not None:
        masks = list(scored)
        if len(masks) != len(found):
            raise ValueError(
                f"there are {len(found)} documents and {len(masks)} masks of scored tokens; "
                "expected a list of one Bool[N - 1] for each document"
            )
        found = [d if mask is None else replace(d, scored=np.asarray(mask)) for d, mask in zip(found, masks, strict=True)]
    kept = with_boundary(found, segment)
    names = {d.name for d in kept}
    return kept, [d.name for d in found if d.name not in names]


_gates = jax.jit(gate_derivatives)


class _Collected:
    """Collects the arrays of a pull-back, the last segment first; they move to the host while the next one is computed."""

    def __init__(self, tape: Tape, samples: int):
        self.tape, self.text, self.samples = tape, tape.text, samples
        self.parts: list[dict[str, np.ndarray]] = []
        self._waiting: dict[str, Any] | None = None

    def add(self, pulled: Pulled) -> None:
        part = {"values": pulled.values, "beta": pulled.beta[0], "g": pulled.g[0], "head_output": pulled.output}
        if pulled.index:
            S = jnp.asarray(self.tape.starts[pulled.index].recurrent.S)
            part["sigma"], part["gate"] = _gates(S, pulled.state)
            cut = self.tape.intervention
            if hasattr(cut, "without_gap"):
                memory = self.tape.starts[pulled.index].memory
                part["without_gap"] = jnp.sum(cut.without_gap(self.tape.arriving(pulled.index), memory), axis=(0, 2))
            part["head_state"] = jnp.einsum("lbhkv,rlbhkv->rlbh", S, pulled.state, precision=HIGHEST)
        self._flush()
        self._waiting = part

    def _flush(self) -> None:
        if self._waiting is not None:
            self.parts.append({name: np.asarray(x) for name, x in self._waiting.items()})
            self._waiting = None

    def stacked(self, name: str) -> np.ndarray:
        """The array ``name`` of all segments that have it, in the order of the text, along a new first axis."""
        self._flush()
        return np.stack([part[name] for part in reversed(self.parts) if name in part])

    @property
    def boundaries(self) -> np.ndarray:
        """Tokens seen at each boundary after which something is predicted."""
        return self.text.segment * np.arange(1, 1 + num_boundaries(int(self.text.lengths.max()), self.text.segment))

    def at_boundaries(self, x: np.ndarray) -> np.ndarray:
        """``x`` [B, N - 1, ...] at the boundaries, NaN where a document has ended and nothing more is predicted."""
        return _where(self.text.lengths[:, None] > self.boundaries + 1, x[:, : len(self.boundaries)])

    def in_segments(self, x: np.ndarray) -> np.ndarray:
        """``x`` [B, N, ...], NaN where a document has ended before the segment begins."""
        return _where(self.text.lengths[:, None] > self.text.segment * np.arange(self.text.count), x)

    def by_token(self, name: str, steps: int) -> np.ndarray:
        """[B, tokens, L, H, steps] of the first objective, NaN where a document has ended."""
        x = np.moveaxis(self.stacked(name), (0, 1, 2), (1, 3, 0))  # N L B P H -> B N P L H
        x = np.moveaxis(x.reshape(len(x), self.text.count * self.text.segment, steps, *x.shape[3:]), 2, -1)
        x = x[:, : self.text.lengths.max()]
        return _where(np.arange(x.shape[1]) < self.text.lengths[:, None], x)

    def by_sample(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """First order [B, N, L, H, ...], and the samples of the summed loss [R, B, N, L, H, ...]."""
        x = np.moveaxis(self.stacked(name), (0, 1, 2, 3), (2, 0, 3, 1))  # N R L B ... -> R B N L ...
        masked = self.in_segments if name == "head_output" else self.at_boundaries
        x = np.stack([masked(part) for part in x])
        return x[0], x[1:]


def _where(valid: np.ndarray, x: np.ndarray) -> np.ndarray:
    return np.where(valid.reshape(valid.shape + (1,) * (x.ndim - 2)), x, np.nan)


def _dataset(model, tape: Tape, collected: _Collected, count: np.ndarray, loss: Loss, seed: int, names) -> xr.Dataset:
    """Named arrays of a pull-back."""
    c = model.config
    n = c.num_householder

    def first_order(x: np.ndarray) -> np.ndarray:
        return np.where(np.isnan(x), np.nan, 0.0).astype(x.dtype) if loss == "kl" else x

    per_head, per_token = ("document", "boundary", "layer", "head"), ("document", "token", "layer", "head")
    sigma = collected.at_boundaries(np.moveaxis(collected.stacked("sigma"), (0, 1, 2), (1, 2, 0)))
    longer_sides = np.array([max(sizes.key_dim, sizes.value_dim) for sizes in c.linear_sizes], np.float32)
    beta = first_order(collected.by_token("beta", n))
    found: dict[str, tuple] = {
        "sigma": ((*per_head, "direction"), sigma),
        "below_rounding": ((*per_head, "direction"), below_rounding(sigma, longer_sides[:, None, None])),
        "loss": (("document",), collected.stacked("values").sum(axis=(0, 2), dtype=np.float64) / count),
        "scored": (("document",), count),
        "g_sensitivity": (per_token, first_order(collected.by_token("g", 1)[..., 0])),
        "beta_sensitivity": ((*per_token, "step"), beta) if n > 1 else (per_token, beta[..., 0]),
    }
    for name, stem, dims in (
        ("gate", "", (*per_head, "direction")),
        ("head_state", "head_state_", per_head),
        ("head_output", "head_output_", ("document", "segment", "layer", "head")),
    ):
        first, drawn = collected.by_sample(name)
        first = first_order(first)
        effect = -first
        if len(drawn):
            scored = count.reshape(-1, *(1,) * (first.ndim - 1))
            fisher = np.mean(np.square(drawn, dtype=np.float64), axis=0) / scored
            effect = (effect + 0.5 * fisher).astype(first.dtype)
            found[f"{name}_sample"] = (("sample", *dims), drawn)
            found[f"{stem}fisher"] = (dims, fisher.astype(first.dtype))
        found |= {name: (dims, first), f"{stem}effect": (dims, effect)}
    if hasattr(tape.intervention, "without_gap"):
        found["without_gap"] = (("document", "boundary"), collected.at_boundaries(collected.stacked("without_gap").T))
    attrs = _attributes(loss, collected.samples, tape.text.segment, seed, tape.intervention)
    whole = without_padding(c, xr.Dataset(found, _coordinates(collected, c, names), attrs))
    return labelled(whole, _words(attrs["unit"]))


def _words(unit: str) -> dict[str, tuple[str, str]]:
    """Long name and units of each variable."""
    found = {
        "sigma": ("singular value of the carried state", "1"),
        "below_rounding": ("whether sigma is below the rounding of the f32 state", "1"),
        "loss": ("mean of the objective over scored tokens", unit),
        "scored": ("scored tokens", "tokens"),
        "beta_sensitivity": ("derivative of the objective with respect to a write strength", unit),
        "g_sensitivity": ("derivative of the objective with respect to a log-decay", unit),
        "without_gap": ("states whose truncation has no gap, and no exact derivative", "states"),
        "sample": ("label drawn by the model", "index"),
    }
    for name, stem, subject in (
        ("gate", "", "a singular direction of a carried state"),
        ("head_state", "head_state_", "a head's carried state"),
        ("head_output", "head_output_", "a head's output after its norm, in a segment"),
    ):
        found |= {
            name: (f"derivative of the objective with respect to a factor on {subject}", unit),
            f"{name}_sample": (
                f"derivative of the summed loss of drawn labels with respect to a factor on {subject}",
                "nats",
            ),
            f"{stem}fisher": (f"Fisher information of a factor on {subject}", unit),
            f"{stem}effect": (f"estimated rise of the objective when {subject} is removed", unit),
        }
    return found


def _coordinates(collected: _Collected, config: DecoderConfig, names: Sequence[str]) -> dict[str, Any]:
    text = collected.text
    return {
        "document": list(names),
        "boundary": collected.boundaries,
        "segment": np.arange(text.count),
        "token": np.arange(text.lengths.max()),
        **head_coordinates(config),
        "direction": np.arange(min(config.largest_state[1:])),
    }


def _attributes(loss: Loss, samples: int, segment: int, seed: int, intervention: Intervention | None) -> dict[str, Any]:
    fisher = has_fisher(loss)
    without = "none: samples = 0" if fisher else "none: no Fisher part, which only a loss of words has"
    return {
        "objective": loss if fisher else loss.name,
        "unit": "nats a scored token" if fisher else loss.unit,
        "effect": "-gate + fisher / 2" if samples else "-gate",
        "fisher": f"sampled labels, {samples} a token" if samples else without,
        "segment_tokens": segment,
        "samples": samples,
        "seed": str(seed),
        "note": GAUGE,
        "intervention": "none" if intervention is None else type(intervention).__name__,
        "validated": "no: compare with measured ablations before ranking by these numbers",
    }


def tail_gate(maps: xr.Dataset) -> xr.DataArray:
    """First-order change of the loss when a state keeps its first r directions, over ``rank`` r = 0 .. min(K, V).

    It is minus the sum of the gates of the removed directions. Unless r splits a block of equal singular values, it does
    not depend on the basis. ``maps`` is a dataset of :func:`sensitivity`.
    """
    return -_tail(maps.gate)


def tail_fisher(maps: xr.Dataset) -> xr.DataArray:
    """Fisher information of one gate on all directions beyond the first r, over ``rank``.

    Gates are summed within a sample before squares are taken.

    Raises:
        ValueError: ``maps`` have no samples.
    """
    if "gate_sample" not in maps:
        raise ValueError("maps have no samples, and no Fisher part: take samples of at least 1 and a loss of words")
    return (_tail(maps.gate_sample) ** 2).mean("sample") / maps.scored


def tail_effect(maps: xr.Dataset) -> xr.DataArray:
    """Estimated change of the loss when a state keeps its first r directions, over ``rank``: :func:`tail_gate` plus half of
    :func:`tail_fisher`, or the first alone without samples."""
    return tail_gate(maps) + (0.5 * tail_fisher(maps) if "gate_sample" in maps else 0.0)


def _tail(x: xr.DataArray) -> xr.DataArray:
    sums = x.isel(direction=slice(None, None, -1)).cumsum("direction").isel(direction=slice(None, None, -1))
    sums = sums.rename(direction="rank").drop_vars("rank", errors="ignore").pad(rank=(0, 1), constant_values=0)
    return sums.where(x.isel(direction=0, drop=True).notnull()).assign_coords(rank=np.arange(sums.sizes["rank"]))
