"""Documents: texts or token ids from files, and the held-out texts that ship with the library.

The suffix of a file, in upper or lower case, tells its format. ``.jsonl``, ``.ndjson`` and ``.jsonlines`` are JSON lines,
one document on each line; ``.json`` is one document, an array of documents, or JSON lines. A document is a string, or an
object with a string ``text`` or with token ids ``ids``, and possibly a ``name``. Tables, arrays, archives and files of word
processors raise an error, and so do JSON lines under any other suffix. Every other file is one plain text, also markup and
code.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from jaxdelta.arguments import shown
from jaxdelta.json_text import RepeatedKey, parse

EMBEDDED = Path(__file__).parent / "assets" / "documents"
JSON_LINES = (".jsonl", ".ndjson", ".jsonlines")
LARGEST_ID = 2**31 - 1
AS_LINES = 'write its texts as JSON lines, {"text": "..."} on each, or rename it to .txt to score it as it stands'
NO_TEXT = {  # by suffix: what the file is, and what to do
    **dict.fromkeys((".csv", ".tsv", ".ipynb"), ("structured data", AS_LINES)),
    **dict.fromkeys((".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".tgz", ".7z"), ("an archive", "unpack it")),
    **dict.fromkeys(
        (".parquet", ".arrow", ".feather", ".npy", ".npz", ".pkl", ".pt", ".bin", ".safetensors", ".h5", ".sqlite", ".db"),
        ("binary data", 'write its texts or token ids as JSON lines, {"text": "..."} or {"ids": [...]} on each'),
    ),
    **dict.fromkeys(
        (".pdf", ".doc", ".docx", ".odt", ".rtf", ".epub", ".ps", ".xls", ".xlsx", ".ods"),
        ("a file of another program", "export its text"),
    ),
}


@dataclass(frozen=True)
class Document:
    """A named sequence of token ids.

    Attributes:
        name: unique name. From a file: the document's own, or the file's name (its path if two files share a name), with
            ``:line`` for JSON lines and ``:item`` for an array.
        tokens: whole numbers [N].
        scored: Bool[N - 1], whether the prediction of token i + 1 counts, for example only an answer; None is all.

    Raises:
        ValueError: ``scored`` is not such an array, or no token is scored.
    """

    name: str
    tokens: np.ndarray
    scored: np.ndarray | None = None

    def __post_init__(self):
        if self.scored is None:
            return
        scored = np.asarray(self.scored)
        if scored.dtype != bool or scored.shape != (len(self.tokens) - 1,):
            raise ValueError(
                f"scored of {self.name} is {scored.dtype}{list(scored.shape)}; expected bool[{len(self.tokens) - 1}]"
            )
        if not scored.any():
            raise ValueError(f"no token of {self.name} is scored")

    @property
    def mask(self) -> np.ndarray:
        """Which predictions count, Bool[N - 1]."""
        return np.ones(len(self.tokens) - 1, bool) if self.scored is None else np.asarray(self.scored)

    def head(self, count: int | None) -> "Document":
        """The document of the first ``count`` tokens; None is all."""
        if count is None or count >= len(self.tokens):
            return self
        scored = None if self.scored is None else self.scored[: max(0, count - 1)]
        return Document(self.name, self.tokens[: max(0, count)], scored)

    def sha256(self) -> str:
        """Checksum of the token ids and of ``scored``."""
        found = hashlib.sha256(np.ascontiguousarray(self.tokens, np.int32).tobytes())
        if self.scored is not None:
            found.update(np.packbits(self.scored).tobytes())
        return found.hexdigest()


def embedded_texts() -> dict[str, str]:
    """The held-out documents of the embedded control model, by name."""
    return {file.stem: file.read_text(encoding="utf-8") for file in sorted(EMBEDDED.glob("*.txt"))}


def read_documents(files: Iterable[Path]) -> dict[str, str | np.ndarray]:
    """Texts, or token ids int32 [N], by name; the module's docstring lists the formats.

    Raises:
        ValueError: a file is missing, empty, not UTF-8 or not of the format of its suffix, or two documents share a name;
            names the file and line.
    """
    files = [Path(file) for file in files]
    names = [file.name for file in files]
    found: dict[str, str | np.ndarray] = {}
    for file in files:
        for name, document in _documents_of(file, file.name if names.count(file.name) == 1 else str(file)):
            _check_text(name, name + document if isinstance(document, str) else name)
            if isinstance(document, str) and not document.strip():
                raise ValueError(f"{name} is empty")
            if name in found:
                raise ValueError(f"{name} is given twice; documents are told apart by name")
            found[name] = document
    return found


def tokenize(
    documents: Sequence[str | np.ndarray | Sequence[int] | Document] | dict[str, str | np.ndarray | Sequence[int]],
    tokenizer: Tokenizer | None,
    *,
    vocab_size: int | None = None,
    fewest: int = 2,
) -> list[Document]:
    """Documents from texts or arrays of ids; a Document keeps its name. No token is added before or after a text.

    Args:
        documents: in a sequence, or in a dict by name.
        tokenizer: for texts; may be None if there are none.
        vocab_size: rows of the model's embedding; a tokenizer may have more words. None does not check ids.
        fewest: least number of tokens of a document; scoring a token takes 2.

    Raises:
        ValueError: no documents, a text without a tokenizer, a name that is not a string, ids that are not one row of whole
            numbers, too few tokens, or an id or word without a row in the embedding.
    """
    if isinstance(documents, str):
        raise ValueError("documents is one string; expected a list of texts")
    named = documents.items() if isinstance(documents, dict) else ((f"document_{i}", d) for i, d in enumerate(documents))
    found = []
    for name, document in named:
        scored = None
        if isinstance(document, Document):
            name, document, scored = document.name, document.tokens, document.scored
        if not isinstance(name, str) or not name.strip():
            raise ValueError(f"the name of a document is {shown(name)}; expected a string")
        _check_text(name, name)
        if isinstance(document, str):
            _check_text(name, document)
            if tokenizer is None:
                raise ValueError(
                    "the model has no tokenizer.json; give documents as arrays of token ids, or in files as "
                    '{"ids": [...]} on a line of .jsonl, or name a tokenizer'
                )
            tokens = np.asarray(tokenizer.encode(document, add_special_tokens=False).ids, np.int32)
            _check_rows(name, tokens, tokenizer, vocab_size)
        else:
            tokens = _row(name, document)
            if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
                raise ValueError(f"{name} is {tokens.dtype} of shape {tokens.shape}; expected one row of token ids")
            if vocab_size is not None and len(without := tokens[(tokens < 0) | (tokens >= vocab_size)]):
                raise ValueError(f"{name} has the token id {without[0]}; the model's run from 0 to {vocab_size - 1}")
        if len(tokens) < fewest:
            why = " to score one" if fewest == 2 else ""
            raise ValueError(f"{name} has {len(tokens)} tokens; at least {fewest} are needed{why}")
        found.append(Document(name, tokens, scored))
    if not found:
        raise ValueError("no documents")
    return found


def _check_text(name: str, text: str) -> None:
    """Raise ValueError for a lone surrogate, which neither a tokenizer nor a file accepts."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{ascii(name)[1:-1]} or its text holds half a surrogate pair, which is no text") from None


