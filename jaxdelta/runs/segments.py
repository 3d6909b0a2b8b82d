"""Segmented run: the only way in which an analysis runs a model.

A text is cut into segments of equal length. One compiled function takes a segment and the carry and gives the loss of every
token and the next carry; between two segments an intervention may change the carry. The last position of a segment predicts
the first token of the next, so N tokens give N - 1 losses, each once. Logits exist for a block of words at a time.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxdelta.arguments import shown, whole_number
from jaxdelta.dims import HIGHEST, Mask, Tokens, accumulation_dtype, known, linear
from jaxdelta.models import build
from jaxdelta.models.config import DecoderConfig
from jaxdelta.models.decoder import Carry, Decoder, check_carry, check_model
from jaxdelta.runs.interventions import Intervention, started

LOGITS_AT_ONCE = 2**26  # entries of the largest block of logits, 256 MiB in f32
WORDS_AT_ONCE = 8192  # in a block of logits; on a CPU a wider one leaves the caches and is a third slower


class NonFiniteError(ValueError):
    """A NaN or an infinity in the residual stream, a state or a logit; the message names where, ``row`` the row."""

    def __init__(self, message: str, row: int):
        super().__init__(message)
        self.row = row


class Run(NamedTuple):
    """What a segmented run gives.

    Attributes:
        losses: f32 [B, N - 1], nats of token i + 1 given tokens 0 .. i; NaN where a row's text has ended.
        carry: after the last token of each row.
        records: of the intervention, one entry a boundary, stacked; None without an intervention.
    """

    losses: np.ndarray
    carry: Carry
    records: Any


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
    check_carry(model, carry)
    tokens = jnp.asarray(tokens, jnp.int32)
    if tokens.shape[0] != carry.position.shape[0]:
        raise ValueError(f"tokens have {tokens.shape[0]} rows, the carry {carry.position.shape[0]}")
    _check_room(carry, tokens.shape[1], mask)
    return _forward(model.config, nnx.state(model), carry, tokens, None if mask is None else jnp.asarray(mask))


def run(
    model: Decoder,
    tokens: np.ndarray,
    *,
    segment: int = 256,
    lengths: np.ndarray | None = None,
    intervention: Intervention | None = None,
    max_length: int | None = None,
    after_segment: Callable[[int], None] = lambda index: None,
) -> Run:
    """Run texts [B, N] segment by segment, with ``intervention`` at every boundary between two of them.

    Args:
        tokens: ids below the vocabulary's size; what follows a row's ``lengths`` is padding.
        segment: tokens between two boundaries; the last segment may hold fewer.
        lengths: tokens of each row, all N where None.
        max_length: places of the key/value cache, N rounded up to whole segments where None.
        after_segment: called with the index of each segment once it is computed, for progress.

    Raises:
        TypeError: ``model`` is no Decoder, ``intervention`` no intervention, or a size no whole number.
        ValueError: an id out of range, a text of fewer than two tokens, a segment below 1 or above ``max_length``, a text
            above ``max_length``, or a rank that the intervention refuses.
        NonFiniteError: a NaN or an infinity, with its layer, segment and row.
    """
    check_model(model)
    tokens = _as_rows(tokens)
    B, N = tokens.shape
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
    count = -(-int(lengths.max()) // segment)
    max_length = count * segment if max_length is None else whole_number("max_length", max_length)
    if segment > max_length:
        raise ValueError(f"a segment of {segment} tokens is longer than max_length = {max_length}")
    if lengths.max() > max_length:
        raise ValueError(f"a text of {lengths.max()} tokens is longer than max_length = {max_length}")
    check_tokens(tokens, model.config.vocab_size, np.arange(N) < lengths[:, None])

    tokens = np.pad(tokens.astype(np.int32), ((0, 0), (0, max(0, count * segment + 1 - N))))[:, : count * segment + 1]
    params, carry = nnx.state(model), init_carry(model, B, max_length)
    memory = None
    if intervention is not None:
        intervention, memory = started(intervention, carry, range(segment, segment * count, segment))
    losses, records, waiting = [], [], []
    for index in range(count):
        begin = index * segment
        if index and intervention is not None:
            carry, memory, record = _boundary(intervention, carry, memory)
            records.append(record)
        text = np.clip(lengths - begin, 0, segment).astype(np.int32)
        here, following = tokens[:, begin : begin + segment], tokens[:, begin + 1 : begin + segment + 1]
        loss, carry, finite = _segment(model.config, params, carry, here, following, text)
        waiting.append((index, loss, finite))
        if len(waiting) > 1:  # the device computes a segment while the host reads the one before
            losses.append(_collect(model.config, *waiting.pop(0), lengths, segment))
            after_segment(index - 1)
    losses.append(_collect(model.config, *waiting.pop(), lengths, segment))
    after_segment(count - 1)
    found = np.full((B, max(N, count * segment)), np.nan, losses[0].dtype)
    found[:, : count * segment] = np.concatenate(losses, axis=1)
    return Run(found[:, : N - 1], carry, _stack(records))


def num_boundaries(length: int, segment: int) -> int:
    """Boundaries of a text of ``length`` tokens after which a token is still predicted."""
    return max(0, length - 2) // segment


def _as_rows(tokens) -> np.ndarray:
    try:
        rows = np.asarray(tokens)
    except ValueError:
        raise ValueError("tokens are rows of several lengths; pad them to one, and give their lengths") from None
    if rows.ndim != 2 or not len(rows):
        raise ValueError(f"tokens have shape {rows.shape}; expected [B, N] with at least one row")
    return rows


def _collect(
    config: DecoderConfig, index: int, loss: Array, finite: Array, lengths: np.ndarray, segment: int
) -> np.ndarray:
    """Losses of a segment on the host, NaN where nothing is predicted; raises NonFiniteError."""
    loss, finite = np.array(loss), np.asarray(finite)
    begin = index * segment
    scored = begin + np.arange(segment) < lengths[:, None] - 1
    broken = np.concatenate([~finite, ~np.isfinite(np.where(scored, loss, 0)).all(axis=1)[None]])
    if broken.any():
        place, row = (int(i[0]) for i in np.nonzero(broken))
        names = ["the embedding", *(f"layer {i} ({kind})" for i, kind in enumerate(config.layer_kinds)), "the logits"]
        raise NonFiniteError(
            f"NaN or infinity first after {names[place]}, in row {row}, tokens {begin} to {begin + segment - 1}; "
            "no loss is reported. Look for broken weights there, or run in float32.",
            row,
        )
    return np.where(scored, loss, np.nan)


def _stack(records: list) -> Any:
    return jax.tree.map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *records) if records else None


@lru_cache
def _graphdef(config: DecoderConfig) -> nnx.GraphDef:
    return nnx.split(nnx.eval_shape(lambda: build(config)))[0]


def rebuilt(config: DecoderConfig, params) -> Decoder:
    """The module of a config around traced parameters; compiled functions are keyed by the config alone."""
    return nnx.merge(_graphdef(config), params)


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def _segment(config, params, carry: Carry, tokens: Tokens, targets: Tokens, length: Int[Array, " B"]):
    model = rebuilt(config, params)
    out = model(tokens, carry, length)
    return token_losses(model, out.hidden, targets), out.carry, out.finite


@partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
def _boundary(intervention: Intervention, carry: Carry, memory):
    return intervention(carry, memory)


@partial(jax.jit, static_argnums=0)
def _forward(config, params, carry: Carry, tokens: Tokens, mask: Mask | None):
    model = rebuilt(config, params)
    if mask is None:
        out = model(tokens, carry)
        return model.logits(out.hidden), out.carry
    # Text first, padding last; the model knows padding on the right alone.
    order = jnp.argsort(~mask, axis=1, stable=True)
    out = model(jnp.take_along_axis(tokens, order, axis=1), carry, jnp.sum(mask, axis=1))
    back = jnp.argsort(order, axis=1)
    return model.logits(jnp.take_along_axis(out.hidden, back[..., None], axis=1)), out.carry


def token_losses(model: Decoder, hidden: Float[Array, "B T D"], targets: Tokens) -> Float[Array, "B T"]:
    """Nats of each target. Logits exist for a block of words at a time, at most LOGITS_AT_ONCE entries of them."""
    return log_normalizer(model, hidden) - chosen_logits(model, hidden, targets)


def chosen_logits(model: Decoder, hidden: Float[Array, "B T D"], words: Tokens) -> Float[Array, "B T"]:
    """The logit of one word at each token."""
    precision = HIGHEST if hidden.dtype != jnp.bfloat16 else None
    wide = accumulation_dtype(hidden)
    return jnp.einsum("btd,btd->bt", hidden, model.head_weight[words], preferred_element_type=wide, precision=precision)


def log_normalizer(model: Decoder, hidden: Float[Array, "B T D"]) -> Float[Array, "B T"]:
    """Log of the sum of the exponentials of all logits."""
    B, T, D = hidden.shape
    rows = hidden.reshape(B * T, D)

    def add(sums, words):
        """Log-sum-exp so far, as the largest logit and the sum relative to it."""
        largest, total = sums
        logits = linear(rows, words, dtype=largest.dtype)
        new = jnp.maximum(largest, jnp.max(logits, axis=-1))
        return new, total * jnp.exp(largest - new) + jnp.sum(jnp.exp(logits - new[:, None]), axis=-1)

    wide = accumulation_dtype(hidden)
    largest, total = over_words(model, B * T, add, (jnp.full(B * T, -jnp.inf, wide), jnp.zeros(B * T, wide)))
    return (largest + jnp.log(total)).reshape(B, T)


def over_words(model: Decoder, rows: int, add: Callable[[Any, Array], Any], sums: Any) -> Any:
    """Fold ``add(sums, rows of a block of words)`` over the head; logits of one block exist at once."""
    weight = model.head_weight
    block = _words_at_once(len(weight), rows)
    whole = len(weight) // block * block

    def step(sums, part):
        return add(sums, part), None

    parts = weight[:whole].reshape(-1, block, weight.shape[1])
    sums, _ = jax.lax.scan(jax.checkpoint(step), sums, parts)
    return add(sums, weight[whole:]) if whole < len(weight) else sums


def _words_at_once(words: int, rows: int) -> int:
    """Words of a block: a divisor of their number, where there is a good one, so that no block is cut off and copied."""
    most = max(1, min(words, WORDS_AT_ONCE, LOGITS_AT_ONCE // rows))
    return next((n for n in range(most, most // 4, -1) if words % n == 0), most)


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
    caches = [layer.keys.shape[1] for layer in carry.layers if hasattr(layer, "keys")]
    position, text = known(carry.position), None if mask is None else known(mask)
    if not caches or position is None or (text is None and mask is not None):
        return
    needed = int(np.max(position + (added if text is None else text.sum(axis=1))))
    if needed > min(caches):
        raise ValueError(f"{needed} tokens do not fit the carry's max_length = {min(caches)}; make one with init_carry")
