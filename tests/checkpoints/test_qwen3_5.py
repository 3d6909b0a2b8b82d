"""Configurations of any age, and the key table: every text tensor used, every other one ignored by name or an error."""

import json

import numpy as np
import pytest
from flax import nnx

from jaxdelta.checkpoints.files import CheckpointError
from jaxdelta.checkpoints.qwen3_5 import config_from_json, config_to_json, entries, stored_names
from jaxdelta.models.config import Qwen3_5Config
from jaxdelta.models.qwen3_5 import Qwen3_5
from tests.tiny import CONFIG, flat_json, hub_tensors, nested_json

# Of Qwen/Qwen3.5-0.8B.
QWEN3_5_0_8B = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "tie_word_embeddings": True,
    "text_config": {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "full_attention_interval": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 262144,
        "rope_parameters": {"rope_theta": 10000000, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]},
    },
}


def flat(**changes):
    """``flat_json`` with other fields; None takes a field away, ``rope_…`` means a field of ``rope_parameters``."""
    raw = flat_json()
    for name, value in changes.items():
        fields, name = (raw["rope_parameters"], name[5:]) if name.startswith("rope_") else (raw, name)
        if value is None:
            del fields[name]
        else:
            fields[name] = value
    return raw


def legacy(**changes):
    """RoPE's fields at the top level, as files older than ``rope_parameters`` have them."""
    raw = flat()
    rope = raw.pop("rope_parameters")
    return raw | {name: rope[name] for name in ("rope_theta", "partial_rotary_factor")} | changes


# Configurations


@pytest.mark.parametrize(
    "raw",
    [
        nested_json(),
        flat(),
        legacy(),
        legacy(rope_scaling={"type": "default", "mrope_section": [2, 2, 2]}),
        legacy(rope_scaling=None, rope_parameters=None),
        flat(layer_types=None) | {"full_attention_interval": 2},
        flat(tie_word_embeddings=None) | {"tie_word_embeddings": True},
        flat() | {"a_field_of_the_future": 1},
        flat() | {"text_config": None},
    ],
    ids=[
        "nested",
        "flat",
        "legacy",
        "legacy rope_scaling",
        "legacy nulls",
        "interval",
        "tied",
        "unknown field",
        "null text_config",
    ],
)
def test_configurations_of_any_age_mean_the_same(raw):
    assert config_from_json(raw) == CONFIG


@pytest.mark.parametrize("outer", [True, False, None])
@pytest.mark.parametrize("inner", [True, False, None])
def test_the_tie_may_stand_at_either_level_and_the_inner_one_wins(outer, inner):
    raw = nested_json()
    for fields, tied in ((raw, outer), (raw["text_config"], inner)):
        fields.pop("tie_word_embeddings")
        fields |= {} if tied is None else {"tie_word_embeddings": tied}
    assert config_from_json(raw).tied is next((tied for tied in (inner, outer) if tied is not None), False)


