"""A smooth spectral filter, differentiable for every spectrum.

    soft(S) = (S S^T + tau I)^{-1} S S^T S             sigma_i -> sigma_i * sigma_i^2 / (sigma_i^2 + tau)

The shrinkage of ridge regression (Hastie, Tibshirani, Friedman, The Elements of Statistical Learning, 3.4.1). It is a
Cholesky solve without singular vectors, so derivatives of every order in S and tau exist without spectral gaps.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from jaxdelta.dims import HIGHEST, AnyArray, Matrices, as_matrices, keeps_f64


@keeps_f64
def soft_filter(S: Matrices, tau: Float[AnyArray, "..."] | float) -> Matrices:
    """S [*batch, K, V] with each singular value shrunk; ``tau`` > 0, in units of sigma^2, broadcasts over *batch.

    Raises:
        ValueError: ``S`` has fewer than two axes.
    """
    S = as_matrices(S)
    tau = jnp.broadcast_to(jnp.asarray(tau, S.dtype), S.shape[:-2])
    if S.shape[-2] > S.shape[-1]:
        return jnp.swapaxes(soft_filter(jnp.swapaxes(S, -1, -2), tau), -1, -2)
    # States of 1e-18 and of 1e18 stay in range if tau, which f32 must hold, scales with them.
    A = S / jnp.sqrt(tau)[..., None, None]
    gram = jnp.einsum("...kv,...jv->...kj", A, A, precision=HIGHEST)
    factor = jnp.linalg.cholesky(gram + jnp.broadcast_to(jnp.eye(S.shape[-2], dtype=S.dtype), gram.shape))
    return S - jax.scipy.linalg.cho_solve((factor, True), S)  # the filter removes (A A^T + I)^{-1} S
