"""The gated delta product: n_h Householder steps for each token, and one decay before the first of them.

    S_{t,0} = exp(g_t) S_{t-1};   S_{t,j} = S_{t,j-1} + beta_{t,j} k_{t,j} (v_{t,j} - S_{t,j-1}^T k_{t,j})^T,  j = 1 .. n_h
    S_t = S_{t,n_h};   o_t = scale * S_t^T q_t

A token's transition is exp(g_t) times a product of n_h factors I - beta k k^T, the first step's rightmost. Source: Siems,
Carstensen, Zela, Hutter, Pontil, Grazzi, "DeltaProduct", arXiv 2502.10297; the order of decay, steps and read is that of
flash-linear-attention 0.6.
"""

import jax.numpy as jnp
import numpy as np

from jaxdelta.arguments import whole_number
from jaxdelta.dims import Gates, Keys, State, StepGates, StepKeys, StepValues, Values, keeps_f64
from jaxdelta.ops.delta_rule import CHUNK_SIZE, checked_chunk_size, chunked, gated_delta_rule, prepare


@keeps_f64
def gated_delta_product(
    q: Keys,
    k: StepKeys,
    v: StepValues,
    *,
    beta: StepGates,
    g: Gates | None = None,
    num_householder: int,
    state: State | None = None,
    scale: float | None = None,
) -> tuple[Values, State]:
    """The recurrence itself, step by step.

    Args:
        q: [B, T, H, K], l2-normalised, with key heads repeated to the H value heads; the same holds for k.
        k, v, beta: P = T * num_householder entries along the tokens, the steps of a token side by side.
        g: [B, T, H], natural log of the decay, <= 0; None is no decay, minus infinity empties the state.
        num_householder: n_h, steps for each token.
        state: S before the first token; None is zeros.
        scale: factor on q; None is K^-1/2.

    Returns:
        o, [B, T, H, V], and the state after the last token, in f32 or wider.

    Raises:
        TypeError: ``num_householder`` is not a whole number.
        ValueError: ``num_householder`` is below 1, k, v or beta do not have T * num_householder entries, g does not have T,
            or other shapes do not fit.
    """
    g = decay_of_steps(q, k, v, beta, g, num_householder)
    steps = jnp.zeros((*k.shape[:3], q.shape[-1]), q.dtype).at[:, num_householder - 1 :: num_householder].set(q)
    o, S = gated_delta_rule(steps, k, v, g=g, beta=beta, state=state, scale=scale)
    return o[:, num_householder - 1 :: num_householder], S


@keeps_f64
def gated_delta_product_chunked(
    q: Keys,
    k: StepKeys,
    v: StepValues,
    *,
    beta: StepGates,
    g: Gates | None = None,
    num_householder: int,
    state: State | None = None,
    scale: float | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> tuple[Values, State]:
    """:func:`gated_delta_product` computed in chunks by matrix products, for any T; differentiable in both modes.

    ``chunk_size`` counts steps and changes the result by rounding only. For shapes and units see
    :func:`gated_delta_product`.

    Raises:
        TypeError: ``num_householder`` or ``chunk_size`` is not a whole number.
        ValueError: as :func:`gated_delta_product`, or ``chunk_size`` is below 1.
    """
    g = decay_of_steps(q, k, v, beta, g, num_householder)
    prepared = prepare(q, k, v, g, beta, state, scale)
    return chunked(*prepared, chunk_size=checked_chunk_size(chunk_size), steps=num_householder)


def decay_of_steps(q, k, v, beta, g, n: int):
    """g of every step: the token's decay at its first step, zero at the others.

    Raises:
        TypeError: ``n`` is not a whole number.
        ValueError: ``n`` is below 1, or shapes do not fit.
    """
    if whole_number("num_householder", n) < 1:
        raise ValueError(f"num_householder is {n}; expected at least 1")
    if np.ndim(q) != 4:
        raise ValueError(f"q has shape {np.shape(q)}; expected [B, T, H, K]")
    B, T, H, _ = q.shape
    for name, x in (("k", k), ("v", v), ("beta", beta)):
        if _length(x) != T * n:
            raise ValueError(f"{name} has {_length(x)} steps; expected {T} tokens x {n} = {T * n}")
    if g is None:
        return jnp.zeros((B, T * n, H), beta.dtype)
    if _length(g) != T:  # one entry would be broadcast to all tokens
        raise ValueError(f"g has {_length(g)} entries; expected one for each of {T} tokens")
    if np.shape(g) != (B, T, H):
        raise ValueError(f"g has shape {np.shape(g)}; expected {(B, T, H)}, for q has {np.shape(q)}")
    if n == 1:
        return g
    return jnp.zeros((B, T * n, H), g.dtype).at[:, ::n].set(g)


def _length(x) -> int:
    return np.shape(x)[1] if np.ndim(x) > 1 else 1
