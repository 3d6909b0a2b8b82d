"""Several interventions at every boundary, one after the other."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp
from jaxtyping import Array, Bool

from jaxdelta.models.carry import Carry, stacked
from jaxdelta.runs.interventions.contract import Intervention, check_intervention, started


@dataclass(frozen=True)
class Sequential:
    """Apply ``parts`` in order. Supports the claims that all parts support together.

    Raises:
        TypeError: a part is not an intervention.
    """

    parts: Sequence[Intervention]

    def __post_init__(self):
        object.__setattr__(self, "parts", tuple(self.parts))
        for part in self.parts:
            check_intervention(part)

    def start(self, carry: Carry, boundaries: Sequence[int] = ()) -> tuple["Sequential", tuple]:
        """Start every part with the same carry; see :class:`~jaxdelta.runs.interventions.contract.Intervention`."""
        begun = [started(part, carry, boundaries) for part in self.parts]
        return replace(self, parts=tuple(part for part, _ in begun)), tuple(memory for _, memory in begun)

    def __call__(self, carry: Carry, memory: tuple) -> tuple[Carry, tuple, tuple]:
        kept, records = [], []
        for part, own in zip(self.parts, memory, strict=True):
            carry, own, record = part(carry, own)
            kept.append(own)
            records.append(record)
        return carry, tuple(kept), tuple(records)

    def frozen(self, carry: Carry, memory: tuple) -> Carry:
        """The carry after all parts; parts with a ``frozen`` method take their directions as constants."""
        for part, own in zip(self.parts, memory, strict=True):
            carry = part.frozen(carry, own) if hasattr(part, "frozen") else part(carry, own)[0]
        return carry

    def without_gap(self, carry: Carry, memory: tuple) -> Bool[Array, "L B H"]:
        """Arriving states at which the exact derivative of some part does not exist."""
        found = jnp.zeros(stacked(carry).shape[:3], bool)
        for part, own in zip(self.parts, memory, strict=True):
            found = found | part.without_gap(carry, own) if hasattr(part, "without_gap") else found
            carry = part(carry, own)[0]
        return found
