"""A trained model's ledger: the numbers of a token against K x K matrices, the run against the model itself, the rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr
from flax import nnx

import jaxdelta as jd
from jaxdelta.analysis.transitions import ledger as transitions
from jaxdelta.analysis.transitions.ledger import _rule_inputs, ledger_of, measures, whole_defects
from jaxdelta.analysis.transitions.rows import active_ranks, distributions, radii, rotates, transition_rows, window_rows
from jaxdelta.analysis.transitions.windows import product
from jaxdelta.documents import Document
from jaxdelta.results.folder import Results, ResultsError
from jaxdelta.runs.segments import NonFiniteError
from tests import ledgers as ledgers_of
from tests.helpers import randomised, unit_keys

T, H, K = 60, 3, 5
EPS = 2e-7  # what storage in f32 leaves of numbers up to 2
WINDOWS = (1, 4, 16, 64)
ONE = dict(layer_kinds=("linear",), attention=())
MODELS = {
    "qwen": jd.Qwen3_5Config.tiny(layer_kinds=("linear", "attention", "linear")),  # 6 value heads read 2 key heads
    "two steps, negative eigenvalues": jd.DeltaLMConfig.tiny(negative_eigenvalues=True, **ONE),
    "three steps, repeated keys, no decay": jd.DeltaLMConfig.tiny(
        num_householder=3, num_key_heads=2, num_value_heads=4, forget_gate=False, **ONE
    ),
    "as many steps as dimensions": jd.DeltaLMConfig.tiny(num_householder=4, key_dim=4, **ONE),
    "sums of magnitudes, beta one": jd.DeltaLMConfig.tiny("delta_net", qk_norm="sum", write_gate=False, **ONE),
}


@pytest.fixture(scope="module")
def models():
    return {name: made(config) for name, config in MODELS.items()}


@pytest.fixture(scope="module")
def ledgers(models):
    return {name: ledger_of(model, documents(41, 23), segment=8, windows=WINDOWS) for name, model in models.items()}


def made(config) -> jd.Decoder:
    kind = jd.Qwen3_5 if isinstance(config, jd.Qwen3_5Config) else jd.DeltaLM
    return randomised(kind(config, rngs=nnx.Rngs(1)), seed=2)


def documents(*lengths: int) -> list[Document]:
    rng = np.random.default_rng(0)
    return [Document(f"of {n}", rng.integers(0, 90, n)) for n in lengths]


def inputs(n: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Keys, strengths over [0, 2] with its ends and 1, and log-decays, of T tokens."""
    rng = np.random.default_rng(seed)
    k = unit_keys(rng, (1, T * n, H, K), "cosine 0.5")[0] * (1 - 3e-7)
    beta = np.where(rng.random((T * n, H)) < 0.2, rng.choice([0.0, 1.0, 2.0], (T * n, H)), 2 * rng.random((T * n, H)))
    return k, beta, -5 * rng.random((T, H))


def whole(k: np.ndarray, beta: np.ndarray, g: np.ndarray, t: int, h: int) -> np.ndarray:
    """A_t of a head: alpha H_n ... H_1, as a K x K matrix."""
    n = len(beta) // len(g)
    A = np.exp(g[t, h]) * np.eye(K)
    for j in range(t * n, (t + 1) * n):
        A = (np.eye(K) - beta[j, h] * np.outer(k[j, h], k[j, h])) @ A
    return A


# A token


@pytest.mark.parametrize("n", [1, 2, 3, 5, 6])
def test_small_problems_have_the_spectra_of_whole_transitions(n):
    """Eigenvalues of A / alpha, matched one to one; singular values of A - alpha I; with K - n_h ones where n_h < K."""
    k, beta, g = inputs(n)
    found = measures(k, beta, g, n)
    assert (np.diff(np.hypot(found["real"], found["imag"])) < EPS).all()  # the largest first
    for t, h in np.ndindex(T, H):
        A, alpha = whole(k, beta, g, t, h), np.exp(g[t, h])
        small = np.concatenate([found["real"][t, h] + 1j * found["imag"][t, h], np.ones(max(0, K - n))])
        assert matched(small, np.linalg.eigvals(A / alpha)) < 2e-5  # near defective ones are roots of rounding
        sigma = np.concatenate([found["change"][t, h], np.zeros(max(0, K - n))])
        np.testing.assert_allclose(sigma, np.linalg.svd(A / alpha - np.eye(K), compute_uv=False), atol=EPS)


