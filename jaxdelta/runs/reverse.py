"""Reverse mode over a segmented run: one segment's activations and the carries of all boundaries, never a document's.

Forward, the recurrent carry (S, conv tails, position) at the start of every segment is kept, and one key/value cache, which
is only ever appended to: the finished cache serves every segment, since what lies beyond a segment is masked by causality.
Backward, each segment is run again from its carry and pulled back, the last first; several cotangents (the loss, and its
Fisher samples) share that run. A ``scan`` over segments would keep a copy of the cache a step.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxdelta.dims import Tokens, first
from jaxdelta.models.config import DecoderConfig
from jaxdelta.models.decoder import Carry, Decoder, states, with_states
from jaxdelta.nn.attention import AttentionCarry
from jaxdelta.nn.mixer import LinearCarry, LinearProbe
from jaxdelta.runs.interventions import Intervention, started
from jaxdelta.runs.segments import NonFiniteError, init_carry, rebuilt


class Recurrent(NamedTuple):
    """The part of a carry that is kept for every segment.

    Attributes:
        S: f32 [L, B, H, K, V], all linear layers.
        tails: of each linear layer the conv tail, [B, W-1, E].
        position: Int[B].
    """

    S: Array
    tails: tuple[Array, ...]
    position: Array


class Start(NamedTuple):
    """What is kept of one segment's start.

    Attributes:
        recurrent: the carry that the segment reads.
        arriving: S before the intervention at this boundary; None where there was none.
        memory: of the intervention before this boundary.
    """

    recurrent: Recurrent
    arriving: Array | None
    memory: Any


class Tape(NamedTuple):
    """A recorded run.

    Attributes:
        starts: one for each segment.
        caches: of each attention layer the key/value cache of all segments but the last.
        tokens: Int[B, count * segment + 1].
        lengths: Int[B].
        segment: tokens a segment.
        intervention: with all that shapes the compiled program settled; None where there is none.
    """

    starts: list[Start]
    caches: tuple[AttentionCarry, ...]
    tokens: np.ndarray
    lengths: np.ndarray
    segment: int
    intervention: Intervention | None

    @property
    def count(self) -> int:
        """Segments of the longest text."""
        return -(-int(self.lengths.max()) // self.segment)

    def part(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens of a segment and what follows each, Int[B segment], and how many of each row are text, Int[B]."""
        begin, end = index * self.segment, (index + 1) * self.segment
        text = np.clip(self.lengths - begin, 0, self.segment).astype(np.int32)
        return self.tokens[:, begin:end], self.tokens[:, begin + 1 : end + 1], text


@runtime_checkable
class Objective(Protocol):
    """A function of the final hidden states of a segment; hashable, since it shapes the compiled program."""

    def __call__(
        self, model: Decoder, hidden: Float[Array, "B T D"], inputs: Any
    ) -> tuple[Float[Array, "B T"], Float[Array, "R B T D"]]:
        """A value for each token, and R cotangents of ``hidden``."""
        ...


class Pulled(NamedTuple):
    """Derivatives of R objectives in one segment; leaves have a leading R.

    Attributes:
        index: of the segment.
        values: Float[B T] of the objective.
        state: Float[R L B H K V], with respect to the S that the segment reads.
        beta: Float[R L B P H].
        g: Float[R L B T H].
        output: Float[R L B H], with respect to a factor on each head's output in this segment.
        residual: Float[L B T D], of the first objective with respect to what each linear layer adds to the residual stream.
        inputs: Float[L B T D], what each linear layer reads.
    """

    index: int
    values: Array
    state: Array
    beta: Array
    g: Array
    output: Array
    residual: Array
    inputs: Array


