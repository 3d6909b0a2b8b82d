"""Named activations: in segments and at once, states and pulled-back queries, replacements, names that do not exist."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxdelta as jd
from ports.compare import relative_error
from tests.helpers import randomised
from tests.tiny import fresh_model

N, SEGMENT = 21, 8
IDS = np.random.default_rng(0).integers(0, 90, (2, N))
ONE = dict(layer_kinds=("linear",), attention=())
PRODUCT = jd.DeltaLMConfig.tiny(num_householder=3, num_key_heads=2, num_value_heads=4, **ONE)
PLAIN = jd.DeltaLMConfig.tiny("delta_net", write_gate=False, output_gate=None, **ONE)
BOUND = 2e-5  # f32: splits of a text


def same(x, hook):
    return x


def zero(x, hook):
    return jnp.zeros_like(x)


@pytest.fixture(scope="module")
def models():
    return {
        "qwen": fresh_model(layer_kinds=("linear", "attention", "linear")),
        "product": randomised(jd.DeltaLM(PRODUCT, rngs=nnx.Rngs(1)), 2),
        "without gates": randomised(jd.DeltaLM(PLAIN, rngs=nnx.Rngs(1)), 2),
    }


@pytest.fixture(scope="module")
def model(models):
    return models["qwen"]


@pytest.fixture(scope="module")
def cached(model):
    return jd.run_with_cache(model, IDS, segment=SEGMENT)


@pytest.mark.parametrize("name", ("qwen", "product", "without gates"))
def test_activations_of_segments_are_those_of_one_pass(models, name):
    logits, segmented = jd.run_with_cache(models[name], IDS, jd.hook_names(models[name]), segment=SEGMENT)
    expected, whole = jd.run_with_cache(models[name], IDS)
    assert list(segmented) == jd.hook_names(models[name])
    assert list(whole) == [name for name in segmented if not name.endswith("qbar")]
    assert relative_error(logits, expected) < BOUND
    for name, x in whole.items():
        if name.endswith(("hook_state", "hook_state_before")):
            assert (segmented[name].shape[1], x.shape[1]) == (3, 1)
            assert relative_error(segmented[name][:, -1:], x) < BOUND or name.endswith("before")
        else:
            assert relative_error(segmented[name], x) < BOUND, name


def test_shapes_are_those_of_transformer_lens(models):
    """[batch, pos, head, dim]: key heads before the norm, value heads after; n_h entries a token for what is written."""
    _, cache = jd.run_with_cache(models["product"], IDS, lambda name: True, segment=SEGMENT)
    shapes = {name.split(".")[-1]: x.shape for name, x in cache.items()}
    K, V, n = PRODUCT.key_dim, PRODUCT.value_dim, 3
    assert shapes["hook_resid_post"] == shapes["hook_out"] == (2, N, PRODUCT.width)
    assert shapes["hook_q_pre_conv"] == shapes["hook_q"] == (2, N, 2, K)
    assert shapes["hook_k_pre_conv"] == shapes["hook_k"] == (2, n * N, 2, K)
    assert shapes["hook_q_normed"] == shapes["hook_qbar"] == (2, N, 4, K)
    assert shapes["hook_v_pre_conv"] == shapes["hook_v"] == (2, n * N, 4, V)
    assert shapes["hook_beta"] == shapes["hook_beta_logit"] == (2, n * N, 4)
    assert shapes["hook_log_decay"] == (2, N, 4)
    assert shapes["hook_recurrence_out"] == shapes["hook_gate_input"] == (2, N, 4, V)
    assert shapes["hook_state"] == (2, 3, 4, K, V)


def test_layers_have_the_names_of_what_they_have(models):
    assert not [name for name in jd.hook_names(models["without gates"]) if name.endswith(("beta_logit", "gate_input"))]
    assert {
        name.split(".")[2] for name in jd.hook_names(models["qwen"]) if name.startswith("blocks.1.") and name.count(".") > 2
    } == {"attn"}


def test_the_stream_is_the_sum_of_what_layers_add(cached):
    _, cache = cached
    for layer, mixer in enumerate(("linear_attn", "attn", "linear_attn")):
        before, middle, after = (cache[f"blocks.{layer}.hook_resid_{at}"] for at in ("pre", "mid", "post"))
        np.testing.assert_allclose(before + cache[f"blocks.{layer}.{mixer}.hook_out"], middle, atol=1e-5)
        np.testing.assert_allclose(middle + cache[f"blocks.{layer}.hook_mlp_out"], after, atol=1e-5)


def test_logits_are_those_of_forward(model, cached):
    expected, _ = jd.forward(model, IDS, jd.init_carry(model, 2, 24))
    assert relative_error(cached[0], expected) < BOUND
    one, _ = jd.run_with_cache(model, IDS[0], ())
    assert relative_error(one[0], expected[0]) < BOUND


def test_states_are_those_that_the_carry_has_at_each_boundary(model, cached):
    for i, seen in enumerate((8, 16, N)):
        _, carry = jd.forward(model, IDS[:, :seen], jd.init_carry(model, 2, 24))
        for layer, S in zip(model.config.linear_layers, jd.states(carry), strict=True):
            assert relative_error(cached[1][f"blocks.{layer}.linear_attn.hook_state"][:, i], S) < BOUND
    before, after = (cached[1][f"blocks.2.linear_attn.{name}"] for name in ("hook_state_before", "hook_state"))
    np.testing.assert_array_equal(before[:, 1:], after[:, :-1])
    assert not before[:, 0].any()


def test_an_intervention_changes_the_state_before_a_segment_only(model):
    _, cache = jd.run_with_cache(model, IDS, lambda name: "hook_state" in name, segment=SEGMENT, intervention=jd.Zero())
    assert not cache["blocks.0.linear_attn.hook_state_before"].any()
    assert cache["blocks.0.linear_attn.hook_state"].any()


@pytest.mark.parametrize("name", ("qwen", "product"))
def test_what_a_segment_reads_of_its_first_state_is_its_pulled_back_query(models, name, x64):
    """The outputs with the state before, minus those without it, in f64."""
    graphdef, state = nnx.split(models[name])
    model = nnx.merge(graphdef, jax.tree.map(lambda x: x.astype(jnp.float64), state))
    wanted = [f"blocks.0.linear_attn.hook_{x}" for x in ("qbar", "state_before", "recurrence_out")]
    _, cache = jd.run_with_cache(model, IDS, wanted, segment=SEGMENT)
    emptied = ("blocks.0.linear_attn.hook_state_before", zero)
    _, alone = jd.run_with_cache(model, IDS, wanted, segment=SEGMENT, hooks=[emptied])
    qbar, S, o = (cache[w] for w in wanted)
    second = np.arange(N) // SEGMENT == 1  # what the first layer writes there does not depend on its state
    read = np.einsum("bthk,bhkv->bthv", qbar[:, second], S[:, 1])
    assert relative_error(read, o[:, second] - alone[wanted[2]][:, second]) < 1e-10


# Replacements


def test_replacing_every_activation_by_itself_changes_nothing(model, cached):
    hooks = [(name, same) for name in jd.hook_names(model) if not name.endswith("qbar")]
    assert relative_error(jd.run_with_hooks(model, IDS, hooks, segment=SEGMENT), cached[0]) < BOUND


@pytest.mark.parametrize("part", ("q", "k", "v"))
def test_a_part_before_the_convolution_is_replaced_alone(models, part):
    name = f"blocks.0.linear_attn.hook_{part}_pre_conv"
    wanted = [f"blocks.0.linear_attn.hook_{p}_pre_conv" for p in "qkv"]
    for model in (models["qwen"], models["product"]):
        _, before = jd.run_with_cache(model, IDS, wanted, segment=SEGMENT)
        _, after = jd.run_with_cache(model, IDS, wanted, segment=SEGMENT, hooks=[(name, lambda x, hook: x + 1)])
        for p, w in zip("qkv", wanted, strict=True):
            np.testing.assert_array_equal(after[w], before[w] + (p == part))


def test_a_head_without_output_is_the_head_zeroed(model):
    def without(x, hook):
        return x.at[:, :, 3].set(0)

    found = jd.run_with_hooks(model, IDS, [("blocks.2.linear_attn.hook_z", without)], segment=SEGMENT)
    mask = np.ones((6, 1), np.float32)
    mask[3] = 0
    observers = (jd.Named(("residual_after",), (2,)),)
    edited = jd.run(
        model, IDS, segment=SEGMENT, edits=(jd.Edit("head_output", jd.multiplied, 2, mask),), observers=observers
    )
    _, cache = jd.run_with_cache(
        model, IDS, "blocks.2.hook_resid_post", segment=SEGMENT, hooks=[("blocks.2.linear_attn.hook_z", without)]
    )
    expected = np.concatenate([x["residual_after"][0] for (x,) in edited.observed], axis=1)[:, :N]
    assert relative_error(cache["blocks.2.hook_resid_post"], expected) < BOUND
    assert np.abs(found - jd.run_with_hooks(model, IDS, [], segment=SEGMENT)).max() > 1e-3


def test_a_state_is_patched_from_another_prompt(model):
    """The second segment of one text on the states of another, against ``with_states``."""
    other = np.random.default_rng(5).integers(0, 90, (2, N))
    names = [f"blocks.{layer}.linear_attn.hook_state_before" for layer in model.config.linear_layers]
    _, cache = jd.run_with_cache(model, other, names, segment=SEGMENT)

    def patch(S, hook):
        return jnp.where(hook.positions[0, 0] == SEGMENT, jnp.asarray(cache[hook.name][:, 1], S.dtype), S)

    found = jd.run_with_hooks(model, IDS, [(name, patch) for name in names], segment=SEGMENT)
    _, carry = jd.forward(model, IDS[:, :SEGMENT], jd.init_carry(model, 2, 24))
    carry = jd.with_states(carry, [jnp.asarray(cache[name][:, 1]) for name in names])
    expected, _ = jd.forward(model, IDS[:, SEGMENT:], carry)
    assert relative_error(found[:, SEGMENT:], expected) < BOUND


@pytest.mark.parametrize("gives", [lambda x, h: x[:, :, :1], lambda x, h: x.astype(jnp.bfloat16), lambda x, h: None])
def test_a_part_of_another_shape_or_dtype_is_refused(model, gives):
    name = "blocks.0.linear_attn.hook_k_pre_conv"
    with pytest.raises(ValueError, match=f"the hook on {name} gives .*; expected float32"):
        jd.run_with_hooks(model, IDS, [(name, gives)], segment=SEGMENT)


def test_hooks_on_one_activation_apply_in_order(model):
    name = "blocks.0.hook_resid_post"
    hooks = [(name, lambda x, hook: x + 1), (name, lambda x, hook: 2 * x)]
    _, before = jd.run_with_cache(model, IDS, name)
    _, after = jd.run_with_cache(model, IDS, name, hooks=hooks)
    assert relative_error(after[name], 2 * (before[name] + 1)) < BOUND


def test_a_function_is_told_where_it_is(model):
    told = []

    def tell(x, hook):
        told.append((hook.name, hook.layer, hook.positions.shape))
        return x

    jd.run_with_hooks(model, IDS, [("blocks.1.attn.hook_z", tell)], segment=SEGMENT)
    assert told == [("blocks.1.attn.hook_z", 1, (2, SEGMENT))]  # traced once for three segments


# Mistakes


@pytest.mark.usefixtures("as_for_users")
@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda m: jd.run_with_cache(m, IDS, "blocks.1.linear_attn.hook_q"), ValueError, "layer 1 has blocks.1.hook"),
        (lambda m: jd.run_with_cache(m, IDS, ["blocks.9.hook_resid_pre"]), ValueError, "blocks.0 to blocks.2"),
        (lambda m: jd.run_with_cache(m, IDS, "hook_embed"), ValueError, "'hook_embed' does not exist"),
        (lambda m: jd.run_with_cache(m, IDS, 3), TypeError, "names is 3"),
        (lambda m: jd.run_with_cache("control", IDS), TypeError, "model is"),
        (lambda m: jd.run_with_cache(m, IDS, segment=0), ValueError, "segment is 0"),
        (lambda m: jd.run_with_cache(m, [5]), ValueError, "texts have 1 to 1 tokens"),
        (lambda m: jd.run_with_cache(m, IDS + 1000), ValueError, "token ids run from"),
        (lambda m: jd.run_with_hooks(m, IDS, [("blocks.0.hook_out", same)]), ValueError, "does not exist; layer 0 has"),
        (lambda m: jd.run_with_hooks(m, IDS, [("blocks.0.linear_attn.hook_qbar", same)]), ValueError, "replace those"),
        (lambda m: jd.run_with_hooks(m, IDS, [same]), TypeError, "a hook is"),
        (lambda m: jd.run_with_hooks(m, IDS, [("blocks.0.hook_mlp_out", lambda x, h: x[:1])]), ValueError, "gives float32"),
        (lambda m: jd.run_with_hooks(m, IDS, [("blocks.0.hook_mlp_out", lambda x, h: None)]), ValueError, "gives None"),
    ],
)  # fmt: skip
def test_a_mistake_is_told(model, call, error, said):
    with pytest.raises(error, match=said):
        call(model)
