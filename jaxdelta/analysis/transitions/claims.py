"""Claims on what a product of n_h Householder factors can forget and rotate, and measurements of them.

Each line has a claim, its condition, and the values measured on random matrices; the verdict follows. The claims are those
of a study of DeltaProduct's transitions (the model: Siems et al., arXiv 2502.10297). Some hold only under a condition; they
appear twice, as they are often quoted and as they are true.
"""

from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa

from jaxdelta.analysis.claims import Line, above, at_most, below, equal
from jaxdelta.groups import group_of, minimal_representation
from jaxdelta.ops.householder import (
    active_rank,
    determinant,
    eigenvalues,
    expansion,
    factor,
    frozen_dimension,
    orthogonality_defect,
    parity,
    spectral_radius,
    transition,
)
from jaxdelta.ops.nearest_product import distance, nearest_product, optimised_factors
from jaxdelta.ops.norms import l2norm
from jaxdelta.ops.reflections import reflections
from jaxdelta.results.documents import Item, rows_of
from jaxdelta.results.folder import Results
from jaxdelta.runs.capacity import device_memory, gib

FACTORS = (1, 2, 4, 7)
EACH = ", ".join(map(str, FACTORS))
ANGLES = {"0.3": 0.3, "1.0": 1.0, "2.5": 2.5, "pi": np.pi}
ROUNDING = 3e-15
LEAST = {"S3": 2, "S4": 2, "A5": 2, "S5": 4}
SMALLEST_DIM = max(FACTORS) + 1

SCHEMA = pa.schema(
    [
        ("condition", pa.string()),
        ("claim", pa.string()),
        ("relation", pa.string()),
        ("claimed", pa.float64()),
        ("tolerance", pa.float64()),
        ("low", pa.float64()),
        ("high", pa.float64()),
        ("holds", pa.bool_()),
    ]
)