def test_sizes_of_the_0_8b_model():
    config = config_from_json(QWEN3_5_0_8B)
    assert [i for i, kind in enumerate(config.layer_kinds) if kind == "attention"] == [3, 7, 11, 15, 19, 23]
    assert (config.rotary_dim, config.rope_theta, config.norm_eps, config.tied) == (64, 1e7, 1e-6, True)
    assert (config.max_rank, config.linear_of(0).conv_channels) == (128, 6144)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (flat(layer_types=["linear_attention", "mamba"]), "unknown kinds: mamba"),
        (flat(layer_types=["linear_attention"]), "layer_types has 1 entries for 2 layers"),
        (
            flat() | {"rope_parameters": {kind: {"rope_theta": 1e7} for kind in ("full_attention", "sliding_attention")}},
            r"rope_parameters by kind of layer \(full_attention, sliding_attention\), which transformers does not read in "
            "this model; put the fields of full_attention into rope_parameters itself",
        ),
        (legacy(rope_scaling={"full_attention": {"rope_theta": 1e7}}), r"rope_scaling by kind of layer \(full_attention\)"),
        (flat(rope_mrope_section=[2, 2, 1]), r"mrope_section \[2, 2, 1\] sums to 5; expected half of 12"),
        (flat(rope_rope_theta=None), "rope_theta = None; expected a positive number"),
        (flat(rope_rope_type="yarn"), "rope_type = 'yarn'"),
        (legacy(rope_scaling={"type": "yarn", "factor": 4.0}), "yarn"),
        (flat(rope_partial_rotary_factor=0.5, rope_mrope_section=None), "13 entries rotate"),
        (flat(hidden_act="gelu"), "hidden_act = 'gelu'; only 'silu'"),
        (flat(attention_bias=True), "attention_bias = True"),
        (flat(attn_output_gate=False), "attn_output_gate = False"),
        (flat(linear_num_value_heads=5), "5 value heads are no multiple of 2"),
        (flat(num_key_value_heads=3), "4 query heads are no multiple of 3"),
        (flat(vocab_size=None), "vocab_size = None; expected a whole number"),
        (flat(hidden_size="44"), "hidden_size = '44'; expected a whole number"),
        (flat(intermediate_size=59.5), "intermediate_size = 59.5; expected a whole number"),
        (flat(num_hidden_layers=0, layer_types=[]), "layer_kinds"),
        (flat(num_hidden_layers=2_000_000_000, layer_types=None), "num_hidden_layers = 2000000000; expected at most 10000"),
        (flat(num_hidden_layers=-1, layer_types=None), "num_hidden_layers = -1; expected at most"),
        (flat(linear_key_head_dim=0), "key_dim is 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_values_that_this_model_does_not_compute_are_refused(raw, message):
    with pytest.raises(CheckpointError, match=message):
        config_from_json(raw)


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        (flat(linear_conv_kernel_dim="4"), "linear_conv_kernel_dim"),
        (flat(head_dim="26"), "head_dim"),
        (flat(rms_norm_eps="small"), "rms_norm_eps"),
        (flat(max_position_embeddings="32k"), "max_position_embeddings"),
        (flat(tie_word_embeddings="false"), "tie_word_embeddings"),
        (flat(layer_types=5), "layer_types"),
        (flat() | {"rope_parameters": ["rope_theta"]}, "rope_parameters"),
        (flat(rope_partial_rotary_factor="0.5"), "partial_rotary_factor"),
        (flat(rope_mrope_section=6), "mrope_section"),
        (flat(rope_rope_theta="1e7 or so"), "rope_theta"),
        (flat(rope_rope_theta=0), "rope_theta"),
        (flat(rope_rope_theta=float("nan")), "rope_theta"),
        (flat() | {"text_config": [1]}, "text_config"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_values_of_another_type_are_refused_by_name(raw, name):
    with pytest.raises(CheckpointError, match=name):
        config_from_json(raw)


ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 12 / 26}
YARN = {"rope_type": "yarn", "factor": 4.0}


def nested(*, outer=None, without=(), **inner):
    """``nested_json`` with other fields inside ``text_config`` and, as ``outer``, around it."""
    raw = nested_json() | (outer or {})
    raw["text_config"] = {name: value for name, value in raw["text_config"].items() if name not in without} | inner
    return raw


@pytest.mark.parametrize(
    "raw",
    [
        flat() | {"rope_theta": 1e7},
        flat() | {"rope_scaling": ROPE, "rope_theta": 10_000_000},
        flat() | {"rope_scaling": {"type": "default", "partial_rotary_factor": 12 / 26}, "rope_theta": 1e7},
        flat() | {"rope_scaling": {}},
        flat(rope_type="default"),
        legacy(rope_scaling={"mrope_section": [2, 2, 2], "partial_rotary_factor": 12 / 26}),
        nested(outer={"rope_theta": 1e7, "rope_parameters": ROPE, "rms_norm_eps": 1e-6, "vocab_size": 97}),
        nested(without=["rms_norm_eps"], outer={"rms_norm_eps": 1e-6}),
        flat() | {"layer_types": ["linear_attention", "full_attention"], "full_attention_interval": 4},
    ],
    ids=str,
)
def test_a_field_may_stand_in_two_places_that_agree(raw):
    """Kinds of layers may disagree: names of tensors bear them out, and the list is what counts."""
    assert config_from_json(raw) == CONFIG
    assert config_from_json(json.loads(json.dumps(config_to_json(CONFIG, raw)))) == CONFIG


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (flat() | {"rope_theta": 1e6}, "rope_theta = 1000000.0 at the top level and 10000000 in rope_parameters"),
        (
            flat() | {"partial_rotary_factor": 0.25},
            "partial_rotary_factor = 0.25 at the top level and 0.46.* in rope_parameters",
        ),
        (flat() | {"rope_scaling": YARN}, "rope_type = 'default' in rope_parameters and 'yarn' in rope_scaling"),
        (
            flat() | {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            "rope_type = 'default' in rope_parameters and 'yarn' in rope_scaling as type",
        ),
        (
            flat() | {"rope_scaling": ROPE | {"rope_theta": 1e6}},
            "rope_theta = 10000000 in rope_parameters and 1000000.0 in rope_s",
        ),
        (
            flat() | {"rope_scaling": {"rope_type": "default"}},
            "rope_theta = 10000000 in rope_parameters, where it is not read; it belongs in rope_scaling",
        ),
        (flat(rope_type="yarn"), "rope_type = 'yarn' in rope_parameters as type and 'default' in rope_parameters"),
        (nested(outer={"rope_scaling": YARN}), r"'yarn' in rope_scaling and 'default' in text_config\.rope_parameters"),
        (nested(rope_scaling=YARN), r"'default' in text_config\.rope_parameters and 'yarn' in text_config\.rope_scaling"),
        (nested(outer={"rope_theta": 1e6}), r"rope_theta = 1000000.0 at the top level and 10000000 in text_config\.rope_p"),
        (nested(outer={"rms_norm_eps": 1e-5}), "rms_norm_eps = 1e-05 at the top level and 1e-06 in text_config"),
        (nested(without=["rms_norm_eps"], outer={"rms_norm_eps": 1e-5}), "rms_norm_eps = 1e-05 at .* and 1e-06 by default"),
        (nested(outer={"hidden_act": "gelu"}), "hidden_act = 'gelu' at the top level and 'silu' in text_config"),
        (nested(outer={"linear_num_key_heads": 4}), "linear_num_key_heads = 4 at the top level and 2 in text_config"),
        (
            nested(without=["hidden_size"], outer={"hidden_size": 44}),
            "hidden_size = 44 at the top level, where it is not read; it belongs in text_config",
        ),
        (flat() | {"per_layer_config": {"1": {"rms_norm_eps": 1e-2}}}, "per_layer_config = .*; only None"),
        (nested(per_layer_config={"1": {"rms_norm_eps": 1e-2}}), "per_layer_config = .*; only None"),
        (flat() | {"configuration_files": ["config.5.0.0.json"]}, "configuration_files = .*; only None"),
    ],
    ids=str,
)
def test_two_places_that_contradict_one_another_are_both_named(raw, message):
    with pytest.raises(CheckpointError, match=message):
        config_from_json(raw)


