"""Products over windows against K x K products in numpy f64, one factor after the other, and pair after pair."""

from itertools import combinations, pairwise

import numpy as np
import pytest

from jaxdelta.analysis.transitions.windows import (
    ACTIVE,
    ANGLE_EDGES,
    FORGOTTEN,
    SUBSPACES,
    Mixing,
    Window,
    WindowStream,
    check_windows,
    frozen_tolerances,
    product,
    read,
)
from ports.compare import relative_error
from tests.helpers import KEYS, unit_keys

LAYERS, H, K, N_H, T = 2, 3, 5, 2, 41
WINDOWS = (1, 2, 4, 8, 32, 64)  # dense from 4 tokens on: 8 factors; 64 do not fit
TOLERANCE = dict(rtol=1e-9, atol=1e-11)


def dense(keys: np.ndarray, beta: np.ndarray) -> np.ndarray:
    """The product of the factors of one head, the first rightmost."""
    P = np.eye(keys.shape[-1])
    for k, b in zip(keys, beta, strict=True):
        P = P - b * np.outer(k, k @ P)
    return P


def whole(window: Window, key_dim: int) -> np.ndarray:
    """P as a K x K matrix."""
    if window.basis is None:
        return np.eye(key_dim) - window.deviation
    return np.eye(key_dim) - window.basis @ window.deviation @ np.swapaxes(window.basis, -1, -2)


