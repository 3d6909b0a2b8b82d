"""Checkpoints in and out: what is loaded, what is refused, what comes out again, and how much memory it takes."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError
from safetensors.numpy import load_file, save_file

import jaxdelta as jd
from jaxdelta import checkpoints
from jaxdelta.checkpoints import CheckpointError
from jaxdelta.models.config import Qwen3_5Config
from tests.tiny import (
    CONFIG,
    assert_same_bits,
    flat_json,
    fresh_model,
    hub_tensors,
    model,
    nested_json,
    safetensors_bytes,
    tokenizer,
    write,
    write_config,
    write_shards,
)

MTP = {
    "mtp.fc.weight": np.full((44, 88), 9, np.float32),
    "mtp.layers.0.self_attn.q_proj.weight": np.full((208, 44), 9, np.float32),
    "mtp.norm.weight": np.full(44, 9, np.float32),
}
UNTIED = Qwen3_5Config.tiny(layer_kinds=CONFIG.layer_kinds, tied=False)
EMBED, A_LOG = "model.language_model.embed_tokens.weight", "model.language_model.layers.0.linear_attn.A_log"


@pytest.fixture
def hub(tmp_path):
    """A folder as the hub has it: multimodal, bf16 but for A_log and the gated norm, with a tokenizer."""
    folder = write(tmp_path / "hub", hub_tensors(), nested_json())
    tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def parameters(loaded) -> dict[tuple, np.ndarray]:
    return {path: np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(nnx.state(loaded))}


# What is loaded


def test_every_parameter_holds_its_tensor(hub):
    """In f32, which holds bf16 exactly; conv1d without its middle axis, nothing transposed."""
    loaded, stored = parameters(jd.load(hub)), hub_tensors(prefix="")
    assert len(loaded) == len(stored)
    for name, path in {
        "embed_tokens.weight": ("embed",),
        "norm.weight": ("final_norm",),
        "layers.0.linear_attn.in_proj_qkv.weight": ("layers", 0, "mixer", "in_qkv"),
        "layers.0.linear_attn.in_proj_b.weight": ("layers", 0, "mixer", "in_b"),
        "layers.0.linear_attn.in_proj_a.weight": ("layers", 0, "mixer", "in_a"),
        "layers.0.linear_attn.A_log": ("layers", 0, "mixer", "A_log"),
        "layers.0.linear_attn.dt_bias": ("layers", 0, "mixer", "dt_bias"),
        "layers.1.self_attn.q_proj.weight": ("layers", 1, "mixer", "q"),
        "layers.1.self_attn.k_norm.weight": ("layers", 1, "mixer", "k_norm"),
        "layers.1.input_layernorm.weight": ("layers", 1, "input_norm"),
        "layers.1.post_attention_layernorm.weight": ("layers", 1, "post_norm"),
        "layers.1.mlp.down_proj.weight": ("layers", 1, "mlp", "down"),
    }.items():
        assert loaded[path].dtype == np.float32
        np.testing.assert_array_equal(loaded[path], stored[name].astype(np.float32), err_msg=name)
    conv = stored["layers.0.linear_attn.conv1d.weight"].astype(np.float32)
    np.testing.assert_array_equal(loaded["layers", 0, "mixer", "conv"], conv[:, 0])


@pytest.mark.parametrize(
    ("prefix", "raw"),
    [("model.language_model.", nested_json()), ("model.", flat_json()), ("model.language_model.", flat_json())],
    ids=["multimodal", "text only", "text only with the multimodal prefix"],
)
def test_either_prefix_gives_the_same_model(hub, tmp_path, prefix, raw):
    other = write(tmp_path / "other", hub_tensors(prefix=prefix), raw)
    assert_same_bits(parameters(jd.load(other)), parameters(jd.load(hub)))


def test_a_prefix_on_some_tensors_only_is_refused(tmp_path):
    tensors = hub_tensors() | hub_tensors(prefix="model.")
    for name in ("model.norm.weight", EMBED):
        del tensors[name]
    with pytest.raises(CheckpointError, match=r"missing: model\.language_model\.embed_tokens\.weight"):
        jd.load(write(tmp_path / "mixed", tensors, nested_json()))


def test_tensors_of_multi_token_prediction_change_nothing(hub, tmp_path):
    """Their presence is no sign of another convention of the norms, and their norm is not the model's."""
    with_mtp = write(tmp_path / "mtp", hub_tensors() | MTP, nested_json())
    assert_same_bits(parameters(jd.load(with_mtp)), parameters(jd.load(hub)))
    assert jd.inspect(with_mtp).ignored == {"multi-token prediction": sorted(MTP)}


