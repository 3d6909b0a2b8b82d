"""Arguments that are no arrays: one of another kind is a TypeError that names it and says what is expected."""

import operator
from typing import Any


def whole_number(name: str, value: Any) -> int:
    """``value`` as an int.

    Raises:
        TypeError: it is none, True and False among them.
    """
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{name} is {shown(value)}; expected a whole number")


def whole_numbers(name: str, values: Any) -> list[int]:
    """Several ints.

    Raises:
        TypeError: ``values`` is no sequence, or one of them is no whole number.
    """
    try:
        found = None if isinstance(values, str | bytes) else list(values)
    except TypeError:
        found = None
    if found is None:
        raise TypeError(f"{name} is {shown(values)}; expected several whole numbers, such as (1, 4)")
    return [whole_number(f"one of {name}", value) for value in found]


def shown(value: Any) -> str:
    """A value as an error message shows it: arrays by dtype and shape, what is long by its kind."""
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if dtype is not None and shape:
        return f"{dtype}{list(shape)}"
    text = repr(value)
    if len(text) <= 60 and "\n" not in text:
        return text
    article = "an" if type(value).__name__[0] in "AEIOUaeiou" else "a"
    return f"{article} {type(value).__name__}"
