"""A decoder: a stack of linear and attention layers, each followed by a gated MLP, and everything carried between segments.

    x <- x + mixer(RMSNorm(x));   x <- x + W_down (silu(W_gate h) * W_up h), h = RMSNorm(x);   logits = W_head RMSNorm(x)

Sources: the Qwen3.5 text model of transformers 5.24 and the language models of flash-linear-attention 0.6, which share
this shape. The model is a pure function of tokens and a carry: everything that crosses from one segment to the next is in
:class:`Carry`.
"""

from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxdelta.arguments import shown
from jaxdelta.dims import State, Tokens, linear
from jaxdelta.models.config import DecoderConfig
from jaxdelta.nn.attention import AttentionCarry
from jaxdelta.nn.mixer import LinearCarry, LinearMixer, LinearProbe
from jaxdelta.nn.parameters import constant, normal
from jaxdelta.ops.norms import rms_norm


class Carry(NamedTuple):
    """All that crosses a boundary.

    Attributes:
        layers: of each layer in depth order its LinearCarry or AttentionCarry.
        position: Int[B], tokens of text consumed by each row.
    """

    layers: tuple[LinearCarry | AttentionCarry, ...]
    position: Array


# Of each layer in depth order the probe of a linear layer, None of an attention layer.
Probes: TypeAlias = tuple[LinearProbe | None, ...]


class Output(NamedTuple):
    """What a pass over a segment gives.

    Attributes:
        hidden: Float[B T D] after the final norm.
        carry: after the last token of text of each row.
        finite: Bool[num_layers + 1, B], whether the residual stream after the embedding and after each layer, and the
            state handed on, are finite.
        inputs: of each linear layer what it reads, Float[B T D], after the norm.
    """

    hidden: Array
    carry: Carry
    finite: Array
    inputs: tuple[Array, ...]


class MLP(nnx.Module):
    """``W_down (silu(W_gate x) * W_up x)``; weights are [out, in]."""

    def __init__(self, config: DecoderConfig, *, dtype, rngs: nnx.Rngs):
        self.gate = normal(rngs, (config.mlp_width, config.width), dtype)
        self.up = normal(rngs, (config.mlp_width, config.width), dtype)
        self.down = normal(rngs, (config.width, config.mlp_width), dtype)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return linear(jax.nn.silu(linear(x, self.gate[...])) * linear(x, self.up[...]), self.down[...])


class DecoderLayer(nnx.Module):
    """A mixer (linear or attention) and an MLP around the residual stream."""

    def __init__(self, config: DecoderConfig, mixer: nnx.Module, offset: float, *, dtype, rngs: nnx.Rngs):
        self.eps, self.offset = config.norm_eps, offset
        self.input_norm = constant((config.width,), 1 - offset)
        self.mixer = mixer
        self.post_norm = constant((config.width,), 1 - offset)
        self.mlp = MLP(config, dtype=dtype, rngs=rngs)

    def __call__(self, x, carry, positions, length, probe=None):
        h = rms_norm(x, self.input_norm[...], eps=self.eps, offset=self.offset)
        if isinstance(self.mixer, LinearMixer):
            y, carry = self.mixer(h, carry, length, probe)
        else:
            y, carry = self.mixer(h, carry, positions, length)
        x = x + y
        return x + self.mlp(rms_norm(x, self.post_norm[...], eps=self.eps, offset=self.offset)), carry, h


