"""The ledger: verdicts follow from numbers, and the numbers are those of the study."""

import io
import re
from dataclasses import dataclass

import numpy as np
import pyarrow.parquet as pa_parquet
import pytest
from rich.console import Console

from jaxdelta.analysis.claims import above, at_most, below, equal
from jaxdelta.analysis.transitions import claims as module
from jaxdelta.analysis.transitions.claims import ledger
from jaxdelta.ops.nearest_product import distance, nearest_product
from jaxdelta.report.claims import measured, number, tables
from jaxdelta.results.folder import ResultsError

# What does not hold without the condition that the next lines state.
BROKEN = {
    ("The same, but one key repeats another and one beta is 0", "frozen dimension, n_h = 7"),
    ("Unit keys, beta = 2", "||A^T A - I||_2, worst draw"),
    ("With a forget gate alpha in [0.5, 0.99], n_h = 4", "|rho - 1|"),
    ("With a forget gate alpha in [0.5, 0.99], n_h = 4", "rank(A - I)"),
    ("Keys x / sqrt(sum x^2 + 1e-6) with ||x|| = 1, n_h = 1", "eigenvalue off 1 - beta"),
    ("Keys x / sqrt(sum x^2 + 1e-6) with ||x|| = 1, n_h = 1", "||A^T A - I||_2 at beta = 2"),
    ("Write strengths beta = 2 sigmoid(x)", "2 - beta in f32, x up to 30"),
    (
        "Factors for the costliest element of a group, by representation",
        "S4 needs what its permutations need",
    ),
    ("Distance of a rotation of one plane by t, beta in [0, 2]", "to the nearest factor, t = 0.3"),
    ("Orthogonal g that products of n_h factors reach; distances", "one plane from 3 factors, beta = 2"),
    ("Orthogonal g that products of n_h factors reach; distances", "ranks 1 to 4 from 4 factors, beta = 2"),
}


@dataclass
class Study:
    """Rows found by their claim."""

    rows: list[dict]

    def line(self, claim, condition=""):
        found = [r for r in self.rows if r["claim"] == claim and condition in r["condition"]]
        assert found, claim
        return found[0]

    def high(self, claim, condition=""):
        return self.line(claim, condition)["high"]

    def only(self, claim, condition=""):
        line = self.line(claim, condition)
        assert line["high"] == pytest.approx(line["low"], abs=1e-10)
        return line["high"]


@pytest.fixture(scope="module")
def rows():
    return ledger()


@pytest.fixture(scope="module")
def study(rows):
    return Study(rows.to_pylist())


# The study's numbers


def test_the_radius_is_pinned_within_3e_15_over_hundreds_of_draws(study):
    assert study.high("|rho - 1|, n_h = 1, 2, 4, 7") <= 3e-15


@pytest.mark.parametrize("n", (1, 2, 4, 7))
def test_exactly_the_rest_is_frozen(study, n):
    assert study.only(f"frozen dimension, n_h = {n}") == 16 - n
    assert study.only("eigenvalues at 1 (to 1e-12) less d - n_h") == 0


def test_no_more_than_the_factors_is_active(study):
    assert study.high("rank(A - I) - n_h, n_h = 1, 2, 4, 7") == 0


def test_only_as_many_factors_as_dimensions_forget(study):
    assert study.high("rho, n_h = d") < 1e-14
    assert study.only("rank(A - I), n_h = d") == 16
    assert study.high("|rho - 1|, n_h = d - 1") <= 3e-15


def test_full_strength_is_orthogonal_within_1e_15_and_of_known_parity(study):
    """The study's norm is not stated: 1e-15 holds for the largest entry of a typical draw, not for the norm of all."""
    assert study.high("|A^T A - I|, largest entry, median draw") < 1e-15
    assert study.high("|det A - (-1)^n_h|, n_h = 1, 2, 4, 7") < 1e-14


@pytest.mark.parametrize("angle", ("0.3", "1.0", "2.5", "pi"))
def test_a_rotation_is_at_two_from_any_reflection(study, angle):
    assert f"{study.only(f'to the nearest reflection, t = {angle}'):.4f}" == "2.0000"


