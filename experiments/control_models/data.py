"""The text the control models are trained on, its held-out documents, and the units that losses are reported in.

Question: which documents may be shipped, trained on and measured on, with none in both splits?
Command: ``python -m experiments.control_models.data [--write-documents]``, about 20 s on two cores.
Expected: a table of the two splits; the held-out documents together need 2.71 bits a byte under ``xz -9e``.

Losses are compared across tokenizers in bits per byte, ``(tokens / bytes) * loss / ln 2`` with the loss in nats per
token (Gao et al., The Pile, arXiv:2101.00027).
"""

import argparse
import lzma
import math
import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

ARCHIVE = Path(__file__).with_name("corpus.tar.xz")
DOCUMENTS = Path(__file__).parents[2] / "jaxdelta" / "assets" / "documents"
SEPARATOR = "<|endoftext|>"
VOCAB_SIZE = 2048

# Daniel shares no run of more than 60 characters with another book, whereas Kings and Chronicles or the synoptic
# gospels repeat one another. The entries under C are one long run of prose without tables.
HELD_OUT = frozenset({"kjv_daniel", "henry_v", "jargon_c", "macbeth", "merchant_of_venice", "tempest", "twelfth_night"})


@dataclass(frozen=True)
class CorpusDocument:
    """One document of the corpus.

    Attributes:
        name: a play or poem, a book of the Bible, or a section of the Jargon File.
        register: ``scripture``, ``drama`` (the poems too) or ``technical``.
        text: cleaned text.
    """

    name: str
    register: str
    text: str


@dataclass(frozen=True)
class Stretch:
    """Part of a document between two lines, each of which occurs once in it.

    Attributes:
        source: name of the document.
        opening: first line of the stretch.
        ending: first line after it.
    """

    source: str
    opening: str
    ending: str


STRETCHES: Mapping[str, Stretch] = {
    "daniel_1_4": Stretch("kjv_daniel", "Daniel 1", "Daniel 5"),
    "jargon_c_chain": Stretch("jargon_c", "   :C: n.", "   :chainik: /chi:'nik/"),
    "jargon_crack_cybercrud": Stretch("jargon_c", "   :crack:", "   :cyberpunk: /si:'ber·puhnk/, n.,adj."),
    "macbeth_act_4": Stretch("macbeth", "ACT IV.", "ACT V."),
    "merchant_of_venice_act_4": Stretch("merchant_of_venice", "ACT 4.", "ACT V."),
    "tempest_act_2": Stretch("tempest", "ACT 2", "ACT 3"),
}


def clean(text: str) -> str:
    """``text`` with Unix line ends and at most one blank line in a row, otherwise unchanged."""
    return re.sub(r"\n{3,}", "\n\n", text.replace("\r\n", "\n").replace("\r", "\n"))


def read_archive(path: Path = ARCHIVE) -> dict[str, str]:
    """The cleaned text of every file in the archive, by file name without folder and suffix."""
    with tarfile.open(path, "r:xz") as archive:
        files = {member.name: archive.extractfile(member) for member in archive if member.isfile()}
        return {Path(name).stem: clean(file.read().decode()) for name, file in files.items() if file}


def split_bible(text: str) -> dict[str, str]:
    """The books by name, for example ``kjv_1_samuel``; the heading of a chapter is a line such as ``1 Samuel 3``.

    The prefix distinguishes the Gospel of John from the play King John.
    """
    starts: dict[str, int] = {}
    for heading in re.finditer(r"^((?:\d )?[A-Z][A-Za-z ]*) \d+$", text, re.MULTILINE):
        starts.setdefault("kjv_" + heading[1].lower().replace(" ", "_"), heading.start())
    return _cut(text, starts)


def split_jargon(text: str) -> dict[str, str]:
    """Front matter, headwords and entries of each letter, and appendices.

    The headwords before the entries of a letter repeat the table of contents, so they are separate documents: held-out
    entries of a letter then have no copy in the training text.
    """
    starts = {"jargon_front": 0}
    for heading in re.finditer(r"^  ([0A-Z])$", text, re.MULTILINE):
        letter = heading[1].lower()
        starts[f"jargon_{letter}_headwords"] = heading.start()
        starts[f"jargon_{letter}"] = text.index("\n   :", heading.end()) + 1
    appendices = re.compile(r"^\s*Part\sIII\.\sAppendices$", re.MULTILINE).search(text)
    if appendices is None:
        raise ValueError("no appendices in the Jargon File")
    starts["jargon_appendices"] = appendices.start()
    return _cut(text, starts)


def _cut(text: str, starts: Mapping[str, int]) -> dict[str, str]:
    bounds = [*starts.values(), len(text)]
    return {name: text[begin:end].strip("\n") + "\n" for name, (begin, end) in zip(starts, pairwise(bounds), strict=True)}


def load_documents(path: Path = ARCHIVE) -> tuple[CorpusDocument, ...]:
    """Every document of the archive: Bible, Jargon File, then plays and poems in alphabetical order."""
    files = read_archive(path)
    registers = {
        "scripture": split_bible(files.pop("kjv")),
        "technical": split_jargon(files.pop("jargon")),
        "drama": files,
    }
    return tuple(
        CorpusDocument(name, register, text) for register, texts in registers.items() for name, text in texts.items()
    )


