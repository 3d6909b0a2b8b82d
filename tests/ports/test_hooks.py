"""Named activations are those of transformers: from forward hooks of its modules, and from around its functions."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxdelta as jd
from jaxdelta.ops.norms import l2norm
from ports.compare import relative_error
from ports.qwen3_5.reference import Reference

ACTIVATIONS = 1e-5  # f32, measured 2e-7 to 2e-6
IDS = np.random.default_rng(7).integers(0, 97, (2, 77))


def activations(reference: Reference, tokens: np.ndarray, monkeypatch) -> dict[str, np.ndarray]:
    """Under the names of this library; [B, N, heads * dim] where a module has heads side by side."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

    found, layers = {}, reference.model.model.layers
    linear = iter([i for i, kind in enumerate(reference.layer_kinds) if kind == "linear"])
    attention = iter([i for i, kind in enumerate(reference.layer_kinds) if kind == "attention"])

    def keep(name, x):
        found[name] = x.detach().float().numpy().copy()

    def after(name):
        return lambda module, inputs, output: keep(name, output[0] if isinstance(output, tuple) else output)

    def before(name):
        return lambda module, inputs: keep(name, inputs[0])

    rule, rotate = theirs.torch_chunk_gated_delta_rule, theirs.apply_rotary_pos_emb

    def watched_rule(q, k, v, g, beta, **rest):
        at = f"blocks.{next(linear)}.linear_attn.hook_"
        o, S = rule(q, k, v, g=g, beta=beta, **rest)
        for name, x in dict(q=q, k=k, v=v, log_decay=g, beta=beta, recurrence_out=o, state=S).items():
            keep(at + name, x)
        return o, S

    def watched_rotate(*args, **rest):
        at = f"blocks.{next(attention)}.attn.hook_rot_"
        q, k = rotate(*args, **rest)
        keep(at + "q", q.transpose(1, 2))
        keep(at + "k", k.transpose(1, 2))
        return q, k

    monkeypatch.setattr(theirs, "torch_chunk_gated_delta_rule", watched_rule)
    monkeypatch.setattr(theirs, "apply_rotary_pos_emb", watched_rotate)
    handles = []
    for i, (layer, kind) in enumerate(zip(layers, reference.layer_kinds, strict=True)):
        block = f"blocks.{i}."
        handles += [layer.register_forward_pre_hook(before(block + "hook_resid_pre"))]
        handles += [layer.register_forward_hook(after(block + "hook_resid_post"))]
        handles += [layer.post_attention_layernorm.register_forward_pre_hook(before(block + "hook_resid_mid"))]
        handles += [layer.mlp.register_forward_hook(after(block + "hook_mlp_out"))]
        mixer, name = (layer.linear_attn, "linear_attn.") if kind == "linear" else (layer.self_attn, "attn.")
        handles += [mixer.register_forward_hook(after(block + name + "hook_out"))]
        handles += [layer.input_layernorm.register_forward_hook(after(block + name + "hook_in"))]
        if kind == "linear":
            handles += [mixer.in_proj_b.register_forward_hook(after(block + name + "hook_beta_logit"))]
            handles += [mixer.in_proj_z.register_forward_hook(after(block + name + "hook_gate_input"))]
            handles += [mixer.in_proj_qkv.register_forward_hook(after(block + name + "qkv"))]
            handles += [mixer.out_proj.register_forward_pre_hook(before(block + name + "hook_z"))]
        else:
            handles += [mixer.v_proj.register_forward_hook(after(block + name + "hook_v"))]
            handles += [mixer.o_proj.register_forward_pre_hook(before(block + name + "hook_z"))]
    reference.run(tokens)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("checkpoint", ["3 value heads a key head, K > V"], indirect=True)
@pytest.mark.parametrize("segment", [None, 16])
def test_every_activation_is_that_of_transformers(checkpoint, segment, monkeypatch):
    expected = activations(Reference(checkpoint), IDS, monkeypatch)
    model = jd.load(checkpoint)
    _, cache = jd.run_with_cache(model, IDS, segment=segment)
    for layer in model.config.linear_layers:
        at = f"blocks.{layer}.linear_attn."
        parts = [cache.pop(f"{at}hook_{part}_pre_conv").reshape(2, 77, -1) for part in "qkv"]
        assert relative_error(np.concatenate(parts, axis=-1), expected.pop(at + "qkv")) < ACTIVATIONS
        repeats = model.config.num_value_heads // model.config.num_key_heads
        for part in "qk":  # transformers normalises and repeats heads inside its rule
            inside = np.repeat(l2norm(jnp.asarray(expected[f"{at}hook_{part}"])), repeats, axis=2)
            assert relative_error(cache.pop(f"{at}hook_{part}_normed"), inside) < ACTIVATIONS
        cache[at + "hook_state"] = cache[at + "hook_state"][:, -1]
        del cache[at + "hook_state_before"]  # of a segment, which transformers does not know
    assert cache.keys() == expected.keys()
    for name, x in expected.items():
        assert relative_error(cache[name].reshape(x.shape), x) < ACTIVATIONS, name