def test_two_reflections_rotate_a_plane_and_2m_rotate_m(study):
    assert study.only("reflections for one plane, the same t") == 2
    assert study.high("residual of the two") < 1e-14
    assert study.only("reflections for m planes less 2 m, all m") == 0
    assert study.high("residual of the 2 m") < 1e-14
    assert study.only("to the nearest product of 2 m - 1") == pytest.approx(2, abs=1e-12)


def test_a_factor_has_the_spectrum_stated(study):
    for claim in ("singular values off {|1 - beta|, 1}", "|det A - (1 - beta)|", "||A||_2 - 1"):
        assert study.high(claim) < 2e-15


# Its corrections


def test_a_forget_gate_pins_the_radius_at_alpha(study):
    assert study.high("|rho - alpha|") <= 3e-15
    assert study.high("rank(A - alpha I)") == 4
    assert study.high("|rho - 1|", "forget gate") > 0.4
    assert study.high("rank(A - I)", "forget gate") == 16


def test_an_eps_under_the_root_leaves_keys_short(study):
    assert study.only("1 - ||k||") == pytest.approx(5e-7, abs=1e-12)
    assert study.high("eigenvalue off 1 - beta ||k||^2") <= 3e-15
    assert 1e-6 < study.high("eigenvalue off 1 - beta") <= 2e-6


def test_a_sigmoid_reaches_two_in_float32_only_by_rounding(study):
    assert study.line("2 - beta in f64, x up to 30")["low"] == pytest.approx(2 * np.exp(-30), rel=0.01)
    assert study.line("2 - beta in f32, x up to 15")["low"] > 0
    assert study.line("2 - beta in f32, x up to 30")["low"] == 0
    assert 15 < study.only("least x with beta = 2 in f32 (25 ln 2)") <= 25 * np.log(2)


@pytest.mark.parametrize(
    ("claim", "needed"),
    [
        ("S3, permutations of 3 points", 2),
        ("S4, permutations of 4 points", 3),
        ("A5, permutations of 5 points", 4),
        ("S5, permutations of 5 points", 4),
        ("S3, least representation", 2),
        ("S4, least representation", 2),
        ("A5, least representation", 2),
        ("S5, least representation", 4),
    ],
)
def test_a_group_needs_what_its_representation_needs(study, claim, needed):
    assert study.only(claim) == needed


def test_a_free_factor_comes_nearer_than_two(study):
    assert study.only("sqrt((1 - cos t)(3 + cos t)), t = 0.3") == pytest.approx(0.4203, abs=5e-5)
    assert study.only("sqrt((1 - cos t)(3 + cos t)), t = pi") == pytest.approx(2, abs=1e-10)
    assert study.only("to I: 2 sqrt(2) |sin(t / 2)|, t = 0.3") == pytest.approx(0.4227, abs=5e-5)


def test_parity_is_fixed_unless_a_factor_is_off(study):
    assert study.only("its remainder mod 2") == 0
    assert study.only("one plane from 3 factors, beta = 2") == pytest.approx(2, abs=1e-12)
    assert study.high("ranks 1 to 4 from 4, beta in {0, 2}") < 1e-14


def test_the_rotations_of_the_ledger_turn_what_they_say():
    sample = module.Sample(9, 3, np.random.default_rng(0))
    g = sample.rotation(0.3, 2.0)
    assert np.trace(g) == pytest.approx(5 + 2 * np.cos(0.3) + 2 * np.cos(2.0))
    np.testing.assert_allclose(np.linalg.norm(sample.keys(4), axis=-1), 1)
    assert sample.strengths(500).max() > 1.9


# Verdicts


def test_all_but_the_claims_without_their_condition_hold(rows):
    found = {(r["condition"], r["claim"]) for r in rows.to_pylist() if not r["holds"]}
    assert found == BROKEN


def test_a_verdict_follows_from_what_was_measured():
    assert equal("x", 2, [2.0, 2.0]).holds
    assert equal("x", 2, [2.0, 2.0 + 1e-13], 1e-12).holds
    assert not equal("x", 2, [2.0, 2.0 + 1e-11], 1e-12).holds
    assert not equal("x", 2, [1.5, 2.0]).holds
    assert at_most("x", 2, [1, 2]).holds
    assert not at_most("x", 2, [1, 2.1]).holds
    assert below("x", 2, [1, 1.9]).holds
    assert not below("x", 2, [1, 2.0]).holds
    assert above("x", 2, [2.1, 7]).holds
    assert not above("x", 2, [2.0, 7]).holds


