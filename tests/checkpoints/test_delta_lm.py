"""Checkpoints of flash-linear-attention: defaults, refusals, both layouts of the tensors, round trips, the commands."""

import json
from dataclasses import asdict, replace

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import jaxdelta as jd
from jaxdelta import cli
from jaxdelta.checkpoints.delta_lm import config_from_json, config_to_json, entries
from jaxdelta.checkpoints.files import CheckpointError
from jaxdelta.models.config import FAMILIES, DeltaLMConfig
from jaxdelta.nn.sizes import AttentionSizes
from tests.tiny import assert_same_bits, text, tokenizer, tokens, write, write_config

ALL = pytest.mark.parametrize("family", FAMILIES)
D, F, Y, K, V, G = 40, 59, 97, 8, 12, 3
H = {"delta_net": G, "gated_deltanet": 2 * G, "gated_deltaproduct": G}
ATTENTION = {"layers": [1], "num_heads": 4, "num_kv_heads": 2, "qkv_bias": True, "window_size": 7, "rope_theta": 1e4}
OWN = {  # the fields of each family
    "delta_net": dict(
        expand_k=0.6, expand_v=0.9, use_beta=True, use_gate=False, qk_activation="silu", qk_norm="l2", num_heads=G
    ),
    "gated_deltanet": dict(
        head_dim=K, expand_v=1.5, num_heads=G, num_v_heads=2 * G, use_gate=True, output_gate_activation="swish"
    ),
    "gated_deltaproduct": dict(
        head_dim=K, expand_v=1.5, num_heads=G, num_householder=2, use_forget_gate=True, use_output_gate=True
    ),
}


def fla_json(family, **changes):
    """``config.json`` as fla writes it."""
    common = {
        "model_type": family,
        "vocab_size": Y,
        "hidden_size": D,
        "intermediate_size": F,
        "hidden_ratio": 4,
        "hidden_act": "swish",
        "num_hidden_layers": 3,
        "use_short_conv": True,
        "conv_size": 4,
        "allow_neg_eigval": False,
        "norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "max_position_embeddings": 2048,
        "attnres_block_size": None,
        "attn": ATTENTION,
        "fuse_norm": True,
        "attn_mode": "chunk",
    }
    return common | OWN[family] | changes


def fla_config(family, **changes):
    """What ``fla_json`` means."""
    attention = (AttentionSizes(num_query_heads=4, num_kv_heads=2, head_dim=10, window=7, bias=True),)
    return DeltaLMConfig.tiny(family, **({"num_value_heads": H[family], "attention": attention} | changes))


def fla_tensors(family, seed=0):
    """Random weights under fla's names and shapes; F32 for A_log and dt_bias, else BF16."""
    n = 2 if family == "gated_deltaproduct" else 1
    heads, rows = H[family], {"q": G * K, "k": n * G * K, "v": n * H[family] * V}
    linear = {f"{x}_proj.weight": (rows[x], D) for x in "qkv"} | {f"{x}_conv1d.weight": (rows[x], 1, 4) for x in "qkv"}
    linear |= {"b_proj.weight": (n * heads, D), "o_norm.weight": (V,), "o_proj.weight": (D, heads * V)}
    if family != "delta_net":
        linear |= {"a_proj.weight": (heads, D), "A_log": (heads,), "dt_bias": (heads,), "g_proj.weight": (heads * V, D)}
    attention = {"q_proj.weight": (40, D), "k_proj.weight": (20, D), "v_proj.weight": (20, D), "o_proj.weight": (D, 40)}
    attention |= {"q_proj.bias": (40,), "k_proj.bias": (20,), "v_proj.bias": (20,)}
    shapes = {"model.embeddings.weight": (Y, D), "model.norm.weight": (D,), "lm_head.weight": (Y, D)}
    for i, mixer in enumerate((linear, attention, linear)):
        shapes |= {f"model.layers.{i}.attn.{name}": shape for name, shape in mixer.items()}
        shapes |= {f"model.layers.{i}.{name}_norm.weight": (D,) for name in ("attn", "mlp")}
        shapes |= {f"model.layers.{i}.mlp.{name}_proj.weight": (F, D) for name in ("gate", "up")}
        shapes[f"model.layers.{i}.mlp.down_proj.weight"] = (D, F)
    rng = np.random.default_rng(seed)
    return {
        name: (0.1 * rng.standard_normal(shape)).astype(
            np.float32 if name.endswith(("A_log", "dt_bias")) else ml_dtypes.bfloat16
        )
        for name, shape in shapes.items()
    }


