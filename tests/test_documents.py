"""Documents from files, strings and arrays, and what is said of those that are none."""

import json
import os
import re

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from jaxdelta.documents import Document, embedded_texts, read_documents, tokenize
from tests.tiny import tokenizer


def write(file, content):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


# Files


def test_a_text_file_is_a_document_named_after_it(tmp_path):
    files = [write(tmp_path / name, text) for name, text in (("b.txt", "w1 w2\n"), ("a.md", "w3"), ("no suffix", "w4"))]
    assert read_documents(files) == {"b.txt": "w1 w2\n", "a.md": "w3", "no suffix": "w4"}
    assert list(read_documents(files)) == ["b.txt", "a.md", "no suffix"]


def test_json_lines_hold_strings_or_objects_with_a_text(tmp_path):
    lines = ['"w1 w2"', "", json.dumps({"id": 5, "text": "w3\nw4"}), "  ", json.dumps({"text": "é\u2028漢"})]
    file = write(tmp_path / "a.jsonl", "\n".join(lines) + "\n")
    assert read_documents([file]) == {"a.jsonl:1": "w1 w2", "a.jsonl:3": "w3\nw4", "a.jsonl:5": "é\u2028漢"}


@pytest.mark.parametrize("suffix", [".jsonl", ".JSONL", ".ndjson", ".NDJson", ".jsonlines", ".json", ".JSON"])
def test_json_lines_are_read_under_each_of_their_names(tmp_path, suffix):
    """Several values, each on a line, are no one JSON text, whatever the name says."""
    file = write(tmp_path / f"a{suffix}", '{"text": "w1 {w2}"}\n"w3"\n')
    assert read_documents([file]) == {f"a{suffix}:1": "w1 {w2}", f"a{suffix}:2": "w3"}


@pytest.mark.parametrize("indent", [None, 1])
def test_an_array_in_json_holds_a_document_an_item(tmp_path, indent):
    file = write(tmp_path / "a.json", json.dumps(["w1 w2", {"text": "w3", "id": 5}], indent=indent))
    assert read_documents([file]) == {"a.json:1": "w1 w2", "a.json:2": "w3"}


@pytest.mark.parametrize("value", ["w1 w2", {"text": "w1 w2"}], ids=["string", "object"])
@pytest.mark.parametrize("indent", [None, 1])
def test_one_value_in_json_is_one_document(tmp_path, value, indent):
    assert read_documents([write(tmp_path / "a.json", json.dumps(value, indent=indent))]) == {"a.json": "w1 w2"}


def test_token_ids_are_documents_beside_texts(tmp_path):
    lines = [{"ids": [5, 3, 0, 2**31 - 1]}, {"text": "w1", "name": "of its own"}, {"name": "ids", "ids": [1, 2]}]
    found = read_documents([write(tmp_path / "a.ndjson", "\n".join(map(json.dumps, lines)))])
    assert list(found) == ["a.ndjson:1", "of its own", "ids"]
    assert found["of its own"] == "w1"
    np.testing.assert_array_equal(found["a.ndjson:1"], [5, 3, 0, 2**31 - 1])
    assert found["ids"].dtype == np.int32


@pytest.mark.parametrize("suffix", [".txt", ".md", ".py", ".html", ".xml", ".tex", ""])
def test_text_of_every_other_kind_is_read_as_it_stands(tmp_path, suffix):
    text = '<b>w1</b> {"text": "w2"}\n'
    assert read_documents([write(tmp_path / f"a{suffix}", text)]) == {f"a{suffix}": text}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.csv", "structured data"),
        ("a.TSV", "structured data"),
        ("a.ipynb", "structured data"),
        ("a.jsonl.gz", "an archive"),
        ("a.zip", "an archive"),
        ("a.parquet", "binary data"),
        ("a.npy", "binary data"),
        ("a.safetensors", "binary data"),
        ("a.PDF", "a file of another program"),
        ("a.docx", "a file of another program"),
    ],
)
def test_what_is_no_text_is_told_by_what_it_is(tmp_path, name, kind):
    with pytest.raises(ValueError, match=f"{re.escape(name)} is {kind}, no text; [a-z]+ ") as error:
        read_documents([write(tmp_path / name, "letters, all of them ASCII")])
    assert "\n" not in str(error.value)


def test_what_is_no_text_is_found_under_the_name_of_one(tmp_path):
    with pytest.raises(ValueError, match=r"a\.txt is a file of another program, no text; export its text"):
        read_documents([write(tmp_path / "a.txt", "%PDF-1.4 of ASCII alone")])
    with pytest.raises(ValueError, match=r"b\.txt is not UTF-8 text \(a zero byte at byte 1\)"):
        read_documents([write(tmp_path / "b.txt", "w1 w2".encode("utf-16-le"))])


