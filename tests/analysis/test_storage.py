"""Forms of storage: names, bytes, what they do to states; divergences against full logits; growth; errors by head."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdelta as jd
from jaxdelta.analysis.storage import Form, _spans, costs, form, growth, spans, storage_costs
from jaxdelta.nn import head
from ports.compare import relative_error
from tests.tiny import fresh_model, tokens

SEGMENT = 8
LENGTHS = (41, 26)
FORMS = ("bf16", "int8", "int3", "rank=2", "rank=2+int8", "rank=8+f16")


@pytest.fixture(scope="module")
def model():
    return fresh_model(layer_kinds=("linear", "attention", "linear"))


@pytest.fixture(scope="module")
def rows(model):
    return storage_costs(model, tokens(*LENGTHS), FORMS, segment=SEGMENT)


# Names and bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bf16", (None, "bf16")),
        ("int4", (None, 4)),
        ("rank=12", (12, None)),
        ("rank=12+int8", (12, 8)),
        ("rank=3+f16", (3, "f16")),
    ],
)
def test_a_form_is_named_by_its_rank_and_its_numbers(text, expected):
    assert form(text) == Form(text, *expected)


@pytest.mark.parametrize(
    "text", ["", "+", "int1", "int17", "f32", "rank=", "rank=2+", "+int8", "rank=2int8", "int8+rank=2", "fp8", "rank=-1"]
)
def test_other_names_are_refused(text):
    with pytest.raises(ValueError, match=r"no form of storage|bits; expected 2 to 16"):
        form(text)


def test_bytes_are_those_of_the_numbers_that_are_stored():
    config = jd.Qwen3_5Config.tiny(layer_kinds=("linear", "attention", "linear"))
    H, K, V = config.linear_sizes[0].state
    for text, a_head in {
        "bf16": 2 * K * V,
        "int4": K * V / 2 + 4,
        "rank=3": 4 * 3 * (K + V),
        "rank=3+int8": 3 * (K + V) + 8 * 3,
        "rank=3+bf16": 2 * 3 * (K + V),
    }.items():
        assert form(text).bytes_of(config) == 2 * H * a_head


# What they do to states


def states(seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((2, 1, 3, 8, 11)), jnp.float32)


def changed(intervention, S):
    return intervention.change(S, intervention.prepare(S), jnp.int32(0))[0]


def test_rounded_states_are_those_of_the_dtype():
    S = states()
    for name, dtype in (("bf16", jnp.bfloat16), ("f16", jnp.float16)):
        np.testing.assert_array_equal(changed(jd.Round(name), S), S.astype(dtype).astype(jnp.float32))


def test_factors_of_many_bits_are_the_truncation():
    S = states()
    assert relative_error(changed(jd.Factors(3, 16), S), jd.truncate(S, 3)) < 1e-4


@pytest.mark.parametrize("bits", (4, 8))
def test_rounded_factors_are_off_by_half_a_step_of_each_factor(bits):
    """|U_q R_q - U R| <= |dU| |R| + |U_q| |dR| with entries off by at most half a step."""
    S, levels = states(), 2 ** (bits - 1) - 1
    U, sigma, Vt = np.linalg.svd(np.asarray(S, np.float64), full_matrices=False)
    exact = np.einsum("...kr,...r,...rv->...kv", U[..., :3], sigma[..., :3], Vt[..., :3, :])
    half_U = np.abs(U[..., :3]).max(-2) / levels / 2
    R = sigma[..., :3, None] * Vt[..., :3, :]
    half_R = np.abs(R).max(-1) / levels / 2
    K, V = S.shape[-2:]
    bound = np.sum(half_U * K**0.5 * np.linalg.norm(R, axis=-1) + (1 + half_U * K**0.5) * half_R * V**0.5, axis=-1)
    error = np.linalg.norm(np.asarray(changed(jd.Factors(3, bits), S)) - exact, axis=(-2, -1))
    assert (error < bound + 1e-5).all()
    assert (error > 1e-4).all()


def test_derivatives_pass_straight_through():
    S = states()
    for intervention in (jd.Round("bf16"), jd.Factors(2, 8)):
        found = jax.grad(lambda S, one=intervention: jnp.sum(jnp.sin(changed(one, S))))(S)
        np.testing.assert_allclose(found, jnp.cos(changed(intervention, S)), rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "values"),
    [(jd.Round, ["f8"]), (jd.Factors, [0, 8]), (jd.Factors, [9, 8]), (jd.Factors, [2, 1]), (jd.Factors, [2, 17])],
)
@pytest.mark.usefixtures("as_for_users")
def test_values_that_do_not_fit_are_refused(kind, values):
    with pytest.raises(ValueError, match="expected"):
        kind(*values).prepare(states())


# Divergence of predictions


@pytest.mark.parametrize("words", (97, 8192 + 300))
def test_divergences_are_those_of_full_logits(words, x64):
    rng = np.random.default_rng(0)
    weight, a = rng.standard_normal((words, 12)), rng.standard_normal((2, 5, 12))
    b = a + 0.3 * rng.standard_normal(a.shape)
    kl, agrees = jax.jit(head.divergence)(*map(jnp.asarray, (weight, a, b)))
    p, q = (jax.nn.log_softmax(x @ weight.T) for x in (a, b))
    np.testing.assert_allclose(kl, jnp.sum(jnp.exp(p) * (p - q), axis=-1), rtol=1e-10)
    np.testing.assert_array_equal(agrees, jnp.argmax(p, -1) == jnp.argmax(q, -1))


@pytest.mark.parametrize("far", (3.0, 30.0, 100.0, 1000.0))
def test_divergences_of_words_that_rise_from_nowhere_are_finite(far):
    """p is 1/3, exp(-far) and 1/3 over its sum; p' is flat."""
    h = np.array([0.0, -far, 0.0], np.float32)
    kl, _ = head.divergence(jnp.eye(3), jnp.asarray(h)[None, None], jnp.zeros((1, 1, 3)))
    p = np.exp(h.astype(np.float64)) / np.exp(h.astype(np.float64)).sum()
    assert kl[0, 0] == pytest.approx(np.sum(p[p > 0] * np.log(3 * p[p > 0])), rel=1e-5)


