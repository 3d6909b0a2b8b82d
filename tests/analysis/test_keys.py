"""Horizons, keys, strengths and recall against a plain loop in f64 over what hooks keep; closed forms; streaming."""

import numpy as np
import pytest
import xarray as xr
from flax import nnx

import jaxdelta as jd
from jaxdelta.analysis import keys as module
from jaxdelta.analysis.keys import BETA_EDGES, against_horizon, at_horizon, by_horizon, forgetting_share, keys, over_heads
from tests.helpers import randomised
from tests.tiny import fresh_model

SEGMENT = 8
LENGTHS = (40, 21)
PRODUCT = jd.DeltaLMConfig.tiny(
    num_householder=2, num_key_heads=2, num_value_heads=4, negative_eigenvalues=True, layer_kinds=("linear",), attention=()
)


def texts():
    rng = np.random.default_rng(0)
    return {f"of {n}": rng.integers(0, 90, n) for n in LENGTHS}


@pytest.fixture(scope="module")
def models():
    return {
        "qwen": fresh_model(layer_kinds=("linear", "attention", "linear")),
        "product": randomised(jd.DeltaLM(PRODUCT, rngs=nnx.Rngs(1)), 2),
    }


@pytest.fixture(scope="module")
def found(models):
    return {name: keys(model, texts(), segment=SEGMENT) for name, model in models.items()}


def effective_rank(moment):
    p = np.maximum(np.linalg.eigvalsh(moment), 0)
    p = p[p > 0] / p.sum()
    return np.exp(-np.sum(p * np.log(p)))


@pytest.fixture(scope="module", params=["qwen", "product"])
def case(request, models, found):
    """A dataset, and k [T, n, H, K], v, beta [T, n, H] and g [T, H] of every document and linear layer, in f64."""
    model, name = models[request.param], request.param
    n, arrays = model.config.num_householder, {}
    for document, ids in texts().items():
        _, cache = jd.run_with_cache(model, ids, lambda name: "linear_attn" in name, segment=SEGMENT)
        for layer in model.config.linear_layers:
            at = f"blocks.{layer}.linear_attn.hook_"
            k, v, beta, g = (cache[at + x][0].astype(np.float64) for x in ("k_normed", "v", "beta", "log_decay"))
            arrays[document, layer] = [x.reshape(len(ids), n, *x.shape[1:]) for x in (k, v, beta)] + [g]
    return found[name], arrays


def test_horizons_and_mean_keys_are_those_of_all_tokens(case):
    data, arrays = case
    for (document, layer), (k, _, beta, g) in arrays.items():
        here = data.sel(document=document, layer=layer)
        np.testing.assert_allclose(here["alpha"], np.exp(g).mean(axis=0), rtol=1e-5)
        np.testing.assert_allclose(here["geometric_alpha"], np.exp(g.mean(axis=0)), rtol=1e-5)
        np.testing.assert_allclose(here["horizon"], 1 / (1 - np.exp(g.mean(axis=0))), rtol=1e-4)
        unit = k / np.linalg.norm(k, axis=-1, keepdims=True)
        np.testing.assert_allclose(here["mean_key"], np.linalg.norm(unit.mean(axis=(0, 1)), axis=-1), rtol=1e-5)
        np.testing.assert_allclose(here["beta"], beta.mean(axis=(0, 1)), rtol=1e-5)
        counts = here["beta_count"].values
        assert (counts.sum(axis=-1) == beta[:, :, 0].size).all()
        expected = np.stack([np.histogram(beta[..., h], BETA_EDGES)[0] for h in range(beta.shape[-1])])
        assert np.abs(counts - expected).sum() <= 2  # a strength at an edge, rounded


