"""Products of Householder factors over windows of a text, from keys and write strengths, and how they mix directions.

    P = (I - beta_M k_M k_M^T) ... (I - beta_1 k_1 k_1^T) = I - Z^T (I + A)^{-1} diag(beta) Z,  A_ij = beta_i z_i.z_j, i > j

where the rows of Z are the keys in text order. With fewer factors than key dimensions, M < K, and Z^T = Q R,

    P = I - Q C Q^T,   C = R (I + A)^{-1} diag(beta) R^T,  M x M

so P is the identity outside the span of the keys, the spectra of P and P - I are those of I - C and C, padded with ones and
zeros, and no K x K matrix is needed. Longer windows are products of shorter ones. P acts on the state from the left; the
decay of the window is a separate factor (its log is kept, since it would underflow). All is computed in f64 from the keys
that the layer uses: products over 1,024 tokens of the control model are within 2e-15 of those in long double. Its keys in
f32 differ by 7e-7 from those of the same model in f64, and singular values of products over 256 tokens by 1.2e-7.

Two subspaces of the arriving state come from right singular vectors; they do not depend on the basis chosen inside:

    active      directions that the window changes by more than a tenth, sigma(P - I) > 0.1
    forgotten   directions that it shortens to less than half, sigma(P) < 0.5

For one factor with beta <= 1 the first is its key if beta > 0.1, and so is the second if beta > 0.5. Principal angles
between the subspaces of successive windows tell whether both act on the same directions. Source of the compact form:
Bischof and Van Loan, "The WY representation for products of Householder matrices", SIAM J. Sci. Stat. Comput. 8, 1987.
"""

from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

ACTIVE = 0.1
FORGOTTEN = 0.5
SUBSPACES = ("active", "forgotten")
ANGLE_EDGES = np.arange(0.0, 95.0, 5.0)  # degrees


class Window(NamedTuple):
    """A product of factors, P = I - basis deviation basis^T.

    Attributes:
        deviation: Float[*batch R R], I - P in the basis; R = min(number of factors, K).
        basis: Float[*batch K R], orthonormal columns; None is the identity.
    """

    deviation: np.ndarray
    basis: np.ndarray | None


class Reading(NamedTuple):
    """Spectra of a product, and its two subspaces.

    Attributes:
        kept: Float[*batch K], singular values of P, descending.
        changed: Float[*batch K], singular values of P - I, descending.
        bases: for each of ``SUBSPACES`` Float[*batch K R], orthonormal columns, padded with zeros.
    """

    kept: np.ndarray
    changed: np.ndarray
    bases: tuple[np.ndarray, np.ndarray]


def numerical_tolerance(key_dim: int) -> float:
    """K eps(f32): the least change of a direction that f32 can tell from none, relative to the identity."""
    return key_dim * float(np.finfo(np.float32).eps)


def frozen_tolerances(key_dim: int) -> tuple[float, ...]:
    """sigma(P - I) up to which a direction counts as frozen: the numerical tolerance, a hundredth, a tenth."""
    return numerical_tolerance(key_dim), 0.01, 0.1


def deviation(
    keys: Float[np.ndarray, "*batch M R"], beta: Float[np.ndarray, "*batch M"]
) -> Float[np.ndarray, "*batch R R"]:
    """I - P for the product P of the factors with these keys, the first one rightmost."""
    transposed = np.swapaxes(keys, -1, -2)
    writes = beta[..., None] * keys
    below = np.tril(writes @ transposed, -1)
    return transposed @ np.linalg.solve(np.eye(keys.shape[-2]) + below, writes)


def product(keys: Float[np.ndarray, "*batch M K"], beta: Float[np.ndarray, "*batch M"]) -> Window:
    """The product of the factors with these keys."""
    if keys.shape[-2] >= keys.shape[-1]:
        return Window(deviation(keys, beta), None)
    basis, coordinates = np.linalg.qr(np.swapaxes(keys, -1, -2))
    return Window(deviation(np.swapaxes(coordinates, -1, -2), beta), basis)


def read(window: Window) -> Reading:
    """Spectra and subspaces of a product, from SVDs of R x R matrices."""
    C, basis = window
    _, changed, active = np.linalg.svd(C)
    _, kept, forgotten = np.linalg.svd(np.eye(C.shape[-1]) - C)
    bases = (
        np.swapaxes(active, -1, -2) * (changed > ACTIVE)[..., None, :],
        np.swapaxes(forgotten, -1, -2) * (kept < FORGOTTEN)[..., None, :],
    )
    if basis is None:
        return Reading(kept, changed, bases)
    outside = np.zeros((*C.shape[:-2], basis.shape[-2] - C.shape[-1]))
    kept = -np.sort(-np.concatenate([kept, outside + 1], axis=-1), axis=-1)
    return Reading(kept, np.concatenate([changed, outside], axis=-1), tuple(basis @ b for b in bases))


