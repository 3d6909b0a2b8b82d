"""The Qwen3.5 text model: Gated DeltaNet layers and gated full attention.

Source: the Qwen3.5 model of transformers 5.24 (text part). Norms of the residual stream store an offset from one.
"""

from flax import nnx

from jaxdelta.models.decoder import Decoder
from jaxdelta.nn.gated_attention import GatedAttention
from jaxdelta.nn.gated_deltanet import GatedDeltaNet


class Qwen3_5(Decoder):
    """A Qwen3.5 text model of a ``Qwen3_5Config``."""

    NORM_OFFSET = 1.0

    def mixer(self, layer: int, *, dtype, rngs: nnx.Rngs) -> nnx.Module:
        kind = GatedDeltaNet if self.config.layer_kinds[layer] == "linear" else GatedAttention
        return kind(self.config, dtype=dtype, rngs=rngs)
