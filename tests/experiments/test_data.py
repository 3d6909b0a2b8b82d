"""The corpus of the control models: what is shipped, what is held out, and the units of its losses."""

import hashlib
import math
import random
import re
from itertools import pairwise

import numpy as np
import pytest

from experiments.control_models import data

BLOCK = 100
ODD_UNICODE = "a\u0301 \u200d👩‍👧 \u00a0\t\r\n\n\n  \x00\x7f\ufeff 漢字 \U0010ffff ﬁ NFKC½ it's  'tis"


@pytest.fixture(scope="module")
def splits():
    return data.split_documents(data.load_documents())


@pytest.fixture(scope="module")
def embedded(splits):
    return data.embedded_documents(splits[1])


@pytest.fixture(scope="module")
def tokenizer(splits):
    return data.train_tokenizer([document.text for document in splits[0]])


def letters(text: str) -> str:
    """Without case, punctuation, verse numbers and line breaks, which differ between copies of one passage."""
    return re.sub(r"[^a-z]+", " ", text.lower())


def shared_blocks(text: str, corpus: str) -> list[str]:
    """Blocks of ``corpus`` that ``text`` contains; any common run of 2 * BLOCK - 1 characters contains one."""
    windows = {hash(text[i : i + BLOCK]) for i in range(len(text) - BLOCK + 1)}
    blocks = (corpus[i : i + BLOCK] for i in range(0, len(corpus) - BLOCK + 1, BLOCK))
    return [block for block in blocks if hash(block) in windows and block in text]


def test_no_held_out_passage_is_in_training_text(splits):
    train, held_out = (" ".join(letters(document.text) for document in part) for part in splits)
    assert shared_blocks(held_out, train) == []


def test_a_planted_passage_is_found(splits, embedded):
    train = " ".join(letters(document.text) for document in splits[0][:5])
    passage = letters(embedded["daniel_1_4"])
    planted = train[:1234] + passage[777 : 777 + 2 * BLOCK - 1] + train[1234:]
    assert shared_blocks(passage, planted)


def test_splits_are_whole_documents(splits):
    train, held_out = splits
    names = [document.name for document in (*train, *held_out)]
    assert len(names) == len(set(names)) == 66 + 42 + 56
    assert {document.name for document in held_out} == data.HELD_OUT
    assert all(len(document.text) >= 60_000 for document in held_out)
    with pytest.raises(ValueError, match="macbeth"):
        data.split_documents(document for document in (*train, *held_out) if document.name != "macbeth")


def test_sections_hold_all_text():
    files = data.read_archive()
    for name, split in (("kjv", data.split_bible), ("jargon", data.split_jargon)):
        assert "".join("".join(split(files[name]).values()).split()) == "".join(files[name].split())


def test_clean_changes_line_ends_only():
    assert data.clean("a\r\nb\rc\n\n\n\nd  e\u00a0f\n\n") == "a\nb\nc\n\nd  e\u00a0f\n\n"


def test_archive_checksum():
    card = data.ARCHIVE.with_name("README.md").read_text()
    assert hashlib.sha256(data.ARCHIVE.read_bytes()).hexdigest() in card


def test_embedded_documents_are_stretches_of_held_out_documents(splits, embedded):
    sources = {document.name: document.text for document in splits[1]}
    card = (data.DOCUMENTS / "README.md").read_text()
    files = {path.stem: path.read_bytes() for path in data.DOCUMENTS.glob("*.txt")}
    assert files.keys() == embedded.keys() == data.STRETCHES.keys()
    for name, content in files.items():
        text = content.decode()
        assert text == embedded[name] and text in sources[data.STRETCHES[name].source]
        assert 21_000 < len(text) < 27_000
        assert f"| `{name}.txt` |" in card and hashlib.sha256(content).hexdigest() in card


def test_ambiguous_bound_is_refused():
    with pytest.raises(ValueError, match="'b' is not one line"):
        data.cut_stretch(data.Stretch("text", "a", "b"), "a\nb\nb\n")
    assert data.cut_stretch(data.Stretch("text", "a", "b"), "a\nx\n\nb\n") == "a\nx\n"


def test_tokenizer_round_trip(splits, tokenizer):
    assert tokenizer.get_vocab_size() == data.VOCAB_SIZE
    all_characters = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x11000)]))
    for text in (*(document.text for document in splits[1]), ODD_UNICODE, all_characters):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_training_stream_inverts(splits, tokenizer):
    texts = [document.text for document in splits[1][:2]] + [ODD_UNICODE]
    stream = data.training_stream(tokenizer, texts)
    separators = np.flatnonzero(stream == tokenizer.token_to_id(data.SEPARATOR))
    assert stream.dtype == np.uint16 and len(separators) == len(texts) + 1
    assert separators[0] == 0 and separators[-1] == len(stream) - 1
    pieces = [stream[begin + 1 : end] for begin, end in pairwise(separators)]
    assert [tokenizer.decode(piece.tolist()) for piece in pieces] == texts


def test_bits_per_byte_of_uniform_bytes_is_eight():
    assert data.bits_per_byte(math.log(256), 1000, 1000) == pytest.approx(8)
    assert data.bits_per_byte(math.log(2), 300, 1200) == pytest.approx(0.25)


def test_xz_bits_per_byte(splits):
    digits = "".join(random.Random(0).choices("0123456789abcdef", k=50_000))
    assert data.xz_bits_per_byte("a" * 100_000) < 0.02
    assert 4 <= data.xz_bits_per_byte(digits) < 4.6
    assert data.xz_bits_per_byte("\n".join(document.text for document in splits[1])) == pytest.approx(2.71, abs=0.02)