def test_ranks_of_keys_are_means_over_windows(case):
    data, arrays = case
    for (document, layer), (k, *_) in arrays.items():
        T = len(k)
        for window in data["window"].values:
            if window <= SEGMENT:  # the last of each segment that has so many tokens
                ends = [e for e in [*range(SEGMENT, T + 1, SEGMENT), T] if e - (e - 1) // SEGMENT * SEGMENT >= window]
                spans = [(e - window, e) for e in dict.fromkeys(ends)]
            else:
                spans = [(b, b + window) for b in range(0, T - window + 1, window)]
            for head in range(k.shape[2]):
                value = data["key_rank"].sel(document=document, layer=layer, window=window).values[head]
                if not spans:
                    assert np.isnan(value)
                    continue
                moments = [np.einsum("tnk,tnm->km", k[b:e, :, head], k[b:e, :, head]) for b, e in spans]
                assert value == pytest.approx(np.mean([effective_rank(m) for m in moments]), rel=1e-3)


def test_the_decayed_covariance_is_that_of_its_recurrence(case):
    data, arrays = case
    for (document, layer), (k, _, _, g) in arrays.items():
        P = np.zeros((k.shape[2], k.shape[3], k.shape[3]))
        for t in range(len(k)):
            P = np.exp(g[t])[:, None, None] * P + np.einsum("nhk,nhm->hkm", k[t], k[t])
        found = data["decayed_key_rank"].sel(document=document, layer=layer)
        np.testing.assert_allclose(found, [effective_rank(p) for p in P], rtol=1e-3)


def test_recall_errors_are_those_of_the_recurrence(case):
    """Medians over writes, within a bin of the histogram."""
    data, arrays = case
    for (document, layer), (k, v, beta, g) in arrays.items():
        S = np.zeros((k.shape[2], k.shape[3], v.shape[3]))
        errors = {"before": [], "after": []}
        for t, j in np.ndindex(k.shape[:2]):
            S = np.exp(g[t])[:, None, None] * S if j == 0 else S
            size, key = np.linalg.norm(v[t, j], axis=-1), k[t, j]
            error = v[t, j] - np.einsum("hkv,hk->hv", S, key)
            errors["before"].append(np.linalg.norm(error, axis=-1) / size)
            S = S + np.einsum("hk,hv->hkv", beta[t, j][:, None] * key, error)
            errors["after"].append(np.linalg.norm(v[t, j] - np.einsum("hkv,hk->hv", S, key), axis=-1) / size)
        for name, x in errors.items():
            found = data[f"error_{name}"].sel(document=document, layer=layer, quantile=0.5).values
            for head, of_head in enumerate(np.array(x).T):
                low, high = np.quantile(of_head, (0.45, 0.55))
                assert low * 0.85 < found[head] < high * 1.18  # a bin is a factor of 1.122


def test_ranks_of_states_are_those_of_the_spectrum(models, found):
    expected = jd.spectrum(models["qwen"], texts(), segment=SEGMENT, at="end").sel(at="end")
    for name in module.RANKS:
        np.testing.assert_allclose(found["qwen"][name], expected[name], rtol=1e-4)


def test_segments_change_nothing_but_the_windows(models, found):
    other = keys(models["qwen"], texts(), segment=2 * SEGMENT)
    for name in ("alpha", "horizon", "mean_key", "decayed_key_rank", "beta"):
        np.testing.assert_allclose(other[name], found["qwen"][name], rtol=1e-3)


def test_what_is_kept_does_not_grow_with_the_document(models):
    """Windows waiting to be joined: one for each power of two."""
    windows = module._Windows()
    for _ in range(1000):
        windows.add(np.eye(3)[None, None])
    assert len(windows.waiting) == 10
    assert windows.counts[1:] == [1000 >> i for i in range(1, 10)]


# Over heads


def made_up(horizon, rank, **rest):
    """One document, one layer."""
    axes = ("document", "layer", "head")
    names = dict.fromkeys((*module.RANKS, "key_rank_at_horizon", "decayed_key_rank", "mean_key"), rank)
    names |= {"horizon": horizon, "frobenius_norm": np.ones(len(horizon))} | rest
    values = {name: (axes, np.asarray(x, float)[None, None]) for name, x in names.items()}
    return xr.Dataset(values, attrs={"segment": 256, "key_dim": 32, "num_householder": 1})


def test_a_rank_that_rises_with_the_horizon_correlates_fully():
    rows = against_horizon(made_up(np.arange(2, 30), np.arange(28) ** 0.5))
    full = next(row for row in rows if row["measure"] == "effective_rank")
    np.testing.assert_allclose([full["spearman"], full["low"], full["high"]], 1)
    noise = np.random.default_rng(0).random(28)
    row = against_horizon(made_up(np.arange(2, 30), noise))[0]
    assert row["low"] < row["spearman"] < row["high"]
    assert row["low"] < 0 < row["high"]


def test_heads_are_grouped_by_horizon_and_empty_ones_left_out():
    data = made_up([2, 9, 10, 99, 5000, 50], [1, 3, 5, 7, 40, 99], frobenius_norm=[1, 1, 1, 1, 1, 0])
    groups = by_horizon(data)
    assert [(g["from"], g["heads"], g["effective_rank"], g["largest_effective_rank"]) for g in groups] == [
        (0, 2, 2, 3),
        (10, 2, 6, 7),
        (1000, 1, 40, 40),
    ]
    assert forgetting_share(data) == pytest.approx(4 / 5)
    assert len(over_heads(data)["horizon"]) == 5


def test_between_powers_of_two_ranks_are_linear_in_the_logarithm():
    found = at_horizon(np.array([[1.0, 2.0, 4.0, np.nan]] * 4), [1, 2, 4, 8], np.array([1.0, 2**1.5, 4.0, 1000.0]))
    np.testing.assert_allclose(found, [1, 3, 4, 4])


@pytest.mark.parametrize("segment", (0, 12, -8))
def test_a_segment_that_is_no_power_of_two_is_refused(models, segment):
    with pytest.raises(ValueError, match=f"segment is {segment}; expected a power of two"):
        keys(models["qwen"], texts(), segment=segment)


def test_a_folder_is_continued(models, found, tmp_path):
    first, second = list(texts().items())
    keys(models["qwen"], dict([first]), segment=SEGMENT, out=tmp_path)
    again = keys(models["qwen"], dict([first, second]), segment=SEGMENT, out=tmp_path)
    xr.testing.assert_identical(again, found["qwen"])
    stored = xr.open_zarr(tmp_path / "keys.zarr", consolidated=False).load()
    assert stored["horizon"].attrs == {"long_name": "1 / (1 - geometric mean of the decay)", "units": "tokens"}
