"""Nearest products: formulas against searches that know none of them, bounds, and what is called exact."""

from itertools import accumulate, pairwise

import numpy as np
import pytest
from scipy.optimize import minimize

from jaxdelta.ops.householder import transition
from jaxdelta.ops.nearest_product import distance, lower_bound, nearest_product, optimised_factors, rotation_planes
from tests.ops.test_reflections import orthogonal

STRENGTHS = ("reflections", "switched", "free")
# Angles of planes, -1 and +1; small enough for a search.
CASES = {
    "one plane": ((0.3,), 0, 2),
    "wide plane": ((2.5,), 0, 1),
    "two planes": ((1.0, 2.5), 0, 0),
    "narrow planes": ((0.5, 1.2), 0, 1),
    "wide planes": ((2.9, 2.0), 0, 0),
    "equal planes": ((1.3, 1.3), 0, 0),
    "plane and -1": ((1.3,), 1, 0),
    "planes and -1": ((1.0, 2.5), 1, 0),
    "plane and two -1": ((0.8,), 2, 1),
    "three -1": ((), 3, 1),
    "identity": ((), 0, 3),
}


def squared_error(x, g, n):
    """||A - g||^2 of A = F_n ... F_1 with F = I - beta k k^T / k^T k, and its gradient, in numpy alone.

    With G_j the derivative by F_j: df/dbeta = -u^T G u and df/du = -beta (G + G^T) u, u = k / |k|.
    """
    d = len(g)
    lengths = np.linalg.norm(x[:-n].reshape(n, d), axis=1)
    u, beta = x[:-n].reshape(n, d) / lengths[:, None], x[-n:]
    factors = np.eye(d) - beta[:, None, None] * u[:, :, None] * u[:, None, :]
    before = list(accumulate(factors, lambda product, factor: factor @ product, initial=np.eye(d)))
    after = list(accumulate(factors[::-1], lambda product, factor: product @ factor, initial=np.eye(d)))[::-1]
    off = before[-1] - g
    G = np.array([2 * after[j + 1].T @ off @ before[j].T for j in range(n)])
    du = -beta[:, None] * np.einsum("jab,jb->ja", G + np.swapaxes(G, 1, 2), u)
    dk = (du - np.sum(du * u, axis=1, keepdims=True) * u) / lengths[:, None]
    return np.sum(off**2), np.concatenate([dk.ravel(), -np.einsum("ja,jab,jb->j", u, G, u)])


def searched(g, near, low, high):
    """The least distance found from random starts, and from starts ever closer to a product until one comes as near.

    Small angles have local minima in which nearly every random start ends: alone these prove that a product is nearer,
    never that none is.
    """
    n, d = near.k.shape
    rng = np.random.default_rng(0)
    bounds = [(None, None)] * (n * d) + [(low, high)] * n
    options = {"maxfun": 10**5, "maxiter": 10**4, "ftol": 1e-15, "gtol": 1e-9}

    def end(k, beta):
        start = np.concatenate([k.ravel(), np.clip(beta, low, high)])
        found = minimize(squared_error, start, (g, n), jac=True, method="L-BFGS-B", bounds=bounds, options=options)
        return np.sqrt(max(found.fun, 0))

    found = [end(rng.standard_normal((n, d)), rng.uniform(low, high, n)) for _ in range(5)]
    for noise in 2.0 ** -np.arange(1, 12):
        if min(found) < near.error + 1e-5:
            break
        found.append(end(near.k + noise * rng.standard_normal((n, d)), near.beta + noise * rng.standard_normal(n)))
    return min(found)


