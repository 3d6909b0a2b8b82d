"""Checks of arguments other than arrays. A wrong type is a TypeError that names the argument and what is expected."""

import operator
from typing import Any


def whole_number(name: str, value: Any) -> int:
    """``value`` as an int.

    Raises:
        TypeError: it is not a whole number; True and False are not.
    """
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{name} is {shown(value)}; expected a whole number")


def whole_numbers(name: str, values: Any) -> list[int]:
    """``values`` as a list of ints.

    Raises:
        TypeError: ``values`` is not a sequence, or an entry is not a whole number.
    """
    try:
        found = None if isinstance(values, str | bytes) else list(values)
    except TypeError:
        found = None
    if found is None:
        raise TypeError(f"{name} is {shown(values)}; expected several whole numbers, such as (1, 4)")
    return [whole_number(f"one of {name}", value) for value in found]


def shown(value: Any) -> str:
    """``value`` for an error message: arrays by dtype and shape, long values by their type."""
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if dtype is not None and shape:
        return f"{dtype}{list(shape)}"
    text = repr(value)
    if len(text) <= 60 and "\n" not in text:
        return text
    article = "an" if type(value).__name__[0] in "AEIOUaeiou" else "a"
    return f"{article} {type(value).__name__}"