def split_documents(documents: Iterable[CorpusDocument]) -> tuple[tuple[CorpusDocument, ...], tuple[CorpusDocument, ...]]:
    """``documents`` as (training, held out); raises ValueError if a held-out document is missing or repeated."""
    documents = tuple(documents)
    held_out = tuple(document for document in documents if document.name in HELD_OUT)
    if len(held_out) != len(HELD_OUT):
        raise ValueError(f"missing or repeated: {sorted(HELD_OUT ^ {document.name for document in held_out})}")
    return tuple(document for document in documents if document.name not in HELD_OUT), held_out


def cut_stretch(stretch: Stretch, text: str) -> str:
    """The part of ``text`` that ``stretch`` bounds; raises ValueError if a bound is not exactly one line of ``text``."""
    lines = text.split("\n")
    for line in (stretch.opening, stretch.ending):
        if lines.count(line) != 1:
            raise ValueError(f"{line!r} is not one line of {stretch.source}")
    return "\n".join(lines[lines.index(stretch.opening) : lines.index(stretch.ending)]).strip("\n") + "\n"


def embedded_documents(held_out: Iterable[CorpusDocument]) -> dict[str, str]:
    """The stretches of held-out documents that ship with the library, by name."""
    texts = {document.name: document.text for document in held_out}
    return {name: cut_stretch(stretch, texts[stretch.source]) for name, stretch in STRETCHES.items()}


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Byte-level BPE without normalization, so that decoding inverts encoding on every text.

    Id 0 is ``SEPARATOR``, a special token: a text that contains it encodes to id 0, and ``decode`` keeps it only with
    ``skip_special_tokens=False``. Pass training text only.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[SEPARATOR],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def training_stream(tokenizer: Tokenizer, texts: Sequence[str]) -> np.ndarray:
    """uint16 tokens of ``texts``, with a separator before each and one at the end.

    A document that is measured alone has a separator before it too, so that its first token is predicted.

    Raises:
        ValueError: the vocabulary does not fit 16 bits.
    """
    if tokenizer.get_vocab_size() > 2**16:
        raise ValueError(f"{tokenizer.get_vocab_size()} tokens do not fit uint16")
    separator = np.array([tokenizer.token_to_id(SEPARATOR)], np.uint16)
    pieces = [np.array(encoding.ids, np.uint16) for encoding in tokenizer.encode_batch(texts)]
    return np.concatenate([part for piece in pieces for part in (separator, piece)] + [separator])


def bits_per_byte(loss_nats_per_token: float, num_tokens: int, num_bytes: int) -> float:
    """The loss of a text in bits for each UTF-8 byte; ``num_tokens`` counts predicted tokens."""
    return loss_nats_per_token * num_tokens / (num_bytes * math.log(2))


def xz_bits_per_byte(text: str) -> float:
    """Bits for each byte that ``xz -9e`` needs for ``text`` alone, including its container of about 70 bytes."""
    data = text.encode()
    return 8 * len(lzma.compress(data, format=lzma.FORMAT_XZ, preset=9 | lzma.PRESET_EXTREME)) / len(data)


def write_documents(texts: Mapping[str, str], folder: Path = DOCUMENTS) -> None:
    """Write each text to ``folder/name.txt`` as UTF-8 with Unix line ends."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.txt").write_bytes(text.encode())


def split_table(
    tokenizer: Tokenizer, train: Sequence[CorpusDocument], held_out: Sequence[CorpusDocument], embedded: Mapping[str, str]
) -> Iterator[str]:
    """Lines of the table of splits: training text by register, held-out and embedded documents one by one."""
    groups: dict[tuple[str, str, str], str] = {}
    for register in ("scripture", "technical", "drama"):
        texts = [document.text for document in train if document.register == register]
        groups["train", f"{len(texts)} documents", register] = "\n".join(texts)
    groups |= {("held out", document.name, document.register): document.text for document in held_out}
    groups["held out", "all", ""] = "\n".join(document.text for document in held_out)
    registers = {document.name: document.register for document in held_out}
    groups |= {("embedded", name, registers[STRETCHES[name].source]): text for name, text in embedded.items()}
    groups["embedded", "all", ""] = "\n".join(embedded.values())
    row = "{:9} {:25} {:10} {:>10} {:>10} {:>9} {:>9} {:>7}"
    yield row.format("split", "document", "register", "characters", "bytes", "tokens", "tok/byte", "xz bpb")
    for (split, name, register), text in groups.items():
        num_bytes, num_tokens = len(text.encode()), len(tokenizer.encode(text).ids)
        ratio, xz = f"{num_tokens / num_bytes:.4f}", f"{xz_bits_per_byte(text):.4f}"
        yield row.format(split, name, register, len(text), num_bytes, num_tokens, ratio, xz)


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the table of splits of the corpus.")
    parser.add_argument("--write-documents", action="store_true", help=f"write the embedded documents to {DOCUMENTS}")
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE)
    arguments = parser.parse_args()
    train, held_out = split_documents(load_documents())
    embedded = embedded_documents(held_out)
    tokenizer = train_tokenizer([document.text for document in train], arguments.vocab_size)
    for line in split_table(tokenizer, train, held_out, embedded):
        print(line, flush=True)
    if arguments.write_documents:
        write_documents(embedded)


if __name__ == "__main__":
    main()
