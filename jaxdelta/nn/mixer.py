"""The interface of all mixers, and what every linear layer does around its projections.

    q | k | v = heads(short_conv(project(x)));   beta, g = gates(x)
    o, S = rule(q, k, v, g, beta);   y = W_out normed(o, x)

A linear layer supplies ``project``, ``filters``, ``heads``, ``gates``, ``normed`` and ``out``; each token writes n_h times.
``heads``, ``gates`` and ``normed`` pass the arrays that arise in them to the tap.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from jaxdelta.dims import accumulation_dtype, linear
from jaxdelta.implementation import Implementation
from jaxdelta.nn.sizes import LinearSizes
from jaxdelta.ops.delta_product import gated_delta_product, gated_delta_product_chunked
from jaxdelta.ops.short_conv import short_conv


def untouched(*shown: Any) -> Array:
    """The tap that neither keeps nor changes the array, which it is shown last."""
    return shown[-1]


# Called with the name of an array and the array; its result replaces the array.
LayerTap: TypeAlias = Callable[[str, Array], Array]


class Span(NamedTuple):
    """What every mixer needs to know about its tokens.

    Attributes:
        positions: Int[B T], of the tokens in their texts.
        length: Int[B], how many leading tokens of each row are text; None is all.
        implementation: how the layer is computed.
        tap: called with the name of an array and the array; its result replaces the array.
    """

    positions: Array
    length: Array | None = None
    implementation: Implementation = Implementation()
    tap: LayerTap = untouched

    @property
    def is_text(self) -> Bool[Array, "B T"] | None:
        """Which tokens are text; None is all."""
        T = self.positions.shape[1]
        return None if self.length is None else jnp.arange(T)[None] < self.length[:, None]


class LinearCarry(NamedTuple):
    """What a linear layer passes to the next segment.

    Attributes:
        S: Float[B H K V], f32 or wider.
        tail: Float[B W-1 E], the last inputs of the short convolution, in the dtype of the activations; empty for W = 1.
    """

    S: Array
    tail: Array


class LinearMixer(nnx.Module):
    """A linear layer of ``sizes``. It passes these arrays, in this order, to the tap of its span:

    ================  ==================  ================================================================
    ``S_before``      Float[B H K V]      the state before the first token
    ``qkv``           Float[B T E]        q | k | v before the short convolution
    ``q_unnormed``    Float[B T G K]      after convolution and activation, for the key heads
    ``k_unnormed``    Float[B P G K]
    ``q``             Float[B T H K]      inputs of the rule: heads repeated, q and k normalised
    ``k``             Float[B P H K]
    ``v``             Float[B P H V]
    ``beta_logit``    Float[B P H]        write strengths before the sigmoid; where they are learned
    ``beta``          Float[B P H]        write strengths, before padding is set to zero
    ``g``             Float[B T H]        log-decays, before padding is set to zero
    ``S``             Float[B H K V]      the state after the last token of text
    ``o``             Float[B T H V]      outputs of the rule
    ``z``             Float[B T H V]      the output gate before its activation; where there is one
    ``head_output``   Float[B T H V]      output of each head after its norm and gate
    ``mixer_output``  Float[B T D]        added to the residual stream
    ================  ==================  ================================================================
    """

    sizes: LinearSizes

    @property
    def NAMES(self) -> tuple[str, ...]:
        """Names of the arrays above that the layer has."""
        c = self.sizes
        logit, gate = ["beta_logit"] * c.write_gate, ["z"] * (c.output_gate is not None)
        rule = ("S_before", "qkv", "q_unnormed", "k_unnormed", "q", "k", "v", *logit, "beta", "g", "S", "o")
        return *rule, *gate, "head_output", "mixer_output"

    def init_carry(self, batch: int, max_length: int, dtype) -> LinearCarry:
        """The carry before the first token of ``batch`` texts; ``max_length`` is not used."""
        c = self.sizes
        return LinearCarry(
            jnp.zeros((batch, c.num_value_heads, c.key_dim, c.value_dim), accumulation_dtype(dtype)),
            jnp.zeros((batch, c.conv_width - 1, c.conv_channels), dtype),
        )

    def __call__(
        self, x: Float[Array, "B T D"], carry: LinearCarry, span: Span
    ) -> tuple[Float[Array, "B T D"], LinearCarry]:
        """Run the tokens of a segment. Padding neither writes nor decays: the new carry is that after the last text."""
        tap, text, n = span.tap, span.is_text, self.sizes.num_householder
        if text is not None:
            x = jnp.where(text[..., None], x, 0)
        start = tap("S_before", carry.S)
        qkv, tail = short_conv(tap("qkv", self.project(x)), self.filters(), tail=carry.tail, length=span.length)
        q, k, v = (tap(name, a) for name, a in zip("qkv", self.heads(qkv, tap), strict=True))
        beta, g = (tap(name, a) for name, a in zip(("beta", "g"), self.gates(x, tap), strict=True))
        if text is not None:
            beta, g = jnp.where(jnp.repeat(text, n, axis=1)[..., None], beta, 0), jnp.where(text[..., None], g, 0)
        if x.shape[1] * n == 1:
            o, S = gated_delta_product(q, k, v, g=g, beta=beta, num_householder=n, state=start)
        else:
            size = span.implementation.chunk_size
            o, S = gated_delta_product_chunked(q, k, v, g=g, beta=beta, num_householder=n, state=start, chunk_size=size)
        S = tap("S", S)
        y = tap("head_output", self.normed(tap("o", o), x, tap))
        return tap("mixer_output", linear(y.reshape(*y.shape[:2], -1), self.out[...])), LinearCarry(S, tail)
