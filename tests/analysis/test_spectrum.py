"""Spectra of carried states: closed forms, states by hand, places, empty states, agreement of halves, folders."""

import numpy as np
import pytest
import xarray as xr

import jaxdelta as jd
from jaxdelta.analysis.spectrum import MEASURES, Sizes, empty_states, measures, over_documents, spectrum, split_half
from jaxdelta.results.folder import ResultsError
from tests.helpers import randomised
from tests.tiny import fresh_model, tokens

SEGMENT = 8
LENGTHS = (41, 20, 8, 5)


@pytest.fixture(scope="module")
def model():
    return fresh_model(layer_kinds=("linear", "attention", "linear"))


@pytest.fixture(scope="module")
def found(model):
    return spectrum(model, tokens(*LENGTHS), segment=SEGMENT)


# Measures of a spectrum


def of(sigma, size=128):
    sigma = np.asarray(sigma, float)[None, None, None]
    sizes = Sizes(np.array([[size]]), np.array([[size * 2.0**-23]]))
    return {name: x.item() for name, x in measures(sigma, sizes).items()}


def test_a_flat_spectrum_has_every_rank_full():
    found = of(np.full(128, 3.0))
    ranks = {name: x for name, x in found.items() if name.endswith("rank") or name == "energy_rank_100"}
    np.testing.assert_allclose(list(ranks.values()), 128)
    assert found["rank_utilisation"] == pytest.approx(1)
    assert found["nuclear_norm"] == pytest.approx(384)
    assert found["frobenius_norm"] == pytest.approx(3 * 128**0.5)
    assert [found[f"energy_rank_{p}"] for p in ("90", "99", "99.9")] == [116, 127, 128]


def test_one_outer_product_has_every_rank_one():
    found = of([2.0, *np.zeros(127)])
    assert {x for name, x in found.items() if "rank" in name and name != "rank_utilisation"} == {1.0}
    assert found["rank_utilisation"] == pytest.approx(1 / 128)


def test_a_geometric_spectrum_tells_the_definitions_apart():
    """sigma_i = 0.9^i."""
    found = of(0.9 ** np.arange(128))
    assert found["effective_rank"] == pytest.approx(25.8, abs=0.05)
    assert found["energy_effective_rank"] == pytest.approx(12.9, abs=0.05)
    assert found["stable_rank"] == pytest.approx(1 / (1 - 0.81), rel=1e-6)
    assert found["threshold_rank"] == 1 + int(np.log(1e-4) / np.log(0.9))
    assert found["numerical_rank"] == 1 + int(np.log(128 * 2.0**-23) / np.log(0.9))
    assert found["energy_rank_90"] == np.ceil(np.log(0.1) / np.log(0.81))


@pytest.mark.parametrize("scale", (1e-20, 1e20))
def test_ranks_do_not_depend_on_the_scale(scale):
    sigma = 0.7 ** np.arange(32)
    found, expected = of(scale * sigma), of(sigma)
    for name in MEASURES:
        factor = scale if name.endswith("norm") else 1
        assert found[name] == pytest.approx(factor * expected[name], rel=1e-9), name


# Of a model


def test_singular_values_are_those_of_the_states_at_each_place(model, found):
    """Against numpy's SVD in f64 of the states that ``forward`` carries."""
    for document, ids in zip(found["document"].values, tokens(*LENGTHS), strict=True):
        for at in found["at"].values:
            here = found.sel(document=document, at=at)
            seen = here["tokens"].item()
            if np.isnan(seen):
                assert here[[*MEASURES, "sigma"]].to_array().isnull().all()
                continue
            seen = int(seen)
            assert seen == (len(ids) if at == "end" else int(at))
            _, carry = jd.forward(model, ids[None, :seen], jd.init_carry(model, max_length=48))
            for layer, S in zip(found["layer"].values, jd.states(carry), strict=True):
                expected = np.linalg.svd(np.asarray(S[0], np.float64), compute_uv=False)
                error = np.abs(here["sigma"].sel(layer=layer).values - expected)
                assert (error < 2e-5 * expected[:, :1]).all()  # splits of a text agree to 1e-5
                nuclear = here["nuclear_norm"].sel(layer=layer).values
                np.testing.assert_allclose(nuclear, expected.sum(-1), rtol=2e-5)


def test_places_are_powers_of_two_of_segments_and_the_end(found):
    assert found["at"].values.tolist() == ["8", "16", "32", "end"]
    reached = found["tokens"].notnull().values.tolist()
    assert reached == [[True] * 4, [True, True, False, True], [True, False, False, True], [False, False, False, True]]


@pytest.mark.parametrize(
    ("at", "expected"), [(["end"], ["end"]), ([24, 8, "end", 8], ["8", "24", "end"]), (40, ["40"]), ("end", ["end"])]
)
def test_places_may_be_chosen(model, found, at, expected):
    chosen = spectrum(model, tokens(*LENGTHS), segment=SEGMENT, at=at)
    assert chosen["at"].values.tolist() == expected
    if "end" in expected:
        xr.testing.assert_equal(chosen.sel(at="end"), found.sel(at="end"))


