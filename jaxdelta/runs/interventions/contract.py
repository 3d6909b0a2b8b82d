"""What an intervention is, and how runs share its compiled programs without mixing up its values.

At every boundary an intervention maps (carry, memory) to (carry, memory, record), inside a compiled function. Its memory is
a pytree of arrays that it keeps from one boundary to the next; the record is what the caller gets. Whatever the function
reads from the object becomes a constant of the program, so objects may share a program only if they agree in all of it:

* objects of a frozen dataclass share programs if their fields are equal. Fields declared ``compare=False`` do not count:
  their values reach the program through the memory that ``start`` returns, and reading one in the compiled part is an
  error;
* the programs of all other objects (a class with its own ``__init__``, attributes beside the fields or on the class, fields
  that hold functions, mutable containers or other objects) are compiled anew for every run, because equality cannot be
  checked.

A compiled function runs its Python code only while it is traced, so an object that counts its calls does not count
boundaries.
"""

import hashlib
import inspect
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

from jaxdelta.arguments import shown
from jaxdelta.models.carry import Carry

FIXED = {bool, int, float, complex, str, bytes, type(None), np.dtype}  # values of exactly these types cannot change


@runtime_checkable
class Intervention(Protocol):
    """What a segmented run needs of an intervention.

    Besides ``start`` and ``__call__``, sensitivities use two optional methods:

    ``frozen(carry, memory)``: the carry after the intervention, with singular directions as constants in its derivative;
    used for ``frozen_basis``.
    ``without_gap(carry, memory)``: Bool[L B H], arriving states at which the exact derivative does not exist.
    """

    def start(self, carry: Carry, boundaries: Sequence[int]) -> tuple["Intervention", Any]:
        """Settle all that shapes the compiled program; returns the intervention to call, and its memory before the run.

        Args:
            carry: the first carry of the run, for its shapes.
            boundaries: tokens seen at each boundary of the run. The parameter may be left out.
        """
        ...

    def __call__(self, carry: Carry, memory: Any) -> tuple[Carry, Any, Any]:
        """The carry after the intervention, the memory for the next boundary, and a record or None."""
        ...


class Started(NamedTuple):
    """A settled intervention, by which compiled functions are keyed, and its memory before the first boundary."""

    intervention: Intervention
    memory: Any


def started(intervention: "Intervention | Started", carry: Carry, boundaries: Iterable[int]) -> Started:
    """Settle an intervention for a run; a Started one is returned as it is.

    Raises:
        TypeError: ``intervention`` is not an intervention, or a compared field cannot be hashed.
        ValueError: its values do not fit the carry or the boundaries.
    """
    if isinstance(intervention, Started):
        return intervention
    check_intervention(intervention)
    boundaries = tuple(map(int, boundaries))
    try:
        inspect.signature(intervention.start).bind(carry, boundaries)
    except TypeError:
        settled, memory = intervention.start(carry)
    else:
        settled, memory = intervention.start(carry, boundaries)
    settled = _sealed(settled)
    try:
        hash(settled)
    except TypeError as error:
        raise TypeError(
            f"{type(intervention).__name__} tells its programs apart by a field that has no hash ({error}); "
            "declare it field(compare=False) and hand its value to the program in the memory that start returns"
        ) from None
    return Started(settled, memory)


def check_intervention(intervention: Any) -> None:
    """Raise TypeError if the argument is not an intervention, for example a function or a class; None is allowed."""
    if intervention is not None and (isinstance(intervention, type) or not isinstance(intervention, Intervention)):
        raise TypeError(
            f"intervention is {shown(intervention)}; expected an object with start(carry, boundaries) and "
            "__call__(carry, memory), such as Truncate(4)"
        )


def described(intervention: Intervention | None) -> Any:
    """JSON value that identifies an intervention: its class and fields, arrays by dtype, shape and checksum.

    Raises:
        ValueError: its fields may not tell all that it does, so results could be confused with those of another.
    """
    if intervention is None:
        return None
    if not is_declared(intervention):
        raise ValueError(
            f"results of {shown(intervention)} cannot be kept: no fields of a frozen dataclass tell all that it does, "
            "so they could not be told from those of another; make it one, or run without a results folder"
        )
    values = {f.name: _described(getattr(intervention, f.name), f.name) for f in fields(intervention)}
    return {"name": type(intervention).__name__} | values


def _described(value: Any, name: str) -> Any:
    if _is_intervention(value):
        return described(value)
    if isinstance(value, str | bool | int | float | type(None)):
        return value
    if isinstance(value, list | tuple):
        return [_described(x, name) for x in value]
    try:
        array = np.ascontiguousarray(value)
    except (TypeError, ValueError):
        array = np.array(None, object)
    if array.dtype == object:
        raise ValueError(f"results cannot be kept: field {name} is {shown(value)}, of which no text tells all")
    return (
        [str(array.dtype), *np.shape(value), hashlib.sha256(array.tobytes()).hexdigest()]
        if np.ndim(value)
        else array.item()
    )


