"""Configuration of the Qwen3.5 text model (Hugging Face's ``qwen3_5_text``), in this library's names."""

from dataclasses import dataclass
from typing import Literal

LayerKind = Literal["linear", "attention"]


@dataclass(frozen=True)
class Qwen3_5Config:
    """Sizes of a Qwen3.5 text model.

    Attributes:
        vocab_size: words of the embedding and of the head.
        width: D, the residual stream.
        mlp_width: F, the hidden layer of the MLP.
        layer_kinds: "linear" (Gated DeltaNet) or "attention" (gated full attention), in depth order.
        num_key_heads: key heads of a linear layer.
        num_value_heads: H, value heads of a linear layer, a multiple of ``num_key_heads``.
        key_dim: K of a linear layer.
        value_dim: V of a linear layer.
        conv_width: W, taps of the short convolution.
        num_query_heads: query heads of an attention layer, a multiple of ``num_kv_heads``.
        num_kv_heads: key/value heads of an attention layer.
        head_dim: size of a head of an attention layer.
        rotary_dim: leading entries of a head that rotate with the position; even.
        rope_theta: base of the rotation's frequencies.
        norm_eps: eps of every RMSNorm.
        tied: whether the head is the embedding.
        max_position: the longest text the model was made for; not a limit of this library.

    Raises:
        ValueError: sizes that contradict one another.
    """

    vocab_size: int
    width: int
    mlp_width: int
    layer_kinds: tuple[LayerKind, ...]
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float = 1e7
    norm_eps: float = 1e-6
    tied: bool = True
    max_position: int = 32768

    def __post_init__(self):
        for name, size in vars(self).items():
            if isinstance(size, int) and not isinstance(size, bool) and name != "rotary_dim" and size < 1:
                raise ValueError(f"{name} is {size}; expected at least 1")
        if not self.layer_kinds or set(self.layer_kinds) - {"linear", "attention"}:
            raise ValueError(f"layer_kinds is {self.layer_kinds}; expected 'linear' or 'attention' for each layer")
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(f"{self.num_value_heads} value heads are no multiple of {self.num_key_heads} key heads")
        if self.num_query_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_query_heads} query heads are no multiple of {self.num_kv_heads} key/value heads")
        if self.rotary_dim % 2 or not 0 <= self.rotary_dim <= self.head_dim:
            raise ValueError(f"rotary_dim is {self.rotary_dim}; expected an even number up to head_dim = {self.head_dim}")

    @property
    def num_layers(self) -> int:
        return len(self.layer_kinds)

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """Model layer index of each linear layer, in depth order."""
        return tuple(i for i, kind in enumerate(self.layer_kinds) if kind == "linear")

    @property
    def conv_channels(self) -> int:
        """E: queries, keys and values of a linear layer side by side."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def max_rank(self) -> int:
        """The rank of an untouched state, min(K, V)."""
        return min(self.key_dim, self.value_dim)

    @classmethod
    def tiny(cls, **changes) -> "Qwen3_5Config":
        """A model for tests whose sizes are all different, so that no transposed axis passes unseen."""
        sizes = dict(
            vocab_size=97,
            width=44,
            mlp_width=59,
            layer_kinds=("linear", "linear", "linear", "attention"),
            num_key_heads=2,
            num_value_heads=6,
            key_dim=8,
            value_dim=11,
            conv_width=4,
            num_query_heads=4,
            num_kv_heads=2,
            head_dim=26,
            rotary_dim=12,
        )
        return cls(**(sizes | changes))