@pytest.mark.parametrize(
    ("at", "error", "said"),
    [
        ([12], ValueError, "at holds 12; expected whole segments of 8 tokens, or 'end'"),
        ([0], ValueError, "at holds 0"),
        ([-8], ValueError, "at holds -8"),
        ([48], ValueError, r"at is \[48\], and the longest document has 41 tokens"),
        ([], ValueError, r"at is \[\]"),
        (["middle"], TypeError, "at"),
        ([8.5], TypeError, "at"),
    ],
)
def test_a_place_that_is_no_boundary_is_refused(model, at, error, said):
    with pytest.raises(error, match=said):
        spectrum(model, tokens(*LENGTHS), segment=SEGMENT, at=at)


def test_a_model_without_a_linear_layer_is_refused():
    with pytest.raises(ValueError, match="has no linear layer, and no state"):
        spectrum(fresh_model(layer_kinds=("attention",)), tokens(9), segment=4)


def test_heads_and_directions_that_a_layer_lacks_are_nan():
    """Of the layers' shapes; the rest of the library is tried on such a model in tests/runs."""
    config = jd.DeltaLMConfig.tiny("gated_deltanet", layer_kinds=("linear",), attention=())
    found = spectrum(randomised(jd.DeltaLM(config), 1), tokens(9), segment=4)
    assert found["sigma"].notnull().all()
    assert found.sizes["direction"] == min(config.key_dim, config.value_dim)


# Empty states


@pytest.fixture(scope="module")
def with_an_empty_head(model):
    """Head 2 of layer 0 has no values: its state stays zero."""
    made = fresh_model(layer_kinds=("linear", "attention", "linear"))
    sizes = made.config.linear_sizes[0]
    begin = 2 * sizes.num_key_heads * sizes.key_dim + 2 * sizes.value_dim
    conv = made.layers[0].mixer.conv
    conv[...] = conv[...].at[begin : begin + sizes.value_dim].set(0)
    return spectrum(made, tokens(*LENGTHS[:2]), segment=SEGMENT)


def test_an_empty_state_is_named_and_left_out_of_medians(with_an_empty_head):
    found = empty_states(with_an_empty_head)
    assert {(layer, head) for _, _, layer, head in found} == {(0, 2)}
    assert len(found) == with_an_empty_head["tokens"].notnull().sum()
    over = over_documents(with_an_empty_head)["effective_rank"].sel(at="end")
    assert over.sel(layer=0, head=2).isnull().all()
    assert over.sel(layer=0, head=1).notnull().all()


def test_every_rank_of_an_empty_state_is_zero(with_an_empty_head):
    here = with_an_empty_head.sel(at="end", layer=0, head=2)
    assert (here[list(MEASURES)].to_array() == 0).all()


# Over documents


def test_median_and_range_are_those_over_documents(found):
    over = over_documents(found)
    values = found["effective_rank"].sel(at="end")
    for statistic, of_values in (("median", np.median), ("min", np.min), ("max", np.max)):
        here = over["effective_rank"].sel(at="end", statistic=statistic)
        np.testing.assert_allclose(here, of_values(values.values, axis=0))


def test_halves_agree_where_heads_keep_their_order(found):
    """Heads of fixed values agree fully; heads in the opposite order in every second document disagree fully."""
    same = found.copy(deep=True)
    order = np.arange(found["effective_rank"][0, 0].size, dtype=float).reshape(found["effective_rank"][0, 0].shape) + 1
    same["effective_rank"][:] = order
    assert split_half(same)["effective_rank"].sel(at="end") == pytest.approx(1)
    same["effective_rank"][1::2] = -order
    assert split_half(same)["effective_rank"].sel(at="end") == pytest.approx(-1)


def test_one_document_has_no_halves(found):
    assert split_half(found.isel(document=[0])).to_array().isnull().all()


# Folders


def test_a_folder_is_continued_and_takes_further_documents(model, found, tmp_path):
    first = spectrum(model, tokens(*LENGTHS)[:2], segment=SEGMENT, out=tmp_path / "a")
    again = spectrum(model, tokens(*LENGTHS), segment=SEGMENT, out=tmp_path / "a")
    xr.testing.assert_identical(again, found)
    xr.testing.assert_identical(first.sel(at="end"), found.isel(document=[0, 1]).sel(at="end"))
    stored = xr.open_zarr(tmp_path / "a" / "spectrum.zarr", consolidated=False).load()
    xr.testing.assert_equal(stored, found)
    assert stored["effective_rank"].attrs["units"] == "directions"
    with pytest.raises(ResultsError, match="at is"):
        spectrum(model, tokens(*LENGTHS), segment=SEGMENT, at=["end"], out=tmp_path / "a")
