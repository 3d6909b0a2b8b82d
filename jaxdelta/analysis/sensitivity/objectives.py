"""Objectives of sensitivities: functions of the final hidden states of a segment, with their cotangents.

    next-token loss   l = log sum_y exp z_y - z_target;   dl/dh = E_p[w_y] - w_target,   w_y the rows of the head
    its samples       the same with targets drawn from p by inversion, but the sum over tokens, not the mean
    logit difference  z_word - z_other

Cotangents are computed by these formulas and not by autodiff, so that logits exist for one block of words at a time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxdelta.dims import precision_of
from jaxdelta.models.decoder import Decoder
from jaxdelta.nn.head import chosen_logits, log_normalizer, over_words
from jaxdelta.runs.reverse import Objective, Tape


class NextTokenInputs(NamedTuple):
    """Arrays of one segment: ``targets`` Int[B T], ``scored`` Bool[B T], ``count`` Int[B], ``uniforms`` Float[R B T]."""

    targets: Array
    scored: Array
    count: Array
    uniforms: Array


@dataclass(frozen=True)
class NextToken:
    """Next-token loss in nats. Cotangents are of its mean over scored tokens, then of the summed loss of each sample."""

    def __call__(self, model: Decoder, hidden: Float[Array, "B T D"], inputs: NextTokenInputs):
        normalizer = log_normalizer(model.head_weight, hidden)
        losses = normalizer - chosen_logits(model.head_weight, hidden, inputs.targets)
        expected, labels = expected_and_sampled(model, hidden, normalizer, inputs.uniforms)
        words = jnp.concatenate([inputs.targets[None], labels])
        weights = jnp.where(inputs.scored, 1.0, 0.0).astype(losses.dtype)
        into = (expected[None] - model.head_weight[words].astype(expected.dtype)) * weights[None, ..., None]
        return losses * weights, into.at[0].divide(_divisor(inputs.count, into.dtype)[:, None, None])


class LogitDifferenceInputs(NamedTuple):
    """Arrays of one segment: ``words`` and ``others`` Int[B T], ``scored`` Bool[B T], ``count`` Int[B]."""

    words: Array
    others: Array
    scored: Array
    count: Array


@dataclass(frozen=True)
class LogitDifferenceObjective:
    """The objective of a :class:`LogitDifference`."""

    def __call__(self, model: Decoder, hidden: Float[Array, "B T D"], inputs: LogitDifferenceInputs):
        values = chosen_logits(model.head_weight, hidden, inputs.words) - chosen_logits(
            model.head_weight, hidden, inputs.others
        )
        weights = jnp.where(inputs.scored, 1.0, 0.0).astype(values.dtype)
        rows = (model.head_weight[inputs.words] - model.head_weight[inputs.others]).astype(values.dtype)
        return values * weights, (rows * (weights / _divisor(inputs.count, values.dtype)[:, None])[..., None])[None]


@dataclass(frozen=True)
class LogitDifference:
    """Mean over scored tokens of the logit of one word minus that of another, instead of a loss; it has no Fisher part.

    Attributes:
        words, others: token ids, Int[N - 1] or one number; entry i is for the prediction of token i + 1.
    """

    words: np.ndarray | int
    others: np.ndarray | int
    name = "logit_difference"
    unit = "logits"


class OwnInputs(NamedTuple):
    """Arrays of one segment: ``targets`` Int[B T], ``scored`` Bool[B T], ``count`` Int[B]."""

    targets: Array
    scored: Array
    count: Array


@dataclass(frozen=True)
class OfHidden:
    """Mean over scored tokens of a custom function of the hidden states; it has no Fisher part.

    Attributes:
        function: maps the final hidden states, Float[B T D], and the tokens that follow, Int[B T], to a value for each
            token, Float[B T]. jax differentiates it. Define it in a module: every new lambda compiles a new program.
        name, unit: of its values.

    Raises:
        ValueError: when called, if ``function`` does not give a value for each token.
    """

    function: Callable[[Array, Array], Array]
    name: str = "own objective"
    unit: str = "1"

    def __call__(self, model: Decoder, hidden: Float[Array, "B T D"], inputs: OwnInputs):
        values, pull = jax.vjp(lambda h: self._values(model, h, inputs.targets), hidden)
        weights = jnp.where(inputs.scored, 1.0, 0.0).astype(values.dtype)
        (into,) = pull(weights / _divisor(inputs.count, values.dtype)[:, None])
        return values * weights, into[None]

    def _values(self, model: Decoder, hidden: Float[Array, "B T D"], targets: Int[Array, "B T"]) -> Float[Array, "B T"]:
        values = self.function(hidden, targets)
        if values.shape != targets.shape:
            raise ValueError(
                f"the objective gives {list(values.shape)}; expected a value for each token, {list(targets.shape)}"
            )
        return values


@dataclass(frozen=True)
class OfLogits(OfHidden):
    """Like :class:`OfHidden`, but ``function`` takes logits, Float[B T Y], which all exist at once in a segment."""

    def _values(self, model: Decoder, hidden: Float[Array, "B T D"], targets: Int[Array, "B T"]) -> Float[Array, "B T"]:
        return super()._values(model, model.logits(hidden), targets)


Loss = Literal["next_token", "kl"] | LogitDifference | OfHidden


def has_fisher(loss: Loss) -> bool:
    """Whether a loss has a Fisher part: only losses of predicted words have."""
    return isinstance(loss, str)


def objective_of(
    loss: Loss, tape: Tape, scored: np.ndarray, samples: int, seed: int
) -> tuple[Objective, Callable[[int], Any]]:
    """The objective of a loss, and a function that gives its inputs for the segment with an index.

    ``scored`` is Bool[B, N - 1]; ``samples`` and ``seed`` are those of the drawn labels.
    """
    B, size = len(tape.text.lengths), tape.text.segment
    count = tape.text.count * size
    mask = np.zeros((B, count), bool)
    mask[:, : scored.shape[1]] = scored[:, :count]
    total = scored.sum(axis=1)

    def part(x: np.ndarray, index: int) -> np.ndarray:
        return x[:, index * size : (index + 1) * size]

    if isinstance(loss, LogitDifference):
        pairs = []
        for words in (loss.words, loss.others):
            padded = np.zeros((B, count), np.int32)
            padded[:, : scored.shape[1]] = words
            pairs.append(padded)

        def inputs(index: int) -> LogitDifferenceInputs:
            return LogitDifferenceInputs(part(pairs[0], index), part(pairs[1], index), part(mask, index), total)

        return LogitDifferenceObjective(), inputs

    if isinstance(loss, OfHidden):

        def inputs(index: int) -> OwnInputs:
            return OwnInputs(part(tape.text.tokens[:, 1:], index), part(mask, index), total)

        return loss, inputs

    def inputs(index: int) -> NextTokenInputs:
        shape = samples, B, size
        # numpy's generator, which depends on seed and segment alone; jax's depends on its settings.
        uniforms = np.random.Generator(np.random.Philox(key=np.array([seed, index], np.uint64))).random(shape, np.float32)
        return NextTokenInputs(part(tape.text.tokens[:, 1:], index), part(mask, index), total, uniforms)

    return NextToken(), inputs


def expected_and_sampled(
    model: Decoder, hidden: Float[Array, "B T D"], normalizer: Float[Array, "B T"], uniforms: Float[Array, "R B T"]
) -> tuple[Float[Array, "B T D"], Int[Array, "R B T"]]:
    """The head's rows averaged over the predictive distribution, and words drawn from it by inversion of ``uniforms``."""
    B, T, D = hidden.shape
    rows, log_total = hidden.reshape(B * T, D), normalizer.reshape(B * T, 1)
    levels = uniforms.reshape(-1, B * T, 1)
    wide = log_total.dtype
    precision = precision_of(hidden)

    def add(sums, words):
        mean, below, passed = sums
        logits = jnp.einsum("nd,yd->ny", rows, words, preferred_element_type=wide, precision=precision)
        p = jnp.exp(logits - log_total)
        mean = mean + jnp.einsum(
            "ny,yd->nd", p.astype(words.dtype), words, preferred_element_type=wide, precision=precision
        )
        if not len(levels):
            return mean, below, passed
        cumulative = below + jnp.cumsum(p, axis=-1)
        return mean, cumulative[:, -1:], passed + jnp.sum(cumulative[None] < levels, axis=-1, dtype=jnp.int32)

    start = jnp.zeros((B * T, D), wide), jnp.zeros((B * T, 1), wide), jnp.zeros(levels.shape[:2], jnp.int32)
    mean, _, passed = over_words(model.head_weight, B * T, add, start)
    labels = jnp.minimum(passed, len(model.head_weight) - 1)
    return mean.reshape(B, T, D), labels.reshape(uniforms.shape)


def _divisor(count: Int[Array, " B"], dtype) -> Float[Array, " B"]:
    """Number of scored tokens of each row as a divisor: 1 where there are none."""
    return jnp.maximum(count, 1).astype(dtype)
