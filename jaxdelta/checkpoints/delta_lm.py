"""Checkpoints of flash-linear-attention's DeltaNet, Gated DeltaNet and Gated DeltaProduct models, both ways.

Source: flash-linear-attention 0.6. Rows of keys, values and write strengths of a DeltaProduct layer are step-major. The
first release of DeltaProduct stored the rows of each step as a separate tensor (``k_projs.0``, ``k_projs.1`` ...); loading
stacks them. Options that change how fla computes but not what (fused kernels, chunk or recurrent mode) are ignored.
"""

import re
from collections.abc import Collection
from typing import Any

from jaxdelta.checkpoints.files import CheckpointError
from jaxdelta.checkpoints.key_table import (
    EMBED,
    HEAD,
    ROTARY,
    Entry,
    field,
    fraction,
    ignored_names,
    layers,
    match,
    one_value,
    prefix_of,
    real,
    refuse_elsewhere,
    require,
    tied_embeddings,
)
from jaxdelta.models.config import FAMILIES, DeltaLMConfig
from jaxdelta.nn.sizes import CHOICES, AttentionSizes

MODEL_TYPES = FAMILIES
ARCHITECTURES = {
    "delta_net": "DeltaNetForCausalLM",
    "gated_deltanet": "GatedDeltaNetForCausalLM",
    "gated_deltaproduct": "GatedDeltaProductForCausalLM",
}
PREFIXES = ("model.", "")  # the second for a model saved without its head
IGNORED = {
    "rotary frequencies": ROTARY,
    # The first release made one for each step and used only the first.
    "unused query convolutions": re.compile(r"^(model\.)?layers\.\d+\.attn\.q_conv1ds\.[1-9]\d*\.weight$"),
}
# The first Gated DeltaNets had one for each head, inherited from Mamba2, and did not use it.
UNUSED_SKIPS = {"unused skip weights": re.compile(r"^(model\.)?layers\.\d+\.attn\.D$")}
GATE_NAMES = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}  # fla's default last of its synonyms, so it is written
# Names in the first release of DeltaProduct, which had one tensor for each step (only one for queries).
LISTS = {f"{x}_proj.weight": f"{x}_projs.{{}}.weight" for x in "kvb"} | {
    f"{x}_conv1d.weight": f"{x}_conv1ds.{{}}.weight" for x in "qkv"
}


def config_from_json(raw: dict[str, Any]) -> DeltaLMConfig:
    """The configuration of a ``config.json``; missing fields have fla's defaults.

    Raises:
        CheckpointError: a field has a value that is invalid or that this library does not support.
    """
    family = raw["model_type"]
    refuse_elsewhere(raw)
    require(raw, "hidden_act", "swish", default="swish")
    require(raw, "attnres_block_size", None, default=None)
    width, depth = field(raw, "hidden_size", 2048), layers(raw, 24 if family == "delta_net" else 21)
    heads = field(raw, "num_heads", 16 if family == "delta_net" else 6)
    if heads < 1:
        raise CheckpointError(f"config.json has num_heads = {heads}; expected at least 1")
    attention = _attention(raw, width, depth)
    try:
        return DeltaLMConfig(
            family=family,
            vocab_size=field(raw, "vocab_size", 32000),
            width=width,
            mlp_width=_mlp_width(raw, width),
            layer_kinds=tuple("attention" if i in attention else "linear" for i in range(depth)),
            attention=tuple(attention[i] for i in sorted(attention)),
            conv_width=field(raw, "conv_size", 4) if _flag(raw, "use_short_conv", True) else 1,
            negative_eigenvalues=_flag(raw, "allow_neg_eigval", False),
            norm_eps=real(raw, "norm_eps", 1e-6),
            tied=tied_embeddings(raw, raw),
            max_position=field(raw, "max_position_embeddings", 2048),
            **_linear_sizes(raw, family, width, heads),
        )
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"config.json: {error}") from None


