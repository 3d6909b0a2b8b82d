"""JSON of unknown origin. Whatever cannot be read raises a ValueError with a short reason."""

import json
from typing import Any

MAX_DEPTH = 100  # far above the nesting of configurations, far below Python's recursion limit


class RepeatedKey(ValueError):
    """An object repeats a key. Python's reader would silently take the last value."""


def parse(text: str | bytes) -> Any:
    """The value of a JSON text; bytes are UTF-8, with or without a byte order mark.

    Raises:
        RepeatedKey: an object gives a key twice; the message is a phrase that names it.
        ValueError: the text is not JSON, or is too large or nested too deeply; the message is a phrase.
    """
    try:
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text.removeprefix("\ufeff")
        value = json.loads(text, object_pairs_hook=_object)
        depth = _depth(value)
    except RepeatedKey:
        raise
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in error.doc else ""
        raise ValueError(f"{error.msg} at {line}column {error.colno}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except MemoryError:
        raise ValueError("too large for the memory") from None
    except ValueError:  # of int()
        raise ValueError("a number has too many digits") from None
    if depth > MAX_DEPTH:
        raise ValueError("nested too deeply")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise RepeatedKey(f"the key {json.dumps(twice)[:60]} is given twice")
    return found


def _depth(value: Any) -> int:
    """Levels of lists and objects, counted without recursion, up to one more than MAX_DEPTH."""
    depth, level = 0, [value]
    while depth <= MAX_DEPTH and (level := [v for v in level if isinstance(v, dict | list)]):
        level = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)]
        depth += 1
    return depth
