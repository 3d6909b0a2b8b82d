"""Named activations under TransformerLens's names: kept by :func:`run_with_cache`, replaced by :func:`run_with_hooks`.

Names and shapes [batch, pos, head, dim] are those of TransformerLens 3 and its bridge for gated delta nets, whose hooks see
one pass without a carried state. Here a text runs in segments, and there are names for what crosses from one to the next:

    blocks.{i}.hook_resid_pre, hook_resid_mid, hook_mlp_out, hook_resid_post          [B, N, D]
    blocks.{i}.linear_attn.hook_in, hook_out                                          [B, N, D]
        hook_q_pre_conv, hook_k_pre_conv, hook_v_pre_conv     before the convolution, heads as stored
        hook_q, hook_k                                        after it and its activation, key heads
        hook_q_normed, hook_k_normed, hook_v                  what the rule reads, value heads
        hook_beta_logit, hook_beta, hook_log_decay            [B, N, H]
        hook_recurrence_out, hook_gate_input, hook_z          o, the gate before its activation, o after norm and gate
        hook_state_before, hook_state                         [B, segment, H, K, V], S at the start and end of each segment
        hook_qbar                                             [B, N, H, K], the pulled-back query: o = S_before^T qbar + ...
    blocks.{i}.attn.hook_in, hook_out                                                 [B, N, D]
        hook_rot_q, hook_rot_k, hook_v, hook_z                after norm and rotation; z after the gate

Keys, values and strengths of a DeltaProduct layer have n_h entries a token, side by side.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxdelta.arguments import shown
from jaxdelta.models.decoder import Decoder, check_model
from jaxdelta.nn.sizes import LinearSizes
from jaxdelta.ops.reads import reads
from jaxdelta.runs.interventions import Intervention
from jaxdelta.runs.observers import Edit, HiddenStates, Seen
from jaxdelta.runs.segments import iterate, text_of

QBAR = "hook_qbar"
STATES = ("S_before", "S")
STEPWISE = ("k_unnormed", "k", "v", "beta_logit", "beta")  # of a linear layer: n_h entries a token
BLOCK = {
    "hook_resid_pre": "residual",
    "hook_resid_mid": "residual_mid",
    "hook_mlp_out": "mlp_output",
    "hook_resid_post": "residual_after",
}
LINEAR = {
    "hook_in": "mixer_input",
    "hook_q_pre_conv": "qkv",
    "hook_k_pre_conv": "qkv",
    "hook_v_pre_conv": "qkv",
    "hook_q": "q_unnormed",
    "hook_k": "k_unnormed",
    "hook_q_normed": "q",
    "hook_k_normed": "k",
    "hook_v": "v",
    "hook_beta_logit": "beta_logit",
    "hook_beta": "beta",
    "hook_log_decay": "g",
    "hook_recurrence_out": "o",
    "hook_gate_input": "z",
    "hook_z": "head_output",
    "hook_state_before": "S_before",
    "hook_state": "S",
    "hook_out": "mixer_output",
}
ATTENTION = {
    "hook_in": "mixer_input",
    "hook_rot_q": "q",
    "hook_rot_k": "k",
    "hook_v": "v",
    "hook_z": "head_output",
    "hook_out": "mixer_output",
}
INPUTS = ("q", "k", "beta", "g")  # of the rule, from which qbar is computed


class HookPoint(NamedTuple):
    """What a hook is told beside the activation.

    Attributes:
        name: of the activation.
        layer: model layer index.
        positions: Int[B T], of the tokens in their texts; traced.
    """

    name: str
    layer: int
    positions: Array


Hook = Callable[[Array, HookPoint], Array]


class _Place(NamedTuple):
    """Where an activation is found: model layer index, array, and which of q, k and v of it, if it is a part."""

    layer: int
    array: str
    part: str | None


def hook_names(model: Decoder) -> list[str]:
    """The names of all activations of a model, layer by layer, in the order in which they arise; ``hook_qbar`` is last."""
    return list(_places(model))


def _places(model: Decoder) -> dict[str, _Place]:
    found = {}
    for layer, kind in enumerate(model.config.layer_kinds):
        has = model.names(layer)
        mixer, table = ("linear_attn", LINEAR) if kind == "linear" else ("attn", ATTENTION)
        first, *rest = BLOCK.items()
        inside = [(f"{mixer}.{name}", name, array) for name, array in table.items()]
        for name, own, array in [(first[0], *first), *inside, *((name, name, array) for name, array in rest)]:
            if array in has:
                part = own.removeprefix("hook_")[0] if own.endswith("_pre_conv") else None
                found[f"blocks.{layer}.{name}"] = _Place(layer, array, part)
        if kind == "linear":
            found[f"blocks.{layer}.{mixer}.{QBAR}"] = _Place(layer, QBAR, None)
    return found


def _place(model: Decoder, places: dict[str, _Place], name: str) -> _Place:
    if name in places:
        return places[name]
    block = ".".join(str(name).split(".")[:2]) + "."
    there = [known for known in places if known.startswith(block)]
    if there:
        raise ValueError(f"{name} does not exist; layer {places[there[0]].layer} has {', '.join(there)}")
    raise ValueError(f"{name!r} does not exist; the model has blocks.0 to blocks.{model.config.num_layers - 1}")


def run_with_cache(
    model: Decoder,
    tokens: Any,
    names: str | Iterable[str] | Callable[[str], bool] | None = None,
    *,
    segment: int | None = None,
    intervention: Intervention | None = None,
    hooks: Sequence[tuple[str, Hook]] = (),
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Logits of a text and named activations; see the head of the module for names and shapes.

    Args:
        tokens: whole numbers [B, N], or [N] for one text, of at least 2 tokens.
        names: one name or several, or a function of a name; None is all but ``hook_qbar``, which takes memory for T x T
            numbers a head and segment.
        segment: tokens between two boundaries; None is the whole text at once.
        intervention: at every boundary.
        hooks: as in :func:`run_with_hooks`; the cache has the replaced activations.

    Returns:
        Logits Float[B N Y] and the activations by name, on the host. All are kept until the text has ended.

    Raises:
        TypeError: ``model`` is not a Decoder, or another argument is of the wrong type.
        ValueError: a name that does not exist, which tells those that do; tokens or segment out of bounds.
        NonFiniteError: a NaN or an infinity; names layer, segment and row.
    """
    check_model(model)
    places = _places(model)
    chosen = _chosen(places, names)
    cached = _Cached(tuple(_place(model, places, name) for name in chosen))
    text = text_of(model, _rows(tokens), segment=_length(tokens) if segment is None else segment)
    logits, found = [], []
    for step in iterate(
        model, text, intervention=intervention, observers=(HiddenStates(), cached), edits=_edits(model, places, hooks)
    ):
        hidden, arrays = step.observed
        logits.append(np.asarray(model.logits(jnp.asarray(hidden))))
        found.append(arrays)
    N = int(text.lengths.max())
    pieces = zip(*found, strict=True)
    whole = [_joined(model, place, of_place, N) for place, of_place in zip(cached.places, pieces, strict=False)]
    return np.concatenate(logits, axis=1)[:, :N], dict(zip(chosen, whole, strict=True))