def _linear_sizes(raw: dict[str, Any], family: str, width: int, heads: int) -> dict[str, Any]:
    """Fields that the families name differently."""
    if family == "delta_net":
        gated = _flag(raw, "use_gate", False)
        return dict(
            num_key_heads=heads,
            num_value_heads=heads,
            key_dim=_whole(width * real(raw, "expand_k", 1.0) / heads, "hidden_size * expand_k / num_heads"),
            value_dim=_whole(width * real(raw, "expand_v", 1.0) / heads, "hidden_size * expand_v / num_heads"),
            write_gate=_flag(raw, "use_beta", True),
            forget_gate=False,
            output_gate="silu" if gated else None,
            qk_activation=_choice(raw, "qk_activation", "silu", CHOICES["qk_activation"]),
            qk_norm=_choice(raw, "qk_norm", "l2", CHOICES["qk_norm"]),
        )
    key_dim = field(raw, "head_dim", 256)
    sizes = dict(
        num_key_heads=heads,
        num_value_heads=heads,
        key_dim=key_dim,
        value_dim=_whole(key_dim * real(raw, "expand_v", 2.0), "head_dim * expand_v"),
    )
    if family == "gated_deltanet":
        activation = _choice(raw, "output_gate_activation", "swish", GATE_NAMES)
        value_heads = heads if raw.get("num_v_heads") is None else field(raw, "num_v_heads")
        return sizes | dict(
            num_value_heads=value_heads,
            forget_gate=True,
            output_gate=GATE_NAMES[activation] if _flag(raw, "use_gate", True) else None,
        )
    # The first release called the output gate use_gate, which fla 0.6 silently ignores.
    gated = _flag(raw, "use_output_gate", _flag(raw, "use_gate", True))
    return sizes | dict(
        num_householder=field(raw, "num_householder", 1),
        forget_gate=_flag(raw, "use_forget_gate", False),
        output_gate="silu" if gated else None,
    )


def config_to_json(config: DeltaLMConfig, raw: dict[str, Any] | None = None) -> dict[str, Any]:
    """A ``config.json`` that fla reads; unknown fields of ``raw`` are kept.

    Raises:
        ValueError: the family's format cannot express these sizes.
    """
    c = config
    if c.num_value_heads != c.num_key_heads and c.family != "gated_deltanet":
        raise ValueError(f"a {c.family} checkpoint has as many value heads as key heads")
    if c.output_gate == "sigmoid" and c.family != "gated_deltanet":
        raise ValueError(f"a {c.family} checkpoint has no sigmoid output gate")
    if any(sizes.num_query_heads * sizes.head_dim != c.width for sizes in c.attention):
        raise ValueError("heads of an attention layer together have the width of the model in a checkpoint of fla")
    if any(sizes.rotated != sizes.head_dim for sizes in c.attention):
        raise ValueError("heads of an attention layer rotate as a whole in a checkpoint of fla")
    known = {
        "architectures": [ARCHITECTURES[c.family]],
        "model_type": c.family,
        "vocab_size": c.vocab_size,
        "hidden_size": c.width,
        "intermediate_size": c.mlp_width,
        "hidden_act": "swish",
        "num_hidden_layers": c.num_layers,
        "num_heads": c.num_key_heads,
        "use_short_conv": c.conv_width > 1,
        "conv_size": c.conv_width if c.conv_width > 1 else (raw or {}).get("conv_size", 4),
        "allow_neg_eigval": c.negative_eigenvalues,
        "norm_eps": c.norm_eps,
        "tie_word_embeddings": c.tied,
        "max_position_embeddings": c.max_position,
        "attn": _attention_json(c),
    }
    gated = c.output_gate is not None
    if c.family == "delta_net":
        known |= {
            "expand_k": c.num_key_heads * c.key_dim / c.width,
            "expand_v": c.num_value_heads * c.value_dim / c.width,
            "use_beta": c.write_gate,
            "use_gate": gated,
            "qk_activation": c.qk_activation,
            "qk_norm": c.qk_norm,
        }
    else:
        known |= {"head_dim": c.key_dim, "expand_v": fraction(c.value_dim, c.key_dim)}
    if c.family == "gated_deltanet":
        gate = (raw or {}).get("output_gate_activation", "swish")  # kept if it is a synonym
        if c.output_gate is not None and GATE_NAMES[gate] != c.output_gate:
            gate = {"silu": "swish"}.get(c.output_gate, c.output_gate)
        known |= {"num_v_heads": c.num_value_heads, "use_gate": gated, "output_gate_activation": gate}
    if c.family == "gated_deltaproduct":
        known |= {"num_householder": c.num_householder, "use_forget_gate": c.forget_gate, "use_output_gate": gated}
    return {name: value for name, value in (raw or {}).items() if name != "transformers_weights"} | known


