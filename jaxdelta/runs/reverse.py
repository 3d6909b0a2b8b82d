"""Reverse mode over a segmented run, with the activations of one segment at a time.

The forward pass keeps the recurrent carry (S, conv tails, position) at the start of every segment and one key/value cache.
The cache is only ever appended to, so the finished one serves every segment: causality masks what lies beyond it. The
backward pass recomputes each segment from its carry and pulls cotangents back, the last segment first; several cotangents
(of the loss and of its Fisher samples) share the recomputation. A ``scan`` over segments would keep a copy of the cache for
every step.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float

from jaxdelta.dims import accumulation_dtype, first, stacked_alike
from jaxdelta.models.carry import Caches, Carry, Recurrent, join, split, stacked, with_stacked
from jaxdelta.models.config import DecoderConfig
from jaxdelta.models.decoder import Decoder
from jaxdelta.runs.interventions import Intervention, started
from jaxdelta.runs.observers import Edit, HiddenStates, Named, added, multiplied, split_edits
from jaxdelta.runs.segments import (
    REMEDY,
    NonFiniteError,
    Part,
    Program,
    Start,
    Text,
    advance,
    check_segment,
    init_carry,
    iterate,
    rebuilt,
)


class Tape(NamedTuple):
    """A recorded run.

    Attributes:
        config: of the model.
        text: the recorded text.
        starts: what each segment starts from.
        caches: the key/value cache of each attention layer, filled by all segments but the last.
        intervention: the settled intervention, or None.
        edits: applied in every segment.
    """

    config: DecoderConfig
    text: Text
    starts: list[Start]
    caches: Caches
    intervention: Intervention | None
    edits: tuple[Edit, ...]

    def segment_at(self, boundary: int) -> int:
        """Index of the segment that begins at a boundary, in tokens seen; 0 is the start of the text.

        Raises:
            ValueError: the text has no boundary there.
        """
        size, count = self.text.segment, self.text.count
        index, rest = divmod(boundary, size)
        if rest or not 0 <= index < count:
            found = f"every {size} tokens to {size * (count - 1)}"
            raise ValueError(f"boundary is {boundary}, in tokens seen; the text has boundaries {found}")
        return index

    def check_untouched(self) -> None:
        """Raise ValueError unless the tape is of one text, without an intervention and without edits."""
        if len(self.text.lengths) != 1 or self.intervention is not None or self.edits:
            raise ValueError("worlds branch off from one text without an intervention and without edits")

    def arriving(self, index: int) -> Carry:
        """The carry before the intervention at the start of segment ``index`` >= 1; needs a recorded intervention."""
        start = self.starts[index]
        return with_stacked(join(self.config, start.recurrent, self.caches), start.arriving)

    def states_at(self, boundary: int) -> Float[Array, "L B H K V"]:
        """The states that the segment after a boundary reads; raises ValueError as :meth:`segment_at`."""
        return jnp.asarray(self.starts[self.segment_at(boundary)].recurrent.S)


@runtime_checkable
class Objective(Protocol):
    """A function of the final hidden states of a segment. Hashable, because compiled programs are keyed by it."""

    def __call__(
        self, model: Decoder, hidden: Float[Array, "B T D"], inputs: Any
    ) -> tuple[Float[Array, "B T"], Float[Array, "R B T D"]]:
        """A value for each token, and R cotangents of ``hidden``. ``inputs`` are the arrays of this segment."""
        ...


class Pulled(NamedTuple):
    """Derivatives of the R sums over tokens of :func:`pull_back`, for one segment.

    Attributes:
        index: of the segment.
        values: Float[B T], the objective's value for each token.
        state: Float[R L B H K V], derivatives with respect to the S that the segment reads.
        beta: Float[R L B P H], with respect to write strengths.
        g: Float[R L B T H], with respect to log-decays.
        output: Float[R L B H], with respect to a factor on each head's output in this segment.
        residual: Float[L B T D], of the first sum, with respect to what each linear layer adds to the residual stream.
        inputs: Float[L B T D], what each linear layer reads; not a derivative.
    """

    index: int
    values: Array
    state: Array
    beta: Array
    g: Array
    output: Array
    residual: Array
    inputs: Array


class Cotangents(NamedTuple):
    """Derivatives with respect to what a segment passes on besides its states; arrays have a leading axis R.

    Attributes:
        tails: Float[R B W-1 E] for each linear layer.
        caches: for each attention layer, in f32 or wider.
    """

    tails: tuple[Array, ...]
    caches: Any


def record(
    model: Decoder,
    text: Text,
    carry: Carry | None = None,
    *,
    intervention: Intervention | None = None,
    edits: Sequence[Edit] = (),
    max_length: int | None = None,
    on_host: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Tape:
    """Run a text and keep what reverse mode needs.

    The last segment is not run. Arguments are those of :func:`jaxdelta.runs.segments.iterate`, and

    Args:
        max_length: least number of cache places; texts with the same ``max_length`` share a compiled program.
        on_host: move the kept states to host memory.

    Raises:
        TypeError, ValueError: as :func:`jaxdelta.runs.segments.run`.
        NonFiniteError: a NaN or an infinity in the residual stream or a state; names layer, head and segment.
    """
    if carry is None:
        carry = init_carry(model, len(text.lengths), max(max_length or 0, text.count * text.segment))
    if intervention is not None:  # settled here, so that both passes share its program
        intervention = started(intervention, carry, text.boundaries)
    starts = []
    for step in iterate(model, text, carry, intervention=intervention, edits=edits, last=False, progress=progress):
        starts.append(jax.device_get(step.start) if on_host else step.start)
        carry = step.carry
    settled = None if intervention is None else intervention.intervention
    return Tape(model.config, text, starts, split(carry)[1], settled, tuple(edits))


def branch(tape: Tape, index: int, S: Float[Array, "L X H K V"]) -> tuple[Text, Carry]:
    """The rest of a recorded text from the start of segment ``index``, in X worlds that start from the states ``S``.

    Each world starts with a copy of the finished cache: places beyond a segment are masked, and then overwritten.

    Raises:
        ValueError: the tape holds several texts, edits, or an intervention, whose memory fits only the recorded world.
    """
    text = tape.text
    tape.check_untouched()
    worlds, at, begin = S.shape[1], tape.starts[index].recurrent, index * text.segment

    def repeated(x):
        return jnp.repeat(jnp.asarray(x), worlds, axis=0)

    recurrent = Recurrent(S, tuple(repeated(t) for t in at.tails), repeated(at.position))
    rest = Text(np.repeat(text.tokens[:, begin:], worlds, axis=0), np.repeat(text.lengths - begin, worlds), text.segment)
    return rest, join(tape.config, recurrent, jax.tree.map(repeated, tape.caches))


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

    Args:
        inputs: gives the ``inputs`` of ``objective`` for the segment with this index.
        frozen_basis: take the directions that a truncation keeps as constants, although they turn with the state.

    Raises:
        ValueError: the intervention changes more of the carry than the states; derivatives pass only through states.
        NonFiniteError: a NaN or an infinity in a segment or a derivative; names layer, head and segment or boundary.
    """
    config, params = model.config, nnx.state(model)
    program, probes = _program(model, tape)
    own = split_edits(tape.edits)[1]
    state, into = _no_cotangents(tape, cotangents)
    for index in reversed(range(tape.text.count)):
        start, part = tape.starts[index], tape.text.part(index)
        found, finite, state, into, pulled = _pull_segment(
            program, objective, params, start.recurrent, tape.caches, part, own, probes, inputs(index), state, into
        )
        check_segment(config, tape.text, index, np.asarray(finite[0]), finite[1])
        _check_derivative(config, np.asarray(jnp.isfinite(state).all(axis=(0, -2, -1))), index * tape.text.segment)
        yield Pulled(index, *found[:1], state, *pulled, found[1])
        if start.arriving is not None:
            state = _pull_cut(tape.intervention, config, start, tape.caches, state, frozen_basis)