def test_shards_load_as_one_file(hub, tmp_path):
    tensors = hub_tensors()
    names = sorted(tensors)
    shards = {f"model-{i + 1}-of-3.safetensors": {name: tensors[name] for name in names[i::3]} for i in range(3)}
    sharded = write_shards(tmp_path / "sharded", shards, nested_json())
    assert_same_bits(parameters(jd.load(sharded)), parameters(jd.load(hub)))


@pytest.mark.parametrize(
    ("tied", "present"),
    [(True, False), (False, True), (True, True), (False, False)],
    ids=["tied", "untied", "both", "none"],
)
def test_a_head_is_there_if_and_only_if_it_is_untied(tmp_path, tied, present):
    tensors = hub_tensors(UNTIED)
    if not present:
        del tensors["lm_head.weight"]
    folder = write(tmp_path / "model", tensors, nested_json(CONFIG if tied else UNTIED))
    if tied == present:
        with pytest.raises(CheckpointError, match=r"tie_word_embeddings contradicts lm_head\.weight"):
            jd.load(folder)
    else:
        head = jd.load(folder).embed if tied else jd.load(folder).head
        stored = tensors[EMBED if tied else "lm_head.weight"]
        np.testing.assert_array_equal(head[...], stored.astype(np.float32))


def test_bf16_keeps_gates_and_norms_in_f32(hub):
    """A_log as stored, not rounded: a decay of exp(-exp(A_log)) a token compounds over a text."""
    loaded = jd.load(hub, dtype="bfloat16")
    assert loaded.dtype == jnp.bfloat16
    wide = {path[-1] for path, leaf in parameters(loaded).items() if leaf.dtype == np.float32}
    narrow = {path[-1] for path, leaf in parameters(loaded).items() if leaf.dtype == ml_dtypes.bfloat16}
    assert wide == {"A_log", "dt_bias", "norm", "q_norm", "k_norm", "input_norm", "post_norm", "final_norm"}
    assert narrow == {"embed", "in_qkv", "in_z", "in_b", "in_a", "conv", "out", "q", "k", "v", "gate", "up", "down"}
    stored = hub_tensors()[A_LOG]
    np.testing.assert_array_equal(loaded.layers[0].mixer.A_log[...], stored)
    assert (stored.astype(ml_dtypes.bfloat16).astype(np.float32) != stored).any()


def test_inspect_says_what_load_would_load(hub):
    info = jd.inspect(hub)
    loaded = jd.load(hub)
    assert info.config == loaded.config == CONFIG
    assert info.num_parameters == sum(leaf.size for leaf in parameters(loaded).values())
    assert (info.num_tensors, info.stored_dtypes) == (27, {"BF16": 25, "F32": 2})
    assert (info.folder, info.revision, info.has_tokenizer) == (hub, None, True)


def test_the_origin_tells_the_files_and_their_checksums(hub):
    origin = jd.load(hub).origin
    assert (origin.name, origin.folder, origin.revision) == (str(hub), hub, None)
    before = origin.sha256()
    assert before.keys() == {"config.json", "tokenizer.json", "model.safetensors"}
    (hub / "tokenizer.json").write_text((hub / "tokenizer.json").read_text() + "\n")
    changed = {name for name, checksum in jd.load(hub).origin.sha256().items() if checksum != before[name]}
    assert changed == {"tokenizer.json"}


@pytest.mark.parametrize("spell", [str, Path, "{}/".format, "{}/../hub".format], ids=["str", "Path", "slash", "dots"])
def test_a_folder_may_be_spelt_in_any_way(hub, spell):
    assert jd.load(spell(hub)).config == CONFIG


def test_a_folder_may_be_a_link(hub, tmp_path):
    (tmp_path / "link").symlink_to(hub)
    assert jd.load(tmp_path / "link").config == CONFIG


def test_loading_leaves_the_folder_as_it_was(hub):
    before = {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in hub.iterdir()}
    jd.load(hub, dtype="bfloat16")
    assert {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in hub.iterdir()} == before


# What is refused


