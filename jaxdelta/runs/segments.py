"""The loop in which analyses run a model: :func:`iterate`, and under it :func:`advance`, the one segment function, which
derivatives run too.

A text is cut into segments of equal length. One compiled function takes a segment and the carry and gives what observers
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
    """A NaN or an infinity in the residual stream, a state or a logit; the message names where, ``row`` the row."""

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
    """A segment of rows of text: ``tokens`` and what follows each, ``targets``, Int[B T]; ``length``, Int[B], of text."""

    tokens: Array
    targets: Array
    length: Array


class Text(NamedTuple):
    """Rows of text, cut into segments.

    Attributes:
        tokens: Int[B, count * segment + 1], padded.
        lengths: Int[B].
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
        """One segment."""
        begin, end = index * self.segment, (index + 1) * self.segment
        length = np.clip(self.lengths - begin, 0, self.segment).astype(np.int32)
        return Part(self.tokens[:, begin:end], self.tokens[:, begin + 1 : end + 1], length)

    def scored(self, index: int) -> Bool[np.ndarray, "B T"]:
        """Which tokens of a segment are followed by another."""
        return index * self.segment + np.arange(self.segment) < self.lengths[:, None] - 1


class Start(NamedTuple):
    """What a segment starts from.

    Attributes:
        recurrent: the carry that the segment reads, but for key/value caches.
        arriving: S before the intervention at this boundary; None where there was none.
        memory: of the intervention before this boundary.
    """

    recurrent: Recurrent
    arriving: Array | None
    memory: Any


class Step(NamedTuple):
    """What the loop gives of a segment.

    Attributes:
        index: of the segment, 0 the first.
        start: what it started from, on the device.
        record: of the intervention at the boundary before it; None where there was none.
        observed: what each observer kept, on the host.
        carry: after it; only of the last segment, since caches are handed on. None of all others.
    """

    index: int
    start: Start
    record: Any
    observed: tuple[Any, ...]
    carry: Carry | None


class Run(NamedTuple):
    """What a segmented run gives.

    Attributes:
        losses: f32 [B, N - 1], nats of token i + 1 given tokens 0 .. i; NaN where a row's text has ended.
        carry: after the last token of each row.
        records: of the intervention, one entry a boundary, stacked; None without an intervention.
        observed: of each segment what each observer kept.
    """

    losses: np.ndarray
    carry: Carry
    records: Any
    observed: list[tuple[Any, ...]]


class Program(NamedTuple):
    """All that shapes a compiled segment, beside the shapes of its arrays."""

    config: DecoderConfig
    implementation: Implementation
    observers: tuple[Observer, ...]
    edits: tuple[Edit, ...]


def init_carry(model: Decoder, batch: int = 1, max_length: int = 16384) -> Carry:
    """The carry before the first token of ``batch`` texts of at most ``max_length`` tokens.

    Raises:
        TypeError: ``model`` is no Decoder, ``batch`` or ``max_length`` no whole number.
        ValueError: ``batch`` or ``max_length`` is below 1.
    """
    check_model(model)
    batch, max_length = whole_number("batch", batch), whole_number("max_length", max_length)
    if batch < 1 or max_length < 1:
        raise ValueError(f"batch = {batch} and max_length = {max_length}; expected at least 1 each")
    return model.init_carry(batch, max_length)


