"""Losses of documents in several worlds: one for each intervention, and the untouched one.

Each document runs alone under each intervention, on the same tokens. :mod:`jaxdelta.analysis.sweep` is the special case of
ranks, whose worlds share one program and one batch.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from jaxdelta.arguments import shown, whole_number
from jaxdelta.documents import Document
from jaxdelta.metrics import copy_mask, paired_difference
from jaxdelta.models.decoder import Decoder
from jaxdelta.results.documents import Documents, Item, as_documents, of_document, opened, rows_of
from jaxdelta.runs import capacity
from jaxdelta.runs.interventions import Intervention, check_intervention, described, started
from jaxdelta.runs.segments import in_document, num_boundaries, run

UNTOUCHED = "untouched"
LOSSES = (
    ("num_boundaries", pa.int32()),
    ("num_tokens", pa.int32()),
    ("loss", pa.float64()),
    ("num_copy_tokens", pa.int32()),
    ("copy_loss", pa.float64()),
)
SCHEMA = pa.schema([("document", pa.string()), ("intervention", pa.string()), *LOSSES])


class Difference(NamedTuple):
    """A world over all documents; losses are means over documents of mean nats a scored token.

    Attributes:
        world: values of the columns that identify the world.
        loss: of the world.
        difference: from the loss of the untouched world.
        stderr: of ``difference``, paired by document.
        percent: ``difference`` over the untouched loss.
    """

    world: tuple
    loss: float
    difference: float
    stderr: float
    percent: float


def compare(
    model: Decoder,
    documents: Documents,
    interventions: Mapping[str, Intervention | None],
    *,
    segment: int = 256,
    copy_gap: int = 512,
    out: Path | str | None = None,
    name: str = "model",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> pa.Table:
    """Losses of every document under every intervention, and untouched.

    Args:
        documents: texts (for the model's tokenizer), arrays of token ids, Documents, or a mapping from names to texts or
            ids.
        interventions: by label; None is the untouched world, which always runs.
        segment: tokens between boundaries, fewer than the longest document has.
        copy_gap: a copy token ends a bigram that occurred more than this many tokens earlier.
        out: results folder; finished parts are not run again, new documents and interventions are added.
        name: of the model, for the manifest.
        progress: called with the number of segments done and of all.

    Returns:
        One row per document x intervention: document, intervention (its label), num_boundaries (after which a token is
        still predicted; with 0 nothing is changed), num_tokens (scored), loss, num_copy_tokens, copy_loss (null without
        copy tokens); losses in mean nats a scored token.

    Raises:
        TypeError: ``interventions`` is not a mapping to interventions, or another argument has the wrong type.
        ValueError: documents or segment out of bounds, an intervention that does not fit the model's states, or, with
            ``out``, one whose fields do not tell all that it does.
        NonFiniteError: a NaN or an infinity; names document, label, layer and segment.
        MemoryError: not even one document fits.
        ResultsError: ``out`` cannot be used.
    """
    documents = as_documents(documents, model)
    segment, copy_gap = checked_sizes(documents, segment, copy_gap)
    if not isinstance(interventions, Mapping):
        raise TypeError(f"interventions is {shown(interventions)}; expected a mapping from labels to interventions")
    labels = [label for label, one in interventions.items() if one is None] or [UNTOUCHED]
    worlds = {labels[0]: None} | dict(interventions)
    length = padded_length(documents, segment)
    for one in worlds.values():
        check_intervention(one)
        if one is not None:
            started(one, model.init_carry(1, 1), range(segment, length, segment))
    needed = capacity.run_memory(model.config, dtype=model.dtype.name, segment=segment, max_length=length)
    capacity.rows_that_fit(needed, 1)
    results = opened(out, model, name, "compare", segment=segment, copy_gap=copy_gap)
    items = [
        Item(
            of_document(d, label=label, intervention=None if out is None else json.dumps(described(one), sort_keys=True)),
            (d, label, one),
            -(-len(d.tokens) // segment),
        )
        for d in documents
        for label, one in worlds.items()
    ]

    def work(values: list[tuple[Document, str, Intervention | None]], progress) -> list[pa.Table]:
        ((document, label, one),) = values
        with in_document(f"{document.name}, {label}"):
            losses = run(
                model, document.tokens[None], segment=segment, intervention=one, max_length=length, progress=progress
            ).losses[0]
        row = {"document": document.name, "intervention": label} | of_losses(document, losses, segment, copy_gap)
        return [pa.Table.from_pylist([row], schema=SCHEMA)]

    return rows_of(items, work, results=results, progress=progress)


def checked_sizes(documents: Sequence[Document], segment: int, copy_gap: int) -> tuple[int, int]:
    """``segment`` and ``copy_gap``, checked.

    Raises:
        TypeError: one of them is not a whole number.
        ValueError: one of them is out of bounds, or no document has a boundary.
    """
    segment, copy_gap = whole_number("segment", segment), whole_number("copy_gap", copy_gap)
    if segment < 1 or copy_gap < 0:
        raise ValueError(f"segment = {segment}, copy_gap = {copy_gap}; expected at least 1 token and 0 tokens")
    with_boundary(documents, segment)
    return segment, copy_gap


def with_boundary(documents: Sequence[Document], segment: int) -> list[Document]:
    """The documents that have a boundary after which a token is predicted.

    Raises:
        ValueError: there are none.
    """
    found = [d for d in documents if num_boundaries(len(d.tokens), segment)]
    if not found:
        longest = max(len(d.tokens) for d in documents)
        raise ValueError(
            f"the longest document has {longest} tokens: segments of {segment} leave no boundary to hand a state on to a "
            "prediction. Take a shorter segment or a longer document."
        )
    return found


def padded_length(documents: Sequence[Document], segment: int) -> int:
    """Tokens of the longest document, rounded up to whole segments. With this length all share a compiled program."""
    return -(-max(len(d.tokens) for d in documents) // segment) * segment


def of_losses(document: Document, losses: np.ndarray, segment: int, copy_gap: int) -> dict[str, Any]:
    """The columns LOSSES of one world of a document, from its losses, at least N - 1."""
    mask = document.mask
    losses = losses[: len(mask)].astype(np.float64)
    copies = copy_mask(document.tokens, copy_gap) & mask
    return dict(
        num_boundaries=num_boundaries(len(document.tokens), segment),
        num_tokens=int(mask.sum()),
        loss=losses[mask].mean(),
        num_copy_tokens=int(copies.sum()),
        copy_loss=losses[copies].mean() if copies.any() else None,
    )


def uncut(rows: pa.Table) -> list[str]:
    """Names of the documents without a boundary, for which every world is the untouched one."""
    return list(dict.fromkeys(row["document"] for row in rows.to_pylist() if row["num_boundaries"] == 0))


def differences(
    rows: pa.Table,
    columns: Sequence[str] = ("intervention",),
    *,
    untouched: tuple | None = None,
    copy_tokens: bool = False,
    with_uncut: bool = False,
) -> list[Difference]:
    """Each world over all documents, in the order of the rows.

    Args:
        rows: from :func:`compare` or a sweep.
        columns: columns that identify a world.
        untouched: their values in the untouched world; None is those of the first row.
        copy_tokens: use the losses of copy tokens, over the documents that have any.
        with_uncut: include documents without a boundary, whose differences are zero.
    """
    left_out = set() if with_uncut else set(uncut(rows))
    column, count = ("copy_loss", "num_copy_tokens") if copy_tokens else ("loss", "num_tokens")
    worlds: dict[tuple, dict[str, float]] = {}
    for row in rows.to_pylist():
        losses = worlds.setdefault(tuple(row[c] for c in columns), {})
        if row[count] and row["document"] not in left_out:
            losses[row["document"]] = row[column]
    base_losses = worlds[next(iter(worlds)) if untouched is None else untouched]
    if not base_losses:
        return []
    base = np.array(list(base_losses.values()))
    found = []
    for world, losses in worlds.items():
        values = np.array([losses[document] for document in base_losses])
        difference, stderr = paired_difference(values, base)
        found.append(Difference(world, float(values.mean()), difference, stderr, 100 * difference / float(base.mean())))
    return found
