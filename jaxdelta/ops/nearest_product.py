"""The product of n_h Householder factors nearest to an orthogonal matrix, in the Frobenius norm.

Let theta_1 >= ... >= theta_d be the moduli of the arguments of g's eigenvalues (a rotated plane counts twice, -1 is pi) and
m = n_h. The distance of the nearest product of m factors depends on the allowed strengths:

    reflections   every beta is 2            dist^2 = sum_k 8 sin^2(theta_{m+2k-1} / 2)          where det g = (-1)^m
                                             dist^2 = 4 + sum_k 8 sin^2(theta_{m+2k} / 2)        elsewhere, k = 1, 2, ...
    switched      every beta is 0 or 2       the smaller of the two above for m and m - 1
    free          every beta is in [0, 2]    dist^2 >= sum_{i>m} 4 sin^2(theta_i / 2) + s

where s is the larger of min_{i<=m} sin^2(theta_i) for odd m and min_{i>m} sin^2(theta_i) for odd d - m, and 0 if both are
even. Whole planes, the largest angle first, attain the first two. They attain the third if no plane is split; a split plane
attains it with a factor of strength 1 - cos(theta) if no other plane on its side has a smaller sine, as for m = 1 and
m = d - 1. ``README.md`` beside this module has the proofs. A rotation of one plane by theta has distance 2 from the nearest
reflection, sqrt((1 - cos theta)(3 + cos theta)) from the nearest factor, and 2 sqrt(2) |sin(theta / 2)| from I.

All of this runs on the host in f64: a real Schur form, and L-BFGS where the bound is not known to be attained.
"""

from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from scipy.linalg import schur
from scipy.optimize import minimize

from jaxdelta.ops.householder import Measured, check_orthogonal, orthogonality_tolerance, transition

Strengths = Literal["reflections", "switched", "free"]


class Planes(NamedTuple):
    """An orthogonal matrix as rotations of planes: g = basis blocks basis^T.

    Attributes:
        angles: [d], from 0 to pi, descending; that of a plane twice, 0 where g is the identity.
        basis: [d, d], orthonormal columns; g turns the first column of a plane towards the second.
        odd: 1 if det g = -1: the first angle is then a single pi, and planes begin at the second column; else 0.
    """

    angles: np.ndarray
    basis: np.ndarray
    odd: int


class Nearest(NamedTuple):
    """A product near g, ``transition(k, beta)``.

    Attributes:
        k: [n_h, d], unit keys, the factor that acts first in front.
        beta: [n_h], strengths.
        error: Frobenius distance of the product to g, measured.
        lower_bound: of the distance of any product of n_h factors of such strengths.
        method: "exact" if ``error`` meets ``lower_bound``; "optimised" if a nearer product may exist.
    """

    k: np.ndarray
    beta: np.ndarray
    error: float
    lower_bound: float
    method: Literal["exact", "optimised"]


def nearest_product(g, num_householder: int, *, strengths: Strengths = "free", restarts: int = 8, seed: int = 0) -> Nearest:
    """The product of ``num_householder`` factors nearest to one orthogonal matrix g [d, d].

    Args:
        strengths: "reflections" has every beta at 2, "switched" at 0 or 2, "free" anywhere in [0, 2].
        restarts, seed: random starts of the optimisation, which only "free" may need.

    Raises:
        ValueError: g is not one orthogonal matrix, ``num_householder`` or ``restarts`` is below 1, or unknown strengths.
    """
    if strengths not in get_args(Strengths):
        raise ValueError(f"strengths is {strengths!r}; expected one of {', '.join(get_args(Strengths))}")
    _check_counts(num_householder, restarts)
    planes = rotation_planes(g)
    tolerance = orthogonality_tolerance(check_orthogonal(g))
    g = np.asarray(g, np.float64)
    k, beta = _whole_planes(planes, num_householder, strengths)
    bound = lower_bound(planes, num_householder, strengths)
    error = float(distance(g, k, beta))
    if error <= bound + tolerance:
        return Nearest(k, beta, error, bound, "exact")
    k, beta = optimised_factors(g, num_householder, start=(k, beta), restarts=restarts, seed=seed)
    return Nearest(k, beta, float(distance(g, k, beta)), bound, "optimised")


def rotation_planes(g) -> Planes:
    """The planes of one orthogonal matrix g [d, d], in f64, largest angle first.

    Raises:
        ValueError: g is not one orthogonal matrix.
    """
    g = check_orthogonal(g)
    if g.ndim != 2:
        raise ValueError(f"g has shape {g.shape}; expected one matrix [d, d]")
    T, Z = schur(g.astype(np.float64), output="real")
    pairs = np.flatnonzero(np.diagonal(T, -1))
    single = np.setdiff1d(np.arange(len(T)), np.concatenate([pairs, pairs + 1]))
    turn = np.arctan2(T[pairs + 1, pairs] - T[pairs, pairs + 1], T[pairs, pairs] + T[pairs + 1, pairs + 1])
    Z[:, pairs + 1] *= np.sign(turn)
    minus, plus = (single[T[single, single] * sign > 0] for sign in (-1, 1))
    turned = pairs[np.argsort(-np.abs(turn))]
    order = np.concatenate([minus, np.stack([turned, turned + 1], axis=-1).ravel(), plus])
    angles = np.concatenate([np.full(len(minus), np.pi), np.repeat(np.sort(np.abs(turn))[::-1], 2), np.zeros(len(plus))])
    return Planes(angles, Z[:, order], len(minus) % 2)