def test_a_single_file_is_loaded_rather_than_an_older_set_of_shards(hub):
    older = {name: -array for name, array in hub_tensors().items()}
    write_shards(hub, {"model-00001-of-00001.safetensors": older}, nested_json())
    found = jd.inspect(hub)
    assert (found.files, found.unread) == (("model.safetensors",), ("model-00001-of-00001.safetensors",))
    np.testing.assert_array_equal(parameters(jd.load(hub))["embed",], hub_tensors()[EMBED].astype(np.float32))
    assert "model-00001-of-00001.safetensors" not in jd.load(hub).origin.sha256()


@pytest.mark.parametrize("place", ["flat", "nested"])
def test_the_weights_that_a_configuration_names_are_loaded(tmp_path, place):
    raw = flat_json() if place == "flat" else nested_json()
    raw.get("text_config", raw)["transformers_weights"] = "other.safetensors"
    folder = write(tmp_path / "m", {name: -array for name, array in hub_tensors().items()}, raw)
    save_file(hub_tensors(), folder / "other.safetensors")
    loaded = jd.load(folder)
    np.testing.assert_array_equal(loaded.embed[...], hub_tensors()[EMBED].astype(np.float32))
    assert "other.safetensors" in loaded.origin.sha256()
    jd.save(loaded, tmp_path / "saved")
    assert_same_bits(parameters(jd.load(tmp_path / "saved")), parameters(loaded))


def test_tensors_that_a_part_of_an_index_leaves_out_are_missing_and_the_file_with_them_is_named(tmp_path):
    tensors, names = hub_tensors(), sorted(hub_tensors())
    folder = write_shards(tmp_path / "m", {"a.safetensors": {n: tensors[n] for n in names[:20]}}, nested_json())
    save_file({n: tensors[n] for n in names[20:]}, folder / "b.safetensors")
    with pytest.raises(CheckpointError, match=rf"{folder}: tensors missing: .*; b\.safetensors is not read"):
        jd.load(folder)


@pytest.mark.parametrize("load", [jd.load, jd.inspect], ids=["load", "inspect"])
def test_a_tied_head_that_differs_from_the_embedding_is_an_error_that_names_both(tmp_path, load):
    tensors = hub_tensors()
    tensors["lm_head.weight"] = tensors[EMBED].copy()
    tensors["lm_head.weight"].flat[-1] += 1
    with pytest.raises(
        CheckpointError, match=rf"contradicts lm_head\.weight, which differs from {EMBED}; set the one to fal"
    ):
        load(write(tmp_path / "m", tensors, nested_json()))


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside"])
def test_a_tied_head_may_be_stored_alone_or_beside_the_embedding(hub, tmp_path, beside):
    """safetensors' save_model keeps one of tensors that are one, by alphabet; converters keep both. Saved, it is one."""
    tensors = hub_tensors()
    tensors["lm_head.weight"] = tensors[EMBED].copy()
    if not beside:
        del tensors[EMBED]
    folder = write(tmp_path / "m", tensors, nested_json())
    assert_same_bits(parameters(jd.load(folder)), parameters(jd.load(hub)))
    found = jd.inspect(folder)
    assert found.ignored == ({"copy of the embedding": ["lm_head.weight"]} if beside else {})
    assert (found.num_tensors, found.num_parameters) == (jd.inspect(hub).num_tensors, jd.inspect(hub).num_parameters)
    jd.save(jd.load(folder), tmp_path / "saved")
    expected = {name.replace("model.language_model.", "model."): array for name, array in hub_tensors().items()}
    assert_same_bits(load_file(tmp_path / "saved" / "model.safetensors"), expected)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("name", [EMBED, A_LOG], ids=["BF16", "F32"])
def test_a_weight_that_is_not_finite_is_named(tmp_path, name, value):
    tensors = hub_tensors()
    tensors[name].flat[-1] = value
    with pytest.raises(CheckpointError, match=f"{name} holds NaN or infinity"):
        jd.load(write(tmp_path / "model", tensors, nested_json()))


def test_a_weight_that_bf16_cannot_hold_is_named(tmp_path):
    tensors = hub_tensors()
    tensors[EMBED] = np.full((97, 44), np.finfo(np.float32).max)
    folder = write(tmp_path / "model", tensors, nested_json())
    assert jd.load(folder).config == CONFIG
    with pytest.raises(CheckpointError, match=f"{EMBED} holds NaN or infinity in bfloat16"):
        jd.load(folder, dtype="bfloat16")