def first_release(tensors):
    """The layout of DeltaProduct's first release: a tensor a step, and a query convolution a step, the first alone used."""
    old = {}
    for name, array in tensors.items():
        part = name.rpartition("attn.")[2]
        if ".1." in name or part[0] not in "kvbq" or part == "q_proj.weight":
            old[name] = array
            continue
        steps = np.split(array, 2) if part[0] != "q" else [array, array[::-1]]
        kind = part.split(".")[0]
        for j, step in enumerate(steps):
            old[name.replace(kind, f"{kind}s.{j}")] = np.ascontiguousarray(step)
    return old


def folder_of(path, family, tensors=None, **changes):
    return write(path, fla_tensors(family) if tensors is None else tensors, fla_json(family, **changes))


def parameters(model):
    return {path: np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(nnx.state(model))}


# Configurations


@ALL
def test_a_configuration_means_its_sizes_and_is_read_as_it_was_written(family):
    config = config_from_json(fla_json(family))
    assert config == fla_config(family)
    assert config_from_json(json.loads(json.dumps(config_to_json(config)))) == config


def test_missing_fields_have_the_defaults_of_fla():
    common = dict(vocab_size=32000, width=2048, conv_width=4, attention=(), norm_eps=1e-6, tied=False, max_position=2048)
    common |= dict(mlp_width=5632, num_householder=1, negative_eigenvalues=False, qk_activation="silu", qk_norm="l2")
    common |= dict(write_gate=True)
    gated = dict(layer_kinds=("linear",) * 21, num_key_heads=6, num_value_heads=6, key_dim=256, value_dim=512)
    expected = {
        "delta_net": dict(
            layer_kinds=("linear",) * 24,
            num_key_heads=16,
            num_value_heads=16,
            key_dim=128,
            value_dim=128,
            forget_gate=False,
            output_gate=None,
        ),
        "gated_deltanet": gated | dict(forget_gate=True, output_gate="silu"),
        "gated_deltaproduct": gated | dict(forget_gate=False, output_gate="silu"),
    }
    for family, sizes in expected.items():
        assert asdict(config_from_json({"model_type": family})) == dict(family=family) | common | sizes


@pytest.mark.parametrize(
    ("family", "fields", "changes"),
    [
        ("delta_net", dict(use_gate=True), dict(output_gate="silu")),
        ("delta_net", dict(use_beta=False, allow_neg_eigval=True), dict(write_gate=False, negative_eigenvalues=True)),
        ("delta_net", dict(qk_activation="elu", qk_norm="sum"), dict(qk_activation="elu", qk_norm="sum")),
        ("gated_deltanet", dict(output_gate_activation="sigmoid"), dict(output_gate="sigmoid")),
        ("gated_deltanet", dict(use_gate=False), dict(output_gate=None)),
        ("gated_deltanet", dict(num_v_heads=None), dict(num_value_heads=G)),
        ("gated_deltaproduct", dict(num_householder=3, use_forget_gate=False), dict(num_householder=3, forget_gate=False)),
        ("gated_deltaproduct", dict(use_output_gate=False), dict(output_gate=None)),
        ("gated_deltaproduct", dict(use_output_gate=False, use_gate=True), dict(output_gate=None)),
        ("gated_deltaproduct", dict(use_short_conv=False), dict(conv_width=1)),
        ("gated_deltaproduct", dict(attn=None), dict(layer_kinds=("linear",) * 3, attention=())),
        ("gated_deltaproduct", dict(intermediate_size=None), dict(mlp_width=256)),
        ("gated_deltaproduct", dict(intermediate_size=None, hidden_ratio=10), dict(mlp_width=512)),
        ("gated_deltaproduct", dict(tie_word_embeddings=True, norm_eps=1e-5), dict(tied=True, norm_eps=1e-5)),
    ],
    ids=str,
)
def test_fields_mean_what_fla_takes_them_for(family, fields, changes):
    config = config_from_json(fla_json(family, **fields))
    assert config == replace(fla_config(family), **changes)
    assert config_from_json(config_to_json(config)) == config


