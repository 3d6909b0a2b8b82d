"""A spectral filter without a cut, differentiable whatever the spectrum.

    soft(S) = (S S^T + tau I)^{-1} S S^T S             sigma_i -> sigma_i * sigma_i^2 / (sigma_i^2 + tau)
    soft_rank(S) = tr((S S^T + tau I)^{-1} S S^T)      = sum_i sigma_i^2 / (sigma_i^2 + tau)

The filter's degrees of freedom, as in ridge regression (Hastie, Tibshirani, Friedman, The Elements of Statistical Learning,
3.4.1). A Cholesky solve: no singular vectors, so no gaps, and plain derivatives of every order in S and in tau.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxdelta.dims import HIGHEST, AnyArray, Matrices, as_matrices, keeps_f64


@keeps_f64
def soft_filter(S: Matrices, tau: Float[AnyArray, "..."] | float) -> Matrices:
    """S with each singular value shrunk; ``tau`` > 0 broadcasts over the leading axes, in units of sigma^2."""
    return _filtered(S, tau)[0]


@keeps_f64
def soft_rank(S: Matrices, tau: Float[AnyArray, "..."] | float) -> Float[Array, "*batch"]:
    """Degrees of freedom kept, from 0 to min(K, V)."""
    return _filtered(S, tau)[1]


def _filtered(S, tau) -> tuple[Array, Array]:
    S = as_matrices(S)
    tau = jnp.broadcast_to(jnp.asarray(tau, S.dtype), S.shape[:-2])[..., None, None]
    if S.shape[-2] > S.shape[-1]:
        transposed, rank = _filtered(jnp.swapaxes(S, -1, -2), tau[..., 0, 0])
        return jnp.swapaxes(transposed, -1, -2), rank
    root = jnp.sqrt(tau)
    A = S / root  # states of 1e-18 and of 1e18 stay in range where tau, which f32 must hold, follows
    gram = jnp.einsum("...kv,...jv->...kj", A, A, precision=HIGHEST)
    eye = jnp.broadcast_to(jnp.eye(S.shape[-2], dtype=S.dtype), gram.shape)
    factor = jnp.linalg.cholesky(gram + eye)
    both = jnp.concatenate([S, eye], axis=-1)
    # (A A^T + I)^{-1} applied to S and to I: what the filter takes away.
    lost = jax.scipy.linalg.cho_solve((factor, True), both)
    taken, inverse = jnp.split(lost, [S.shape[-1]], axis=-1)
    return S - taken, S.shape[-2] - jnp.trace(inverse, axis1=-2, axis2=-1)
