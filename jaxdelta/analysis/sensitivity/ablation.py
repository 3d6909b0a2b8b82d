"""What a removal really does: directions of a state, heads and layers taken away one by one, many worlds at a time.

Effects are differences of the mean loss over scored tokens, in nats, between a world and the untouched text, token by token
in the same compiled program; sums run in f64.
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
    """A singular direction of one boundary: the model's layer, value head, and index, the largest sigma first."""

    layer: int
    head: int
    direction: int


def places(config: DecoderConfig, units: Sequence[tuple[int, ...]]) -> tuple[np.ndarray, ...]:
    """Units (layer, ...) as one array an entry, the layers counted among linear layers, as arrays over heads are.

    Raises:
        ValueError: a layer is no linear layer of the model.
    """
    for layer, *_ in units:
        if layer not in config.linear_layers:
            raise ValueError(f"layer {layer} is no linear layer; those of the model are {list(config.linear_layers)}")
    layers, *rest = (np.array(x) for x in zip(*units, strict=True))
    return np.searchsorted(config.linear_layers, layers), *rest


def direction_terms(
    config: DecoderConfig, S: Float[Array, "L 1 H K V"], directions: Sequence[Direction]
) -> Float[Array, "X K V"]:
    """sigma_i u_i v_i^T of each direction, with the basis that sensitivities use."""
    U, _, right = _singular_directions(S)
    layer, head, index = places(config, directions)
    return U[layer, 0, head, :, index][:, :, None] * right[layer, 0, head, index][:, None, :]


_singular_directions = jax.jit(singular_directions)


def without(
    config: DecoderConfig, S: Float[Array, "L 1 H K V"], directions: Sequence[Direction], *, share: float | np.ndarray = 1.0
) -> Float[Array, "L X H K V"]:
    """A world for each direction, in which ``share`` of it is taken away."""
    terms = direction_terms(config, S, directions)
    layer, head, _ = places(config, directions)
    worlds = np.arange(len(directions))
    share = jnp.broadcast_to(jnp.asarray(share, S.dtype), (len(directions),))[:, None, None]
    return jnp.repeat(S, len(directions), axis=1).at[layer, worlds, head].add(-share * terms)


def direction_effects(
    model: Decoder, tape: Tape, scored: np.ndarray, boundary: int, directions: Sequence[Direction], *, worlds: int = 64
) -> np.ndarray:
    """Measured change of the mean loss when a direction of the state handed on at ``boundary`` is removed.

    Args:
        tape: of one text, without an intervention.
        scored: Bool[N - 1].
        boundary: in tokens seen.
        worlds: directions removed at once.

    Returns:
        f64 [directions].
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
    """Measured change of the mean loss when heads lose something in the whole text.

    Args:
        heads: (layer, head) each, with the model's layer; a layer alone, (layer,), means all its heads.
        kind: "output": their output is zero in every segment; "state": their state is zero at every boundary.

    Returns:
        f64 [heads].
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
    """Edits after which the heads ``lost`` of a row, by linear layer, give nothing."""
    keep = np.where(lost, np.float32(0), np.float32(1)).transpose(1, 0, 2)[:, :, None, :, None]
    layers = zip(config.linear_layers, config.linear_sizes, keep, strict=True)
    return tuple(Edit("head_output", multiplied, layer, x[:, :, : c.num_value_heads]) for layer, c, x in layers)


def _parts(items: Sequence, size: int) -> Iterator[Sequence]:
    for begin in range(0, len(items), size):
        yield items[begin : begin + size]


def _differences(losses: np.ndarray, scored: np.ndarray) -> np.ndarray:
    """Change of the mean loss of each world against the first, over all scored tokens of the text."""
    here = scored[len(scored) - losses.shape[1] :]
    return ((losses[1:] - losses[:1]) * here).sum(axis=1, dtype=np.float64) / scored.sum()


def _losses(model: Decoder, text: Text, carry: Carry, **changes) -> np.ndarray:
    """Losses f64 [X, N' - 1] of branched worlds under an intervention or edits."""
    steps = iterate(model, text, carry, observers=(TokenLosses(),), **changes)
    found = [np.asarray(step.observed[0], np.float64) for step in steps]
    return np.concatenate(found, axis=1)[:, : text.lengths[0] - 1]
