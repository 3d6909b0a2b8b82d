"""The loop in which analyses run a model: :func:`iterate`, and under it :func:`advance`, the one segment function, which
derivatives run too.

A text is cut into segments of equal length. One compiled function takes a segment and the carry, and returns what observers
keep and the next carry; between two segments an intervention may change the carry. The last position of a segment predicts
the first token of the next, so N tokens give N - 1 losses, each once.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float

from jaxdelta.arguments import shown, whole_number
from jaxdelta.dims import Mask, Tokens, known
from jaxdelta.implementation import Implementation
from jaxdelta.models import build
from jaxdelta.models.carry import Caches, Carry, Recurrent, check_carry, join, room, split
from jaxdelta.models.config import DecoderConfig
from jaxdelta.models.decoder import Decoder, check_model, layout
from jaxdelta.runs.interventions import Intervention, Started, started
from jaxdelta.runs.observers import Edit, HiddenStates, Observer, Seen, Taps, TokenLosses, check_names, split_edits

REMEDY = "look for broken weights there, or run in float32"


class NonFiniteError(ValueError):
    """A NaN or an infinity in the residual stream, a state, a logit or a derivative. ``row`` is the row of the batch."""

    def __init__(self, message: str, row: int):
        super().__init__(message)
        self.row = row


@contextmanager
def in_document(name: str) -> Iterator[None]:
    """Let a NonFiniteError from inside name the document, of a run of one."""
    try:
        yield
    except NonFiniteError as error:
        raise NonFiniteError(f"document {name}: {error}", 0) from None


class Part(NamedTuple):
    """A segment: ``tokens`` and ``targets`` (the tokens that follow), Int[B T]; ``length``, Int[B], tokens of text."""

    tokens: Array
    targets: Array
    length: Array


class Text(NamedTuple):
    """Rows of text, cut into segments.

    Attributes:
        tokens: Int[B, count * segment + 1], padded at the end.
        lengths: Int[B], tokens of each row.
        segment: tokens between two boundaries.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    segment: int

    @property
    def count(self) -> int:
        """Segments of the longest row."""
        return -(-int(self.lengths.max()) // self.segment)

    @property
    def boundaries(self) -> range:
        """Tokens seen at each boundary between two segments."""
        return range(self.segment, self.segment * self.count, self.segment)

    def part(self, index: int) -> Part:
        """The segment with this index."""
        begin, end = index * self.segment, (index + 1) * self.segment
        length = np.clip(self.lengths - begin, 0, self.segment).astype(np.int32)
        return Part(self.tokens[:, begin:end], self.tokens[:, begin + 1 : end + 1], length)

    def scored(self, index: int) -> Bool[np.ndarray, "B T"]:
        """Which tokens of a segment are followed by another."""
        return index * self.segment + np.arange(self.segment) < self.lengths[:, None] - 1


class Start(NamedTuple):
    """What a segment starts from.

    Attributes:
        recurrent: the carry that the segment reads, without key/value caches.
        arriving: S before the intervention at this boundary; None without an intervention.
        memory: arrays of the intervention before this boundary; None without one.
    """

    recurrent: Recurrent
    arriving: Array | None
    memory: Any


class Step(NamedTuple):
    """What the loop yields for a segment.

    Attributes:
        index: of the segment, from 0.
        start: what it started from, on the device.
        record: of the intervention at the boundary before it; None without one.
        observed: what each observer kept, on the host.
        carry: after the last segment; None for all others, whose caches the next segment has taken over.
    """

    index: int
    start: Start
    record: Any
    observed: tuple[Any, ...]
    carry: Carry | None


class Run(NamedTuple):
    """Result of a segmented run.

    Attributes:
        losses: [B, N - 1], f32 or wider, loss in nats of token i + 1 given tokens 0 .. i; NaN where a row's text has ended.
        carry: after the last token of each row.
        records: of the intervention, stacked along a first axis of boundaries; None if there is no boundary or no record.
        observed: for each segment, what each observer kept.
    """

    losses: np.ndarray
    carry: Carry
    records: Any
    observed: list[tuple[Any, ...]]


class Program(NamedTuple):
    """All that a compiled segment depends on, besides the shapes and dtypes of its arrays."""

    config: DecoderConfig
    implementation: Implementation
    observers: tuple[Observer, ...]
    edits: tuple[Edit, ...]


def init_carry(model: Decoder, batch: int = 1, max_length: int = 16384) -> Carry:
    """The carry before the first token of ``batch`` texts of at most ``max_length`` tokens.

    Raises:
        TypeError: ``model`` is not a Decoder, or ``batch`` or ``max_length`` is not a whole number.
        ValueError: ``batch`` or ``max_length`` is below 1.
    """
    check_model(model)
    batch, max_length = whole_number("batch", batch), whole_number("max_length", max_length)
    if batch < 1 or max_length < 1:
        raise ValueError(f"batch = {batch} and max_length = {max_length}; expected at least 1 each")
    return model.init_carry(batch, max_length)


def forward(model: Decoder, tokens: Tokens, carry: Carry, mask: Mask | None = None) -> tuple[Float[Array, "B T Y"], Carry]:
    """Run any number of tokens on from ``carry``, which stays valid; compiled once for each shape.

    The function may stand inside jit, grad and vmap, also with respect to the states or the model's parameters. Traced
    values are not checked; they give NaN where they are out of bounds.

    Args:
        tokens: whole numbers [B, T], ids below the vocabulary size.
        carry: from :func:`init_carry` or an earlier call, with room for the tokens of text.
        mask: bool [B, T], False is padding, on either side. Padding has no position and does not change the carry; logits
            at padding mean nothing.

    Returns:
        Logits [B, T, Y], f32 or wider, and the next carry.

    Raises:
        TypeError: ``model`` is not a Decoder, or ``carry`` is not a Carry.
        ValueError: ``tokens`` or ``mask`` is not such an array, an id is out of range, or the carry is incomplete, is of
            another model or batch, or has no room for the tokens.
    """
    check_model(model)
    if not hasattr(tokens, "dtype") or len(tokens.shape) != 2:
        raise ValueError(f"tokens is {shown(tokens)}; expected an array of token ids [B, T], such as np.array([[1, 2, 3]])")
    if not tokens.shape[1]:
        raise ValueError("there are no tokens to run")
    if mask is not None and (getattr(mask, "dtype", None) != np.bool_ or mask.shape != tokens.shape):
        raise ValueError(f"the mask is {shown(mask)}; expected bool {list(tokens.shape)}, as the tokens are")
    check_tokens(tokens, model.config.vocab_size, mask)
    check_carry(model.config, layout(type(model), model.config, model.dtype), carry)
    tokens = jnp.asarray(tokens, jnp.int32)
    if tokens.shape[0] != carry.position.shape[0]:
        raise ValueError(f"tokens have {tokens.shape[0]} rows, the carry {carry.position.shape[0]}")
    _check_room(carry, tokens.shape[1], mask)
    program = Program(model.config, model.implementation, (HiddenStates(),), ())
    return _forward(program, nnx.state(model), carry, tokens, None if mask is None else jnp.asarray(mask))


def run(
    model: Decoder,
    tokens: np.ndarray,
    *,
    segment: int = 256,
    lengths: np.ndarray | None = None,
    intervention: Intervention | None = None,
    max_length: int | None = None,
    observers: Sequence[Observer] = (),
    edits: Sequence[Edit] = (),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Run:
    """Run texts segment by segment, with ``intervention`` at every boundary between two segments.

    Args:
        tokens: whole numbers [B, N], ids below the vocabulary size; padding may follow the text of a row.
        segment: tokens between two boundaries; the last segment may be shorter.
        lengths: whole numbers [B], tokens of text in each row; None is all N.
        max_length: places of the key/value cache; None is the longest text, rounded up to whole segments.
        observers: what to keep of each segment.
        edits: changes of named arrays, in every segment.
        progress: called with the number of segments done and of all.

    Raises:
        TypeError: an argument is of another type, for example a model's name, or a size that is not a whole number.
        ValueError: an id out of range, a text of fewer than two tokens, a segment below 1 or above ``max_length``, a text
            above ``max_length``, values of the intervention that do not fit, or names that no layer has.
        NonFiniteError: a NaN or an infinity; names layer, segment and row.
    """
    check_model(model)
    text = text_of(model, tokens, segment=segment, lengths=lengths)
    carry = _first_carry(model, text, max_length)
    losses, records, observed = [], [], []
    for step in iterate(
        model, text, carry, intervention=intervention, observers=(TokenLosses(), *observers), edits=edits, progress=progress
    ):
        scored = text.scored(step.index)
        losses.append(np.where(scored, finite_losses(text, step.index, step.observed[0], scored), np.nan))
        observed.append(step.observed[1:])
        carry = step.carry
        if step.index and intervention is not None:
            records.append(step.record)
    N, done = np.shape(tokens)[1], text.count * text.segment
    found = np.full((len(text.lengths), max(N, done)), np.nan, losses[0].dtype)
    found[:, :done] = np.concatenate(losses, axis=1)
    return Run(found[:, : N - 1], carry, _stack(records), observed)


def text_of(model: Decoder, tokens: Any, *, segment: int, lengths: np.ndarray | None = None) -> Text:
    """Rows [B, N] of token ids as segments.

    Raises:
        TypeError: ``segment`` is not a whole number.
        ValueError: an id out of range, a row of fewer than two tokens, lengths that do not fit, or a segment below 1.
    """
    try:
        rows = np.asarray(tokens)
    except ValueError:
        raise ValueError("tokens are rows of several lengths; pad them to one, and give their lengths") from None
    if rows.ndim != 2 or not len(rows):
        raise ValueError(f"tokens have shape {rows.shape}; expected [B, N] with at least one row")
    B, N = rows.shape
    lengths = np.full(B, N) if lengths is None else np.asarray(lengths)
    if lengths.shape != (B,):
        raise ValueError(f"lengths have shape {lengths.shape}; expected one for each of {B} rows")
    if lengths.dtype.kind not in "iu":
        raise ValueError(f"lengths are of dtype {lengths.dtype}; expected whole numbers")
    segment = whole_number("segment", segment)
    if segment < 1:
        raise ValueError(f"segment is {segment}; expected at least 1 token")
    if lengths.min() < 2 or lengths.max() > N:
        raise ValueError(f"texts have {lengths.min()} to {lengths.max()} tokens; expected 2 to {N}")
    check_tokens(rows, model.config.vocab_size, np.arange(N) < lengths[:, None])
    size = -(-int(lengths.max()) // segment) * segment + 1
    return Text(np.pad(rows.astype(np.int32), ((0, 0), (0, max(0, size - N))))[:, :size], lengths, segment)


def _first_carry(model: Decoder, text: Text, max_length: int | None) -> Carry:
    """The carry before the first token, with ``max_length`` places.

    Raises:
        TypeError: ``max_length`` is not a whole number.
        ValueError: a segment or a text is longer than ``max_length``.
    """
    max_length = text.count * text.segment if max_length is None else whole_number("max_length", max_length)
    if text.segment > max_length:
        raise ValueError(f"a segment of {text.segment} tokens is longer than max_length = {max_length}")
    if text.lengths.max() > max_length:
        raise ValueError(f"a text of {text.lengths.max()} tokens is longer than max_length = {max_length}")
    return init_carry(model, len(text.lengths), max_length)


def iterate(
    model: Decoder,
    text: Text,
    carry: Carry | None = None,
    *,
    intervention: Intervention | Started | None = None,
    observers: Sequence[Observer] = (),
    edits: Sequence[Edit] = (),
    last: bool = True,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[Step]:
    """Run a text and yield its segments in order; the device computes one segment ahead of the host.

    Args:
        carry: to continue from, with room for whole segments; its caches are donated. None is the start of a text.
        last: whether to run the last segment; if False, its step has only a start and a record.
        progress: called with the number of segments done and of all.

    Raises:
        TypeError, ValueError: as :func:`run`.
        NonFiniteError: a NaN or an infinity in the residual stream or a state; names layer, segment and row.
    """
    check_names(model, edits, observers)
    carry = _first_carry(model, text, None) if carry is None else carry
    edits, values = split_edits(edits)
    program, params = Program(model.config, model.implementation, tuple(observers), edits), nnx.state(model)
    memory = None
    if intervention is not None:
        intervention, memory = started(intervention, carry, text.boundaries)
    recurrent, caches = split(carry)
    waiting = None
    for index in range(text.count):
        arriving, before, record = None, memory, None
        if index and intervention is not None:
            arriving = recurrent.S
            recurrent, caches, memory, record = _boundary(intervention, model.config, recurrent, caches, memory)
        start, found, finite = Start(recurrent, arriving, before), (), None
        if last or index + 1 < text.count:
            found, recurrent, caches, finite = _segment(program, params, recurrent, caches, text.part(index), values)
        if waiting is not None:
            yield _on_host(model.config, text, *waiting, None)
            progress(index, text.count)
        waiting = Step(index, start, record, found, None), finite, recurrent.S
    yield _on_host(model.config, text, *waiting, join(model.config, recurrent, caches))
    progress(text.count, text.count)


def num_boundaries(length: int, segment: int) -> int:
    """Number of boundaries of a text of ``length`` tokens after which a token is still predicted."""
    return max(0, length - 2) // segment


def _on_host(config: DecoderConfig, text: Text, step: Step, finite: Array | None, S: Array, carry: Carry | None) -> Step:
    """The step with its observed arrays on the host; raises NonFiniteError."""
    if finite is not None:
        check_segment(config, text, step.index, np.asarray(finite), S)
    return step._replace(observed=jax.tree.map(np.asarray, step.observed), carry=carry)


def check_segment(config: DecoderConfig, text: Text, index: int, finite: Bool[np.ndarray, "layers B"], S: Array) -> None:
    """Raise NonFiniteError if ``finite`` has a False; ``S``, Float[L B H K V], are the states after the segment."""
    if finite.all():
        return
    place, row = (int(i[0]) for i in np.nonzero(~finite))
    where = "the embedding"
    if place:
        where = f"layer {place - 1} ({config.layer_kinds[place - 1]})"
        if config.layer_kinds[place - 1] == "linear":
            heads = np.asarray(jnp.isfinite(S[config.linear_layers.index(place - 1), row]).all(axis=(-2, -1)))
            where += "" if heads.all() else f", in the state of head {np.flatnonzero(~heads)[0]}"
    raise _broken(where, text, index, row)


def finite_losses(text: Text, index: int, losses: np.ndarray, scored: Bool[np.ndarray, "B T"]) -> np.ndarray:
    """``losses`` [B, T] of a segment; raises NonFiniteError if a scored one is not finite."""
    broken = np.flatnonzero(~np.isfinite(np.where(scored, losses, 0)).all(axis=1))
    if broken.size:
        raise _broken("the logits", text, index, int(broken[0]))
    return losses


def _broken(where: str, text: Text, index: int, row: int) -> NonFiniteError:
    begin = index * text.segment
    tokens = f"tokens {begin} to {begin + text.segment - 1}"
    return NonFiniteError(f"NaN or infinity first after {where}, in row {row}, {tokens}; {REMEDY}", row)


def _stack(records: list) -> Any:
    return jax.tree.map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *records) if records else None


@lru_cache
def _graphdef(config: DecoderConfig, implementation: Implementation) -> nnx.GraphDef:
    def made():
        return build(config, implementation=implementation)

    return nnx.split(nnx.eval_shape(made))[0]


def rebuilt(config: DecoderConfig, implementation: Implementation, params) -> Decoder:
    """The model of a config with (traced) parameters; compiled functions are keyed by config and implementation alone."""
    return nnx.merge(_graphdef(config, implementation), params)


def advance(
    program: Program, params, recurrent: Recurrent, caches: Caches, part: Part, values: Sequence[Any]
) -> tuple[tuple[Any, ...], Recurrent, Caches, Array]:
    """Run one segment; all compiled functions use this.

    Returns:
        What observers keep, both parts of the next carry, and whether all is finite, Bool[layers + 1 B].
    """
    model = rebuilt(program.config, program.implementation, params)
    seen = Seen(model, *part)
    carry = join(program.config, recurrent, caches)
    positions = recurrent.position[:, None] + jnp.arange(part.tokens.shape[1], dtype=jnp.int32)[None]
    wanted = [name for observer in program.observers for name in observer.names]
    out = model(part.tokens, carry, part.length, Taps(seen, program.edits, values, positions, wanted))
    seen.hidden = out.hidden
    return tuple(observer(seen) for observer in program.observers), *split(out.carry), out.finite


_segment = jax.jit(advance, static_argnums=0, donate_argnums=3)


def segment_arguments(model: Decoder, rows: int, segment: int, max_length: int) -> tuple[Any, ...]:
    """Arguments of a run's compiled segment, as shapes and dtypes, for lowering it."""
    program = Program(model.config, model.implementation, (TokenLosses(),), ())
    recurrent, caches = jax.eval_shape(lambda: split(model.init_carry(rows, max_length)))
    ids, length = jax.ShapeDtypeStruct((rows, segment), np.int32), jax.ShapeDtypeStruct((rows,), np.int32)
    return program, nnx.state(model), recurrent, caches, Part(ids, ids, length), ()


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _boundary(intervention: Intervention, config, recurrent: Recurrent, caches: Caches, memory):
    carry, memory, record = intervention(join(config, recurrent, caches), memory)
    return *split(carry), memory, record


@partial(jax.jit, static_argnums=0)
def _forward(program: Program, params, carry: Carry, tokens: Tokens, mask: Mask | None):
    recurrent, caches = split(carry)
    length = None if mask is None else jnp.sum(mask, axis=1)
    if mask is not None:  # text first: the model takes padding on the right only
        order = jnp.argsort(~mask, axis=1, stable=True)
        tokens = jnp.take_along_axis(tokens, order, axis=1)
    (hidden,), recurrent, caches, _ = advance(program, params, recurrent, caches, Part(tokens, tokens, length), ())
    if mask is not None:
        hidden = jnp.take_along_axis(hidden, jnp.argsort(order, axis=1)[..., None], axis=1)
    model = rebuilt(program.config, program.implementation, params)
    return model.logits(hidden), join(program.config, recurrent, caches)


def check_tokens(tokens: np.ndarray | Array, vocab_size: int, mask: np.ndarray | Array | None = None) -> None:
    """Raise ValueError for an id outside the vocabulary, which jax would clip, or one that is not a whole number.

    Ids where ``mask`` is False, and traced ids, are not checked.
    """
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"token ids are of dtype {tokens.dtype}; expected whole numbers")
    ids, text = known(tokens), None if mask is None else known(mask)
    if ids is None or (text is None and mask is not None):
        return
    ids = ids if text is None else ids[text]
    if not ids.size:
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(f"token ids run from {low} to {high}; expected 0 to {vocab_size - 1}")


def _check_room(carry: Carry, added: int, mask: Mask | None) -> None:
    places = room(carry)
    position, text = known(carry.position), None if mask is None else known(mask)
    if places is None or position is None or (text is None and mask is not None):
        return
    needed = int(np.max(position + (added if text is None else text.sum(axis=1))))
    if needed > places:
        raise ValueError(f"{needed} tokens do not fit the carry's max_length = {places}; make one with init_carry")
