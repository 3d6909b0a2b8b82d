"""Import of flash-linear-attention without a GPU: its Triton kernels run in Triton's interpreter.

The interpreter runs the recurrent kernels, convolutions and norms unchanged. It fails on the chunked kernels, which fla
uses for more than 64 tokens in a call, and whenever gradients are on.
"""

import os
import sys
from itertools import pairwise

from ports.packages import UnusableReference, check_versions


def import_fla(*, any_version: bool = False) -> dict[str, str]:
    """Import fla, with kernels compiled on a GPU and interpreted without one; returns the versions of the packages.

    The attention of fla's hybrid models is that of the package flash_attn, which supports neither CPUs nor f32. Here
    :func:`attention` replaces it: the softmax is torch's; projections, rotation and cache are fla's.

    Raises:
        UnusableReference: as :func:`ports.packages.check_versions`; or fla is blocked in this process, or triton was
            imported without its interpreter.
    """
    packages = ("torch", "transformers", "flash-linear-attention", "triton")
    versions = check_versions(*packages, any_version=any_version)
    if "fla" in sys.modules and sys.modules["fla"] is None:
        raise UnusableReference("fla is blocked in this process, for the sake of transformers' own delta rule; use another")
    import torch

    if not torch.cuda.is_available():
        _interpret_kernels()
    import fla.layers.attn

    fla.layers.attn.flash_attn_func = attention
    fla.layers.attn.flash_attn_varlen_func = attention_of_rows
    return versions


def _interpret_kernels():
    """Switch the interpreter on before triton is imported. It cannot time configurations, so the first one is taken."""
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise UnusableReference("triton was imported without TRITON_INTERPRET=1, and there is no GPU; use another process")
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime.autotuner import Autotuner

    if getattr(Autotuner.__init__, "first_only", False):
        return
    build = Autotuner.__init__

    def with_first_configuration(self, *args, **kwargs):
        build(self, *args, **kwargs)
        self.configs = self.configs[:1]

    with_first_configuration.first_only = True
    Autotuner.__init__ = with_first_configuration


def attention(q, k, v, *, causal: bool, window_size: tuple[int, int]):
    """Causal attention of q [B, T, A, d] to k and v [B, S, G, d], whose last token is that of q, by torch.

    ``window_size`` is the number of tokens to the left and to the right of a query that it reads; -1 is all.
    """
    import torch

    assert causal and window_size[1] in (0, -1)
    T, S, groups = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    age = torch.arange(S - T, S, device=q.device)[:, None] - torch.arange(S, device=q.device)
    read = (age >= 0) & ((age <= window_size[0]) | (window_size[0] < 0))
    k, v = (x.repeat_interleave(groups, 2).transpose(1, 2) for x in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=read).transpose(1, 2)


def attention_of_rows(q, k, v, *, cu_seqlens_q, cu_seqlens_k, causal: bool, window_size: tuple[int, int], **lengths):
    """:func:`attention` of rows of different lengths, concatenated along the tokens; q is [tokens, A, d]."""
    import torch

    rows = (
        attention(q[None, a:b], k[None, c:d], v[None, c:d], causal=causal, window_size=window_size)[0]
        for (a, b), (c, d) in zip(_spans(cu_seqlens_q), _spans(cu_seqlens_k), strict=True)
    )
    return torch.cat(list(rows))


def _spans(offsets) -> list[tuple[int, int]]:
    return list(pairwise(offsets.tolist()))