@pytest.mark.parametrize("inside", ["\u2028", "\u2029", "\x85", "\x7f"], ids=ascii)
def test_a_json_line_ends_at_a_newline_alone(tmp_path, inside):
    """These stand unescaped in JSON strings; to str.splitlines some of them end a line."""
    file = write(tmp_path / "a.jsonl", json.dumps({"text": f"w1{inside}w2"}, ensure_ascii=False) + '\r\n"w3"\n')
    assert read_documents([file]) == {"a.jsonl:1": f"w1{inside}w2", "a.jsonl:2": "w3"}


@pytest.mark.parametrize(
    "name", ["ö u̇ 漢字 🙂.txt", "a:b*c?.txt", " leading.txt", "-option.txt", "[bold].txt", "line\nbreak.txt"]
)
def test_odd_names_are_names(tmp_path, name):
    assert read_documents([write(tmp_path / name, "w1 w2")]) == {name: "w1 w2"}


def test_files_of_one_name_go_by_their_paths(tmp_path):
    files = [write(tmp_path / folder, text) for folder, text in (("x/a.txt", "w1"), ("y/a.txt", "w2"), ("y/b.txt", "w3"))]
    assert read_documents(files) == {str(files[0]): "w1", str(files[1]): "w2", "b.txt": "w3"}


def test_a_file_given_twice_is_refused(tmp_path):
    file = write(tmp_path / "a.txt", "w1")
    with pytest.raises(ValueError, match=r"a\.txt is given twice"):
        read_documents([file, file])


def test_a_text_is_read_as_it_is_but_for_a_byte_order_mark(tmp_path):
    """Line ends are text: translated, a document would have other tokens."""
    files = [
        write(tmp_path / "a.txt", b"\xef\xbb\xbfw1\r\nw2\rw3\n"),
        write(tmp_path / "b.jsonl", b'\xef\xbb\xbf"w1\\r"\r\n'),
    ]
    assert read_documents(files) == {"a.txt": "w1\r\nw2\rw3\n", "b.jsonl:1": "w1\r"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "", r"a\.txt is empty"),
        ("a.txt", " \n\t ", r"a\.txt is empty"),
        ("a.jsonl", "", r"a\.jsonl holds no document"),
        ("a.jsonl", "\n \n", r"a\.jsonl holds no document"),
        ("a.jsonl", '"w1"\n\n""\n', r"a\.jsonl:3 is empty"),
        ("a.jsonl", '"w1"\n{"text": "w2"\n', r"a\.jsonl, line 2: not JSON"),
        ("a.jsonl", '"w1"\n{"body": "w2"}', r'a\.jsonl, line 2: expected a string, or an object with a string "text"'),
        ("a.jsonl", '{"text": ["w1"]}', r"a\.jsonl, line 1: expected a string"),
        ("a.jsonl", "5", r"a\.jsonl, line 1: expected a string"),
        ("a.jsonl", "null", r"a\.jsonl, line 1: expected a string"),
        ("a.jsonl", '["w1", "w2"]', r"a\.jsonl, line 1: expected a string"),
        ("a.jsonl", "[" * 100_000, r"a\.jsonl, line 1: not JSON \(nested too deeply\)"),
        ("a.json", "[" * 100_000, r"a\.json: not JSON \(nested too deeply\)"),
        ("a.jsonl", '"w1"\n{"id": ' + "9" * 5000 + "}", r"a\.jsonl, line 2: not JSON \(a number has too many digits\)"),
        ("a.json", '{"text": "w1"', r"a\.json: not JSON"),
        ("a.json", '[\n"w1",\n"w2"\n', r"a\.json: not JSON"),
        ("a.json", "[]", r"a\.json holds no document"),
        ("a.json", "", r"a\.json holds no document"),
        (
            "a.json",
            "[1, 2, 3]",
            r'a\.json, item 1: expected a string, or an object with a string "text" or token ids "ids"',
        ),
        ("a.json", '["w1", {"body": "w2"}]', r"a\.json, item 2: expected a string"),
        ("a.json", '{"data": ["w1"]}', r"a\.json: expected a string"),
        ("a.json", "5", r"a\.json: expected a string"),
        ("a.jsonl", '{"text": "w1", "ids": [1]}', r'a\.jsonl, line 1: holds both "text" and "ids"'),
        ("a.jsonl", '{"ids": "1 2"}', r'a\.jsonl, line 1: expected "ids" to be a list of token ids'),
        ("a.jsonl", '{"ids": [1, 2.0]}', r'a\.jsonl, line 1: "ids" has 2\.0 at index 1; expected whole numbers'),
        ("a.jsonl", '{"ids": [1, true]}', r'a\.jsonl, line 1: "ids" has True at index 1'),
        ("a.jsonl", '{"ids": [1, -1]}', r'a\.jsonl, line 1: "ids" has -1 at index 1; expected whole numbers of at least 0'),
        ("a.jsonl", '{"ids": [2147483648]}', r'a\.jsonl, line 1: "ids" has 2147483648 at index 0; expected whole numbers'),
        ("a.jsonl", '{"ids": [[1, 2]]}', r'a\.jsonl, line 1: "ids" has \[1, 2\] at index 0'),
        ("a.jsonl", '{"ids": [1, 2], "name": 5}', r"""a\.jsonl, line 1: "name" is '5'; expected a string"""),
        ("a.jsonl", '{"ids": [1, 2], "name": " "}', r'a\.jsonl, line 1: "name" is'),
        ("a.jsonl", '{"text": "w1", "name": "n"}\n{"text": "w2", "name": "n"}', "n is given twice"),
        ("a.jsonl", '"w1"\n{"text": "w2", "text": "w3"}', r'a\.jsonl, line 2: the key "text" is given twice; keep the one'),
        ("a.json", '{"ids": [1, 2], "ids": [3, 4]}\n"w1"', r'a\.json, line 1: the key "ids" is given twice'),
        ("a.json", '["w1", {"text": "w2", "text": "w3"}]', r'a\.json: the key "text" is given twice'),
        ("a.txt", '{"text": "w2", "text": "w3"}', r"a\.txt holds JSON lines"),
        ("a.txt", b"w1 \xff w2", r"a\.txt is not UTF-8 \(invalid start byte at byte 3\)"),
        ("a.txt", bytes(range(256)), r"a\.txt is not UTF-8"),
        ("a.jsonl", b'"\xff"', r"a\.jsonl is not UTF-8"),
        ("a.txt", "w1 w2".encode("utf-16"), r"a\.txt is not UTF-8"),
    ],
)
def test_a_file_that_holds_no_text_is_named_with_its_line(tmp_path, name, content, message):
    with pytest.raises(ValueError, match=message) as error:
        read_documents([write(tmp_path / name, content)])
    assert "\n" not in str(error.value)


