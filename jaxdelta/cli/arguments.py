"""Options that several commands share."""

import argparse
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxdelta.checkpoints import load, load_tokenizer
from jaxdelta.documents import Document, embedded_texts, read_documents, tokenize
from jaxdelta.models.decoder import Decoder

MODEL_HELP = "embedded model, folder in Hugging Face's format, or hub id (owner/name, downloaded whole)"


def default_of(function: Callable, name: str) -> Any:
    """The default of the parameter ``name`` of ``function``; options have the defaults of the functions they belong to."""
    return inspect.signature(function).parameters[name].default


def add_parameter(command: argparse.ArgumentParser, call: Callable, name: str, said: str, **options) -> None:
    """Add an option for a parameter of ``call``, with its type and default; ``said`` is its help."""
    default = default_of(call, name)
    command.add_argument(
        f"--{name.replace('_', '-')}",
        **{"type": type(default), "default": default, "help": f"{said}; default: %(default)s"} | options,
    )


def add_segment(command: argparse.ArgumentParser, call: Callable) -> None:
    """Add the option for tokens of a segment."""
    add_parameter(command, call, "segment", "tokens between two boundaries")


def add_run_arguments(command: argparse.ArgumentParser, name: str, call: Callable) -> None:
    """Add the arguments of a command that runs a model over documents by ``call``."""
    command.add_argument("model", nargs="?", default="control", help=f"{MODEL_HELP}; default: %(default)s")
    add_document_arguments(command, f"the same command continues it; default: results/{name}-MODEL", call)


def add_revision(command: argparse.ArgumentParser) -> None:
    """Add the option for the revision of a hub id."""
    command.add_argument("--revision", help="branch, tag or commit of a hub id; default: its main branch")


def add_document_arguments(command: argparse.ArgumentParser, out: str, call: Callable) -> None:
    """Add the options for documents, segments, dtype and results folder."""
    command.add_argument(
        "--documents",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="plain text, one document a file; JSON lines (.jsonl, .ndjson, .jsonlines), one a line; or .json, an array "
        'of them: a string, {"text": "..."} or token ids, {"ids": [...]}, with a "name" if wanted; '
        "default: the embedded held-out documents",
    )
    command.add_argument(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="tokenizer.json or a folder with one, for texts; default: the model's",
    )
    command.add_argument("--max-tokens", type=int, metavar="TOKENS", help="use this many leading tokens of each document")
    add_segment(command, call)
    said = "of parameters and activations; gates, norms and states are float32 in any case"
    add_parameter(command, load, "dtype", said, choices=("float32", "bfloat16"))
    command.add_argument("--out", type=Path, help=f"results folder; {out}")
    add_revision(command)


def inputs_of(arguments: argparse.Namespace, name: str) -> tuple[Path, Decoder, list[Document]]:
    """The results folder, the model and the documents for the command ``name``.

    Raises:
        ValueError: as :func:`load` and :func:`documents_of`.
    """
    out = arguments.out or Path("results") / f"{name}-{Path(arguments.model).name}"
    model = load(arguments.model, dtype=arguments.dtype, revision=arguments.revision)
    return out, model, documents_of(arguments, model)


def documents_of(arguments: argparse.Namespace, model: Decoder) -> list[Document]:
    """The given documents, by default the embedded ones, as token ids of ``model``.

    Raises:
        ValueError: a file, a text or an id cannot be used, or ``--max-tokens`` is below 1.
    """
    if arguments.max_tokens is not None and arguments.max_tokens < 1:
        raise ValueError(f"--max-tokens is {arguments.max_tokens}; expected at least 1")
    given = read_documents(arguments.documents) if arguments.documents else embedded_texts()
    tokenizer = load_tokenizer(arguments.tokenizer) if arguments.tokenizer else model.tokenizer
    documents = tokenize(given, tokenizer, vocab_size=model.config.vocab_size)
    return [d.head(arguments.max_tokens) for d in documents]


def whole(low: int, high: int) -> Callable[[str], int]:
    """An option type: a whole number from ``low`` to ``high``."""

    def read(text: str) -> int:
        value = int(text) if len(text) < 100 else None  # Python has its own error for thousands of digits
        if value is None or not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text[:40]} is not a whole number from {low} to {high}")
        return value

    read.__name__ = "int"  # the name that argparse prints if int() fails
    return read


SEED = whole(0, 2**32 - 1)  # jax uses 32 bits, so two larger seeds could draw the same


def ranks(text: str) -> list[int]:
    """An option type: whole numbers, separated by commas."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}; expected whole numbers with commas, e.g. 1,4,12,32") from None
