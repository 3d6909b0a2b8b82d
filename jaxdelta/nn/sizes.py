"""Sizes of one layer, independent of the model."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

OutputGate: TypeAlias = Literal[None, "silu", "sigmoid"]
Activation: TypeAlias = Literal["silu", "relu", "elu", "identity"]
Normalisation: TypeAlias = Literal["l2", "sum"]
CHOICES = {"output_gate": get_args(OutputGate), "qk_activation": get_args(Activation), "qk_norm": get_args(Normalisation)}


def check_counts(sizes: Any, *may_be_zero: str) -> None:
    """Raise ValueError if an int field of ``sizes`` is below 1; fields named in ``may_be_zero`` are not checked."""
    for name, size in vars(sizes).items():
        if isinstance(size, int) and not isinstance(size, bool) and name not in may_be_zero and size < 1:
            raise ValueError(f"{name} is {size}; expected at least 1")


class StateShape(NamedTuple):
    """Shape of a linear layer's states: H value heads of K x V."""

    heads: int
    key_dim: int
    value_dim: int

    @property
    def directions(self) -> int:
        """Number of singular directions of a state, min(K, V): the rank of an untouched one."""
        return min(self.key_dim, self.value_dim)


@dataclass(frozen=True)
class LinearSizes:
    """Sizes and options of a linear layer.

    Attributes:
        width: D, the residual stream.
        num_key_heads: key heads.
        num_value_heads: H, a multiple of ``num_key_heads``.
        key_dim: K.
        value_dim: V.
        conv_width: W, taps of the short convolution; 1 is no convolution.
        num_householder: n_h, writes of each token.
        norm_eps: eps of the norm of the heads' outputs.
        write_gate: whether beta is learned; else it is 1 (2 with negative eigenvalues).
        forget_gate: whether the state decays.
        negative_eigenvalues: whether beta reaches 2 rather than 1.
        output_gate: activation of the output gate; None is no gate.
        qk_activation: activation of queries and keys.
        qk_norm: norm that queries and keys are divided by: "l2", or "sum" for the sum of magnitudes.

    Raises:
        ValueError: sizes that contradict one another, or an unknown option.
    """

    width: int
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    num_householder: int = 1
    norm_eps: float = 1e-6
    write_gate: bool = True
    forget_gate: bool = True
    negative_eigenvalues: bool = False
    output_gate: OutputGate = "silu"
    qk_activation: Activation = "silu"
    qk_norm: Normalisation = "l2"

    def __post_init__(self):
        check_counts(self)
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(f"{self.num_value_heads} value heads are no multiple of {self.num_key_heads} key heads")
        for field, values in CHOICES.items():
            if getattr(self, field) not in values:
                raise ValueError(f"{field} is {getattr(self, field)!r}; expected one of {', '.join(map(str, values))}")

    @property
    def state(self) -> StateShape:
        """Shape of the states."""
        return StateShape(self.num_value_heads, self.key_dim, self.value_dim)

    @property
    def conv_channels(self) -> int:
        """E, channels of the convolution: queries, keys and values side by side."""
        n = self.num_householder
        return (1 + n) * self.num_key_heads * self.key_dim + n * self.num_value_heads * self.value_dim


@dataclass(frozen=True)
class AttentionSizes:
    """Sizes of an attention layer.

    Attributes:
        num_query_heads: query heads, a multiple of ``num_kv_heads``.
        num_kv_heads: key/value heads.
        head_dim: entries of a head.
        rope_theta: base of the rotary frequencies.
        window: tokens that a token reads, itself included; None is all up to it.
        rotary_dim: leading entries of a head that rotate with the position, an even number; None is all.
        bias: whether queries, keys and values have a bias.

    Raises:
        ValueError: sizes that contradict one another.
    """

    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 1e4
    window: int | None = None
    rotary_dim: int | None = None
    bias: bool = False

    def __post_init__(self):
        check_counts(self, "rotary_dim")
        if self.num_query_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_query_heads} query heads are no multiple of {self.num_kv_heads} key/value heads")
        if self.rotated % 2 or not 0 <= self.rotated <= self.head_dim:
            raise ValueError(f"{self.rotated} entries rotate; expected an even number up to head_dim = {self.head_dim}")

    @property
    def rotated(self) -> int:
        """Entries of a head that rotate."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim
