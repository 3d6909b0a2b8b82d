"""The models of flash-linear-attention: a segmented run with every carried array after every segment.

fla keeps the last W columns before the convolution, [B, E, W], separately for queries, keys and values; this library keeps
W - 1 of all three side by side, [B, W - 1, E]. A state is [B, H, K, V] in both, except in fla's Gated DeltaNet layer, where
it is [B, H, V, K]. For windowed attention fla keeps keys and values of the last ``window`` tokens only; they are collected
here as they come.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ports import reference
from ports.fla.interpreter import import_fla
from ports.reference import Snapshot, filled

LONGEST_CALL = 64  # tokens up to which fla runs its recurrent kernels


class Reference(reference.Reference):
    """A checkpoint in fla, on a GPU where there is one."""

    def __init__(self, folder: Path, dtype: str = "float32", *, any_version: bool = False):
        self.packages = import_fla(any_version=any_version)
        import torch
        import transformers

        self.torch = torch
        self.model = filled(transformers.AutoModelForCausalLM, folder, getattr(torch, dtype))
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model.to(self.device)
        kernels = "compiled for the GPU" if self.device == "cuda" else "in Triton's interpreter on the CPU"
        self.implementation = f"fla's recurrent Triton kernels, {kernels}; the softmax of attention layers is torch's"
        self.layer_kinds = tuple("attention" if hasattr(layer, "num_kv_heads") else "linear" for layer in self._layers)
        windows = [layer.window_size for layer in self._layers if getattr(layer, "window_size", None)]
        self._longest_call = min([LONGEST_CALL, *windows])  # so that all keys are collected before they leave the cache

    def segments(
        self, tokens: np.ndarray, splits: Sequence[int] | None = None, mask: np.ndarray | None = None
    ) -> Iterator[tuple[np.ndarray, list[Snapshot]]]:
        """See :meth:`ports.reference.Reference.segments`.

        With padding, fla can run a model with attention layers only in one segment of at most 64 tokens, or token by token
        after it. Keys that then leave a window are lost.
        """
        cache, begin = None, 0
        longest = LONGEST_CALL if mask is not None else self._longest_call
        seen: list[list[Snapshot]] = [[] for _ in self._layers]
        for length in splits or [tokens.shape[1]]:
            logits = []
            for T in pieces(length, longest):
                words, cache = self._call(tokens, mask, begin, begin + T, cache)
                logits.append(words)
                begin += T
                for parts, layer, state in zip(seen, self._layers, cache, strict=True):
                    if state["attn_state"] is not None:
                        parts.append(attention_snapshot(layer, state, T))
            yield (
                np.concatenate(logits, axis=1),
                [
                    Snapshot(*(np.concatenate(x, axis=1) for x in zip(*parts, strict=True)))
                    if parts
                    else linear_snapshot(layer, state)
                    for parts, layer, state in zip(seen, self._layers, cache, strict=True)
                ],
            )

    @property
    def _layers(self):
        return [layer.attn for layer in self.model.model.layers]

    def _call(self, tokens, mask, begin: int, end: int, cache):
        torch = self.torch
        words = torch.tensor(tokens[:, begin:end].astype(np.int64), device=self.device)
        attention = None if mask is None else torch.tensor(mask[:, :end].astype(np.int64), device=self.device)
        with torch.no_grad():
            out = self.model(words, attention_mask=attention, past_key_values=cache, use_cache=True)
        return out.logits.float().cpu().numpy(), out.past_key_values


def attention_snapshot(layer, state: dict, last: int) -> Snapshot:
    """Keys and values of the ``last`` tokens, from fla's cache of an attention layer."""
    heads = (layer.num_kv_heads, layer.head_dim)
    return Snapshot(*(a[:, -last:].unflatten(-1, heads).float().cpu().numpy().copy() for a in state["attn_state"]))


def linear_snapshot(layer, state: dict) -> Snapshot:
    """S and tail, from fla's cache of a linear layer."""
    S = state["recurrent_state"].float().cpu().numpy().copy()
    if type(layer).__name__ == "GatedDeltaNet":
        S = np.ascontiguousarray(S.swapaxes(-1, -2))
    if state["conv_state"] is None:
        return Snapshot(S, np.zeros((len(S), 0, channels(layer)), np.float32))
    columns = [x[..., 1:].transpose(1, 2).float().cpu().numpy() for x in state["conv_state"]]
    return Snapshot(S, np.concatenate(columns, axis=-1))


def channels(layer) -> int:
    """E of a linear layer of fla."""
    return sum(getattr(layer, name).out_features for name in ("q_proj", "k_proj", "v_proj"))


def pieces(length: int, longest: int = LONGEST_CALL) -> list[int]:
    """Lengths of calls, at most ``longest``, that add up to ``length`` tokens."""
    return [longest] * (length // longest) + [length % longest] * (length % longest > 0)
