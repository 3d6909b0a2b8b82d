"""``jd.forward`` as a function of arrays inside of a user's jit, gradients and vmap; what they leave unknown is NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxdelta as jd
from ports.compare import relative_error
from tests.tiny import model, tokens

ROOM = 16
IDS = tokens(7)[0][None].astype(np.int32)
STEP = 1e-2


def net():
    return model()


def carry(batch=1):
    """In the middle of a text."""
    _, after = jd.forward(net(), np.repeat(tokens(5, seed=1)[0][None], batch, 0), jd.init_carry(net(), batch, ROOM))
    return after


def loss(logits):
    return -jnp.mean(jax.nn.log_softmax(logits)[:, :-1, 3])


def test_compiled_it_gives_the_same():
    expected, following = jd.forward(net(), IDS, carry())
    compiled = jax.jit(lambda ids, carry: jd.forward(net(), ids, carry))
    for ids in (IDS, jnp.asarray(IDS)):
        found, after = compiled(ids, carry())
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
        for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(following), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_inside_of_jit_all_may_be_known_or_nothing():
    """Also the carry alone, the tokens alone, a mask, and a carry made within."""
    mask = np.arange(7)[None] < 5
    expected, _ = jd.forward(net(), IDS, carry(), mask)
    here = carry()
    for found in (
        jax.jit(lambda: jd.forward(net(), IDS, here, mask)[0])(),
        jax.jit(lambda carry: jd.forward(net(), IDS, carry, mask)[0])(here),
        jax.jit(lambda ids: jd.forward(net(), ids, here, mask)[0])(IDS),
        jax.jit(lambda mask: jd.forward(net(), jnp.asarray(IDS), here, mask)[0])(mask),
    ):
        np.testing.assert_allclose(found[:, :5], expected[:, :5], rtol=1e-5, atol=1e-5)
    fresh = jax.jit(lambda: jd.forward(net(), IDS, jd.init_carry(net(), 1, ROOM))[0])()
    np.testing.assert_allclose(fresh, jd.forward(net(), IDS, jd.init_carry(net(), 1, ROOM))[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wrapped", [lambda f: f, jax.jit], ids=["", "jit"])
def test_a_gradient_with_respect_to_the_states_is_the_difference_quotient(wrapped):
    start = carry()

    def of_states(S):
        return loss(jd.forward(net(), IDS, jd.with_states(start, S))[0])

    S = jd.states(start)
    value, gradient = wrapped(jax.value_and_grad(of_states))(S)
    assert value == pytest.approx(float(of_states(S)), rel=1e-5)
    away = [STEP * g / jnp.linalg.norm(g) for g in gradient]
    there, back = (of_states([s + sign * d for s, d in zip(S, away, strict=True)]) for sign in (1, -1))
    assert (there - back) / 2 == pytest.approx(
        float(sum(jnp.vdot(g, d) for g, d in zip(gradient, away, strict=True))), rel=1e-2
    )


def test_a_gradient_with_respect_to_the_parameters_is_that_of_split_and_merge():
    start = carry()
    value, gradient = nnx.value_and_grad(lambda net: loss(jd.forward(net, IDS, start)[0]))(net())
    graphdef, params = nnx.split(net())
    same, plain = jax.jit(jax.value_and_grad(lambda p: loss(jd.forward(nnx.merge(graphdef, p), IDS, start)[0])))(params)
    assert value == pytest.approx(float(same), rel=1e-5)
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(plain), strict=True):
        assert relative_error(a, b) < 1e-4 or np.abs(b).max() < 1e-6
    assert sum(float(jnp.abs(x).max()) > 0 for x in jax.tree.leaves(gradient)) > 10


def test_rows_of_a_vmap_are_texts_of_their_own():
    ids = np.stack([IDS, IDS[:, ::-1]])
    found = jax.vmap(lambda ids: jd.forward(net(), ids, jd.init_carry(net(), 1, ROOM))[0])(ids)
    for row, text in zip(found, ids, strict=True):
        np.testing.assert_allclose(row, jd.forward(net(), text, jd.init_carry(net(), 1, ROOM))[0], rtol=1e-4, atol=1e-4)


def test_what_only_the_compiled_function_sees_is_nan_and_not_clipped():
    """An id out of range in one row, too many tokens in another; a third is as it should be, and padding is free."""
    compiled = jax.jit(lambda ids, carry, mask=None: jd.forward(net(), ids, carry, mask)[0])
    start = jd.init_carry(net(), 3, 8)
    full = start._replace(position=jnp.array([0, 4, 0]))
    ids = np.repeat(IDS, 3, 0)
    for bad in (-1, net().config.vocab_size, 2**31 - 1):
        ids[0, 6] = bad
        found = np.asarray(compiled(ids, full))
        assert np.isnan(found[:2, 6]).all()
        assert np.isfinite(found[2]).all()
    mask = np.array([[True] * 6 + [False], [True] * 4 + [False] * 3, [True] * 7])
    assert np.isfinite(np.asarray(compiled(ids, full, mask))[mask]).all()


def test_what_is_known_is_checked_inside_of_jit_too():
    with pytest.raises(ValueError, match="token ids run from -"):
        jax.jit(lambda carry: jd.forward(net(), IDS - IDS.max() - 1, carry)[0])(carry())
    _, after = jd.forward(net(), IDS, carry())
    with pytest.raises(ValueError, match="19 tokens do not fit the carry's max_length = 16"):
        jax.jit(lambda ids: jd.forward(net(), ids, after)[0])(IDS)