def _row(name: str, document: Any) -> np.ndarray:
    if np.ma.isMaskedArray(document) and np.ma.getmaskarray(document).any():
        raise ValueError(f"{name} is a masked array, whose masked ids would be run; say with scored which tokens count")
    try:
        return np.asarray(document)
    except ValueError:  # rows of several lengths
        raise ValueError(f"{name} is {shown(document)}; expected one row of token ids") from None


def _check_rows(name: str, tokens: np.ndarray, tokenizer: Tokenizer, vocab_size: int | None) -> None:
    """Raise ValueError for a word without a row in the embedding."""
    if vocab_size is not None and len(without := tokens[tokens >= vocab_size]):
        raise ValueError(
            f"{name} uses the word {tokenizer.id_to_token(int(without[0]))!r}, whose id {without[0]} has no row in the "
            f"model's embedding of {vocab_size}; take it out of the text"
        )


def _documents_of(file: Path, name: str) -> Iterator[tuple[str, str | np.ndarray]]:
    content = _content(file)
    suffix = file.suffix.lower()
    if suffix not in (*JSON_LINES, ".json"):
        if _holds_json(content):
            raise ValueError(f"{file} holds JSON lines, no plain text; name it .jsonl, or take the texts out of them")
        yield name, content
        return
    lines = [(number, line) for number, line in enumerate(content.split("\n"), 1) if line.strip()]
    if not lines:
        raise ValueError(f"{file} holds no document")
    if suffix == ".json" and not _is_json_lines(lines):
        value = _parsed(content, str(file))
        items = enumerate(value, 1) if isinstance(value, list) else [(None, value)]
        values = [(f"{file}, item {i}" if i else str(file), f"{name}:{i}" if i else name, item) for i, item in items]
        if not values:
            raise ValueError(f"{file} holds no document")
    else:
        values = [(f"{file}, line {i}", f"{name}:{i}", _parsed(line, f"{file}, line {i}")) for i, line in lines]
    for where, default, value in values:
        yield _document(value, where, default)


