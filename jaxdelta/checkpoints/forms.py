"""Errors for weights in other forms: adapters, quantised weights, other file formats."""

import fnmatch
import re
from collections.abc import Collection, Iterable
from pathlib import Path, PurePath
from typing import Any

from jaxdelta.checkpoints.files import NO_WEIGHTS, PICKLES, SINGLE, CheckpointError, read_json, some

ADAPTER = "adapter_config.json"
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapters.safetensors")
# Prefixes that torch.compile, data parallel training and other wrappers add to names.
WRAPPER = re.compile(r"_orig_mod\.|module\.|_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.")
ADAPTER_TENSORS = re.compile(r"^base_model\.model\.|\.lora_[AB]\.|\.lora_(embedding|magnitude)|\.modules_to_save\.")
# Fields of config.json for quantised weights, and the method if the field does not name it.
QUANTISED = {"quantization_config": "an unnamed method", "compression_config": "compressed-tensors", "quantization": "mlx"}
# Tensors that accompany or replace a quantised weight, by the ends of their names.
QUANTISED_TENSORS = re.compile(
    r"\.(qweight|qzeros|g_idx|scales|biases|weight_(scale(_inv|_2)?|packed|zero_point|shape|format)|SCB"
    r"|weight\.(absmax|nested_absmax|quant_map|nested_quant_map|quant_state\..+)|weight_blocks|weight_scales)$"
)


def refuse_other_forms(folder: Path) -> None:
    """Raise CheckpointError if a folder holds an adapter, or another form instead of configuration and safetensors."""
    refuse_adapter(folder)
    if (folder / "config.json").exists() and any(folder.glob("*.safetensors*")):
        return
    names = [path.name for pattern in ("*", "onnx/*") for path in folder.glob(pattern)]
    pickled = () if any(folder.glob("*.safetensors*")) else PICKLED
    if said := _told(SURE, names) or _subfolders(folder) or _told((*LIKELY, *pickled), names):
        raise CheckpointError(f"{folder} {said}")


def other_form(names: Iterable[str]) -> str:
    """A clause on what a folder without safetensors holds, from the names of its files; empty if they do not tell."""
    return _told((*SURE, *LIKELY, *PICKLED), [PurePath(name).name for name in names])


def refuse_adapter(folder: Path) -> None:
    """Raise CheckpointError if a folder holds an adapter, which is not a model, or which changes the weights beside it."""
    weights = [name for name in ADAPTER_WEIGHTS if (folder / name).exists()]
    if not weights and not (folder / ADAPTER).exists():
        return
    said = read_json(folder / ADAPTER) if (folder / ADAPTER).exists() else {}
    kind = str(said.get("peft_type") or said.get("fine_tune_type") or "").upper().replace("LORA", "LoRA")
    named = f"{'an' if kind[0] in 'AEIO' else 'a'} {kind} adapter" if kind else "an adapter"
    base = said.get("base_model_name_or_path") or said.get("model") or "another model"
    beside = f", or move it away from {SINGLE}" if (folder / SINGLE).exists() else ""
    raise CheckpointError(f"{folder} is {named} of {base}: merge it first{beside}")


def refuse_quantised(folder: Path, raw: dict[str, Any], names: Collection[str]) -> None:
    """Raise CheckpointError if the configuration or names of tensors show quantised weights or an unmerged adapter."""
    for fields in (raw, raw.get("text_config")):
        for name, unnamed in QUANTISED.items() if isinstance(fields, dict) else ():
            if said := fields.get(name):
                raise CheckpointError(f"{folder} is quantised ({_method(said, fields) or unnamed}): dequantise it first")
    if tensors := sorted(name for name in names if QUANTISED_TENSORS.search(name)):
        raise CheckpointError(f"{folder} is quantised (it holds {some(tensors[:2])}): dequantise it first")
    if tensors := sorted(name for name in names if ADAPTER_TENSORS.search(name)):
        raise CheckpointError(f"{folder} holds an adapter that is not merged ({some(tensors[:2])}): merge it first")


def wrapper_of(names: Collection[str]) -> str:
    """The wrapper prefix that all names share, such as "module._orig_mod."; empty if there is none."""
    some_name, prefix = next(iter(names), ""), ""
    while found := WRAPPER.match(some_name, len(prefix)):
        if not all(name.startswith(prefix + found[0]) for name in names):
            break
        prefix += found[0]
    return prefix


def refuse_wrapped(folder: Path, names: Collection[str]) -> None:
    """Raise CheckpointError if only parts of a model have a wrapper's prefix, or if copies are stored."""
    if tensors := sorted(name for name in names if re.search(rf"(^|\.)({WRAPPER.pattern})", name)):
        raise CheckpointError(
            f"{folder} holds a model that was wrapped in part for training or compilation ({some(tensors[:2])}): "
            "save what is inside of the wrappers, or take their words out of the names"
        )


def _method(said: Any, fields: dict[str, Any]) -> str | None:
    """The quantisation method, if it is named or evident from its settings."""
    said = said if isinstance(said, dict) else {}
    if method := said.get("quant_method") or said.get("quant_algo"):
        return str(method)
    if any(name.startswith(("load_in_", "bnb_")) for name in said):
        return "bitsandbytes"
    return "mlx" if "quantization" in fields or {"group_size", "bits"} <= set(said) else None


def _subfolders(folder: Path) -> str:
    """A clause on models in subfolders: of a training run, of the hub's cache, or of several models."""
    inner = [path for pattern in ("*", "snapshots/*") for path in folder.glob(pattern) if path.is_dir()]
    names = [str(path.relative_to(folder)) for path in inner if any(path.glob("*.safetensors")) and _is_model(path)]
    names.sort(key=lambda name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)])
    return f"has no weights of its own; give one of the folders in it that have some: {some(names)}" if names else ""


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").exists() or (folder / ADAPTER).exists()


def _told(forms: Iterable[tuple[tuple[str, ...], str]], names: Collection[str]) -> str:
    """The clause of the first form that matches any file, with the names of these files; or an empty text."""
    for patterns, text in forms:
        found = {name for pattern in patterns for name in fnmatch.filter(names, pattern)}
        if found := sorted(name for name in found if not name.startswith(NO_WEIGHTS)):
            return text.format(some(found))
    return ""


# What a folder without configuration or safetensors may be, the surest sign first: patterns and clauses. Models in
# subfolders are a less sure sign than SURE, and a surer one than LIKELY.
SURE = (
    (("model_index.json",), "holds a diffusers pipeline ({}), no language model"),
    (("*.gguf",), "holds {}, a format of llama.cpp: give the checkpoint that it was made from"),
    (("*.onnx",), "holds {}, an exported graph: give the checkpoint that it was made from"),
)
LIKELY = (
    (
        ("*.distcp", "global_step*", "zero_to_fp32.py", "pytorch_model_fsdp_*"),
        "holds {}, the state of a training run in parts: write the whole model with save_pretrained first",
    ),
    (
        ("tf_model.h5", "tf_model*.h5", "flax_model*.msgpack", "model.ckpt.index"),
        "holds {}, weights of TensorFlow or Flax: convert them to safetensors first",
    ),
)
PICKLED = ((PICKLES, "holds {}, which would have to be unpickled, which runs code: convert it to safetensors first"),)
