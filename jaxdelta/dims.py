"""Dimension letters, array aliases, and the dtype and precision policy.

The same letters stand in annotations, einsum strings and docstrings:

    B batch (one document a row, or one world)   T tokens          N boundaries or segments
    L linear layers   H value heads   G key heads or key/value heads of attention   K key dim   V value dim
    D model width     C chunk positions          W conv taps       E conv channels   R singular directions
    M places of the key/value cache              F width of the MLP                  Y vocabulary
    P writes of a linear layer: T x n_h, the Householder steps of a token side by side

A world is a document run under one intervention; a batch may hold many worlds of the same document.

The state S is K x V per head and, like decays, write strengths and every read of S, is f32 or wider.

Public functions of arrays compute in the dtype of their arguments, and at least in f32. Float64 numpy arrays are computed
in float64 whatever jax's setting, and the result is a numpy array (:func:`keeps_f64`); inside jit, jax decides. Functions
of a model or a carry compute in the model's dtype.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

# Plain f32 products are TF32 on current GPUs: a relative error of 1e-3, which hides the small singular directions.
HIGHEST = jax.lax.Precision.HIGHEST

AnyArray: TypeAlias = Array | np.ndarray
Tokens: TypeAlias = Int[AnyArray, "B T"]
Mask: TypeAlias = Bool[AnyArray, "B T"]
Keys: TypeAlias = Float[AnyArray, "B T H K"]
Values: TypeAlias = Float[AnyArray, "B T H V"]
Gates: TypeAlias = Float[AnyArray, "B T H"]
StepKeys: TypeAlias = Float[AnyArray, "B P H K"]
StepValues: TypeAlias = Float[AnyArray, "B P H V"]
StepGates: TypeAlias = Float[AnyArray, "B P H"]
State: TypeAlias = Float[AnyArray, "B H K V"]
Matrices: TypeAlias = Float[AnyArray, "*batch K V"]
Spectrum: TypeAlias = Float[Array, "*batch R"]


def accumulation_dtype(*arrays: AnyArray | DTypeLike) -> jnp.dtype:
    """The dtype in which a recurrence or factorization of ``arrays`` (or dtypes) runs: their common one, at least f32."""
    with jax.numpy_dtype_promotion("standard"):  # for users who set strict promotion
        return jnp.promote_types(jnp.result_type(*arrays), jnp.float32)


def precision_of(x: AnyArray) -> jax.lax.Precision | None:
    """Of products with ``x``: f32 operands multiply in f32 and not in TF32; bf16 ones as they are, summed in f32."""
    return HIGHEST if x.dtype != jnp.bfloat16 else None


def is_traced(x) -> bool:
    """Whether the value of ``x`` is unknown because a transformation such as jit is tracing it."""
    return isinstance(x, jax.core.Tracer)


def known(x) -> np.ndarray | None:
    """The value of ``x`` on the host; None where a transformation such as jit is tracing it.

    Checks compute with numpy, because inside jit even a jax function of a known array gives a traced result.
    """
    return None if is_traced(x) else np.asarray(x)


def as_matrices(S: AnyArray) -> Array:
    """``S`` [*batch, K, V] in f32 or wider.

    Raises:
        ValueError: ``S`` has fewer than two axes.
    """
    if np.ndim(S) < 2:
        raise ValueError(f"S has shape {np.shape(S)}; expected matrices [..., K, V]")
    S = jnp.asarray(S)
    return S.astype(accumulation_dtype(S))


def along_last(x: Array, like: Array) -> Array:
    """The vector ``x`` with leading axes of size one, to broadcast along the last axis of ``like``.

    jax can be set to refuse implicit rank promotion.
    """
    return x.reshape(*(1,) * (like.ndim - 1), -1)


def filled_up(arrays: Sequence[AnyArray], value: float | int = 0) -> list[AnyArray]:
    """Arrays of the same number of axes, each padded at the end with ``value`` to the largest size along every axis."""
    sizes = np.max([x.shape for x in arrays], axis=0)
    found = []
    for x in arrays:
        pad = np.pad if isinstance(x, np.ndarray) else jnp.pad
        missing = [(0, int(n)) for n in sizes - x.shape]
        found.append(pad(x, missing, constant_values=value) if np.any(missing) else x)
    return found


def stacked_alike(arrays: Sequence[Array]) -> Array:
    """Arrays along a new first axis, smaller ones padded with zeros."""
    return jnp.stack(filled_up(arrays))


def first(count: Int[Array, "*batch"], size: int) -> Bool[Array, "*batch size"]:
    """Mask of ``size`` entries that is True for the first ``count``."""
    count = jnp.asarray(count, int)[..., None]
    return along_last(jnp.arange(size), count) < count


def keeps_f64(function: Callable) -> Callable:
    """Make a function compute float64 numpy arrays in float64, whatever jax's setting, and return numpy arrays.

    The function is called unchanged where no argument is such an array, or where one is traced. Scalars do not count.
    """

    @wraps(function)
    def call(*args, **kwargs):
        leaves, structure = jax.tree.flatten((args, kwargs))
        wide = [isinstance(x, np.ndarray) and x.ndim > 0 and x.dtype == np.float64 for x in leaves]
        if not any(wide) or any(map(is_traced, leaves)):
            return function(*args, **kwargs)
        with jax.enable_x64(True):  # jax arrays, so that nested calls are unchanged
            leaves = [jnp.asarray(x) if w else x for x, w in zip(leaves, wide, strict=True)]
            args, kwargs = jax.tree.unflatten(structure, leaves)
            return jax.tree.map(np.asarray, function(*args, **kwargs))

    return call


def matmul(a: Array, b: Array) -> Array:
    """``a @ b``, where f32 operands multiply in full f32 and not in TF32."""
    return jnp.matmul(a, b, precision=HIGHEST)


def linear(x: Float[Array, "*batch D"], weight: Float[Array, "F D"], *, dtype=None) -> Float[Array, "*batch F"]:
    """``x @ weight.T``, accumulated in f32 or wider and returned in ``dtype`` (default: that of ``x``).

    f32 operands multiply in f32 and not in TF32. bf16 operands are accumulated in f32, which CPUs with bf16 matrix units
    do fast.
    """
    wide = accumulation_dtype(x, weight)
    y = jnp.einsum(
        "nd,fd->nf",  # two axes: with more, XLA copies transposed activations on a CPU
        x.reshape(-1, x.shape[-1]),
        weight,
        preferred_element_type=wide,
        precision=precision_of(x),
    )
    return y.reshape(*x.shape[:-1], -1).astype(dtype or x.dtype)
