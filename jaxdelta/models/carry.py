"""All that crosses a boundary. Only this module knows how it is stored.

A segmented run splits it in two: the recurrent part is small and may be kept for every segment; key/value caches are only
ever appended to, and are passed on.

Interventions and analyses take the states of all layers as one array [L, B, H, K, V] (:func:`stacked`). If layers differ in
size, H, K and V are the largest of any layer, and smaller states are padded with zeros: padding adds zero singular values
and changes nothing else. :func:`with_stacked` takes each layer's own part.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxdelta.arguments import shown
from jaxdelta.dims import AnyArray, State, stacked_alike
from jaxdelta.models.config import DecoderConfig
from jaxdelta.nn.attention import AttentionCarry
from jaxdelta.nn.mixer import LinearCarry


class Carry(NamedTuple):
    """All that crosses a boundary.

    Attributes:
        layers: the LinearCarry or AttentionCarry of each layer, in depth order.
        position: Int[B], tokens of text that each row has read.
    """

    layers: tuple[LinearCarry | AttentionCarry, ...]
    position: Array


class Recurrent(NamedTuple):
    """The part of a carry that may be kept for every segment.

    Attributes:
        S: Float[L B H K V], states of all linear layers, padded with zeros if they differ in size.
        tails: the conv tail of each linear layer, [B, W-1, E].
        position: Int[B], tokens of text that each row has read.
    """

    S: Array
    tails: tuple[Array, ...]
    position: Array


Caches = tuple[AttentionCarry, ...]
States = Float[AnyArray, "B _ _ _"]  # [B, H, K, V] of one layer; other layers may have other sizes


def state_of(layer: LinearCarry | AttentionCarry) -> State | None:
    """S of a layer's carry; None where it has none."""
    return layer.S if isinstance(layer, LinearCarry) else None


def states(carry: Carry) -> list[States]:
    """S of each linear layer in depth order, [B, H, K, V], in the carry's dtype.

    Raises:
        TypeError: ``carry`` is not a Carry.
        ValueError: S of a layer is not an array.
    """
    if not isinstance(carry, Carry):
        raise TypeError(f"carry is {shown(carry)}; expected a Carry, as init_carry and forward give it")
    found = {i: layer.S for i, layer in enumerate(carry.layers) if isinstance(layer, LinearCarry)}
    for i, S in found.items():
        if not hasattr(S, "shape"):
            raise ValueError(f"S of layer {i} of the carry is {shown(S)}; expected an array [B, H, K, V]")
    return list(found.values())


def with_states(carry: Carry, S: list[States] | tuple[States, ...]) -> Carry:
    """``carry`` with other states, [B, H, K, V] for each linear layer; they are cast to the dtype of those they replace.

    Raises:
        TypeError: ``carry`` is not a Carry, or ``S`` is not a list of arrays.
        ValueError: the number of states or a shape does not fit, or a state is complex.
    """
    expected = [s.shape for s in states(carry)]
    if not np.iterable(S) or not all(hasattr(s, "dtype") for s in S):
        raise TypeError(f"S is {shown(S)}; expected a list of {len(expected)} arrays")
    found = [s.shape for s in S]
    if expected != found:
        raise ValueError(f"states of shapes {found} do not fit a carry with {expected}")
    if any(jnp.iscomplexobj(s) for s in S):
        raise ValueError("a state is complex; expected real numbers")
    remaining = iter(S)
    layers = tuple(
        layer._replace(S=next(remaining).astype(layer.S.dtype)) if isinstance(layer, LinearCarry) else layer
        for layer in carry.layers
    )
    return carry._replace(layers=layers)


def stacked(carry: Carry) -> Float[Array, "L B H K V"]:
    """The states of all linear layers in one array, padded with zeros to the largest H, K and V."""
    return stacked_alike(states(carry))


def with_stacked(carry: Carry, S: Float[Array, "L B H K V"]) -> Carry:
    """``carry`` with the states ``S``, each layer taking its own part."""
    return with_states(carry, [own(x, s.shape[1:]) for x, s in zip(S, states(carry), strict=True)])