def _no_cotangents(tape: Tape, R: int) -> tuple[Array, Cotangents]:
    """Zero cotangents, for the end of a text."""
    like = tape.starts[0].recurrent
    state = jnp.zeros((R, *like.S.shape), like.S.dtype)
    tails = tuple(jnp.zeros((R, *t.shape), t.dtype) for t in like.tails)
    return state, Cotangents(tails, jax.tree.map(lambda c: jnp.zeros((R, *c.shape), like.S.dtype), tape.caches))


def _program(model: Decoder, tape: Tape) -> tuple[Program, tuple[Array, ...]]:
    """The recorded program with probes added to its edits, and the values of the probes.

    Probes are edits that change nothing: derivatives for beta, g, heads and outputs are those for the values of probes.
    """
    B, T, wide = len(tape.text.lengths), tape.text.segment, accumulation_dtype(model.dtype)
    edits, values = [], []
    for layer, sizes in zip(model.config.linear_layers, model.config.linear_sizes, strict=True):
        H, n = sizes.num_value_heads, sizes.num_householder
        edits += [
            Edit("beta", added, layer),
            Edit("g", added, layer),
            Edit("head_output", multiplied, layer),  # after its norm, which would cancel the factor
            Edit("mixer_output", added, layer),
        ]
        gates = (jnp.zeros((B, T * steps, H), wide) for steps in (n, 1))
        values += [*gates, jnp.ones((B, 1, H, 1), wide), jnp.zeros((B, T, model.config.width), wide)]
    observers = HiddenStates(), Named(("mixer_input",), model.config.linear_layers)
    edits = *split_edits(tape.edits)[0], *edits
    return Program(model.config, model.implementation, observers, edits), tuple(values)


