"""What the key tables of all families share: entries, matching of names, fields of ``config.json``."""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from jaxdelta.checkpoints.files import CheckpointError, some

HEAD, EMBED = "lm_head.weight", ("embed",)
COPY = "copy of the embedding"  # the group of a tied head that is stored too
# Buffers that older tools stored: functions of the configuration, which readers compute and no longer load.
ROTARY = re.compile(r"^(.*\.)?rotary(_emb)?\.((original_)?inv_freq|scale|(cos|sin)_(k_)?cached)$")
# Fields of config.json that would change what is read, and that no released model has.
ELSEWHERE = ("configuration_files", "per_layer_config")
MOST_LAYERS = 10_000


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
        return self.name if self.name == HEAD else prefix + self.name


def ignored_names(patterns: dict[str, re.Pattern], names: list[str]) -> dict[str, list[str]]:
    """The names of each group that has any."""
    groups = {group: sorted(n for n in names if pattern.match(n)) for group, pattern in patterns.items()}
    return {group: members for group, members in groups.items() if members}


def prefix_of(names: Collection[str], prefixes: Sequence[str]) -> str:
    """The first prefix that the names of layers have; the usual one, "model.", where there is no layer."""
    return next((p for p in prefixes if any(name.startswith(f"{p}layers.") for name in names)), "model.")


def match(
    expected: dict[Entry, tuple[str, ...]], names: set[str], *, tied: bool = False
) -> tuple[dict[Entry, tuple[str, ...]], dict[str, list[str]]]:
    """``expected``, where its tensors are exactly ``names``, and the names that repeat others.

    A ``tied`` head may be stored too: alone it is the embedding, beside it a copy (whose values are not looked at here).

    Raises:
        CheckpointError: tensors are missing, or are neither of the model nor of an ignored group; names them.
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


# Where a field may stand ("in rope_scaling", "at the top level"), and the fields that stand there.
Places: TypeAlias = Sequence[tuple[str, Mapping[str, Any]]]


def one_value(name: str, read: Places, *, beside: Places = (), default: Any = None) -> Any:
    """The value of a field that several places may hold.

    What tensors bear out by name (kinds of layers, a tied head, a gate) may differ, and is what the reference takes;
    for all else this is the rule.

    Args:
        name: of the field.
        read: places where the reference looks, the first one that it takes first.
        beside: places where the field may stand too, and where the reference does not look.
        default: what the reference takes where it finds none.

    Raises:
        CheckpointError: two places hold different values, or only one where the reference does not look; names them.
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
    """Whether the head is the embedding; of two levels the inner one counts, and the stored tensors must bear it out."""
    value = text.get("tie_word_embeddings", raw.get("tie_word_embeddings", False))
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json has tie_word_embeddings = {value!r}; expected true or false")
    return value


def layers(fields: dict[str, Any], default: int | None = None) -> int:
    """``num_hidden_layers`` of ``config.json``, small enough to list every layer."""
    count = field(fields, "num_hidden_layers", default)
    if not 0 <= count <= MOST_LAYERS:
        raise CheckpointError(f"config.json has num_hidden_layers = {count}; expected at most {MOST_LAYERS}")
    return count


def fraction(part: int, whole: int) -> float:
    """A fraction from which ``int(whole * fraction)``, as readers compute it, gives the part."""
    fraction = part / whole
    return fraction if int(whole * fraction) == part else math.nextafter(fraction, math.inf)


def require(fields: dict[str, Any], name: str, expected: Any, *, default: Any) -> None:
    """Raise CheckpointError where a field has a value that this library does not compute."""
    if fields.get(name, default) != expected:
        raise CheckpointError(f"config.json has {name} = {fields[name]!r}; only {expected!r} is computed here")


def refuse_elsewhere(fields: dict[str, Any]) -> None:
    """Raise CheckpointError where a configuration hands over to other files, or to other values for some layers."""
    for name in ELSEWHERE:
        require(fields, name, None, default=None)