def test_the_first_release_called_the_output_gate_use_gate():
    raw = fla_json("gated_deltaproduct", use_gate=False)
    del raw["use_output_gate"]
    assert config_from_json(raw).output_gate is None


def test_attention_layers_may_have_sizes_of_their_own():
    other = {"layers": [0], "num_heads": 2}
    config = config_from_json(fla_json("delta_net", attn=[ATTENTION, other]))
    assert config.layer_kinds == ("attention", "attention", "linear")
    assert config.attention == (AttentionSizes(2, 2, 20), fla_config("delta_net").attention[0])
    assert config_from_json(config_to_json(config)) == config


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("gated_deltaproduct", dict(hidden_act="powlu"), "hidden_act = 'powlu'; only 'swish'"),
        ("gated_deltanet", dict(attnres_block_size=4), "attnres_block_size = 4; only None"),
        (
            "gated_deltanet",
            dict(output_gate_activation="gelu"),
            "output_gate_activation = 'gelu'; expected silu, swish, sig",
        ),
        ("gated_deltanet", dict(num_v_heads=4), "4 value heads are no multiple of 3 key heads"),
        ("gated_deltanet", dict(expand_v=1.51), r"head_dim \* expand_v is 12\.08; expected a whole number"),
        ("delta_net", dict(expand_v=1.0), r"hidden_size \* expand_v / num_heads is 13\.3333; expected a whole number"),
        ("delta_net", dict(expand_k=0.001), "expand_k / num_heads is .*expected a whole number"),
        ("delta_net", dict(qk_activation="gelu"), "qk_activation = 'gelu'; expected silu, relu, elu, identity"),
        ("delta_net", dict(qk_norm="rms"), "qk_norm = 'rms'; expected l2, sum"),
        ("gated_deltaproduct", dict(num_heads=0), "num_heads = 0; expected at least 1"),
        ("gated_deltaproduct", dict(use_forget_gate=1), "use_forget_gate = 1; expected true or false"),
        ("gated_deltaproduct", dict(use_short_conv="false"), "use_short_conv = 'false'; expected true or false"),
        ("gated_deltaproduct", dict(num_householder=0), "num_householder is 0"),
        ("gated_deltaproduct", dict(attn=[1]), r"attn = \[1\]; expected null, or objects that list their layers"),
        *(
            ("delta_net", dict(attn=ATTENTION | {"layers": layers}), "different layers from 0 to 2")
            for layers in ([True], [-1], [3], [1, 1], ["1"], [1.0], [None])
        ),
        ("delta_net", dict(attn=[ATTENTION, ATTENTION]), "different layers from 0 to 2"),
        ("delta_net", dict(attn=ATTENTION | {"num_heads": 3}), "attn with 3 heads for a width of 40"),
        ("delta_net", dict(attn=ATTENTION | {"num_heads": 0}), "attn with 0 heads"),
        (
            "delta_net",
            dict(attn=ATTENTION | {"num_heads": 8}),
            "5 entries rotate; expected an even number up to head_dim = 5",
        ),
        ("delta_net", dict(attn=ATTENTION | {"num_kv_heads": 3}), "no multiple of 3 key/value heads"),
        ("delta_net", dict(attn=ATTENTION | {"window_size": 0}), "window is 0"),
    ],
    ids=str,
)
def test_values_that_this_model_does_not_compute_are_refused(family, fields, message):
    with pytest.raises(CheckpointError, match=message) as error:
        config_from_json(fla_json(family, **fields))
    assert str(error.value).count("config.json") == 1


VALUES = (None, -1, 0, "x", [], {}, True, 1e400, float("nan"), 1e308, 10**400)
FLAGS = {"use_short_conv", "allow_neg_eigval", "tie_word_embeddings", "use_beta", "use_gate", "use_forget_gate"}
FLAGS |= {"use_output_gate", "qkv_bias"}
ABSENT = {"num_v_heads", "intermediate_size", "hidden_ratio", "attn", "attnres_block_size", "num_kv_heads", "window_size"}


