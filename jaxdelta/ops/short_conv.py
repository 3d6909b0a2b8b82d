"""Causal depthwise convolution with a carried tail.

    y_t = sum_{i=0}^{W-1} w_i * x_{t-W+1+i}                              (the last tap multiplies the current token)

The tail is the last W - 1 inputs before the first token, zeros at the start of a text. Source: the short convolution of
Gated DeltaNet (Yang, Kautz, Hatamizadeh, arXiv 2412.06464), with the tap order of its PyTorch implementations.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxdelta.dims import accumulation_dtype, along_last


def short_conv(
    x: Float[Array, "B T E"],
    taps: Float[Array, "E W"],
    *,
    tail: Float[Array, "B W-1 E"] | None = None,
    length: Int[Array, " B"] | None = None,
) -> tuple[Float[Array, "B T E"], Float[Array, "B W-1 E"]]:
    """Convolve each channel of ``x`` along the tokens.

    Args:
        x: inputs, before any activation.
        taps: one filter for each channel; ``taps[:, -1]`` multiplies the current token.
        tail: the W - 1 inputs before ``x``; None is zeros.
        length: how many leading tokens of each row are text; None is all T. The returned tail ends at the last of them, so
            a row of length 0 keeps its tail.

    Returns:
        The convolved tokens and the next tail, both in the dtype of ``x``.
    """
    B, T, E = x.shape
    W = taps.shape[-1]
    if tail is None:
        tail = jnp.zeros((B, W - 1, E), x.dtype)
    padded = jnp.concatenate([tail.astype(x.dtype), x], axis=1)
    wide = accumulation_dtype(x, taps)
    y = sum(padded[:, i : i + T].astype(wide) * along_last(taps[:, i].astype(wide), x) for i in range(W)).astype(x.dtype)
    if length is None:
        return y, padded[:, T:]
    window = length[:, None] + jnp.arange(W - 1)[None]
    return y, jnp.take_along_axis(padded, window[:, :, None], axis=1)
