"""Measured effects of removals: directions of a state, heads and layers are removed one by one.

Each removal is a world, a row of a batch whose first row is the untouched text. An effect is the difference of the mean
loss over scored tokens, in nats; both worlds run in the same compiled program, and sums are in f64.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxdelta.models.carry import Carry
from jaxdelta.models.config import DecoderConfig
from jaxdelta.models.decoder import Decoder
from jaxdelta.ops.directions import directions as singular_directions
from jaxdelta.runs.interventions.perturbations import Zero
from jaxdelta.runs.observers import Edit, TokenLosses, multiplied
from jaxdelta.runs.reverse import Tape, branch
from jaxdelta.runs.segments import Text, iterate


class Direction(NamedTuple):
    """A singular direction: model layer index, value head, and index of the direction, the largest sigma first."""

    layer: int
    head: int
    direction: int


def places(config: DecoderConfig, units: Sequence[tuple[int, ...]]) -> tuple[np.ndarray, ...]:
    """Units (layer, ...) as one array for each entry, with layers as indices among linear layers.

    Raises:
        ValueError: a layer is not a linear layer of the model.
    """
    for layer, *_ in units:
        if layer not in config.linear_layers:
            raise ValueError(f"layer {layer} is no linear layer; those of the model are {list(config.linear_layers)}")
    layers, *rest = (np.array(x) for x in zip(*units, strict=True))
    return np.searchsorted(config.linear_layers, layers), *rest


def direction_terms(
    config: DecoderConfig, S: Float[Array, "L 1 H K V"], directions: Sequence[Direction]
) -> Float[Array, "X K V"]:
    """sigma_i u_i v_i^T of each direction, in the basis that sensitivities use. Raises ValueError as :func:`places`."""
    U, _, right = _singular_directions(S)
    layer, head, index = places(config, directions)
    return U[layer, 0, head, :, index][:, :, None] * right[layer, 0, head, index][:, None, :]


_singular_directions = jax.jit(singular_directions)


def without(
    config: DecoderConfig, S: Float[Array, "L 1 H K V"], directions: Sequence[Direction], *, share: float | np.ndarray = 1.0
) -> Float[Array, "L X H K V"]:
    """The states of one world for each direction, in which ``share`` of it is removed."""
    terms = direction_terms(config, S, directions)
    layer, head, _ = places(config, directions)
    worlds = np.arange(len(directions))
    share = jnp.broadcast_to(jnp.asarray(share, S.dtype), (len(directions),))[:, None, None]
    return jnp.repeat(S, len(directions), axis=1).at[layer, worlds, head].add(-share * terms)


def direction_effects(
    model: Decoder, tape: Tape, scored: np.ndarray, boundary: int, directions: Sequence[Direction], *, worlds: int = 64
) -> np.ndarray:
    """Measured change of the mean loss when a direction of the states at ``boundary`` is removed.

    Args:
        tape: of one text, without an intervention.
        scored: Bool[N - 1].
        boundary: in tokens seen.
        worlds: directions in one batch.

    Returns:
        f64 [directions], in nats a scored token.

    Raises:
        ValueError: the text has no such boundary, a layer is not linear, or the tape does not fit.
    """
    index, S = tape.segment_at(boundary), tape.states_at(boundary)
    found = []
    for part in _parts(directions, worlds):
        # The untouched world is the first row of every batch; short batches are filled up, so that one program serves all.
        padded = list(part) + [part[-1]] * (min(worlds, len(directions)) - len(part))
        batch = jnp.concatenate([S, without(model.config, S, padded)], axis=1)
        losses = _losses(model, *branch(tape, index, batch))
        found.append(_differences(losses, scored)[: len(part)])
    return np.concatenate(found)


def head_effects(
    model: Decoder, tape: Tape, scored: np.ndarray, heads: Sequence[tuple[int, ...]], kind: str, *, worlds: int = 16
) -> np.ndarray:
    """Measured change of the mean loss when heads are removed in the whole text.

    Args:
        tape: of one text, without an intervention.
        scored: Bool[N - 1].
        heads: pairs (model layer index, head); (layer,) alone is all heads of a layer.
        kind: "output" sets their output to zero in every segment, "state" their state at every boundary.
        worlds: heads in one batch.

    Returns:
        f64 [heads], in nats a scored token.

    Raises:
        ValueError: a layer is not linear, or the tape does not fit.
    """
    S = tape.states_at(0)
    L, _, H = S.shape[:3]
    found = []
    for part in _parts(heads, worlds):
        padded = list(part) + [part[-1]] * (min(worlds, len(heads)) - len(part))
        lost = np.zeros((1 + len(padded), L, H), bool)
        for world, (layer, *head) in enumerate(padded):
            lost[1 + world, places(model.config, [(layer,)])[0][0], head if head else slice(None)] = True
        change = {"intervention": Zero(where=lost)} if kind == "state" else {"edits": without_outputs(model.config, lost)}
        losses = _losses(model, *branch(tape, 0, jnp.repeat(S, len(lost), axis=1)), **change)
        found.append(_differences(losses, scored)[: len(part)])
    return np.concatenate(found)


def without_outputs(config: DecoderConfig, lost: Bool[np.ndarray, "B L H"]) -> tuple[Edit, ...]:
    """Edits that set the outputs of the heads ``lost`` to zero."""
    keep = np.where(lost, np.float32(0), np.float32(1)).transpose(1, 0, 2)[:, :, None, :, None]
    layers = zip(config.linear_layers, config.linear_sizes, keep, strict=True)
    return tuple(Edit("head_output", multiplied, layer, x[:, :, : c.num_value_heads]) for layer, c, x in layers)


def _parts(items: Sequence, size: int) -> Iterator[Sequence]:
    for begin in range(0, len(items), size):
        yield items[begin : begin + size]


def _differences(losses: np.ndarray, scored: np.ndarray) -> np.ndarray:
    """Change of the mean loss over all scored tokens of the text, of each world against the first."""
    here = scored[len(scored) - losses.shape[1] :]
    return ((losses[1:] - losses[:1]) * here).sum(axis=1, dtype=np.float64) / scored.sum()


def _losses(model: Decoder, text: Text, carry: Carry, **changes) -> np.ndarray:
    """Losses f64 [X, N' - 1] of branched worlds under an intervention or edits."""
    steps = iterate(model, text, carry, observers=(TokenLosses(),), **changes)
    found = [np.asarray(step.observed[0], np.float64) for step in steps]
    return np.concatenate(found, axis=1)[:, : text.lengths[0] - 1]
