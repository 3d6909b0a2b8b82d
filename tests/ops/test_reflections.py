"""The least number of reflections: their count, their product, and hard matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdelta.ops.householder import transition
from jaxdelta.ops.reflections import reflections

EPS = np.finfo(np.float64).eps


def orthogonal(seed, angles=(), minus=0, plus=0, *, rotate=True):
    """Planes turned by ``angles``, -1 and +1 as eigenvalues, in a random basis or in the standard one."""
    d = 2 * len(angles) + minus + plus
    g = np.diag(np.concatenate([np.ones(2 * len(angles)), -np.ones(minus), np.ones(plus)]))
    for i, angle in enumerate(angles):
        c, s = np.cos(angle), np.sin(angle)
        g[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = [[c, -s], [s, c]]
    if not rotate:
        return g
    basis = np.linalg.qr(np.random.default_rng(seed).standard_normal((d, d)))[0]
    return basis @ g @ basis.T


def assert_minimal(g, rank):
    """``rank`` reflections, unit normals, and g as their product."""
    d = g.shape[-1]
    found = reflections(g)
    assert found.num_householder == rank
    np.testing.assert_array_equal(found.beta, np.where(np.arange(d) < rank, 2, 0))
    np.testing.assert_allclose(np.linalg.norm(found.k, axis=-1), np.arange(d) < rank, atol=4 * EPS)
    assert np.linalg.norm(transition(found.k, found.beta) - g) < 4 * d * EPS
    assert found.residual < 4 * d * EPS


HARD = {
    "identity": (((), 0, 5), 0),
    "one reflection": (((), 1, 6), 1),
    "minus identity": (((), 6, 0), 6),
    "one plane": (((0.3,), 0, 5), 2),
    "half turn": (((np.pi,), 0, 3), 2),
    "planes": (((0.3, 1.0, 2.5), 0, 1), 6),
    "equal planes": (((1.0, 1.0, 1.0), 0, 2), 6),
    "planes and reflections": (((0.3, 3.0), 3, 2), 7),
    "angle 1e-8": (((1e-8,), 0, 6), 2),
    "angles 1e-8": (((1e-8, 1e-8, 1e-8), 0, 0), 6),
    "angle 1e-11": (((1e-11,), 0, 6), 2),
    "angles 1 to 1e-10": (((1.0, 1e-2, 1e-4, 1e-6, 1e-8, 1e-10), 1, 2), 13),
    "near half turn": (((np.pi - 1e-9, 1e-9), 2, 1), 6),
}


@pytest.mark.parametrize("rotate", (True, False), ids=["any basis", "standard basis"])
@pytest.mark.parametrize("name", HARD)
def test_the_count_is_the_rank_and_the_product_is_the_matrix(name, rotate):
    (angles, minus, plus), rank = HARD[name]
    for seed in range(5):
        assert_minimal(orthogonal(seed, angles, minus, plus, rotate=rotate), rank)


@pytest.mark.parametrize("cycles", ((1, 1, 1), (2, 1, 1), (2, 2), (3, 1), (5,), (4, 3, 2), (17, 1)))
def test_a_permutation_takes_its_length_less_its_cycles(cycles):
    order, begin = [], 0
    for length in cycles:
        order += [begin + (i + 1) % length for i in range(length)]
        begin += length
    shuffle = np.random.default_rng(0).permutation(begin)
    g = np.eye(begin)[order][shuffle][:, shuffle]
    assert_minimal(g, begin - len(cycles))


@settings(deadline=None, max_examples=60, derandomize=True)
@given(data=st.data(), d=st.integers(1, 9), seed=st.integers(0, 2**31))
def test_products_of_any_reflections_take_no_more_than_were_multiplied(data, d, seed):
    """In general position exactly as many; the parity is that of the factors in any case."""
    r = data.draw(st.integers(1, d))
    k = np.random.default_rng(seed).standard_normal((r, d))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    assert_minimal(transition(k, 2.0), r)
    again = transition(np.concatenate([k, k[:1]]), 2.0)
    count = int(reflections(again).num_householder)
    assert count < r + 1
    assert (count - r - 1) % 2 == 0


@pytest.mark.parametrize("kind", ("random", "random, det -1", "tiny", "every size"))
@pytest.mark.parametrize("d", (64, 512))
def test_large_matrices(d, kind):
    """The residual stays below 4 d eps, here at up to d = 512 and ranks of 511 and 512."""
    rng = np.random.default_rng(d)
    if kind.startswith("random"):
        g = np.linalg.qr(rng.standard_normal((d, d)))[0]
        g[0] *= np.linalg.det(g) * (-1 if kind.endswith("-1") else 1)
        assert_minimal(g, d - 1 if kind.endswith("-1") else d)
    else:
        angles = np.full(d // 2, 1e-8) if kind == "tiny" else 10.0 ** rng.uniform(-9, 0.4, d // 2)
        assert_minimal(orthogonal(0, angles), d)


def test_a_batch_is_its_members():
    """Members of different ranks: those done wait."""
    cases = [((), 0, 7), ((1.0,), 1, 4), ((0.2, 1e-6, 2.0), 1, 0), ((), 7, 0)]
    g = np.stack([orthogonal(i, *case) for i, case in enumerate(cases)]).reshape(2, 2, 7, 7)
    found = reflections(g)
    np.testing.assert_array_equal(found.num_householder, [[0, 3], [7, 7]])
    for i in np.ndindex(2, 2):
        one = reflections(g[i])
        np.testing.assert_allclose(found.k[i], one.k, atol=1e-12)
        assert found.residual[i] < 28 * EPS


def test_float32_matrices_are_taken_in_float32(dtype):
    g = jnp.asarray(orthogonal(0, (0.3, 1.0), 1, 12), dtype)
    found = jax.jit(reflections)(g)
    assert found.k.dtype == dtype
    assert found.num_householder == 5
    assert np.linalg.norm(transition(found.k, found.beta) - g) < 4 * 17 * np.finfo(dtype).eps


def test_what_is_below_the_tolerance_is_the_identity():
    g = orthogonal(0, (1.0, 1e-5), 0, 2)
    assert reflections(g).num_householder == 4
    assert reflections(g, tolerance=1e-4).num_householder == 2


BAD = {
    "not square": (lambda: np.ones((3, 4)), r"g has shape \(3, 4\); expected square matrices"),
    "a vector": (lambda: np.ones(3), r"g has shape \(3,\)"),
    "not orthogonal": (lambda: 2 * np.eye(4), r"\|\|g\^T g - I\|\|_F is 6; expected an orthogonal matrix, at most"),
    "nearly orthogonal": (lambda: orthogonal(0, (1.0,), 0, 2) + 1e-9, r"expected an orthogonal matrix, at most 8\.88e-15"),
    "singular": (lambda: transition(np.eye(4)[:1], 1.0), r"\|\|g\^T g - I\|\|_F is 1; "),
    "NaN": (lambda: np.full((2, 2), np.nan), "4 of 4 entries of g are not finite"),
}


@pytest.mark.parametrize("name", BAD)
def test_mistakes_are_refused_with_their_numbers(name):
    make, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        reflections(make())
