"""What does a token do to the states? Its Householder steps and their product, exactly.

    A(x) = alpha_x (I - beta_{x,n} k_{x,n} k_{x,n}^T) ... (I - beta_{x,1} k_{x,1} k_{x,1}^T)

In the first layer of a model, without a short convolution, keys and gates are functions of the token alone, and so is its
transition. Source: the recurrence of ``ops/delta_product.py``.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from jaxdelta.models.decoder import Decoder
from jaxdelta.ops.householder import transition
from jaxdelta.runs.observers import Named
from jaxdelta.runs.segments import Text, iterate


class TokenSteps(NamedTuple):
    """Steps of every token of the vocabulary in the first layer, f64.

    Attributes:
        keys: Float[Y n_h H K], normalised, as the layer uses them.
        beta: Float[Y n_h H], in [0, 2].
        alpha: Float[Y H], in (0, 1].
    """

    keys: np.ndarray
    beta: np.ndarray
    alpha: np.ndarray


def token_steps(model: Decoder) -> TokenSteps:
    """Keys, write strengths and decays of every token.

    Raises:
        ValueError: the first layer is attention, or has a convolution, so that a step depends on more than its token.
    """
    config = model.config
    if config.layer_kinds[0] != "linear" or config.conv_width != 1:
        raise ValueError(
            f"the first layer is {config.layer_kinds[0]} with a convolution of {config.conv_width} taps; "
            "expected linear with 1, where a step depends on its token alone"
        )
    Y = config.vocab_size
    text = Text(np.arange(Y, dtype=np.int32)[:, None].repeat(2, axis=1), np.ones(Y, int), segment=1)
    observer = Named(("k", "beta", "g"), (0,))
    (step,) = iterate(model, text, observers=(observer,))
    (found,) = step.observed
    keys, beta, g = (found[name][0].astype(np.float64) for name in observer.names)
    shape = (Y, config.num_householder, config.linear_of(0).num_value_heads)
    return TokenSteps(keys.reshape(*shape, -1), beta.reshape(shape), np.exp(g[:, 0]))


def transitions(steps: TokenSteps) -> Float[np.ndarray, "Y H K K"]:
    """A(x) of every token and head, f64; acts on S from the left."""
    return transition(np.moveaxis(steps.keys, 1, 2), np.moveaxis(steps.beta, 1, 2), steps.alpha, unit=False)