def factors(M: int, kind: str = "random", K: int = 7, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Keys [2, 3, M, K], a little shorter than one as eps leaves them, and strengths over [0, 2] with its ends and 1."""
    rng = np.random.default_rng(seed)
    keys = np.moveaxis(unit_keys(rng, (2, M, 3, K), kind), 1, 2) * (1 - 3e-7)
    beta = np.where(rng.random((2, 3, M)) < 0.3, rng.choice([0.0, 1.0, 2.0], (2, 3, M)), 2 * rng.random((2, 3, M)))
    return keys, beta


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("M", [1, 2, 3, 6, 7, 8, 40])
def test_a_product_is_that_of_its_factors_in_order(M, kind):
    """Measured: 4e-15 with 40 factors, else below 1e-15."""
    keys, beta = factors(M, kind)
    expected = np.array([[dense(k, b) for k, b in zip(*of, strict=True)] for of in zip(keys, beta, strict=True)])
    window = product(keys, beta)
    assert window.deviation.shape[-1] == min(M, 7)
    assert relative_error(whole(window, 7), expected) < 1e-12


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("M", [1, 3, 6, 7, 20])
def test_spectra_are_those_of_the_whole_matrices(M, kind):
    keys, beta = factors(M, kind)
    window = product(keys, beta)
    found, P = read(window), whole(window, 7)
    np.testing.assert_allclose(found.kept, np.linalg.svd(P, compute_uv=False), atol=1e-12)
    np.testing.assert_allclose(found.changed, np.linalg.svd(P - np.eye(7), compute_uv=False), atol=1e-12)
    assert (np.diff(found.kept) <= 0).all()
    assert (found.changed[..., min(M, 7) :] == 0).all()


@pytest.mark.parametrize("M", [6, 20])
def test_subspaces_are_of_the_directions_of_an_arriving_state(M):
    """Right singular vectors: P shortens a forgotten direction to less than half, and changes an active one by a tenth."""
    keys, beta = factors(M, "cosine 0.9")
    window = product(keys, 0.3 * beta)
    P, found = whole(window, 7), read(window)
    for name, basis in zip(SUBSPACES, found.bases, strict=True):
        matrix = P if name == "forgotten" else P - np.eye(7)
        _, sigma, Wt = np.linalg.svd(matrix)
        inside = sigma < FORGOTTEN if name == "forgotten" else sigma > ACTIVE
        expected = np.swapaxes(Wt, -1, -2) @ (inside[..., None] * Wt)
        np.testing.assert_allclose(basis @ np.swapaxes(basis, -1, -2), expected, atol=1e-10)
        assert 0 < inside.sum() < inside.size


def test_expanding_factors_come_first_in_the_spectrum():
    """A strength beyond 2 stretches its key; what no factor reaches stays at one, behind it."""
    found = read(product(np.eye(4)[None, :2], np.array([[2.5, 0.25]])))
    np.testing.assert_allclose(found.kept, [[1.5, 1, 1, 0.75]], atol=1e-15)


# Streams


def text(seed: int = 0, length: int = T) -> list[tuple[np.ndarray, ...]]:
    """Keys, strengths and log-decays of each layer; in a tenth of the tokens nothing is written."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(LAYERS):
        k = unit_keys(rng, (1, length * N_H, H, K), "cosine 0.5")[0]
        beta = 2 * rng.random((length * N_H, H)) * np.repeat(rng.random((length, H)) > 0.1, N_H, axis=0)
        found.append((k, beta, -rng.random((length, H))))
    return found


def streamed(layers, segment: int, windows=WINDOWS) -> dict[int, dict[str, np.ndarray]]:
    """Of each length the means, and the count of windows, over layers."""
    of_layers = []
    for k, beta, g in layers:
        stream = WindowStream(windows, heads=H, key_dim=K, num_householder=N_H, tolerances=frozen_tolerances(K))
        for begin in range(0, len(g), segment):
            at = slice(begin * N_H, (begin + segment) * N_H)
            stream.add(k[at], beta[at], g[begin : begin + segment])
        of_layers.append({w: {"count": np.array(s.count)} | s.means() for w, s in stream.finish().items()})
    return {w: {name: np.stack([m[w][name] for m in of_layers]) for name in of_layers[0][w]} for w in windows}


def products(layers, length: int) -> np.ndarray:
    """[layers, heads, windows, K, K] of whole windows."""
    n = length * N_H
    count = len(layers[0][2]) // length
    return np.array(
        [
            [[dense(k[i * n : (i + 1) * n, h], beta[i * n : (i + 1) * n, h]) for i in range(count)] for h in range(H)]
            for k, beta, _ in layers
        ]
    )


def spaces(P: np.ndarray, kind: str) -> np.ndarray:
    """An orthonormal basis, in columns, of a product's subspace."""
    _, sigma, Wt = np.linalg.svd(P if kind == "forgotten" else P - np.eye(K))
    return Wt[sigma < FORGOTTEN if kind == "forgotten" else sigma > ACTIVE].T


def overlap(a: np.ndarray, b: np.ndarray) -> float:
    return np.sum((a.T @ b) ** 2) / np.sqrt(a.shape[1] * b.shape[1])


@pytest.mark.parametrize("length", WINDOWS[:-1])
def test_sums_over_windows_are_means_over_whole_products(length):
    layers = text()
    P, means = products(layers, length), streamed(layers, T)[length]
    kept = np.linalg.svd(P, compute_uv=False)
    changed = np.linalg.svd(P - np.eye(K), compute_uv=False)
    assert means["count"].tolist() == [T // length] * LAYERS
    np.testing.assert_allclose(means["kept"], kept.mean(axis=2), **TOLERANCE)
    np.testing.assert_allclose(means["changed"], changed.mean(axis=2), **TOLERANCE)
    np.testing.assert_allclose(means["kept_smallest"], kept.min(axis=(2, 3)), **TOLERANCE)
    np.testing.assert_allclose(means["kept_largest"], kept.max(axis=(2, 3)), **TOLERANCE)
    np.testing.assert_allclose(means["forgotten"], (kept < FORGOTTEN).sum(axis=-1).mean(axis=2), **TOLERANCE)
    for i, tolerance in enumerate(frozen_tolerances(K)):
        expected = (changed <= tolerance).sum(axis=-1)
        assert (expected >= K - N_H * length).all()
        np.testing.assert_allclose(means["frozen"][..., i], expected.mean(axis=2), **TOLERANCE)
    decays = [g[: T // length * length].reshape(-1, length, H).sum(axis=1).mean(axis=0) for *_, g in layers]
    np.testing.assert_allclose(means["log_decay"], decays, **TOLERANCE)


@pytest.mark.parametrize("length", WINDOWS[:-1])
def test_mixing_is_that_of_every_pair(length):
    """Successive pairs with their principal angles, and all others; a window without such a direction is in no pair."""
    layers = text()
    P, means = products(layers, length), streamed(layers, 7)[length]
    for layer, head, kind in np.ndindex(LAYERS, H, len(SUBSPACES)):
        bases = [spaces(p, SUBSPACES[kind]) for p in P[layer, head]]
        pairs = [(a, b) for a, b in pairwise(bases) if a.size and b.size]
        there = [i for i, b in enumerate(bases) if b.size]
        apart = [(bases[i], bases[j]) for i, j in combinations(there, 2) if j > i + 1]
        at = layer, head, kind
        assert (means["pairs"][at], means["pairs_apart"][at]) == (len(pairs), len(apart))
        for name, expected in (
            ("overlap", [overlap(*pair) for pair in pairs]),
            ("chance", [np.sqrt(a.shape[1] * b.shape[1]) / K for a, b in pairs]),
            ("apart", [overlap(*pair) for pair in apart]),
        ):
            np.testing.assert_allclose(means[name][at], np.mean(expected) if expected else np.nan, **TOLERANCE)
        angles = [np.degrees(np.arccos(np.minimum(np.linalg.svd(a.T @ b)[1], 1))) for a, b in pairs]
        expected = np.histogram(np.concatenate([*angles, []]), ANGLE_EDGES)[0]
        assert np.abs(means["angles"][at] - expected).sum() == 0
    if length == 1:
        assert 0 < means["pairs"].min() < T - 1


@pytest.mark.parametrize("segment", [1, 3, 8, 16, 40])
def test_any_split_of_a_text_gives_the_same(segment):
    layers = text()
    expected, found = streamed(layers, T), streamed(layers, segment)
    for length in WINDOWS:
        for name, x in expected[length].items():
            np.testing.assert_allclose(found[length][name], x, rtol=1e-9, atol=1e-11, err_msg=name)


def test_a_text_too_short_for_a_window_counts_none_of_it():
    means = streamed(text(), 16)[64]
    assert means["count"].tolist() == [0, 0]
    assert np.isnan(means["kept"]).all()
    assert np.isnan(means["kept_smallest"]).all()
    assert np.isnan(means["overlap"]).all()
    assert np.isnan(means["apart"]).all()
    assert not means["pairs"].any()


def test_windows_that_all_have_fewer_factors_than_dimensions_are_never_multiplied():
    layers = text()
    for length, means in streamed(layers, T, (1, 2)).items():
        np.testing.assert_allclose(
            means["kept"], np.linalg.svd(products(layers, length), compute_uv=False).mean(axis=2), **TOLERANCE
        )


def test_generic_windows_freeze_exactly_what_their_factors_leave():
    """dim ker(P - I) = K - n_h tokens, to K eps(f32), while keys are in general position and every factor is on."""
    rng = np.random.default_rng(3)
    stream = WindowStream((1, 2, 4), heads=2, key_dim=11, num_householder=2, tolerances=frozen_tolerances(11))
    stream.add(unit_keys(rng, (1, 32, 2, 11))[0], 0.2 + 1.6 * rng.random((32, 2)), np.zeros((16, 2)))
    for length, sums in stream.finish().items():
        assert (sums.means()["frozen"][..., 0] == 11 - 2 * length).all()


def test_subspaces_that_never_change_overlap_whole_and_random_ones_by_chance():
    same, random = Mixing(1, 8), Mixing(1, 8)
    rng = np.random.default_rng(0)
    for _ in range(3):
        bases = np.linalg.qr(rng.standard_normal((400, 1, 8, 2)))[0]
        same.add(np.broadcast_to(np.eye(8)[:, :2], (400, 1, 8, 2)))
        random.add(bases)
    found = same.means()
    assert found["overlap"] == pytest.approx([1])
    assert found["apart"] == pytest.approx([1])
    assert found["angles"][0].tolist() == [2 * 1199, *[0] * 17]
    found = random.means()
    assert found["chance"] == pytest.approx([0.25])
    assert found["overlap"] == pytest.approx([0.25], abs=0.02)
    assert found["apart"] == pytest.approx([0.25], abs=0.005)


@pytest.mark.parametrize("windows", [(), (0, 1), (1, 1), (4, 1), (1, 4, 6), (-1, 1)])
def test_windows_that_do_not_fill_one_another_are_refused(windows):
    with pytest.raises(ValueError, match="each a multiple of the one before"):
        check_windows(windows)
