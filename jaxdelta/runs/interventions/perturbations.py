"""Perturbations of the carried states: scale, project, zero, filter, quantise, replace by noise, swap.

Each acts on chosen heads at chosen boundaries; :class:`NoOp` is the control that changes nothing.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxdelta.arguments import shown, whole_number
from jaxdelta.dims import HIGHEST, AnyArray, first
from jaxdelta.models.carry import Carry, by_head, stacked, states, with_stacked
from jaxdelta.ops.directions import scaled
from jaxdelta.ops.soft_filter import soft_filter
from jaxdelta.ops.spectra import singular_values


def quantised(x: Array, bits: int, axes: tuple[int, ...]) -> Array:
    """``x`` rounded to ``bits``, symmetric about zero, with the largest magnitude over ``axes`` as scale."""
    levels = 2.0 ** (bits - 1) - 1
    largest = jnp.max(jnp.abs(x), axis=axes, keepdims=True)
    step = jnp.where(largest > 0, largest, 1) / levels
    return jnp.round(x / step) * step


def straight_through(S: Array, rounded: Array) -> Array:
    """``rounded``, with the derivative of S."""
    return S + jax.lax.stop_gradient(rounded - S)


class PerturbationMemory(NamedTuple):
    """Arrays that a perturbation keeps between boundaries.

    Attributes:
        index: Int[], index of this boundary, from 0.
        where: Bool[L B H], heads to change.
        at: Int[n], indices of the boundaries; -1 is all.
        own: what ``prepare`` and ``change`` return.
    """

    index: Array
    where: Array
    at: Array
    own: Any


@dataclass(frozen=True)
class Perturbation:
    """A map of the states, applied to chosen heads at chosen boundaries.

    A subclass defines ``change``, and ``prepare`` if it has values of its own.

    Attributes:
        where: Bool, broadcasts over [B, L, H] (rows, linear layers in depth order, value heads); True for heads to change.
        at: one boundary or several, in tokens seen; None is all.

    Errors in values are raised by ``start``, when a run begins.
    """

    where: np.ndarray | bool = field(default=True, compare=False, kw_only=True)
    at: int | Sequence[int] | None = field(default=None, compare=False, kw_only=True)

    def start(self, carry: Carry, boundaries: Sequence[int] = ()) -> tuple["Perturbation", PerturbationMemory]:
        """The perturbation itself, and its memory before the first boundary.

        Args:
            carry: the first carry of the run.
            boundaries: of the run, in tokens seen.

        Raises:
            TypeError: ``where`` is not Bool, or ``at`` is not whole numbers.
            ValueError: the run has no such boundary, or ``where`` or the values of a subclass do not fit the states.
        """
        S = stacked(carry)
        chosen = np.asarray(self.where)
        if chosen.dtype != bool:
            raise TypeError(f"where is {shown(self.where)}; expected Bool [B, L, H], True for the heads to change")
        where = by_head(chosen, S, bool)
        at = jnp.asarray([-1] if self.at is None else indices(self.at, boundaries), jnp.int32)
        return self, PerturbationMemory(jnp.zeros((), jnp.int32), where, at, self.prepare(S))

    def __call__(self, carry: Carry, memory: PerturbationMemory) -> tuple[Carry, PerturbationMemory, None]:
        S = stacked(carry)
        here = jnp.any((memory.at == memory.index) | (memory.at < 0))
        chosen = (memory.where & here)[..., None, None]
        changed, own = self.change(S, memory.own, memory.index)
        # The memory of a head advances only where the head was changed.
        own = jax.tree.map(lambda new, old: old if new is old else jnp.where(chosen, new, old), own, memory.own)
        S = jnp.where(chosen, changed, S)
        return with_stacked(carry, S), memory._replace(index=memory.index + 1, own=own), None

    def prepare(self, S: Array) -> Any:
        """The initial ``own`` of :meth:`change`, for stacked states S [L, B, H, K, V] before the first boundary.

        Fields declared ``compare=False`` are read here; ``change`` cannot read them.

        Raises:
            ValueError: the values of the fields do not fit the states.
        """
        return None

    def change(self, S: Array, own: Any, index: Array) -> tuple[Array, Any]:
        """The perturbed states [L, B, H, K, V], and ``own`` for the next boundary: unchanged, or new arrays [L, B, H, ...].

        ``index`` is Int[], the index of the boundary.
        """
        raise NotImplementedError


def indices(at: int | Sequence[int], boundaries: Sequence[int]) -> list[int]:
    """The index in ``boundaries`` of each boundary in ``at``; both are in tokens seen.

    Raises:
        ValueError: ``at`` is empty, or the run has no such boundary.
        TypeError: ``at`` is not whole numbers.
    """
    wanted = [operator.index(x) for x in (at if np.iterable(at) else [at])]
    if not wanted:
        raise ValueError("at is empty, and nothing would change; name boundaries in tokens seen, or take NoOp")
    found = [int(x) for x in boundaries]
    missing = [x for x in wanted if x not in found]
    if missing:
        run = f"{found[0]} to {found[-1]}, every {found[0]} tokens" if found else "none"
        raise ValueError(
            f"at is {wanted}, in tokens seen; the run has no boundary at {missing[0]}: its boundaries are {run}"
        )
    return [found.index(x) for x in wanted]


@dataclass(frozen=True)
class NoOp(Perturbation):
    """Change nothing: the control that only has the boundaries."""

    def change(self, S, own, index):
        return S, own


@dataclass(frozen=True)
class Zero(Perturbation):
    """Empty the state: the next segment starts from zeros."""

    def change(self, S, own, index):
        return jnp.zeros_like(S), own


@dataclass(frozen=True)
class Scale(Perturbation):
    """Multiply singular directions by factors; accurate in the faint directions too.

    Derivatives take the directions as constants (frozen basis).

    Attributes:
        factors: Float, broadcasts over [B, L, H, min(K, V)], the largest sigma first.
    """

    factors: AnyArray = field(compare=False)

    def prepare(self, S):
        directions = min(S.shape[-2:])
        factors = np.asarray(self.factors, S.dtype)
        if factors.ndim < 1 or factors.shape[-1] not in (1, directions):
            raise ValueError(f"factors have shape {factors.shape}; expected [B, L, H, {directions}]")
        L, B, H = S.shape[:3]
        return jnp.asarray(np.moveaxis(np.broadcast_to(factors, (B, L, H, directions)), 0, 1))

    def change(self, S, own, index):
        return scaled(S, own), own


@dataclass(frozen=True)
class Project(Perturbation):
    """Project onto the span of given key directions: S <- Q Q^T S for orthonormal columns Q.

    Attributes:
        basis: Float[B L H K Q], columns orthonormal to 1e-4; B, L and H may be 1.
    """

    basis: AnyArray = field(compare=False)

    def prepare(self, S):
        K = S.shape[3]
        basis = np.asarray(self.basis, S.dtype)
        if basis.ndim != 5 or basis.shape[3] != K:
            raise ValueError(f"basis has shape {basis.shape}; expected [B, L, H, {K}, Q]")
        error = np.abs(np.swapaxes(basis, -1, -2) @ basis - np.eye(basis.shape[-1])).max()
        if error > 1e-4:
            raise ValueError(f"columns of basis are not orthonormal: Q^T Q is off the identity by {error:.2g}")
        return by_head(basis, S, S.dtype)

    def change(self, S, own, index):
        return jnp.einsum("...ki,...ji,...jv->...kv", own, own, S, precision=HIGHEST), own


@dataclass(frozen=True)
class Filter(Perturbation):
    """The soft spectral filter, see :mod:`jaxdelta.ops.soft_filter`.

    Attributes:
        tau: > 0, in units of sigma^2; broadcasts over [B, L, H].
    """

    tau: AnyArray | float = field(compare=False)

    def prepare(self, S):
        if np.min(self.tau) <= 0:
            raise ValueError(f"tau is {np.min(self.tau)}; expected above 0")
        return by_head(self.tau, S, S.dtype)

    def change(self, S, own, index):
        return soft_filter(S, own), own


@dataclass(frozen=True)
class Noise(Perturbation):
    """Replace each state by one of the same spectrum with Haar random singular vectors, drawn anew at every boundary.

    A control for truncation: a state of the same spectrum without its information.

    Attributes:
        seed: 0 .. 2^32 - 1. The noise does not depend on jax's settings.
    """

    seed: int = field(default=0, compare=False)

    def prepare(self, S):
        seed = whole_number("seed", self.seed)
        if not 0 <= seed < 2**32:
            raise ValueError(f"seed is {seed}; expected 0 to 2^32 - 1, of which jax's settings take the same bits")
        return jax.random.key(seed, impl="threefry2x32")  # the same noise whatever jax's settings

    def start(self, carry, boundaries=()):
        settled, memory = super().start(carry, boundaries)
        sizes = jnp.array([S.shape[-2:] for S in states(carry)])  # K and V of each layer
        return settled, memory._replace(own=(memory.own, sizes))

    def change(self, S, own, index):
        (key, sizes), (K, V) = own, S.shape[-2:]
        n = min(K, V)
        sigma = singular_values(S)
        # One factorization for both sides: several in one program can deadlock a CPU. Padded rows are zero.
        with jax.threefry_partitionable(True):
            gauss = jax.random.normal(jax.random.fold_in(key, index), (2, *S.shape[:-2], max(K, V), n), S.dtype)
        rows = first(sizes.T, max(K, V)).reshape(2, len(S), *(1,) * (S.ndim - 3), max(K, V), 1)
        gauss, sigma = jax.lax.optimization_barrier((jnp.where(rows, gauss, 0), sigma))
        Q, R = jnp.linalg.qr(gauss)
        Q = Q * jnp.sign(jnp.diagonal(R, axis1=-2, axis2=-1))[..., None, :]
        return jnp.einsum("...ki,...i,...vi->...kv", Q[0, ..., :K, :], sigma, Q[1, ..., :V, :], precision=HIGHEST), own


@dataclass(frozen=True)
class Quantise(Perturbation):
    """Round each state to few bits, symmetric about zero, with its largest absolute entry as scale.

    Derivatives pass straight through the rounding.

    Attributes:
        bits: 2 .. 16.
        error_feedback: add the error of the last rounding before the next one.
    """

    bits: int
    error_feedback: bool = False

    def prepare(self, S):
        if not 2 <= self.bits <= 16:
            raise ValueError(f"bits is {self.bits}; expected 2 to 16")
        return jnp.zeros_like(S) if self.error_feedback else None

    def change(self, S, own, index):
        wanted = S if own is None else S + own
        rounded = quantised(wanted, self.bits, (-2, -1))
        error = None if own is None else jax.lax.stop_gradient(wanted - rounded)
        return straight_through(wanted, rounded), error


@dataclass(frozen=True)
class Swap(Perturbation):
    """Replace the states by given ones, for example those of another run.

    Attributes:
        states: Float[N-1 L B H K V], stacked states for each of the N - 1 boundaries, or one entry for all; other axes may
            be 1. If there are several, but fewer than boundaries, later states are NaN and the run raises NonFiniteError.
    """

    states: AnyArray = field(compare=False)

    def prepare(self, S):
        other = jnp.array(self.states, S.dtype)  # a copy: runs donate what they keep
        try:
            return jnp.broadcast_to(other, (other.shape[0], *S.shape))
        except ValueError:
            raise ValueError(f"states have shape {other.shape}; expected [N-1, {', '.join(map(str, S.shape))}]") from None

    def change(self, S, own, index):
        if len(own) == 1:
            return own[0], own
        return jnp.where(index < len(own), own[jnp.minimum(index, len(own) - 1)], jnp.nan), own
