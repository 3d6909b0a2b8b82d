"""What every linear layer does around its projections: short convolution, delta rule, masks of padding, the carry.

    q | k | v = heads(short_conv(project(x)));   beta, g = gates(x)
    o, S = rule(q, k, v, g, beta);   y = W_out normed(o, x)

A layer supplies ``project``, ``taps``, ``heads``, ``gates``, ``normed`` and ``out``; n_h > 1 writes n_h times a token.
"""

from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxdelta.dims import linear
from jaxdelta.ops.delta_product import gated_delta_product, gated_delta_product_chunked
from jaxdelta.ops.short_conv import short_conv


class LinearCarry(NamedTuple):
    """What a linear layer hands to the next segment.

    Attributes:
        S: Float[B H K V], f32.
        tail: Float[B W-1 E], the last inputs of the short convolution, in the dtype of the activations; no entries where
            there is none.
    """

    S: Array
    tail: Array


class LinearProbe(NamedTuple):
    """Where a linear layer can be pushed; its derivatives are the layer's sensitivities.

    Attributes:
        beta: Float[B P H], added to the write strengths.
        g: Float[B T H], added to the log-decays.
        output: Float[B H], a factor on each head's output after its norm; before it, the norm would cancel the factor.
        residual: Float[B T D], added to what the layer adds to the residual stream.
    """

    beta: Array
    g: Array
    output: Array
    residual: Array


class RuleInputs(NamedTuple):
    """What the delta rule of a layer is given: heads repeated, q and k normalised; padding writes nothing.

    Attributes:
        q: Float[B T H K].
        k: Float[B P H K].
        v: Float[B P H V].
        beta: Float[B P H], write strengths; zero at padding.
        g: Float[B T H], log-decays; zero at padding.
    """

    q: Array
    k: Array
    v: Array
    beta: Array
    g: Array


class LinearMixer(nnx.Module):
    """A linear layer of ``config``, which names H, K, V, W, E and n_h."""

    num_householder: int = 1

    def init_carry(self, batch: int, dtype) -> LinearCarry:
        """The carry before the first token of ``batch`` texts."""
        c = self.config
        return LinearCarry(
            jnp.zeros((batch, c.num_value_heads, c.key_dim, c.value_dim), jnp.promote_types(dtype, jnp.float32)),
            jnp.zeros((batch, c.conv_width - 1, c.conv_channels), dtype),
        )

    def __call__(
        self,
        x: Float[Array, "B T D"],
        carry: LinearCarry,
        length: Int[Array, " B"] | None = None,
        probe: LinearProbe | None = None,
    ) -> tuple[Float[Array, "B T D"], LinearCarry]:
        """Tokens of a segment; ``length``: how many leading ones of each row are text, all where None.

        Padding neither writes nor decays: the carry returned is that after the last token of text.
        """
        T, n = x.shape[1], self.num_householder
        if length is not None:
            x = jnp.where(_is_text(T, length), x, 0)
        (q, k, v, beta, g), tail = self.rule_inputs(x, carry.tail, length, probe)
        rule = gated_delta_product if T * n == 1 else gated_delta_product_chunked
        o, S = rule(q, k, v, g=g, beta=beta, num_householder=n, state=carry.S)
        y = self.normed(o, x)
        if probe is not None:
            y = y * probe.output[:, None, :, None].astype(y.dtype)
        y = linear(y.reshape(*y.shape[:2], -1), self.out[...])
        return y if probe is None else y + probe.residual.astype(y.dtype), LinearCarry(S, tail)

    def rule_inputs(
        self,
        x: Float[Array, "B T D"],
        tail: Float[Array, "B M E"],
        length: Int[Array, " B"] | None = None,
        probe: LinearProbe | None = None,
    ) -> tuple[RuleInputs, Float[Array, "B M E"]]:
        """What the rule is given for the tokens of a segment, from the last M = W - 1 inputs before it, and those after."""
        qkv, tail = short_conv(self.project(x), self.taps(), tail=tail, length=length)
        q, k, v = self.heads(qkv)
        beta, g = self.gates(x)
        if probe is not None:
            beta, g = beta + probe.beta, g + probe.g
        if length is not None:
            text = _is_text(x.shape[1], length)
            beta, g = jnp.where(jnp.repeat(text, self.num_householder, axis=1), beta, 0), jnp.where(text, g, 0)
        return RuleInputs(q, k, v, beta, g), tail

    def probe(self, batch: int, length: int, dtype=jnp.float32) -> LinearProbe:
        """The probe that changes nothing, for ``length`` tokens."""
        H = self.config.num_value_heads
        gates = (jnp.zeros((batch, length * n, H), dtype) for n in (self.num_householder, 1))
        residual = jnp.zeros((batch, length, self.config.width), dtype)
        return LinearProbe(*gates, jnp.ones((batch, H), dtype), residual)


def _is_text(T: int, length: Int[Array, " B"]) -> Bool[Array, "B T 1"]:
    return (jnp.arange(T)[None] < length[:, None])[..., None]
