"""What is compared with flash-linear-attention: sizes and options, read by the tests and by the process that runs fla.

Every pair of options of a layer's family stands together in some case; V is never K.
"""

from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

BATCH = 2


class Op(NamedTuple):
    """A call of an operator.

    Attributes:
        tokens: T.
        steps: n_h.
        decay: "mixed" has decays from none to e^-20 side by side; "mild" is for fla's chunked form in f32, which takes
            differences of one running sum.
        scale: of the queries; None is K^-1/2.
        state: whether there is one before the first token.
        normalised: whether q and k already are, else fla's kernel does it.
    """

    tokens: int
    steps: int = 1
    decay: Literal["none", "mild", "mixed"] = "mixed"
    scale: float | None = None
    state: bool = True
    normalised: bool = True


# The function of fla before the dash.
OPS = {
    "rule recurrent": Op(71, scale=0.3),
    "rule recurrent - default scale": Op(37),
    "rule chunk": Op(71, decay="mild"),
    "rule chunk - scale, no state": Op(71, decay="mild", scale=0.3, state=False),
    "rule kernel": Op(23, scale=0.3),
    "rule kernel - normalises": Op(11, normalised=False),
    "product recurrent - 1": Op(37, 1, scale=0.3),
    "product recurrent - 2": Op(37, 2, scale=0.3),
    "product recurrent - 3": Op(23, 3, scale=0.3),
    "product recurrent - 2, no decay": Op(37, 2, decay="none", scale=0.3),
    "delta recurrent": Op(71, decay="none"),
    "delta chunk": Op(64, decay="none", state=False),
    "delta kernel": Op(23, decay="none", scale=0.3),
    "delta kernel - normalises": Op(11, decay="none", normalised=False),
}
WIDE_OPS = {
    "rule recurrent": Op(71, scale=0.3),
    "rule chunk": Op(71, scale=0.3),
    "product recurrent - 1": Op(37, 1, scale=0.3),
    "product recurrent - 2": Op(37, 2, scale=0.3),
    "product recurrent - 3": Op(23, 3, scale=0.3),
    "product recurrent - 2, no decay": Op(37, 2, decay="none", scale=0.3),
    "delta recurrent": Op(71, decay="none"),
}


def op_inputs(op: Op) -> dict[str, np.ndarray]:
    """f64 q, k, v, g, beta and state, of one seed, and weights of o and S in a sum whose gradient is taken."""
    H, K, V, P = 3, 10, 7, op.tokens * op.steps
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((BATCH, n, H, K)) for n in (op.tokens, P))
    if op.normalised:
        q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    beta = rng.uniform(0, 2, (BATCH, P, H))
    beta[:, ::7], beta[:, 3::7] = 2, 1
    decays = {"none": [0.0], "mild": [0, -1e-3, -0.1, -0.3], "mixed": [0, -1e-3, -0.1, -1, -5, -20]}[op.decay]
    arrays = {
        "q": q,
        "k": k,
        "v": rng.standard_normal((BATCH, P, H, V)),
        "g": rng.choice(decays, (BATCH, op.tokens, H)) * rng.uniform(0.5, 1, (BATCH, op.tokens, H)),
        "beta": beta,
        "state": rng.standard_normal((BATCH, H, K, V)),
        "weight_o": rng.standard_normal((BATCH, op.tokens, H, V)),
        "weight_S": rng.standard_normal((BATCH, H, K, V)),
    }
    left_out = [*(["g"] if op.decay == "none" else []), *([] if op.state else ["state"])]
    return {name: x for name, x in arrays.items() if name not in left_out}


class Layer(NamedTuple):
    """A layer of a family and its options in fla's names; ``padding``: of each row on the left, in its first segment."""

    family: str
    options: dict
    padding: tuple[int, ...] | None = None


WIDTH = 20
LAYER_SEGMENTS = (7, 7)
COMMON = {"hidden_size": WIDTH, "num_heads": 2, "norm_eps": 1e-5}
PRODUCT = COMMON | {"head_dim": 8, "expand_v": 0.75}
DELTA = COMMON | {"hidden_size": 24, "num_heads": 3, "expand_k": 1.25, "expand_v": 0.75}


def gated_deltanet(value_heads: int, negative: bool, gate: str | None, conv: bool, **others) -> Layer:
    activation = {} if gate is None else {"output_gate_activation": gate}
    options = {
        "num_v_heads": value_heads,
        "allow_neg_eigval": negative,
        "use_gate": gate is not None,
        "use_short_conv": conv,
    }
    return Layer("gated_deltanet", PRODUCT | options | activation, **others)


def gated_deltaproduct(steps: int, forget: bool, negative: bool, conv: bool, gate: bool, heads: int = 2, **others) -> Layer:
    options = {"num_householder": steps, "use_forget_gate": forget, "allow_neg_eigval": negative, "num_v_heads": heads}
    return Layer("gated_deltaproduct", PRODUCT | options | {"use_short_conv": conv, "use_output_gate": gate}, **others)


def delta_net(beta: bool, negative: bool, gate: bool, norm: str, activation: str, conv: bool) -> Layer:
    options = {"use_beta": beta, "allow_neg_eigval": negative, "use_gate": gate, "use_short_conv": conv}
    return Layer("delta_net", DELTA | options | {"qk_norm": norm, "qk_activation": activation})