class Decoder(nnx.Module):
    """The whole model; a family says by ``mixer`` what its layers are and by ``NORM_OFFSET`` what its norms store.

    Attributes:
        config: sizes.
        tokenizer: ``tokenizers.Tokenizer`` or None.
        origin: ``checkpoints.Origin``, where the weights came from; None for fresh ones.
    """

    NORM_OFFSET: ClassVar[float]

    def __init__(self, config: DecoderConfig, *, dtype: Any = jnp.float32, rngs: nnx.Rngs | None = None):
        rngs = rngs or nnx.Rngs(0)
        self.config = config
        self.tokenizer: Any = nnx.static(None)
        self.origin: Any = nnx.static(None)
        self.embed = normal(rngs, (config.vocab_size, config.width), dtype)
        self.layers = nnx.List(
            DecoderLayer(config, self.mixer(i, dtype=dtype, rngs=rngs), self.NORM_OFFSET, dtype=dtype, rngs=rngs)
            for i in range(config.num_layers)
        )
        self.final_norm = constant((config.width,), 1 - self.NORM_OFFSET)
        if not config.tied:
            self.head = normal(rngs, (config.vocab_size, config.width), dtype)

    def mixer(self, layer: int, *, dtype, rngs: nnx.Rngs) -> nnx.Module:
        """A fresh mixer for a layer of the model."""
        raise NotImplementedError

    @property
    def dtype(self):
        """Dtype of parameters and activations; gates, norms and states are f32 or wider in any case."""
        return self.embed.get_value().dtype

    def init_carry(self, batch: int, max_length: int) -> Carry:
        """The carry before the first token of ``batch`` texts of at most ``max_length`` tokens."""
        layers = tuple(
            layer.mixer.init_carry(batch, self.dtype)
            if isinstance(layer.mixer, LinearMixer)
            else layer.mixer.init_carry(batch, max_length, self.dtype)
            for layer in self.layers
        )
        return Carry(layers, jnp.zeros((batch,), jnp.int32))

    def probes(self, batch: int, length: int) -> Probes:
        """The probes that change nothing, for ``length`` tokens."""
        wide = jnp.promote_types(self.dtype, jnp.float32)
        mixers = (layer.mixer for layer in self.layers)
        return tuple(m.probe(batch, length, wide) if isinstance(m, LinearMixer) else None for m in mixers)

    def __call__(
        self, tokens: Tokens, carry: Carry, length: Int[Array, " B"] | None = None, probes: Probes | None = None
    ) -> Output:
        """Run tokens on from ``carry``; ``length``: how many leading tokens of each row are text, all where None.

        Text outside of the vocabulary or beyond the carry's places, of which a compiled function cannot tell, gives NaN.
        """
        tokens = jnp.asarray(tokens)
        T = tokens.shape[1]
        positions = carry.position[:, None] + jnp.arange(T, dtype=jnp.int32)[None]
        x = jnp.where(self._fits(tokens, carry, positions, length)[..., None], self.embed[...][tokens], jnp.nan)
        finite = [_finite(x)]
        layers, inputs = [], []
        probes = probes or (None,) * len(self.layers)
        for layer, layer_carry, probe in zip(self.layers, carry.layers, probes, strict=True):
            x, layer_carry, h = layer(x, layer_carry, positions, length, probe)
            if isinstance(layer_carry, LinearCarry):
                inputs.append(h)
            finite.append(_finite(x) & (_finite(layer_carry.S) if isinstance(layer_carry, LinearCarry) else True))
            layers.append(layer_carry)
        hidden = rms_norm(x, self.final_norm[...], eps=self.config.norm_eps, offset=self.NORM_OFFSET)
        position = carry.position + (T if length is None else length)
        return Output(hidden, Carry(tuple(layers), position.astype(jnp.int32)), jnp.stack(finite), tuple(inputs))

    def _fits(self, tokens, carry: Carry, positions, length) -> Bool[Array, "B T"]:
        """Whether an id and its position are within bounds; padding is."""
        fits = (tokens >= 0) & (tokens < self.config.vocab_size)
        caches = [c.keys.shape[1] for c in carry.layers if isinstance(c, AttentionCarry)]
        if caches:
            fits &= positions < min(caches)
        return fits if length is None else fits | (jnp.arange(tokens.shape[1])[None] >= length[:, None])

    @property
    def head_weight(self) -> Float[Array, "Y D"]:
        """Weight of the head: the embedding where they are tied."""
        return (self.embed if self.config.tied else self.head)[...]

    def logits(self, hidden: Float[Array, "*batch D"]) -> Float[Array, "*batch Y"]:
        """Scores of the words, in f32 or wider."""
        return linear(hidden, self.head_weight, dtype=jnp.promote_types(hidden.dtype, jnp.float32))


