"""Dimension letters, array aliases, and the dtype and precision policy.

The same letters stand in annotations, einsum strings and docstrings:

    B batch (documents, or worlds x documents)   T tokens          N boundaries or segments
    L linear layers   H value heads   G key heads or key/value heads of attention   K key dim   V value dim
    D model width     C chunk positions          W conv taps       E conv channels   R singular directions
    M places of the key/value cache              F width of the MLP                  Y vocabulary
    P writes of a linear layer: T x n_h, a token's Householder steps side by side

The state S is K x V per head and, like decays, write strengths and every read of S, is f32 or wider.
"""

from collections.abc import Callable
from functools import wraps
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

# Plain f32 products are TF32 on current GPUs: 1e-3 of relative error, which hides the small singular directions.
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


def accumulation_dtype(*arrays: Array) -> jnp.dtype:
    """The dtype in which a recurrence or a factorization of ``arrays`` runs: theirs, and at least f32."""
    return jnp.promote_types(jnp.result_type(*arrays), jnp.float32)


def is_traced(x) -> bool:
    """Whether the value of ``x`` is unknown because a transformation such as jit is tracing it."""
    return isinstance(x, jax.core.Tracer)


def keeps_f64(function: Callable) -> Callable:
    """Let a function of arrays compute float64 numpy arrays in float64, whatever jax's setting, and return numpy arrays.

    Without one among its arguments, or with traced ones, the function is called as it is.
    """

    @wraps(function)
    def call(*args, **kwargs):
        leaves = jax.tree.leaves((args, kwargs))
        wide = any(isinstance(x, np.ndarray | np.float64) and x.dtype == np.float64 for x in leaves)
        if not wide or any(map(is_traced, leaves)):
            return function(*args, **kwargs)
        with jax.enable_x64(True):
            return jax.tree.map(np.asarray, function(*args, **kwargs))

    return call


def linear(x: Float[Array, "*batch D"], weight: Float[Array, "F D"], *, dtype=None) -> Float[Array, "*batch F"]:
    """``x @ weight.T``, accumulated in f32 or wider and returned in ``dtype`` (default: that of ``x``).

    f32 operands multiply in f32 and not in TF32. bf16 operands are accumulated in f32, which is also what CPUs with
    bf16 matrix units run fast.
    """
    wide = accumulation_dtype(x, weight)
    y = jnp.einsum(
        "nd,fd->nf",  # two axes: with more, XLA copies transposed activations on a CPU
        x.reshape(-1, x.shape[-1]),
        weight,
        preferred_element_type=wide,
        precision=HIGHEST if x.dtype != jnp.bfloat16 else None,
    )
    return y.reshape(*x.shape[:-1], -1).astype(dtype or x.dtype)
