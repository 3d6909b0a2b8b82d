"""Rank sweep: what a model loses when its carried states keep r directions.

Every document runs once for each rank, and once untouched. Each of these is a world, a row of a batch with its own ranks
over [layer, head], so that all ranks share one compiled function. At every boundary S <- U_r U_r^T S for the heads in
scope, so truncations compound; attention layers are never changed. The protocol is that of the state-rank study of
Qwen3.5-0.8B: segments of 256 tokens, mean next-token loss, copy tokens reported separately.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa

from jaxdelta.analysis.compare import LOSSES, Difference, checked_sizes, differences, of_losses, padded_length
from jaxdelta.arguments import whole_number, whole_numbers
from jaxdelta.documents import Document, in_rows
from jaxdelta.models.config import DecoderConfig
from jaxdelta.models.decoder import Decoder
from jaxdelta.ops.low_rank import Method, largest_rank
from jaxdelta.results.documents import Documents, Item, as_documents, of_document, opened, rows_of
from jaxdelta.runs import capacity
from jaxdelta.runs.interventions import Truncate
from jaxdelta.runs.segments import NonFiniteError, run

Scope = Literal["all", "layer", "head"]
SCHEMA = pa.schema([("document", pa.string()), ("rank", pa.int32()), ("layer", pa.int32()), ("head", pa.int32()), *LOSSES])


class World(NamedTuple):
    """What is truncated: the heads in scope keep ``rank`` directions, everything else is untouched.

    ``layer`` is a model layer index, ``head`` a value head; None is all.
    """

    rank: int
    layer: int | None = None
    head: int | None = None


def sweep(
    model: Decoder,
    documents: Documents,
    *,
    ranks: Sequence[int] = (1, 4, 12, 32),
    segment: int = 256,
    scope: Scope = "all",
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    copy_gap: int = 512,
    method: Method | None = None,
    batch: int | None = None,
    out: Path | str | None = None,
    name: str = "model",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> pa.Table:
    """Losses of every document at every rank, and untouched.

    Args:
        documents: texts (for the model's tokenizer), arrays of token ids, Documents, or a mapping from names to texts or
            ids.
        ranks: directions kept at every boundary, 1 .. min(K, V); the untouched rank min(K, V) always runs.
        segment: tokens between boundaries, fewer than the longest document has.
        scope: "all" truncates all heads at once, "layer" one linear layer at a time, "head" one head at a time.
        layers: model layer indices for the scopes "layer" and "head"; None is all linear layers.
        heads: value heads for the scope "head"; None is all.
        copy_gap: a copy token ends a bigram that occurred more than this many tokens earlier.
        method: of the truncation, see :func:`jaxdelta.ops.low_rank.truncate`.
        batch: rows (document x world) of a batch; None is as many as fit the device's memory.
        out: results folder; finished parts are not run again, new documents and ranks are added.
        name: of the model, for the manifest.
        progress: called with the segments x rows done and their total.

    Returns:
        One row per document x world: document, rank, layer (the model's) and head (null where the scope is wider),
        num_boundaries (after which a token is still predicted; with 0 nothing is truncated), num_tokens (scored), loss,
        num_copy_tokens, copy_loss (null without copy tokens); losses in mean nats a scored token.

    Raises:
        TypeError: an argument is of another type, for example a rank that is not a whole number.
        ValueError: ranks, scope, layers, heads, documents or segment out of bounds.
        NonFiniteError: a NaN or an infinity; names document, rank, layer and segment.
        MemoryError: not even one row fits.
        ResultsError: ``out`` cannot be used.

    The width of the subspace depends on the largest rank of the call, so a row may differ from that of a sweep over other
    ranks, within the tolerance of the truncation.
    """
    documents = as_documents(documents, model)
    segment, copy_gap = checked_sizes(documents, segment, copy_gap)
    batch = None if batch is None else whole_number("batch", batch)
    if batch is not None and batch < 1:
        raise ValueError(f"batch = {batch}; expected at least 1 row")
    config = model.config
    worlds = make_worlds(config, ranks, scope, layers=layers, heads=heads)
    length = padded_length(documents, segment)
    count = len(documents) * len(worlds)
    if batch is None:
        needed = capacity.run_memory(config, dtype=model.dtype.name, segment=segment, max_length=length)
        # The worlds of one document keep a CPU busy, and a killed call loses at most these.
        batch = capacity.rows_that_fit(needed, count if capacity.has_own_memory() else len(worlds))
    max_rank = largest_rank([world.rank for world in worlds], config.max_rank)
    results = opened(out, model, name, "sweep", segment=segment, copy_gap=copy_gap, method=method)
    items = [Item(of_document(d, **world._asdict()), (d, world), length // segment) for d in documents for world in worlds]

    def work(rows: list[tuple[Document, World]], progress) -> list[pa.Table]:
        filled = rows + rows[:1] * (min(batch, count) - len(rows))  # one shape, compiled once
        cut = Truncate(np.stack([rank_array(config, world) for _, world in filled]), method=method, max_rank=max_rank)
        losses = _losses(model, filled, cut, segment=segment, max_length=length, progress=progress)
        return [
            pa.Table.from_pylist(
                [{"document": d.name} | world._asdict() | of_losses(d, row, segment, copy_gap)], schema=SCHEMA
            )
            for (d, world), row in zip(rows, losses, strict=False)
        ]

    return rows_of(items, work, results=results, at_once=batch, progress=progress)


def make_worlds(
    config: DecoderConfig,
    ranks: Sequence[int],
    scope: Scope = "all",
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> list[World]:
    """The untouched world, then one for each rank and each part of the scope; arguments as in :func:`sweep`.

    Raises:
        TypeError: ranks, layers or heads are not whole numbers.
        ValueError: no rank, a rank outside 1 .. min(K, V), an unknown scope, or layers or heads that the model lacks or
            that the scope does not use.
    """
    if scope not in ("all", "layer", "head"):
        raise ValueError(f"scope is {scope!r}; expected all, layer or head")
    ranks = sorted(set(whole_numbers("ranks", ranks)))
    wrong = [r for r in ranks if not 1 <= r <= config.max_rank]
    if wrong or not ranks:
        raise ValueError(f"ranks {ranks}: expected whole numbers from 1 to min(K, V) = {config.max_rank}")
    through = {
        "layers": (layers, config.linear_layers, scope != "all"),
        "heads": (heads, range(config.largest_state.heads), scope == "head"),
    }
    places = []
    for name, (asked, known, goes) in through.items():
        if asked is None:
            places.append(list(known) if goes else [None])
            continue
        if not goes:
            raise ValueError(f"{name} are given, and the scope {scope!r} does not go through them")
        chosen = sorted(set(whole_numbers(name, asked)))
        if not chosen or not set(chosen) <= set(known):
            raise ValueError(f"{name} {chosen}: expected some of {list(known)}")
        places.append(chosen)
    states = {layer: c.state for layer, c in zip(config.linear_layers, config.linear_sizes, strict=True)}
    cut = [
        World(rank, layer, head)
        for rank in ranks
        for layer in places[0]
        for head in places[1]
        if rank < (config.max_rank if layer is None else states[layer].directions)
        and (head is None or head < states[layer].heads)
    ]
    return [World(config.max_rank), *cut]


def rank_array(config: DecoderConfig, world: World) -> np.ndarray:
    """Directions kept in a world, int [L, H]."""
    rank = np.full((len(config.linear_layers), config.largest_state.heads), config.max_rank, np.int32)
    layer = slice(None) if world.layer is None else config.linear_layers.index(world.layer)
    rank[layer, slice(None) if world.head is None else world.head] = world.rank
    return rank


def summarize(rows: pa.Table, *, copy_tokens: bool = False, with_uncut: bool = False) -> list[Difference]:
    """Each world over all documents, the untouched one first; see :func:`~jaxdelta.analysis.compare.differences`."""
    columns = World._fields
    worlds = {World(*(row[c] for c in columns)) for row in rows.select(columns).to_pylist()}
    untouched = max(worlds, key=lambda world: (world.rank, world.layer is None))
    found = differences(rows, columns, untouched=untouched, copy_tokens=copy_tokens, with_uncut=with_uncut)
    found = [one._replace(world=World(*one.world)) for one in found]
    return sorted(found, key=lambda s: (-s.world.rank, s.world.layer or -1, s.world.head or -1))


def _losses(
    model: Decoder, rows: list[tuple[Document, World]], cut: Truncate, *, segment: int, max_length: int, progress
) -> np.ndarray:
    """Losses [rows, max_length - 1]."""
    tokens, lengths = in_rows([document.tokens for document, _ in rows], max_length)
    sizes = dict(segment=segment, lengths=lengths, max_length=max_length)
    try:
        return run(model, tokens, intervention=cut, progress=progress, **sizes).losses
    except NonFiniteError as error:
        document, world = rows[error.row]
        raise NonFiniteError(f"document {document.name}, rank {world.rank}: {error}", error.row) from None
