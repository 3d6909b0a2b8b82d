"""Choices that differ between devices, made once for each model.

They change results by rounding only. They are part of the key of every compiled program and of the manifest of every
results folder, so a program for a GPU can be lowered on a machine without one.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

import jax

from jaxdelta.ops.delta_rule import CHUNK_SIZE


@dataclass(frozen=True)
class Implementation:
    """How a model is computed on a device.

    Attributes:
        chunk_size: writes in a chunk of the delta rule.
        attention: "together" computes all texts and groups of heads in one product; "one by one" takes one text and group
            at a time, because on a CPU the backward pass of a batched product copies the transposed scores.

    Raises:
        ValueError: ``chunk_size`` is below 1, or ``attention`` is unknown.
    """

    chunk_size: int = CHUNK_SIZE
    attention: Literal["together", "one by one"] = "together"

    def __post_init__(self):
        if self.chunk_size < 1 or self.attention not in ("together", "one by one"):
            raise ValueError(f"{self}; expected a chunk_size of at least 1 and attention 'together' or 'one by one'")

    def described(self) -> dict[str, Any]:
        """JSON value for the manifest of a results folder."""
        return asdict(self)


FOR_CPU = Implementation(chunk_size=32, attention="one by one")
FOR_GPU = Implementation()


def implementation_here() -> Implementation:
    """The faster implementation on jax's default device."""
    return FOR_CPU if jax.default_backend() == "cpu" else FOR_GPU
