"""What analyses share that run a model over one document at a time and give a dataset for each."""

from collections.abc import Callable, Sequence

import numpy as np
import xarray as xr

from jaxdelta.analysis.compare import padded_length
from jaxdelta.arguments import whole_number
from jaxdelta.documents import Document
from jaxdelta.models.decoder import Decoder
from jaxdelta.results.documents import Item, Progress, joined_documents, of_document, worked
from jaxdelta.results.folder import Results
from jaxdelta.runs.capacity import rows_that_fit, run_memory
from jaxdelta.runs.segments import Text, in_document


def checked_length(model: Decoder, documents: Sequence[Document], segment: int) -> int:
    """Places of a cache that fits every document, with which all share a compiled program.

    Raises:
        TypeError: ``segment`` is not a whole number.
        ValueError: the model has no linear layer, or ``segment`` is below 1.
        MemoryError: not even one document fits.
    """
    if not model.config.linear_layers:
        layers = model.config.num_layers
        raise ValueError(f"{model.config.title} of {layers} attention layers has no linear layer, and no state")
    if whole_number("segment", segment) < 1:
        raise ValueError(f"segment is {segment}; expected at least 1 token")
    length = padded_length(documents, segment)
    rows_that_fit(run_memory(model.config, dtype=model.dtype.name, segment=segment, max_length=length), 1)
    return length


def text_of_document(document: Document, segment: int) -> Text:
    """A document as segments, of one token or more."""
    ids = document.tokens.astype(np.int32)
    return Text(np.pad(ids, (0, 1 + -len(ids) % segment))[None], np.array([len(ids)]), segment)


def dataset_of(
    documents: Sequence[Document],
    work: Callable[[Document, Progress], xr.Dataset],
    *,
    segment: int,
    name: str,
    results: Results | None,
    progress: Progress,
    keys: Callable[[Document], dict] = lambda document: {},
    joined: Callable[[Sequence[xr.Dataset]], xr.Dataset] = joined_documents,
) -> xr.Dataset:
    """The datasets of all documents, joined, and written to the results folder as ``name``.zarr.

    Args:
        work: of a document; errors that it raises name the document.
        keys: JSON values that the dataset of a document depends on besides the document.
        joined: makes one dataset of those of all documents.
    """

    def of_unit(values: list[Document], within: Progress) -> list[xr.Dataset]:
        (document,) = values
        with in_document(document.name):
            return [work(document, within)]

    items = [Item(of_document(d, **keys(d)), d, -(-len(d.tokens) // segment)) for d in documents]
    whole = joined(worked(items, of_unit, results=results, progress=progress))
    if results is not None:
        results.finish_arrays(name, whole)
    return whole
