"""Costlier estimates of the effect of removing a direction, for chosen directions of one boundary of a text.

    gauss_newton           -gate + 1/2 dz^T (diag p - p p^T) dz / N: forward mode carries the removal to the logits z
    exact_local            the layer is run without the direction, with its norm; only the rest is linearised
    integrated_gradients   the gradient averaged along the straight path from the state without the direction to the state

Sources: Schraudolph 2002 (Gauss-Newton products); the recomputed norm is the analogue of recomputing the softmax in AtP*,
Kramar, Lieberum, Shah, Nanda, arXiv 2403.00745; Sundararajan, Taly, Yan, arXiv 1703.01365 (integrated gradients).
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxdelta.analysis.sensitivity.ablation import Direction, direction_terms, places, without
from jaxdelta.analysis.sensitivity.objectives import objective_of
from jaxdelta.dims import HIGHEST, along_last
from jaxdelta.models.carry import Recurrent, own
from jaxdelta.models.decoder import Decoder
from jaxdelta.nn.head import log_normalizer, over_words
from jaxdelta.nn.mixer import LinearCarry, Span
from jaxdelta.runs.observers import HiddenStates
from jaxdelta.runs.reverse import Pulled, Tape, branch, pull_back, record
from jaxdelta.runs.segments import Program, advance, rebuilt


def gauss_newton(
    model: Decoder, tape: Tape, scored: np.ndarray, boundary: int, directions: Sequence[Direction]
) -> tuple[np.ndarray, np.ndarray]:
    """First-order effect of removing each direction, and half its Gauss-Newton curvature, both f64 [directions], in nats.

    Takes one forward-mode pass over the rest of the text for each direction, all in one batch.

    Args:
        tape: of one text, without an intervention.
        scored: Bool[N - 1].
        boundary: in tokens seen.

    Raises:
        ValueError: the text has no such boundary, a layer is not linear, or the tape has an intervention or edits.
    """
    params, segment = nnx.state(model), tape.text.segment
    tape.check_untouched()
    program = Program(model.config, model.implementation, (HiddenStates(),), ())
    begin, S = tape.segment_at(boundary), tape.states_at(boundary)
    tails = tape.starts[begin].recurrent.tails
    worlds = jnp.arange(len(directions))
    layer, head, _ = places(model.config, directions)
    terms = direction_terms(model.config, S, directions)
    dS = jnp.zeros((len(directions), *S.shape), S.dtype).at[worlds, layer, 0, head].set(-terms)
    tangent = dS, *jax.tree.map(lambda x: jnp.zeros((len(directions), *x.shape), x.dtype), (tails, tape.caches))
    first, second = 0.0, 0.0
    mask = np.zeros(tape.text.count * segment, bool)
    mask[: len(scored)] = scored[: len(mask)]
    for index in range(begin, tape.text.count):
        part = slice(index * segment, (index + 1) * segment)
        recurrent = jax.tree.map(jnp.asarray, tape.starts[index].recurrent)
        tangent, linear, square = _pushed(
            program, params, recurrent, tape.caches, tape.text.part(index), mask[None, part], tangent
        )
        first, second = first + np.asarray(linear, np.float64), second + np.asarray(square, np.float64)
    return first / scored.sum(), 0.5 * second / scored.sum()


@partial(jax.jit, static_argnums=0, donate_argnums=6)
def _pushed(program, params, recurrent, caches, part, scored, tangent):
    """Tangents after the segment, and for each the derivative of the summed loss and its Gauss-Newton form."""
    weight = rebuilt(program.config, program.implementation, params).head_weight

    def run(S, tails, caches):
        before = Recurrent(S, tails, recurrent.position)
        (hidden,), after, caches, _ = advance(program, params, before, caches, part, ())
        return hidden, after.S, after.tails, caches

    def pushed(tangent):
        return jax.jvp(run, (recurrent.S, recurrent.tails, caches), tangent)

    (hidden, *_), (d_hidden, *following) = jax.vmap(pushed, out_axes=(None, 0))(tangent)
    hidden_rows = hidden[0]
    normalizer = log_normalizer(weight, hidden)[0][:, None]
    products = partial(jnp.einsum, precision=HIGHEST, preferred_element_type=normalizer.dtype)  # of bf16 in f32

    def add(sums, words):
        mean, square = sums
        p = jnp.exp(products("td,yd->ty", hidden_rows, words) - normalizer)
        dz = products("xtd,yd->xty", d_hidden[:, 0], words)
        return mean + jnp.einsum("ty,xty->xt", p, dz), square + jnp.einsum("ty,xty->xt", p, dz * dz)

    zeros = jnp.zeros(d_hidden.shape[:1] + d_hidden.shape[2:3], normalizer.dtype)
    mean, square = over_words(weight, len(hidden_rows) * len(zeros), add, (zeros, zeros))
    target = products("xtd,td->xt", d_hidden[:, 0], weight[part.targets[0]])
    first, second = (
        jnp.sum(jnp.where(along_last(scored[0], x), x, 0), axis=-1) for x in (mean - target, square - mean * mean)
    )
    return tuple(following), first, second


def exact_local(
    model: Decoder,
    tape: Tape,
    pulled: Sequence[Pulled],
    boundary: int,
    directions: Sequence[Direction],
) -> np.ndarray:
    """sum over later segments of <dL/dy, y without the direction - y> for the layer's output y, f64 [directions], in nats.

    The inputs of the layer are those of the untouched text; its states without the direction are exact in later segments.

    Args:
        tape: of one text, without an intervention.
        pulled: the pull-back of the loss over ``tape``, in any order.
        boundary: in tokens seen.

    Raises:
        ValueError: the text has no such boundary, a layer is not linear, or the tape has an intervention or edits.
    """
    tape.check_untouched()
    found = np.zeros(len(directions))
    by_index = {p.index: p for p in pulled}
    layers, in_layer, _ = places(model.config, directions)
    begin, S = tape.segment_at(boundary), tape.states_at(boundary)
    terms = direction_terms(model.config, S, directions)
    for layer in np.unique(layers):
        chosen = np.flatnonzero(layers == layer)
        heads = in_layer[chosen]
        whole = S[layer]
        changed = jnp.repeat(whole, len(chosen), axis=0).at[np.arange(len(chosen)), heads].add(-terms[chosen])
        states = own(jnp.concatenate([whole, changed]), model.config.linear_sizes[layer].state)
        for index in range(begin, tape.text.count):
            tail = jnp.asarray(tape.starts[index].recurrent.tails[layer])
            part, length = by_index[index], tape.text.part(index).length
            read, into_y = part.inputs[layer], part.residual[layer]
            states, effect = _local(
                model.config, model.implementation, int(layer), nnx.state(model), states, tail, read, into_y, length
            )
            found[chosen] += np.asarray(effect, np.float64)
    return found


@partial(jax.jit, static_argnums=(0, 1, 2))
def _local(config, implementation, layer, params, states, tail, x, into_y, length):
    mixer = rebuilt(config, implementation, params).layers[config.linear_layers[layer]].mixer
    span = Span(jnp.zeros(x.shape[:2], jnp.int32), length, implementation)  # a linear layer does not use positions
    y, carry = jax.vmap(lambda S: mixer(x, LinearCarry(S[None], tail), span))(states)
    return carry.S[:, 0], jnp.einsum("xbtd,btd->x", (y[1:] - y[:1]).astype(into_y.dtype), into_y, precision=HIGHEST)


def integrated_gradients(
    model: Decoder, tape: Tape, scored: np.ndarray, boundary: int, directions: Sequence[Direction], *, steps: int = 8
) -> np.ndarray:
    """Minus the gradient along the removal path, averaged over ``steps`` midpoints, f64 [directions], in nats.

    Its difference from the measured effect is the completeness gap, which decreases with ``steps``.

    Args:
        tape: of one text, without an intervention.
        scored: Bool[N - 1].
        boundary: in tokens seen.

    Raises:
        ValueError: the text has no such boundary, a layer is not linear, or the tape has an intervention or edits.
    """
    begin, S = tape.segment_at(boundary), tape.states_at(boundary)
    terms = direction_terms(model.config, S, directions)
    layer, head, _ = places(model.config, directions)
    worlds, total = np.arange(len(directions)), np.zeros(len(directions))
    for step in range(steps):
        world = without(model.config, S, directions, share=(step + 0.5) / steps)
        rest = record(model, *branch(tape, begin, world))
        mask = np.repeat(scored[None, boundary:], len(directions), axis=0)
        objective, inputs = objective_of("next_token", rest, mask, 0, 0)
        *_, start = pull_back(model, rest, objective, inputs, cotangents=1)
        into = start.state[0, layer, worlds, head]
        total -= np.asarray(jnp.einsum("xkv,xkv->x", into, terms, precision=HIGHEST), np.float64)
    share = scored[boundary:].sum() / scored.sum()
    return total / steps * share