def test_the_searchs_gradient_is_that_of_differences():
    rng = np.random.default_rng(0)
    g, x, step = orthogonal(1, (1.0,), 1, 1), rng.standard_normal(3 * 4 + 3), 1e-6
    sides = [[squared_error(x + sign * step * e, g, 3)[0] for e in np.eye(len(x))] for sign in (1, -1)]
    np.testing.assert_allclose(squared_error(x, g, 3)[1], np.subtract(*sides) / (2 * step), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("n", (1, 2, 3))
@pytest.mark.parametrize("case", CASES)
def test_no_search_finds_a_nearer_product_and_one_finds_this(case, n):
    """Of reflections, of as many as are on where some are switched off, and of free strengths."""
    g = orthogonal(1, *CASES[case])
    of_count = [nearest_product(g, m, strengths="reflections") for m in range(max(n - 1, 1), n + 1)]
    by_count = [np.linalg.norm(g - np.eye(len(g))), *(searched(g, near, 2, 2) for near in of_count)]
    free = nearest_product(g, n)
    expected = {"reflections": by_count[-1], "switched": min(by_count[-2:]), "free": searched(g, free, 0, 2)}
    for strengths in STRENGTHS:
        error = nearest_product(g, n, strengths=strengths).error
        assert expected[strengths] - 2e-5 < error < expected[strengths] + 1e-6, strengths


@pytest.mark.parametrize("angle", (1e-6, 0.3, 1.0, 2.5, np.pi))
def test_one_factor_and_one_plane(angle):
    """2 for a reflection, sqrt((1 - cos)(3 + cos)) for a factor, 2 sqrt(2) |sin(angle / 2)| for none."""
    g = orthogonal(2, (angle,), 0, 6)
    c = 1 - 2 * np.sin(angle / 2) ** 2
    assert nearest_product(g, 1, strengths="reflections").error == pytest.approx(2, abs=1e-14)
    one = nearest_product(g, 1)
    assert one.error == pytest.approx(np.sqrt(2 * np.sin(angle / 2) ** 2 * (3 + c)), abs=1e-14)
    assert one.beta[0] == pytest.approx(1 - c, abs=1e-14)
    assert one.method == "exact"
    none = nearest_product(g, 1, strengths="switched")
    assert none.error == pytest.approx(min(2, np.sqrt(8) * np.sin(angle / 2)), abs=1e-14)
    assert nearest_product(g, 2, strengths="reflections").error < 1e-14


@pytest.mark.parametrize("seed", range(6))
def test_one_free_factor_for_any_matrix(seed):
    """dist^2 = ||g - I||^2 - (1 - lambda_min)^2, lambda_min the least eigenvalue of the symmetric part of g."""
    g = np.linalg.qr(np.random.default_rng(seed).standard_normal((7, 7)))[0]
    least = np.linalg.eigvalsh((g + g.T) / 2)[0]
    found = nearest_product(g, 1)
    assert found.method == "exact"
    assert found.error**2 == pytest.approx(np.linalg.norm(g - np.eye(7)) ** 2 - (1 - least) ** 2, rel=1e-12)


@pytest.mark.parametrize("strengths", ("reflections", "switched"))
@pytest.mark.parametrize("d", (1, 2, 5, 8))
def test_fixed_strengths_are_always_exact(d, strengths):
    """For every number of factors, beyond d too, and both determinants."""
    for seed in range(4):
        g = np.linalg.qr(np.random.default_rng([d, seed]).standard_normal((d, d)))[0]
        for n in range(1, d + 3):
            found = nearest_product(g, n, strengths=strengths)
            assert found.method == "exact"
            assert found.error == pytest.approx(found.lower_bound, abs=1e-13)
            assert set(found.beta) <= ({2.0} if strengths == "reflections" else {0.0, 2.0})


@pytest.mark.parametrize("strengths", STRENGTHS)
@pytest.mark.parametrize("case", CASES)
def test_errors_are_those_of_the_factors_returned(case, strengths):
    g = orthogonal(3, *CASES[case])
    for n in range(1, len(g) + 2):
        found = nearest_product(g, n, strengths=strengths)
        assert found.k.shape == (n, len(g))
        assert found.error == pytest.approx(np.linalg.norm(transition(found.k, found.beta) - g), abs=1e-15)
        assert found.error >= found.lower_bound - 1e-13
        assert (found.method == "exact") == (found.error <= found.lower_bound + 1e-13)


def test_free_strengths_meet_their_bound_where_no_plane_is_split():
    """-1 and two planes: 1, 3 and 5 factors take all of what they touch."""
    g = orthogonal(4, (1.0, 2.5), 1, 1)
    for n in (1, 3, 5, 6):
        found = nearest_product(g, n)
        assert found.method == "exact"
        assert found.error == pytest.approx(nearest_product(g, n, strengths="switched").error, abs=1e-13)


def test_what_is_only_optimised_says_so():
    """The plane split has a larger sine than one on either side of it."""
    g = orthogonal(5, (2.9, 2.0, 0.5), 0, 0)
    found = nearest_product(g, 3, seed=1)
    assert found.method == "optimised"
    assert found.lower_bound + 1e-3 < found.error <= nearest_product(g, 3, strengths="switched").error
    again = nearest_product(g, 3, seed=1)
    np.testing.assert_array_equal(found.k, again.k)


def test_more_factors_are_never_farther():
    g = orthogonal(6, (2.9, 2.0, 0.5), 1, 1)
    for strengths in ("switched", "free"):
        errors = [nearest_product(g, n, strengths=strengths, restarts=2).error for n in range(1, 9)]
        assert all(b <= a + 1e-12 for a, b in pairwise(errors))
        assert errors[-1] < 1e-13


@pytest.mark.parametrize("strengths", STRENGTHS)
def test_no_product_is_nearer_than_the_bound(strengths):
    """Random factors near to the best ones, for random matrices of both determinants."""
    rng = np.random.default_rng(7)
    for _ in range(20):
        g = np.linalg.qr(rng.standard_normal((6, 6)))[0]
        for n in range(1, 6):
            bound = lower_bound(rotation_planes(g), n, strengths)
            best = nearest_product(g, n, strengths="reflections" if strengths == "reflections" else "switched")
            k = best.k + rng.choice([1e-3, 0.1, 1], (100, 1, 1)) * rng.standard_normal((100, n, 6))
            k /= np.linalg.norm(k, axis=-1, keepdims=True)
            noise = rng.uniform(0, 0.5, (100, n)) * np.where(best.beta == 0, 1, -1)
            beta = best.beta + (noise if strengths == "free" else np.zeros_like(noise))
            assert distance(g, k, beta).min() > bound - 1e-13


@pytest.mark.parametrize("angles", [(), (1.0,), (0.3, 2.0, 2.0), (1e-7, 3.1)])
@pytest.mark.parametrize("minus", (0, 1, 2, 3))
def test_planes_put_a_matrix_together_again(angles, minus):
    g = orthogonal(8, angles, minus, 2)
    planes = rotation_planes(g)
    expected = sorted([*np.repeat(angles, 2), *[np.pi] * minus, 0, 0], reverse=True)
    np.testing.assert_allclose(planes.angles, expected, atol=1e-14)
    assert planes.odd == minus % 2
    blocks = np.diag(np.cos(planes.angles))
    first = np.arange(planes.odd, len(g) - 1, 2)
    blocks[first + 1, first] = np.sin(planes.angles[first])
    blocks[first, first + 1] = -np.sin(planes.angles[first])
    np.testing.assert_allclose(planes.basis @ blocks @ planes.basis.T, g, atol=1e-13)


def test_large_matrices_take_whole_planes():
    g = np.linalg.qr(np.random.default_rng(9).standard_normal((256, 256)))[0]
    found = nearest_product(g, 128, strengths="switched")
    assert found.method == "exact"
    assert 0 < found.error < np.linalg.norm(g - np.eye(256))


def test_float32_matrices_are_taken_at_their_precision():
    g = orthogonal(10, (0.3,), 0, 6).astype(np.float32)
    found = nearest_product(g, 1)
    assert found.method == "exact"
    assert found.error == pytest.approx(0.4203, abs=1e-4)


BAD = {
    "no factor": (lambda: nearest_product(np.eye(3), 0), "num_householder = 0"),
    "no restart": (lambda: nearest_product(np.eye(3), 1, restarts=0), "restarts = 0"),
    "no factor to optimise": (lambda: optimised_factors(np.eye(3), 0), "num_householder = 0"),
    "strengths": (lambda: nearest_product(np.eye(3), 1, strengths="some"), "strengths is 'some'; expected one of"),
    "not square": (lambda: nearest_product(np.ones((2, 3)), 1), r"g has shape \(2, 3\)"),
    "a batch": (lambda: nearest_product(np.stack([np.eye(3)] * 2), 1), r"g has shape \(2, 3, 3\); expected one matrix"),
    "not orthogonal": (lambda: nearest_product(2 * np.eye(3), 1), r"\|\|g\^T g - I\|\|_F is 5\.2"),
    "NaN": (lambda: nearest_product(np.full((2, 2), np.nan), 1), "4 of 4 entries of g are not finite"),
}


@pytest.mark.parametrize("name", [name for name in BAD if name != "strengths"])
def test_mistakes_are_refused_with_their_numbers(name):
    call, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        call()
