"""Qwen3.5 checkpoints: configuration fields and tensor names, both ways.

Source: the Qwen3.5 model of transformers 5.24. A multimodal checkpoint nests the text fields in ``text_config`` and has
the prefix ``model.language_model.`` for text tensors; a text-only one is flat and has ``model.``. Vision and multi-token
prediction tensors are ignored by name. All norms but those of linear layers store offsets from one, here too.
"""

import re
from itertools import chain
from typing import Any

from jaxdelta.checkpoints.files import CheckpointError, some
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
from jaxdelta.models.config import Qwen3_5Config

MODEL_TYPES = ("qwen3_5", "qwen3_5_text")
PREFIXES = ("model.language_model.", "model.", "")  # multimodal model, text model, text model without its head
IGNORED = {
    "vision tower": re.compile(r"^model\.visual\."),
    "multi-token prediction": re.compile(r"^(model\.)?mtp\."),
    "rotary frequencies": ROTARY,
}
KINDS = {"linear_attention": "linear", "full_attention": "attention"}
# What transformers takes for a missing field; fields with None are required here.
DEFAULTS = dict(hidden_act="silu", attention_bias=False, attn_output_gate=True, head_dim=256, rms_norm_eps=1e-6)
DEFAULTS |= dict(linear_conv_kernel_dim=4, max_position_embeddings=32768)
DEFAULTS |= dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"))
DEFAULTS |= dict.fromkeys(("num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads"))
DEFAULTS |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"))
ROPE_DEFAULTS = dict(rope_type="default", rope_theta=None, partial_rotary_factor=0.25)
# Fields that are not kept on saving: the RoPE is written to rope_parameters, the others do not apply.
ELSEWHERE = ("rope_scaling", "rope_theta", "partial_rotary_factor", "text_config", "transformers_weights")


def config_from_json(raw: dict[str, Any]) -> Qwen3_5Config:
    """The configuration of a ``config.json``, nested or flat.

    Raises:
        CheckpointError: a field is missing, or has a value that is invalid or that this library does not support.
    """
    text = _text(raw)
    rope = _rope(text, raw)
    for name in ("hidden_act", "attention_bias", "attn_output_gate"):
        require(text, name, DEFAULTS[name], default=DEFAULTS[name])
    require(rope, "rope_type", "default", default="default")
    head_dim = field(text, "head_dim", DEFAULTS["head_dim"])
    rotary_dim = int(head_dim * real(rope, "partial_rotary_factor"))
    sections = rope["mrope_section"]
    if sections is not None and not (isinstance(sections, list) and all(isinstance(n, int) for n in sections)):
        raise CheckpointError(f"config.json has mrope_section = {sections!r}; expected a list of whole numbers")
    if sections is not None and 2 * sum(sections) != rotary_dim:
        raise CheckpointError(
            f"mrope_section {sections} sums to {sum(sections)}; expected half of {rotary_dim} rotary dims"
        )
    try:
        return Qwen3_5Config(
            vocab_size=field(text, "vocab_size"),
            width=field(text, "hidden_size"),
            mlp_width=field(text, "intermediate_size"),
            layer_kinds=_layer_kinds(text),
            num_key_heads=field(text, "linear_num_key_heads"),
            num_value_heads=field(text, "linear_num_value_heads"),
            key_dim=field(text, "linear_key_head_dim"),
            value_dim=field(text, "linear_value_head_dim"),
            conv_width=field(text, "linear_conv_kernel_dim", DEFAULTS["linear_conv_kernel_dim"]),
            num_query_heads=field(text, "num_attention_heads"),
            num_kv_heads=field(text, "num_key_value_heads"),
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            rope_theta=real(rope, "rope_theta"),
            norm_eps=real(text, "rms_norm_eps", DEFAULTS["rms_norm_eps"]),
            tied=tied_embeddings(text, raw),
            max_position=field(text, "max_position_embeddings", DEFAULTS["max_position_embeddings"]),
        )
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"config.json: {error}") from None


