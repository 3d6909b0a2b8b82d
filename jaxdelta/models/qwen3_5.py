"""The Qwen3.5 text model: a stack of Gated DeltaNet and gated full-attention layers, each followed by a gated MLP.

    x <- x + mixer(RMSNorm(x));   x <- x + W_down (silu(W_gate h) * W_up h), h = RMSNorm(x);   logits = W_head RMSNorm(x)

Source: the Qwen3.5 model of transformers 5.24 (text part). The model is a pure function of tokens and a carry: everything
that crosses from one segment to the next is in :class:`Carry`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxdelta.dims import State, Tokens, linear
from jaxdelta.models.config import Qwen3_5Config
from jaxdelta.nn.gated_attention import AttentionCarry, GatedAttention
from jaxdelta.nn.gated_deltanet import GatedDeltaNet, LinearCarry
from jaxdelta.nn.parameters import normal, zeros
from jaxdelta.ops.norms import rms_norm


class Carry(NamedTuple):
    """All that crosses a boundary.

    Attributes:
        layers: of each layer in depth order its LinearCarry or AttentionCarry.
        position: Int[B], tokens of text consumed by each row.
    """

    layers: tuple[LinearCarry | AttentionCarry, ...]
    position: Array


class Output(NamedTuple):
    """What a pass over a segment gives.

    Attributes:
        hidden: Float[B T D] after the final norm.
        carry: after the last token of text of each row.
        finite: Bool[num_layers + 1, B], whether the residual stream after the embedding and after each layer, and the
            state handed on, are finite.
    """

    hidden: Array
    carry: Carry
    finite: Array


class MLP(nnx.Module):
    """``W_down (silu(W_gate x) * W_up x)``; weights are [out, in]."""

    def __init__(self, config: Qwen3_5Config, *, dtype, rngs: nnx.Rngs):
        self.gate = normal(rngs, (config.mlp_width, config.width), dtype)
        self.up = normal(rngs, (config.mlp_width, config.width), dtype)
        self.down = normal(rngs, (config.width, config.mlp_width), dtype)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return linear(jax.nn.silu(linear(x, self.gate[...])) * linear(x, self.up[...]), self.down[...])


class DecoderLayer(nnx.Module):
    """A mixer (linear or attention) and an MLP around the residual stream."""

    def __init__(self, config: Qwen3_5Config, kind: str, *, dtype, rngs: nnx.Rngs):
        self.eps = config.norm_eps
        self.input_norm = zeros((config.width,))
        self.mixer = (GatedDeltaNet if kind == "linear" else GatedAttention)(config, dtype=dtype, rngs=rngs)
        self.post_norm = zeros((config.width,))
        self.mlp = MLP(config, dtype=dtype, rngs=rngs)

    def __call__(self, x, carry, positions, length):
        h = rms_norm(x, self.input_norm[...], eps=self.eps)
        if isinstance(self.mixer, GatedDeltaNet):
            y, carry = self.mixer(h, carry, length)
        else:
            y, carry = self.mixer(h, carry, positions, length)
        x = x + y
        return x + self.mlp(rms_norm(x, self.post_norm[...], eps=self.eps)), carry


class Qwen3_5(nnx.Module):
    """The whole text model.

    Attributes:
        config: sizes.
        tokenizer: ``tokenizers.Tokenizer`` or None.
        origin: ``checkpoints.Origin``, where the weights came from; None for fresh ones.
    """

    def __init__(self, config: Qwen3_5Config, *, dtype: Any = jnp.float32, rngs: nnx.Rngs | None = None):
        rngs = rngs or nnx.Rngs(0)
        self.config = config
        self.tokenizer: Any = nnx.static(None)
        self.origin: Any = nnx.static(None)
        self.embed = normal(rngs, (config.vocab_size, config.width), dtype)
        self.layers = nnx.List([DecoderLayer(config, kind, dtype=dtype, rngs=rngs) for kind in config.layer_kinds])
        self.final_norm = zeros((config.width,))
        if not config.tied:
            self.head = normal(rngs, (config.vocab_size, config.width), dtype)

    @property
    def dtype(self):
        """Dtype of parameters and activations; gates, norms and states are f32 or wider in any case."""
        return self.embed.get_value().dtype

    def init_carry(self, batch: int, max_length: int) -> Carry:
        """The carry before the first token of ``batch`` texts of at most ``max_length`` tokens."""
        layers = tuple(
            layer.mixer.init_carry(batch, self.dtype)
            if isinstance(layer.mixer, GatedDeltaNet)
            else layer.mixer.init_carry(batch, max_length, self.dtype)
            for layer in self.layers
        )
        return Carry(layers, jnp.zeros((batch,), jnp.int32))

    def __call__(self, tokens: Tokens, carry: Carry, length: Int[Array, " B"] | None = None) -> Output:
        """Run tokens on from ``carry``; ``length``: how many leading tokens of each row are text, all where None."""
        T = tokens.shape[1]
        positions = carry.position[:, None] + jnp.arange(T, dtype=jnp.int32)
        x = self.embed[...][tokens]
        finite = [_finite(x)]
        layers = []
        for layer, layer_carry in zip(self.layers, carry.layers, strict=True):
            x, layer_carry = layer(x, layer_carry, positions, length)
            finite.append(_finite(x) & (_finite(layer_carry.S) if isinstance(layer_carry, LinearCarry) else True))
            layers.append(layer_carry)
        hidden = rms_norm(x, self.final_norm[...], eps=self.config.norm_eps)
        position = carry.position + (T if length is None else length)
        return Output(hidden, Carry(tuple(layers), position.astype(jnp.int32)), jnp.stack(finite))

    @property
    def head_weight(self) -> Float[Array, "Y D"]:
        """Weight of the head: the embedding where they are tied."""
        return (self.embed if self.config.tied else self.head)[...]

    def logits(self, hidden: Float[Array, "*batch D"]) -> Float[Array, "*batch Y"]:
        """Scores of the words, in f32 or wider."""
        return linear(hidden, self.head_weight, dtype=jnp.promote_types(hidden.dtype, jnp.float32))


def _finite(x: Array) -> Bool[Array, " B"]:
    return jnp.all(jnp.isfinite(x), axis=tuple(range(1, x.ndim)))


def states(carry: Carry) -> list[State]:
    """S of each linear layer in depth order, [B, H, K, V]."""
    return [layer.S for layer in carry.layers if isinstance(layer, LinearCarry)]


def with_states(carry: Carry, S: list[State] | tuple[State, ...]) -> Carry:
    """``carry`` with other states, one for each linear layer.

    Raises:
        ValueError: the number of states, or a shape, does not fit.
    """
    expected = [s.shape for s in states(carry)]
    found = [s.shape for s in S]
    if expected != found:
        raise ValueError(f"states of shapes {found} do not fit a carry with {expected}")
    remaining = iter(S)
    layers = tuple(
        layer._replace(S=next(remaining).astype(layer.S.dtype)) if isinstance(layer, LinearCarry) else layer
        for layer in carry.layers
    )
    return carry._replace(layers=layers)