def is_declared(intervention: Any) -> bool:
    """Whether all that a program can read from the object is in fields that cannot change."""
    cls = type(intervention)
    if not is_dataclass(cls) or not cls.__dataclass_params__.frozen or "__dataclass_fields__" not in vars(cls):
        return False
    beside = set(getattr(intervention, "__dict__", {})) - {f.name for f in fields(cls)}
    return not beside and not _class_values(cls) and all(map(_is_fixed, _shaping(intervention).values()))


def _class_values(cls: type) -> set[str]:
    """Attributes of a class, besides fields and functions, that a program could read and that may change."""
    known = {f.name for f in fields(cls)}
    found = set()
    for base in cls.__mro__:
        if base.__module__ in ("builtins", "typing"):
            continue
        for name, value in vars(base).items():
            is_code = callable(value) or hasattr(value, "__get__")  # functions, properties, slots
            if not (
                is_code or name in known or (name.startswith("__") and name.endswith("__")) or name.startswith("_abc_")
            ):
                found.add(name)
    return found - {"_is_protocol", "_is_runtime_protocol"}


def _shaping(intervention: Any) -> dict[str, Any]:
    return {f.name: getattr(intervention, f.name) for f in fields(intervention) if f.compare}


def _is_intervention(value: Any) -> bool:
    return isinstance(value, Intervention) and not isinstance(value, type)


def _is_fixed(value: Any) -> bool:
    """Whether a value cannot change. A missing hash raises later, in :func:`started`."""
    if type(value) in (tuple, frozenset):
        return all(map(_is_fixed, value))
    return type(value) in FIXED or _is_intervention(value) or isinstance(value, np.ndarray | jax.Array)


def _sealed(intervention: Any) -> Any:
    """A copy without ``compare=False`` fields, equal to copies with equal fields; else a wrapper equal only to itself."""
    if isinstance(intervention, _Sealed):
        return intervention
    if not is_declared(intervention):
        return _Alone(intervention)
    sealed = object.__new__(_sealed_class(type(intervention)))
    values = {name: _sealed_value(value) for name, value in _shaping(intervention).items()}
    for name, value in values.items():
        object.__setattr__(sealed, name, value)
    object.__setattr__(sealed, IDENTITY, tuple((name, _identity(value)) for name, value in values.items()))
    return sealed


def _sealed_value(value: Any) -> Any:
    """The value of a field with interventions in it, alone or in a tuple, sealed as well."""
    if type(value) in (tuple, frozenset):
        return type(value)(map(_sealed_value, value))
    return _sealed(value) if _is_intervention(value) else value


def _identity(value: Any) -> Any:
    """A value with its type: 1, 1.0 and True are equal but make different programs, and so do 0.0 and -0.0."""
    if type(value) in (tuple, frozenset):
        return type(value), type(value)(map(_identity, value))
    return type(value), repr(value) if type(value) in (float, complex) else value


IDENTITY = "_identity_of_program"


class _Sealed:
    """Equality and hash by the compared fields at the time of sealing, whatever the object's class defines."""

    def __eq__(self, other):
        return type(self) is type(other) and getattr(self, IDENTITY) == getattr(other, IDENTITY)

    def __hash__(self):
        return hash((type(self), getattr(self, IDENTITY)))

    def __repr__(self):
        return f"{type(self).__name__}({', '.join(f'{name}={value[1]!r}' for name, value in getattr(self, IDENTITY))})"


@cache
def _sealed_class(cls: type) -> type:
    """A subclass in which fields declared ``compare=False`` cannot be read."""

    def hidden(name: str) -> property:
        def read(self):
            raise TypeError(
                f"{cls.__name__}.{name} is declared compare=False, so objects that differ in it share a compiled program, "
                "which must not read it: hand its value on in the memory that start (of a Perturbation: prepare) returns, "
                "or declare it without compare=False"
            )

        return property(read)

    names = {f.name: hidden(f.name) for f in fields(cls) if not f.compare}
    return type(cls.__name__, (_Sealed, cls), names | {"__module__": cls.__module__, "__doc__": cls.__doc__})


class _Alone:
    """An intervention whose programs serve one run, because what it reads from itself is not known."""

    def __init__(self, intervention: Intervention):
        self._intervention = intervention

    def start(self, carry: Carry, boundaries: Sequence[int]) -> tuple[Intervention, Any]:
        return self._intervention.start(carry, boundaries)

    def __call__(self, carry: Carry, memory: Any) -> tuple[Carry, Any, Any]:
        return self._intervention(carry, memory)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._intervention, name)