def matched(a: np.ndarray, b: np.ndarray) -> float:
    """The largest distance of eigenvalues paired greedily."""
    left, worst = list(b), 0.0
    for x in a:
        nearest = min(range(len(left)), key=lambda i: abs(left[i] - x))
        worst = max(worst, abs(left.pop(nearest) - x))
    return worst


def test_one_factors_numbers_are_its_strength_and_key():
    k, beta, g = inputs(1)
    found = measures(k, beta, g, 1)
    norm2 = np.sum(k * k, axis=-1)
    np.testing.assert_allclose(found["key_norm2"][..., 0], norm2, rtol=1e-7)
    np.testing.assert_allclose(found["eigenvalue"][..., 0], 1 - beta * norm2, atol=EPS)
    np.testing.assert_allclose(found["real"], found["eigenvalue"], atol=EPS)
    np.testing.assert_allclose(found["change"][..., 0], beta * norm2, atol=EPS)
    np.testing.assert_array_equal(found["beta"][..., 0], beta.astype(np.float32))
    np.testing.assert_array_equal(found["g"], g.astype(np.float32))
    assert not found["imag"].any()


@pytest.mark.parametrize("n", [1, 2, 4])
def test_transitions_taken_whole_are_at_the_pin(n):
    """|rho(A) / alpha - 1| for n_h < K: measured 3e-15 at most."""
    k, beta, g = inputs(n)
    found = [whole_defects(k[t * n : (t + 1) * n], beta[t * n : (t + 1) * n], g[t]) for t in range(T)]
    assert np.max(found) < 2e-14


def test_transitions_off_the_pin_are_told_by_how_much():
    """A strength of 2.5 stretches its key by 1.5; all K orthonormal keys at beta = 1 leave nothing."""
    decay = np.array([-1.0])
    np.testing.assert_allclose(whole_defects(np.eye(K)[:1, None], np.array([[2.5]]), decay), [0.5], rtol=1e-12)
    np.testing.assert_allclose(whole_defects(np.eye(K)[:, None], np.ones((K, 1)), decay), [1], rtol=1e-12)


# A run


