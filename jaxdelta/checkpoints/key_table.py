"""Shared parts of the key tables of all families: entries, matching of names, fields of ``config.json``."""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from jaxdelta.checkpoints.files import CheckpointError, some

HEAD, EMBED = "lm_head.weight", ("embed",)
COPY = "copy of the embedding"  # group for a tied head that is also stored
# Buffers that older tools stored; readers now compute them from the configuration.
ROTARY = re.compile(r"^(.*\.)?rotary(_emb)?\.((original_)?inv_freq|scale|(cos|sin)_(k_)?cached)$")
# Fields of config.json that would change what is read; no released model has them.
ELSEWHERE = ("configuration_files", "per_layer_config")
MOST_LAYERS = 10_000


class Entry(NamedTuple):
    """One tensor of the model.

    Attributes:
        path: of the parameter in the module tree.
        name: in the checkpoint, without prefix (the head never has one).
        shape: stored shape.
    """

    path: tuple
    name: str
    shape: tuple[int, ...]

    def stored_name(self, prefix: str = "model.") -> str:
        """Name in a checkpoint with this prefix, which the head does not get."""
        return self.name if self.name == HEAD else prefix + self.name


def ignored_names(patterns: dict[str, re.Pattern], names: list[str]) -> dict[str, list[str]]:
    """Names that match the pattern of each group; groups without any are left out."""
    groups = {group: sorted(n for n in names if pattern.match(n)) for group, pattern in patterns.items()}
    return {group: members for group, members in groups.items() if members}


def prefix_of(names: Collection[str], prefixes: Sequence[str]) -> str:
    """The first of ``prefixes`` that names of layers have, or "model." if there is no layer."""
    return next((p for p in prefixes if any(name.startswith(f"{p}layers.") for name in names)), "model.")


def match(
    expected: dict[Entry, tuple[str, ...]], names: set[str], *, tied: bool = False
) -> tuple[dict[Entry, tuple[str, ...]], dict[str, list[str]]]:
    """Check that ``names`` are exactly the tensors of ``expected``; returns the names of each entry, and names of copies.

    A ``tied`` head may be stored too: without an embedding it is taken as the embedding, else it is a copy. The caller
    compares the values of copies.

    Raises:
        CheckpointError: tensors are missing, or belong neither to the model nor to an ignored group; names them.
    """
    copies: dict[str, list[str]] = {}
    if tied and HEAD in names:
        embed = next(entry for entry in expected if entry.path == EMBED)
        if expected[embed][0] in names:
            names, copies = names - {HEAD}, {COPY: [HEAD]}
        else:
            expected = expected | {embed: (HEAD,)}
    wanted = {n for parts in expected.values() for n in parts}
    missing, extra = sorted(wanted - names), sorted(names - wanted)
    if missing or extra:
        untied = "; tie_word_embeddings contradicts lm_head.weight" if HEAD in missing else ""
        raise CheckpointError(
            f"tensors missing: {some(missing)}; tensors that no part of the model uses: {some(extra)}{untied}"
        )
    return expected, copies


# Places that may have a field, such as "in rope_scaling" or "at the top level", and the fields there.
Places: TypeAlias = Sequence[tuple[str, Mapping[str, Any]]]


def one_value(name: str, read: Places, *, beside: Places = (), default: Any = None) -> Any:
    """The value of a field that several places may hold.

    Fields that names of tensors confirm (kinds of layers, a tied head, a gate) do not need this check.

    Args:
        name: of the field.
        read: places that the reference reads, in order of precedence.
        beside: other places that may hold the field and that the reference does not read.
        default: value that the reference takes if it finds none.

    Raises:
        CheckpointError: places hold different values, or only one that the reference does not read; names them.
    """
    found, others = ([(place, f[name]) for place, f in places if f.get(name) is not None] for places in (read, beside))
    place, value = found[0] if found else ("by default", default)
    for other, second in [*found[1:], *others]:
        if value is None:
            raise CheckpointError(
                f"config.json has {name} = {second!r} {other}, where it is not read; it belongs {read[0][0]}"
            )
        if second != value:
            raise CheckpointError(
                f"config.json has {name} = {second!r} {other} and {value!r} {place}; make them equal, or take one away"
            )
    return value


def field(fields: dict[str, Any], name: str, default: int | None = None) -> int:
    """The whole number in a field of ``config.json``; raises CheckpointError for any other value."""
    value = fields.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= 2**31:
        raise CheckpointError(f"config.json has {name} = {value!r}; expected a whole number below 2^31")
    return value


def real(fields: dict[str, Any], name: str, default: float | None = None) -> float:
    """The positive number in a field of ``config.json``; raises CheckpointError for any other value."""
    value = fields.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e30:
        raise CheckpointError(f"config.json has {name} = {value!r}; expected a positive number below 1e30")
    return float(value)


def tied_embeddings(text: dict[str, Any], raw: dict[str, Any]) -> bool:
    """Whether the head is the embedding, from the inner of two levels; the stored tensors must agree with it.

    Raises:
        CheckpointError: the field is not true or false.
    """
    value = text.get("tie_word_embeddings", raw.get("tie_word_embeddings", False))
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json has tie_word_embeddings = {value!r}; expected true or false")
    return value


def layers(fields: dict[str, Any], default: int | None = None) -> int:
    """``num_hidden_layers`` of ``config.json``; raises CheckpointError above MOST_LAYERS."""
    count = field(fields, "num_hidden_layers", default)
    if not 0 <= count <= MOST_LAYERS:
        raise CheckpointError(f"config.json has num_hidden_layers = {count}; expected at most {MOST_LAYERS}")
    return count


def fraction(part: int, whole: int) -> float:
    """A fraction for which ``int(whole * fraction)``, as readers compute it, is ``part``."""
    fraction = part / whole
    return fraction if int(whole * fraction) == part else math.nextafter(fraction, math.inf)


def require(fields: dict[str, Any], name: str, expected: Any, *, default: Any) -> None:
    """Raise CheckpointError if a field has another value, which this library does not support."""
    if fields.get(name, default) != expected:
        raise CheckpointError(f"config.json has {name} = {fields[name]!r}; only {expected!r} is computed here")


def refuse_elsewhere(fields: dict[str, Any]) -> None:
    """Raise CheckpointError if a configuration refers to other files, or has other values for some layers."""
    for name in ELSEWHERE:
        require(fields, name, None, default=None)