def config_to_json(config: Qwen3_5Config, raw: dict[str, Any] | None = None) -> dict[str, Any]:
    """A text-only ``config.json`` that transformers reads; unknown fields of ``raw`` are kept."""
    known = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.num_layers,
        "layer_types": [{v: k for k, v in KINDS.items()}[kind] for kind in config.layer_kinds],
        "num_attention_heads": config.num_query_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "attention_bias": False,
        "attn_output_gate": True,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "linear_num_key_heads": config.num_key_heads,
        "linear_num_value_heads": config.num_value_heads,
        "linear_key_head_dim": config.key_dim,
        "linear_value_head_dim": config.value_dim,
        "linear_conv_kernel_dim": config.conv_width,
        "max_position_embeddings": config.max_position,
        "tie_word_embeddings": config.tied,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rope_theta,
            "partial_rotary_factor": fraction(config.rotary_dim, config.head_dim),
            "mrope_section": _sections(config.rotary_dim // 2),
            "mrope_interleaved": True,
        },
    }
    text = _text(raw or {})
    if (sections := _rope(text, raw or {})["mrope_section"]) is not None:
        known["rope_parameters"]["mrope_section"] = sections
    return {name: value for name, value in text.items() if name not in ELSEWHERE} | known


def entries(config: Qwen3_5Config) -> list[Entry]:
    """Every tensor of the text model, the embedding first, so that memory peaks early in loading."""
    c, D, F = config, config.width, config.mlp_width
    H, V, A, G, d = c.num_value_heads, c.value_dim, c.num_query_heads, c.num_kv_heads, c.head_dim
    E = c.linear_of(0).conv_channels
    linear = {
        "in_qkv": ("linear_attn.in_proj_qkv.weight", (E, D)),
        "in_z": ("linear_attn.in_proj_z.weight", (H * V, D)),
        "in_b": ("linear_attn.in_proj_b.weight", (H, D)),
        "in_a": ("linear_attn.in_proj_a.weight", (H, D)),
        "conv": ("linear_attn.conv1d.weight", (E, 1, c.conv_width)),
        "A_log": ("linear_attn.A_log", (H,)),
        "dt_bias": ("linear_attn.dt_bias", (H,)),
        "norm": ("linear_attn.norm.weight", (V,)),
        "out": ("linear_attn.out_proj.weight", (D, H * V)),
    }
    attention = {
        "q": ("self_attn.q_proj.weight", (2 * A * d, D)),
        "k": ("self_attn.k_proj.weight", (G * d, D)),
        "v": ("self_attn.v_proj.weight", (G * d, D)),
        "out": ("self_attn.o_proj.weight", (D, A * d)),
        "q_norm": ("self_attn.q_norm.weight", (d,)),
        "k_norm": ("self_attn.k_norm.weight", (d,)),
    }
    found = [Entry(EMBED, "embed_tokens.weight", (c.vocab_size, D))]
    if not c.tied:
        found.append(Entry(("head",), HEAD, (c.vocab_size, D)))
    for i, kind in enumerate(c.layer_kinds):
        at = ("layers", i)
        found += [
            Entry((*at, "mixer", leaf), f"layers.{i}.{name}", shape)
            for leaf, (name, shape) in (linear if kind == "linear" else attention).items()
        ]
        found += [
            Entry((*at, "mlp", leaf), f"layers.{i}.mlp.{leaf}_proj.weight", shape)
            for leaf, shape in (("gate", (F, D)), ("up", (F, D)), ("down", (D, F)))
        ]
        found.append(Entry((*at, "input_norm"), f"layers.{i}.input_layernorm.weight", (D,)))
        found.append(Entry((*at, "post_norm"), f"layers.{i}.post_attention_layernorm.weight", (D,)))
    found.append(Entry(("final_norm",), "norm.weight", (D,)))
    return found