def difference(model: jd.Decoder, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two random states before a text and what becomes of their difference in the first linear layer, [H, K, V] each."""
    rng = np.random.default_rng(4)
    start = jd.init_carry(model, max_length=len(tokens))
    S = [jnp.asarray(rng.standard_normal(s.shape)) for s in jd.states(start)]
    ends = []
    for first in (S[0], jnp.zeros_like(S[0])):
        _, carry = jd.forward(model, tokens[None], jd.with_states(start, [first, *S[1:]]))
        ends.append(np.asarray(jd.states(carry)[0][0]))
    return np.asarray(S[0][0]), ends[0] - ends[1]


@pytest.mark.parametrize("name", MODELS)
def test_keys_strengths_and_decays_are_those_that_the_model_applies(models, name):
    """The rule is affine in the state: what a text makes of a difference of states is the window's product and decay."""
    model, document = models[name], documents(23)[0]
    with jax.enable_x64(True):
        wide = kind_of(model)(model.config, dtype=jnp.float64)
        nnx.update(wide, jax.tree.map(lambda x: x.astype(jnp.float64), nnx.state(model)))
        before, after = difference(wide, document.tokens)
        parts = list(_rule_inputs(wide, document, 8, 24))
    k, beta, g = (np.concatenate([layers[0][i] for layers in parts]) for i in range(3))
    assert (k.shape[0], beta.shape[0], len(g)) == (23 * model.config.num_householder,) * 2 + (23,)
    window = product(np.moveaxis(k, 0, 1), beta.T)
    P = np.eye(k.shape[-1]) - (
        window.deviation if window.basis is None else window.basis @ window.deviation @ np.swapaxes(window.basis, -1, -2)
    )
    np.testing.assert_allclose(np.exp(g.sum(axis=0))[:, None, None] * (P @ before), after, rtol=1e-9, atol=1e-12)


def kind_of(model: jd.Decoder) -> type:
    return jd.Qwen3_5 if isinstance(model, jd.Qwen3_5) else jd.DeltaLM


@pytest.mark.parametrize("name", MODELS)
def test_a_ledger_has_every_token_and_window(ledgers, name):
    ledger, c = ledgers[name], MODELS[name]
    L, H, n = len(c.linear_layers), c.num_value_heads, c.num_householder
    assert ledger.beta.shape == (2, 41, L, H, n)
    assert ledger.change.shape == (2, 41, L, H, min(n, c.key_dim))
    assert ledger.kept.shape == (2, 4, L, H, c.key_dim)
    assert ledger.whole_count.values.tolist() == [min(41, -(-256 // (L * H))), min(23, -(-256 // (L * H)))]
    for x in ("g", "beta", "key_norm2", "eigenvalue", "change", "real", "imag"):
        there = np.isfinite(ledger[x].values).reshape(2, 41, -1).all(axis=-1)
        assert there.tolist() == [[True] * 41, [True] * 23 + [False] * 18]
    assert ledger["count"].values.tolist() == [[41, 10, 2, 0], [23, 5, 1, 0]]
    assert ledger.layer.values.tolist() == list(c.linear_layers)
    assert all({"long_name", "units"} <= set(variable.attrs) for variable in ledger.variables.values())
    assert ledger.document.values.tolist() == ["of 41", "of 23"]


@pytest.mark.parametrize("name", [name for name in MODELS if "as many" not in name])
def test_models_with_fewer_steps_than_dimensions_sit_at_the_pin(ledgers, name):
    ledger, n = ledgers[name], MODELS[name].num_householder
    assert float(ledger.whole_defect.max()) < 1e-12
    assert radii(ledger).max() <= 1 + EPS
    for length in (1, 4):
        frozen = ledger.frozen.sel(window=length)[..., 0].values
        assert (frozen >= max(0, ledger.attrs["key_dim"] - n * length)).all()
    assert float(ledger.kept_largest.max()) <= 1 + 1e-6  # keys of f32 are longer than one by rounding


def test_what_models_lack_is_seen(ledgers):
    """No decay; beta one; keys shorter than one; a state that all n_h = K factors reach."""
    assert not ledgers["three steps, repeated keys, no decay"].g.fillna(0).values.any()
    sums = ledgers["sums of magnitudes, beta one"]
    assert (sums.beta.fillna(1) == 1).all()
    assert float(sums.key_norm2.max()) < 0.95
    assert float(ledgers["as many steps as dimensions"].whole_defect.min()) > 1e-3
    assert radii(ledgers["as many steps as dimensions"]).min() < 0.999
    assert rotates(ledgers["two steps, negative eigenvalues"]).any()
    assert not rotates(ledgers["qwen"]).any()


@pytest.mark.parametrize("segment", [3, 41, 64])
def test_segments_change_nothing_but_rounding(models, ledgers, segment):
    found = ledger_of(models["qwen"], documents(41, 23), segment=segment, windows=WINDOWS)
    for name, x in ledgers["qwen"].items():
        if name not in ("angles", "pairs", "pairs_apart"):
            np.testing.assert_allclose(found[name], x, rtol=1e-3, atol=2e-5, err_msg=name)


def test_a_text_is_the_same_alone_and_beside_others(models, ledgers):
    """Up to rounding: the cache is as long as the longest text needs."""
    alone = ledger_of(models["qwen"], documents(41, 23)[1:], segment=8, windows=WINDOWS)
    beside = ledgers["qwen"].isel(document=[1], token=slice(23))
    for name, x in alone.items():
        np.testing.assert_allclose(x, beside[name], rtol=1e-3, atol=2e-5, err_msg=name)


def test_one_token_is_a_text(models):
    ledger = ledger_of(models["qwen"], documents(1), segment=8, windows=WINDOWS)
    assert ledger["count"].values.tolist() == [[1, 0, 0, 0]]
    assert {row["window"] for row in window_rows(ledger).to_pylist()} == {1}


def test_progress_counts_segments(models):
    steps = []
    ledger_of(models["qwen"], documents(41, 23), segment=8, windows=(1,), progress=lambda *at: steps.append(at))
    assert steps[-1] == (9, 9)
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)
    assert {done for done, _ in steps} == set(range(1, 10))


# Results


def test_a_run_that_was_killed_goes_on_and_ends_the_same(models, ledgers, tmp_path, monkeypatch):
    whole_run = ledgers["qwen"]
    write = Results.write_parts

    def killed(self, name, data):
        if name == "0000-0001":
            raise KeyboardInterrupt
        write(self, name, data)

    with monkeypatch.context() as patch:
        patch.setattr(Results, "write_parts", killed)
        with pytest.raises(KeyboardInterrupt):
            ledger_of(models["qwen"], documents(41, 23), segment=8, windows=WINDOWS, out=tmp_path)
    runs, of_document = [], transitions._of_document
    monkeypatch.setattr(
        transitions, "_of_document", lambda model, d, *rest: runs.append(d.name) or of_document(model, d, *rest)
    )
    found = ledger_of(models["qwen"], documents(41, 23), segment=8, windows=WINDOWS, out=tmp_path)
    assert runs == ["of 23"]
    xr.testing.assert_identical(found, whole_run)
    with xr.open_zarr(tmp_path / "transitions.zarr", consolidated=False) as stored:
        xr.testing.assert_equal(stored.load(), whole_run)
    with pytest.raises(ResultsError, match="segment is 8 there, 4 now"):
        ledger_of(models["qwen"], documents(41, 23), segment=4, windows=WINDOWS, out=tmp_path)


# Mistakes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"segment": 0}, "segment is 0"),
        ({"windows": (4, 6)}, r"windows are \[4, 6\]"),
        ({"documents": []}, "no documents"),
        ({"documents": [Document("void", np.zeros(0, int))]}, "void has 0 tokens; at least 1 are needed"),
        ({"documents": documents(5) * 2}, r"documents share names: \['of 5'\]"),
        ({"documents": [Document("a", np.array([1, 97]))]}, "a has the token id 97; the model's run from 0 to 96"),
    ],
)
def test_mistakes_are_told_before_anything_runs(models, tmp_path, change, message):
    options = {"documents": documents(5), "out": tmp_path / "out"} | change
    with pytest.raises(ValueError, match=message):
        ledger_of(models["qwen"], options.pop("documents"), **options)
    assert not (tmp_path / "out").exists()


def test_a_model_without_linear_layers_has_no_ledger():
    config = jd.Qwen3_5Config.tiny(layer_kinds=("attention",))
    with pytest.raises(ValueError, match="1 attention layers has no linear layer"):
        ledger_of(jd.Qwen3_5(config), documents(5))


@pytest.mark.parametrize(("parameter", "layer"), [("in_b", 2), ("A_log", 0), ("in_qkv", 2)])
def test_a_nan_is_told_with_its_layer_tokens_and_document(parameter, layer):
    model = made(MODELS["qwen"])
    weight = getattr(model.layers[layer].mixer, parameter)
    weight[...] = weight[...].at[0].set(jnp.nan)
    with pytest.raises(
        NonFiniteError,
        match=rf"of 20: NaN or infinity first after layer {layer} \(linear\), .*tokens 0 to 7",
    ):
        ledger_of(model, documents(20), segment=8)


def test_a_model_that_does_not_fit_is_told(models, monkeypatch):
    monkeypatch.setattr("jaxdelta.runs.capacity.device_memory", lambda: 2**20)
    with pytest.raises(MemoryError, match="a run of one row needs about"):
        ledger_of(models["qwen"], documents(5))


# Rows


def synthetic() -> xr.Dataset:
    """Two tokens and then one, of one layer (model layer 1) with two heads; n_h = 2 of K = 4."""
    apart, parallel = [[1, 0, 0, 0], [0, 1, 0, 0]], [[1, 0, 0, 0], [1, 0, 0, 0]]
    texts = []
    for keys, beta in (  # of each token and head its two steps
        ([apart] * 4, [[0.5, 0.5], [0.0, 0.5], [1.5, 1.0], [2.0, 2.0]]),
        ([apart, parallel], [[0.0, 0.0], [0.5, 0.5]]),
    ):
        k = np.array(keys, float).reshape(-1, 2, 2, 4).swapaxes(1, 2).reshape(-1, 2, 4)
        strengths = np.array(beta).reshape(-1, 2, 2).swapaxes(1, 2).reshape(-1, 2)
        texts.append([(k, strengths, np.log(np.full((len(k) // 2, 2), 0.5)))])
    return ledgers_of.ledger(texts, (1, 2))


def test_rows_of_transitions_count_what_there_is():
    """Six transitions: ranks 2 1 2 2 0 1 (parallel keys), spectra of equal changes but for the third."""
    ledger = synthetic()
    numerical, effective = active_ranks(ledger)
    assert numerical.tolist() == [2, 1, 2, 2, 0, 1]
    entropy = 0.6 * np.log(1 / 0.6) + 0.4 * np.log(1 / 0.4)
    np.testing.assert_allclose(effective, [2, 1, np.exp(entropy), 2, 0, 1], rtol=1e-6)
    rows = transition_rows(ledger).to_pylist()
    assert [(row["layer"], row["head"]) for row in rows] == [(None, None), (1, None), (1, 0), (1, 1)]
    every = rows[0]
    assert every["transitions"] == 6
    assert every["taken_whole"] == 4
    assert every["negative"] == pytest.approx(3 / 12)
    assert every["rank_deficient"] == pytest.approx(3 / 6)
    assert every["rank_numerical"] == pytest.approx(8 / 6)
    assert (every["defect"], every["expanding"], every["rotating"]) == (0, 0, 0)
    assert every["alpha_50"] == pytest.approx(0.5)
    assert every["beta_50"] == pytest.approx(0.5)
    assert rows[2]["beta_95"] == pytest.approx(np.quantile([0.5, 0.5, 1.5, 1.0, 0.0, 0.0], 0.95))


def test_rows_of_windows_weigh_documents_by_their_windows():
    ledger = synthetic()
    rows = {(row["window"], row["layer"], row["head"]): row for row in window_rows(ledger).to_pylist()}
    assert len(rows) == 2 * 4
    every = rows[1, None, None]
    assert (every["windows"], every["documents"], every["frozen_bound"]) == (3, 2, 2)
    assert every["frozen_numerical"] == pytest.approx((2 + 3 + 2 + 2 + 4 + 3) / 6)
    assert every["forgotten"] == pytest.approx((0 + 0 + 1 + 0 + 0 + 1) / 6)  # 1 - beta is 0 once; 1/4 of parallel keys
    assert every["log_decay"] == pytest.approx(np.log(0.5))
    long = rows[2, None, None]
    assert (long["windows"], long["documents"], long["frozen_bound"]) == (1, 1, 0)
    assert rows[1, 1, 0]["frozen_numerical"] == pytest.approx((2 + 2 + 4) / 3)
    assert every["kept_smallest"] == pytest.approx(0, abs=1e-15)


def test_transitions_that_expand_are_counted():
    ledger = synthetic()
    k = np.eye(4)[[0, 1]][:, None]
    grown = measures(k, np.array([[2.5], [1.0]]), np.zeros((1, 1)), 2)
    ledger["real"][0, 0, 0, 0] = grown["real"][0, 0]
    row = transition_rows(ledger).to_pylist()[0]
    assert row["expanding"] == 1
    assert row["defect"] == pytest.approx(0.5)


def test_histograms_hold_every_value_at_its_place(ledgers):
    for ledger in ledgers.values():
        found = distributions(ledger)
        steps = ledger.sizes["step"]
        counts = found.histogram.sum("bin").values
        assert (counts[:2] == 64 * steps).all()
        assert (counts[2] == 64).all()
    x = ledgers["qwen"].beta.isel(layer=1, head=2).values.ravel()
    edges = found.edges.sel(quantity="beta").values
    expected = np.histogram(x[np.isfinite(x)], edges)[0]
    found = distributions(ledgers["qwen"]).histogram.sel(quantity="beta").isel(layer=1, head=2)
    np.testing.assert_array_equal(found, expected)


# The embedded model


def test_the_control_model_is_at_its_pin():
    """n_h = 1 of K = 32 with beta = sigmoid: no negative eigenvalue, rank one, 31 directions frozen in every token."""
    model = jd.load("control")
    tokens = np.array(model.tokenizer.encode("In the beginning God created the heaven and the earth. " * 4).ids)
    ledger = ledger_of(model, [Document("genesis", tokens)], segment=32, windows=(1, 4, 16))
    row = transition_rows(ledger).to_pylist()[0]
    assert row["whole_defect"] < 1e-14
    assert (row["defect"], row["negative"], row["rank_numerical"]) == (0, 0, 1)
    assert 0.05 < row["beta_5"] < row["beta_95"] < 1
    assert 1 - 1e-5 < row["key_norm2_smallest"] <= row["key_norm2_largest"] < 1 + 1e-6
    frozen = [row["frozen_numerical"] for row in window_rows(ledger).to_pylist() if row["layer"] is None]
    assert frozen[0] == pytest.approx(31)
    assert frozen[1] >= 28
    assert frozen[2] >= 16
