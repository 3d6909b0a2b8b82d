"""The Qwen3.5 text model: Gated DeltaNet layers and gated full attention.

Source: the Qwen3.5 model of transformers 5.24 (text part). Norms of the residual stream store their scale's
offset from one.
"""

from flax import nnx

from jaxdelta.models.decoder import Decoder
from jaxdelta.nn.gated_attention import GatedAttention
from jaxdelta.nn.gated_deltanet import GatedDeltaNet


class Qwen3_5(Decoder):
    """A Qwen3.5 text model with a ``Qwen3_5Config``."""

    NORM_OFFSET = 1.0

    def mixer(self, layer: int, *, dtype, rngs: nnx.Rngs) -> nnx.Module:
        c = self.config
        if c.layer_kinds[layer] == "linear":
            return GatedDeltaNet(c.linear_of(layer), dtype=dtype, rngs=rngs)
        return GatedAttention(c.width, c.attention_of(layer), c.norm_eps, dtype=dtype, rngs=rngs)
