"""What tokens do to states, against the model itself; spans, homomorphisms and heads of solutions that are written down."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxdelta.analysis.representation import (
    TokenSteps,
    extended,
    head_accuracies,
    homomorphism_error,
    moved_span,
    multiplicities,
    represented_dimension,
    retention,
    token_steps,
    transitions,
)
from jaxdelta.groups import direct_sum, group_of, minimal_representation, real_irreps
from jaxdelta.models.carry import states, with_states
from jaxdelta.models.config import DeltaLMConfig
from jaxdelta.models.delta_lm import DeltaLM
from jaxdelta.ops.reflections import reflections
from jaxdelta.tasks.state_tracking import solution, words
from ports.compare import relative_error
from tests.helpers import orthonormal_columns, randomised

ONE_LAYER = {"layer_kinds": ("linear",), "attention": (), "conv_width": 1}
K = 7


def steps_of(matrices, *, basis=None):
    """Steps of one head of K dimensions that are the reflections of ``matrices``, on the columns of ``basis``."""
    taken = reflections(matrices, tolerance=1e-8)
    found = [k[:count] for k, count in zip(taken.k, taken.num_householder, strict=True)]
    n, d = max(map(len, found)), matrices.shape[-1]
    basis = np.eye(K)[:, :d] if basis is None else basis
    keys, beta = np.zeros((len(found), n, 1, K)), np.zeros((len(found), n, 1))
    keys[..., K - 1] = 1  # where beta is zero
    for token, vectors in enumerate(found):
        for j, k in enumerate(vectors):
            keys[token, j, 0], beta[token, j, 0] = basis @ k, 2
    return TokenSteps(keys, beta, np.ones((len(found), 1)))


@jax.jit
def read(model, tokens, carry):
    """States of the first layer after ``tokens``."""
    return states(model(tokens, carry).carry)[0]


@jax.jit
def logits(model, tokens):
    return model.logits(model(tokens, model.init_carry(*tokens.shape)).hidden)


# Steps and transitions


@pytest.mark.parametrize("changes", [
    {}, {"num_householder": 3, "negative_eigenvalues": True}, {"forget_gate": False}, {"num_value_heads": 6},
    {"family": "gated_deltanet", "num_householder": 1},
], ids=str)  # fmt: skip
def test_a_transition_is_what_a_token_does_to_the_difference_of_two_states(changes, x64):
    """Writes cancel in the difference: S' - R' = A(x) (S - R)."""
    model = randomised(DeltaLM(DeltaLMConfig.tiny(**ONE_LAYER | changes), dtype=jnp.float64))
    tokens = jnp.arange(5)[:, None]
    carry = model.init_carry(5, 1)
    shape = states(carry)[0].shape
    before = [jax.random.normal(jax.random.key(seed), shape) for seed in range(2)]
    after = [read(model, tokens, with_states(carry, [S])) for S in before]
    A = transitions(token_steps(model))[:5]
    assert relative_error(after[0] - after[1], A @ (before[0] - before[1])) < 1e-10


def test_the_first_step_is_the_rightmost_factor():
    keys = np.zeros((1, 2, 1, 2))
    keys[0, 0, 0], keys[0, 1, 0] = [1, 0], [np.sqrt(0.5), np.sqrt(0.5)]
    A = transitions(TokenSteps(keys, np.full((1, 2, 1), 2.0), np.full((1, 1), 0.5)))
    np.testing.assert_allclose(A[0, 0], 0.5 * np.array([[0, -1], [-1, 0]]) @ np.diag([-1, 1]), atol=1e-15)


@pytest.mark.parametrize(("changes", "reason"), [
    ({"conv_width": 4}, "linear with a convolution of 4 taps"),
    ({"layer_kinds": ("attention", "linear"), "attention": DeltaLMConfig.tiny().attention}, "the first layer is attention"),
])  # fmt: skip
def test_steps_that_depend_on_more_than_the_token(changes, reason):
    with pytest.raises(ValueError, match=reason):
        token_steps(DeltaLM(DeltaLMConfig.tiny(**ONE_LAYER | changes)))


# The span


def test_the_span_is_that_of_keys_that_write():
    """Tokens 0 and 1 move directions 0 and 1, by 2 and 1; token 2 would move direction 2 with a write strength of zero."""
    keys = np.eye(K)[:3].reshape(3, 1, 1, K)
    steps = TokenSteps(keys, np.array([2.0, 1.0, 0.0]).reshape(3, 1, 1), np.ones((3, 1)))
    span = moved_span(steps, 0)
    np.testing.assert_allclose(np.abs(span.directions), np.eye(K)[:, :2], atol=1e-12)
    assert span.dimension == 2
    assert span.effective == pytest.approx(np.exp(-2 / 3 * np.log(2 / 3) - 1 / 3 * np.log(1 / 3)))
    assert moved_span(steps, 0, np.array([1, 2])).dimension == 1


def test_the_span_is_the_heads_own():
    keys = np.eye(K)[:2].reshape(1, 1, 2, K)
    steps = TokenSteps(keys, np.ones((1, 1, 2)), np.ones((1, 2)))
    for head in range(2):
        np.testing.assert_allclose(np.abs(moved_span(steps, head).directions[:, 0]), np.eye(K)[head], atol=1e-12)


# The homomorphism


@pytest.mark.parametrize("name", ["Z2", "Z7", "S3", "S4", "A5", "S5", "S5_limit_2", "S5_limit_3"])
def test_a_solution_is_a_homomorphism_on_a_span_of_the_representations_dimension(name):
    """In K = 7 dimensions, in a random basis; what no key has stays the identity."""
    group = group_of(name)
    rho = minimal_representation(group)
    steps = steps_of(rho.matrices, basis=orthonormal_columns(3, (K, rho.dimension)))
    A, span = transitions(steps)[:, 0], moved_span(steps, 0, group.alphabet)
    assert span.dimension == rho.dimension
    assert homomorphism_error(A, group) < 1e-12
    assert represented_dimension(A, group, span.directions) == rho.dimension
    irreps = real_irreps(group)
    expected = [float(np.allclose(irrep.character, rho.character)) for irrep in irreps]
    np.testing.assert_allclose(multiplicities(A, group, irreps, span.directions), expected, atol=1e-10)
    expected[0] += K - rho.dimension
    np.testing.assert_allclose(multiplicities(A, group, irreps), expected, atol=1e-10)


def test_a_sum_of_representations_is_found_as_such():
    S3 = group_of("S3")
    _, sign, plane = irreps = real_irreps(S3)
    A = transitions(steps_of(direct_sum([plane, sign, sign]).matrices))[:, 0]
    np.testing.assert_allclose(multiplicities(A, S3, irreps), [K - 4, 2, 1], atol=1e-10)


def test_an_anti_homomorphism_is_none():
    """rho(g)^T multiplies in the other order."""
    S3 = group_of("S3")
    plane = real_irreps(S3)[2].matrices
    assert homomorphism_error(plane, S3) < 1e-12
    assert homomorphism_error(plane.swapaxes(1, 2), S3) > 0.5


def test_the_error_is_that_of_its_definition():
    S3 = group_of("S3")
    rng = np.random.default_rng(0)
    A, P = rng.standard_normal((6, 4, 4)), np.linalg.qr(rng.standard_normal((4, 2)))[0]
    squares = [np.sum(((A[a] @ A[h] - A[S3.table[a, h]]) @ P) ** 2) for a in range(6) for h in range(6)]
    assert homomorphism_error(A, S3, P) == pytest.approx(np.sqrt(np.mean(squares) / 2))


def test_one_wrong_letter_is_seen_on_its_direction_alone():
    S3 = group_of("S3")
    matrices = direct_sum(real_irreps(S3)).matrices.copy()  # 1, the sign, and the plane
    matrices[3, 1, 1] *= -1
    e = np.eye(4)
    assert homomorphism_error(matrices, S3, e[:, [0, 2, 3]]) < 1e-12
    assert homomorphism_error(matrices, S3, e[:, [1]]) > 0.5
    assert represented_dimension(matrices, S3, e[:, [2, 3, 1]]) == 2
    assert represented_dimension(matrices, S3, e[:, [1, 2, 3]]) == 0


def test_elements_that_are_no_letters_are_products_of_letters():
    """Their own tokens are never read: their transitions may be anything."""
    group = group_of("S5_limit_2")
    rho = minimal_representation(group).matrices
    A = np.full_like(rho, np.nan)
    A[group.alphabet] = rho[group.alphabet]
    np.testing.assert_allclose(extended(A, group), rho, atol=1e-12)
    assert homomorphism_error(A, group) < 1e-12


def test_a_letter_for_the_identity_is_judged_as_it_is():
    """Not as the empty product: a token that should do nothing and does something is an error."""
    Z2 = group_of("Z2")
    assert homomorphism_error(np.array([[[0.5]], [[-1.0]]]), Z2) > 0.3


def test_transitions_of_a_fresh_model_represent_nothing():
    model = DeltaLM(DeltaLMConfig.tiny(**ONE_LAYER, vocab_size=6, negative_eigenvalues=True, forget_gate=False))
    steps = token_steps(model)
    for head in range(3):
        A, span = transitions(steps)[:, head], moved_span(steps, head)
        assert represented_dimension(A, group_of("S3"), span.directions) == 0


# Retention


def test_orthogonal_transitions_keep_everything_and_a_decay_keeps_alpha():
    group = group_of("A5")
    A = minimal_representation(group).matrices
    assert retention(A, group, np.eye(3)) == pytest.approx(1)
    assert retention(0.9 * A, group, np.eye(3)[:, :3]) == pytest.approx(0.9)


def test_retention_is_the_mean_over_letters_on_the_directions_given():
    """Of Z2 the identity keeps all, the other letter 0.8 of a direction and half of the next."""
    Z2 = group_of("Z2")
    A = np.array([np.eye(3), np.diag([-0.8, 0.5, 0.0])])
    assert retention(A, Z2, np.eye(3)[:, :1]) == pytest.approx(np.sqrt(0.8))
    assert retention(A, Z2, np.eye(3)[:, :2]) == pytest.approx((0.8 * 0.5) ** 0.25)
    assert retention(A, Z2, np.eye(3)) == 0


def test_letters_that_are_never_read_do_not_count():
    group = group_of("S3_limit_2")
    A = np.full((6, 2, 2), np.nan)
    A[group.alphabet] = minimal_representation(group).matrices[group.alphabet]
    assert retention(A, group, np.eye(2)) == pytest.approx(1)


# A whole model


@pytest.fixture(scope="module")
def solved():
    group = group_of("S3")
    return group, solution(group), words(group, count=16, length=40, seed=0)


def test_instruments_find_the_representation_in_a_model(solved):
    """Up to the eps of the keys' norm, which leaves an eigenvalue of -1 + 5e-5."""
    group, model, _ = solved
    steps = token_steps(model)
    A, span = transitions(steps)[:, 0], moved_span(steps, 0)
    assert span.dimension == 2
    assert homomorphism_error(A, group, span.directions) < 1e-4
    np.testing.assert_allclose(multiplicities(A, group, real_irreps(group)), [0, 0, 1], atol=1e-4)


def test_heads_are_ablated_by_their_output(solved):
    """As if their columns of W_out were zero."""
    _, model, drawn = solved
    found = head_accuracies(model, *drawn)
    assert found.untouched == 1
    for head in range(2):
        for accuracy, silent in ((found.without[head], head), (found.alone[head], 1 - head)):
            other = nnx.clone(model)
            out = other.layers[0].mixer.out
            out[...] = out[...].at[:, 2 * silent : 2 * silent + 2].set(0)
            assert accuracy == np.mean(np.asarray(logits(other, drawn.tokens)).argmax(-1) == drawn.targets)


def test_the_head_that_tracks_is_the_one_that_is_missed(solved):
    _, model, drawn = solved
    found = head_accuracies(model, *drawn)
    assert found.without[0] < 0.3  # only the second head's constant answer remains
    assert found.without[1] > 0.7  # only the identity is lost


def test_ablation_wants_one_linear_layer(solved):
    with pytest.raises(ValueError, match="expected one linear layer"):
        head_accuracies(DeltaLM(DeltaLMConfig.tiny()), *solved[2])
