"""What a smaller state costs: states stored in fewer bits or as fewer directions, against the untouched model.

Serving engines keep a state a head for every text that is being read or written, and store it in 16 bits or fewer. A form
of storage is written

    bf16, f16          every entry rounded                                    2 K V bytes a head
    int8, int4, ...    K x V integers and one scale                           bits / 8 K V + 4
    rank=12            12 directions, as two factors in f32                   4 * 12 (K + V)
    rank=12+int8       the factors rounded, a scale for each direction        12 (K + V) bits / 8 + 8 * 12; likewise +bf16

It is applied at every boundary between two segments, or after every token, as an engine does that writes the state back.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa

from jaxdelta.analysis.compare import UNTOUCHED, checked_sizes, padded_length
from jaxdelta.arguments import whole_number
from jaxdelta.documents import Document
from jaxdelta.metrics import paired_difference
from jaxdelta.models.config import DecoderConfig
from jaxdelta.models.decoder import Decoder
from jaxdelta.nn.head import divergence, token_losses
from jaxdelta.results.documents import Documents, Item, as_documents, of_document, opened, rows_of
from jaxdelta.runs import capacity
from jaxdelta.runs.interventions import Factors, Intervention, Quantise, Round, Truncate, started
from jaxdelta.runs.observers import HiddenStates
from jaxdelta.runs.segments import finite_losses, in_document, iterate, num_boundaries, text_of

FORM = re.compile(r"(?:rank=(?P<rank>\d+))?(?P<plus>\+)?(?P<stored>bf16|f16|int(?P<bits>\d+))?")
GRAMMAR = "bf16, f16, int2 to int16, rank=R, or rank=R+ one of the others"
FULL = 4.0  # bytes of an entry as the model has it
SCHEMA = pa.schema(
    [
        ("document", pa.string()),
        ("form", pa.string()),
        ("from", pa.int32()),
        ("to", pa.int32()),
        ("layer", pa.int32()),
        ("head", pa.int32()),
        ("num_boundaries", pa.int32()),
        ("num_tokens", pa.int32()),
        ("loss", pa.float64()),
        ("kl", pa.float64()),
        ("agreement", pa.float64()),
        ("state_error", pa.float64()),
        ("rounding", pa.float64()),
        ("bytes", pa.float64()),
    ]
)


class Form(NamedTuple):
    """A form of storage: its name, rank (None is all), and "bf16", "f16", a number of bits or None for f32."""

    name: str
    rank: int | None
    stored: str | int | None

    @property
    def intervention(self) -> Intervention:
        """What stores and loads a state."""
        if self.rank is None:
            return Quantise(self.stored) if isinstance(self.stored, int) else Round(self.stored)
        return Truncate(self.rank) if self.stored is None else Factors(self.rank, self.stored)

    def bytes_of(self, config: DecoderConfig) -> float:
        """Bytes of all states of one text."""
        entry = self.stored / 8 if isinstance(self.stored, int) else FULL if self.stored is None else 2.0
        scale = 4 if isinstance(self.stored, int) else 0
        total = 0.0
        for H, K, V in (sizes.state for sizes in config.linear_sizes):
            rank = min(self.rank or 0, K, V)
            a_head = K * V * entry + scale if self.rank is None else rank * ((K + V) * entry + 2 * scale)
            total += H * a_head
        return total


def form(text: str) -> Form:
    """The form of storage that ``text`` names.

    Raises:
        ValueError: it names none.
    """
    found = FORM.fullmatch(text)
    whole = found and (found["rank"] or found["stored"])
    if not whole or bool(found["plus"]) != bool(found["rank"] and found["stored"]):
        raise ValueError(f"{text[:40]!r} is no form of storage; expected {GRAMMAR}")
    bits = found["bits"] and int(found["bits"])
    if bits is not None and not 2 <= bits <= 16:
        raise ValueError(f"{text[:40]!r} has {bits} bits; expected 2 to 16")
    return Form(text, found["rank"] and int(found["rank"]), found["stored"] if bits is None else bits)


def storage_costs(
    model: Decoder,
    documents: Documents,
    forms: Sequence[str],
    *,
    segment: int = 256,
    every_token: bool = False,
    out: Path | str | None = None,
    name: str = "model",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> pa.Table:
    """Loss, divergence, agreement and errors of states for every document and form of storage.

    Args:
        documents: as for :func:`jaxdelta.analysis.compare.compare`.
        forms: names of forms, as above.
        segment: tokens between two boundaries.
        every_token: store the state after every token instead; a segment has one token then, which takes long.
        out: results folder; finished parts are not run again, new documents and forms are added.
        name: of the model, for the manifest.
        progress: called with the number of segments done and of all.

    Returns:
        Rows of two kinds, with the columns document, form ("untouched" too), and bytes of all states of a text:

        - of predictions (layer and head null): num_tokens scored, ``loss``, ``kl`` from the untouched predictions in nats,
          and ``agreement``, the share of equal first words; over the whole text (``from`` and ``to`` null) and over
          tokens ``from`` to ``to`` - 1, in powers of two of segments, which tell whether errors grow;
        - of states (layer and head of the model): ``state_error``, ||S' - S|| / ||S|| against the untouched state at the
          last boundary, and ``rounding``, the mean over boundaries of what storing alone changed, relative to the state
          that arrived. What the first has beyond the second comes from other layers and earlier boundaries.

    Raises:
        TypeError, ValueError, NonFiniteError, MemoryError, ResultsError: as :func:`jaxdelta.analysis.compare.compare`;
            ValueError also for a form that is none, or that does not fit the model's states.
    """
    documents = as_documents(documents, model)
    if isinstance(forms, str) or not np.iterable(forms):
        raise TypeError(f"forms is {forms!r}; expected a list of forms, such as ['bf16', 'rank=12']")
    chosen = [form(text) for text in dict.fromkeys(forms)]
    if not chosen:
        raise ValueError(f"there are no forms of storage; expected {GRAMMAR}")
    step = 1 if every_token else segment
    segment, _ = whole_number("segment", segment), checked_sizes(documents, step, 0)
    if segment < 1:
        raise ValueError(f"segment is {segment}; expected at least 1 token")
    length = padded_length(documents, step)
    for one in chosen:
        started(one.intervention, model.init_carry(1, 1), range(step, length, step))
    needed = capacity.run_memory(model.config, dtype=model.dtype.name, segment=step, max_length=length)
    capacity.rows_that_fit(needed, 1)
    results = opened(out, model, name, "storage", segment=segment, every_token=every_token)
    items = [
        Item(of_document(d, form=f), (d, f), -(-len(d.tokens) // step)) for d in documents for f in (UNTOUCHED, *chosen)
    ]
    runs = _Runs(model, step, length)

    def work(values: list[tuple[Document, Form | str]], progress) -> list[pa.Table]:
        ((document, one),) = values
        with in_document(document.name if one == UNTOUCHED else f"{document.name}, {one.name}"):
            rows = runs.rows(document, None if one == UNTOUCHED else one, segment, progress)
        return [pa.Table.from_pylist(rows, schema=SCHEMA)]

    return rows_of(items, work, results=results, progress=progress)


class _World(NamedTuple):
    """A run of a document.

    Attributes:
        hidden: Float[N D], hidden states, on the host.
        losses: Float[N-1].
        last: Float[L H K V], states at the last boundary; None without one.
        rounding: Float[L H], mean relative change of states by storing.
    """

    hidden: np.ndarray
    losses: np.ndarray
    last: np.ndarray | None
    rounding: np.ndarray | None


class _Runs:
    """Runs of documents; the untouched one of the last document is kept for its other forms."""

    def __init__(self, model: Decoder, step: int, length: int):
        self.model, self.step, self.length = model, step, length
        self._untouched: tuple[str, _World] | None = None

    def rows(self, document: Document, one: Form | None, segment: int, progress) -> list[dict[str, Any]]:
        if self._untouched is None or self._untouched[0] != document.name:
            self._untouched = document.name, self._world(document, None, progress)
        base = self._untouched[1]
        world = base if one is None else self._world(document, one.intervention, progress)
        losses, kl, agrees = _compared(self.model, base, world, document)
        config, mask = self.model.config, document.mask
        of_all = dict(
            document=document.name,
            form=UNTOUCHED if one is None else one.name,
            num_boundaries=num_boundaries(len(document.tokens), self.step),
            bytes=Form(UNTOUCHED, None, None).bytes_of(config) if one is None else one.bytes_of(config),
        )
        rows = []
        for low, high in _spans(len(mask), segment):
            span = slice(low or 0, high)
            counted = mask[span]
            if counted.any():
                values = (x[span][counted].mean() for x in (losses, kl, agrees))
                means = dict(zip(("loss", "kl", "agreement"), map(float, values), strict=True))
                rows.append(of_all | means | {"from": low, "to": high, "num_tokens": int(counted.sum())})
        if world.last is None:
            return rows
        error = _relative(world.last, base.last)
        for i, (layer, sizes) in enumerate(zip(config.linear_layers, config.linear_sizes, strict=True)):
            for head in range(sizes.num_value_heads):
                of_state = dict(layer=layer, head=head, state_error=error[i, head], rounding=world.rounding[i, head])
                rows.append(of_all | of_state)
        return rows

    def _world(self, document: Document, intervention: Intervention | None, progress) -> _World:
        text = text_of(self.model, document.tokens[None], segment=self.step)
        carry = self.model.init_carry(1, self.length)
        boundaries = num_boundaries(len(document.tokens), self.step)
        hidden, last, changed = [], None, 0.0
        for step in iterate(
            self.model, text, carry, intervention=intervention, observers=(HiddenStates(),), progress=progress
        ):
            hidden.append(step.observed[0][0])
            if 0 < step.index <= boundaries:
                last = step.start.recurrent.S
                if intervention is not None:
                    changed = changed + _change(step.start.arriving, last)
        N = len(document.tokens)
        rounding = np.zeros(last.shape[:3:2]) if last is not None else None
        if boundaries and intervention is not None:
            rounding = np.asarray(changed, np.float64) / boundaries
        whole = np.concatenate(hidden)[:N]
        (losses,) = _blocks(self.model, _losses, [whole[:-1]], document.tokens[1:])
        for index in np.flatnonzero(~np.isfinite(losses))[:1] // self.step:
            span = slice(index * self.step, (index + 1) * self.step)
            finite_losses(text, int(index), losses[None, span], np.ones((1, len(losses[span])), bool))
        return _World(whole, losses, None if last is None else np.asarray(last)[:, 0], rounding)


@jax.jit
def _change(arriving: jax.Array, stored: jax.Array) -> jax.Array:
    """||stored - arriving|| / ||arriving|| of each head, [L, H]; NaN for an empty state."""
    size = jnp.linalg.norm(arriving[:, 0], axis=(-2, -1))
    return jnp.linalg.norm((stored - arriving)[:, 0], axis=(-2, -1)) / jnp.where(size > 0, size, jnp.nan)


def _relative(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    a, b = (x.astype(np.float64) for x in (a, b))
    size = np.linalg.norm(b, axis=(-2, -1))
    return np.linalg.norm(a - b, axis=(-2, -1)) / np.where(size > 0, size, np.nan)


def _compared(model: Decoder, base: _World, world: _World, document: Document) -> tuple[np.ndarray, ...]:
    """Losses, divergences and agreement [N - 1] of a world."""
    N = len(document.tokens)
    if world is base:
        return world.losses.astype(np.float64), np.zeros(N - 1), np.ones(N - 1)
    hidden = [base.hidden[:-1], world.hidden[:-1]]
    kl, agrees = _blocks(model, _divergences, hidden, document.tokens[1:])
    return world.losses.astype(np.float64), kl.astype(np.float64), agrees.astype(np.float64)


BLOCK = 256  # tokens of a call


@jax.jit
def _losses(weight, hidden, targets):
    return (token_losses(weight, hidden, targets),)


@jax.jit
def _divergences(weight, hidden, other, targets):
    return divergence(weight, hidden, other)


def _blocks(model: Decoder, call: Callable, hidden: list[np.ndarray], targets: np.ndarray) -> list[np.ndarray]:
    """``call`` of the head and of [1, BLOCK] tokens at a time, joined; the last block is padded."""
    N = len(targets)
    weight = jnp.asarray(model.head_weight)
    found = []
    for begin in range(0, N, BLOCK):
        parts = [_padded(x[begin : begin + BLOCK]) for x in (*hidden, targets.astype(np.int32))]
        found.append([np.asarray(x)[0] for x in call(weight, *(p[None] for p in parts))])
    return [np.concatenate(pieces)[:N] for pieces in zip(*found, strict=True)]


def _padded(x: np.ndarray) -> np.ndarray:
    return np.pad(x, [(0, BLOCK - len(x)), *[(0, 0)] * (x.ndim - 1)])


def _spans(predictions: int, segment: int) -> Iterator[tuple[int | None, int | None]]:
    """The whole text, then its first segment, the second, and powers of two of segments that it fills."""
    yield None, None
    low, high = 0, segment
    while high <= predictions:
        yield low, high
        low, high = high, 2 * high


# Over documents


class Cost(NamedTuple):
    """A form over all documents with a boundary; means over documents of means over scored tokens.

    Attributes:
        form: its name.
        bytes: of all states of a text.
        loss, kl, agreement: of its predictions.
        difference, stderr: of the loss from the untouched one, paired by document.
    """

    form: str
    bytes: float
    loss: float
    kl: float
    agreement: float
    difference: float
    stderr: float


def costs(rows: pa.Table, span: tuple[int | None, int | None] = (None, None)) -> list[Cost]:
    """Every form over the documents that have ``span`` and a boundary, the untouched one first."""
    by_form: dict[str, dict[str, dict]] = {}
    for row in rows.to_pylist():
        if row["layer"] is None and (row["from"], row["to"]) == span and row["num_boundaries"] > 0:
            by_form.setdefault(row["form"], {})[row["document"]] = row
    found = []
    for name, of_form in by_form.items():
        names = [d for d in of_form if d in by_form[UNTOUCHED]]
        loss, base = (np.array([f[d]["loss"] for d in names]) for f in (of_form, by_form[UNTOUCHED]))
        difference, stderr = paired_difference(loss, base)
        kl, agreement = (float(np.mean([of_form[d][x] for d in names])) for x in ("kl", "agreement"))
        size = of_form[names[0]]["bytes"]
        found.append(Cost(name, size, float(np.mean(loss)), kl, agreement, difference, stderr))
    return sorted(found, key=lambda cost: cost.form != UNTOUCHED)


def spans(rows: pa.Table) -> list[tuple[int, int]]:
    """The spans of tokens of the rows, ascending."""
    return sorted({(r["from"], r["to"]) for r in rows.to_pylist() if r["from"] is not None})


def growth(rows: pa.Table, form: str) -> float:
    """Divergence over the last span over that over the second, of the documents that fill both; NaN without any."""
    known = spans(rows)
    if len(known) < 3:
        return float("nan")
    by_span: dict[tuple[int, int], dict[str, float]] = {known[1]: {}, known[-1]: {}}
    for row in rows.to_pylist():
        if row["form"] == form and (row["from"], row["to"]) in by_span:
            by_span[row["from"], row["to"]][row["document"]] = row["kl"]
    second, last = by_span.values()
    both = second.keys() & last.keys()
    before = sum(second[d] for d in both)
    return sum(last[d] for d in both) / before if before > 0 else float("nan")
