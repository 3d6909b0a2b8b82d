"""The resumable loop over documents that all analyses of many documents share.

The work is a list of items (a document, or a document at a rank), each with a key of JSON values. Items are computed in
units of one or several, and the results of a unit are a part of the results folder. The plan of units is written before the
work begins, and the first process to write it decides for all, so a killed call continues with the same units and ends with
the numbers of an uninterrupted one. A later call that asks for more plans only the missing items.

    plans/0000.json           units, as lists of keys
    parts/0000-0003.parquet   the rows of the fourth unit, or parts/0000-0003.zarr
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import xarray as xr

from jaxdelta.arguments import shown
from jaxdelta.checkpoints import parameters_sha256
from jaxdelta.documents import Document, tokenize
from jaxdelta.models.decoder import Decoder, check_model
from jaxdelta.results.folder import Results
from jaxdelta.runs.segments import check_tokens

Documents = Sequence[str | np.ndarray | Sequence[int] | Document] | Mapping[str, str | np.ndarray | Sequence[int]]
Progress = Callable[[int, int], None]
Finished = TypeVar("Finished", pa.Table, xr.Dataset)


class Item(NamedTuple):
    """A piece of work.

    Attributes:
        key: JSON values, unique in the folder.
        value: input of the work.
        cost: of the work, in units of progress.
    """

    key: tuple
    value: Any
    cost: int = 1


class Unit(NamedTuple):
    """Items that are computed together. ``part`` is the name of their results; None without a folder."""

    items: list[Item]
    part: str | None


def as_documents(documents: Documents, model: Decoder, *, fewest: int = 2) -> list[Document]:
    """Documents of any kind as token ids of ``model``, at least ``fewest`` ids in each.

    Raises:
        TypeError: ``model`` is not a Decoder, or ``documents`` is not a list or mapping of documents.
        ValueError: no documents, a text without a tokenizer, too few tokens, an id out of range, or two documents with the
            same name.
    """
    check_model(model)
    if isinstance(documents, str | bytes) or not np.iterable(documents):
        raise TypeError(f"documents is {shown(documents)}; expected a list of texts or of arrays of token ids, or a dict")
    documents = dict(documents) if isinstance(documents, Mapping) else list(documents)
    if isinstance(documents, list) and documents and np.isscalar(documents[0]) and not isinstance(documents[0], str):
        raise ValueError("documents is one row of token ids; expected a list of rows, such as [ids]")
    if not len(documents):
        raise ValueError("there are no documents")
    found = tokenize(documents, model.tokenizer, vocab_size=model.config.vocab_size, fewest=fewest)
    names = [document.name for document in found]
    if len(set(names)) < len(names):
        raise ValueError(f"documents share names: {sorted({n for n in names if names.count(n) > 1})}")
    for document in found:
        check_tokens(document.tokens, model.config.vocab_size)
    return found


def opened(out: Path | str | None, model: Decoder, name: str, analysis: str, **options: Any) -> Results | None:
    """The results folder of an analysis of a model; None without ``out``.

    Args:
        name: of the model.
        options: everything else that the numbers depend on, besides documents and versions.

    Raises:
        ResultsError: the folder cannot be used, or holds results of another configuration.
    """
    if out is None:
        return None
    about = dict(
        analysis=analysis,
        model=name,
        dtype=model.dtype.name,
        revision=model.origin.revision if model.origin else None,
        parameters=parameters_sha256(model),
        implementation=model.implementation.described(),
    )
    return Results(Path(out), about | options)


def joined_documents(found: Sequence[xr.Dataset]) -> xr.Dataset:
    """Datasets of single documents as one, NaN where a document has ended."""
    return xr.concat(found, "document", join="outer", data_vars="minimal", coords="minimal", compat="override")


def of_document(document: Document, **rest: Any) -> tuple:
    """Key of an item: the document's name and checksum, and the values of ``rest``."""
    return document.name, document.sha256(), *rest.values()


def worked(
    items: Sequence[Item],
    work: Callable[[list[Any], Progress], list[Finished]],
    *,
    results: Results | None = None,
    at_once: int = 1,
    progress: Progress = lambda done, total: None,
) -> list[Finished]:
    """The result of ``work`` for every item, in order.

    Args:
        work: takes the values of a unit's items and a progress function for the unit; returns a table or a dataset for each
            item.
        results: folder from which finished parts are read, and to which new ones are written.
        at_once: most items of a unit; 1 for datasets.
        progress: called with the cost done and the total cost.
    """
    total, done = sum(item.cost for item in items), 0
    found: dict[tuple, Finished] = {}
    for unit in _units(items, at_once, results):
        cost, before = sum(item.cost for item in unit.items), done
        parts = None if results is None else results.parts(unit.part, len(unit.items))
        if parts is None:

            def within(share: int, whole: int, cost=cost, before=before) -> None:
                progress(before + cost * share // max(1, whole), total)

            parts = work([item.value for item in unit.items], within)
            if results is not None:
                results.write_parts(unit.part, parts)
        done += cost
        progress(done, total)
        found |= {item.key: part for item, part in zip(unit.items, parts, strict=True)}
    return [found[item.key] for item in items]


def rows_of(
    items: Sequence[Item],
    work: Callable[[list[Any], Progress], list[pa.Table]],
    *,
    results: Results | None = None,
    at_once: int = 1,
    progress: Progress = lambda done, total: None,
) -> pa.Table:
    """The rows of all items, in order, also written to rows.parquet and rows.csv; arguments as in :func:`worked`."""
    rows = pa.concat_tables(worked(items, work, results=results, at_once=at_once, progress=progress))
    if results is not None:
        results.finish_rows(rows)
    return rows


def _units(items: Sequence[Item], at_once: int, results: Results | None) -> Iterator[Unit]:
    if results is None:
        yield from (Unit(list(items[i : i + at_once]), None) for i in range(0, len(items), at_once))
        return
    wanted = {item.key: item for item in items}
    number = 0
    while wanted:
        plan = results.plan(number)
        if plan is None:
            keys = list(wanted)
            plan = results.make_plan(number, [keys[i : i + at_once] for i in range(0, len(keys), at_once)])
        for index, keys in enumerate(plan):
            keys, part = list(map(_tuple, keys)), f"{number:04d}-{index:04d}"
            if not set(keys) & wanted.keys():
                continue
            more = not set(keys) <= wanted.keys() or len(keys) > at_once  # than wanted, or than fits now
            if more and not results.has(part):
                continue
            yield Unit([wanted.get(key) or Item(key, None, 0) for key in keys], part)
            wanted = {key: item for key, item in wanted.items() if key not in set(keys)}
        number += 1


def _tuple(key: Any) -> Any:
    return tuple(map(_tuple, key)) if isinstance(key, list) else key
