"""Generalised Householder factors, their products, and measures of the exact facts about them.

    H(k, beta) = I - beta k k^T                 A = alpha H(k_n, beta_n) ... H(k_1, beta_1),  n = n_h factors

A is a token's transition of the gated delta product, the first step's factor rightmost as in
:mod:`jaxdelta.ops.delta_product`. With ||k|| = 1 and beta in [0, 2]:

- H has the eigenvalue 1 - beta along k and 1 on the hyperplane orthogonal to k, so det H = 1 - beta, its singular values
  are |1 - beta| and ones, and A is non-expansive: ||A||_2 <= alpha;
- the n_h hyperplanes meet in at least d - n_h dimensions, where A is alpha I: rank(A - alpha I) <= n_h, and for n_h < d the
  spectral radius is alpha, whatever beta; without a forget gate it is 1;
- with every beta = 2 and alpha = 1, A is orthogonal and det A = (-1)^n_h.

:func:`factor` and :func:`transition` are jax functions. They compute in the dtype of their arguments and at least f32;
float64 numpy arrays are computed in f64 whatever jax's setting and give numpy arrays. The measures of a matrix run in numpy
on the host, in the dtype of the matrix and at least f32, because jax has no eigenvalues of nonsymmetric matrices on an
accelerator. Sources: classical linear algebra; for the product Siems et al., "DeltaProduct", arXiv 2502.10297.
"""

from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxdelta.dims import HIGHEST, AnyArray, accumulation_dtype, is_traced, keeps_f64

Measured: TypeAlias = np.ndarray | np.number  # [*batch]; a scalar for one matrix

UNIT_TOLERANCE = 100.0  # on ||k||^2 - 1, in units of eps
RANK_TOLERANCE = 10.0  # in units of d * eps * the largest entry


@keeps_f64
def factor(k: Float[AnyArray, "*batch d"], beta, *, unit: bool = True) -> Float[Array, "*batch d d"]:
    """I - beta k k^T for each key, with ``beta`` [*batch] or one number.

    ``unit`` False admits keys of any length, whose eigenvalue is 1 - beta ||k||^2.

    Raises:
        ValueError: as :func:`transition`.
    """
    k, beta = jnp.asarray(k), jnp.asarray(beta)
    return transition(k[..., None, :], beta[..., None] if beta.ndim else beta, unit=unit)


@keeps_f64
def transition(k: Float[AnyArray, "*batch n_h d"], beta, alpha=None, *, unit: bool = True) -> Float[Array, "*batch d d"]:
    """alpha H(k_n, beta_n) ... H(k_1, beta_1): the first factor is rightmost and acts first. Differentiable in both modes.

    Args:
        k: keys of the n_h factors. Where beta is 0, any finite key is allowed, also zero.
        beta: write strengths [*batch, n_h] in [0, 2], or one number for all.
        alpha: decays [*batch] in [0, 1], or one number; None is 1.
        unit: False admits keys of any length.

    Raises:
        ValueError: n_h < 1, or shapes that do not fit. Outside jit also: beta outside [0, 2], alpha outside [0, 1], or a
            key that is not finite or whose squared norm is off 1 by more than 100 eps.
    """
    k, beta = jnp.asarray(k), jnp.asarray(beta)
    alpha = jnp.asarray(1.0 if alpha is None else alpha)
    if k.ndim < 2 or k.shape[-2] < 1:
        raise ValueError(f"k has shape {k.shape}; expected [..., n_h, d] with at least one factor")
    for name, x, shape in (("beta", beta, k.shape[:-1]), ("alpha", alpha, k.shape[:-2])):
        if x.shape not in ((), shape):
            raise ValueError(f"{name} has shape {x.shape}; expected {shape}, for k has shape {k.shape}")
    _check_values(k, beta, alpha, unit)
    dtype = accumulation_dtype(k, beta, alpha)
    beta, alpha = jnp.broadcast_to(beta, k.shape[:-1]), jnp.broadcast_to(alpha, k.shape[:-2])
    return product(k.astype(dtype), beta.astype(dtype), alpha.astype(dtype))


@keeps_f64
@jax.jit
def product(
    k: Float[AnyArray, "*batch n_h d"], beta: Float[AnyArray, "*batch n_h"], alpha: Float[AnyArray, "*batch"]
) -> Float[Array, "*batch d d"]:
    """:func:`transition` without checks, for arrays of one dtype."""

    def apply(A, step):
        k, beta = step
        return A - (beta[..., None] * k)[..., None] * jnp.einsum("...i,...ij->...j", k, A, precision=HIGHEST)[
            ..., None, :
        ], None

    start = alpha[..., None, None] * jnp.broadcast_to(
        jnp.eye(k.shape[-1], dtype=k.dtype), (*k.shape[:-2], *2 * k.shape[-1:])
    )
    return jax.lax.scan(apply, start, (jnp.moveaxis(k, -2, 0), jnp.moveaxis(beta, -1, 0)))[0]


def _check_values(k, beta, alpha, unit: bool) -> None:
    if any(map(is_traced, (k, beta, alpha))):
        return
    k, beta = np.asarray(k), np.asarray(beta)
    for name, x, most in (("beta", beta, 2), ("alpha", np.asarray(alpha), 1)):
        wrong = x[~((x >= 0) & (x <= most))]
        if wrong.size:
            raise ValueError(f"{name} is {wrong.flat[0]}; expected a number in [0, {most}]")
    if not np.isfinite(k).all():
        raise ValueError(f"{np.sum(~np.isfinite(k))} of {k.size} entries of k are not finite")
    norms = np.linalg.norm(k.astype(np.float64), axis=-1)
    off = np.where(beta == 0, 0, np.abs(norms**2 - 1))
    if unit and off.size and off.max() > UNIT_TOLERANCE * float(jnp.finfo(k.dtype).eps):
        raise ValueError(f"a key has norm {norms.flat[off.argmax()]:.9g}; expected unit norm, or unit=False")


