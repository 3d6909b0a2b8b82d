"""Which head tracks the state? Accuracy without each head, and with each head alone."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxdelta.models.decoder import Decoder
from jaxdelta.tasks.state_tracking import Words


class HeadAccuracy(NamedTuple):
    """Token accuracies of a one-layer model under ablation of heads' outputs.

    Attributes:
        untouched: of the model as it is.
        without: Float[H], with one head's output zero.
        alone: Float[H], with the output of all others zero.
    """

    untouched: float
    without: np.ndarray
    alone: np.ndarray


def head_accuracies(model: Decoder, words: Words) -> HeadAccuracy:
    """Ablate each head of the first layer.

    Raises:
        ValueError: the model has more than one layer, or that is attention.
    """
    if model.config.layer_kinds != ("linear",):
        raise ValueError(f"layers are {model.config.layer_kinds}; expected one linear layer")
    H = model.config.num_value_heads
    factors = np.concatenate([np.ones((1, H)), 1 - np.eye(H), np.eye(H)])
    graphdef, params = nnx.split(model)
    named = _named(graphdef, params, words.tokens, factors)
    accuracy = np.mean(np.asarray(named) == words.targets, axis=(1, 2))
    return HeadAccuracy(float(accuracy[0]), accuracy[1 : 1 + H], accuracy[1 + H :])


@partial(jax.jit, static_argnums=0)
def _named(graphdef, params, tokens, factors):
    """The words named under each row of factors on heads' outputs, [X B T]."""
    model = nnx.merge(graphdef, params)

    def named(factor):
        (probe,) = model.probes(*tokens.shape)
        probe = probe._replace(output=jnp.broadcast_to(factor, probe.output.shape).astype(probe.output.dtype))
        out = model(tokens, model.init_carry(*tokens.shape), None, (probe,))
        return jnp.argmax(model.logits(out.hidden), axis=-1)

    return jax.lax.map(named, factors)