def _content(file: Path) -> str:
    kind, remedy = NO_TEXT.get(file.suffix.lower(), (None, None))
    try:
        found = file.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"{file} is missing (a model's name goes before --documents)") from None
    except IsADirectoryError:
        raise ValueError(f"{file} is a folder; expected a text file or JSON lines") from None
    except OSError as error:
        raise ValueError(f"{file} cannot be read ({error.strerror})") from None
    if found.startswith(b"%PDF-"):  # which may be ASCII throughout
        kind, remedy = NO_TEXT[".pdf"]
    if kind:
        raise ValueError(f"{file} is {kind}, no text; {remedy}")
    try:
        content = found.decode("utf-8-sig")  # as it is, line ends included
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 ({error.reason} at byte {error.start})") from None
    if "\0" in content:
        raise ValueError(f"{file} is not UTF-8 text (a zero byte at byte {found.index(0)}); is it UTF-16, or binary data?")
    return content


def _holds_json(content: str) -> bool:
    """Whether the first line of a text is a JSON object, as in no prose."""
    try:
        return isinstance(parse(content.lstrip().partition("\n")[0]), dict)
    except RepeatedKey:
        return True
    except ValueError:
        return False


def _is_json_lines(lines: list[tuple[int, str]]) -> bool:
    """Whether there are several lines and the first alone is a JSON value, unlike in a value spread over lines."""
    try:
        parse(lines[0][1])
    except RepeatedKey:
        pass
    except ValueError:
        return False
    return len(lines) > 1


def _parsed(text: str, where: str) -> Any:
    try:
        return parse(text)
    except RepeatedKey as error:
        raise ValueError(f"{where}: {error}; keep the one that is meant") from None
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error})") from None


def _document(value: Any, where: str, name: str) -> tuple[str, str | np.ndarray]:
    """The name of a JSON value (``name`` if it has none) and its text or ids."""
    if isinstance(value, str):
        return name, value
    if not isinstance(value, dict) or not {"text", "ids"} & value.keys():
        raise ValueError(f'{where}: expected a string, or an object with a string "text" or token ids "ids"')
    if {"text", "ids"} <= value.keys():
        raise ValueError(f'{where}: holds both "text" and "ids"; keep the one that is to be run')
    name = value.get("name", name)
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f'{where}: "name" is {str(name)[:40]!r}; expected a string')
    if "ids" in value:
        return name, _ids(value["ids"], where)
    if not isinstance(value["text"], str):
        raise ValueError(f'{where}: expected a string, or an object with a string "text" or token ids "ids"')
    return name, value["text"]


def _ids(value: Any, where: str) -> np.ndarray:
    if not isinstance(value, list):
        raise ValueError(f'{where}: expected "ids" to be a list of token ids')
    for index, i in enumerate(value):
        if type(i) is not int or not 0 <= i <= LARGEST_ID:
            raise ValueError(
                f'{where}: "ids" has {str(i)[:40]} at index {index}; expected whole numbers of at least 0, below 2^31'
            )
    return np.array(value, np.int32)


def in_rows(arrays: Sequence[np.ndarray], length: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Arrays of several lengths as rows [B, N], zero after their ends, and their lengths; N is the longest where None."""
    lengths = np.array([len(x) for x in arrays])
    size = lengths.max() if length is None else length
    return np.stack([np.pad(x, (0, size - len(x))) for x in arrays]), lengths