def as_square(A, name: str = "A") -> np.ndarray:
    """``A`` as a numpy array [*batch, d, d] in f32 or f64.

    Raises:
        ValueError: ``A`` is not square, d is 0, or an entry is not finite.
    """
    A = np.asarray(A)
    if A.ndim < 2 or A.shape[-1] != A.shape[-2] or A.shape[-1] < 1:
        raise ValueError(f"{name} has shape {A.shape}; expected square matrices [..., d, d]")
    A = A.astype(np.float64 if A.dtype.kind in "iub" or A.dtype.itemsize >= 8 else np.float32)
    if not np.isfinite(A).all():
        raise ValueError(f"{np.sum(~np.isfinite(A))} of {A.size} entries of {name} are not finite")
    return A


def eigenvalues(A) -> np.ndarray:
    """Eigenvalues, complex [*batch, d], by descending modulus. Raises ValueError as :func:`as_square`."""
    found = np.linalg.eigvals(as_square(A)) + 0j
    return np.take_along_axis(found, np.argsort(-np.abs(found), axis=-1), -1)


def spectral_radius(A) -> Measured:
    """The largest modulus of an eigenvalue, [*batch]. Raises ValueError as :func:`as_square`."""
    return np.abs(eigenvalues(A)[..., 0])


def active_rank(A, alpha: np.ndarray | float = 1.0, *, tolerance: float | None = None) -> Measured:
    """rank(A - alpha I), int [*batch]: the directions in which A is more than a decay.

    Args:
        alpha: decays [*batch] or one number.
        tolerance: singular values up to it count as zero; None is 10 d eps times the larger of the largest entry of A and
            alpha, the rounding error of A. It is not relative to A - alpha I, which may be small and known to eps only.

    Raises:
        ValueError: as :func:`as_square`, or the shape of alpha does not fit.
    """
    A = as_square(A)
    alpha = np.asarray(alpha, A.dtype)
    if alpha.shape not in ((), A.shape[:-2]):
        raise ValueError(f"alpha has shape {alpha.shape}; expected {A.shape[:-2]}, for A has shape {A.shape}")
    d = A.shape[-1]
    if tolerance is None:
        tolerance = RANK_TOLERANCE * d * np.finfo(A.dtype).eps * np.maximum(np.abs(A).max(axis=(-2, -1)), np.abs(alpha))
    sigma = np.linalg.svd(A - alpha[..., None, None] * np.eye(d, dtype=A.dtype), compute_uv=False)
    return np.sum(sigma > np.asarray(tolerance)[..., None], axis=-1)


def frozen_dimension(A, alpha: np.ndarray | float = 1.0, *, tolerance: float | None = None) -> Measured:
    """dim ker(A - alpha I), int [*batch]: the directions that A only decays. See :func:`active_rank`."""
    return np.shape(A)[-1] - active_rank(A, alpha, tolerance=tolerance)


def determinant(A) -> Measured:
    """det A, [*batch]. Raises ValueError as :func:`as_square`."""
    return np.linalg.det(as_square(A))


def parity(g, *, tolerance: float | None = None) -> Measured:
    """det g of orthogonal matrices, int [*batch]: 1 for an even number of reflections, -1 for an odd number.

    Raises:
        ValueError: as :func:`check_orthogonal`.
    """
    return np.where(np.linalg.slogdet(check_orthogonal(g, tolerance=tolerance))[0] > 0, 1, -1)


def expansion(A) -> Measured:
    """||A||_2 - 1, [*batch]: at most 0, up to rounding, if no vector grows. Raises ValueError as :func:`as_square`."""
    return np.linalg.norm(as_square(A), 2, axis=(-2, -1)) - 1


def orthogonality_defect(A) -> Measured:
    """||A^T A - I||_2, [*batch]: the largest change of a squared length. Raises ValueError as :func:`as_square`."""
    return np.linalg.norm(_gram_excess(as_square(A)), 2, axis=(-2, -1))


def check_orthogonal(g, *, tolerance: float | None = None) -> np.ndarray:
    """``g`` as :func:`as_square` gives it, after checking that ||g^T g - I||_F is at most ``tolerance`` (None: 10 d eps).

    Raises:
        ValueError: as :func:`as_square`, or ``g`` is not orthogonal.
    """
    g = as_square(g, "g")
    if tolerance is None:
        tolerance = orthogonality_tolerance(g)
    defect = np.linalg.norm(_gram_excess(g), axis=(-2, -1))
    if np.max(defect, initial=0) > tolerance:
        raise ValueError(f"||g^T g - I||_F is {defect.max():.3g}; expected an orthogonal matrix, at most {tolerance:.3g}")
    return g


def orthogonality_tolerance(g) -> float:
    """10 d eps of the dtype of ``g``."""
    return RANK_TOLERANCE * g.shape[-1] * float(jnp.finfo(g.dtype).eps)


def _gram_excess(A: np.ndarray) -> np.ndarray:
    return np.swapaxes(A, -1, -2) @ A - np.eye(A.shape[-1], dtype=A.dtype)
