"""Qwen3.5 in transformers: a segmented run with every state after every segment.

For a linear layer transformers keeps S [B, H, K, V] in f32 and the last W pre-convolution columns [B, E, W] (this library
keeps W - 1 of them, [B, W - 1, E]); for an attention layer keys and values [B, G, T, d] (here [B, T, G, d]).
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ports import reference
from ports.packages import check_versions, import_transformers
from ports.reference import Snapshot, filled

KINDS = {"linear_attention": "linear", "full_attention": "attention"}


class Reference(reference.Reference):
    """A checkpoint in transformers on the CPU."""

    implementation = "transformers' own torch implementation on the CPU; fla's kernels are kept out of its process"

    def __init__(self, folder: Path, dtype: str = "float32", *, any_version: bool = False):
        transformers = import_transformers(any_version=any_version)
        import torch

        self.torch = torch
        self.packages = check_versions("torch", "transformers", any_version=any_version)
        self.model = filled(transformers.Qwen3_5ForCausalLM, folder, getattr(torch, dtype))
        self.layer_kinds = tuple(KINDS[kind] for kind in self.model.config.layer_types)

    def segments(
        self, tokens: np.ndarray, splits: Sequence[int] | None = None, mask: np.ndarray | None = None
    ) -> Iterator[tuple[np.ndarray, list[Snapshot]]]:
        torch, cache, begin = self.torch, None, 0
        for length in splits or [tokens.shape[1]]:
            end = begin + length
            attention = None if mask is None else torch.tensor(mask[:, :end].astype(np.int64))
            positions = None if mask is None else (torch.tensor(mask[:, :end]).cumsum(1) - 1).clamp(min=0)[:, begin:end]
            with torch.no_grad():
                out = self.model(
                    torch.tensor(tokens[:, begin:end].astype(np.int64)),
                    attention_mask=attention,
                    position_ids=positions,
                    cache=cache,
                    use_cache=True,
                )
            cache, begin = out.cache, end
            snapshots = [self._snapshot(layer, kind) for layer, kind in zip(cache.layers, self.layer_kinds, strict=True)]
            yield out.logits.float().numpy(), snapshots
            del out, snapshots  # frees the logits before the next ones are computed

    def loss_gradients(self, tokens: np.ndarray) -> tuple[float, dict[str, np.ndarray]]:
        """Mean next-token loss of one pass over rows [B, T], and its derivatives by stored names of parameters."""
        torch = self.torch
        ids = torch.tensor(tokens.astype(np.int64))
        logits = self.model(ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        self.model.zero_grad()
        loss.backward()
        return loss.item(), {name: p.grad.numpy().copy() for name, p in self.model.named_parameters() if p.grad is not None}

    def _snapshot(self, layer, kind: str) -> Snapshot:
        if kind == "linear":
            S, columns = layer.recurrent_states[0], layer.conv_states[0]
            return Snapshot(S.float().numpy().copy(), columns[..., 1:].transpose(1, 2).float().numpy().copy())
        return Snapshot(*(a.transpose(1, 2).float().numpy().copy() for a in (layer.keys, layer.values)))
