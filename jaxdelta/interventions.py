"""Interventions on the carried state at boundaries.

An intervention maps (carry, memory) to (carry, memory, record). Its memory holds all its arrays: what it was asked for (the
ranks) and what it keeps between boundaries (a warm-start basis), none of which is part of the model. The object itself is
hashable and holds only what shapes the compiled program, so that runs which differ in ranks alone share one.

Every row of the batch is a world of its own: a document under its own rank array over [layer, head].
"""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxdelta.models.decoder import Carry, states, with_states
from jaxdelta.ops import low_rank


@runtime_checkable
class Intervention(Protocol):
    """What a segmented run asks of an intervention."""

    def start(self, carry: Carry) -> tuple["Intervention", Any]:
        """The intervention with all that shapes the compiled program settled, and the memory before the first boundary."""
        ...

    def __call__(self, carry: Carry, memory: Any) -> tuple[Carry, Any, Any]:
        """The carry handed on, the memory kept, and a record of what was done."""
        ...


class TruncateMemory(NamedTuple):
    """``rank``: Int[L B H]; ``basis``: Float[L B H K Q], left singular vectors at the last boundary."""

    rank: Array
    basis: Array


class TruncateRecord(NamedTuple):
    """What one boundary did.

    Attributes:
        missed: Float[B], worst estimate over heads of the energy missed by the kept directions, over the energy kept.
        rounds: Int[], rounds of subspace iteration; MAX_ROUNDS + 1 says that eigh took over.
    """

    missed: Array
    rounds: Array


@dataclass(frozen=True)
class Truncate:
    """Keep the leading singular directions of every state; what a segment reads of the text before it is what it can claim.

    Attributes:
        rank: directions kept, an int array broadcast over [B, L, H] (rows, linear layers in depth order, value heads);
            min(K, V) leaves a head untouched.
        method: see :func:`jaxdelta.ops.low_rank.truncate`.
        max_rank: static bound of ``rank``; None takes the largest rank below min(K, V).

    Raises:
        ValueError: from ``start``, for a rank out of bounds.
    """

    rank: np.ndarray | int = field(compare=False)
    method: low_rank.Method | None = None
    max_rank: int | None = None

    def start(self, carry: Carry) -> tuple["Truncate", TruncateMemory]:
        L, (B, H, K, V) = len(states(carry)), states(carry)[0].shape
        max_rank = low_rank.largest_rank(self.rank, min(K, V)) if self.max_rank is None else self.max_rank
        low_rank.check_ranks(self.rank, min(K, V), max_rank)
        method = self.method or low_rank.choose_method(max_rank, min(K, V))
        rank = np.moveaxis(np.broadcast_to(np.asarray(self.rank, np.int32), (B, L, H)), 0, 1)
        basis = low_rank.initial_basis((L, B, H, K, V), max_rank, method, states(carry)[0].dtype)
        basis = basis if method == "subspace" else basis[..., :0]  # the exact methods start from nothing
        return replace(self, method=method, max_rank=max_rank), TruncateMemory(jnp.asarray(rank), basis)

    def __call__(self, carry: Carry, memory: TruncateMemory) -> tuple[Carry, TruncateMemory, TruncateRecord]:
        S = jnp.stack(states(carry))  # one call: several batched LAPACK calls in one program can deadlock a CPU
        cut = low_rank.truncation(S, memory.rank, method=self.method, max_rank=self.max_rank, basis=memory.basis)
        record = TruncateRecord(jnp.max(cut.missed, axis=(0, 2)), cut.rounds)
        return with_states(carry, list(cut.state)), TruncateMemory(memory.rank, cut.basis), record