def accepted(read, fields):
    """The values of VALUES that each field may have; every other one must raise CheckpointError."""
    found = {}
    for name in fields:
        for value in VALUES:
            try:
                hash(read(name, value))
            except CheckpointError:
                continue
            found.setdefault(name, []).append(value)
    return found


@ALL
def test_values_of_any_type_are_accepted_or_refused_in_words(family):
    raw = fla_json(family, intermediate_size=None)
    fields = set(raw) - {"model_type", "fuse_norm", "attn_mode"}
    found = accepted(lambda name, value: config_from_json(raw | {name: value}), fields)
    assert found.pop("attn") == [None, []]
    assert found == {name: [True] for name in FLAGS & fields} | {name: [None] for name in (ABSENT & fields) - {"attn"}}


def test_values_of_any_type_in_attention_are_accepted_or_refused_in_words():
    def read(name, value):
        return config_from_json(fla_json("delta_net", attn=ATTENTION | {name: value}))

    found = accepted(read, ATTENTION)
    assert found == {"layers": [[]], "qkv_bias": [True], "num_kv_heads": [None], "window_size": [None]}


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("delta_net", dict(num_value_heads=6), "a delta_net checkpoint has as many value heads as key heads"),
        ("gated_deltaproduct", dict(num_value_heads=6), "as many value heads as key heads"),
        ("delta_net", dict(output_gate="sigmoid"), "a delta_net checkpoint has no sigmoid output gate"),
        ("gated_deltaproduct", dict(output_gate="sigmoid"), "no sigmoid output gate"),
        ("gated_deltanet", dict(attention=(AttentionSizes(4, 2, 8),)), "together have the width of the model"),
    ],
    ids=str,
)
def test_sizes_that_the_format_cannot_say_are_refused_before_anything_is_written(tmp_path, family, changes, message):
    model = jd.DeltaLM(DeltaLMConfig.tiny(family, **changes))
    with pytest.raises(ValueError, match=message):
        jd.save(model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_value_dims_survive_being_written_as_a_fraction():
    """fla cuts head_dim * expand_v off; int(7 * (61 / 7)) would be 60."""
    for key_dim in range(1, 50):
        for value_dim in range(1, 100):
            config = DeltaLMConfig.tiny("gated_deltanet", key_dim=key_dim, value_dim=value_dim)
            raw = config_to_json(config)
            assert int(key_dim * raw["expand_v"]) == value_dim
            assert config_from_json(raw) == config


def test_fields_that_the_library_does_not_know_are_handed_on():
    raw = fla_json("gated_deltaproduct", use_short_conv=False, conv_size=3, eos_token_id=94, a_field_of_the_future=[1])
    written = config_to_json(config_from_json(raw), raw)
    assert {name: written[name] for name in raw} == raw | {"attn": ATTENTION}
    assert written["architectures"] == ["GatedDeltaProductForCausalLM"]


# Tensors


@ALL
def test_the_table_has_the_tensors_of_fla_and_each_parameter_once(family):
    table = entries(fla_config(family))
    assert {e.stored_name(): e.shape for e in table} == {name: a.shape for name, a in fla_tensors(family).items()}
    model = nnx.eval_shape(lambda: jd.DeltaLM(fla_config(family)))
    assert sorted(str(path) for path, _ in nnx.to_flat_state(nnx.state(model))) == sorted(str(e.path) for e in table)


def test_every_parameter_holds_its_tensor(tmp_path):
    """conv1d without its middle axis, nothing transposed."""
    stored = fla_tensors("gated_deltaproduct")
    loaded = parameters(jd.load(folder_of(tmp_path / "fla", "gated_deltaproduct")))
    assert len(loaded) == len(stored)
    for name, path in {
        "embeddings.weight": ("embed",),
        "norm.weight": ("final_norm",),
        "layers.0.attn.q_proj.weight": ("layers", 0, "mixer", "q"),
        "layers.0.attn.k_proj.weight": ("layers", 0, "mixer", "k"),
        "layers.0.attn.v_proj.weight": ("layers", 0, "mixer", "v"),
        "layers.0.attn.k_conv1d.weight": ("layers", 0, "mixer", "conv_k"),
        "layers.0.attn.a_proj.weight": ("layers", 0, "mixer", "a"),
        "layers.0.attn.b_proj.weight": ("layers", 0, "mixer", "b"),
        "layers.0.attn.g_proj.weight": ("layers", 0, "mixer", "z"),
        "layers.0.attn.A_log": ("layers", 0, "mixer", "A_log"),
        "layers.0.attn.dt_bias": ("layers", 0, "mixer", "dt_bias"),
        "layers.0.attn.o_norm.weight": ("layers", 0, "mixer", "norm"),
        "layers.1.attn.k_proj.bias": ("layers", 1, "mixer", "k_bias"),
        "layers.1.attn.o_proj.weight": ("layers", 1, "mixer", "out"),
        "layers.2.attn_norm.weight": ("layers", 2, "input_norm"),
        "layers.2.mlp_norm.weight": ("layers", 2, "post_norm"),
        "layers.2.mlp.down_proj.weight": ("layers", 2, "mlp", "down"),
    }.items():
        expected = stored["model." + name].astype(np.float32)
        np.testing.assert_array_equal(loaded[path], expected[:, 0] if "conv1d" in name else expected, err_msg=name)
    np.testing.assert_array_equal(loaded["head",], stored["lm_head.weight"].astype(np.float32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@ALL
def test_every_tensor_comes_out_as_it_was_stored(tmp_path, family, dtype):
    """Bit for bit under its name and in its dtype: BF16, and F32 of a BF16 model; and so once more."""
    jd.save(jd.load(folder_of(tmp_path / "fla", family), dtype=dtype), tmp_path / "saved")
    assert_same_bits(load_file(tmp_path / "saved" / "model.safetensors"), fla_tensors(family))
    written = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert {name: written[name] for name in fla_json(family)} == fla_json(family)
    again = jd.load(tmp_path / "saved", dtype=dtype)
    assert_same_bits(parameters(again), parameters(jd.load(tmp_path / "fla", dtype=dtype)))
    assert set(again.origin.stored_dtypes.values()) == ({"BF16"} if family == "delta_net" else {"BF16", "F32"})


def test_a_fresh_model_is_read_as_it_was_saved(tmp_path):
    fresh = jd.DeltaLM(fla_config("gated_deltanet"), dtype=jnp.bfloat16)
    jd.save(fresh, tmp_path / "saved")
    assert_same_bits(parameters(jd.load(tmp_path / "saved", dtype="bfloat16")), parameters(fresh))


def test_the_first_releases_layout_loads_as_the_present_one(tmp_path):
    """Saved, it is the present one."""
    new, stored = folder_of(tmp_path / "new", "gated_deltaproduct"), fla_tensors("gated_deltaproduct")
    old = folder_of(tmp_path / "old", "gated_deltaproduct", first_release(stored))
    assert "model.layers.0.attn.k_projs.1.weight" in load_file(old / "model.safetensors")
    assert_same_bits(parameters(jd.load(old)), parameters(jd.load(new)))
    unused = {"unused query convolutions": [f"model.layers.{i}.attn.q_conv1ds.1.weight" for i in (0, 2)]}
    assert jd.inspect(old).ignored == unused
    assert jd.inspect(old).num_parameters == sum(a.size for a in stored.values())
    jd.save(jd.load(old), tmp_path / "saved")
    assert_same_bits(load_file(tmp_path / "saved" / "model.safetensors"), stored)


@pytest.mark.parametrize("load", [jd.load, jd.inspect], ids=["load", "inspect"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("model.layers.0.attn.k_proj.weight"),
            r"missing: model\.layers\.0\.attn\.k_proj\.weight; .*: none",
        ),
        (lambda t: t.pop("lm_head.weight"), r"missing: lm_head\.weight; .*tie_word_embeddings contradicts lm_head\.weight"),
        (
            lambda t: t.update({"model.layers.0.attn.D": t["model.norm.weight"]}),
            r"missing: none; .* uses: model\.layers\.0\.attn\.D",
        ),
        (
            lambda t: t.update({"model.layers.1.attn.k_proj.weight": t["model.layers.1.attn.q_proj.weight"]}),
            r"asks for model\.layers\.1\.attn\.k_proj\.weight of shape \[20, 40\], the file has \[40, 40\]",
        ),
        (
            lambda t: t.update({"model.layers.2.attn.v_conv1d.weight": t["model.layers.2.attn.v_conv1d.weight"][:, :, 1:]}),
            r"v_conv1d\.weight of shape \[72, 1, 4\], the file has \[72, 1, 3\]",
        ),
    ],
    ids=["missing", "no head", "extra", "shape", "taps"],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, load, change, message):
    tensors = fla_tensors("gated_deltaproduct")
    change(tensors)
    tensors = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    with pytest.raises(CheckpointError, match=message):
        load(folder_of(tmp_path / "fla", "gated_deltaproduct", tensors))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.0.attn.k_projs.1.weight"), r"missing: model\.layers\.0\.attn\.k_projs\.1\.weight"),
        (
            lambda t: t.update({"model.layers.0.attn.b_projs.2.weight": t["model.layers.0.attn.b_projs.1.weight"]}),
            r"uses: model\.layers\.0\.attn\.b_projs\.2\.weight",
        ),
        (
            lambda t: t.update({"model.layers.2.attn.v_projs.1.weight": t["model.layers.2.attn.k_projs.1.weight"]}),
            r"model\.layers\.2\.attn\.v_projs\.1\.weight of shape \[36, 40\], the file has \[24, 40\]",
        ),
    ],
    ids=["missing", "extra", "shape"],
)
def test_steps_of_the_first_release_that_do_not_fit_are_named(tmp_path, change, message):
    tensors = first_release(fla_tensors("gated_deltaproduct"))
    change(tensors)
    with pytest.raises(CheckpointError, match=message):
        jd.load(folder_of(tmp_path / "fla", "gated_deltaproduct", tensors))


