"""Derivatives for the carried state: against transformers by autograd, and in f64 against a recurrence written in torch."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxdelta as jd
from jaxdelta.ops.norms import l2norm
from ports.compare import relative_error
from ports.qwen3_5.gradients import NAMES, chunk_gradients, segment_gradients
from ports.qwen3_5.reference import Reference
from tests.helpers import DECAYS, delta_inputs

RULES = {
    "recurrent": jd.gated_delta_rule,
    "chunked": jd.gated_delta_rule_chunked,
    "chunks of 64": partial(jd.gated_delta_rule_chunked, chunk_size=64),
}

# Bounds on relative errors, after the largest that was seen.
MILD = 1e-5  # f32 against transformers, 9e-7; with K = 128 and V = 96 1.1e-6
OWN = 1e-5  # f32 against f64 under any decay, 1.2e-6
THEIRS = 1e-4  # f32 against transformers under any decay, 1.1e-5, nearly all of it transformers' own
F64 = 1e-8  # two orders of summation in f64, 5e-15
CARRIED = 1e-4  # f32, what a whole model carries: 1.8e-5 after one token, 8e-6 after 70
LOSS = 1e-5  # relative, in f32: two tokens of a loss of 4.9 gave 1.1e-6, for logits within 2e-5


def inputs(T: int, dtype=jnp.float32, **options) -> dict[str, jax.Array]:
    """Inputs with horizons of 2 to 1000 tokens unless a decay is named."""
    x = delta_inputs(0, T, **{"keys": "cosine 0.5", "dtype": dtype} | options)
    if "decay" in options:
        return x
    rates = np.random.default_rng(1).uniform(np.log(1e-3), np.log(0.5), x["g"].shape)
    return x | {"g": jnp.asarray(-np.exp(rates), dtype)}


def weights(x: dict) -> tuple[jax.Array, jax.Array]:
    """Random cotangents of o and of the last state."""
    rng = np.random.default_rng(2)
    return tuple(jnp.asarray(rng.standard_normal(x[name].shape), x["v"].dtype) for name in ("v", "state"))


@partial(jax.jit, static_argnums=0)
def gradients(rule, x: dict, cotangents: tuple) -> tuple[tuple, dict]:
    """(o, S) of ``rule`` and what ``cotangents`` of them give for each input."""
    outputs, pull = jax.vjp(lambda x: rule(**x), x)
    return outputs, pull(cotangents)[0]


def assert_gradients_agree(found: dict, expected: dict, bound: float, names=tuple(NAMES)):
    for name in names:
        assert np.linalg.norm(expected[name]) > 0, name
        assert relative_error(found[name], expected[name]) < bound, name


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("T, K, V", [(1, 13, 7), (63, 7, 11), (100, 13, 7), (150, 7, 11)])
def test_gradients_of_the_rule_are_those_of_transformers_chunk_function(T, K, V, rule):
    x = inputs(T, K=K, V=V)
    outputs, found = gradients(RULES[rule], x, weights(x))
    expected_outputs, expected = chunk_gradients(x, weights(x))
    for a, b in zip(outputs, expected_outputs, strict=True):
        assert relative_error(a, b) < MILD
    assert_gradients_agree(found, expected, MILD)


@pytest.mark.parametrize("T", (1, 100))
def test_gradients_through_normalisation_and_shared_key_heads(T):
    """Raw q and k of every length, two heads of them for six value heads, normalised inside of transformers' function."""
    x = inputs(T, H=6)
    rng = np.random.default_rng(3)
    raw = {name: jnp.asarray(2 * rng.standard_normal((2, T, 2, 13)), jnp.float32) for name in "qk"}

    def rule(q, k, **others):
        q, k = (jnp.repeat(l2norm(a), 3, axis=2) for a in (q, k))
        return jd.gated_delta_rule_chunked(q, k, **others)

    _, found = gradients(rule, x | raw, weights(x))
    _, expected = chunk_gradients(x | raw, weights(x), normalise=True)
    assert_gradients_agree(found, expected, MILD)


@pytest.mark.parametrize("decay", DECAYS)
def test_gradients_under_strong_decay(decay):
    """Ours in f32 are near to f64 under any decay; transformers', from the same inputs, less so.

    It takes decays from differences of one cumulative sum, and its derivative for g from sums of terms that should cancel:
    under g = -20 the error of that one is 5 to 80 times the derivative.
    """
    x = inputs(150, keys="cosine 0.9", decay=decay)
    _, found = gradients(jd.gated_delta_rule_chunked, x, weights(x))
    with jax.enable_x64(True):
        wide = {name: jnp.asarray(a, jnp.float64) for name, a in x.items()}
        cotangents = tuple(jnp.asarray(a, jnp.float64) for a in weights(x))
        _, exact = gradients(jd.gated_delta_rule, wide, cotangents)
    assert_gradients_agree(found, exact, OWN)
    _, theirs = chunk_gradients(x, weights(x))
    assert_gradients_agree(found, theirs, THEIRS, names=[n for n in NAMES if (n, decay) != ("g", "-20")])