class WindowSums:
    """Running sums over windows of one length, for each head of a layer."""

    def __init__(self, heads: int, key_dim: int, tolerances: Sequence[float]):
        self.tolerances = np.array(tolerances)
        self.count = 0
        sizes = {
            "kept": (key_dim,),
            "changed": (key_dim,),
            "frozen": self.tolerances.shape,
            "forgotten": (),
            "log_decay": (),
        }
        self._sums = {name: np.zeros((heads, *size)) for name, size in sizes.items()}
        self._smallest = np.full(heads, np.inf)
        self._largest = np.full(heads, -np.inf)
        self._mixing = {kind: Mixing(heads, key_dim) for kind in SUBSPACES}

    def add(self, window: Window, log_decay: Float[np.ndarray, "N H"]) -> None:
        """Add N successive windows, with leading axes [N, H], and the logs of their decays."""
        found = read(window)
        values = {
            "kept": found.kept,
            "changed": found.changed,
            "frozen": (found.changed[..., None] <= self.tolerances).sum(axis=-2),
            "forgotten": (found.kept < FORGOTTEN).sum(axis=-1),
            "log_decay": log_decay,
        }
        self.count += len(log_decay)
        for name, x in values.items():
            self._sums[name] += x.sum(axis=0)
        self._smallest = np.minimum(self._smallest, found.kept.min(axis=(0, -1)))
        self._largest = np.maximum(self._largest, found.kept.max(axis=(0, -1)))
        for kind, bases in zip(SUBSPACES, found.bases, strict=True):
            self._mixing[kind].add(bases)

    def means(self) -> dict[str, np.ndarray]:
        """Means and extremes [H, ...], NaN without windows; those of subspaces are [H, kind, ...]."""
        extremes = {"kept_smallest": self._smallest, "kept_largest": self._largest}
        of_subspaces = [self._mixing[kind].means() for kind in SUBSPACES]
        return {
            **{name: x / (self.count or np.nan) for name, x in self._sums.items()},
            **{name: np.where(np.isfinite(x), x, np.nan) for name, x in extremes.items()},
            **{name: np.stack([means[name] for means in of_subspaces], axis=1) for name in of_subspaces[0]},
        }


class Mixing:
    """Overlap and principal angles of the subspaces of successive windows, for each head of a layer.

    The overlap of two subspaces of a and b dimensions is the cosine between their projectors, <P_i, P_j> / sqrt(a b): the
    mean squared cosine of the principal angles if a = b, and sqrt(a b) / K on average for random subspaces. The mean over
    all pairs follows from the sum of P_i / sqrt(a_i), so only the last window is kept.
    """

    def __init__(self, heads: int, key_dim: int):
        self._last: np.ndarray | None = None
        self._total: np.ndarray | float = 0.0
        self._there, self._pairs = np.zeros(heads, int), np.zeros(heads, int)
        self._overlap, self._chance = np.zeros(heads), np.zeros(heads)
        self._angles = np.zeros((heads, len(ANGLE_EDGES) - 1), int)

    def add(self, bases: Float[np.ndarray, "N H K R"]) -> None:
        """Add successive subspaces; zero columns are padding."""
        size = np.sum(bases**2, axis=(-2, -1))
        self._there += (size > 0.5).sum(axis=0)
        scaled = np.moveaxis(bases / np.maximum(size, 1)[..., None, None] ** 0.25, 0, 2)  # H K N R
        scaled = scaled.reshape(*scaled.shape[:2], -1)
        self._total = self._total + scaled @ np.swapaxes(scaled, -1, -2)
        if self._last is not None:
            bases = np.concatenate([self._last[None], bases])
        self._last = bases[-1]
        self._add_pairs(bases)

    def _add_pairs(self, bases: Float[np.ndarray, "N H K R"]) -> None:
        """Add the pairs of successive subspaces; a pair needs a direction in both."""
        size = np.rint(np.sum(bases**2, axis=(-2, -1)))
        few, mean = np.minimum(size[:-1], size[1:]), np.sqrt(size[:-1] * size[1:])
        cosines = np.linalg.svd(np.swapaxes(bases[:-1], -1, -2) @ bases[1:], compute_uv=False)
        self._pairs += (few > 0).sum(axis=0)
        self._overlap += (np.sum(cosines**2, axis=-1) / np.maximum(mean, 1)).sum(axis=0)
        self._chance += mean.sum(axis=0) / bases.shape[-2]
        there = np.arange(cosines.shape[-1]) < few[..., None]
        angles = np.degrees(np.arccos(np.minimum(cosines, 1)))
        for head, counts in enumerate(self._angles):
            counts += np.histogram(angles[:, head][there[:, head]], ANGLE_EDGES)[0]

    def means(self) -> dict[str, np.ndarray]:
        """Means over pairs for each head, NaN without pairs; ``apart`` is the mean overlap of all other pairs."""
        pairs_apart = self._there * (self._there - 1) // 2 - self._pairs
        squares = np.sum(np.square(self._total), axis=(-2, -1)) if self._last is not None else 0.0
        total_apart = (squares - self._there) / 2 - self._overlap
        with np.errstate(invalid="ignore"):
            return {
                "pairs": self._pairs,
                "overlap": np.divide(self._overlap, self._pairs),
                "chance": np.divide(self._chance, self._pairs),
                "pairs_apart": pairs_apart,
                "apart": np.where(pairs_apart, total_apart, np.nan) / np.maximum(pairs_apart, 1),
                "angles": self._angles,
            }