def _check_derivative(config: DecoderConfig, finite: Bool[np.ndarray, "L B H"], boundary: int) -> None:
    """Raise NonFiniteError where an entry of ``finite`` is False; ``boundary`` in tokens seen."""
    if not finite.all():
        layer, row, head = (int(i[0]) for i in np.nonzero(~finite))
        where = f"after {boundary} tokens" if boundary else "at the start of the text"
        raise NonFiniteError(
            f"NaN or infinity in the derivative of layer {config.linear_layers[layer]}, head {head}, {where}, "
            f"in row {row}; {REMEDY}",
            row,
        )


@partial(jax.jit, static_argnums=(0, 1, 5))
def _pull_cut(
    intervention: Intervention, config: DecoderConfig, start: Start, caches: Caches, state: Array, frozen_basis: bool
) -> Array:
    """Cotangents [R L B H K V] of the states that arrive at a boundary, from those of the states after it."""
    carry = join(config, start.recurrent, caches)

    def cut(S):
        before = with_stacked(carry, S)
        change = intervention.frozen if frozen_basis else lambda *x: intervention(*x)[0]
        after = change(before, start.memory)
        kept = [a is b for a, b in zip(_but_states(before), _but_states(after), strict=True)]
        if not all(kept):
            raise ValueError(
                f"{type(intervention).__name__} changes more of the carry than the states, through which derivatives go"
            )
        return stacked(after)

    return jax.vmap(jax.vjp(cut, start.arriving)[1])(state)[0]


def _but_states(carry: Carry) -> list[Array]:
    recurrent, caches = split(carry)
    return jax.tree.leaves((recurrent.tails, recurrent.position, caches))


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=10)
def _pull_segment(
    program: Program,
    objective: Objective,
    params: Any,
    recurrent: Recurrent,
    caches: Caches,
    part: Part,
    own: tuple[Any, ...],
    probes: tuple[Array, ...],
    inputs: Any,
    state: Array,
    into: Cotangents,
) -> tuple[tuple[Array, Array], tuple[Array, Array], Array, Cotangents, tuple[Array, ...]]:
    """Run a segment again and pull cotangents back through it.

    Args:
        own: values of the recorded edits.
        probes: values of the probes.
        inputs: of the objective in this segment.
        state: Float[R L B H K V], cotangents of the states after the segment.
        into: cotangents of the rest that it passes on; donated.

    Returns:
        (values, what linear layers read), (finiteness, states after the segment), cotangents of the states and of the rest
        before it, and those of the probes: beta, g, output, residual.
    """
    model = rebuilt(program.config, program.implementation, params)
    T = part.tokens.shape[1]
    begin = jnp.max(recurrent.position)  # the same for every row whose text goes on
    is_text = first(part.length, T)

    def written(cache: Array) -> Array:
        """The cache places of this segment."""
        return jax.lax.dynamic_slice_in_dim(cache, begin, T, axis=1)

    def run(S, tails, caches, probes):
        before = Recurrent(S, tails, recurrent.position)
        (hidden, seen), after, caches, finite = advance(program, params, before, caches, part, (*own, *probes))
        return (hidden, after.S, after.tails, jax.tree.map(written, caches)), (seen["mixer_input"], finite)

    (hidden, S, *_), pull, (read, finite) = jax.vjp(run, recurrent.S, recurrent.tails, caches, probes, has_aux=True)
    values, into_hidden = objective(model, hidden, inputs)

    def pulled(into_hidden, state, into: Cotangents):
        # Places written here get their cotangents from later segments; those of earlier places are summed, f32 or wider.
        into_written = jax.tree.map(
            lambda total, cache: jnp.where(is_text[..., None, None], written(total), 0).astype(cache.dtype),
            into.caches,
            caches,
        )
        state, tails, of_caches, of_probes = pull((into_hidden.astype(hidden.dtype), state, into.tails, into_written))
        sums = jax.tree.map(lambda total, new: total + new.astype(total.dtype), into.caches, of_caches)
        beta, g, output, residual = (stacked_alike(of_probes[i::4]) for i in range(4))
        return state, Cotangents(tails, sums), (beta, g, output[:, :, 0, :, 0], residual)

    if len(into_hidden) == 1:  # a loop with one iteration is 10 % slower
        one = pulled(*jax.tree.map(lambda x: x[0], (into_hidden, state, into)))
        state, into, (*gates, residual) = jax.tree.map(lambda x: x[None], one)
    else:
        state, into, (*gates, residual) = jax.lax.map(lambda one: pulled(*one), (into_hidden, state, into))
    return (values, read), (finite, S), state, into, (*gates, residual[0])