def forward(model: Decoder, tokens: Tokens, carry: Carry, mask: Mask | None = None) -> tuple[Float[Array, "B T Y"], Carry]:
    """Run any number of tokens on from ``carry``, which stays valid; compiled once for each shape.

    A function of arrays: jit, grad and vmap may enclose it, with respect to the states or the model's parameters too. What
    they leave unknown is not checked, and gives NaN where it is out of bounds.

    Args:
        tokens: whole numbers [B, T], ids below the vocabulary's size.
        carry: of :func:`init_carry` or of an earlier call, with room for the tokens of text.
        mask: bool [B, T], False is padding, on either side; padding has no position and leaves its row's carry as it was.
            The logits at padding mean nothing.

    Returns:
        Logits, f32 or wider, and the next carry.

    Raises:
        TypeError: ``model`` is no Decoder, or ``carry`` no Carry.
        ValueError: tokens or mask are no such array, an id out of range, a carry that lacks something or is another
            model's, a batch that is not the carry's, or more tokens than the carry has room for.
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
    """Run texts [B, N] segment by segment, with ``intervention`` at every boundary between two of them.

    Args:
        tokens: ids below the vocabulary's size; what follows a row's ``lengths`` is padding.
        segment: tokens between two boundaries; the last segment may hold fewer.
        lengths: tokens of each row, all N where None.
        max_length: places of the key/value cache, N rounded up to whole segments where None.
        observers: what to keep of each segment.
        edits: of named arrays, in every segment.
        progress: called with the segments done and their number.

    Raises:
        TypeError: ``model`` is no Decoder, ``intervention`` no intervention, or a size no whole number.
        ValueError: an id out of range, a text of fewer than two tokens, a segment below 1 or above ``max_length``, a text
            above ``max_length``, a rank that the intervention refuses, or a name that the model's layers do not have.
        NonFiniteError: a NaN or an infinity, with its layer, segment and row.
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
        TypeError: ``segment`` is no whole number.
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
        TypeError: ``max_length`` is no whole number.
        ValueError: a segment or a text is longer.
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
    """Run a text from ``carry``, which is used up, and give segment after segment; the device is one ahead of the host.

    Args:
        carry: to go on from, its caches with room for whole segments; None is the start of a text.
        last: whether the last segment is run too, or only what it starts from is found.
        progress: called with the segments done and their number.

    Raises:
        TypeError, ValueError: see :func:`run`.
        NonFiniteError: a NaN or an infinity in the residual stream or a state, with its layer, segment and row.
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
    """Boundaries of a text of ``length`` tokens after which a token is still predicted."""
    return max(0, length - 2) // segment


def _on_host(config: DecoderConfig, text: Text, step: Step, finite: Array | None, S: Array, carry: Carry | None) -> Step:
    """A step with what was observed on the host; raises NonFiniteError."""
    if finite is not None:
        check_segment(config, text, step.index, np.asarray(finite), S)
    return step._replace(observed=jax.tree.map(np.asarray, step.observed), carry=carry)


def check_segment(config: DecoderConfig, text: Text, index: int, finite: Bool[np.ndarray, "layers B"], S: Array) -> None:
    """Raise NonFiniteError for a segment whose residual stream or states broke; ``S`` Float[L B H K V] it handed on."""
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
    """``losses`` of a segment [B, T]; raises NonFiniteError where one of those that count is not finite."""
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
    """The module of a config around traced parameters; compiled functions are keyed by these two alone."""
    return nnx.merge(_graphdef(config, implementation), params)


def advance(
    program: Program, params, recurrent: Recurrent, caches: Caches, part: Part, values: Sequence[Any]
) -> tuple[tuple[Any, ...], Recurrent, Caches, Array]:
    """One segment, as every compiled function runs it: what observers keep, both parts of the next carry, and whether all
    is finite, Bool[layers + 1 B]."""
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
    """Arguments of the compiled segment of a run that keeps its losses, by shape alone: to lower it and look at it."""
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
    if mask is not None:  # text first, padding last; the model knows padding on the right alone
        order = jnp.argsort(~mask, axis=1, stable=True)
        tokens = jnp.take_along_axis(tokens, order, axis=1)
    (hidden,), recurrent, caches, _ = advance(program, params, recurrent, caches, Part(tokens, tokens, length), ())
    if mask is not None:
        hidden = jnp.take_along_axis(hidden, jnp.argsort(order, axis=1)[..., None], axis=1)
    model = rebuilt(program.config, program.implementation, params)
    return model.logits(hidden), join(program.config, recurrent, caches)


def check_tokens(tokens: np.ndarray | Array, vocab_size: int, mask: np.ndarray | Array | None = None) -> None:
    """Raise ValueError for an id outside of the vocabulary, which JAX would clip, or one that is no whole number.

    ``mask``: where False, an id may be anything.
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