def test_a_shift_of_all_logits_is_no_divergence():
    rng = np.random.default_rng(0)
    h = jnp.asarray(rng.standard_normal((1, 4, 5)), jnp.float32)
    weight = jnp.concatenate([jnp.asarray(rng.standard_normal((97, 4)), jnp.float32), jnp.ones((97, 1))], axis=1)
    kl, agrees = head.divergence(weight, h, h.at[..., 4].add(50.0))
    assert (np.abs(kl) < 1e-8).all()
    assert agrees.all()


def test_growth_is_over_documents_that_fill_both_spans(rows):
    found = growth(rows, "int3")
    by = {(r["document"], r["from"]): r["kl"] for r in rows.to_pylist() if r["form"] == "int3" and r["from"] is not None}
    first = min(d for d, _ in by)
    assert found == pytest.approx(by[first, 16] / by[first, 8])


def test_tiny_divergences_are_not_lost_in_f32():
    """Logits 1e-4 apart: 5e-9 nats, where losses are rounded to 2e-7."""
    rng = np.random.default_rng(0)
    weight, a = rng.standard_normal((97, 12)), rng.standard_normal((1, 5, 12))
    a, b = (np.asarray(x, np.float32) for x in (a, a + 3e-5 * rng.standard_normal(a.shape)))
    with jax.enable_x64(True):
        expected, _ = head.divergence(*(jnp.asarray(x, jnp.float64) for x in (weight, a, b)))
    found, _ = head.divergence(*(jnp.asarray(x, jnp.float32) for x in (weight, a, b)))
    np.testing.assert_allclose(found, expected, rtol=0.05)
    assert np.all(head.divergence(*(jnp.asarray(x, jnp.float32) for x in (weight, a, a)))[0] == 0)


# Of a model


def test_losses_are_those_of_a_run_with_the_intervention(model, rows):
    whole = {(r["document"], r["form"]): r for r in rows.to_pylist() if r["layer"] is None and r["from"] is None}
    for index, ids in enumerate(tokens(*LENGTHS)):
        document = sorted({d for d, _ in whole})[index]
        for name, intervention in ({"untouched": None} | {f: form(f).intervention for f in FORMS}).items():
            losses = jd.run(model, ids[None], segment=SEGMENT, intervention=intervention).losses[0]
            assert whole[document, name]["loss"] == pytest.approx(losses.mean(), rel=1e-5)
            assert whole[document, name]["num_tokens"] == len(ids) - 1


