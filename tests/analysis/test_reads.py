"""What segments read of their states: exact sums over directions, against hooks; Gramians, shares, bad input."""

import numpy as np
import pytest
import xarray as xr
from flax import nnx

import jaxdelta as jd
from jaxdelta.analysis.reads import of_boundary
from ports.compare import relative_error
from tests.helpers import randomised
from tests.tiny import fresh_model

SEGMENT = 8
PRODUCT = jd.DeltaLMConfig.tiny(
    num_householder=2, num_key_heads=2, num_value_heads=4, layer_kinds=("linear",), attention=()
)


def texts():
    rng = np.random.default_rng(0)
    return {f"of {n}": rng.integers(0, 90, n) for n in (29, 18)}


@pytest.fixture(scope="module", params=["qwen", "product"])
def model(request):
    if request.param == "qwen":
        return fresh_model(layer_kinds=("linear", "attention", "linear"))
    return randomised(jd.DeltaLM(PRODUCT, rngs=nnx.Rngs(1)), 2)


@pytest.fixture(scope="module")
def found(model):
    return jd.state_reads(model, texts(), segment=SEGMENT, gramians=True)


def test_directions_contribute_what_is_read_of_the_state(model, found):
    """Against the pulled-back queries and states that hooks keep, and the outputs of the rule."""
    for document, ids in texts().items():
        _, cache = jd.run_with_cache(model, ids, lambda name: "linear_attn" in name, segment=SEGMENT)
        for layer in model.config.linear_layers:
            qbar, S, o = (
                cache[f"blocks.{layer}.linear_attn.hook_{x}"][0].astype(np.float64)
                for x in ("qbar", "state_before", "recurrence_out")
            )
            for boundary in range(SEGMENT, len(ids), SEGMENT):
                here = found.sel(document=document, boundary=boundary, layer=layer)
                span, state = slice(boundary, boundary + SEGMENT), S[boundary // SEGMENT]
                U, sigma, Vt = np.linalg.svd(state, full_matrices=False)
                parts = np.einsum("thk,hki,hi,hiv->thiv", qbar[span], U, sigma, Vt)
                assert relative_error(parts.sum(2), np.einsum("thk,hkv->thv", qbar[span], state)) < 1e-10
                energy = np.sum(parts**2, axis=(0, 3))
                np.testing.assert_allclose(here["contribution"], energy, rtol=1e-3, atol=1e-4 * energy.max())
                share = np.sum(energy, axis=-1) / np.sum(o[span] ** 2, axis=(0, 2))
                np.testing.assert_allclose(here["carried"], share, rtol=1e-4)
                stacked = np.einsum("thk,hkv->htv", qbar[span], state)
                expected = np.linalg.svd(stacked, compute_uv=False)
                balanced, n = here["balanced"].values, min(expected.shape[-1], found.sizes["direction"])
                np.testing.assert_allclose(balanced[:, :n], expected[:, :n], atol=2e-3 * expected.max())
                assert relative_error(here["read_gramian"].values, np.einsum("thk,thm->hkm", qbar[span], qbar[span])) < 1e-5
                assert relative_error(here["stored_gramian"].values, state @ state.swapaxes(-1, -2)) < 1e-5


def test_boundaries_are_those_after_which_a_document_goes_on(found):
    assert found["boundary"].values.tolist() == [8, 16, 24]
    assert found["carried"].isel(layer=0, head=0).notnull().values.tolist() == [[True] * 3, [True, True, False]]


def test_a_direction_that_nobody_asks_for_contributes_nothing():
    """Queries along the second direction alone."""
    S, q = np.diag([3.0, 2.0, 1.0])[None, None], np.array([0.0, 4.0, 0.0])
    found = of_boundary(S, np.outer(q, q)[None, None], np.full((1, 1), 128.0))
    np.testing.assert_allclose(found["read"][0, 0], [0, 16, 0], atol=1e-12)
    np.testing.assert_allclose(found["contribution"][0, 0], [0, 64, 0], atol=1e-12)
    np.testing.assert_allclose(found["balanced"][0, 0], [8, 0, 0], atol=1e-7)
    assert found["carried"][0, 0] == pytest.approx(0.5)
    assert found["balanced_rank"][0, 0] == pytest.approx(1, abs=1e-6)
    assert found["read_rank"][0, 0] == pytest.approx(1, abs=1e-6)


def test_an_empty_state_contributes_nothing_and_silence_has_no_share():
    found = of_boundary(np.zeros((1, 1, 3, 2)), np.eye(3)[None, None], np.zeros((1, 1)))
    assert not found["contribution"].any()
    assert np.isnan([found[name] for name in ("carried", "stored_rank", "read_rank", "balanced_rank")]).all()


def test_parallel_queries_have_a_read_rank_of_one_in_spite_of_rounding():
    """O of 256 parallel queries, summed in f32."""
    q = np.random.default_rng(0).standard_normal(128).astype(np.float32)
    O = np.sum([np.outer(x * q, x * q) for x in np.linspace(0.5, 2, 256, dtype=np.float32)], axis=0, dtype=np.float32)
    found = of_boundary(np.eye(128)[None, None], O[None, None], np.ones((1, 1)))
    assert found["read_rank"].item() == pytest.approx(1, abs=1e-3)


def test_documents_without_a_boundary_are_left_out(model):
    found = jd.state_reads(model, texts() | {"short": np.arange(7)}, segment=SEGMENT)
    assert found["document"].values.tolist() == list(texts())
    with pytest.raises(ValueError, match="leave no boundary"):
        jd.state_reads(model, {"short": np.arange(7)}, segment=SEGMENT)
    with pytest.raises(ValueError, match="segment is 0"):
        jd.state_reads(model, texts(), segment=0)


def test_a_folder_is_continued(model, tmp_path):
    first, second = list(texts().items())
    expected = jd.state_reads(model, texts(), segment=SEGMENT)
    jd.state_reads(model, dict([first]), segment=SEGMENT, out=tmp_path)
    again = jd.state_reads(model, dict([first, second]), segment=SEGMENT, out=tmp_path)
    xr.testing.assert_identical(again, expected)