class WindowStream:
    """Windows of one layer, over a text that comes in segments of any length.

    Windows start at the start of the text; an incomplete window at its end is dropped.

    Args:
        windows: lengths in tokens, ascending, each a multiple of the one before.
        heads, key_dim, num_householder: of the layer.
        tolerances: see :func:`frozen_tolerances`.

    Raises:
        ValueError: ``windows`` are not such lengths.
    """

    def __init__(
        self, windows: Sequence[int], *, heads: int, key_dim: int, num_householder: int, tolerances: Sequence[float]
    ):
        check_windows(windows)
        self.windows, self.steps = tuple(windows), num_householder
        self.sums = {w: WindowSums(heads, key_dim, tolerances) for w in windows}
        whole = [w for w in windows if w * num_householder >= key_dim]
        self.block = whole[0] if whole else windows[-1]  # longer ones are products of K x K matrices
        self._waiting: tuple[np.ndarray, ...] = ()
        self._running: dict[int, list] = {}

    def add(self, k: Float[np.ndarray, "P H K"], beta: Float[np.ndarray, "P H"], g: Float[np.ndarray, "T H"]) -> None:
        """Add the next tokens: keys, write strengths and log-decays."""
        arrays = k, beta, g
        if self._waiting:
            arrays = tuple(np.concatenate(pair) for pair in zip(self._waiting, arrays, strict=True))
        whole = len(arrays[2]) // self.block * self.block
        at = (whole * self.steps, whole * self.steps, whole)
        self._waiting = tuple(x[i:].copy() for x, i in zip(arrays, at, strict=True))
        self._add_factors(*(x[:i] for x, i in zip(arrays, at, strict=True)))

    def finish(self) -> dict[int, WindowSums]:
        """End the text; returns the sums by length of window."""
        if self._waiting:
            self._add_factors(*self._waiting)
        self._waiting = ()
        return self.sums

    def _add_factors(self, k: np.ndarray, beta: np.ndarray, g: np.ndarray) -> None:
        for length in (w for w in self.windows if w <= self.block):
            count = len(g) // length
            if not count:
                continue
            factors = length * self.steps
            keys = k[: count * factors].reshape(count, factors, *k.shape[1:]).swapaxes(1, 2)
            strengths = beta[: count * factors].reshape(count, factors, -1).swapaxes(1, 2)
            decays = g[: count * length].reshape(count, length, -1).sum(axis=1)
            window = product(keys, strengths)
            self.sums[length].add(window, decays)
            if length == self.block and window.basis is None:
                self._join(np.eye(k.shape[-1]) - window.deviation, decays, length)

    def _join(self, products: np.ndarray, decays: np.ndarray, length: int) -> None:
        """Make the longer windows from products [N, H, K, K] of ``length`` tokens each."""
        for longer in (w for w in self.windows if w > self.block):
            whole = self._joined(longer, zip(products, decays, strict=True), longer // length)
            if not whole:
                return
            products, decays = (np.stack(x) for x in zip(*whole, strict=True))
            self.sums[longer].add(Window(np.eye(products.shape[-1]) - products, None), decays)
            length = longer

    def _joined(self, length: int, parts: Iterable, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Products and log-decays of ``count`` parts each; an incomplete one is kept under ``length`` for the next call."""
        whole, waiting = [], self._running.get(length, [])
        for part in parts:
            waiting = [*waiting, part]
            if len(waiting) == count:
                whole.append((reduce(lambda run, P: P @ run, (P for P, _ in waiting)), sum(g for _, g in waiting)))
                waiting = []
        self._running[length] = waiting
        return whole


def check_windows(windows: Sequence[int]) -> None:
    """Raise ValueError unless lengths are whole numbers from 1, ascending, each a multiple of the one before."""
    ascending = all(0 < a < b and b % a == 0 for a, b in pairwise(windows))
    if not (len(windows) and windows[0] >= 1 and ascending):
        raise ValueError(
            f"windows are {list(windows)}; expected tokens from 1, ascending, each a multiple of the one before"
        )
