"""A spectral filter without a cut, differentiable whatever the spectrum.

    soft(S) = (S S^T + tau I)^{-1} S S^T S             sigma_i -> sigma_i * sigma_i^2 / (sigma_i^2 + tau)

The shrinkage of ridge regression (Hastie, Tibshirani, Friedman, The Elements of Statistical Learning, 3.4.1). A Cholesky
solve: no singular vectors, so no gaps, and plain derivatives of every order in S and in tau.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from jaxdelta.dims import HIGHEST, AnyArray, Matrices, as_matrices, keeps_f64


@keeps_f64
def soft_filter(S: Matrices, tau: Float[AnyArray, "..."] | float) -> Matrices:
    """S with each singular value shrunk; ``tau`` > 0 broadcasts over the leading axes, in units of sigma^2."""
    S = as_matrices(S)
    tau = jnp.broadcast_to(jnp.asarray(tau, S.dtype), S.shape[:-2])
    if S.shape[-2] > S.shape[-1]:
        return jnp.swapaxes(soft_filter(jnp.swapaxes(S, -1, -2), tau), -1, -2)
    # States of 1e-18 and of 1e18 stay in range where tau, which f32 must hold, follows.
    A = S / jnp.sqrt(tau)[..., None, None]
    gram = jnp.einsum("...kv,...jv->...kj", A, A, precision=HIGHEST)
    factor = jnp.linalg.cholesky(gram + jnp.broadcast_to(jnp.eye(S.shape[-2], dtype=S.dtype), gram.shape))
    return S - jax.scipy.linalg.cho_solve((factor, True), S)  # (A A^T + I)^{-1} S is what the filter takes away