class Sample(NamedTuple):
    """Random matrices for the lines of a condition: their size, the number of draws, and the generator."""

    dim: int
    draws: int
    rng: np.random.Generator

    @property
    def rounding(self) -> float:
        """4 d eps: rounding error in f64 of a product of up to d factors."""
        return 4 * self.dim * float(np.finfo(np.float64).eps)

    def keys(self, n: int) -> np.ndarray:
        """Unit keys [draws, n, dim], uniform on the sphere."""
        k = self.rng.standard_normal((self.draws, n, self.dim))
        return k / np.linalg.norm(k, axis=-1, keepdims=True)

    def strengths(self, n: int) -> np.ndarray:
        """Write strengths [draws, n], uniform in [0, 2]."""
        return self.rng.uniform(0, 2, (self.draws, n))

    def rotation(self, *angles: float) -> np.ndarray:
        """A matrix [dim, dim] that turns one plane by each angle, in a random basis."""
        g = np.eye(self.dim)
        for i, angle in enumerate(angles):
            c, s = np.cos(angle), np.sin(angle)
            g[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = [[c, -s], [s, c]]
        basis = np.linalg.qr(self.rng.standard_normal(g.shape))[0]
        return basis @ g @ basis.T


def ledger(*, dim: int = 16, draws: int = 200, seed: int = 0, out: Path | str | None = None) -> pa.Table:
    """Measure every claim.

    Args:
        dim: size d of the matrices.
        draws: of keys and strengths for each number of factors.
        seed: of the draws.
        out: results folder; if it is finished, nothing is measured again.

    Returns:
        A row for each line: condition, claim, relation, claimed, tolerance, low, high, holds.

    Raises:
        ValueError: ``dim`` is below 8 (7 factors must leave a direction frozen), ``draws`` below 1 or ``seed`` below 0.
        MemoryError: the matrices do not fit.
        ResultsError: ``out`` cannot be used.
    """
    if dim < SMALLEST_DIM or draws < 1 or seed < 0:
        raise ValueError(f"dim = {dim}, draws = {draws}, seed = {seed}; expected at least {SMALLEST_DIM}, 1 and 0")
    needed, limit = 64 * draws * dim**2, device_memory()  # eight f64 matrices of a draw live at once
    if needed > limit:
        raise MemoryError(
            f"dim = {dim}, draws = {draws}: about {gib(needed)} are needed, {gib(limit)} are there; take less"
        )
    about = dict(dim=dim, draws=draws, seed=seed)
    results = None if out is None else Results(Path(out), {"analysis": "ledger"} | about)
    return rows_of([Item(("claims",), about)], lambda values, _: [_measure(**values[0])], results=results)


def _measure(dim: int, draws: int, seed: int) -> pa.Table:
    rows = []
    for index, (condition, measure) in enumerate(CONDITIONS.items()):
        lines = measure(Sample(dim, draws, np.random.default_rng([seed, index])))
        rows += [dict(condition=condition, **line._asdict(), holds=line.holds) for line in lines]
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def pinned(sample: Sample) -> list[Line]:
    """A subspace is frozen, so the spectral radius is 1."""
    A = {n: transition(sample.keys(n), sample.strengths(n)) for n in FACTORS}
    return [
        at_most(f"|rho - 1|, n_h = {EACH}", ROUNDING, [np.abs(spectral_radius(A[n]) - 1) for n in FACTORS]),
        *(equal(f"frozen dimension, n_h = {n}", sample.dim - n, frozen_dimension(A[n])) for n in FACTORS),
        equal("eigenvalues at 1 (to 1e-12) less d - n_h", 0, [_at_one(A[n]) - (sample.dim - n) for n in FACTORS]),
        at_most(f"rank(A - I) - n_h, n_h = {EACH}", 0, [active_rank(A[n]) - n for n in FACTORS]),
    ]


def dependent(sample: Sample) -> list[Line]:
    """If keys repeat or factors are switched off, more directions are frozen."""
    n = max(FACTORS)
    k, beta = sample.keys(n), sample.strengths(n)
    k[:, 1], beta[:, 2] = k[:, 0], 0
    A = transition(k, beta)
    return [
        equal(f"frozen dimension, n_h = {n}", sample.dim - n, frozen_dimension(A)),
        at_most(f"rank(A - I), n_h = {n}", n, active_rank(A)),
        at_most(f"|rho - 1|, n_h = {n}", ROUNDING, np.abs(spectral_radius(A) - 1)),
    ]


def full_rank(sample: Sample) -> list[Line]:
    """Only d factors can forget everything."""
    d = sample.dim
    k = np.linalg.qr(sample.rng.standard_normal((sample.draws, d, d)))[0]
    A, less = transition(k, 1.0), transition(k[:, 1:], 1.0)
    return [
        at_most("rho, n_h = d", sample.rounding, spectral_radius(A)),
        equal("rank(A - I), n_h = d", d, active_rank(A)),
        at_most("|rho - 1|, n_h = d - 1", ROUNDING, np.abs(spectral_radius(less) - 1)),
    ]


def one_factor(sample: Sample) -> list[Line]:
    """Spectrum of a single factor."""
    beta = sample.strengths(1)[:, 0]
    H = factor(sample.keys(1)[:, 0], beta)
    expected = np.ones((sample.draws, sample.dim))
    expected[:, 0] = np.abs(1 - beta)
    sigma = np.sort(np.linalg.svd(H, compute_uv=False), axis=-1)
    return [
        at_most("singular values off {|1 - beta|, 1}", sample.rounding, np.abs(sigma - np.sort(expected, axis=-1))),
        at_most("|det A - (1 - beta)|", sample.rounding, np.abs(determinant(H) - (1 - beta))),
        at_most("||A||_2 - 1", sample.rounding, expansion(H)),
    ]


def reflecting(sample: Sample) -> list[Line]:
    """With beta = 2 a product is orthogonal, of known parity."""
    g = {n: transition(sample.keys(n), 2.0) for n in FACTORS}
    entries = np.stack([np.abs(np.swapaxes(x, 1, 2) @ x - np.eye(sample.dim)).max(axis=(1, 2)) for x in g.values()])
    return [
        below("|A^T A - I|, largest entry, median draw", 1e-15, np.median(entries, axis=1)),
        below("||A^T A - I||_2, worst draw", 1e-15, [orthogonality_defect(x).max() for x in g.values()]),
        at_most("||A^T A - I||_2, worst draw", sample.rounding, [orthogonality_defect(x).max() for x in g.values()]),
        at_most(
            f"|det A - (-1)^n_h|, n_h = {EACH}", sample.rounding, [np.abs(determinant(g[n]) - (-1) ** n) for n in FACTORS]
        ),
    ]


def rotating(sample: Sample) -> list[Line]:
    """One reflection cannot rotate, two rotate a plane, 2 m rotate m planes."""
    turned = {name: sample.rotation(angle) for name, angle in ANGLES.items()}
    plane = np.stack(list(turned.values()))
    two = reflections(plane)
    planes = np.arange(1, sample.dim // 2 + 1)
    many = np.stack([sample.rotation(*sample.rng.uniform(0.1, 3, m)) for m in planes.tolist()])
    found = reflections(many)
    fewer = [_nearest(g, 2 * m - 1) for m, g in zip(planes.tolist(), many, strict=True)]
    return [
        *(equal(f"to the nearest reflection, t = {name}", 2, _optimum(g, (2.0, 2.0)), 1e-12) for name, g in turned.items()),
        equal("reflections for one plane, the same t", 2, two.num_householder),
        at_most("residual of the two", sample.rounding, distance(plane, two.k, two.beta)),
        equal("reflections for m planes less 2 m, all m", 0, found.num_householder - 2 * planes),
        at_most("residual of the 2 m", sample.rounding, distance(many, found.k, found.beta)),
        equal("to the nearest product of 2 m - 1", 2, fewer, 1e-12),
    ]


def forget_gate(sample: Sample) -> list[Line]:
    """With a forget gate the spectral radius is alpha."""
    n = 4
    alpha = sample.rng.uniform(0.5, 0.99, sample.draws)
    A = transition(sample.keys(n), sample.strengths(n), alpha)
    return [
        at_most("|rho - 1|", ROUNDING, np.abs(spectral_radius(A) - 1)),
        at_most("|rho - alpha|", ROUNDING, np.abs(spectral_radius(A) - alpha)),
        at_most("rank(A - I)", n, active_rank(A)),
        at_most("rank(A - alpha I)", n, active_rank(A, alpha)),
    ]


def short_keys(sample: Sample) -> list[Line]:
    """An eps under the root makes keys shorter than one."""
    with jax.enable_x64(True):
        k = np.asarray(l2norm(jnp.asarray(sample.keys(1)[:, 0])))
    beta, norms = sample.strengths(1)[:, 0], np.linalg.norm(k, axis=-1)
    along = np.einsum("ni,nij,nj->n", k, factor(k, beta, unit=False), k) / norms**2
    return [
        equal("1 - ||k||", 5e-7, 1 - norms, 1e-12),
        at_most("eigenvalue off 1 - beta", ROUNDING, np.abs(along - (1 - beta))),
        at_most("eigenvalue off 1 - beta ||k||^2", ROUNDING, np.abs(along - (1 - beta * norms**2))),
        at_most("||A^T A - I||_2 at beta = 2", sample.rounding, orthogonality_defect(factor(k, 2.0, unit=False))),
    ]


def sigmoid_strength(sample: Sample) -> list[Line]:
    """2 sigmoid(x) is below 2, until f32 rounds it."""
    with jax.enable_x64(True):
        wide = np.asarray(2 - 2 * jax.nn.sigmoid(jnp.linspace(-30, 30, 6001, dtype=jnp.float64)))
    x = np.linspace(-30, 30, 6001, dtype=np.float32)
    gap = np.asarray(2 - 2 * jax.nn.sigmoid(x))
    return [
        above("2 - beta in f64, x up to 30", 0, wide),
        above("2 - beta in f32, x up to 15", 0, gap[x <= 15]),
        above("2 - beta in f32, x up to 30", 0, gap),
        at_most("least x with beta = 2 in f32 (25 ln 2)", 25 * np.log(2), x[gap == 0].min(initial=np.inf)),
    ]


def groups(sample: Sample) -> list[Line]:
    """A group needs the least of all its faithful representations, which may be less than permutation matrices need."""
    permuted = {3: _permutations(3), 4: _permutations(4), 5: _permutations(5)}
    least = {name: _costliest(minimal_representation(group_of(name)).matrices) for name in ("S3", "S4", "A5", "S5")}
    even = permuted[5][parity(permuted[5]) > 0]
    return [
        equal("S3, permutations of 3 points", 2, _costliest(permuted[3])),
        equal("S4, permutations of 4 points", 3, _costliest(permuted[4])),
        equal("A5, permutations of 5 points", 4, _costliest(even)),
        equal("S5, permutations of 5 points", 4, _costliest(permuted[5])),
        equal("S4 needs what its permutations need", 3, least["S4"]),
        *(equal(f"{name}, least representation", needed, least[name]) for name, needed in LEAST.items()),
    ]


def free_strength(sample: Sample) -> list[Line]:
    """The distance of 2 holds for reflections; a free factor and I are nearer."""
    turned = {name: sample.rotation(angle) for name, angle in ANGLES.items()}
    free = {name: _optimum(g, (0.0, 2.0)) for name, g in turned.items()}
    identity = {name: np.linalg.norm(g - np.eye(sample.dim)) for name, g in turned.items()}
    cosines = {name: np.cos(angle) for name, angle in ANGLES.items()}
    return [
        equal("to the nearest factor, t = 0.3", 2, free["0.3"], 1e-12),
        *(
            equal(f"sqrt((1 - cos t)(3 + cos t)), t = {name}", np.sqrt((1 - c) * (3 + c)), free[name], 1e-10)
            for name, c in cosines.items()
        ),
        *(
            equal(f"to I: 2 sqrt(2) |sin(t / 2)|, t = {name}", 8**0.5 * np.sin(angle / 2), identity[name], 1e-12)
            for name, angle in ANGLES.items()
        ),
    ]


def parities(sample: Sample) -> list[Line]:
    """If every beta is 2 the parity is fixed; a zero frees it."""
    counts = {}
    for n in FACTORS:
        k = sample.keys(n)
        k[::2, -1] = k[::2, 0]  # some products lose two reflections
        counts[n] = reflections(transition(k, 2.0)).num_householder
    g = sample.rotation(1.0)
    ranks = [transition(sample.keys(r)[0], 2.0) for r in range(1, 5)]
    switched = [nearest_product(g, 4, strengths="switched").error for g in ranks]
    return [
        at_most("rank(g - I) - n_h, beta = 2, each n_h", 0, [counts[n] - n for n in FACTORS]),
        equal("its remainder mod 2", 0, [(counts[n] - n) % 2 for n in FACTORS]),
        at_most("one plane from 3 factors, beta = 2", sample.rounding, _nearest(g, 3)),
        at_most("ranks 1 to 4 from 4 factors, beta = 2", sample.rounding, [_nearest(g, 4) for g in ranks]),
        at_most("ranks 1 to 4 from 4, beta in {0, 2}", sample.rounding, switched),
    ]


CONDITIONS: dict[str, Callable[[Sample], list[Line]]] = {
    "Unit keys in general position, beta in (0, 2], no forget gate, n_h < d": pinned,
    "The same, but one key repeats another and one beta is 0": dependent,
    "Orthonormal keys, beta = 1": full_rank,
    "One factor, unit key, beta in [0, 2]": one_factor,
    "Unit keys, beta = 2": reflecting,
    "Distance of a rotation of planes by t to products of reflections (beta = 2)": rotating,
    "With a forget gate alpha in [0.5, 0.99], n_h = 4": forget_gate,
    "Keys x / sqrt(sum x^2 + 1e-6) with ||x|| = 1, n_h = 1": short_keys,
    "Write strengths beta = 2 sigmoid(x)": sigmoid_strength,
    "Factors for the costliest element of a group, by representation": groups,
    "Distance of a rotation of one plane by t, beta in [0, 2]": free_strength,
    "Orthogonal g that products of n_h factors reach; distances": parities,
}


def _permutations(points: int) -> np.ndarray:
    return np.eye(points)[np.array(list(permutations(range(points))))]


def _costliest(representation: np.ndarray) -> int:
    """max_g rank(rho(g) - I): the reflections that the costliest element needs."""
    return int(reflections(representation, tolerance=1e-8).num_householder.max())


def _at_one(A: np.ndarray) -> np.ndarray:
    """Multiplicity of the eigenvalue 1, [*batch]: the frozen dimension from eigenvalues, without a rank."""
    return np.sum(np.abs(eigenvalues(A) - 1) < 1e-12, axis=-1)


def _optimum(g: np.ndarray, bounds: tuple[float, float]) -> float:
    """Distance of g to the nearest single factor that L-BFGS finds; no formula is used."""
    return float(distance(g, *optimised_factors(g, 1, bounds=bounds, restarts=4)))


def _nearest(g: np.ndarray, n: int) -> float:
    return nearest_product(g, n, strengths="reflections").error
