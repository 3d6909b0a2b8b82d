"""Dearer estimates of what the removal of a direction does, for chosen directions of one boundary of a text.

    gauss_newton           -gate + 1/2 dz^T (diag p - p p^T) dz / N: forward mode carries the removal to the logits z
    exact_local            the layer is run without the direction, its norm recomputed; only the rest is linear
    integrated_gradients   the gradient averaged along the straight path from the state without the direction to the whole

Sources: Schraudolph 2002 (Gauss-Newton products); the recomputed norm is the analogue of recomputing the softmax in AtP*,
Kramar, Lieberum, Shah, Nanda, arXiv 2403.00745; Sundararajan, Taly, Yan, arXiv 1703.01365 (integrated gradients).
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxdelta.analysis.sensitivity.ablation import Direction, direction_terms, places, segment_at, without
from jaxdelta.analysis.sensitivity.objectives import objective_of
from jaxdelta.dims import HIGHEST, along_last
from jaxdelta.models.decoder import Decoder
from jaxdelta.nn.mixer import LinearCarry
from jaxdelta.runs.reverse import Pulled, Recurrent, Tape, branch, extend, join, pull_back, split
from jaxdelta.runs.segments import log_normalizer, over_words, rebuilt


def gauss_newton(
    model: Decoder, tape: Tape, scored: np.ndarray, boundary: int, directions: Sequence[Direction]
) -> tuple[np.ndarray, np.ndarray]:
    """The first-order effect of removing each direction, and half its Gauss-Newton curvature, f64 [directions].

    One forward-mode pass over the rest of the text a direction, all at once. ``scored`` is Bool[N - 1].
    """
    params, segment = nnx.state(model), tape.segment
    begin = segment_at(tape, boundary)
    at = tape.starts[begin].recurrent
    S = jnp.asarray(at.S)
    worlds = jnp.arange(len(directions))
    layer, head, _ = places(model.config, directions)
    terms = direction_terms(model.config, S, directions)
    dS = jnp.zeros((len(directions), *S.shape), S.dtype).at[worlds, layer, 0, head].set(-terms)
    tangent = dS, *jax.tree.map(lambda x: jnp.zeros((len(directions), *x.shape), x.dtype), (at.tails, tape.caches))
    recurrent, first, second = at, 0.0, 0.0
    mask = np.zeros(len(tape.starts) * segment, bool)
    mask[: len(scored)] = scored[: len(mask)]
    for index in range(begin, len(tape.starts)):
        part = slice(index * segment, (index + 1) * segment)
        here, following, text = tape.part(index)
        recurrent = jax.tree.map(jnp.asarray, tape.starts[index].recurrent)
        tangent, linear, square = _pushed(
            model.config, params, recurrent, tape.caches, here, following, text, mask[None, part], tangent
        )
        first, second = first + np.asarray(linear, np.float64), second + np.asarray(square, np.float64)
    return first / scored.sum(), 0.5 * second / scored.sum()


@partial(jax.jit, static_argnums=0, donate_argnums=8)
def _pushed(config, params, recurrent, caches, tokens, targets, length, scored, tangent):
    """Tangents handed on, and of each the derivative of the summed loss and its Gauss-Newton form."""
    model = rebuilt(config, params)

    def run(S, tails, caches):
        out = model(tokens, join(config, Recurrent(S, tails, recurrent.position), caches), length)
        following, caches = split(out.carry)
        return out.hidden, following.S, following.tails, caches

    def pushed(tangent):
        return jax.jvp(run, (recurrent.S, recurrent.tails, caches), tangent)

    (hidden, *_), (d_hidden, *following) = jax.vmap(pushed, out_axes=(None, 0))(tangent)
    hidden_rows, weight = hidden[0], scored[0]
    normalizer = log_normalizer(model, hidden)[0][:, None]

    def add(sums, words):
        mean, square = sums
        p = jnp.exp(jnp.einsum("td,yd->ty", hidden_rows, words, precision=HIGHEST) - normalizer)
        dz = jnp.einsum("xtd,yd->xty", d_hidden[:, 0], words, precision=HIGHEST)
        return mean + jnp.einsum("ty,xty->xt", p, dz), square + jnp.einsum("ty,xty->xt", p, dz * dz)

    zeros = jnp.zeros(d_hidden.shape[:1] + d_hidden.shape[2:3], normalizer.dtype)
    mean, square = over_words(model, len(hidden_rows) * len(zeros), add, (zeros, zeros))
    target = jnp.einsum("xtd,td->xt", d_hidden[:, 0], model.head_weight[targets[0]], precision=HIGHEST)
    first, second = (
        jnp.sum(jnp.where(along_last(weight, x), x, 0), axis=-1) for x in (mean - target, square - mean * mean)
    )
    return tuple(following), first, second


def exact_local(
    model: Decoder,
    tape: Tape,
    pulled: Sequence[Pulled],
    boundary: int,
    directions: Sequence[Direction],
) -> np.ndarray:
    """sum over later segments of <dL/dy, y without the direction - y> for the layer's own output y, f64 [directions].

    The layer's inputs are those of the untouched text; what it hands on without the direction is exact too. ``pulled`` is
    the pull-back of the loss over ``tape``, in any order.
    """
    found = np.zeros(len(directions))
    by_index = {p.index: p for p in pulled}
    layers, in_layer, _ = places(model.config, directions)
    begin = segment_at(tape, boundary)
    S = jnp.asarray(tape.starts[begin].recurrent.S)
    terms = direction_terms(model.config, S, directions)
    for layer in np.unique(layers):
        chosen = np.flatnonzero(layers == layer)
        heads = in_layer[chosen]
        whole = S[layer]
        changed = jnp.repeat(whole, len(chosen), axis=0).at[np.arange(len(chosen)), heads].add(-terms[chosen])
        states = jnp.concatenate([whole, changed])
        for index in range(begin, len(tape.starts)):
            tail = jnp.asarray(tape.starts[index].recurrent.tails[layer])
            part, (_, _, text) = by_index[index], tape.part(index)
            states, effect = _local(
                model.config, int(layer), nnx.state(model), states, tail, part.inputs[layer], part.residual[layer], text
            )
            found[chosen] += np.asarray(effect, np.float64)
    return found


@partial(jax.jit, static_argnums=(0, 1))
def _local(config, layer, params, states, tail, x, into_y, length):
    mixer = rebuilt(config, params).layers[config.linear_layers[layer]].mixer
    y, carry = jax.vmap(lambda S: mixer(x, LinearCarry(S[None], tail), length))(states)
    return carry.S[:, 0], jnp.einsum("xbtd,btd->x", (y[1:] - y[:1]).astype(into_y.dtype), into_y, precision=HIGHEST)


def integrated_gradients(
    model: Decoder, tape: Tape, scored: np.ndarray, boundary: int, directions: Sequence[Direction], *, steps: int = 8
) -> np.ndarray:
    """Minus the gradient along the removal path, averaged over ``steps`` midpoints, f64 [directions].

    Its difference from the measured effect is the completeness gap, which falls with ``steps``.
    """
    begin = segment_at(tape, boundary)
    S = jnp.asarray(tape.starts[begin].recurrent.S)
    terms = direction_terms(model.config, S, directions)
    layer, head, _ = places(model.config, directions)
    worlds, total = np.arange(len(directions)), np.zeros(len(directions))
    for step in range(steps):
        world = without(model.config, S, directions, share=(step + 0.5) / steps)
        rest = extend(model, branch(tape, begin, world))
        mask = np.repeat(scored[None, boundary:], len(directions), axis=0)
        objective, inputs = objective_of("next_token", rest, mask, 0, 0)
        *_, start = pull_back(model, rest, objective, inputs, cotangents=1)
        into = start.state[0, layer, worlds, head]
        total -= np.asarray(jnp.einsum("xkv,xkv->x", into, terms, precision=HIGHEST), np.float64)
    share = scored[boundary:].sum() / scored.sum()
    return total / steps * share
