"""How the same numbers are computed on one device and on another: one choice, made where a model is made.

None of it changes a result by more than rounding. The choice is part of the key of every compiled program and of the
manifest of every run, so a program for a GPU can be lowered on a machine that has none.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

import jax

from jaxdelta.ops.delta_rule import CHUNK_SIZE


@dataclass(frozen=True)
class Implementation:
    """What is chosen by device.

    Attributes:
        chunk_size: writes of a chunk of the delta rule.
        attention: "together" attends with all texts and groups of heads in one product; "one by one" takes a text and a
            group at a time, since of a product with leading axes XLA copies the transposed scores, backward, on a CPU.

    Raises:
        ValueError: a chunk of no write, or an attention of another name.
    """

    chunk_size: int = CHUNK_SIZE
    attention: Literal["together", "one by one"] = "together"

    def __post_init__(self):
        if self.chunk_size < 1 or self.attention not in ("together", "one by one"):
            raise ValueError(f"{self}; expected a chunk_size of at least 1 and attention 'together' or 'one by one'")

    def described(self) -> dict[str, Any]:
        """JSON value for the manifest of a run."""
        return asdict(self)


FOR_CPU = Implementation(chunk_size=32, attention="one by one")
FOR_GPU = Implementation()


def implementation_here() -> Implementation:
    """The faster one for the device that jax uses by default."""
    return FOR_CPU if jax.default_backend() == "cpu" else FOR_GPU