def test_half_a_surrogate_pair_is_refused_with_its_line(tmp_path):
    """JSON may spell one; it is no text, and no tokenizer takes it."""
    with pytest.raises(ValueError, match=r"a\.jsonl(, line |:)2"):
        read_documents([write(tmp_path / "a.jsonl", '"w1 w2"\n"w1 \\ud800 w2"\n')])


def test_a_file_name_that_is_no_text_is_refused_or_read(tmp_path):
    """Names are bytes to the system; one that cannot be written to the rows must not cost a whole run."""
    file = tmp_path / os.fsdecode(b"\xff.txt")
    write(file, "w1 w2")
    try:
        names = list(read_documents([file]))
    except ValueError:
        return
    assert names[0].encode("utf-8")


@pytest.mark.parametrize(
    ("place", "message"),
    [("missing.txt", r"missing\.txt is missing"), (".", "is a folder"), ("a.txt/b.txt", "cannot be read")],
)
def test_a_place_without_a_text_is_named(tmp_path, place, message):
    write(tmp_path / "a.txt", "w1")
    with pytest.raises(ValueError, match=message):
        read_documents([tmp_path / place])


# Tokens


def test_texts_become_the_tokenizers_ids_and_nothing_else():
    documents = tokenize({"one": "w5 w3 other w5", "two": "w1 w2"}, tokenizer())
    assert [d.name for d in documents] == ["one", "two"]
    np.testing.assert_array_equal(documents[0].tokens, [5, 3, 90, 5])


def test_a_word_without_a_row_in_the_embedding_is_named_where_a_text_uses_it():
    """A tokenizer may have more words than the model has rows; texts that use none of them are read."""
    assert len(tokenize({"one": "w1 w2 w88"}, tokenizer(), vocab_size=89)[0].tokens) == 3
    with pytest.raises(ValueError, match=r"two uses the word 'w89', whose id 89 has no row in the model's embedding of 89"):
        tokenize({"one": "w1 w2", "two": "w1 w89 w2"}, tokenizer(), vocab_size=89)


def test_no_token_is_added_where_the_tokenizer_would():
    adding = tokenizer()
    adding.post_processor = TemplateProcessing(single="w0 $A w0", special_tokens=[("w0", 0)])
    np.testing.assert_array_equal(tokenize(["w5 w3"], adding)[0].tokens, [5, 3])


@pytest.mark.parametrize("dtype", [np.int64, np.uint16, np.int8, np.uint64, ">i4"])
def test_arrays_of_any_whole_numbers_are_documents(dtype):
    """Their checksum is that of the ids, whatever held them."""
    document = tokenize([np.array([5, 3], dtype)], None)[0]
    np.testing.assert_array_equal(document.tokens, [5, 3])
    assert document.sha256() == Document("x", np.array([5, 3], np.int32)).sha256()


