"""Configurations of the model families, in this library's names."""

from dataclasses import dataclass, fields
from typing import Literal, get_args

from jaxdelta.nn.sizes import Activation, AttentionSizes, LinearSizes, Normalisation, OutputGate, StateShape, check_counts

LayerKind = Literal["linear", "attention"]
Family = Literal["delta_net", "gated_deltanet", "gated_deltaproduct"]
FAMILIES = get_args(Family)
TITLES = {"delta_net": "DeltaNet", "gated_deltanet": "Gated DeltaNet", "gated_deltaproduct": "Gated DeltaProduct"}
# Fields that a family fixes: field, family, value.
FIXED = (
    ("num_householder", "delta_net", 1),
    ("num_householder", "gated_deltanet", 1),
    ("forget_gate", "delta_net", False),
    ("forget_gate", "gated_deltanet", True),
    ("write_gate", "gated_deltanet", True),
    ("write_gate", "gated_deltaproduct", True),
    ("qk_activation", "gated_deltanet", "silu"),
    ("qk_activation", "gated_deltaproduct", "silu"),
    ("qk_norm", "gated_deltanet", "l2"),
    ("qk_norm", "gated_deltaproduct", "l2"),
)


class DecoderConfig:
    """Fields that the configurations of all families share, and sizes that follow from them.

    Attributes:
        vocab_size: words of the embedding and of the head.
        width: D, the residual stream.
        mlp_width: F, the hidden layer of the MLP.
        layer_kinds: "linear" or "attention" for each layer, in depth order.
        norm_eps: eps of every RMSNorm.
        tied: whether the head is the embedding.
        max_position: tokens of the longest text the model was made for; this library sets no such limit.

    Fields of the linear layers have the names of :class:`~jaxdelta.nn.sizes.LinearSizes`.

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
    norm_eps: float
    tied: bool
    max_position: int
    num_householder: int = 1

    def __post_init__(self):
        check_counts(self, "rotary_dim")
        if not self.layer_kinds or set(self.layer_kinds) - {"linear", "attention"}:
            raise ValueError(f"layer_kinds is {self.layer_kinds}; expected 'linear' or 'attention' for each layer")
        _ = self.linear_sizes, self.attention_sizes  # these raise if the sizes of a layer contradict one another

    @property
    def title(self) -> str:
        """The common name of the model."""
        raise NotImplementedError

    @property
    def linear_title(self) -> str:
        """The common name of its linear layers."""
        raise NotImplementedError

    @property
    def num_layers(self) -> int:
        return len(self.layer_kinds)

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """Model layer index of each linear layer, in depth order."""
        return tuple(i for i, kind in enumerate(self.layer_kinds) if kind == "linear")

    def linear_of(self, layer: int) -> LinearSizes:
        """Sizes of a linear layer, given its model layer index."""
        return LinearSizes(
            **{field.name: getattr(self, field.name) for field in fields(LinearSizes) if hasattr(self, field.name)}
        )

    @property
    def linear_sizes(self) -> tuple[LinearSizes, ...]:
        """Sizes of each linear layer in depth order; they may differ."""
        return tuple(self.linear_of(layer) for layer in self.linear_layers)

    @property
    def largest_state(self) -> StateShape:
        """The largest H, K and V of any linear layer, to which stacked states are padded."""
        shapes = [c.state for c in self.linear_sizes] or [StateShape(0, 0, 0)]
        return StateShape(*map(max, zip(*shapes, strict=True)))

    @property
    def heads(self) -> tuple[tuple[int, int], ...]:
        """(model layer index, value head) of every head that has a state."""
        sizes = zip(self.linear_layers, self.linear_sizes, strict=True)
        return tuple((layer, head) for layer, c in sizes for head in range(c.num_value_heads))

    @property
    def attention_sizes(self) -> tuple[AttentionSizes, ...]:
        """Sizes of each attention layer in depth order."""
        raise NotImplementedError

    def attention_of(self, layer: int) -> AttentionSizes:
        """Sizes of an attention layer, given its model layer index."""
        return self.attention_sizes[self.layer_kinds[:layer].count("attention")]

    @property
    def max_rank(self) -> int:
        """The largest min(K, V) of any linear layer: the rank of an untouched state."""
        return max((c.state.directions for c in self.linear_sizes), default=0)


@dataclass(frozen=True)
class Qwen3_5Config(DecoderConfig):
    """Sizes of a Qwen3.5 text model (Hugging Face's ``qwen3_5_text``).

    Attributes:
        vocab_size, width, mlp_width, layer_kinds, norm_eps, tied, max_position: see :class:`DecoderConfig`; "linear" is
            Gated DeltaNet, "attention" gated full attention.
        num_key_heads, num_value_heads, key_dim, value_dim, conv_width: of linear layers, see
            :class:`~jaxdelta.nn.sizes.LinearSizes`.
        num_query_heads, num_kv_heads, head_dim, rotary_dim, rope_theta: of attention layers, see
            :class:`~jaxdelta.nn.sizes.AttentionSizes`.

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

    title = "Qwen3.5 text model"
    linear_title = "Gated DeltaNet"

    @property
    def attention_sizes(self) -> tuple[AttentionSizes, ...]:
        sizes = AttentionSizes(
            self.num_query_heads, self.num_kv_heads, self.head_dim, self.rope_theta, rotary_dim=self.rotary_dim
        )
        return (sizes,) * self.layer_kinds.count("attention")

    @classmethod
    def size_0_8b(cls) -> "Qwen3_5Config":
        """Qwen3.5-0.8B: 752,393,024 parameters."""
        return cls(
            vocab_size=248320,
            width=1024,
            mlp_width=3584,
            layer_kinds=("linear", "linear", "linear", "attention") * 6,
            num_key_heads=16,
            num_value_heads=16,
            key_dim=128,
            value_dim=128,
            conv_width=4,
            num_query_heads=8,
            num_kv_heads=2,
            head_dim=256,
            rotary_dim=64,
            max_position=262144,
        )

    @classmethod
    def tiny(cls, **changes) -> "Qwen3_5Config":
        """Sizes for tests, chosen to differ so that a transposed axis is noticed; ``changes`` are fields."""
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


@dataclass(frozen=True)
class DeltaLMConfig(DecoderConfig):
    """Sizes of a language model of flash-linear-attention.

    Attributes:
        family: "delta_net", "gated_deltanet" or "gated_deltaproduct", as fla names them.
        vocab_size, width, mlp_width, layer_kinds, norm_eps, tied, max_position: see :class:`DecoderConfig`.
        num_key_heads, num_value_heads, key_dim, value_dim, conv_width, num_householder, write_gate, forget_gate,
            negative_eigenvalues, output_gate, qk_activation, qk_norm: of linear layers, see
            :class:`~jaxdelta.nn.sizes.LinearSizes`.
        attention: sizes of each attention layer, in depth order.

    Raises:
        ValueError: sizes that contradict one another.
    """

    family: Family
    vocab_size: int
    width: int
    mlp_width: int
    layer_kinds: tuple[LayerKind, ...]
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int = 4
    num_householder: int = 1
    write_gate: bool = True
    forget_gate: bool = True
    negative_eigenvalues: bool = False
    output_gate: OutputGate = "silu"
    qk_activation: Activation = "silu"
    qk_norm: Normalisation = "l2"
    attention: tuple[AttentionSizes, ...] = ()
    norm_eps: float = 1e-6
    tied: bool = False
    max_position: int = 2048

    def __post_init__(self):
        super().__post_init__()
        if self.family not in FAMILIES:
            raise ValueError(f"family is {self.family!r}; expected one of {', '.join(FAMILIES)}")
        if len(self.attention) != self.layer_kinds.count("attention"):
            raise ValueError(f"{len(self.attention)} sizes for {self.layer_kinds.count('attention')} attention layers")
        for field, family, value in FIXED:
            if family == self.family and getattr(self, field) != value:
                raise ValueError(f"{field} is {getattr(self, field)!r}; {family} models always have {value!r}")

    @property
    def title(self) -> str:
        return f"{self.linear_title} model of flash-linear-attention"

    @property
    def linear_title(self) -> str:
        return TITLES[self.family]

    @property
    def attention_sizes(self) -> tuple[AttentionSizes, ...]:
        return self.attention

    @property
    def num_query_heads(self) -> int:
        """Query heads of the widest attention layer; 0 where there is none."""
        return max((sizes.num_query_heads for sizes in self.attention), default=0)

    @classmethod
    def tiny(cls, family: Family = "gated_deltaproduct", **changes) -> "DeltaLMConfig":
        """Sizes for tests, chosen to differ so that a transposed axis is noticed; ``changes`` are fields."""
        sizes = dict(
            family=family,
            vocab_size=97,
            width=40,
            mlp_width=59,
            layer_kinds=("linear", "attention", "linear"),
            num_key_heads=3,
            num_value_heads=3,
            key_dim=8,
            value_dim=12,
            num_householder=2 if family == "gated_deltaproduct" else 1,
            forget_gate=family != "delta_net",
            output_gate=None if family == "delta_net" else "silu",
            attention=(AttentionSizes(num_query_heads=4, num_kv_heads=2, head_dim=10),),
        )
        return cls(**(sizes | changes))