def own(S: Float[AnyArray, "*batch H K V"], shape: tuple[int, int, int]) -> Float[AnyArray, "*batch h k v"]:
    """A layer's states without padding, for a layer of ``shape`` (H, K, V)."""
    H, K, V = shape
    return S[..., :H, :K, :V]


def full_ranks(carry: Carry) -> Int[np.ndarray, "L H"]:
    """min(K, V) of each head, the rank of its untouched state; 0 for heads that a layer lacks."""
    shapes = [S.shape[1:] for S in states(carry)]
    H = max((h for h, _, _ in shapes), default=0)
    return np.array([[min(k, v) if head < h else 0 for head in range(H)] for h, k, v in shapes])


def by_head(value: Any, S: Float[Array, "L B H K V"], dtype: Any) -> Array:
    """``value`` over [B, L, H, ...], whose first three axes broadcast, in the order of stacked states, [L, B, H, ...]."""
    L, B, H = S.shape[:3]
    value = np.asarray(value, dtype)
    return jnp.asarray(np.moveaxis(np.broadcast_to(value, (B, L, H, *value.shape[3:])), 0, 1))


def split(carry: Carry) -> tuple[Recurrent, Caches]:
    """The recurrent part and the key/value caches of a carry."""
    tails = tuple(layer.tail for layer in carry.layers if isinstance(layer, LinearCarry))
    caches = tuple(layer for layer in carry.layers if isinstance(layer, AttentionCarry))
    return Recurrent(stacked(carry) if tails else jnp.zeros((0,)), tails, carry.position), caches


def join(config: DecoderConfig, recurrent: Recurrent, caches: Caches) -> Carry:
    """The carry made of both parts; the inverse of :func:`split`."""
    sizes = [c.state for c in config.linear_sizes]
    parts = zip(recurrent.S, sizes, recurrent.tails, strict=True)
    linear = iter([LinearCarry(own(S, shape), tail) for S, shape, tail in parts])
    attention = iter(caches)
    layers = tuple(next(linear) if kind == "linear" else next(attention) for kind in config.layer_kinds)
    return Carry(layers, recurrent.position)


def room(carry: Carry) -> int | None:
    """Places of the shortest key/value cache; None without attention layers."""
    return min((layer.keys.shape[1] for layer in carry.layers if isinstance(layer, AttentionCarry)), default=None)


def check_carry(config: DecoderConfig, expected: Carry, carry: Any) -> None:
    """Check the layers, shapes and dtypes of ``carry`` against ``expected``, the model's carry for one text and one place.

    Values are not checked.

    Raises:
        TypeError: ``carry`` is not a Carry.
        ValueError: a layer or an array is missing or has another shape or dtype; names it.
    """
    if not isinstance(carry, Carry):
        raise TypeError(f"carry is {shown(carry)}; expected a Carry, as init_carry and forward give it")
    if not _is(carry.position, 1, jnp.int32):
        raise ValueError(f"position of the carry is {shown(carry.position)}; expected int32 [B]")
    if len(carry.layers) != len(expected.layers):
        raise ValueError(f"the carry has {len(carry.layers)} layers, the model {len(expected.layers)}")
    (B,) = carry.position.shape
    for i, (kind, layer, wanted) in enumerate(zip(config.layer_kinds, carry.layers, expected.layers, strict=True)):
        if not isinstance(layer, type(wanted)):
            raise ValueError(f"layer {i} of the carry is {shown(layer)}; expected a {type(wanted).__name__}, it is {kind}")
        for name, found, array in zip(wanted._fields, layer, wanted, strict=True):
            free = isinstance(layer, AttentionCarry)  # a cache may have any number of places
            places = np.shape(layer.keys)[1:2] if free else ()
            shape = (B, *places, *array.shape[2:]) if free else (B, *array.shape[1:])
            if not _is(found, len(array.shape), array.dtype) or found.shape != shape:
                letters = f"[{B}, max_length, {', '.join(map(str, array.shape[2:]))}]" if free else list(shape)
                raise ValueError(
                    f"{name} of layer {i} ({kind}) of the carry is {shown(found)}; expected {array.dtype} {letters}"
                )


def _is(x: Any, axes: int, dtype) -> bool:
    return getattr(x, "dtype", None) == dtype and len(x.shape) == axes
