"""Tiny models of Qwen3.5's architecture, and folders as the hub has them, written without the library's key table."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from jaxdelta.models.config import Qwen3_5Config
from jaxdelta.models.qwen3_5 import Qwen3_5

CONFIG = Qwen3_5Config.tiny(layer_kinds=("linear", "attention"))
WORDS = 90
INDEX = "model.safetensors.index.json"
KINDS = {"linear": "linear_attention", "attention": "full_attention"}


@cache
def model(seed: int = 0, **changes) -> Qwen3_5:
    """Random weights that make states, gates and logits of order one; not to be changed."""
    return fresh_model(seed, **changes)


def fresh_model(seed: int = 0, *, dtype=jnp.float32, **changes) -> Qwen3_5:
    """As :func:`model`, of one's own."""
    config = Qwen3_5Config.tiny(**{"layer_kinds": CONFIG.layer_kinds, **changes})
    rng = np.random.default_rng(seed)
    middle = {"A_log": 1.0, "dt_bias": -4.0, "norm": 1.0}

    def random(path, leaf):
        scale = 0.3 if leaf.ndim == 1 else leaf.shape[-1] ** -0.5
        noise = middle.get(path[-1], 0.0) + scale * rng.standard_normal(leaf.shape)
        return leaf.replace(jnp.asarray(noise, leaf.dtype))

    graphdef, state = nnx.split(nnx.eval_shape(lambda: Qwen3_5(config, dtype=dtype)))
    leaves = [(path, random(path, leaf)) for path, leaf in nnx.to_flat_state(state)]
    made = nnx.merge(graphdef, nnx.from_flat_state(leaves))
    made.tokenizer = tokenizer()
    return made


def tokenizer(words: int = WORDS) -> Tokenizer:
    """One token a word: ``w0``, ``w1`` and so on, and one for any other."""
    made = Tokenizer(WordLevel({f"w{i}": i for i in range(words)} | {"[UNK]": words}, unk_token="[UNK]"))
    made.pre_tokenizer = WhitespaceSplit()
    return made


def tokens(*lengths: int, seed: int = 0) -> list[np.ndarray]:
    """Random texts of few enough words that bigrams come again."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 8, n) for n in lengths]


def text(ids: np.ndarray) -> str:
    return " ".join(f"w{i}" for i in ids)


def flat_json(config: Qwen3_5Config = CONFIG) -> dict[str, Any]:
    """``config.json`` of a text-only checkpoint."""
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.num_layers,
        "layer_types": [KINDS[kind] for kind in config.layer_kinds],
        "num_attention_heads": config.num_query_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "attention_bias": False,
        "attn_output_gate": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "linear_num_key_heads": config.num_key_heads,
        "linear_num_value_heads": config.num_value_heads,
        "linear_key_head_dim": config.key_dim,
        "linear_value_head_dim": config.value_dim,
        "linear_conv_kernel_dim": config.conv_width,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 32768,
        "tie_word_embeddings": config.tied,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": config.rotary_dim / config.head_dim,
            "mrope_section": [2, 2, 2],
            "mrope_interleaved": True,
        },
    }


def nested_json(config: Qwen3_5Config = CONFIG) -> dict[str, Any]:
    """``config.json`` of a multimodal checkpoint, as Qwen3.5-0.8B's."""
    text = flat_json(config)
    del text["architectures"]
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "image_token_id": 95,
        "tie_word_embeddings": config.tied,
        "text_config": text,
    }


def hub_tensors(
    config: Qwen3_5Config = CONFIG, *, prefix: str = "model.language_model.", seed: int = 0
) -> dict[str, np.ndarray]:
    """Random weights under the hub's names, in its shapes and dtypes: F32 for A_log and the gated norm, else BF16."""
    D, F = config.width, config.mlp_width
    H, K, V, G = config.num_value_heads, config.key_dim, config.value_dim, config.num_key_heads
    A, kv, d = config.num_query_heads, config.num_kv_heads, config.head_dim
    mixers = {
        "linear": {
            "linear_attn.in_proj_qkv.weight": (2 * G * K + H * V, D),
            "linear_attn.in_proj_z.weight": (H * V, D),
            "linear_attn.in_proj_b.weight": (H, D),
            "linear_attn.in_proj_a.weight": (H, D),
            "linear_attn.conv1d.weight": (2 * G * K + H * V, 1, config.conv_width),
            "linear_attn.dt_bias": (H,),
            "linear_attn.A_log": (H,),
            "linear_attn.norm.weight": (V,),
            "linear_attn.out_proj.weight": (D, H * V),
        },
        "attention": {
            "self_attn.q_proj.weight": (2 * A * d, D),
            "self_attn.k_proj.weight": (kv * d, D),
            "self_attn.v_proj.weight": (kv * d, D),
            "self_attn.o_proj.weight": (D, A * d),
            "self_attn.q_norm.weight": (d,),
            "self_attn.k_norm.weight": (d,),
        },
    }
    rest = {
        "input_layernorm.weight": (D,),
        "post_attention_layernorm.weight": (D,),
        "mlp.gate_proj.weight": (F, D),
        "mlp.up_proj.weight": (F, D),
        "mlp.down_proj.weight": (D, F),
    }
    shapes = {f"{prefix}embed_tokens.weight": (config.vocab_size, D), f"{prefix}norm.weight": (D,)}
    for i, kind in enumerate(config.layer_kinds):
        shapes |= {f"{prefix}layers.{i}.{name}": shape for name, shape in (mixers[kind] | rest).items()}
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab_size, D)
    rng = np.random.default_rng(seed)
    return {
        name: (0.1 * rng.standard_normal(shape)).astype(
            np.float32 if name.endswith(("A_log", "linear_attn.norm.weight")) else ml_dtypes.bfloat16
        )
        for name, shape in shapes.items()
    }


def write(folder: Path, tensors: dict[str, np.ndarray], raw: dict[str, Any]) -> Path:
    """A folder with one ``model.safetensors``."""
    write_config(folder, raw)
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_shards(folder: Path, shards: dict[str, dict[str, np.ndarray]], raw: dict[str, Any]) -> Path:
    """A folder with an index; ``shards``: the tensors of each file, by its name."""
    write_config(folder, raw)
    for name, tensors in shards.items():
        save_file(tensors, folder / name)
    write_index(folder, {tensor: file for file, tensors in shards.items() for tensor in tensors})
    return folder


def write_config(folder: Path, raw: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))


def write_index(folder: Path, weight_map: Any, *, name: str = INDEX) -> None:
    (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def safetensors_bytes(header: dict[str, Any], data: bytes) -> bytes:
    """A safetensors file whose header may say anything."""
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def bits(array) -> np.ndarray:
    """The bytes of an array, for comparisons that tell -0 from 0."""
    return np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)


def assert_same_bits(found: dict[Any, np.ndarray], expected: dict[Any, np.ndarray]) -> None:
    """The same arrays under the same names."""
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert (found[name].shape, found[name].dtype) == (array.shape, array.dtype), name
        np.testing.assert_array_equal(bits(found[name]), bits(array), err_msg=str(name))
