"""Forms in which a state may be stored: rounded to another dtype, or as factors of few directions.

With :class:`~jaxdelta.runs.interventions.perturbations.Quantise` and
:class:`~jaxdelta.runs.interventions.truncation.Truncate` these are what serving engines do to carried states.
"""

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp

from jaxdelta.arguments import whole_number
from jaxdelta.dims import matmul
from jaxdelta.ops.directions import directions
from jaxdelta.runs.interventions.perturbations import Perturbation, quantised, straight_through

Stored = Literal["bf16", "f16"]
DTYPES = {"bf16": jnp.bfloat16, "f16": jnp.float16}


@dataclass(frozen=True)
class Round(Perturbation):
    """Round each entry of the state to a dtype of 16 bits. Derivatives pass straight through.

    Attributes:
        stored: "bf16" or "f16", whose largest number is 65,504: beyond it a state becomes infinite.
    """

    stored: Stored

    def prepare(self, S):
        if self.stored not in DTYPES:
            raise ValueError(f"stored is {self.stored!r}; expected one of {', '.join(DTYPES)}")

    def change(self, S, own, index):
        return straight_through(S, S.astype(DTYPES[self.stored]).astype(S.dtype)), own


@dataclass(frozen=True)
class Factors(Perturbation):
    """Keep ``rank`` directions as two factors, U and diag(sigma) V^T, and round these. Derivatives pass straight through.

    Attributes:
        rank: directions kept, 1 .. min(K, V).
        stored: "bf16" or "f16", or a number of bits, 2 .. 16: each direction of each factor then has a scale of its own.
    """

    rank: int
    stored: Stored | int

    def prepare(self, S):
        most = min(S.shape[-2:])
        if not 1 <= whole_number("rank", self.rank) <= most:
            raise ValueError(f"rank is {self.rank}; expected 1 to min(K, V) = {most}")
        if self.stored not in DTYPES and not 2 <= whole_number("stored", self.stored) <= 16:
            raise ValueError(f"stored is {self.stored!r}; expected {', '.join(DTYPES)} or 2 to 16 bits")

    def change(self, S, own, index):
        U, _, right = directions(S)
        U, right = U[..., : self.rank], right[..., : self.rank, :]
        if self.stored in DTYPES:
            U, right = (x.astype(DTYPES[self.stored]).astype(S.dtype) for x in (U, right))
        else:
            U, right = quantised(U, self.stored, (-2,)), quantised(right, self.stored, (-1,))
        return straight_through(S, matmul(U, right)), own