def test_the_unused_skip_weights_of_the_first_gated_deltanets_are_ignored_by_name(tmp_path):
    """One a head; they are not saved again."""
    stored = fla_tensors("gated_deltanet")
    extra = {f"model.layers.{i}.attn.D": np.ones(2 * G, np.float32) for i in (0, 2)}
    folder = folder_of(tmp_path / "fla", "gated_deltanet", stored | extra)
    assert jd.inspect(folder).ignored == {"unused skip weights": sorted(extra)}
    assert jd.inspect(folder).num_parameters == sum(a.size for a in stored.values())
    jd.save(jd.load(folder), tmp_path / "saved")
    assert_same_bits(load_file(tmp_path / "saved" / "model.safetensors"), stored)


@ALL
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside"])
def test_a_tied_head_may_be_stored_alone_or_beside_the_embedding(tmp_path, family, beside):
    stored = fla_tensors(family)
    stored["lm_head.weight"] = stored["model.embeddings.weight"].copy()
    usual = {name: array for name, array in stored.items() if name != "lm_head.weight"}
    if not beside:
        del stored["model.embeddings.weight"]
    folder = folder_of(tmp_path / "fla", family, stored, tie_word_embeddings=True)
    assert jd.inspect(folder).ignored == ({"copy of the embedding": ["lm_head.weight"]} if beside else {})
    jd.save(jd.load(folder), tmp_path / "saved")
    assert_same_bits(load_file(tmp_path / "saved" / "model.safetensors"), usual)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(rope_theta=5e5), "rope_theta = 500000.0 at the top level and 10000.0 in attn"),
        (dict(window_size=8), "window_size = 8 at the top level and 7 in attn"),
        (
            dict(window_size=8, attn={"layers": [1], "num_heads": 4}),
            "window_size = 8 at the top level, where it is not read",
        ),
        (
            dict(rope_theta=5e5, attn={"layers": [1], "num_heads": 4}),
            "rope_theta = 500000.0 at the top level and 10000.0 by d",
        ),
        (dict(per_layer_config={"0": {"num_heads": 1}}), "per_layer_config = .*; only None"),
    ],
    ids=str,
)
def test_a_field_of_attention_that_contradicts_one_beside_it_is_refused(fields, message):
    with pytest.raises(CheckpointError, match=message):
        config_from_json(fla_json("gated_deltanet", **fields))