def check_carry(model: Decoder, carry: Any) -> None:
    """Check that ``carry`` holds all that the model hands on, in its layout; nothing of its values.

    Raises:
        TypeError: it is no Carry.
        ValueError: a layer or an array is missing, or of another shape or dtype; names it.
    """
    if not isinstance(carry, Carry):
        raise TypeError(f"carry is {shown(carry)}; expected a Carry, as init_carry and forward give it")
    expected = _layout(type(model), model.config, model.dtype)
    if not _is(carry.position, 1, jnp.int32):
        raise ValueError(f"position of the carry is {shown(carry.position)}; expected int32 [B]")
    if len(carry.layers) != len(expected.layers):
        raise ValueError(f"the carry has {len(carry.layers)} layers, the model {len(expected.layers)}")
    (B,) = carry.position.shape
    for i, (kind, layer, wanted) in enumerate(zip(model.config.layer_kinds, carry.layers, expected.layers, strict=True)):
        if not isinstance(layer, type(wanted)):
            raise ValueError(f"layer {i} of the carry is {shown(layer)}; expected a {type(wanted).__name__}, it is {kind}")
        for name, found, array in zip(wanted._fields, layer, wanted, strict=True):
            free = isinstance(layer, AttentionCarry)  # how many places a cache has
            places = np.shape(layer.keys)[1:2] if free else ()
            shape = (B, *places, *array.shape[2:]) if free else (B, *array.shape[1:])
            if not _is(found, len(array.shape), array.dtype) or found.shape != shape:
                letters = f"[{B}, max_length, {', '.join(map(str, array.shape[2:]))}]" if free else list(shape)
                raise ValueError(
                    f"{name} of layer {i} ({kind}) of the carry is {shown(found)}; expected {array.dtype} {letters}"
                )


def _is(x: Any, axes: int, dtype) -> bool:
    return getattr(x, "dtype", None) == dtype and len(x.shape) == axes


@lru_cache
def _layout(kind: type[Decoder], config: DecoderConfig, dtype) -> Carry:
    """Shapes and dtypes of a carry for one text and one place."""
    return nnx.eval_shape(lambda: kind(config, dtype=dtype).init_carry(1, 1))


def check_model(model: Any) -> None:
    """TypeError for what is no model, such as the name of one."""
    if not isinstance(model, Decoder):
        raise TypeError(f"model is {shown(model)}; expected a Decoder, as jaxdelta.load gives it")


def _finite(x: Array) -> Bool[Array, " B"]:
    return jnp.all(jnp.isfinite(x), axis=tuple(range(1, x.ndim)))


def states(carry: Carry) -> list[State]:
    """S of each linear layer in depth order, [B, H, K, V], in the carry's own dtype.

    Raises:
        TypeError: ``carry`` is no Carry.
        ValueError: a layer has no S.
    """
    if not isinstance(carry, Carry):
        raise TypeError(f"carry is {shown(carry)}; expected a Carry, as init_carry and forward give it")
    found = {i: layer.S for i, layer in enumerate(carry.layers) if isinstance(layer, LinearCarry)}
    for i, S in found.items():
        if not hasattr(S, "shape"):
            raise ValueError(f"S of layer {i} of the carry is {shown(S)}; expected an array [B, H, K, V]")
    return list(found.values())


def with_states(carry: Carry, S: list[State] | tuple[State, ...]) -> Carry:
    """``carry`` with other states, one for each linear layer, in the dtype of those they replace.

    Raises:
        TypeError: ``carry`` is no Carry, or S no arrays.
        ValueError: the number of states, or a shape, does not fit, or a state is complex.
    """
    expected = [s.shape for s in states(carry)]
    if not np.iterable(S) or not all(hasattr(s, "dtype") for s in S):
        raise TypeError(f"S is {shown(S)}; expected a list of {len(expected)} arrays")
    found = [s.shape for s in S]
    if expected != found:
        raise ValueError(f"states of shapes {found} do not fit a carry with {expected}")
    if any(jnp.iscomplexobj(s) for s in S):
        raise ValueError("a state is complex; expected real numbers")
    remaining = iter(S)
    layers = tuple(
        layer._replace(S=next(remaining).astype(layer.S.dtype)) if isinstance(layer, LinearCarry) else layer
        for layer in carry.layers
    )
    return carry._replace(layers=layers)