@pytest.mark.parametrize("make", (equal, at_most, below, above))
def test_what_is_not_a_number_never_holds(make):
    assert not make("x", 2, [2.0, np.nan]).holds


def test_a_wrong_transition_does_not_pass(monkeypatch):
    """Factors that decay everything: the pin, the frozen dimension and the rank fail, and say so."""
    true = module.transition
    monkeypatch.setattr(module, "transition", lambda *a, **k: 0.999 * true(*a, **k))
    lines = module.pinned(module.Sample(8, 5, np.random.default_rng(0)))
    assert not any(line.holds for line in lines)


def test_a_seed_gives_the_same_rows_and_another_others():
    first, again, other = (ledger(dim=8, draws=2, seed=seed).to_pylist() for seed in (3, 3, 4))
    assert first == again
    assert first != other
    assert [r["claim"] for r in first] == [r["claim"] for r in other]


def test_other_sizes_have_their_own_numbers():
    study = Study(ledger(dim=24, draws=20).to_pylist())
    assert study.only("frozen dimension, n_h = 7") == 17
    assert study.only("rank(A - I), n_h = d") == 24
    assert {(r["condition"], r["claim"]) for r in study.rows if not r["holds"]} == BROKEN


# Rows and table


def test_rows_are_kept_and_not_measured_again(tmp_path, monkeypatch):
    first = ledger(dim=8, draws=2, out=tmp_path / "x")
    assert pa_parquet.read_table(tmp_path / "x" / "rows.parquet") == first
    assert (tmp_path / "x" / "rows.csv").read_text().count("\n") == first.num_rows + 1
    monkeypatch.setattr(module, "CONDITIONS", {})
    assert ledger(dim=8, draws=2, out=tmp_path / "x") == first
    with pytest.raises(ResultsError, match="draws is 2 there, 3 now"):
        ledger(dim=8, draws=3, out=tmp_path / "x")


@pytest.mark.parametrize("size", [{"dim": 10**6, "draws": 1}, {"dim": 10**20}, {"draws": 10**12}], ids=str)
def test_matrices_that_do_not_fit_are_told_before_any_is_made(size, tmp_path):
    """Asked for memory that is not there, jax ends the process."""
    with pytest.raises(MemoryError, match=r"are needed, .* are there; take less"):
        ledger(**size, out=tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_the_table_has_every_line_whole(rows):
    console = Console(width=80, file=io.StringIO())
    console.print(tables(rows))
    printed = console.file.getvalue().splitlines()
    assert max(map(len, printed)) <= 80
    assert not [line for line in printed if "…" in line]
    for row in rows.to_pylist():
        pattern = re.escape(row["claim"]) + r" +(=|<=|<|>) [-0-9.e]+ .* (holds|does not hold) *$"
        verdicts = [re.search(pattern, line) for line in printed if row["claim"] in line]
        assert ("holds" if row["holds"] else "does not hold") in {v[2] for v in verdicts if v}
    assert any(line.startswith(f"{rows.num_rows - len(BROKEN)} of {rows.num_rows} lines hold") for line in printed)


@pytest.mark.parametrize(
    ("x", "text"), [(2.0, "2"), (2 + 1e-13, "2"), (-1.0, "-1"), (0.0, "0"), (3e-15, "3.0e-15"), (0.42034, "0.4203")]
)
def test_numbers_are_short(x, text):
    assert number(x) == text


@pytest.mark.parametrize(("relation", "text"), [("=", "1 to 3"), ("<=", "3"), ("<", "3"), (">", "1")])
def test_the_worst_value_is_shown(relation, text):
    assert measured(dict(relation=relation, low=1.0, high=3.0)) == text


def test_nearest_products_of_the_ledger_are_those_of_the_ops():
    g = module.Sample(8, 1, np.random.default_rng(1)).rotation(1.0)
    found = nearest_product(g, 3, strengths="reflections")
    assert module._nearest(g, 3) == pytest.approx(float(distance(g, found.k, found.beta)))


@pytest.mark.parametrize("bad", (dict(dim=7), dict(draws=0), dict(seed=-1)))
def test_sizes_that_say_nothing_are_refused(bad):
    ((name, value),) = bad.items()
    with pytest.raises(ValueError, match=f"{name} = {value}"):
        ledger(**bad)
