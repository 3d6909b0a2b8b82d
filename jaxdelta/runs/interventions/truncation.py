"""Truncation: at every boundary S <- U_r U_r^T S, with a rank for every row, linear layer and head."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from jaxdelta.dims import first
from jaxdelta.models.carry import Carry, by_head, full_ranks, stacked, with_stacked
from jaxdelta.ops import low_rank
from jaxdelta.ops.directions import scaled


class TruncateMemory(NamedTuple):
    """What a truncation keeps: ``rank``, Int[L B H]; ``basis``, Float[L B H K Q], the last left singular vectors."""

    rank: Array
    basis: Array


class TruncateRecord(NamedTuple):
    """What was done at one boundary.

    Attributes:
        missed: Float[B], estimated energy missed over energy kept, the largest over layers and heads.
        rounds: Int[], rounds of subspace iteration; 0 for the exact methods, MAX_ROUNDS + 1 where eigh took over.
    """

    missed: Array
    rounds: Array


@dataclass(frozen=True)
class Truncate:
    """Keep the leading singular directions of every state. Supports claims about what later segments read.

    Attributes:
        rank: directions kept, whole numbers that broadcast over [B, L, H] (rows, linear layers in depth order, value
            heads); min(K, V) or more leaves a head untouched. No rank may exceed min(K, V) of stacked states.
        method: see :func:`jaxdelta.ops.low_rank.truncate`, also for the accuracy of each method.
        max_rank: static bound of ``rank``; None takes the largest rank below min(K, V).

    Ranks are checked by ``start``, when a run begins.
    """

    rank: np.ndarray | int = field(compare=False)
    method: low_rank.Method | None = None
    max_rank: int | None = None

    def start(self, carry: Carry, boundaries: Sequence[int] = ()) -> tuple["Truncate", TruncateMemory]:
        """The truncation with its method and ``max_rank`` settled, and its memory before the first boundary.

        Raises:
            ValueError: a rank is not an integer or is out of bounds, or ranks do not broadcast over [B, L, H].
        """
        S, full = stacked(carry), full_ranks(carry)
        directions = min(S.shape[-2:])
        low_rank.check_ranks(self.rank, directions, directions)
        rank = np.asarray(by_head(self.rank, S, np.int32))
        rank = np.where(rank < full[:, None], rank, directions)  # untouched heads of smaller layers too
        max_rank = low_rank.largest_rank(rank, directions) if self.max_rank is None else self.max_rank
        low_rank.check_ranks(rank, directions, max_rank)
        method = self.method or low_rank.choose_method(max_rank, directions)
        basis = low_rank.initial_basis(S.shape, max_rank, method, S.dtype)
        basis = basis if method == "subspace" else basis[..., :0]  # the exact methods start from nothing
        return replace(self, method=method, max_rank=max_rank), TruncateMemory(jnp.asarray(rank), basis)

    def without_gap(self, carry: Carry, memory: TruncateMemory) -> Bool[Array, "L B H"]:
        """Arriving states whose truncation has no exact derivative: no gap after the last kept direction."""
        S = stacked(carry)
        return ~low_rank.has_gap(S, memory.rank) & (memory.rank < min(S.shape[-2:]))

    def frozen(self, carry: Carry, memory: TruncateMemory) -> Carry:
        """The truncated carry; its derivative takes the kept directions as constants."""
        S = stacked(carry)
        directions = min(S.shape[-2:])
        cut = scaled(S, first(memory.rank, directions))
        return with_stacked(carry, jnp.where((memory.rank == directions)[..., None, None], S, cut))

    def __call__(self, carry: Carry, memory: TruncateMemory) -> tuple[Carry, TruncateMemory, TruncateRecord]:
        S = stacked(carry)  # one call: several batched LAPACK calls in one program can deadlock a CPU
        cut = low_rank.truncation(S, memory.rank, method=self.method, max_rank=self.max_rank, basis=memory.basis)
        record = TruncateRecord(jnp.max(cut.missed, axis=(0, 2)), cut.rounds)
        return with_stacked(carry, cut.state), TruncateMemory(memory.rank, cut.basis), record