def entries(config: DeltaLMConfig) -> list[Entry]:
    """Every tensor of the model."""
    c, D, F = config, config.width, config.mlp_width
    found = [Entry(EMBED, "embeddings.weight", (c.vocab_size, D))]
    if not c.tied:
        found.append(Entry(("head",), HEAD, (c.vocab_size, D)))
    for i, kind in enumerate(c.layer_kinds):
        at = ("layers", i)
        mixer = _linear_tensors(c) if kind == "linear" else _attention_tensors(c, c.attention_of(i))
        found += [Entry((*at, "mixer", leaf), f"layers.{i}.attn.{name}", shape) for leaf, (name, shape) in mixer.items()]
        found += [
            Entry((*at, "mlp", leaf), f"layers.{i}.mlp.{leaf}_proj.weight", shape)
            for leaf, shape in (("gate", (F, D)), ("up", (F, D)), ("down", (D, F)))
        ]
        found.append(Entry((*at, "input_norm"), f"layers.{i}.attn_norm.weight", (D,)))
        found.append(Entry((*at, "post_norm"), f"layers.{i}.mlp_norm.weight", (D,)))
    found.append(Entry(("final_norm",), "norm.weight", (D,)))
    return found


def _linear_tensors(c: DeltaLMConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    D, H, n, W = c.width, c.num_value_heads, c.num_householder, c.conv_width
    rows = {"q": c.num_key_heads * c.key_dim, "k": n * c.num_key_heads * c.key_dim, "v": n * H * c.value_dim}
    found = {x: (f"{x}_proj.weight", (rows[x], D)) for x in "qkv"}
    if W > 1:
        found |= {f"conv_{x}": (f"{x}_conv1d.weight", (rows[x], 1, W)) for x in "qkv"}
    if c.write_gate:
        found["b"] = ("b_proj.weight", (n * H, D))
    if c.forget_gate:
        found |= {"a": ("a_proj.weight", (H, D)), "A_log": ("A_log", (H,)), "dt_bias": ("dt_bias", (H,))}
    if c.output_gate is not None:
        found["z"] = ("g_proj.weight", (H * c.value_dim, D))
    return found | {"norm": ("o_norm.weight", (c.value_dim,)), "out": ("o_proj.weight", (D, H * c.value_dim))}


def _attention_tensors(c: DeltaLMConfig, sizes: AttentionSizes) -> dict[str, tuple[str, tuple[int, ...]]]:
    A, G, d = sizes.num_query_heads, sizes.num_kv_heads, sizes.head_dim
    rows = {"q": A * d, "k": G * d, "v": G * d}
    found = {x: (f"{x}_proj.weight", (rows[x], c.width)) for x in "qkv"}
    if sizes.bias:
        found |= {f"{x}_bias": (f"{x}_proj.bias", (rows[x],)) for x in "qkv"}
    return found | {"out": ("o_proj.weight", (c.width, A * d))}


def stored_names(config: DeltaLMConfig, names: list[str]) -> tuple[dict[Entry, tuple[str, ...]], dict[str, list[str]]]:
    """The stored names of every entry, and the ignored names by group.

    Raises:
        CheckpointError: as :func:`key_table.match`.
    """
    ignored = ignored_names(IGNORED | (UNUSED_SKIPS if config.family == "gated_deltanet" else {}), names)
    left = set(names) - {n for group in ignored.values() for n in group}
    prefix = prefix_of(left, PREFIXES)
    expected = {e: _parts(e.stored_name(prefix), config.num_householder, left) for e in entries(config)}
    found, copies = match(expected, left, tied=config.tied)
    return found, ignored | copies


def _parts(whole: str, steps: int, names: set[str]) -> tuple[str, ...]:
    """Names of the tensors whose rows an entry stacks: one, or one for each step in checkpoints of the first release."""
    folder, _, leaf = whole.rpartition("attn.")
    if whole in names or leaf not in LISTS or f"{folder}attn.{LISTS[leaf].format(0)}" not in names:
        return (whole,)
    count = 1 if leaf.startswith("q_") else min(steps, len(names) + 1)  # bounds the list of missing names
    return tuple(f"{folder}attn.{LISTS[leaf].format(j)}" for j in range(count))


def _attention(raw: dict[str, Any], width: int, layers: int) -> dict[int, AttentionSizes]:
    """Sizes by layer index, from one specification or a list of them."""
    value = raw.get("attn")
    specs = [] if value is None else [value] if isinstance(value, dict) else value
    if not isinstance(specs, list) or not all(isinstance(s, dict) and isinstance(s.get("layers"), list) for s in specs):
        raise CheckpointError(f"config.json has attn = {value!r}; expected null, or objects that list their layers")
    found: dict[int, AttentionSizes] = {}
    for spec in specs:
        heads = field(spec, "num_heads")
        if heads < 1 or width % heads:
            raise CheckpointError(f"config.json has attn with {heads} heads for a width of {width}")
        for name, default in (("rope_theta", 1e4), ("window_size", None)):
            one_value(name, [("in attn", spec)], beside=[("at the top level", raw)], default=default)
        try:
            sizes = AttentionSizes(
                num_query_heads=heads,
                num_kv_heads=heads if spec.get("num_kv_heads") is None else field(spec, "num_kv_heads"),
                head_dim=width // heads,
                rope_theta=real(spec, "rope_theta", 1e4),
                window=None if spec.get("window_size") is None else field(spec, "window_size"),
                bias=_flag(spec, "qkv_bias", False),
            )
        except CheckpointError:
            raise
        except ValueError as error:
            raise CheckpointError(f"config.json, attn: {error}") from None
        for layer in spec["layers"]:
            if not isinstance(layer, int) or isinstance(layer, bool) or layer in found or not 0 <= layer < layers:
                raise CheckpointError(
                    f"config.json has attn.layers = {spec['layers']!r}; expected different layers from 0 to {layers - 1}"
                )
            found[layer] = sizes
    return found


def _attention_json(config: DeltaLMConfig) -> list[dict[str, Any]] | dict[str, Any] | None:
    layers = [i for i, kind in enumerate(config.layer_kinds) if kind == "attention"]
    specs = []
    for sizes in dict.fromkeys(config.attention):
        specs.append(
            {
                "layers": [i for i in layers if config.attention_of(i) == sizes],
                "num_heads": sizes.num_query_heads,
                "num_kv_heads": sizes.num_kv_heads,
                "qkv_bias": sizes.bias,
                "window_size": sizes.window,
                "rope_theta": sizes.rope_theta,
            }
        )
    return None if not specs else specs[0] if len(specs) == 1 else specs


def _mlp_width(raw: dict[str, Any], width: int) -> int:
    """``intermediate_size``, or as in fla the next multiple of 256 from two thirds of hidden_ratio * width."""
    if raw.get("intermediate_size") is not None:
        return field(raw, "intermediate_size")
    ratio = 4 if raw.get("hidden_ratio") is None else real(raw, "hidden_ratio")
    return -(-int(width * ratio * 2 / 3) // 256) * 256


def _flag(fields: dict[str, Any], name: str, default: bool) -> bool:
    value = fields.get(name, default)
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json has {name} = {value!r}; expected true or false")
    return value


def _choice(fields: dict[str, Any], name: str, default: str, values: Collection[str]) -> str:
    value = fields.get(name, default)
    if not isinstance(value, str) or value not in values:
        raise CheckpointError(f"config.json has {name} = {value!r}; expected {', '.join(values)}")
    return value


def _whole(value: float, name: str) -> int:
    if abs(value - round(value)) > 1e-5 * max(1.0, value):
        raise CheckpointError(f"config.json: {name} is {value:g}; expected a whole number")
    return round(value)