def torch_gradients(x: dict, cotangents: tuple) -> dict[str, np.ndarray]:
    """Gradients of S_t = alpha_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T, o_t = K^-1/2 S_t^T q_t, in f64."""
    import torch

    leaves = {name: torch.tensor(np.asarray(a), dtype=torch.float64, requires_grad=True) for name, a in x.items()}
    q, k, v, g, beta, S = (leaves[name] for name in NAMES)
    K, outputs = k.shape[-1], []
    for t in range(k.shape[1]):
        key, strength = k[:, t], beta[:, t, :, None, None]
        transition = g[:, t, :, None, None].exp() * (torch.eye(K) - strength * key[..., :, None] * key[..., None, :])
        S = transition @ S + strength * key[..., :, None] * v[:, t, :, None, :]
        outputs.append((q[:, t, :, None, :] @ S)[..., 0, :] * K**-0.5)
    total = sum(
        (a * torch.tensor(np.asarray(c))).sum() for a, c in zip((torch.stack(outputs, 1), S), cotangents, strict=True)
    )
    return dict(zip(leaves, (a.numpy() for a in torch.autograd.grad(total, list(leaves.values()))), strict=True))


@pytest.mark.parametrize("K, V", [(13, 7), (7, 11)])
@pytest.mark.parametrize("decay", ("0", "-2", "-20", "-20 beside -1e-3"))
@pytest.mark.parametrize("keys", ("cosine 0.5", "near duplicates"))
@pytest.mark.parametrize("rule", ("chunked", "chunks of 64"))
def test_gradients_in_f64_are_those_of_a_recurrence_in_torch(rule, keys, decay, K, V, x64):
    x = inputs(100, jnp.float64, keys=keys, decay=decay, K=K, V=V)
    _, found = gradients(RULES[rule], x, weights(x))
    assert_gradients_agree(found, torch_gradients(x, weights(x)), F64)


def carried_gradients(model, carry: jd.Carry, tokens, targets):
    """Mean loss of a segment after ``carry``, and its derivatives for the states and for all that ``carry`` holds."""
    graphdef, params = nnx.split(model)

    def loss(S, layers):
        live = nnx.merge(graphdef, params)
        hidden = live(jnp.asarray(tokens), jd.with_states(carry._replace(layers=layers), S)).hidden
        logp = jax.nn.log_softmax(live.logits(hidden))
        return -jnp.take_along_axis(logp, jnp.asarray(targets)[..., None], -1).mean()

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(jd.states(carry), carry.layers)


@pytest.mark.parametrize(
    "checkpoint, first, second",
    [
        ("tied, 2 value heads a key head", 70, 100),
        ("3 value heads a key head, K > V", 1, 63),
        ("untied, as many", 90, 1),
    ],
    indirect=["checkpoint"],
)
def test_gradients_of_a_segments_loss_for_all_that_is_carried_into_it(checkpoint, first, second):
    """The state of each linear layer through ``jd.with_states``; the conv tail, keys and values beside it."""
    model, reference = jd.load(checkpoint), Reference(checkpoint)
    text = np.random.default_rng(4).integers(0, 97, (2, first + second + 1))
    before, segment, targets = text[:, :first], text[:, first:-1], text[:, first + 1 :]

    carried = reference.run(before)[1][-1]
    expected_loss, expected = segment_gradients(reference, carried, segment, targets)
    _, carry = jd.forward(model, jnp.asarray(before), jd.init_carry(model, 2, first + second))
    loss, (S, layers) = carried_gradients(model, carry, segment, targets)

    assert float(loss) == pytest.approx(expected_loss, rel=LOSS)
    remaining = iter(S)
    for i, (found, there) in enumerate(zip(layers, expected, strict=True)):
        if hasattr(found, "S"):
            pairs = (next(remaining), there.first), (found.tail, there.second)
        else:
            pairs = (found.keys[:, :first], there.first), (found.values[:, :first], there.second)
        for a, b in pairs:
            assert np.linalg.norm(b) > 0, i
            assert relative_error(a, b) < CARRIED, i
    assert next(remaining, None) is None
