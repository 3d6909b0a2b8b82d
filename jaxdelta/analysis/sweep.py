"""Rank sweep: what a model loses when its carried states keep r directions.

Every document is run once for each rank, and once untouched. Each such run is a world, a row of one batch with its own rank
array over [layer, head], so that all ranks share one compiled function. At every boundary S <- U_r U_r^T S for the heads in
scope; the attention layers are never touched, and the cut compounds. The protocol is that of the state-rank study of
Qwen3.5-0.8B: segments of 256 tokens, mean next-token loss, copy tokens apart.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import numpy as np
import pyarrow as pa

from jaxdelta.arguments import shown, whole_number, whole_numbers
from jaxdelta.documents import Document, identity, tokenize
from jaxdelta.metrics import copy_mask, paired_difference
from jaxdelta.models.config import DecoderConfig
from jaxdelta.models.decoder import Decoder, check_model
from jaxdelta.ops.low_rank import Method, largest_rank
from jaxdelta.results.folder import Results, ResultsError
from jaxdelta.runs import capacity as memory
from jaxdelta.runs.interventions import Truncate
from jaxdelta.runs.segments import NonFiniteError, check_tokens, num_boundaries, run

Scope = Literal["all", "layer", "head"]

SCHEMA = pa.schema(
    [
        ("document", pa.string()),
        ("rank", pa.int32()),
        ("layer", pa.int32()),
        ("head", pa.int32()),
        ("num_boundaries", pa.int32()),
        ("num_tokens", pa.int32()),
        ("loss", pa.float64()),
        ("num_copy_tokens", pa.int32()),
        ("copy_loss", pa.float64()),
    ]
)


class World(NamedTuple):
    """One run of a document: ``rank`` directions in the heads of scope, everything else untouched.

    ``layer`` is an index into the model's layers, ``head`` into the value heads; None is all of them.
    """

    rank: int
    layer: int | None = None
    head: int | None = None


class Summary(NamedTuple):
    """A world over all documents; losses are means over documents of mean nats a scored token.

    ``percent`` is ``difference`` over the untouched loss; ``stderr`` is the paired standard error of ``difference``.
    """

    world: World
    loss: float
    difference: float
    stderr: float
    percent: float


def sweep(
    model: Decoder,
    documents: Sequence[str | np.ndarray] | dict[str, str] | list[Document],
    *,
    ranks: Sequence[int] = (1, 4, 12, 32),
    segment: int = 256,
    scope: Scope = "all",
    copy_gap: int = 512,
    method: Method | None = None,
    batch: int | None = None,
    out: Path | str | None = None,
    name: str = "model",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> pa.Table:
    """Losses of every document at every rank, and untouched.

    Args:
        documents: texts (for the model's tokenizer), arrays of token ids, or a dict of texts by name.
        ranks: directions kept at every boundary, 1 .. min(K, V); the untouched rank min(K, V) is always run.
        segment: tokens between boundaries, fewer than the longest document has.
        scope: "all" cuts all heads at once, "layer" one linear layer at a time, "head" one head at a time.
        copy_gap: distance that makes a repeated bigram a copy token, in tokens.
        method: of the truncation, see :func:`jaxdelta.ops.low_rank.truncate`.
        batch: rows (document x world) run together; None takes as many as fit the memory.
        out: results folder; parts finished there are not run again.
        name: of the model, for the manifest.
        progress: called with the segments x rows done and their total.

    Returns:
        One row per document x world: document, rank, layer (the model's) and head (null where the scope is wider),
        num_boundaries (after which a token is still predicted; where 0, nothing is cut), num_tokens (N - 1, all scored),
        loss, num_copy_tokens, copy_loss (null without copy tokens); losses in mean nats a scored token.

    Raises:
        ValueError: ranks, documents or segment out of bounds; ``ResultsError``, ``NonFiniteError`` and ``MemoryError`` of
            the modules that raise them.

    The width of the subspace follows from the largest rank of the sweep, so a row may differ within the truncation's
    tolerance from that of a sweep over other ranks.
    """
    check_model(model)
    segment, copy_gap = whole_number("segment", segment), whole_number("copy_gap", copy_gap)
    batch = None if batch is None else whole_number("batch", batch)
    if segment < 1 or copy_gap < 0 or (batch is not None and batch < 1):
        raise ValueError(
            f"segment = {segment}, copy_gap = {copy_gap}, batch = {batch}; expected at least 1 token, 0 tokens and 1 row"
        )
    config = model.config
    documents = _as_documents(documents, model)
    worlds = make_worlds(config, ranks, scope)
    grid = [(document, world) for document in documents for world in worlds]
    longest = max(len(d.tokens) for d in documents)
    if not num_boundaries(longest, segment):
        raise ValueError(f"the longest document has {longest} tokens: segments of {segment} leave no boundary to cut at")
    longest = -(-longest // segment) * segment
    planned = batch
    if planned is None:
        needed = memory.run_memory(config, dtype=model.dtype.name, segment=segment, max_length=longest)
        # One document's worlds keep a CPU busy, and a run that is killed loses no more than these.
        planned = memory.rows_that_fit(needed, len(worlds) if jax.default_backend() == "cpu" else len(grid))
    configuration = dict(
        analysis="sweep",
        **identity(model, name, documents, kept=out is not None),
        ranks=sorted({world.rank for world in worlds}),
        segment=segment,
        scope=scope,
        copy_gap=copy_gap,
        method=method,
    )
    results = None if out is None else Results(Path(out), configuration, {"batch": planned})
    if results is not None:
        planned = results.plan["batch"]
        if batch not in (None, planned):
            raise ResultsError(
                f"{out} was begun with batches of {planned} rows, not {batch}; go on with that, or elsewhere"
            )
    batch = planned

    max_rank = largest_rank([world.rank for world in worlds], config.max_rank)
    total, done, tables = len(grid) * (longest // segment), 0, []
    for index, begin in enumerate(range(0, len(grid), batch)):
        rows = grid[begin : begin + batch]
        table = results.part(index) if results is not None else None
        if table is None:
            before = done
            filled = rows + rows[:1] * (min(batch, len(grid)) - len(rows))  # one shape, compiled once

            def advance(i: int, before=before, rows=rows) -> None:
                progress(before + (i + 1) * len(rows), total)

            cut = Truncate(np.stack([rank_array(config, world) for _, world in filled]), method=method, max_rank=max_rank)
            losses = _run_rows(model, filled, cut, segment=segment, max_length=longest, advance=advance)
            table = _table(rows, losses, segment, copy_gap)
            if results is not None:
                results.write_part(index, table)
        done += len(rows) * (longest // segment)
        progress(done, total)
        tables.append(table)
    return pa.concat_tables(tables) if results is None else results.finish(len(tables))


def make_worlds(config: DecoderConfig, ranks: Sequence[int], scope: Scope = "all") -> list[World]:
    """The untouched world, then one for each rank and each part in scope.

    Raises:
        ValueError: no rank, one outside of 1 .. min(K, V), or an unknown scope.
    """
    if scope not in ("all", "layer", "head"):
        raise ValueError(f"scope is {scope!r}; expected all, layer or head")
    ranks = sorted(set(whole_numbers("ranks", ranks)))
    wrong = [r for r in ranks if not 1 <= r <= config.max_rank]
    if wrong or not ranks:
        raise ValueError(f"ranks {ranks}: expected whole numbers from 1 to min(K, V) = {config.max_rank}")
    layers = config.linear_layers if scope != "all" else (None,)
    heads = range(config.num_value_heads) if scope == "head" else (None,)
    cut = [World(r, layer, head) for r in ranks if r < config.max_rank for layer in layers for head in heads]
    return [World(config.max_rank), *cut]


def rank_array(config: DecoderConfig, world: World) -> np.ndarray:
    """Directions kept, int [L, H], of a world."""
    rank = np.full((len(config.linear_layers), config.num_value_heads), config.max_rank, np.int32)
    layer = slice(None) if world.layer is None else config.linear_layers.index(world.layer)
    rank[layer, slice(None) if world.head is None else world.head] = world.rank
    return rank


def uncut(rows: pa.Table) -> list[str]:
    """Names of the documents that are over before a state is cut: every world of theirs is the untouched one."""
    return list(dict.fromkeys(row["document"] for row in rows.to_pylist() if row["num_boundaries"] == 0))


def summarize(rows: pa.Table, *, copy_tokens: bool = False, with_uncut: bool = False) -> list[Summary]:
    """Each world over all documents, the untouched one first; of copy tokens over the documents that have any.

    Documents without a boundary would thin the differences out; they are left out unless ``with_uncut``.
    """
    left_out = set() if with_uncut else set(uncut(rows))
    column, count = ("copy_loss", "num_copy_tokens") if copy_tokens else ("loss", "num_tokens")
    by_world: dict[World, dict[str, float]] = {}
    for row in rows.to_pylist():
        losses = by_world.setdefault(World(row["rank"], row["layer"], row["head"]), {})
        if row[count] and row["document"] not in left_out:
            losses[row["document"]] = row[column]
    untouched = by_world[max(by_world, key=lambda world: (world.rank, world.layer is None))]
    if not untouched:
        return []
    base = np.array(list(untouched.values()))
    found = []
    for world, losses in by_world.items():
        values = np.array([losses[document] for document in untouched])
        difference, stderr = paired_difference(values, base)
        found.append(Summary(world, float(values.mean()), difference, stderr, 100 * difference / float(base.mean())))
    return sorted(found, key=lambda s: (-s.world.rank, s.world.layer or -1, s.world.head or -1))


def _as_documents(documents, model: Decoder) -> list[Document]:
    if isinstance(documents, str | bytes) or not np.iterable(documents):
        raise TypeError(f"documents is {shown(documents)}; expected a list of texts or of arrays of token ids, or a dict")
    documents = documents if isinstance(documents, dict) else list(documents)
    if isinstance(documents, list) and documents and np.isscalar(documents[0]) and not isinstance(documents[0], str):
        raise ValueError("documents is one row of token ids; expected a list of rows, such as [ids]")
    if not (isinstance(documents, list) and documents and isinstance(documents[0], Document)):
        documents = tokenize(documents, model.tokenizer, vocab_size=model.config.vocab_size)
    names = [document.name for document in documents]
    if len(set(names)) < len(names):
        raise ValueError(f"documents share names: {sorted({n for n in names if names.count(n) > 1})}")
    for document in documents:
        if len(document.tokens) < 2:
            raise ValueError(f"{document.name} has {len(document.tokens)} tokens; at least 2 are needed to score one")
        check_tokens(document.tokens, model.config.vocab_size)
    return documents


def _run_rows(
    model: Decoder, rows: list[tuple[Document, World]], cut: Truncate, *, segment: int, max_length: int, advance
) -> np.ndarray:
    lengths = np.array([len(document.tokens) for document, _ in rows])
    tokens = np.zeros((len(rows), max_length), np.int32)
    for row, (document, _) in zip(tokens, rows, strict=True):
        row[: len(document.tokens)] = document.tokens
    sizes = dict(segment=segment, lengths=lengths, max_length=max_length)
    try:
        return run(model, tokens, intervention=cut, after_segment=advance, **sizes).losses
    except NonFiniteError as error:
        document, world = rows[error.row]
        raise NonFiniteError(f"document {document.name}, rank {world.rank}: {error}", error.row) from None


def _table(rows: list[tuple[Document, World]], losses: np.ndarray, segment: int, copy_gap: int) -> pa.Table:
    def entries() -> Iterator[dict]:
        for (document, world), row in zip(rows, losses, strict=False):
            scored = row[: len(document.tokens) - 1].astype(np.float64)
            copies = copy_mask(document.tokens, copy_gap)
            yield dict(
                document=document.name,
                **world._asdict(),
                num_boundaries=num_boundaries(len(document.tokens), segment),
                num_tokens=len(scored),
                loss=scored.mean(),
                num_copy_tokens=int(copies.sum()),
                copy_loss=scored[copies].mean() if copies.any() else None,
            )

    return pa.Table.from_pylist(list(entries()), schema=SCHEMA)
