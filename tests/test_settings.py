"""Settings of jax that users turn on to find their own mistakes: everything inside the library runs under them."""

from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdelta as jd
from jaxdelta.runs.interventions import Filter, Noise, Project, Quantise, Scale, Swap
from tests import tiny

SEGMENT = 7
TEXTS = tiny.tokens(18, 11)


@contextmanager
def setting(name, value):
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    jax.clear_caches()  # what was traced before would not be looked at
    try:
        yield
    finally:
        jax.config.update(name, before)
        jax.clear_caches()


@pytest.fixture(scope="module")
def no_promotion():
    """Neither of ranks nor of dtypes."""
    with setting("jax_numpy_rank_promotion", "raise"), setting("jax_numpy_dtype_promotion", "strict"):
        yield


def net():
    return tiny.model()


@pytest.mark.parametrize("name", ["jax_debug_nans", "jax_check_tracer_leaks"])
def test_maps_under_other_settings(name):
    """They run what a sweep runs, and more."""
    with setting(name, True):
        maps = jd.sensitivity(net(), TEXTS[0], SEGMENT, samples=1, intervention=jd.Truncate(2))
        assert np.isfinite(maps.gate).all()


def test_a_sweep(no_promotion):
    rows = jd.sweep(net(), TEXTS, ranks=(1, 4), segment=SEGMENT)
    assert np.isfinite(rows["loss"].to_numpy()).all()


def test_maps_with_and_without_a_cut(no_promotion):
    for cut in (None, jd.Truncate(2)):
        maps = jd.sensitivity(net(), TEXTS[0], SEGMENT, samples=1, intervention=cut)
        assert np.isfinite(maps.gate).all()


@pytest.mark.parametrize("loss", ["next_token", jd.LogitDifference(1, 2)], ids=["next token", "difference"])
def test_maps_of_a_model_in_bf16(no_promotion, loss):
    maps = jd.sensitivity(tiny.fresh_model(dtype=jnp.bfloat16), TEXTS, SEGMENT, samples=0, loss=loss)
    assert np.isfinite(maps.gate[0]).all()


def test_texts_of_several_lengths_with_padding_and_steps(no_promotion):
    ids = np.stack([TEXTS[0][:9], TEXTS[0][9:]])
    for model in (net(), product(), tiny.fresh_model(dtype=jnp.bfloat16)):
        carry = jd.init_carry(model, 2, 16)
        logits, carry = jd.forward(model, ids, carry, np.arange(9)[None] < np.array([[9], [4]]))
        logits, carry = jd.forward(model, ids[:, :1], carry)
        assert np.isfinite(logits).all()


def product():
    return jd.DeltaLM(jd.DeltaLMConfig.tiny(vocab_size=11))


def test_every_intervention(no_promotion):
    model = net()
    (L, (_, H, K, V)) = (len(jd.states(carry := jd.init_carry(model, 1, 8))), jd.states(carry)[0].shape)
    for intervention in (
        Scale(np.linspace(0, 1, min(K, V))),
        Project(np.eye(K)[None, None, None, :, :2]),
        Filter(0.5),
        Noise(),
        Quantise(4, error_feedback=True),
        Swap(np.ones((1, L, 1, H, K, V))),
        jd.Truncate(1, method="subspace"),
        jd.Truncate(2, method="svd"),
    ):
        assert np.isfinite(jd.run(model, TEXTS[0][None], segment=SEGMENT, intervention=intervention).losses).all()


def test_functions_of_arrays(no_promotion):
    rng = np.random.default_rng(0)
    S = jnp.asarray(rng.standard_normal((2, 3, 5, 7)), jnp.float32)
    Q = np.linalg.qr(rng.standard_normal((2, 4, 4)))[0]
    found = [
        *(f(S) for f in (jd.effective_rank, jd.stable_rank, jd.threshold_rank, jd.singular_values)),
        jd.energy_rank(S, 0.9),
        *(jd.truncate(S, 2, method=method) for method in ("subspace", "eigh", "svd")),
        jax.grad(lambda S: jd.truncate(S, 2).sum())(S),
        jd.householder.transition(Q[:, :2], np.ones((2, 2)), np.ones(2)),
        jd.reflections(Q).residual,
        jd.nearest_product(Q[0], 1).error,
        jd.householder.spectral_radius(Q),
    ]
    assert all(np.isfinite(x).all() for x in found)


def test_the_ledger(no_promotion, tmp_path):
    assert jd.ledger(dim=8, draws=2, out=tmp_path / "out").num_rows