@pytest.mark.parametrize("load", [jd.load, jd.inspect], ids=["load", "inspect"])
def test_a_config_that_contradicts_a_tensor_is_an_error_with_both_shapes(hub, load):
    write_config(hub, flat_json(Qwen3_5Config.tiny(layer_kinds=CONFIG.layer_kinds, mlp_width=61)))
    with pytest.raises(CheckpointError, match=r"mlp\.gate_proj\.weight of shape \[61, 44\], the file has \[59, 44\]"):
        load(hub)


@pytest.mark.parametrize("load", [jd.load, jd.inspect], ids=["load", "inspect"])
def test_a_transposed_tensor_is_an_error(tmp_path, load):
    tensors = hub_tensors()
    name = "model.language_model.layers.1.mlp.down_proj.weight"
    tensors[name] = np.ascontiguousarray(tensors[name].T)
    with pytest.raises(CheckpointError, match=rf"{name} of shape \[44, 59\], the file has \[59, 44\]"):
        load(write(tmp_path / "model", tensors, nested_json()))


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "I8", "U8", "I32"])
def test_quantised_weights_are_refused_by_dtype(hub, dtype):
    """Their bytes would load as numbers without their scales."""
    header, data = {}, b""
    for name, array in hub_tensors().items():
        kind = dtype if name == EMBED else "F32"
        stored = bytes((4 if kind in ("I32", "F32") else 1) * array.size)
        header[name] = {"dtype": kind, "shape": array.shape, "data_offsets": [len(data), len(data) + len(stored)]}
        data += stored
    (hub / "model.safetensors").write_bytes(safetensors_bytes(header, data))
    with pytest.raises(CheckpointError, match=rf"{EMBED} is stored as {dtype}; supported: F64, F32, F16, BF16"):
        jd.load(hub)


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_5_moe", None, ["qwen3_5"]], ids=str)
def test_another_model_type_is_told_what_is_supported(hub, model_type):
    write_config(hub, nested_json() | {"model_type": model_type})
    with pytest.raises(CheckpointError, match=r"config\.json has model_type .*; supported: qwen3_5, qwen3_5_text"):
        jd.load(hub)


def test_a_tokenizer_may_have_more_words_than_the_model_has_rows(hub):
    """A pad token is often added without a row; only a text that uses it cannot be read."""
    tokenizer(words=CONFIG.vocab_size).save(str(hub / "tokenizer.json"))
    assert jd.load(hub).tokenizer.get_vocab_size() == CONFIG.vocab_size + 1
    assert jd.inspect(hub).has_tokenizer


@pytest.mark.parametrize(
    "content", ["", "{", "{}", "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n"], ids=str
)
def test_a_broken_tokenizer_is_named(hub, content):
    (hub / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is no tokenizer") as error:
        jd.load(hub)
    assert "\n" not in str(error.value)


def test_a_model_without_a_tokenizer_loads(hub):
    (hub / "tokenizer.json").unlink()
    assert jd.load(hub).tokenizer is None
    assert not jd.inspect(hub).has_tokenizer


def test_limits_stored_with_a_tokenizer_do_not_cut_or_pad_documents(hub):
    limited = tokenizer()
    limited.enable_truncation(3)
    limited.enable_padding(length=5)
    limited.save(str(hub / "tokenizer.json"))
    loaded = jd.load(hub).tokenizer
    assert [len(loaded.encode(f"{'w1 ' * n}").ids) for n in (2, 9)] == [2, 9]


@pytest.mark.parametrize("dtype", ["float16", "float64", "bf16", "", None], ids=str)
def test_an_unknown_dtype_is_told_the_known_ones(hub, dtype):
    with pytest.raises((ValueError, TypeError), match="float32, bfloat16" if isinstance(dtype, str) else "dtype"):
        jd.load(hub, dtype=dtype)


@pytest.mark.parametrize("name", ["nowhere", "a/b/c", "./nowhere/at all", "", "~a_user_that_is_none/x", "a\0b"], ids=repr)
def test_a_name_that_is_nothing_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError):
        jd.load(name)


def test_a_revision_of_a_local_folder_is_refused(hub):
    with pytest.raises(CheckpointError, match=r"is local; a revision \(main\) can only be asked of a hub id"):
        jd.load(hub, revision="main")