LAYERS = {
    "net, swish, conv": gated_deltanet(2, False, "swish", True),
    "net, 2 value heads a key head, negative, sigmoid, conv": gated_deltanet(4, True, "sigmoid", True),
    "net, negative, no gate, no conv": gated_deltanet(2, True, None, False),
    "net, 2 value heads a key head, no gate, conv": gated_deltanet(4, False, None, True),
    "net, 2 value heads a key head, negative, swish, no conv": gated_deltanet(4, True, "swish", False),
    "net, sigmoid, no conv": gated_deltanet(2, False, "sigmoid", False),
    "net, padding": gated_deltanet(4, True, "swish", True, padding=(0, 3)),
    "product of 1, decay, conv, gate": gated_deltaproduct(1, True, False, True, True),
    "product of 2, decay, negative, conv": gated_deltaproduct(2, True, True, True, False),
    "product of 3, decay, negative, gate": gated_deltaproduct(3, True, True, False, True),
    "product of 2, gate": gated_deltaproduct(2, False, False, False, True),
    "product of 3, 2 value heads a key head, conv": gated_deltaproduct(3, False, False, True, False, 4),
    "product of 1, 2 value heads a key head, negative": gated_deltaproduct(1, False, True, False, False, 4),
    "product of 2, negative, conv, gate": gated_deltaproduct(2, False, True, True, True),
    "product of 2, 2 value heads a key head, decay, conv, gate": gated_deltaproduct(2, True, False, True, True, 4),
    "product of 2, padding": gated_deltaproduct(2, True, True, True, True, padding=(2, 0)),
    "delta, beta, l2 silu, conv": delta_net(True, False, False, "l2", "silu", True),
    "delta, negative, gate, sum silu": delta_net(False, True, True, "sum", "silu", False),
    "delta, beta, gate, l2 relu, conv": delta_net(True, False, True, "l2", "relu", True),
    "delta, beta, negative, sum elu, conv": delta_net(True, True, False, "sum", "elu", True),
    "delta, l2 identity, conv": delta_net(False, False, False, "l2", "identity", True),
    "delta, beta, gate, l2 elu": delta_net(True, False, True, "l2", "elu", False),
    "delta, negative, gate, l2 relu": delta_net(False, True, True, "l2", "relu", False),
    "delta, sum elu, conv": delta_net(False, False, False, "sum", "elu", True),
    "delta, beta, sum relu": delta_net(True, False, False, "sum", "relu", False),
    "delta, beta, negative, gate, sum identity": delta_net(True, True, True, "sum", "identity", False),
}


def layer_inputs(layer: Layer) -> tuple[np.ndarray, np.ndarray | None]:
    """Activations f32 [B, T, D] of all segments, and the mask of padding, False on the left."""
    T = sum(LAYER_SEGMENTS)
    x = np.random.default_rng(1).standard_normal((BATCH, T, layer.options["hidden_size"])).astype(np.float32)
    return x, None if layer.padding is None else np.arange(T) >= np.array(layer.padding)[:, None]


class Model(NamedTuple):
    """A model of a family and its configuration in fla's names; ``padding`` as of a layer."""

    family: str
    config: dict
    splits: tuple[int, ...] = (5, 1, 8)
    padding: tuple[int, ...] | None = None


SIZES = {"vocab_size": 97, "hidden_size": 40, "intermediate_size": 59, "num_hidden_layers": 2, "num_heads": 3}
HEADS = {"head_dim": 8, "expand_v": 0.75}
NET = {"num_v_heads": 6, "allow_neg_eigval": True, "tie_word_embeddings": True}
NET_HYBRID = {
    "num_v_heads": 6,
    "output_gate_activation": "sigmoid",
    "attn": {"layers": [1], "num_heads": 4, "num_kv_heads": 2, "qkv_bias": True, "window_size": 4},
}
MODELS = {
    "net": Model(
        "gated_deltanet", SIZES | HEADS | {"num_v_heads": 6, "allow_neg_eigval": True, "tie_word_embeddings": True}
    ),
    "net hybrid": Model("gated_deltanet", SIZES | HEADS | NET_HYBRID),
    "net hybrid, padding": Model("gated_deltanet", SIZES | HEADS | NET_HYBRID, (8, 1), (3, 0)),
    "product": Model(
        "gated_deltaproduct",
        SIZES | {"head_dim": 8, "expand_v": 1.5, "num_householder": 2, "use_forget_gate": True, "allow_neg_eigval": True},
    ),
    "product hybrid": Model(
        "gated_deltaproduct",
        SIZES
        | HEADS
        | {
            "num_hidden_layers": 3,
            "num_householder": 3,
            "use_output_gate": False,
            "tie_word_embeddings": True,
            "attn": [
                {"layers": [0], "num_heads": 4, "num_kv_heads": 1, "window_size": 6, "rope_theta": 1e3},
                {"layers": [2], "num_heads": 2, "qkv_bias": True},
            ],
        },
    ),
    "delta": Model("delta_net", SIZES | {"num_heads": 4, "expand_v": 0.6, "tie_word_embeddings": True}),
    "delta, long": Model("delta_net", SIZES | {"num_heads": 4, "expand_v": 0.6, "num_hidden_layers": 1}, (70, 3)),
    "delta hybrid": Model(
        "delta_net",
        SIZES
        | {"num_heads": 4, "expand_k": 1.2, "use_gate": True, "qk_norm": "sum", "qk_activation": "elu"}
        | {"attn": {"layers": [0], "num_heads": 5}},
    ),
}


def model_inputs(model: Model) -> tuple[np.ndarray, np.ndarray | None]:
    """Different texts [B, T], and the mask of padding, False on the left."""
    T = sum(model.splits)
    tokens = np.random.default_rng(2).integers(0, model.config["vocab_size"], (BATCH, T))
    return tokens, None if model.padding is None else np.arange(T) >= np.array(model.padding)[:, None]


def read_arrays(file: Path) -> dict[str, np.ndarray]:
    """The arrays of a .npz file, which is closed again."""
    with np.load(file) as arrays:
        return dict(arrays)
