"""What a span of tokens reads: of the state before it, and of its own writes.

The delta rule is affine in the state that a span starts from. With S_0 that state,

    o_t = S_0^T qbar_t + sum_j A_tj v_j

exactly: ``qbar``, the pulled-back query, is the query taken back through all transitions since the start of the span, and A
is the effective attention, in which what later keys erased of an earlier write is gone. Both depend on queries, keys,
strengths and decays alone. With the letters of :mod:`jaxdelta.ops.delta_rule` for a span that is one chunk,

    N = W (v - Gamma k S_0),   W = X * D * beta_j              what each token writes along its key
    o = scale (Gamma q S_0 + M N),   M = (q k^T) * D           M: from the diagonal down
    qbar = scale (Gamma q - M W (Gamma k)),   A = scale M W

A is T x P for each head: take spans of a few hundred tokens. A query between writes, such as the key itself before its
token writes, is a token of its own with beta = 0 (:func:`recall_errors`).
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxdelta.dims import HIGHEST, Gates, Keys, State, StepGates, StepKeys, StepValues, keeps_f64, matmul
from jaxdelta.ops.delta_product import decay_of_steps
from jaxdelta.ops.delta_rule import CHUNK_SIZE, chunked, inverse_unit_lower, prepare, segment_sums
from jaxdelta.ops.directions import directions


class Reads(NamedTuple):
    """Where the outputs of a span come from.

    Attributes:
        qbar: Float[B T H K], the pulled-back queries, scale included.
        attention: Float[B H T P], weights of the span's values in its outputs, scale included; zero for later writes.
    """

    qbar: Array
    attention: Array


@keeps_f64
def reads(
    q: Keys,
    k: StepKeys,
    *,
    beta: StepGates,
    g: Gates | None = None,
    num_householder: int = 1,
    scale: float | None = None,
) -> Reads:
    """The pulled-back queries and the effective attention of T tokens, in f32 or wider.

    For arguments, shapes and units see :func:`jaxdelta.gated_delta_product`.

    Raises:
        TypeError: ``num_householder`` is not a whole number.
        ValueError: as :func:`jaxdelta.gated_delta_product`.
    """
    n = num_householder
    g = decay_of_steps(q, k, k, beta, g, n)
    q, k, _, g, beta, _ = prepare(q, k, k, g, beta, None, scale)
    q, k, g, beta = (jnp.moveaxis(x, 1, 2) for x in (q, k, g, beta))  # B H T ...
    P = k.shape[2]
    sums = segment_sums(g)
    D = jnp.exp(sums)
    gamma = jnp.exp(sums[..., :1] + g[..., :1, None])
    below = jnp.arange(P)[:, None] > jnp.arange(P)[None]
    kT = jnp.swapaxes(k, -1, -2)
    X = inverse_unit_lower(jnp.where(below, beta[..., None] * matmul(k, kT), 0))
    last = slice(n - 1, None, n)  # the writes after which a token reads
    A = matmul(matmul(q, kT) * D[..., last, :], X * D * beta[..., None, :])
    qbar = gamma[..., last, :] * q - matmul(A, gamma * k)
    return Reads(jnp.moveaxis(qbar, 2, 1), A)


class Contributions(NamedTuple):
    """What each singular direction of a state adds to outputs: ``amount[..., t, i] * direction[..., i, :]``.

    Attributes:
        amount: Float[B T H R], sigma_i (u_i . qbar_t), the largest sigma first.
        direction: Float[B H R V], v_i; zeros where sigma_i is 0.
    """

    amount: Array
    direction: Array


@keeps_f64
def contributions(S: State, qbar: Keys) -> Contributions:
    """The outputs S^T qbar_t of a span taken apart by the directions of the state before it, exactly.

    They are outputs of the rule, before the head's norm, its gate and the output projection. Inside a block of equal
    singular values only sums over the block have a meaning. For :func:`reads` see there.
    """
    U, sigma, right = directions(S)
    there = sigma > 0
    unit = jnp.where(there[..., None], right / jnp.where(there, sigma, 1)[..., None], 0)
    return Contributions(jnp.einsum("bthk,bhkr,bhr->bthr", qbar, U, sigma, precision=HIGHEST), unit)


class RecallErrors(NamedTuple):
    """||S^T k - v|| / ||v|| of each write, Float[B P H]: of the decayed state ``before`` it, and of the state ``after``.

    After a write the error is |1 - beta ||k||^2| times that before. NaN where v is zero.
    """

    before: Array
    after: Array


@keeps_f64
def recall_errors(
    k: StepKeys,
    v: StepValues,
    *,
    beta: StepGates,
    g: Gates | None = None,
    num_householder: int = 1,
    state: State | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> RecallErrors:
    """How well each key recalls its value before and after it is written.

    For arguments, shapes and units see :func:`jaxdelta.gated_delta_product`; ``chunk_size`` changes the result by rounding.

    Raises:
        TypeError: ``num_householder`` is not a whole number.
        ValueError: as :func:`jaxdelta.gated_delta_product`.
    """
    g = decay_of_steps(k[:, ::num_householder], k, v, beta, g, num_householder)
    _, k, v, g, beta, S = prepare(k, k, v, g, beta, state, 1.0)
    # Every write is two steps: one that decays and writes nothing, and one that writes. Both are read by the key.
    twice = [jnp.repeat(x, 2, axis=1) for x in (k, v)]
    decays, strengths = _interleaved(g, jnp.zeros_like(g)), _interleaved(jnp.zeros_like(beta), beta)
    found, _ = chunked(twice[0], *twice, decays, strengths, S, chunk_size=chunk_size)
    size = jnp.linalg.norm(v, axis=-1)
    error = jnp.linalg.norm(found - twice[1], axis=-1) / jnp.repeat(jnp.where(size > 0, size, jnp.nan), 2, axis=1)
    return RecallErrors(error[:, ::2], error[:, 1::2])


def _interleaved(a: Float[Array, "B P H"], b: Float[Array, "B P H"]) -> Float[Array, "B 2*P H"]:
    return jnp.stack([a, b], axis=2).reshape(a.shape[0], -1, a.shape[2])
