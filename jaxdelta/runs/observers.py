"""Observers and edits of named arrays, inside the compiled program of a segment.

The names are those of :class:`~jaxdelta.models.decoder.DecoderLayer` and of its mixers (``beta``, ``head_output`` ...). An
edit replaces an array where it arises, and all later computation uses the new one. An observer sees the edited arrays and
returns what to keep, reduced on the device. What nobody asks for is not computed.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxdelta.arguments import shown
from jaxdelta.dims import AnyArray, stacked_alike
from jaxdelta.models.decoder import Decoder
from jaxdelta.nn.head import token_losses

Change = Callable[[Array, Any, Array], Array]


@dataclass(frozen=True)
class Edit:
    """Replace a named array: x <- ``change(x, values, positions)``, with Int[B T] positions of the tokens in their texts.

    ``name``, ``change`` and ``layer`` are part of the compiled program; ``values`` are its arguments, so edits that differ
    only in values share a program. Define ``change`` in a module: every new lambda compiles a new program.

    Attributes:
        name: of the array.
        change: returns the new array, of the same shape and dtype.
        layer: model layer index; None is every layer that has the array.
        values: arrays passed to ``change``.
    """

    name: str
    change: Change
    layer: int | None = None
    values: Any = field(default=None, compare=False)


def added(x: Array, values: Any, positions: Array) -> Array:
    """x + values."""
    return x + values.astype(x.dtype)


def multiplied(x: Array, values: Any, positions: Array) -> Array:
    """x * values."""
    return x * values.astype(x.dtype)


def substituted(x: Array, values: Any, positions: Array) -> Array:
    """``values``, broadcast to the shape of x."""
    return jnp.broadcast_to(values, x.shape).astype(x.dtype)


def added_at(x: Array, values: tuple[Any, Any], positions: Array) -> Array:
    """x + amount at one token, for ``values`` = (index of the token in its text, amount) and x [B, T or P, ...]."""
    token, amount = values
    here = jnp.repeat(positions == token, x.shape[1] // positions.shape[1], axis=1)
    return x + jnp.where(here.reshape(*here.shape, *(1,) * (x.ndim - 2)), jnp.asarray(amount, x.dtype), 0)


class Seen:
    """What an observer sees of a segment.

    Attributes:
        model: with traced parameters.
        tokens, targets: Int[B T]; the target of a token is the one that follows it.
        length: Int[B], how many leading tokens of each row are text; None is all.
        hidden: Float[B T D], hidden states after the final norm.
        arrays: by name, then by model layer index.
    """

    def __init__(self, model: Decoder, tokens: AnyArray, targets: AnyArray, length: AnyArray | None):
        self.model, self.tokens, self.targets, self.length = model, tokens, targets, length
        self.hidden: Array
        self.arrays: dict[str, dict[int, Array]] = {}

    @property
    def is_text(self) -> Bool[Array, "B T"]:
        """Which tokens are text and not padding."""
        T = self.tokens.shape[1]
        return jnp.ones(self.tokens.shape, bool) if self.length is None else jnp.arange(T) < self.length[:, None]

    def stacked(self, name: str, layers: Sequence[int] | None = None) -> Array:
        """An array of several layers, along a new first axis; ``layers`` None is all that have it, in depth order.

        If layers differ in size, smaller arrays are padded with zeros.
        """
        found = self.arrays[name]
        return stacked_alike([found[layer] for layer in (sorted(found) if layers is None else layers)])


@runtime_checkable
class Observer(Protocol):
    """Computes what to keep of a segment. Hashable, because compiled programs are keyed by it: use a frozen dataclass.

    Attributes:
        names: of the arrays that it needs.
    """

    names: Sequence[str]

    def __call__(self, seen: Seen) -> Any:
        """The arrays to keep."""
        ...


@dataclass(frozen=True)
class TokenLosses:
    """Loss of the token that follows each token, in nats, Float[B T]."""

    names = ()

    def __call__(self, seen: Seen) -> Float[Array, "B T"]:
        return token_losses(seen.model.head_weight, seen.hidden, seen.targets)


@dataclass(frozen=True)
class HiddenStates:
    """Hidden states after the final norm, Float[B T D]."""

    names = ()

    def __call__(self, seen: Seen) -> Float[Array, "B T D"]:
        return seen.hidden


@dataclass(frozen=True)
class Named:
    """Named arrays of several layers, stacked; if layers differ in size, smaller arrays are padded with zeros.

    Attributes:
        names: of the arrays.
        layers: model layer indices; None is all that have the array, in depth order.
    """

    names: tuple[str, ...]
    layers: tuple[int, ...] | None = None

    def __call__(self, seen: Seen) -> dict[str, Array]:
        return {name: seen.stacked(name, self.layers) for name in self.names}


class Taps:
    """The tap of one pass: applies edits, and keeps the arrays that observers need.

    Raises:
        ValueError: when called, if an edit changes the shape or dtype of an array.
    """

    def __init__(self, seen: Seen, edits: Sequence[Edit], values: Sequence[Any], positions: Array, wanted: Iterable[str]):
        self.seen, self.edits, self.values, self.positions = seen, edits, values, positions
        self.wanted = set(wanted)

    def __call__(self, name: str, layer: int, x: Array) -> Array:
        for edit, values in zip(self.edits, self.values, strict=True):
            if edit.name == name and edit.layer in (None, layer):
                edited = edit.change(x, values, self.positions)
                if getattr(edited, "shape", None) != x.shape or edited.dtype != x.dtype:
                    gives = f"{edited.dtype}{list(edited.shape)}" if hasattr(edited, "dtype") else shown(edited)
                    raise ValueError(
                        f"the edit of {name} in layer {layer} gives {gives}; expected {x.dtype}{list(x.shape)}"
                    )
                x = edited
        if name in self.wanted:
            self.seen.arrays.setdefault(name, {})[layer] = x
        return x


def check_names(model: Decoder, edits: Sequence[Edit], observers: Sequence[Observer]) -> None:
    """Check that every edit and observer names arrays that the model has.

    Raises:
        TypeError: an entry is not an Edit or not an observer.
        ValueError: no layer, or not the given layer, has the array.
    """
    has = {layer: set(model.names(layer)) for layer in range(model.config.num_layers)}
    known = sorted(set().union(*has.values()))
    for edit in edits:
        if not isinstance(edit, Edit):
            raise TypeError(f"{edit!r} is no Edit")
        if edit.layer is not None and edit.layer not in has:
            raise ValueError(f"layer {edit.layer} of an edit: the model has layers 0 to {len(has) - 1}")
        if edit.name not in (known if edit.layer is None else has[edit.layer]):
            where = "no layer" if edit.layer is None else f"layer {edit.layer}, {model.config.layer_kinds[edit.layer]}, not"
            raise ValueError(f"an edit names {edit.name!r}, which {where} has; known are {', '.join(known)}")
    for observer in observers:
        if isinstance(observer, type) or not isinstance(observer, Observer):
            raise TypeError(f"{observer!r} is no observer: it has no names, or cannot be called")
        unknown = [name for name in observer.names if name not in known]
        if unknown:
            raise ValueError(f"an observer asks for {unknown[0]!r}, which no layer has; known are {', '.join(known)}")


def split_edits(edits: Sequence[Edit]) -> tuple[tuple[Edit, ...], tuple[Any, ...]]:
    """Edits without values, which are part of the compiled program, and the values, which are its arguments."""
    return tuple(replace(edit, values=None) for edit in edits), tuple(edit.values for edit in edits)
