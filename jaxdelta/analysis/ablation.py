"""What a removal really does: directions of a state, heads and layers taken away one by one, many worlds at a time.

Effects are differences of the mean loss over scored tokens, in nats, between a world and the untouched text, token by token
in the same compiled program; sums run in f64.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxdelta.dims import HIGHEST
from jaxdelta.models.decoder import Decoder
from jaxdelta.ops.low_rank import left_directions
from jaxdelta.reverse import Tape, branch, join, split
from jaxdelta.segments import rebuilt, token_losses


class Direction(NamedTuple):
    """A singular direction: linear layer (counted among linear layers), head, and index, the largest sigma first."""

    layer: int
    head: int
    direction: int


def direction_terms(S: Float[Array, "L 1 H K V"], directions: Sequence[Direction]) -> Float[Array, "X K V"]:
    """sigma_i u_i v_i^T of each direction, with the basis that sensitivities use."""
    transposed = S.shape[-2] > S.shape[-1]
    A = jnp.swapaxes(S, -1, -2) if transposed else S
    U = left_directions(A)
    layer, head, index = (np.array(x) for x in zip(*directions, strict=True))
    A, u = A[layer, 0, head], U[layer, 0, head, :, index]
    terms = u[:, :, None] * jnp.einsum("xk,xkv->xv", u, A, precision=HIGHEST)[:, None, :]
    return jnp.swapaxes(terms, -1, -2) if transposed else terms


def without(
    S: Float[Array, "L 1 H K V"], directions: Sequence[Direction], *, share: float | np.ndarray = 1.0
) -> Float[Array, "L X H K V"]:
    """A world for each direction, in which ``share`` of it is taken away."""
    terms = direction_terms(S, directions)
    layer, head, _ = (np.array(x) for x in zip(*directions, strict=True))
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
        boundary: by index, 0 the first.
        worlds: directions removed at once.

    Returns:
        f64 [directions].
    """
    S = jnp.asarray(tape.starts[boundary + 1].recurrent.S)
    found = []
    for part in _parts(directions, worlds):
        # The untouched world is the first row of every batch; short batches are filled up, so that one program serves all.
        padded = list(part) + [part[-1]] * (min(worlds, len(directions)) - len(part))
        batch = jnp.concatenate([S, without(S, padded)], axis=1)
        losses = _losses(model, branch(tape, boundary + 1, batch), boundary + 1)
        found.append(_differences(losses, scored)[: len(part)])
    return np.concatenate(found)


def head_effects(
    model: Decoder, tape: Tape, scored: np.ndarray, heads: Sequence[tuple[int, ...]], kind: str, *, worlds: int = 16
) -> np.ndarray:
    """Measured change of the mean loss when heads lose something in the whole text.

    Args:
        heads: (linear layer, head) each; a layer alone, (linear layer,), means all its heads.
        kind: "output": their output is zero in every segment; "state": their state is zero at every boundary.

    Returns:
        f64 [heads].
    """
    L, _, H = tape.starts[0].recurrent.S.shape[:3]
    found = []
    for part in _parts(heads, worlds):
        padded = list(part) + [part[-1]] * (min(worlds, len(heads)) - len(part))
        keep = np.ones((L, 1 + len(padded), H), np.float32)
        for world, (layer, *head) in enumerate(padded):
            keep[layer, 1 + world, head if head else slice(None)] = 0
        S = jnp.repeat(jnp.asarray(tape.starts[0].recurrent.S), keep.shape[1], axis=1)
        losses = _losses(model, branch(tape, 0, S), 0, **{kind: keep})
        found.append(_differences(losses, scored)[: len(part)])
    return np.concatenate(found)


def _parts(items: Sequence, size: int) -> Iterator[Sequence]:
    for begin in range(0, len(items), size):
        yield items[begin : begin + size]


def _differences(losses: np.ndarray, scored: np.ndarray) -> np.ndarray:
    """Change of the mean loss of each world against the first, over all scored tokens of the text."""
    here = scored[len(scored) - losses.shape[1] :]
    return ((losses[1:] - losses[:1]) * here).sum(axis=1, dtype=np.float64) / scored.sum()


def _losses(model: Decoder, tape: Tape, first: int, *, output=None, state=None) -> np.ndarray:
    """Losses f64 [X, N' - 1] of a branched tape; factors on heads' outputs and on their states at boundaries, [L X H]."""
    params, (start,), caches = nnx.state(model), tape.starts, tape.caches
    recurrent, worlds, L = start.recurrent, len(tape.lengths), start.recurrent.S.shape[0]
    ones = np.ones((L, worlds, start.recurrent.S.shape[2]), np.float32)
    output, state = (ones if x is None else x for x in (output, state))
    found = []
    for index in range(tape.count):
        here, following, text = tape.part(index)
        kept = state if first + index else ones
        losses, recurrent, caches = _losing(model.config, params, recurrent, caches, here, following, text, output, kept)
        found.append(np.asarray(losses, np.float64))
    return np.concatenate(found, axis=1)[:, : tape.lengths[0] - 1]


@partial(jax.jit, static_argnums=0, donate_argnums=3)
def _losing(config, params, recurrent, caches, tokens, targets, length, output, state):
    model = rebuilt(config, params)
    recurrent = recurrent._replace(S=recurrent.S * state[..., None, None])
    gates = iter(output)
    probes = tuple(p and p._replace(output=next(gates)) for p in model.probes(*tokens.shape))
    out = model(tokens, join(config, recurrent, caches), length, probes)
    return token_losses(model, out.hidden, targets), *split(out.carry)