def test_a_field_beside_attention_may_say_the_same_or_mean_nothing():
    assert config_from_json(fla_json("delta_net", rope_theta=10_000, window_size=7)) == fla_config("delta_net")
    assert config_from_json(fla_json("delta_net", attn=None, rope_theta=5e5)).attention == ()


@ALL
def test_a_tied_model_may_be_saved_without_its_head(tmp_path, family):
    """Names then have no prefix; the first release's layout may be among them."""
    stored = {name: array for name, array in fla_tensors(family).items() if name != "lm_head.weight"}
    layout = first_release(stored) if family == "gated_deltaproduct" else stored
    bare = {name.removeprefix("model."): array for name, array in layout.items()}
    jd.save(jd.load(folder_of(tmp_path / "fla", family, bare, tie_word_embeddings=True)), tmp_path / "saved")
    assert_same_bits(load_file(tmp_path / "saved" / "model.safetensors"), stored)


def test_sizes_beyond_all_measure_are_refused_at_once(tmp_path):
    with pytest.raises(CheckpointError, match="num_hidden_layers = 2000000000; expected at most 10000"):
        config_from_json(fla_json("delta_net", num_hidden_layers=2_000_000_000))
    folder = folder_of(
        tmp_path / "fla", "gated_deltaproduct", first_release(fla_tensors("gated_deltaproduct")), num_householder=2**31 - 1
    )
    with pytest.raises(CheckpointError, match=r"missing: .*_projs\.10\.weight"):
        jd.load(folder)


