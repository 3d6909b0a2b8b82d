"""Documents: plain text or JSON lines from files, and the held-out ones that ship with the library."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from jaxdelta.checkpoints import parameters_sha256
from jaxdelta.models.decoder import Decoder

EMBEDDED = Path(__file__).parents[1] / "assets" / "documents"


@dataclass(frozen=True)
class Document:
    """A named sequence of token ids.

    Attributes:
        name: of the file (its path where two share a name), or ``file:line`` in JSON lines.
        tokens: whole numbers [N], N >= 2.
    """

    name: str
    tokens: np.ndarray

    def head(self, count: int | None) -> "Document":
        """The first ``count`` tokens; all where None."""
        return self if count is None else Document(self.name, self.tokens[: max(0, count)])

    def sha256(self) -> str:
        """Checksum of the token ids."""
        return hashlib.sha256(np.ascontiguousarray(self.tokens, np.int32).tobytes()).hexdigest()


def embedded_texts() -> dict[str, str]:
    """The held-out documents of the embedded control model, by name."""
    return {file.stem: file.read_text(encoding="utf-8") for file in sorted(EMBEDDED.glob("*.txt"))}


def read_texts(files: Iterable[Path]) -> dict[str, str]:
    """Texts by name; a ``.jsonl`` file holds one a line, a JSON string or an object with a string ``text``.

    Raises:
        ValueError: a file is missing, empty, not UTF-8 or not JSON lines; names it and the line.
    """
    files = [Path(file) for file in files]
    names = [file.name for file in files]
    texts: dict[str, str] = {}
    for file in files:
        for name, text in _texts_of(file, file.name if names.count(file.name) == 1 else str(file)):
            try:
                (name + text).encode()
            except UnicodeEncodeError:
                raise ValueError(f"{ascii(name)[1:-1]} or its text holds half a surrogate pair, which is no text") from None
            if not text.strip():
                raise ValueError(f"{name} is empty")
            if name in texts:
                raise ValueError(f"{name} is given twice; documents are told apart by name")
            texts[name] = text
    return texts


def tokenize(documents: Sequence[str | np.ndarray] | dict[str, str], tokenizer: Tokenizer | None) -> list[Document]:
    """Documents from texts or arrays of ids. No token is added before or after the text.

    Raises:
        ValueError: a text without a tokenizer, ids that are not one row of whole numbers, fewer than two tokens.
    """
    if isinstance(documents, str):
        raise ValueError("documents is one string; expected a list of texts")
    named = documents.items() if isinstance(documents, dict) else ((f"document_{i}", d) for i, d in enumerate(documents))
    found = []
    for name, document in named:
        if isinstance(document, str):
            if tokenizer is None:
                raise ValueError("the model has no tokenizer.json; give documents as arrays of token ids")
            tokens = np.asarray(tokenizer.encode(document, add_special_tokens=False).ids, np.int32)
        else:
            tokens = np.asarray(document)
            if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
                raise ValueError(f"{name} is {tokens.dtype} of shape {tokens.shape}; expected one row of token ids")
        if len(tokens) < 2:
            raise ValueError(f"{name} has {len(tokens)} tokens; at least 2 are needed to score one")
        found.append(Document(name, tokens))
    if not found:
        raise ValueError("no documents")
    return found


def _texts_of(file: Path, name: str) -> Iterable[tuple[str, str]]:
    try:
        content = file.read_bytes().decode("utf-8-sig")  # as it is, line ends included
    except FileNotFoundError:
        raise ValueError(f"{file} is missing") from None
    except IsADirectoryError:
        raise ValueError(f"{file} is a folder; expected a text file or JSON lines") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 ({error.reason} at byte {error.start})") from None
    except OSError as error:
        raise ValueError(f"{file} cannot be read ({error.strerror})") from None
    if file.suffix != ".jsonl":
        yield name, content
        return
    lines = [(number, line) for number, line in enumerate(content.split("\n"), 1) if line.strip()]
    if not lines:
        raise ValueError(f"{file} holds no document")
    for number, line in lines:
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{file}, line {number}: not JSON ({error.msg})") from None
        text = value.get("text") if isinstance(value, dict) else value
        if not isinstance(text, str):
            raise ValueError(f'{file}, line {number}: expected a string, or an object with a string "text"')
        yield f"{name}:{number}", text


def identity(model: Decoder, name: str, documents: Sequence[Document], *, kept: bool) -> dict[str, Any]:
    """What tells runs of models over documents apart, as JSON has it; the parameters' checksum only of those ``kept``."""
    return dict(
        model=name,
        dtype=model.dtype.name,
        revision=model.origin.revision if model.origin else None,
        parameters=parameters_sha256(model) if kept else None,
        documents=[[d.name, d.sha256()] for d in documents],  # a list: parts are cut in its order
    )