def test_divergence_and_agreement_are_those_of_the_logits(model, rows):
    ids = tokens(*LENGTHS)[0][None]
    p, q = (
        jax.nn.log_softmax(jd.run_with_cache(model, ids, (), segment=SEGMENT, intervention=one)[0])[0, :-1]
        for one in (None, jd.Quantise(3))
    )
    kl, agrees = jnp.sum(jnp.exp(p) * (p - q), axis=-1), jnp.argmax(p, -1) == jnp.argmax(q, -1)
    first = min(r["document"] for r in rows.to_pylist())
    of_form = [r for r in rows.to_pylist() if (r["document"], r["form"]) == (first, "int3") and r["layer"] is None]
    assert [(r["from"], r["to"]) for r in of_form] == [(None, None), (0, 8), (8, 16), (16, 32)]
    for row in of_form:
        span = slice(row["from"] or 0, row["to"])
        assert row["kl"] == pytest.approx(float(kl[span].mean()), rel=1e-3, abs=1e-9)
        assert row["agreement"] == pytest.approx(float(agrees[span].mean()))
    assert of_form[1]["kl"] == 0  # before the first boundary


def test_errors_of_states_are_those_at_the_last_boundary(model, rows):
    ids = tokens(*LENGTHS)[0][None]
    names = [f"blocks.{layer}.linear_attn.hook_state_before" for layer in (0, 2)]
    base, world = (
        jd.run_with_cache(model, ids, names, segment=SEGMENT, intervention=one)[1] for one in (None, jd.Quantise(3))
    )
    first = min(r["document"] for r in rows.to_pylist())
    found = {
        (r["layer"], r["head"]): r
        for r in rows.to_pylist()
        if (r["document"], r["form"]) == (first, "int3") and r["layer"] is not None
    }
    assert len(found) == 12
    for layer, name in zip((0, 2), names, strict=True):
        a, b = (x[name][0, 4].astype(np.float64) for x in (world, base))  # at 32 of 41 tokens
        expected = np.linalg.norm(a - b, axis=(-2, -1)) / np.linalg.norm(b, axis=(-2, -1))
        np.testing.assert_allclose([found[layer, h]["state_error"] for h in range(6)], expected, rtol=1e-3)
        assert all(0.01 < found[layer, h]["rounding"] < 1 for h in range(6))


def test_what_is_kept_whole_costs_nothing_and_fewer_bits_cost_more(rows):
    by_form = {c.form: c for c in costs(rows)}
    assert by_form["untouched"].kl == 0
    assert by_form["untouched"].agreement == 1
    assert by_form["bf16"].kl < by_form["int8"].kl < by_form["int3"].kl
    assert by_form["rank=8+f16"].kl < by_form["rank=2"].kl


def test_spans_are_a_segment_and_powers_of_two_of_it():
    """Those that the text fills."""
    assert list(_spans(40, 8)) == [(None, None), (0, 8), (8, 16), (16, 32)]
    assert list(_spans(5, 8)) == [(None, None)]


def test_storing_after_every_token_has_a_boundary_after_each(model):
    found = storage_costs(model, tokens(12), ["int4"], segment=4, every_token=True)
    assert {r["num_boundaries"] for r in found.to_pylist()} == {10}
    by_hand = jd.run(model, tokens(12)[0][None], segment=1, intervention=jd.Quantise(4)).losses[0].mean()
    (one,) = [c for c in costs(found) if c.form == "int4"]
    assert one.loss == pytest.approx(by_hand, rel=1e-5)
    assert spans(found) == [(0, 4), (4, 8)]


@pytest.mark.parametrize(
    ("forms", "error", "said"),
    [
        ([], ValueError, "no forms"),
        (["rank=9"], ValueError, "9"),
        (["int9000"], ValueError, "bits"),
        ("bf16", TypeError, "forms is"),
    ],
)
@pytest.mark.usefixtures("as_for_users")
def test_forms_that_do_not_fit_are_refused(model, forms, error, said):
    with pytest.raises(error, match=said):
        storage_costs(model, tokens(20), forms, segment=SEGMENT)


def test_a_folder_takes_further_forms(model, rows, tmp_path):
    storage_costs(model, tokens(*LENGTHS), FORMS[:2], segment=SEGMENT, out=tmp_path)
    again = storage_costs(model, tokens(*LENGTHS), FORMS, segment=SEGMENT, out=tmp_path)
    assert again.equals(rows)
