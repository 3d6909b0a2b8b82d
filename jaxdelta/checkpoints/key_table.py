"""What the key tables of all families share: entries, matching of names, fields of ``config.json``."""

import math
import re
from typing import Any, NamedTuple

from jaxdelta.checkpoints.files import CheckpointError


class Entry(NamedTuple):
    """One tensor of the model.

    Attributes:
        path: of the parameter in the module tree.
        name: in the checkpoint, without the prefix; the head's has none.
        shape: as stored.
    """

    path: tuple
    name: str
    shape: tuple[int, ...]

    def stored_name(self, prefix: str = "model.") -> str:
        """Name in a checkpoint whose text tensors, the head apart, have this prefix."""
        return self.name if self.name == "lm_head.weight" else prefix + self.name


def ignored_names(patterns: dict[str, re.Pattern], names: list[str]) -> dict[str, list[str]]:
    """The names of each group that has any."""
    groups = {group: sorted(n for n in names if pattern.match(n)) for group, pattern in patterns.items()}
    return {group: members for group, members in groups.items() if members}


def match(expected: dict[Entry, tuple[str, ...]], names: set[str]) -> dict[Entry, tuple[str, ...]]:
    """``expected``, where its tensors are exactly ``names``.

    Raises:
        CheckpointError: tensors are missing, or are neither of the model nor of an ignored group; names them.
    """
    wanted = {n for parts in expected.values() for n in parts}
    missing, extra = sorted(wanted - names), sorted(names - wanted)
    if missing or extra:
        tied = "; tie_word_embeddings contradicts lm_head.weight" if "lm_head.weight" in {*missing, *extra} else ""
        raise CheckpointError(
            f"tensors missing: {some(missing)}; tensors that no part of the model uses: {some(extra)}{tied}"
        )
    return expected


def some(names: list[str]) -> str:
    """The first few of ``names``."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") if names else "none"


def field(fields: dict[str, Any], name: str, default: int | None = None) -> int:
    """A whole number of ``config.json``."""
    value = fields.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= 2**31:
        raise CheckpointError(f"config.json has {name} = {value!r}; expected a whole number below 2^31")
    return value


def real(fields: dict[str, Any], name: str, default: float | None = None) -> float:
    """A positive number of ``config.json``."""
    value = fields.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e30:
        raise CheckpointError(f"config.json has {name} = {value!r}; expected a positive number below 1e30")
    return float(value)


def tied_embeddings(text: dict[str, Any], raw: dict[str, Any]) -> bool:
    """Whether the head is the embedding; the flag may stand at either level."""
    value = text.get("tie_word_embeddings", raw.get("tie_word_embeddings", False))
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json has tie_word_embeddings = {value!r}; expected true or false")
    return value


def fraction(part: int, whole: int) -> float:
    """A fraction from which ``int(whole * fraction)``, as readers compute it, gives the part."""
    fraction = part / whole
    return fraction if int(whole * fraction) == part else math.nextafter(fraction, math.inf)


def require(fields: dict[str, Any], name: str, expected: Any, *, default: Any) -> None:
    """Raise CheckpointError where a field has a value that this library does not compute."""
    if fields.get(name, default) != expected:
        raise CheckpointError(f"config.json has {name} = {fields[name]!r}; only {expected!r} is computed here")
