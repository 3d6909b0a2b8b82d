"""A random model of the full Qwen3.5-0.8B size, for figures that depend on sizes alone."""

from pathlib import Path

import jax.numpy as jnp
from flax import nnx

import jaxdelta as jd

FULL_SIZE = jd.Qwen3_5Config.size_0_8b()


def random_model(dtype: str = "float32", seed: int = 0) -> jd.Qwen3_5:
    """752,393,024 random parameters."""
    return jd.Qwen3_5(FULL_SIZE, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(seed))


def checkpoint(folder: Path) -> Path:
    """The model as a checkpoint in ``folder`` (3 GB), written where it is not there yet."""
    if not (folder / "model.safetensors").exists():
        jd.save(random_model(), folder)
    return folder