def test_a_missing_head_dim_is_what_transformers_takes():
    assert config_from_json(flat(head_dim=None, rope_mrope_section=None, rope_partial_rotary_factor=0.25)).head_dim == 256


def test_a_saved_field_stands_in_one_place():
    """So that a changed value is not contradicted by the one of the file that the model came from."""
    raw = flat() | {"rope_scaling": ROPE, "rope_theta": 1e7, "transformers_weights": "other.safetensors"}
    written = config_to_json(config_from_json(raw), raw)
    assert not {"rope_scaling", "rope_theta", "partial_rotary_factor", "transformers_weights"} & set(written)


@pytest.mark.parametrize("changes", [{}, {"tied": False, "layer_kinds": ("attention", "linear", "linear")}], ids=str)
def test_a_configuration_is_read_as_it_was_written(changes):
    config = Qwen3_5Config.tiny(**changes)
    assert config_from_json(json.loads(json.dumps(config_to_json(config)))) == config


def test_rotary_dims_survive_being_written_as_a_fraction():
    """The format holds rotary_dim / head_dim; int(44 * (30 / 44)) is 29, and transformers cuts off in the same way."""
    for head_dim in range(2, 257):
        for rotary_dim in range(0, head_dim + 1, 2):
            config = Qwen3_5Config.tiny(head_dim=head_dim, rotary_dim=rotary_dim)
            factor = config_to_json(config)["rope_parameters"]["partial_rotary_factor"]
            assert int(head_dim * factor) == rotary_dim, f"head_dim = {head_dim}"


@pytest.mark.parametrize(
    "raw",
    [flat(), nested_json(), legacy(), legacy(rope_parameters=None, rope_scaling=None)],
    ids=["flat", "nested", "legacy", "nulls"],
)
def test_fields_that_the_library_does_not_know_are_handed_on(raw):
    raw.get("text_config", raw)["eos_token_id"] = 94
    written = config_to_json(config_from_json(raw), raw)
    assert (written["eos_token_id"], written["mamba_ssm_dtype"]) == (94, "float32")
    assert "text_config" not in written
    assert (written["model_type"], written["architectures"]) == ("qwen3_5_text", ["Qwen3_5ForCausalLM"])
    assert config_from_json(written) == CONFIG


def test_mrope_sections_are_handed_on():
    sections = [1, 2, 3]
    raw = flat(rope_mrope_section=sections)
    assert config_to_json(config_from_json(raw), raw)["rope_parameters"]["mrope_section"] == sections


# The key table