def stored_names(config: Qwen3_5Config, names: list[str]) -> tuple[dict[Entry, tuple[str, ...]], dict[str, list[str]]]:
    """The stored name of every entry, and the ignored names by group.

    Raises:
        CheckpointError: as :func:`key_table.match`.
    """
    ignored = ignored_names(IGNORED, names)
    left = set(names) - {n for group in ignored.values() for n in group}
    prefix = prefix_of(left, PREFIXES)
    found, copies = match({e: (e.stored_name(prefix),) for e in entries(config)}, left, tied=config.tied)
    return found, ignored | copies


def _text(raw: dict[str, Any]) -> dict[str, Any]:
    """The fields of the text model; raises CheckpointError if fields at the top level contradict them."""
    text = raw.get("text_config") or raw
    if not isinstance(text, dict):
        raise CheckpointError(f"config.json has text_config = {text!r}; expected an object")
    refuse_elsewhere(raw)
    if text is not raw:
        refuse_elsewhere(text)
        for name, default in DEFAULTS.items():
            one_value(name, [("in text_config", text)], beside=[("at the top level", raw)], default=default)
    return text


def _rope(text: dict[str, Any], raw: dict[str, Any]) -> dict[str, Any]:
    """RoPE fields, old or new: from ``rope_scaling``, which overrides ``rope_parameters``, from that, or from the top."""
    nested = text is not raw
    scaling, parameters, top = _rope_places(text, "text_config" if nested else "")
    read, beside = ([*scaling, *top], parameters) if text.get("rope_scaling") else ([*parameters, *top], [])
    if nested:
        beside = [*beside, *chain(*_rope_places(raw, ""))]
    values = {name: one_value(name, read, beside=beside, default=default) for name, default in ROPE_DEFAULTS.items()}
    # For text all sections rotate alike, so any of them will do.
    sections = (f["mrope_section"] for _, f in [*read, *beside] if f.get("mrope_section") is not None)
    return values | {"mrope_section": next(sections, None)}


def _rope_places(fields: dict[str, Any], inside: str) -> list[list[tuple[str, dict[str, Any]]]]:
    """Fields of ``rope_scaling``, of ``rope_parameters`` and of the level around them; older files have ``type``."""
    found = []
    for name in ("rope_scaling", "rope_parameters"):
        value = fields.get(name) or {}
        if not isinstance(value, dict):
            raise CheckpointError(f"config.json has {name} = {value!r}; expected an object")
        if kinds := [kind for kind, of_kind in value.items() if isinstance(of_kind, dict)]:
            raise CheckpointError(
                f"config.json has {name} by kind of layer ({some(kinds)}), which transformers does not read in this model; "
                f"put the fields of full_attention into {name} itself"
            )
        place = f"in {inside}.{name}" if inside else f"in {name}"
        found.append([(place, value), (f"{place} as type", {"rope_type": value.get("type")})])
    top = {name: fields[name] for name in ("rope_theta", "partial_rotary_factor") if name in fields}
    return [*found, [(f"in {inside}" if inside else "at the top level", top)]]


def _layer_kinds(text: dict[str, Any]) -> tuple[str, ...]:
    count = layers(text)
    interval = max(1, field(text, "full_attention_interval", 4))
    types = text.get("layer_types") or [  # both may be given; names of tensors confirm which one is right
        "linear_attention" if (i + 1) % interval else "full_attention" for i in range(count)
    ]
    if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
        raise CheckpointError(f"config.json has layer_types = {types!r}; expected a list of names")
    unknown = sorted(set(types) - set(KINDS))
    if unknown or len(types) != count:
        raise CheckpointError(f"layer_types has {len(types)} entries for {count} layers; unknown kinds: {some(unknown)}")
    return tuple(KINDS[kind] for kind in types)


def _sections(pairs: int) -> list[int]:
    """Pairs for time, height and width of the multimodal RoPE; for text all of them rotate alike."""
    return [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
