"""The head of a model: losses and averages over the vocabulary, computed for blocks of words.

    l = log sum_y exp z_y - z_target,   z = W h

``weight`` is W, Float[Y D]. f32 hidden states multiply in f32, bf16 ones accumulate in f32; results are f32 or wider.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxdelta.dims import Tokens, accumulation_dtype, linear, precision_of

Weight: TypeAlias = Float[Array, "Y D"]
LOGITS_AT_ONCE = 2**26  # entries of the largest block of logits, 256 MiB in f32
PLAINLY = 1e-2  # nats, above which a divergence is a difference of normalizers
WORDS_AT_ONCE = 8192  # of a block of logits; on a CPU a wider block exceeds the caches and is a third slower


def token_losses(weight: Weight, hidden: Float[Array, "B T D"], targets: Tokens) -> Float[Array, "B T"]:
    """Loss of each target in nats. At most LOGITS_AT_ONCE logits exist at once."""
    return log_normalizer(weight, hidden) - chosen_logits(weight, hidden, targets)


def chosen_logits(weight: Weight, hidden: Float[Array, "B T D"], words: Tokens) -> Float[Array, "B T"]:
    """The logit of one word at each token."""
    precision = precision_of(hidden)
    wide = accumulation_dtype(hidden)
    return jnp.einsum("btd,btd->bt", hidden, weight[words], preferred_element_type=wide, precision=precision)


def log_normalizer(weight: Weight, hidden: Float[Array, "B T D"]) -> Float[Array, "B T"]:
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
    largest, total = over_words(weight, B * T, add, (jnp.full(B * T, -jnp.inf, wide), jnp.zeros(B * T, wide)))
    return (largest + jnp.log(total)).reshape(B, T)


def over_words(weight: Weight, rows: int, add: Callable[[Any, Array], Any], sums: Any) -> Any:
    """Fold ``add(sums, block)`` over blocks of rows of ``weight``.

    ``rows`` is the number of hidden states, which limits the block: at most LOGITS_AT_ONCE logits exist at once.
    """
    block = _words_at_once(len(weight), rows)
    whole = len(weight) // block * block

    def step(sums, part):
        return add(sums, part), None

    parts = weight[:whole].reshape(-1, block, weight.shape[1])
    sums, _ = jax.lax.scan(jax.checkpoint(step), sums, parts)
    return add(sums, weight[whole:]) if whole < len(weight) else sums


def _words_at_once(words: int, rows: int) -> int:
    """Words of a block, if possible a divisor of their number, so that no shorter block remains and is copied."""
    most = max(1, min(words, WORDS_AT_ONCE, LOGITS_AT_ONCE // rows))
    return next((n for n in range(most, most // 4, -1) if words % n == 0), most)


def divergence(
    weight: Weight, hidden: Float[Array, "B T D"], other: Float[Array, "B T D"]
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """KL(p || p') in nats between the predictions p of ``hidden`` and p' of ``other``, and whether their first words agree.

    With Delta = z - z' and c = E_p[Delta], KL = c - log Z + log Z'. Where that is small it would be lost in the rounding of
    the logits, and KL = log E_p[exp(c - Delta)] = log(1 + E_p[expm1(c - Delta) - (c - Delta)]) is used: a mean of numbers
    >= 0.
    """
    B, T, D = hidden.shape
    rows, others, wide = hidden.reshape(B * T, D), other.reshape(B * T, D), accumulation_dtype(hidden, other)
    none = jnp.full(B * T, -jnp.inf, wide)

    def first(sums, words):
        """Largest logits so far, their words and sums of exp z relative to them, of both; E_p[Delta] before division."""
        (top, word, total), (other_top, other_word, other_total), offset, mean = sums
        z, z2 = (linear(x, words, dtype=wide) for x in (rows, others))
        new, p, shrink = _larger(top, z)
        other_new, q, other_shrink = _larger(other_top, z2)
        word, other_word = (
            jnp.where(jnp.max(x, axis=-1) > t, offset + jnp.argmax(x, axis=-1).astype(jnp.int32), w)
            for x, t, w in ((z, top, word), (z2, other_top, other_word))
        )
        total = total * shrink + jnp.sum(p, axis=-1)
        other_total = other_total * other_shrink + jnp.sum(q, axis=-1)
        mean = mean * shrink + jnp.sum(p * (z - z2), axis=-1)
        return (new, word, total), (other_new, other_word, other_total), offset + len(words), mean

    zeros, nowhere = jnp.zeros(B * T, wide), jnp.zeros(B * T, jnp.int32)
    begin = (none, nowhere, zeros), (none, nowhere, zeros), jnp.int32(0), zeros
    of, of_other, _, mean = over_words(weight, B * T, first, begin)
    (top, word, total), (other_top, other_word, other_total) = of, of_other
    centre = mean / total
    plain = centre - (top + jnp.log(total)) + (other_top + jnp.log(other_total))

    def second(excess, words):
        z, z2 = (linear(x, words, dtype=wide) for x in (rows, others))
        off, p = centre[:, None] - (z - z2), jnp.exp(z - top[:, None])
        large = off > 1  # where p may vanish beside exp(off)
        term = jnp.where(large, jnp.exp(z - top[:, None] + off) - p * (1 + off), p * (jnp.expm1(jnp.minimum(off, 1)) - off))
        return excess + jnp.sum(term, axis=-1)

    small = jnp.log1p(jnp.maximum(over_words(weight, B * T, second, zeros) / total, 0))
    kl = jnp.where(plain > PLAINLY, plain, small)
    return kl.reshape(B, T), (word == other_word).reshape(B, T)


def _larger(top: Array, z: Array) -> tuple[Array, Array, Array]:
    """The largest logits so far and of ``z``, exp z relative to them, and the factor on earlier sums."""
    new = jnp.maximum(top, jnp.max(z, axis=-1))
    return new, jnp.exp(z - new[:, None]), jnp.exp(top - new)
