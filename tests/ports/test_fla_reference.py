"""fla is not imported where it would not run, and its attention's stand-in reads the tokens that flash_attn would."""

import sys

import pytest

from ports.fla.interpreter import attention, attention_of_rows, import_fla
from ports.fla.reference import pieces
from ports.packages import UnusableReference


def test_refused_where_fla_is_blocked(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", None)
    with pytest.raises(UnusableReference, match="blocked in this process"):
        import_fla()


def test_refused_where_triton_would_compile_without_a_gpu(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delitem(sys.modules, "fla", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UnusableReference, match="without TRITON_INTERPRET=1"):
        import_fla()


@pytest.mark.parametrize(("left", "counts"), [(-1, [4, 5, 6]), (1, [2, 2, 2]), (4, [4, 5, 5])])
def test_stand_in_reads_the_window_before_the_end(left, counts):
    """Equal scores: the output is the mean of the values read. Three queries at the end of six tokens, by hand."""
    import torch

    q, k, v = torch.zeros(1, 3, 2, 4), torch.zeros(1, 6, 1, 4), torch.arange(6.0).reshape(1, 6, 1, 1).expand(1, 6, 1, 4)
    y = attention(q, k, v, causal=True, window_size=(left, 0))
    expected = [sum(range(3 + i + 1 - n, 3 + i + 1)) / n for i, n in enumerate(counts)]
    assert y.shape == q.shape
    torch.testing.assert_close(y[0, :, 1, 0], torch.tensor(expected))


def test_stand_in_keeps_rows_apart():
    import torch

    q, k, v = (torch.randn(5, 2, 4, generator=torch.Generator().manual_seed(i)) for i in range(3))
    offsets = torch.tensor([0, 2, 5])
    options = {"causal": True, "window_size": (-1, 0)}
    y = attention_of_rows(q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets, **options)
    torch.testing.assert_close(y[2:], attention(q[None, 2:], k[None, 2:], v[None, 2:], **options)[0])


def test_pieces():
    assert pieces(130) == [64, 64, 2]
    assert pieces(64) == [64]
    assert pieces(5) == [5]
