"""The gated delta rule, token by token and in chunks.

    S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T        S is K x V, per head
    o_t = scale * S_t^T q_t

The decay comes first, the error term reads the decayed state, the output reads the state after the write. Sources: Yang,
Kautz, Hatamizadeh, "Gated Delta Networks", arXiv 2412.06464 (the rule); Yang, Wang, Zhang, Shen, Kim, arXiv 2406.06484 (the
chunked form). Their state is V x K and multiplies from the other side; ours is K x V as in transformers.

Chunked form of C tokens, with D_ij = exp(sum_{j<t<=i} g_t) for i >= j, Gamma_i = exp(sum_{t<=i} g_t), and S the state
before the chunk:

    X  = (I + tril(beta_i k_i.k_j, -1))^{-1}          free of decay: (I + A * D)^{-1} = X * D entry by entry
    N  = (X * D * beta_j) (v - Gamma (k S))           what each token writes along its key
    o  = scale * (Gamma (q S) + ((q k^T) * D) N)
    S' = Gamma_C S + k^T (D_C N)                       D_C: the last row of D

``ops/README.md`` derives it. D comes from masked segment sums and not from differences of one cumulative sum, which
cancel where strong and weak decays meet (a relative error of 3e-4 in o in f32). The mask is applied before ``exp``: masked
entries would overflow and turn gradients into NaN. Every form replaces log-decays below ``LEAST`` by ``LEAST``, whose exp
is 0 in f64: unlike those of minus infinity (a reset of the state), its sums stay finite.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxdelta.arguments import whole_number
from jaxdelta.dims import (
    HIGHEST,
    Gates,
    Keys,
    State,
    StepGates,
    StepKeys,
    StepValues,
    Values,
    accumulation_dtype,
    keeps_f64,
    matmul,
)

LEAST = -1000.0  # of the log-decay
CHUNK_SIZE = 64


def prepare(q, k, v, g, beta, state, scale):
    """Check shapes, widen all arrays to one dtype, scale the queries, bound the log-decays and fill in a zero state.

    Raises:
        ValueError: shapes that do not fit.
    """
    _check_shapes(q, k, v, g, beta, state)
    dtype = accumulation_dtype(q, k, v, g, beta, *(() if state is None else (state,)))
    q, k, v, g, beta = (jnp.asarray(x, dtype) for x in (q, k, v, g, beta))
    B, _, H, K = k.shape
    q = q * jnp.asarray(K**-0.5 if scale is None else scale, dtype)
    S = jnp.zeros((B, H, K, v.shape[-1]), dtype) if state is None else jnp.asarray(state, dtype)
    return q, k, v, bounded(g), beta, S


def bounded(g: Array) -> Array:
    """Log-decays clipped from below at ``LEAST``; the derivative below is zero, like that of exp there."""
    return jnp.where(g < LEAST, LEAST, g)


def _check_shapes(q, k, v, g, beta, state) -> None:
    """Raise ValueError for shapes that would broadcast or fail later. k, v, g and beta have P steps."""
    for name, x, axes in (("q", q, "T, H, K"), ("k", k, "P, H, K"), ("v", v, "P, H, V")):
        if np.ndim(x) != 4:
            raise ValueError(f"{name} has shape {np.shape(x)}; expected [B, {axes}]")
    (B, P, H, K), V = np.shape(k), np.shape(v)[-1]
    expected = {
        "q": (q, (B, np.shape(q)[1], H, K)),
        "v": (v, (B, P, H, V)),
        "g": (g, (B, P, H)),
        "beta": (beta, (B, P, H)),
        "state": (state, (B, H, K, V)),
    }
    for name, (x, shape) in expected.items():
        if x is not None and np.shape(x) != shape:
            raise ValueError(f"{name} has shape {np.shape(x)}; expected {shape}, for k has {(B, P, H, K)}")


@keeps_f64
def gated_delta_rule(
    q: Keys,
    k: Keys,
    v: Values,
    *,
    g: Gates,
    beta: Gates,
    state: State | None = None,
    scale: float | None = None,
) -> tuple[Values, State]:
    """The recurrence itself, token by token: the definition against which every other form is tested.

    Args:
        q, k: already l2-normalised, with key heads repeated to the H value heads.
        g: natural log of the decay, <= 0; minus infinity empties the state.
        beta: write strength in [0, 2]. Outside this range, or with keys longer than one, the state can grow without bound.
        state: S before the first token; None is zeros.
        scale: factor on q; None is K^-1/2.

    Returns:
        o and the state after the last token, in f32 or wider.

    Raises:
        ValueError: shapes that do not fit.
    """
    q, k, v, g, beta, S = prepare(q, k, v, g, beta, state, scale)

    def step(S, token):
        q, k, v, g, beta = token
        S = jnp.exp(g)[..., None, None] * S
        error = v - jnp.einsum("bhkv,bhk->bhv", S, k, precision=HIGHEST)
        S = S + jnp.einsum("bhk,bhv->bhkv", k, beta[..., None] * error, precision=HIGHEST)
        return S, jnp.einsum("bhkv,bhk->bhv", S, q, precision=HIGHEST)

    S, o = jax.lax.scan(step, S, tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, beta)))
    return jnp.moveaxis(o, 0, 1), S


@keeps_f64
def gated_delta_rule_chunked(
    q: Keys,
    k: Keys,
    v: Values,
    *,
    g: Gates,
    beta: Gates,
    state: State | None = None,
    scale: float | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> tuple[Values, State]:
    """:func:`gated_delta_rule` computed in chunks by matrix products, for any T; differentiable in both modes.

    ``chunk_size`` changes the result by rounding only; 32 was faster on a CPU. For shapes and units see
    :func:`gated_delta_rule`.

    Raises:
        TypeError: ``chunk_size`` is not a whole number.
        ValueError: ``chunk_size`` is below 1, or shapes that do not fit.
    """
    return chunked(*prepare(q, k, v, g, beta, state, scale), chunk_size=checked_chunk_size(chunk_size))


def checked_chunk_size(chunk_size: int) -> int:
    """``chunk_size``; raises TypeError unless it is a whole number, ValueError below 1."""
    if whole_number("chunk_size", chunk_size) < 1:
        raise ValueError(f"chunk_size is {chunk_size}; expected at least 1")
    return chunk_size


def chunked(
    q: Keys, k: StepKeys, v: StepValues, g: StepGates, beta: StepGates, S: State, *, chunk_size: int, steps: int = 1
) -> tuple[Values, State]:
    """The chunked form for arrays from :func:`prepare`; a token writes ``steps`` times and reads after its last write.

    q and o have T tokens; k, v, g and beta have P = T * steps writes, those of a token side by side.
    """
    T = q.shape[1]
    C = max(1, min(chunk_size // steps, T))
    # Padding neither decays (g = 0) nor writes (beta = 0).
    q = _split_chunks(q, C)
    k, v, g, beta = (_split_chunks(x, C * steps) for x in (k, v, g, beta))

    index = jnp.arange(C * steps)
    below = index[:, None] > index[None]
    sums = segment_sums(g)
    D = jnp.exp(sums)
    gamma = jnp.exp(sums[..., :1] + g[..., :1, None])
    kk = jnp.einsum("nbhik,nbhjk->nbhij", k, k, precision=HIGHEST)
    X = inverse_unit_lower(jnp.where(below, beta[..., None] * kk, 0))
    write = X * D * beta[..., None, :]
    last = slice(steps - 1, None, steps)  # the writes after which a token reads
    read = jnp.einsum("nbhik,nbhjk->nbhij", q, k, precision=HIGHEST) * D[..., last, :]

    def step(S, chunk):
        q, k, v, gamma, write, read, D_last = chunk
        kq_S = jnp.einsum("bhck,bhkv->bhcv", jnp.concatenate([k, q], axis=-2), S, precision=HIGHEST)
        k_S, q_S = jnp.split(kq_S, [k.shape[-2]], axis=-2)
        N = jnp.einsum("bhij,bhjv->bhiv", write, v - gamma * k_S, precision=HIGHEST)
        o = gamma[..., last, :] * q_S + jnp.einsum("bhij,bhjv->bhiv", read, N, precision=HIGHEST)
        S = gamma[..., -1:, :] * S + jnp.einsum("bhck,bhcv->bhkv", k, D_last[..., None] * N, precision=HIGHEST)
        return S, o

    # The backward pass recomputes a chunk from its state, so only the states are kept.
    S, o = jax.lax.scan(jax.checkpoint(step), S, (q, k, v, gamma, write, read, D[..., -1, :]))
    o = jnp.moveaxis(o, 3, 2)  # N B C H V
    o = jnp.moveaxis(o, 0, 1).reshape(o.shape[1], -1, *o.shape[3:])
    return o[:, :T], S


def _split_chunks(x: Array, C: int) -> Array:
    """[B, T, H, ...] to [N, B, H, C, ...], zero-padded to whole chunks."""
    B, T = x.shape[:2]
    x = jnp.pad(x, [(0, 0), (0, -T % C)] + [(0, 0)] * (x.ndim - 2))
    x = x.reshape(B, -1, C, *x.shape[2:])
    return jnp.moveaxis(jnp.moveaxis(x, 1, 0), 2, 3)


def segment_sums(g: Float[Array, "*batch C"]) -> Float[Array, "*batch C C"]:
    """Entry (i, j) is the sum of g over j < t <= i; minus infinity above the diagonal."""
    index = jnp.arange(g.shape[-1])
    upto, below = index[:, None] >= index[None], index[:, None] > index[None]
    sums = matmul(upto.astype(g.dtype), jnp.where(below, g[..., :, None], 0))
    return jnp.where(upto, sums, -jnp.inf)


@jax.custom_jvp
def inverse_unit_lower(A: Float[Array, "*batch C C"]) -> Float[Array, "*batch C C"]:
    """(I + A)^{-1} for strictly lower triangular A, from diagonal blocks of doubling size.

    If X is the inverse of the blocks of size b and L the part of A that joins two neighbours, X - X L X is the inverse of
    the blocks of size 2b: matrix products only, and backward stable. Neumann doubling and Newton's iteration form powers of
    A, which for correlated keys exceed the inverse by many orders of magnitude (relative errors of 1e1 to 1e8 in f32).
    """
    C = A.shape[-1]
    index = jnp.arange(C)
    X = jnp.broadcast_to(jnp.eye(C, dtype=A.dtype), A.shape)
    size = 1
    while size < C:
        block = index // size
        joins = (block[:, None] // 2 == block[None] // 2) & (block[:, None] > block[None])
        L = jnp.where(joins, A, 0)
        X = X - (L if size == 1 else matmul(matmul(X, L), X))
        size *= 2
    return X


@inverse_unit_lower.defjvp
def _inverse_unit_lower_jvp(primals, tangents):
    (A,), (dA,) = primals, tangents
    X = inverse_unit_lower(A)
    return X, -matmul(matmul(X, jnp.tril(dA, -1)), X)