def test_checksums_tell_documents_apart():
    sums = {Document("x", np.array(ids)).sha256() for ids in ([5, 3], [3, 5], [5, 3, 0], [5])}
    assert len(sums) == 4


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (np.array(5), r"of shape \(\)"),
        (np.array([[5, 3]]), r"of shape \(1, 2\)"),
        (np.array([5.0, 3.0]), "float64"),
        (np.array([True, False]), "bool"),
        (np.array(["w1", "w2"]), "expected one row of token ids"),
        (np.array([], np.int32), "has 0 tokens; at least 2"),
        (np.array([5]), "has 1 tokens; at least 2"),
        ("w5", "has 1 tokens; at least 2"),
        ("", "has 0 tokens; at least 2"),
    ],
    ids=["0-d", "2-d", "float", "bool", "words", "empty", "one token", "one word", "no word"],
)
def test_what_is_no_row_of_tokens_is_refused_by_name(document, message):
    with pytest.raises(ValueError, match=f"document_1 .*{message}"):
        tokenize([np.array([1, 2]), document], tokenizer())


@pytest.mark.parametrize(("ids", "wrong"), [([5, 97], 97), ([-1, 5], -1), ([5, 3, 2**31 - 1], 2**31 - 1)])
def test_an_id_without_a_row_in_the_embedding_is_refused_by_name(ids, wrong):
    with pytest.raises(ValueError, match=f"document_1 has the token id {wrong}; the model's run from 0 to 96"):
        tokenize([np.array([5, 96]), np.array(ids)], None, vocab_size=97)


@pytest.mark.usefixtures("as_for_users")
@pytest.mark.parametrize("name", [1, None, "", " ", b"a"], ids=repr)
def test_a_name_that_is_no_text_is_refused(name):
    for documents in ({name: [1, 2]}, [Document(name, np.arange(3))]):
        with pytest.raises(ValueError, match=rf"the name of a document is {re.escape(repr(name))}; expected a string"):
            tokenize(documents, None)


@pytest.mark.parametrize(
    "documents", [["w1 \ud800 w2"], {"\ud800": "w1 w2"}, {"\ud800": [1, 2]}], ids=["text", "name", "ids"]
)
def test_half_a_surrogate_pair_is_refused_before_a_tokenizer_sees_it(documents):
    with pytest.raises(ValueError, match="holds half a surrogate pair, which is no text"):
        tokenize(documents, tokenizer())


@pytest.mark.usefixtures("as_for_users")
def test_rows_of_several_lengths_are_no_document():
    with pytest.raises(ValueError, match=r"a is \[\[1, 2\], \[3\]\]; expected one row of token ids"):
        tokenize({"a": [[1, 2], [3]]}, None)


def test_masked_ids_are_not_run_without_a_word():
    with pytest.raises(ValueError, match="a is a masked array, whose masked ids would be run"):
        tokenize({"a": np.ma.masked_array([1, 2, 3], mask=[False, True, False])}, None)
    (whole,) = tokenize({"a": np.ma.masked_array([1, 2, 3])}, None)
    assert whole.tokens.tolist() == [1, 2, 3]


def test_a_text_needs_a_tokenizer():
    with pytest.raises(ValueError, match=r"the model has no tokenizer\.json; give documents as arrays of token ids"):
        tokenize(["w1 w2"], None)


def test_no_documents_are_refused():
    with pytest.raises(ValueError, match="no documents"):
        tokenize([], tokenizer())


def test_a_text_alone_is_not_taken_for_a_list_of_them():
    """It is a sequence of letters, each of which would be a document."""
    with pytest.raises(ValueError, match="expected a list"):
        tokenize("w1 w2 w3", tokenizer())


# The documents that ship


def test_the_embedded_documents_are_several_thousand_tokens_long():
    """Copy tokens need more than 512 tokens before them. 4 bytes a token is more than byte-level BPE reaches."""
    texts = embedded_texts()
    assert len(texts) >= 4
    assert min(len(text.encode()) for text in texts.values()) > 4 * 4 * 512


@pytest.mark.parametrize("name", ["a.txt", "a.jl", "a", "a.jsonl.txt"])
def test_json_lines_under_another_name_are_no_prose(tmp_path, name):
    (tmp_path / name).write_text('{"text": "w1 w2"}\n{"text": "w3 w4"}\n')
    with pytest.raises(ValueError, match=r"holds JSON lines, no plain text; name it \.jsonl"):
        read_documents([tmp_path / name])
    (tmp_path / name).write_text('12\n{13} "w1"\n')
    assert len(read_documents([tmp_path / name])) == 1