def lower_bound(planes: Planes, num_householder: int, strengths: Strengths) -> float:
    """Lower bound of the distance from g to a product of ``num_householder`` factors, by the formulas above."""
    m, d = num_householder, len(planes.angles)
    if strengths == "reflections":
        return _reflection_distance(planes, m)
    if strengths == "switched":
        return min(_reflection_distance(planes, m), _reflection_distance(planes, m - 1))
    m = min(m, d)
    sines = np.sin(planes.angles) ** 2
    split = [side.min() for side in (sines[:m], sines[m:]) if len(side) % 2]
    return float(np.sqrt(np.sum(4 * np.sin(planes.angles[m:] / 2) ** 2) + max(split, default=0)))


def _reflection_distance(planes: Planes, m: int) -> float:
    other = (planes.odd + m) % 2  # 1 if the parities differ: some direction is reversed
    return float(np.sqrt(4 * other + np.sum(8 * np.sin(planes.angles[m + other :: 2] / 2) ** 2)))


def _whole_planes(planes: Planes, n: int, strengths: Strengths) -> tuple[np.ndarray, np.ndarray]:
    """Two reflections for each plane, the largest first, as far as n factors reach; keys [n, d] and strengths [n]."""
    if strengths == "free":
        k, beta = _with_split_plane(planes, n)
    else:
        fewer = strengths == "switched" and _reflection_distance(planes, n - 1) < _reflection_distance(planes, n)
        k = _of_parity(planes, n - fewer)
        beta = np.full(len(k), 2.0)
    off = n - len(k)
    k = np.concatenate([k, np.broadcast_to(planes.basis[:, 0], (off, planes.basis.shape[0]))])
    return k / np.linalg.norm(k, axis=-1, keepdims=True), np.concatenate([beta, np.zeros(off)])


def _with_split_plane(planes: Planes, n: int) -> tuple[np.ndarray, np.ndarray]:
    """At most n factors: those of whole planes and, if one is left, the best one in the next plane."""
    k = _normals(planes, n, single=planes.odd)
    beta = np.full(len(k), 2.0)
    if len(k) == n or len(k) == len(planes.angles):
        return k, beta
    following = len(k)
    split = planes.basis[:, following][None]
    return np.concatenate([k, split]), np.append(beta, 1 - np.cos(planes.angles[following]))


def _of_parity(planes: Planes, n: int) -> np.ndarray:
    """Normals of n reflections. Surplus ones share a normal in the next plane, so that pairs of them cancel."""
    single = planes.odd * (n % 2)
    k = _normals(planes, n, single=single)
    following = min(planes.odd + len(k) - single, len(planes.angles) - 1)
    return np.concatenate([k, np.broadcast_to(planes.basis[:, following], (n - len(k), planes.basis.shape[0]))])


def _normals(planes: Planes, n: int, *, single: int) -> np.ndarray:
    """At most n normals: that of the single -1 if ``single`` is 1, and two for each whole plane."""
    basis, d = planes.basis.T, len(planes.angles)
    end = planes.odd + 2 * min((n - single) // 2, (d - planes.odd) // 2)
    first, second = basis[planes.odd : end : 2], basis[planes.odd + 1 : end : 2]
    half = planes.angles[planes.odd : end : 2, None] / 2
    both = np.stack([first, np.cos(half) * first + np.sin(half) * second], axis=1)
    return np.concatenate([basis[:single], both.reshape(-1, d)])


def distance(g: np.ndarray, k: np.ndarray, beta: np.ndarray) -> Measured:
    """Frobenius distance of ``transition(k, beta)`` to g, [*batch]."""
    return np.linalg.norm(g - transition(k, beta), axis=(-2, -1))


def optimised_factors(
    g: np.ndarray,
    num_householder: int,
    *,
    bounds: tuple[float, float] = (0.0, 2.0),
    start: tuple[np.ndarray, np.ndarray] | None = None,
    restarts: int = 8,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Keys [n_h, d] and strengths [n_h] within ``bounds`` of the product nearest to any g [d, d] that L-BFGS finds.

    The result is a local optimum, the best from ``restarts`` random starts and ``start``. No formula is used.

    Raises:
        ValueError: ``num_householder`` or ``restarts`` below 1.
    """
    _check_counts(num_householder, restarts)
    n, d = num_householder, len(g)
    rng = np.random.default_rng(seed)
    starts = [(rng.standard_normal((n, d)), rng.uniform(*bounds, n)) for _ in range(restarts)]
    starts += [] if start is None else [start]

    def objective(x):
        value, (dk, dbeta) = _squared_error(x[:-n].reshape(n, d), x[-n:], g)
        return float(value), np.concatenate([np.ravel(dk), dbeta])

    with jax.enable_x64(True):
        found = [
            minimize(
                objective,
                np.concatenate([k.ravel(), beta]),
                jac=True,
                method="L-BFGS-B",
                bounds=[(None, None)] * (n * d) + [bounds] * n,
                options={"ftol": 1e-15, "gtol": 1e-10, "maxiter": 2000},
            )
            for k, beta in starts
        ]
    x = min(found, key=lambda one: one.fun).x
    k = x[:-n].reshape(n, d)
    return k / np.linalg.norm(k, axis=-1, keepdims=True), x[-n:]


def _check_counts(num_householder: int, restarts: int) -> None:
    if num_householder < 1 or restarts < 1:
        raise ValueError(f"num_householder = {num_householder}, restarts = {restarts}; expected at least 1 of each")


@jax.jit
def _product_error(k, beta, g):
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    return jnp.sum((g - transition(k, beta)) ** 2)


_squared_error = jax.jit(jax.value_and_grad(_product_error, argnums=(0, 1)))
