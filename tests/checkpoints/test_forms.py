"""Other forms of weights are refused by what they are and what to do, before any list of names."""

import json
import re

import huggingface_hub
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import jaxdelta as jd
from jaxdelta.checkpoints import CheckpointError, inspect, parameters_sha256
from jaxdelta.checkpoints.key_table import COPY
from jaxdelta.models.config import Qwen3_5Config
from tests.tiny import CONFIG, hub_tensors, nested_json, write, write_config

BOTH = pytest.mark.parametrize("load", [jd.load, jd.inspect], ids=["load", "inspect"])


def weights(tensors):
    """Names of the matrices that tools quantise."""
    return [name for name in tensors if name.endswith("mlp.up_proj.weight")]


def fp8(tensors):
    for name in weights(tensors):
        tensors[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = np.ones((1, 1), np.float32)


def gptq(tensors):
    for name in weights(tensors):
        rows, columns = tensors.pop(name).shape
        stem = name.removesuffix("weight")
        tensors[f"{stem}qweight"] = np.zeros((columns // 8, rows), np.int32)
        tensors[f"{stem}qzeros"] = np.zeros((1, rows // 8), np.int32)
        tensors[f"{stem}scales"] = np.zeros((1, rows), np.float16)


def mlx(tensors):
    for name in weights(tensors):
        stem = name.removesuffix("weight")
        tensors[name] = np.zeros((len(tensors[name]), 5), np.uint32)
        tensors |= {f"{stem}{part}": np.zeros((59, 1), np.float32) for part in ("scales", "biases")}


def bitsandbytes(tensors):
    for name in weights(tensors):
        tensors[name] = np.zeros((tensors[name].size // 2, 1), np.uint8)
        tensors[f"{name}.absmax"] = np.zeros(41, np.uint8)
        tensors[f"{name}.quant_state.bitsandbytes__nf4"] = np.zeros(80, np.uint8)


def packed(tensors):
    for name in weights(tensors):
        tensors[f"{name}_packed"] = np.zeros((len(tensors.pop(name)), 6), np.int32)
        tensors[f"{name}_scale"] = np.zeros((59, 1), np.float32)


@BOTH
@pytest.mark.parametrize(
    ("quantise", "fields", "method"),
    [
        (fp8, {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "fp8"),
        (gptq, {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
        (gptq, {"quantization_config": {"quant_method": "awq", "bits": 4}}, "awq"),
        (mlx, {"quantization": {"group_size": 64, "bits": 4}}, "mlx"),
        (mlx, {"quantization_config": {"group_size": 64, "bits": 4}}, "mlx"),
        (bitsandbytes, {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "bitsandbytes"),
        (bitsandbytes, {"quantization_config": {"load_in_8bit": True}}, "bitsandbytes"),
        (packed, {"quantization_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        (packed, {"compression_config": {"format": "int-quantized"}}, "compressed-tensors"),
        (fp8, {"quantization_config": {"quant_algo": "NVFP4"}}, "NVFP4"),
        (fp8, {"quantization_config": "somehow"}, "an unnamed method"),
        (lambda tensors: None, {"quantization_config": {"quant_method": "torchao"}}, "torchao"),
    ],
)
@pytest.mark.parametrize("level", ["outer", "inner"])
def test_quantised_weights_are_told_by_their_method(tmp_path, load, quantise, fields, method, level):
    tensors, raw = hub_tensors(), nested_json()
    quantise(tensors)
    (raw if level == "outer" else raw["text_config"]).update(fields)
    folder = write(tmp_path / "m", tensors, raw)
    with pytest.raises(CheckpointError) as error:
        load(folder)
    assert str(error.value) == f"{folder} is quantised ({method}): dequantise it first"


@BOTH
@pytest.mark.parametrize("quantise", [fp8, gptq, mlx, bitsandbytes, packed])
def test_quantised_weights_are_told_by_their_tensors_where_the_configuration_is_silent(tmp_path, load, quantise):
    tensors = hub_tensors()
    quantise(tensors)
    folder = write(tmp_path / "m", tensors, nested_json())
    with pytest.raises(CheckpointError, match=r"is quantised \(it holds model\..*layers.*\): dequantise it first$"):
        load(folder)


@pytest.mark.parametrize(
    "fields", [{"quantization_config": None}, {"quantization_config": {}}, {"quantization": None}], ids=str
)
def test_an_empty_field_says_nothing_of_quantisation(tmp_path, fields):
    jd.load(write(tmp_path / "m", hub_tensors(), nested_json() | fields))


@BOTH
@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"peft_type": "LORA", "base_model_name_or_path": "x/y"}, "is a LoRA adapter of x/y: merge it first"),
        ({"peft_type": "ADALORA", "base_model_name_or_path": "x/y"}, "is an ADALoRA adapter of x/y: merge it first"),
        ({"peft_type": "IA3"}, "is an IA3 adapter of another model: merge it first"),
        ({"fine_tune_type": "lora", "model": "x/y"}, "is a LoRA adapter of x/y: merge it first"),
        (None, "is an adapter of another model: merge it first"),
    ],
    ids=str,
)
def test_an_adapter_is_told_with_its_base(tmp_path, load, said, message):
    if said is not None:
        (tmp_path / "adapter_config.json").write_text(json.dumps(said))
    save_file({"base_model.model.q.lora_A.weight": np.zeros((2, 2), np.float32)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError) as error:
        load(tmp_path)
    assert str(error.value) == f"{tmp_path} {message}"


def test_an_adapter_beside_whole_weights_is_not_passed_over(tmp_path):
    """transformers would put it on top of them."""
    folder = write(tmp_path / "m", hub_tensors(), nested_json())
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "x/y"}')
    with pytest.raises(
        CheckpointError, match=r"LoRA adapter of x/y: merge it first, or move it away from model\.safetensors$"
    ):
        jd.load(folder)


def test_tensors_of_an_adapter_among_the_weights_are_told(tmp_path):
    extra = {"model.language_model.layers.1.self_attn.q_proj.lora_A.default.weight": np.zeros((2, 44), np.float32)}
    with pytest.raises(CheckpointError, match=r"holds an adapter that is not merged \(.*lora_A.*\): merge it first"):
        jd.load(write(tmp_path / "m", hub_tensors() | extra, nested_json()))


@BOTH
@pytest.mark.parametrize("configured", [False, True], ids=["without config.json", "with config.json"])
@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            ["model_index.json", "unet/model.safetensors"],
            "holds a diffusers pipeline (model_index.json), no language model",
        ),
        (["a-Q4.gguf"], "holds a-Q4.gguf, a format of llama.cpp: give the checkpoint that it was made from"),
        (["onnx/model.onnx"], "holds model.onnx, an exported graph: give the checkpoint that it was made from"),
        (["global_step10/x.pt", "zero_to_fp32.py"], "holds global_step10, zero_to_fp32.py, the state of a training run"),
        (["__0_0.distcp", ".metadata"], "holds __0_0.distcp, the state of a training run in parts: write the whole model"),
        (["tf_model.h5"], "holds tf_model.h5, weights of TensorFlow or Flax: convert them to safetensors first"),
        (
            ["pytorch_model.bin", "training_args.bin"],
            "holds pytorch_model.bin, which would have to be unpickled, which runs code: convert it to safetensors first",
        ),
        (["last.ckpt", "model.pt"], "holds last.ckpt, model.pt, which would have to be unpickled"),
        (
            [f"checkpoint-{n}/{name}" for n in (500, 1000) for name in ("config.json", "model.safetensors")],
            "has no weights of its own; give one of the folders in it that have some: checkpoint-500, checkpoint-1000",
        ),
        (
            ["snapshots/0f1e/config.json", "snapshots/0f1e/model.safetensors", "refs/main"],
            "has no weights of its own; give one of the folders in it that have some: snapshots/0f1e",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_folder_of_another_format_is_told_by_what_it_is(tmp_path, load, files, message, configured):
    if configured:
        write_config(tmp_path, nested_json())
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / file).write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"^{re.escape(f'{tmp_path} {message}')}"):
        load(tmp_path)


def test_pickles_that_are_no_weights_are_not_named(tmp_path):
    write_config(tmp_path, nested_json())
    for name in ("training_args.bin", "optimizer.pt", "rng_state_0.pth", "pytorch_model.bin"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r" holds pytorch_model\.bin, which would have to be unpickled"):
        jd.load(tmp_path)


def test_pickles_beside_weights_without_a_configuration_are_passed_over(tmp_path):
    for name in ("model.safetensors", "pytorch_model.bin"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        jd.load(tmp_path)


@BOTH
@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["README.md", "Q4/m-Q4.gguf", "Q8/m-Q8.gguf"], "owner/name holds m-Q4.gguf, m-Q8.gguf, a format of llama.cpp"),
        (["config.json", "pytorch_model.bin"], "owner/name holds pytorch_model.bin, which would have to be unpickled"),
        (["onnx/model.onnx", "config.json"], "owner/name holds model.onnx, an exported graph"),
        (None, "config.json is missing"),
    ],
    ids=["GGUF", "pickle", "ONNX", "not to be asked"],
)
def test_a_hub_repository_of_another_format_is_told_by_what_it_is(tmp_path, monkeypatch, load, names, message):
    def listed(repo, *, revision):
        if names is None:
            raise OSError("no network")
        return names

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **options: str(tmp_path / "snapshot"))
    monkeypatch.setattr(huggingface_hub, "list_repo_files", listed)
    with pytest.raises(CheckpointError, match=message):
        load("owner/name")


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod."])
def test_names_that_wrappers_lengthened_mean_the_same_model(tmp_path, prefix):
    tensors = hub_tensors() | {"lm_head.weight": hub_tensors()["model.language_model.embed_tokens.weight"]}
    raw = nested_json(Qwen3_5Config.tiny(layer_kinds=CONFIG.layer_kinds, tied=True))
    plain = write(tmp_path / "plain", tensors, raw)
    wrapped = write(tmp_path / "wrapped", {prefix + name: array for name, array in tensors.items()}, raw)
    assert parameters_sha256(jd.load(wrapped)) == parameters_sha256(jd.load(plain))
    assert inspect(wrapped).ignored == {COPY: [f"{prefix}lm_head.weight"]}
    jd.save(jd.load(wrapped), tmp_path / "saved")
    assert parameters_sha256(jd.load(tmp_path / "saved")) == parameters_sha256(jd.load(plain))


def test_a_model_that_was_quantised_inside_of_a_wrapper_is_told(tmp_path):
    tensors = hub_tensors() | {"model.language_model.layers.0.mlp.up_proj.qweight": np.zeros((2, 2), np.int32)}
    with pytest.raises(CheckpointError, match="is quantised"):
        jd.load(write(tmp_path / "m", {f"module.{name}": array for name, array in tensors.items()}, nested_json()))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda name: name.replace("layers.0.", "layers.0._orig_mod."),
        lambda name: name.replace("layers.0.mlp.", "layers.0._fsdp_wrapped_module.mlp."),
        lambda name: f"module.{name}" if "layers" in name else name,
    ],
    ids=["compiled layer", "FSDP", "some"],
)
def test_a_model_that_was_wrapped_in_part_is_told(tmp_path, wrap):
    tensors = {wrap(name): array for name, array in hub_tensors().items()}
    with pytest.raises(CheckpointError, match="was wrapped in part for training or compilation"):
        jd.load(write(tmp_path / "m", tensors, nested_json()))


@pytest.mark.parametrize(
    "other", ["a.gguf", "onnx/model.onnx", "global_step10/x", "checkpoint-5/model.safetensors", "x.bin"]
)
def test_other_formats_beside_a_checkpoint_are_passed_over(tmp_path, other):
    folder = write(tmp_path / "m", hub_tensors(), nested_json())
    (folder / other).parent.mkdir(exist_ok=True)
    (folder / other).write_bytes(b"")
    jd.load(folder)