@pytest.mark.parametrize("changes", [{}, {"tied": False}, {"layer_kinds": ("attention",) * 2}], ids=str)
def test_the_table_has_the_tensors_of_the_hub_and_each_parameter_once(changes):
    config = Qwen3_5Config.tiny(**changes)
    table = entries(config)
    expected = {name: array.shape for name, array in hub_tensors(config, prefix="").items()}
    assert {entry.name: entry.shape for entry in table} == expected
    parameters = dict(nnx.to_flat_state(nnx.state(nnx.eval_shape(lambda: Qwen3_5(config)))))
    assert sorted(map(str, parameters)) == sorted(str(entry.path) for entry in table)


def test_the_0_8b_checkpoint_has_320_text_tensors_of_488():
    config = config_from_json(QWEN3_5_0_8B)
    table = entries(config)
    text = [f"model.language_model.{entry.name}" for entry in table]
    others = [f"model.visual.blocks.{i}.norm1.weight" for i in range(153)] + [f"mtp.layers.0.{i}" for i in range(15)]
    found, ignored = stored_names(config, text + others)
    assert len(found) == 320
    assert {group: len(names) for group, names in ignored.items()} == {"vision tower": 153, "multi-token prediction": 15}
    assert sum(int(np.prod(entry.shape)) for entry in table) == 752_393_024


@pytest.mark.parametrize("prefix", ["model.language_model.", "model.", ""])
def test_either_prefix_is_taken_away(prefix):
    found, ignored = stored_names(CONFIG, list(hub_tensors(prefix=prefix)))
    assert {entry.name: names for entry, names in found.items()} == {
        entry.name: (prefix + entry.name,) for entry in entries(CONFIG)
    }
    assert ignored == {}


def test_a_prefix_on_some_tensors_only_is_an_error_that_names_them():
    names = list(hub_tensors())
    names[names.index("model.language_model.norm.weight")] = "model.norm.weight"
    with pytest.raises(CheckpointError) as error:
        stored_names(CONFIG, names)
    assert "missing: model.language_model.norm.weight;" in str(error.value)
    assert "no part of the model uses: model.norm.weight" in str(error.value)


@pytest.mark.parametrize("name", ["mtp.norm.weight", "model.mtp.norm.weight", "mtp.fc.weight", "model.visual.norm.weight"])
def test_ignored_groups_never_stand_in_for_a_text_tensor(name):
    """The final norm is missing; an ignored one of a like name is not taken for it."""
    names = [n for n in hub_tensors() if n != "model.language_model.norm.weight"]
    with pytest.raises(CheckpointError, match=r"missing: model\.language_model\.norm\.weight; .* uses: none"):
        stored_names(CONFIG, [*names, name])


@pytest.mark.parametrize(
    "name",
    [
        "model.language_model.layers.1.self_attn.rotary_emb.inv_freq",
        "model.language_model.rotary_emb.inv_freq",
        "model.rotary_emb.original_inv_freq",
        "rotary_emb.inv_freq",
        "model.layers.1.self_attn.rotary_emb.cos_cached",
    ],
)
def test_rotary_buffers_of_older_tools_are_ignored_by_name(name):
    assert stored_names(CONFIG, [*hub_tensors(), name])[1] == {"rotary frequencies": [name]}


@pytest.mark.parametrize("prefix", ["model.language_model.", "model.", ""])
def test_a_tied_model_may_be_stored_under_its_heads_name(prefix):
    names = [n for n in hub_tensors(prefix=prefix) if "embed_tokens" not in n]
    found, ignored = stored_names(CONFIG, [*names, "lm_head.weight"])
    assert {entry.name: stored for entry, stored in found.items() if "embed" in entry.name} == {
        "embed_tokens.weight": ("lm_head.weight",)
    }
    assert ignored == {}


@pytest.mark.parametrize(
    "name",
    [
        "mtpfc.weight",
        "mtp_fc.weight",
        "model.visualise.weight",
        "visual.weight",
        "x.mtp.weight",
        "inv_freq",
        "rotary_emb.inv_freqs",
        "xrotary.inv_freq",
    ],
)
def test_names_that_only_resemble_an_ignored_group_are_errors(name):
    with pytest.raises(CheckpointError, match=f"no part of the model uses: {name}"):
        stored_names(CONFIG, [*hub_tensors(), name])


@pytest.mark.parametrize(
    "name", ["layers.2.input_layernorm.weight", "layers.0.self_attn.q_proj.weight", "layers.0.mlp.bias"]
)
def test_a_text_tensor_that_no_parameter_takes_is_an_error(name):
    with pytest.raises(CheckpointError, match=rf"no part of the model uses: model\.language_model\.{name}"):
        stored_names(CONFIG, [*hub_tensors(), f"model.language_model.{name}"])


def test_many_missing_tensors_are_counted():
    with pytest.raises(CheckpointError, match=r"missing: (model\.\S+, ){7}model\.\S+ and 19 more; "):
        stored_names(CONFIG, ["model.visual.weight"])
