"""Attention of a decode step gives the same whichever way computes it, and the likeliest token is found in parts."""

from __future__ import annotations

import pytest
from lazily import lazily

torch, attention, sampling = lazily(
    "torch", "stoker.contexts.inference.kernels", "stoker.contexts.inference.kernels"
)  # fmt: skip


@pytest.mark.parametrize(("heads", "key_heads"), [(9, 3), (4, 4), (8, 2), (5, 1)])
@pytest.mark.parametrize(("precision", "apart"), [("float32", 1e-5), ("bfloat16", 0.03)])
def test_all_ways_agree(heads: int, key_heads: int, precision: str, apart: float) -> None:
    chance = torch.Generator().manual_seed(3)
    dtype, rows, length, size = getattr(torch, precision), 6, 48, 16
    q, held, values = (
        torch.randn(shape, generator=chance).to(dtype)
        for shape in ((rows, heads, size), (rows + 2, key_heads, 64, size), (rows + 2, key_heads, 64, size))
    )
    held, values = held[:rows, :, :length], values[:rows, :, :length]  # as rows of an array: not dense
    seen = torch.arange(length)[None] <= torch.tensor([0, 3, 11, 20, 40, 47])[:, None]
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, float("-inf"))[:, None, None]
    one = attention.shared_keys(q, held, values, mask)
    for way in (attention.as_products, attention.grouped_queries):
        other = way(q, held, values, mask)
        assert one.shape == other.shape == (rows, heads * size)
        assert (one.float() - other.float()).abs().max() < apart
    assert (one.float() - one.float().roll(1, 0)).abs().max() > 10 * apart  # rows differ, so the comparison can fail


def test_the_way_depends_on_the_processor_and_the_precision_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    for tiles, half, expected in (
        (True, True, attention.shared_keys),
        (False, True, attention.as_products),
        (False, False, attention.grouped_queries),
    ):
        monkeypatch.setattr("stoker.contexts.inference.kernels.multiplies_tiles", lambda tiles=tiles: tiles)
        monkeypatch.setattr("stoker.contexts.inference.kernels.multiplies_half", lambda half=half: half)
        assert attention.decode_attention(torch.float32, cpu) is attention.as_products
        assert attention.decode_attention(torch.bfloat16, cpu) is expected
        assert attention.decode_attention(torch.bfloat16, gpu) is attention.ON_GPU


@pytest.mark.parametrize("vocabulary", [120, 257, 49152])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_likeliest_token_is_the_one_that_argmax_finds(vocabulary: int, precision: str) -> None:
    logits = torch.randn(9, vocabulary, generator=torch.Generator().manual_seed(5)).to(getattr(torch, precision))
    logits[2] = 0  # all equal: the first
    logits[3, [7, vocabulary - 1]] = 50  # in two parts: the first of them
    logits[4] = float("-inf")
    logits[5, 11] = float("nan")
    assert sampling.likeliest_tokens(logits) == logits.float().argmax(dim=-1).tolist()
