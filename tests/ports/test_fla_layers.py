"""The JAX layer computes what fla's three layers do, in two segments: outputs, states and convolution tails after each."""

import jax.numpy as jnp
import numpy as np
import pytest

from ports.compare import relative_error
from ports.fla.conversion import layer_config, to_fla, to_jaxdelta
from tests.helpers import mix
from tests.ports.fla_cases import LAYER_SEGMENTS, LAYERS, layer_inputs, read_arrays

BOUND = 1e-5

pytestmark = pytest.mark.timeout(900)  # the first test waits for fla


@pytest.fixture
def layer_and_reference(fla_layers, case):
    options, expected = LAYERS[case], read_arrays(fla_layers / f"{case}.npz")
    config = layer_config(options.family, options.options)
    tensors = {name.removeprefix("weight "): expected[name] for name in expected if name.startswith("weight ")}
    return config, to_jaxdelta(config, tensors), tensors, expected


@pytest.mark.parametrize("case", LAYERS)
def test_two_segments(layer_and_reference, case):
    _, layer, _, expected = layer_and_reference
    x, mask = layer_inputs(LAYERS[case])
    mask = np.ones(x.shape[:2], bool) if mask is None else mask
    carry, begin = layer.init_carry(len(x), 1, jnp.float32), 0
    for i, T in enumerate(LAYER_SEGMENTS):
        text = mask[:, begin : begin + T]
        segment = jnp.asarray(to_the_left(x[:, begin : begin + T], text))
        y, carry = mix(layer, segment, carry, None, None if mask.all() else jnp.asarray(text.sum(1)))
        found = np.asarray(y)[to_the_left(text, text)]
        assert relative_error(found, expected[f"{i} y"][text]) < BOUND
        assert relative_error(carry.S, expected[f"{i} S"]) < BOUND
        assert relative_error(carry.tail, expected[f"{i} tail"]) < BOUND
        begin += T


def to_the_left(x: np.ndarray, text: np.ndarray) -> np.ndarray:
    """Rows with their padding moved from the left to the right, where this library's layers have it."""
    return np.stack([np.roll(row, -int((~padded).sum()), axis=0) for row, padded in zip(x, text, strict=True)])


@pytest.mark.parametrize("case", LAYERS)
def test_there_and_back(layer_and_reference, case):
    config, layer, tensors, _ = layer_and_reference
    back = to_fla(config, layer)
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(back[name], tensor)