def run_with_hooks(
    model: Decoder,
    tokens: Any,
    hooks: Sequence[tuple[str, Hook]],
    *,
    segment: int | None = None,
    intervention: Intervention | None = None,
) -> np.ndarray:
    """Logits Float[B N Y] of a text in whose run activations are replaced, ``hooks`` in order.

    Args:
        hooks: pairs of a name and a function. It takes the activation of a segment and a :class:`HookPoint`, and returns
            a replacement of the same shape and dtype. It is traced: branch on values with ``jnp.where``.
        tokens, segment, intervention: as in :func:`run_with_cache`.

    Raises:
        TypeError, ValueError, NonFiniteError: as :func:`run_with_cache`; ValueError also for a replacement of another shape
            or dtype, and for ``hook_qbar``, which is computed from others.
    """
    return run_with_cache(model, tokens, (), segment=segment, intervention=intervention, hooks=hooks)[0]


def _chosen(places: dict[str, _Place], names: Any) -> list[str]:
    if names is None:
        return [name for name, place in places.items() if place.array != QBAR]
    if isinstance(names, str):
        return [names]
    if callable(names):
        return [name for name in places if names(name)]
    if not np.iterable(names):
        raise TypeError(f"names is {shown(names)}; expected names, or a function of a name")
    return list(names)


