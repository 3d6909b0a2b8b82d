"""Derivatives of transformers' Qwen3.5, by torch's autograd, with respect to what is carried between segments.

:func:`chunk_gradients` differentiates the chunk function alone, for all six inputs, and :func:`segment_gradients` a whole
model, for the carried arrays of every layer. transformers' cache overwrites the old state, which autograd needs for the
backward pass, so the model runs on a cache that keeps both.
"""

from collections.abc import Mapping

import numpy as np

from ports.packages import import_transformers
from ports.qwen3_5.reference import Reference
from ports.reference import Snapshot

# Our names of the inputs of the gated delta rule, and transformers'.
NAMES = {"q": "query", "k": "key", "v": "value", "g": "g", "beta": "beta", "state": "initial_state"}


def chunk_gradients(
    inputs: Mapping[str, np.ndarray], cotangents: tuple[np.ndarray, np.ndarray], *, normalise: bool = False
) -> tuple[tuple[np.ndarray, np.ndarray], dict[str, np.ndarray]]:
    """(o, S) of ``torch_chunk_gated_delta_rule`` and the derivatives of <o, cotangents[0]> + <S, cotangents[1]>, in f32.

    The function always scales q by K^-1/2 and computes in f32. With ``normalise`` it l2-normalises q and k first. q and k
    may have fewer heads than v.
    """
    import_transformers()
    import torch
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    leaves = {name: torch.tensor(np.asarray(inputs[name]), requires_grad=True) for name in NAMES}
    outputs = torch_chunk_gated_delta_rule(
        **{NAMES[name]: leaf for name, leaf in leaves.items()},
        output_final_state=True,
        use_qk_l2norm_in_kernel=normalise,
    )
    found = torch.autograd.grad(outputs, list(leaves.values()), [torch.tensor(np.asarray(c)) for c in cotangents])
    return tuple(a.detach().numpy() for a in outputs), dict(zip(leaves, (a.numpy() for a in found), strict=True))


def segment_gradients(
    reference: Reference, carried: list[Snapshot], tokens: np.ndarray, targets: np.ndarray
) -> tuple[float, list[Snapshot]]:
    """Mean loss of ``targets`` [B, T] over a segment ``tokens`` [B, T] that continues ``carried``, and its derivatives.

    ``carried`` is what :meth:`Reference.run` gives after the segment before; the derivatives have the same form.
    """
    torch = reference.torch
    leaves = [Snapshot(*(torch.tensor(a, requires_grad=True) for a in layer)) for layer in carried]
    logits = reference.model(
        torch.tensor(tokens.astype(np.int64)), cache=_filled_cache(reference, leaves), use_cache=True
    ).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(targets.astype(np.int64)).flatten())
    flat = torch.autograd.grad(loss, [a for layer in leaves for a in layer])
    return loss.item(), [Snapshot(a.numpy(), b.numpy()) for a, b in zip(flat[::2], flat[1::2], strict=True)]


def _filled_cache(reference: Reference, leaves: list[Snapshot]):
    """A cache of transformers that starts from ``leaves`` and lets derivatives pass to them."""
    from transformers.cache_utils import DynamicCache

    cache = DynamicCache(config=reference.model.config)
    for i, (kind, leaf) in enumerate(zip(reference.layer_kinds, leaves, strict=True)):
        if kind == "linear":
            cache.layers[i] = _linear_layer(leaf.first, leaf.second)
        else:
            cache.layers[i].update(*(a.transpose(1, 2) for a in leaf))
    return cache


def _linear_layer(S, tail):
    """A cache layer that starts from S [B, H, K, V] and tail [B, W - 1, E] and replaces S instead of overwriting it."""
    import torch
    from transformers.cache_utils import LinearAttentionLayer

    class ReplacingLayer(LinearAttentionLayer):
        def update_recurrent_state(self, recurrent_states, state_idx=0, **kwargs):
            self.recurrent_states[state_idx] = recurrent_states
            return recurrent_states

    layer = ReplacingLayer()
    # W columns; no token of the next segment reads the oldest. The padded tensor is not a leaf and no derivative needs its
    # entries, so the layer may overwrite it.
    columns = torch.nn.functional.pad(tail.transpose(1, 2), (1, 0))
    layer.lazy_initialization(conv_states=columns, recurrent_states=S)
    layer.conv_states[0], layer.recurrent_states[0], layer.has_previous_state[0] = columns, S, True
    return layer
