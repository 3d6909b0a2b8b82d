"""A carry that was kept elsewhere and comes back: whole and in the model's layout, or refused by what is wrong with it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdelta as jd
from tests.tiny import model, tokens

KINDS = ("linear", "attention", "linear")
IDS = tokens(9)[0][None]


def net():
    return model(layer_kinds=KINDS)


def kept(batch=1):
    _, carry = jd.forward(net(), np.repeat(IDS, batch, 0), jd.init_carry(net(), batch, 20))
    return carry


def with_layer(index, **changes):
    carry = kept()
    layers = list(carry.layers)
    layers[index] = layers[index]._replace(**changes)
    return carry._replace(layers=tuple(layers))


def S():
    return kept().layers[2].S


WRONG = {
    "no S": (
        lambda: with_layer(2, S=None),
        r"S of layer 2 \(linear\) of .* is None; expected float32 \[1, 6, 8, 11\]",
    ),
    "no tail": (
        lambda: with_layer(0, tail=None),
        r"tail of layer 0 \(linear\) of the carry is None",
    ),
    "no keys": (
        lambda: with_layer(1, keys=None),
        r"keys of layer 1 \(attention\) of the carry is None",
    ),
    "no values": (lambda: with_layer(1, values=None), r"values of layer 1 \(attention\) of the carry is None"),
    "fewer values": (
        lambda: with_layer(1, values=kept().layers[1].values[:, :10]),
        r"values of layer 1 .* float32\[1, 10,",
    ),
    "no position": (lambda: kept()._replace(position=None), r"position of the carry is None; expected int32 \[B\]"),
    "one position": (lambda: kept()._replace(position=np.int32(9)), "position of the carry is"),
    "a layer less": (lambda: kept()._replace(layers=kept().layers[1:]), "the carry has 2 layers, the model 3"),
    "layers in another order": (lambda: kept()._replace(layers=kept().layers[::-1][:1] + kept().layers[:2]), "layer 1 of"),
    "a layer of None": (lambda: kept()._replace(layers=(*kept().layers[:2], None)), "layer 2 of the carry is None"),
    "axes in another order": (
        lambda: with_layer(2, S=jnp.swapaxes(S(), -1, -2)),
        r"S of layer 2 .* float32\[1, 6, 11, 8\]",
    ),
    "no batch axis": (lambda: with_layer(2, S=S()[0]), r"S of layer 2 .* is float32\[6, 8, 11\]"),
    "another dtype": (lambda: with_layer(2, S=S().astype(jnp.bfloat16)), r"S of layer 2 .* is bfloat16\[1, 6, 8, 11\]"),
    "another batch": (lambda: with_layer(2, S=jnp.repeat(S(), 2, 0)), r"S of layer 2 .* is float32\[2, 6, 8, 11\]"),
    "a list": (lambda: with_layer(2, S=np.asarray(S()).tolist()), r"S of layer 2 .* is a list; expected float32"),
    "another model's": (
        lambda: jd.init_carry(model(layer_kinds=KINDS, num_value_heads=4, num_key_heads=2), 1, 20),
        r"S of layer 0 \(linear\) of the carry is float32\[1, 4, 8, 11\]; expected float32 \[1, 6, 8, 11\]",
    ),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["", "jit"])
@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG)
def test_a_carry_that_lacks_something_is_refused_by_name(case, compiled):
    make, message = case
    carry = make()
    with pytest.raises(ValueError, match=message):
        if compiled:
            jax.jit(lambda ids: jd.forward(net(), ids, carry))(IDS)
        else:
            jd.forward(net(), IDS, carry)


def test_states_of_a_carry_without_one_are_refused():
    for use in (jd.states, lambda carry: jd.with_states(carry, jd.states(kept()))):
        with pytest.raises(ValueError, match="S of layer 2 of the carry is None"):
            use(with_layer(2, S=None))


def test_a_carry_kept_as_numpy_arrays_goes_on():
    host = jax.tree.map(np.asarray, kept())
    expected, found = (jd.forward(net(), IDS, carry)[0] for carry in (kept(), host))
    np.testing.assert_array_equal(found, expected)