def test_a_file_in_place_of_a_folder_is_refused(hub):
    with pytest.raises(CheckpointError, match="is a file; expected the folder"):
        jd.load(hub / "model.safetensors")


# The hub


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub_cache(hub, tmp_path, monkeypatch):
    """The hub's cache on disk with one model, and no network."""
    cache = tmp_path / "cache"
    repository = cache / "models--owner--name"
    shutil.copytree(hub, repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return cache


@pytest.mark.parametrize("revision", [None, "main", COMMIT], ids=str)
def test_a_hub_id_is_loaded_from_the_cache_with_its_commit(hub, hub_cache, revision):
    loaded = jd.load("owner/name", revision=revision)
    assert_same_bits(parameters(loaded), parameters(jd.load(hub)))
    assert (loaded.origin.name, loaded.origin.revision) == ("owner/name", COMMIT)
    assert loaded.origin.sha256() == jd.load(hub).origin.sha256()
    assert jd.inspect("owner/name", revision=revision).revision == COMMIT


@pytest.mark.parametrize(("name", "revision"), [("owner/other", None), ("owner/name", "another"), ("owner/name", "f" * 40)])
def test_a_hub_id_that_cannot_be_had_is_told_in_a_line(hub_cache, name, revision):
    with pytest.raises(CheckpointError, match=f"{name} is no local folder and could not be had from the hub") as error:
        jd.load(name, revision=revision)
    assert "\n" not in str(error.value)


def test_a_hub_that_cannot_be_reached_is_told_in_a_line(hub_cache, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(CheckpointError, match="owner/other is no local folder and could not be had from the hub"):
        jd.load("owner/other")


@pytest.mark.parametrize("message", ["the read timed out", ""])
def test_a_download_that_breaks_off_is_told_in_a_line(monkeypatch, message):
    """huggingface_hub lets its HTTP client's own errors through, some without a message."""
    client_error = HfHubHTTPError.__bases__[0]

    def breaks_off(*args, **kwargs):
        raise client_error(message)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", breaks_off)
    with pytest.raises(CheckpointError, match="owner/name is no local folder and could not be had from the hub"):
        jd.load("owner/name")


def test_a_hub_download_asks_for_no_code_and_no_pickle(monkeypatch, hub):
    asked = []

    def download(repo, *, revision, allow_patterns):
        asked.extend(allow_patterns)
        return str(hub)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    jd.load("owner/name")
    tokenizers = {"tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json"}
    tokenizers |= {"special_tokens_map.json", "added_tokens.json"}
    assert set(asked) == {"*.safetensors", "*.safetensors.index.json", "config.json", "adapter_config.json"} | tokenizers


@pytest.mark.parametrize("name", ["owner/name--x", "owner/.name", "owner/name.", "-owner/name"])
def test_an_id_that_the_hub_does_not_allow_is_refused(name):
    with pytest.raises(ValueError, match=name):
        jd.load(name)


# What comes out again


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("config", [CONFIG, UNTIED], ids=["tied", "untied"])
def test_every_tensor_comes_out_as_it_was_stored(tmp_path, config, dtype):
    """Bit for bit and in its dtype, F32 ones in a bf16 model too; -0 and numbers below the normal range among them."""
    tensors = hub_tensors(config)
    tensors[EMBED].flat[:3] = [-0.0, 1e-40, -1e-40]
    tensors[A_LOG][:2] = [-0.0, 1e-40]
    folder = write(tmp_path / "hub", tensors, nested_json(config))
    jd.save(jd.load(folder, dtype=dtype), tmp_path / "saved")
    expected = {name.replace("model.language_model.", "model."): array for name, array in tensors.items()}
    assert_same_bits(load_file(tmp_path / "saved" / "model.safetensors"), expected)
    jd.save(jd.load(tmp_path / "saved", dtype=dtype), tmp_path / "again")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "saved" / name).read_bytes()


def test_weights_stored_in_f16_come_out_in_f16(tmp_path):
    tensors = {name: array.astype(np.float16) for name, array in hub_tensors().items()}
    jd.save(jd.load(write(tmp_path / "hub", tensors, nested_json())), tmp_path / "saved")
    expected = {name.replace("model.language_model.", "model."): array for name, array in tensors.items()}
    assert_same_bits(load_file(tmp_path / "saved" / "model.safetensors"), expected)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_a_fresh_model_is_stored_in_its_own_dtypes(tmp_path, dtype):
    fresh = jd.Qwen3_5(CONFIG, dtype=dtype)
    jd.save(fresh, tmp_path / "saved")
    loaded = jd.load(tmp_path / "saved", dtype=jnp.dtype(dtype).name)
    assert_same_bits(parameters(loaded), parameters(fresh))
    assert set(loaded.origin.stored_dtypes.values()) == ({"F32"} if dtype == jnp.float32 else {"F32", "BF16"})
    assert loaded.tokenizer is None


def test_a_saved_model_gives_the_same_logits_and_tokens(tmp_path):
    jd.save(model(), tmp_path / "saved")
    loaded = jd.load(tmp_path / "saved")
    tokens = jnp.array([[3, 1, 4, 1, 5, 9, 2, 6]])
    first, second = (jd.forward(m, tokens, jd.init_carry(m, 1, 8))[0] for m in (model(), loaded))
    np.testing.assert_array_equal(first, second)
    assert loaded.tokenizer.to_str() == model().tokenizer.to_str()


def test_the_configuration_comes_out_with_fields_unknown_here(tmp_path):
    raw = nested_json()
    raw["text_config"] |= {"eos_token_id": 94, "a_field_of_the_future": {"x": [1]}}
    jd.save(jd.load(write(tmp_path / "hub", hub_tensors(), raw)), tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert (saved["eos_token_id"], saved["a_field_of_the_future"]) == (94, {"x": [1]})
    assert (saved["model_type"], saved["architectures"]) == ("qwen3_5_text", ["Qwen3_5ForCausalLM"])


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json"])
def test_a_folder_that_holds_a_checkpoint_is_not_written_to(tmp_path, name):
    (tmp_path / name).write_text("precious")
    with pytest.raises(FileExistsError, match=name):
        jd.save(model(), tmp_path)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {name: "precious"}


def test_a_model_is_not_saved_over_the_folder_it_came_from(hub):
    with pytest.raises(FileExistsError):
        jd.save(jd.load(hub), hub)
    assert_same_bits(load_file(hub / "model.safetensors"), hub_tensors())


def test_a_save_that_is_killed_leaves_no_weights_and_can_be_repeated(tmp_path, monkeypatch):
    def killed(tensors, file, metadata=None):
        Path(file).write_bytes(b"half of it")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "save_file", killed)
        with pytest.raises(KeyboardInterrupt):
            jd.save(model(), tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    with pytest.raises(CheckpointError):
        jd.load(tmp_path)
    jd.save(model(), tmp_path)
    assert_same_bits(parameters(jd.load(tmp_path)), parameters(model()))


def test_saved_files_may_be_read_by_all_that_may_read_the_configuration(tmp_path):
    """safetensors writes files that their owner alone may read."""
    jd.save(model(), tmp_path)
    assert len({file.stat().st_mode for file in tmp_path.iterdir()}) == 1


def test_a_changed_parameter_is_saved(tmp_path):
    changed = fresh_model()
    changed.layers[0].mixer.A_log[...] = jnp.full(6, 0.5)
    jd.save(changed, tmp_path)
    np.testing.assert_array_equal(jd.load(tmp_path).layers[0].mixer.A_log[...], np.full(6, 0.5, np.float32))


# Memory


def test_loading_takes_little_more_than_the_parameters(hub, tmp_path):
    """f32 from 96 MB of bf16, in a process without torch: peak memory below 1.25 times the parameters.

    A tiny model before it starts JAX up; 24 MiB are for the allocator and for tracing the shapes of 12 layers.
    """
    config = Qwen3_5Config.tiny(layer_kinds=6 * CONFIG.layer_kinds, vocab_size=16381, width=512, mlp_width=2039)
    tensors = hub_tensors(config)
    folder = write(tmp_path / "model", tensors, nested_json(config))
    code = f"""
import sys
for name in ("torch", "transformers"):
    sys.modules[name] = None
import jaxdelta as jd
from ports.memory import peak_bytes

jd.load({str(hub)!r})
before = peak_bytes()
model = jd.load({str(folder)!r})
print(peak_bytes() - before)
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, cwd=root)
    assert done.returncode == 0, done.stderr
    parameters = 4 * sum(array.size for array in tensors.values())
    assert parameters < int(done.stdout) < 1.25 * parameters + 24 * 2**20
