"""Ranks over tokens against a loop in f64 over what hooks keep; packed texts, coarser traces, Householder steps."""

import numpy as np
import pytest
import xarray as xr
from flax import nnx

import jaxdelta as jd
from jaxdelta.ops.spectra import effective_rank, stable_rank
from tests.helpers import randomised
from tests.tiny import fresh_model

SEGMENT = 8
PRODUCT = jd.DeltaLMConfig.tiny(
    num_householder=3, num_key_heads=2, num_value_heads=4, negative_eigenvalues=True, layer_kinds=("linear",), attention=()
)


def texts():
    rng = np.random.default_rng(0)
    return {f"of {n}": rng.integers(0, 90, n) for n in (21, 9)}


@pytest.fixture(scope="module")
def models():
    return {
        "qwen": fresh_model(layer_kinds=("linear", "attention", "linear")),
        "product": randomised(jd.DeltaLM(PRODUCT, rngs=nnx.Rngs(1)), 2),
    }


@pytest.fixture(scope="module")
def traces(models):
    return {name: jd.rank_trace(model, texts(), segment=SEGMENT) for name, model in models.items()}


@pytest.mark.parametrize("name", ("qwen", "product"))
def test_ranks_are_those_of_the_states_before_each_write(models, traces, name):
    model, trace = models[name], traces[name]
    n = model.config.num_householder
    assert trace.sizes["step"] == n
    for document, ids in texts().items():
        _, cache = jd.run_with_cache(model, ids, lambda name: "linear_attn" in name, segment=SEGMENT)
        for layer in model.config.linear_layers:
            at = f"blocks.{layer}.linear_attn.hook_"
            k, v, beta, g = (cache[at + x][0].astype(np.float64) for x in ("k_normed", "v", "beta", "log_decay"))
            S, states = np.zeros((k.shape[1], k.shape[2], v.shape[2])), []
            for p in range(len(ids) * n):
                S = np.exp(g[p // n])[:, None, None] * S if p % n == 0 else S
                states.append(S)
                error = v[p] - np.einsum("hkv,hk->hv", S, k[p])
                S = S + np.einsum("hk,hv->hkv", beta[p][:, None] * k[p], error)
            here = trace.sel(document=document, layer=layer, token=slice(0, len(ids) - 1))
            for measure, rank in (("effective_rank", effective_rank), ("stable_rank", stable_rank)):
                expected = np.asarray(rank(np.stack(states))).reshape(len(ids), n, -1)
                np.testing.assert_allclose(here[measure], expected, rtol=2e-4)
    assert trace.sel(document="of 9", token=slice(9, None))["effective_rank"].isnull().all()


def test_a_coarser_trace_has_every_so_manieth_token(models, traces):
    found = jd.rank_trace(models["product"], texts(), segment=SEGMENT, every=4)
    assert found["token"].values.tolist() == [0, 4, 8, 12, 16, 20]
    expected = traces["product"].sel(token=found["token"])
    np.testing.assert_allclose(found["effective_rank"], expected["effective_rank"], rtol=1e-4)


def test_packed_documents_are_one_text_with_marked_starts(models):
    found = jd.rank_trace(models["qwen"], texts(), segment=SEGMENT, packed=True)
    joined = jd.rank_trace(models["qwen"], {"packed": np.concatenate(list(texts().values()))}, segment=SEGMENT)
    assert found["starts"].values.tolist() == [[0, 21]]
    xr.testing.assert_equal(found["effective_rank"], joined["effective_rank"])
    assert found["effective_rank"].sel(token=21, layer=2, head=0) > 0  # the state goes on


def test_the_first_state_is_empty_and_the_second_an_outer_product(traces):
    rank = traces["qwen"]["effective_rank"]
    np.testing.assert_array_equal(rank.sel(token=0), 0)
    np.testing.assert_allclose(rank.sel(token=1), 1, rtol=1e-4)


@pytest.mark.parametrize(("segment", "every"), [(8, 3), (8, 0), (8, 16), (0, 1)])
def test_a_segment_that_is_no_multiple_is_refused(models, segment, every):
    with pytest.raises(ValueError, match=f"segment is {segment} and every is {every}"):
        jd.rank_trace(models["qwen"], texts(), segment=segment, every=every)


def test_a_folder_is_continued_and_packed_texts_have_parts_of_their_own(models, traces, tmp_path):
    first, second = list(texts().items())
    jd.rank_trace(models["qwen"], dict([first]), segment=SEGMENT, out=tmp_path)
    again = jd.rank_trace(models["qwen"], dict([first, second]), segment=SEGMENT, out=tmp_path)
    xr.testing.assert_identical(again, traces["qwen"])
    packed = jd.rank_trace(models["qwen"], texts(), segment=SEGMENT, packed=True, out=tmp_path)
    assert packed.sizes["start"] == 2
