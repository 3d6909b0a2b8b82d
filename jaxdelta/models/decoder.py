"""A decoder: a stack of linear and attention layers, each followed by a gated MLP.

    x <- x + mixer(RMSNorm(x));   x <- x + W_down (silu(W_gate h) * W_up h), h = RMSNorm(x);   logits = W_head RMSNorm(x)

Sources: the Qwen3.5 text model of transformers 5.24 and the language models of flash-linear-attention 0.6, which share
this form. The model is a pure function of tokens and a carry: everything that passes from one segment to the next is in
:class:`~jaxdelta.models.carry.Carry`.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxdelta.arguments import shown
from jaxdelta.dims import Tokens, accumulation_dtype, linear
from jaxdelta.implementation import Implementation, implementation_here
from jaxdelta.models.carry import Carry, room, state_of
from jaxdelta.models.config import DecoderConfig
from jaxdelta.nn.mixer import Span, untouched
from jaxdelta.nn.parameters import constant, normal
from jaxdelta.ops.norms import rms_norm

# Called with the name of an array, the model layer index and the array; its result replaces the array.
Tap: TypeAlias = Callable[[str, int, Array], Array]


class Output(NamedTuple):
    """Result of a pass over a segment.

    Attributes:
        hidden: Float[B T D], hidden states after the final norm.
        carry: the carry after the last token of text of each row.
        finite: Bool[num_layers + 1, B], whether the residual stream is finite after the embedding and after each layer; of
            a linear layer also its new state.
    """

    hidden: Array
    carry: Carry
    finite: Array


class MLP(nnx.Module):
    """``W_down (silu(W_gate x) * W_up x)``; weights are [out, in]."""

    def __init__(self, config: DecoderConfig, *, dtype, rngs: nnx.Rngs):
        self.gate = normal(rngs, (config.mlp_width, config.width), dtype)
        self.up = normal(rngs, (config.mlp_width, config.width), dtype)
        self.down = normal(rngs, (config.width, config.mlp_width), dtype)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return linear(jax.nn.silu(linear(x, self.gate[...])) * linear(x, self.up[...]), self.down[...])


class DecoderLayer(nnx.Module):
    """A mixer (linear or attention) and an MLP around the residual stream. Besides the mixer's arrays, the tap gets

    =================  ===============  ===============================================
    ``residual``       Float[B T D]     the residual stream before the layer
    ``mixer_input``    Float[B T D]     what the mixer reads, after the norm
    ``residual_mid``   Float[B T D]     the residual stream between mixer and MLP
    ``mlp_output``     Float[B T D]     added to the residual stream
    ``residual_after`` Float[B T D]     the residual stream after the layer
    =================  ===============  ===============================================
    """

    NAMES = ("residual", "mixer_input", "residual_mid", "mlp_output", "residual_after")

    def __init__(self, config: DecoderConfig, mixer: nnx.Module, offset: float, *, dtype, rngs: nnx.Rngs):
        self.eps, self.offset = config.norm_eps, offset
        self.input_norm = constant((config.width,), 1 - offset)
        self.mixer = mixer
        self.post_norm = constant((config.width,), 1 - offset)
        self.mlp = MLP(config, dtype=dtype, rngs=rngs)

    def __call__(self, x, carry, span: Span):
        tap = span.tap
        x = tap("residual", x)
        y, carry = self.mixer(tap("mixer_input", self._normed(x, self.input_norm)), carry, span)
        x = tap("residual_mid", x + y)
        return tap("residual_after", x + tap("mlp_output", self.mlp(self._normed(x, self.post_norm)))), carry

    def _normed(self, x, weight):
        return rms_norm(x, weight[...], eps=self.eps, offset=self.offset)


class Decoder(nnx.Module):
    """The whole model. A family defines its layers by ``mixer``, and by ``NORM_OFFSET`` what its norms store.

    Attributes:
        config: sizes.
        tokenizer: ``tokenizers.Tokenizer`` or None.
        origin: ``checkpoints.Origin``, where the weights came from; None for fresh ones.
        implementation: how the model is computed; by default the faster choice for this device.
    """

    NORM_OFFSET: ClassVar[float]

    def __init__(
        self,
        config: DecoderConfig,
        *,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs | None = None,
        implementation: Implementation | None = None,
    ):
        rngs = rngs or nnx.Rngs(0)
        self.config = config
        self.tokenizer: Any = nnx.static(None)
        self.origin: Any = nnx.static(None)
        self.implementation: Implementation = nnx.static(implementation or implementation_here())
        self.embed = normal(rngs, (config.vocab_size, config.width), dtype)
        self.layers = nnx.List(
            DecoderLayer(config, self.mixer(i, dtype=dtype, rngs=rngs), self.NORM_OFFSET, dtype=dtype, rngs=rngs)
            for i in range(config.num_layers)
        )
        self.final_norm = constant((config.width,), 1 - self.NORM_OFFSET)
        if not config.tied:
            self.head = normal(rngs, (config.vocab_size, config.width), dtype)

    def mixer(self, layer: int, *, dtype, rngs: nnx.Rngs) -> nnx.Module:
        """A fresh mixer for the layer with this index."""
        raise NotImplementedError

    @property
    def dtype(self):
        """Dtype of parameters and activations; gates, norms and states are always f32 or wider."""
        return self.embed.get_value().dtype

    def init_carry(self, batch: int, max_length: int) -> Carry:
        """The carry before the first token of ``batch`` texts of at most ``max_length`` tokens."""
        layers = tuple(layer.mixer.init_carry(batch, max_length, self.dtype) for layer in self.layers)
        return Carry(layers, jnp.zeros((batch,), jnp.int32))

    def names(self, layer: int) -> tuple[str, ...]:
        """Names of the arrays that a layer passes to the tap."""
        return *DecoderLayer.NAMES, *self.layers[layer].mixer.NAMES

    def __call__(
        self, tokens: Tokens, carry: Carry, length: Int[Array, " B"] | None = None, tap: Tap = untouched
    ) -> Output:
        """Run tokens on from ``carry``.

        Ids outside the vocabulary and tokens beyond the cache's places give NaN, because a compiled function cannot raise.

        Args:
            length: how many leading tokens of each row are text; None is all.
            tap: called with every named array; see :data:`Tap`.
        """
        tokens = jnp.asarray(tokens)
        T = tokens.shape[1]
        positions = carry.position[:, None] + jnp.arange(T, dtype=jnp.int32)[None]
        span = Span(positions, length, self.implementation)
        x = jnp.where(self._fits(tokens, carry, span)[..., None], self.embed[...][tokens], jnp.nan)
        finite, layers = [_finite(x)], []
        for i, (layer, layer_carry) in enumerate(zip(self.layers, carry.layers, strict=True)):
            x, layer_carry = layer(x, layer_carry, span._replace(tap=lambda name, x, i=i: tap(name, i, x)))
            S = state_of(layer_carry)
            finite.append(_finite(x) & (True if S is None else _finite(S)))
            layers.append(layer_carry)
        hidden = rms_norm(x, self.final_norm[...], eps=self.config.norm_eps, offset=self.NORM_OFFSET)
        position = carry.position + (T if length is None else length)
        return Output(hidden, Carry(tuple(layers), position.astype(jnp.int32)), jnp.stack(finite))

    def _fits(self, tokens, carry: Carry, span: Span) -> Bool[Array, "B T"]:
        """Whether each id and its position are within bounds; padding always is."""
        fits = (tokens >= 0) & (tokens < self.config.vocab_size)
        places = room(carry)
        if places is not None:
            fits &= span.positions < places
        return fits if span.length is None else fits | ~span.is_text

    @property
    def head_weight(self) -> Float[Array, "Y D"]:
        """Weight of the head; the embedding if they are tied."""
        return (self.embed if self.config.tied else self.head)[...]

    def logits(self, hidden: Float[Array, "*batch D"]) -> Float[Array, "*batch Y"]:
        """Logits of all words, in f32 or wider."""
        return linear(hidden, self.head_weight, dtype=accumulation_dtype(hidden))


def check_model(model: Any) -> None:
    """Raise TypeError if ``model`` is not a Decoder, for example only its name."""
    if not isinstance(model, Decoder):
        raise TypeError(f"model is {shown(model)}; expected a Decoder, as jaxdelta.load gives it")


@lru_cache
def layout(kind: type[Decoder], config: DecoderConfig, dtype) -> Carry:
    """Shapes and dtypes of the carry of such a model for one text and one place."""
    return nnx.eval_shape(lambda: kind(config, dtype=dtype).init_carry(1, 1))


def _finite(x: Array) -> Bool[Array, " B"]:
    return jnp.all(jnp.isfinite(x), axis=tuple(range(1, x.ndim)))
