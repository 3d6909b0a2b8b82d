"""A random model of the full Qwen3.5-0.8B size, for figures that depend on sizes alone."""

from pathlib import Path

import jax.numpy as jnp
from flax import nnx

import jaxdelta as jd

FULL_SIZE = jd.Qwen3_5Config(
    vocab_size=248320,
    width=1024,
    mlp_width=3584,
    layer_kinds=("linear", "linear", "linear", "attention") * 6,
    num_key_heads=16,
    num_value_heads=16,
    key_dim=128,
    value_dim=128,
    conv_width=4,
    num_query_heads=8,
    num_kv_heads=2,
    head_dim=256,
    rotary_dim=64,
    max_position=262144,
)


def random_model(dtype: str = "float32", seed: int = 0) -> jd.Qwen3_5:
    """752,393,024 random parameters."""
    return jd.Qwen3_5(FULL_SIZE, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(seed))


def checkpoint(folder: Path) -> Path:
    """The model as a checkpoint in ``folder`` (3 GB), written where it is not there yet."""
    if not (folder / "model.safetensors").exists():
        jd.save(random_model(), folder)
    return folder