def test_rotary_frequencies_are_ignored_by_name(tmp_path):
    extra = {"model.layers.1.attn.rotary.inv_freq": np.zeros(5, np.float32)}
    folder = folder_of(tmp_path / "fla", "delta_net", fla_tensors("delta_net") | extra)
    assert jd.inspect(folder).ignored == {"rotary frequencies": list(extra)}
    assert len(parameters(jd.load(folder))) == len(fla_tensors("delta_net"))


def test_an_unsupported_family_is_told_all_that_are_supported(tmp_path):
    write_config(tmp_path, fla_json("delta_net", model_type="mamba2"))
    names = "qwen3_5, qwen3_5_text, delta_net, gated_deltanet, gated_deltaproduct"
    with pytest.raises(CheckpointError, match=f"model_type 'mamba2'; supported: {names}$"):
        jd.load(tmp_path)


# Commands


@pytest.mark.parametrize(
    ("family", "layers", "states"),
    [
        (
            "delta_net",
            "DeltaNet model of flash-linear-attention, 3 layers: 2 DeltaNet, 1 attention",
            "3 heads of 8 x 12 (K x V)",
        ),
        ("gated_deltanet", "3 layers: 2 Gated DeltaNet, 1 attention", "2 layers x 6 heads of 8 x 12 (K x V)"),
        ("gated_deltaproduct", "2 Gated DeltaProduct, 1 attention", "3 heads of 8 x 12 (K x V), 2 writes a token"),
    ],
)
def test_info_says_what_a_checkpoint_is(tmp_path, monkeypatch, capsys, family, layers, states):
    monkeypatch.setenv("COLUMNS", "200")
    cli.main(["info", str(folder_of(tmp_path / "fla", family))])
    said = " ".join(capsys.readouterr().out.split())
    assert layers in said
    assert states in said
    assert "40, 59, 97 (untied head)" in said
    assert "weights model.safetensors ignored" in said
    assert "Qwen" not in said


def test_a_sweep_of_a_checkpoint_prints_a_row_for_each_rank(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    folder = folder_of(tmp_path / "fla", "gated_deltaproduct")
    tokenizer().save(str(folder / "tokenizer.json"))
    (tmp_path / "a.txt").write_text(text(tokens(34)[0]))
    options = {"documents": "a.txt", "ranks": "1,2", "segment": "16", "method": "svd", "copy-gap": "8", "out": "out"}
    paths = {"documents", "out"}
    arguments = [a for k, v in options.items() for a in (f"--{k}", str(tmp_path / v) if k in paths else v)]
    cli.main(["sweep", str(folder), *arguments])
    printed = [
        line.split()[0] for line in capsys.readouterr().out.splitlines() if line.split() and line.split()[0].isdigit()
    ]
    assert printed == ["8", "2", "1"]
    assert (tmp_path / "out" / "rows.csv").read_text().count("\n") == 4