def _rows(tokens: Any) -> np.ndarray:
    tokens = np.asarray(tokens)
    return tokens[None] if tokens.ndim == 1 else tokens


def _length(tokens: Any) -> int:
    return max(1, np.shape(tokens)[-1]) if np.ndim(tokens) else 1


@dataclass(frozen=True)
class _Cached:
    """Observes the activations at ``places``."""

    places: tuple[_Place, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The arrays that they are, or are computed from."""
        return tuple(dict.fromkeys(name for p in self.places for name in (INPUTS if p.array == QBAR else (p.array,))))

    def __call__(self, seen: Seen) -> tuple[Array, ...]:
        return tuple(self._of(seen, place) for place in self.places)

    def _of(self, seen: Seen, place: _Place) -> Array:
        arrays = {name: seen.arrays[name][place.layer] for name in (INPUTS if place.array == QBAR else (place.array,))}
        if place.array == QBAR:
            return reads(**arrays, num_householder=seen.model.layers[place.layer].mixer.sizes.num_householder).qbar
        (x,) = arrays.values()
        return x if place.part is None else _part(x, *_columns(seen.model.layers[place.layer].mixer.sizes, place.part))


@dataclass(frozen=True)
class _Replaced:
    """The change of an edit that replaces an activation by ``function`` of it; equal functions share a program."""

    function: Hook
    name: str
    place: _Place
    columns: "_Columns | None"

    def __call__(self, x: Array, values: None, positions: Array) -> Array:
        point = HookPoint(self.name, self.place.layer, positions)
        if self.columns is None:
            return self.function(x, point)
        begin, end, _ = self.columns
        part = _part(x, *self.columns)
        found = self.function(part, point)
        if getattr(found, "shape", None) != part.shape or found.dtype != part.dtype:
            raise ValueError(f"the hook on {self.name} gives {shown(found)}; expected {part.dtype}{list(part.shape)}")
        return x.at[..., begin:end].set(found.reshape(*x.shape[:2], -1))


class _Columns(NamedTuple):
    """Columns of q | k | v, and the shape of a head and token in them: [heads, dim]."""

    begin: int
    end: int
    shape: tuple[int, int]


def _columns(sizes: LinearSizes, part: str) -> _Columns:
    n, G, K = sizes.num_householder, sizes.num_key_heads, sizes.key_dim
    of_k, of_v = G * K, (1 + n) * G * K
    shapes = {
        "q": _Columns(0, of_k, (G, K)),
        "k": _Columns(of_k, of_v, (G, K)),
        "v": _Columns(of_v, sizes.conv_channels, (sizes.num_value_heads, sizes.value_dim)),
    }
    return shapes[part]


def _part(x: Array, begin: int, end: int, shape: tuple[int, int]) -> Array:
    return x[..., begin:end].reshape(x.shape[0], -1, *shape)


def _edits(model: Decoder, places: dict[str, _Place], hooks: Sequence[tuple[str, Hook]]) -> list[Edit]:
    found = []
    for entry in hooks:
        if not (isinstance(entry, tuple | list) and len(entry) == 2 and callable(entry[1])):
            raise TypeError(f"a hook is {shown(entry)}; expected a name and a function of the activation and its HookPoint")
        name, function = entry
        place = _place(model, places, name)
        if place.array == QBAR:
            raise ValueError(f"{name} is computed from queries, keys, strengths and decays; replace those")
        columns = None if place.part is None else _columns(model.layers[place.layer].mixer.sizes, place.part)
        found.append(Edit(place.array, _Replaced(function, name, place, columns), place.layer))
    return found


def _joined(model: Decoder, place: _Place, pieces: Sequence[np.ndarray], tokens: int) -> np.ndarray:
    """Segments one after another: along the tokens without padding, or along an axis of segments for states."""
    if place.array in STATES:
        return np.stack(pieces, axis=1)
    stepwise = place.part in ("k", "v") or (place.array in STEPWISE and model.config.layer_kinds[place.layer] == "linear")
    return np.concatenate(pieces, axis=1)[:, : tokens * (model.config.num_householder if stepwise else 1)]
