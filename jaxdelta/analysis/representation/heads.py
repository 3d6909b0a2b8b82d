"""Which head tracks the state? Accuracy without each head, and with each head alone."""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxdelta.analysis.sensitivity.ablation import without_outputs
from jaxdelta.models.decoder import Decoder
from jaxdelta.runs.observers import Seen
from jaxdelta.runs.segments import Text, iterate


class HeadAccuracy(NamedTuple):
    """Token accuracies, in [0, 1], of a one-layer model with ablated head outputs.

    Attributes:
        untouched: of the model itself.
        without: Float[H], with the output of this head set to zero.
        alone: Float[H], with the outputs of all other heads set to zero.
    """

    untouched: float
    without: np.ndarray
    alone: np.ndarray


@dataclass(frozen=True)
class LikeliestTokens:
    """The token with the largest logit at each position, Int[B T]."""

    names = ()

    def __call__(self, seen: Seen) -> Int[Array, "B T"]:
        return jnp.argmax(seen.model.logits(seen.hidden), axis=-1)


def head_accuracies(model: Decoder, tokens: Int[np.ndarray, "B T"], targets: Int[np.ndarray, "B T"]) -> HeadAccuracy:
    """Accuracies without each head and with each head alone; ``targets`` are the right answers after each token.

    Raises:
        ValueError: the model is not a single linear layer.
    """
    if model.config.layer_kinds != ("linear",):
        raise ValueError(f"layers are {model.config.layer_kinds}; expected one linear layer")
    H = model.config.linear_of(0).num_value_heads
    lost = np.concatenate([np.zeros((1, H)), np.eye(H), 1 - np.eye(H)]).astype(bool)
    B, T = tokens.shape
    text = Text(np.pad(tokens, ((0, 0), (0, 1))), np.full(B, T), segment=T)
    found = []
    for heads in lost:
        edits = without_outputs(model.config, np.broadcast_to(heads, (B, 1, H)))
        (step,) = iterate(model, text, observers=(LikeliestTokens(),), edits=edits)
        found.append(np.mean(step.observed[0] == targets))
    return HeadAccuracy(float(found[0]), np.array(found[1 : 1 + H]), np.array(found[1 + H :]))
