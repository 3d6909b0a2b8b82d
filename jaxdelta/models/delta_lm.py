"""The DeltaNet, Gated DeltaNet and Gated DeltaProduct models of flash-linear-attention, with or without attention layers.

Source: flash-linear-attention 0.6. Norms store the scale itself, not its offset from one.
"""

from flax import nnx

from jaxdelta.models.decoder import Decoder
from jaxdelta.nn.attention import Attention
from jaxdelta.nn.gated_deltaproduct import GatedDeltaProduct


class DeltaLM(Decoder):
    """A model with a ``DeltaLMConfig``."""

    NORM_OFFSET = 0.0

    def mixer(self, layer: int, *, dtype, rngs: nnx.Rngs) -> nnx.Module:
        if self.config.layer_kinds[layer] == "linear":
            return GatedDeltaProduct(self.config.linear_of(layer), dtype=dtype, rngs=rngs)
        return Attention(self.config.width, self.config.attention_of(layer), dtype=dtype, rngs=rngs)