def record(
    model: Decoder,
    tokens: np.ndarray,
    *,
    lengths: np.ndarray,
    segment: int,
    intervention: Intervention | None = None,
    max_length: int | None = None,
    on_host: bool = False,
    after_segment: Callable[[int], None] = lambda index: None,
) -> Tape:
    """Run texts [B, N] and keep what reverse mode needs; arguments as in :func:`jaxdelta.runs.segments.run`.

    ``on_host`` moves the kept states to the host's memory. Texts of one ``max_length`` share a compiled program.

    Raises:
        NonFiniteError: a NaN or an infinity in a state, with its layer, head and boundary.
    """
    B, N = tokens.shape
    count = -(-int(lengths.max()) // segment)
    tokens = np.pad(tokens.astype(np.int32), ((0, 0), (0, max(0, count * segment + 1 - N))))[:, : count * segment + 1]
    params = nnx.state(model)
    recurrent, caches = split(init_carry(model, B, max(max_length or 0, count * segment)))
    memory = None
    if intervention is not None:
        boundaries = range(segment, segment * count, segment)
        intervention, memory = started(intervention, join(model.config, recurrent, caches), boundaries)
    tape = Tape([], caches, tokens, lengths, segment, intervention)
    for index in range(count):
        arriving, before = None, memory
        if index and intervention is not None:
            arriving = recurrent.S
            S, memory = _cut(intervention, model.config, recurrent, caches, memory)
            recurrent = recurrent._replace(S=S)
        start = Start(recurrent, arriving, before)
        tape.starts.append(jax.device_get(start) if on_host else start)
        if index + 1 < count:  # what the last segment gives is found when it is pulled back
            here, _, text = tape.part(index)
            recurrent, caches, finite = _advance(model.config, params, recurrent, caches, here, text)
            _check_run(model.config, np.asarray(finite), recurrent.S, index, segment)
        after_segment(index)
    return tape._replace(caches=caches)


def pull_back(
    model: Decoder,
    tape: Tape,
    objective: Objective,
    inputs: Callable[[int], Any],
    *,
    cotangents: int,
    frozen_basis: bool = False,
) -> Iterator[Pulled]:
    """Derivatives of R = ``cotangents`` sums over tokens, segment by segment, the last first.

    ``inputs(index)`` gives the arrays that ``objective`` takes in that segment. ``frozen_basis`` takes the directions that
    a truncation keeps for constants, which leaves out how they turn.

    Raises:
        NonFiniteError: a NaN or an infinity in a derivative, with its layer, head and boundary.
    """
    config, params, R = model.config, nnx.state(model), cotangents
    like = tape.starts[0].recurrent
    state = jnp.zeros((R, *like.S.shape), like.S.dtype)
    tails = tuple(jnp.zeros((R, *t.shape), t.dtype) for t in like.tails)
    wide = like.S.dtype
    caches = jax.tree.map(lambda c: jnp.zeros((R, *c.shape), wide), tape.caches)
    for index in reversed(range(len(tape.starts))):
        start, (here, _, text) = tape.starts[index], tape.part(index)
        values, finite, layer_inputs, state, tails, caches, probes = _pull_segment(
            config, objective, params, start.recurrent, tape.caches, here, text, inputs(index), state, tails, caches
        )
        _check_run(config, np.asarray(finite[0]), finite[1], index, tape.segment)
        check_finite(config, np.asarray(jnp.isfinite(state).all(axis=(0, -2, -1))), "the derivative", index * tape.segment)
        yield Pulled(index, values, state, *probes, layer_inputs)
        if start.arriving is not None:
            state = _pull_cut(tape.intervention, config, start, tape.caches, state, frozen_basis)


def branch(tape: Tape, index: int, S: Float[Array, "L X H K V"]) -> Tape:
    """The rest of a recorded text from the start of segment ``index``, in X worlds whose states there are ``S``.

    The finished cache serves every world: what lies beyond a segment is masked, and worlds write their own places anew.
    Only the first start is filled in; :func:`extend` runs the rest, once: it gives the caches away.

    Raises:
        ValueError: the tape holds several texts, or an intervention, whose memory at that boundary is one world's.
    """
    if len(tape.lengths) != 1 or tape.intervention is not None:
        raise ValueError("worlds branch off from one text without an intervention")
    worlds, at = S.shape[1], tape.starts[index].recurrent

    def repeated(x):
        return jnp.repeat(jnp.asarray(x), worlds, axis=0)

    recurrent = Recurrent(S, tuple(repeated(t) for t in at.tails), repeated(at.position))
    return Tape(
        [Start(recurrent, None, None)],
        jax.tree.map(repeated, tape.caches),
        np.repeat(tape.tokens[:, index * tape.segment :], worlds, axis=0),
        np.repeat(tape.lengths - index * tape.segment, worlds),
        tape.segment,
        None,
    )


def extend(model: Decoder, tape: Tape) -> Tape:
    """A branched tape with the starts of all its segments."""
    params, starts, caches = nnx.state(model), list(tape.starts), tape.caches
    for index in range(tape.count - 1):
        here, _, text = tape.part(index)
        recurrent, caches, _ = _advance(model.config, params, starts[-1].recurrent, caches, here, text)
        starts.append(Start(recurrent, None, None))
    return tape._replace(starts=starts, caches=caches)


def split(carry: Carry) -> tuple[Recurrent, tuple[AttentionCarry, ...]]:
    """The recurrent part of a carry, and the key/value caches."""
    tails = tuple(layer.tail for layer in carry.layers if isinstance(layer, LinearCarry))
    caches = tuple(layer for layer in carry.layers if isinstance(layer, AttentionCarry))
    return Recurrent(jnp.stack(states(carry)), tails, carry.position), caches


def join(config: DecoderConfig, recurrent: Recurrent, caches: tuple[AttentionCarry, ...]) -> Carry:
    """The carry of both parts."""
    linear = iter([LinearCarry(S, tail) for S, tail in zip(recurrent.S, recurrent.tails, strict=True)])
    attention = iter(caches)
    layers = tuple(next(linear) if kind == "linear" else next(attention) for kind in config.layer_kinds)
    return Carry(layers, recurrent.position)


def _check_run(config: DecoderConfig, finite: np.ndarray, S: Array, index: int, segment: int) -> None:
    """Raise NonFiniteError for a segment whose residual stream or states, ``finite`` Bool[layers + 1 B], broke."""
    if finite.all():
        return
    place, row = (int(i[0]) for i in np.nonzero(~finite))
    if place and config.layer_kinds[place - 1] == "linear":
        heads = np.ones(S.shape[:3], bool)
        layer = config.linear_layers.index(place - 1)
        heads[layer] = np.asarray(jnp.isfinite(S[layer]).all(axis=(-2, -1)))
        check_finite(config, heads, "the state", (index + 1) * segment)
    after = f"layer {place - 1} ({config.layer_kinds[place - 1]})" if place else "the embedding"
    raise NonFiniteError(
        f"NaN or infinity first after {after}, in row {row}, tokens {index * segment} to {(index + 1) * segment - 1}; "
        "look for broken weights there, or run in float32",
        row,
    )


def check_finite(config: DecoderConfig, finite: np.ndarray, what: str, boundary: int) -> None:
    """Raise NonFiniteError where an entry of ``finite``, Bool[L B H], is False; ``boundary`` in tokens seen."""
    if not finite.all():
        layer, row, head = (int(i[0]) for i in np.nonzero(~finite))
        where = f"after {boundary} tokens" if boundary else "at the start of the text"
        raise NonFiniteError(
            f"NaN or infinity in {what} of layer {config.linear_layers[layer]}, head {head}, {where}, in row {row}; "
            "look for broken weights there, or run in float32",
            row,
        )


@partial(jax.jit, static_argnums=0, donate_argnums=3)
def _advance(config, params, recurrent: Recurrent, caches, tokens: Tokens, length: Int[Array, " B"]):
    out = rebuilt(config, params)(tokens, join(config, recurrent, caches), length)
    return *split(out.carry), out.finite


@partial(jax.jit, static_argnums=(0, 1))
def _cut(intervention, config, recurrent, caches, memory):
    carry, memory, _ = intervention(join(config, recurrent, caches), memory)
    return jnp.stack(states(carry)), memory


@partial(jax.jit, static_argnums=(0, 1, 5))
def _pull_cut(intervention, config, start: Start, caches, state, frozen_basis: bool):
    carry = join(config, start.recurrent, caches)

    def cut(S):
        if frozen_basis:
            return intervention.frozen(S, start.memory)
        return jnp.stack(states(intervention(with_states(carry, list(S)), start.memory)[0]))

    return jax.vmap(jax.vjp(cut, start.arriving)[1])(state)[0]


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=(9, 10))
def _pull_segment(config, objective, params, recurrent, caches, tokens, length, inputs, state, tails, cache_sums):
    model = rebuilt(config, params)
    B, T = tokens.shape
    begin = jnp.max(recurrent.position)  # of every row whose text goes on
    is_text = first(length, T)

    def written(cache: Array) -> Array:
        """The places that this segment wrote."""
        return jax.lax.dynamic_slice_in_dim(cache, begin, T, axis=1)

    def run(S, tails, caches, probes):
        out = model(tokens, join(config, Recurrent(S, tails, recurrent.position), caches), length, probes)
        following, caches = split(out.carry)
        return (out.hidden, following.S, following.tails, jax.tree.map(written, caches)), (out.inputs, out.finite)

    probes = model.probes(B, T)
    (hidden, S, *_), pull, (layer_inputs, finite) = jax.vjp(run, recurrent.S, recurrent.tails, caches, probes, has_aux=True)
    values, into_hidden = objective(model, hidden, inputs)

    def pulled(into_hidden, state, tails, cache_sums):
        # Later segments' reads of what this one wrote; what it reads of earlier places is added, in f32 or wider.
        into_written = jax.tree.map(
            lambda total, cache: jnp.where(is_text[..., None, None], written(total), 0).astype(cache.dtype),
            cache_sums,
            caches,
        )
        state, tails, read, probes = pull((into_hidden.astype(hidden.dtype), state, tails, into_written))
        cache_sums = jax.tree.map(lambda total, new: total + new.astype(total.dtype), cache_sums, read)
        linear = [p for p in probes if p is not None]
        return state, tails, cache_sums, LinearProbe(*(jnp.stack(x) for x in zip(*linear, strict=True)))

    cotangents = (into_hidden, state, tails, cache_sums)
    if len(into_hidden) == 1:  # a loop of one turn costs a tenth more
        *following, probes = jax.tree.map(lambda x: x[None], pulled(*jax.tree.map(lambda x: x[0], cotangents)))
    else:
        *following, probes = jax.lax.map(lambda one: pulled(*one), cotangents)
    return values, (finite, S), jnp.stack(layer_inputs), *following, probes._replace(residual=probes.residual[0])
