"""Conversion of a linear layer of flash-linear-attention, both ways, by the key table of whole checkpoints."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxdelta.checkpoints import delta_lm
from jaxdelta.checkpoints.key_table import Entry, match
from jaxdelta.models.config import DeltaLMConfig
from jaxdelta.nn.gated_deltaproduct import GatedDeltaProduct

FOLDER = "layers.0.attn."


def layer_config(family: str, options: dict) -> DeltaLMConfig:
    """Sizes of a layer from the arguments of fla's.

    ``options`` must have all arguments whose defaults differ between fla's layers and its configurations. Value
    heads of DeltaProduct may share a key head in fla's layers, but not in its configurations.
    """
    config = delta_lm.config_from_json({"model_type": family, "num_hidden_layers": 1, **options})
    return replace(config, num_value_heads=options.get("num_v_heads") or config.num_key_heads)


def to_jaxdelta(config: DeltaLMConfig, tensors: dict[str, np.ndarray]) -> GatedDeltaProduct:
    """The layer with the parameters ``tensors``, by fla's names.

    Raises:
        CheckpointError: tensors are missing, or do not belong to the layer.
    """
    entries = _entries(config)
    match({entry: (name,) for name, entry in entries.items()}, set(tensors))
    layer = GatedDeltaProduct(config.linear_of(0), dtype=jnp.float32, rngs=nnx.Rngs(0))
    for name, entry in entries.items():
        parameter = getattr(layer, entry.path[-1])
        parameter[...] = jnp.asarray(tensors[name].reshape(parameter.shape))
    return layer


def to_fla(config: DeltaLMConfig, layer: GatedDeltaProduct) -> dict[str, np.ndarray]:
    """The parameters of a layer by fla's names."""
    entries = _entries(config).items()
    return {name: np.asarray(getattr(layer, entry.path[-1])[...]).reshape(entry.shape) for name, entry in entries}


def _entries(config: DeltaLMConfig) -> dict[str, Entry]:
    one = replace(config, layer_kinds=("linear",), attention=())
    entries = (entry for entry in delta_lm.entries(one) if entry.name.startswith(FOLDER))
    return {entry.name.removeprefix(FOLDER): entry for entry in entries}
