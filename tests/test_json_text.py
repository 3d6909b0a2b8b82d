"""JSON of others: what is read, and the phrase for what is not."""

import json
import re

import pytest

from jaxdelta.json_text import MAX_DEPTH, parse


@pytest.mark.parametrize("value", [None, True, 1.5, "x\u00e9", [], {}, [[1, {"a": [None]}]], {"a": {"b": "[[["}}], ids=str)
@pytest.mark.parametrize(
    "form", [str, str.encode, lambda text: b"\xef\xbb\xbf" + text.encode(), lambda text: "\ufeff" + text]
)
def test_a_value_is_read_from_text_and_from_bytes(value, form):
    assert parse(form(json.dumps(value, ensure_ascii=False))) == value


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 100_000, "nested too deeply"),
        ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "nested too deeply"),
        ('{"a":' * (MAX_DEPTH + 1) + "1" + "}" * (MAX_DEPTH + 1), "nested too deeply"),
        ("9" * 5000, "a number has too many digits"),
        ('{"id": -' + "9" * 5000 + "}", "a number has too many digits"),
        (b'{"a": "\xff"}', "not UTF-8 at byte 7"),
        (b"\xff\xfe[\0]\0", "not UTF-8 at byte 0"),
        ("", "Expecting value at column 1"),
        ("{'a': 1}", "Expecting property name enclosed in double quotes at column 2"),
        ("[1,\n2", "Expecting ',' delimiter at line 2, column 2"),
        ("[1] [2]", "Extra data at column 5"),
        ('{"a": 1, "b": 2, "a": 1}', 'the key "a" is given twice'),
        ('[{"c": {"b": null, "b": null}}]', 'the key "b" is given twice'),
    ],
    ids=lambda value: str(value[:20]),
)
def test_what_cannot_be_read_is_one_phrase(text, reason):
    with pytest.raises(ValueError, match=f"^{re.escape(reason)}$"):
        parse(text)


def test_what_is_read_can_be_written_with_indentation():
    """The writer recurses in Python, so it bears less depth than the reader."""
    text = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert json.loads(json.dumps(parse(text), indent=2)) == json.loads(text)


def test_more_than_the_memory_holds_is_a_phrase(monkeypatch):
    def fails(text, **options):
        raise MemoryError

    monkeypatch.setattr(json, "loads", fails)
    with pytest.raises(ValueError, match=r"^too large for the memory$"):
        parse("[]")
