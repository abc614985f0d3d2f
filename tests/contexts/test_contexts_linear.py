"""Products with a copy of the weights give what the layers give, in each precision that the copy may have."""

from __future__ import annotations

from typing import Any

import pytest
from lazily import lazily

torch, linear, choosing = lazily(
    "torch", "stoker.contexts.inference.kernels", "stoker.contexts.inference.static"
)  # fmt: skip


def layers_of(dtype: Any, *, bias: bool) -> list[Any]:
    torch.manual_seed(5)
    made = [torch.nn.Linear(48, width, bias=bias and width != 16) for width in (32, 16, 16)]
    return [layer.to(dtype).requires_grad_(False) for layer in made]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 70])
def test_a_wide_copy_gives_the_rounded_products_of_the_layers(rows: int, bias: bool) -> None:
    layers = layers_of(torch.bfloat16, bias=bias)
    wide = linear.PackedLinear(layers, packs=torch.float32)
    if not wide.packed_bytes:
        pytest.skip("PyTorch was built without oneDNN")
    x = torch.randn(rows, 48, generator=torch.Generator().manual_seed(3)).bfloat16()
    exact = torch.cat(
        [x.double() @ one.weight.double().T + (0 if one.bias is None else one.bias.double()) for one in layers], dim=-1
    )
    with torch.inference_mode():
        found = wide(x)
    assert found.dtype == torch.bfloat16
    assert (found.double() - exact).abs().max() <= exact.abs().max() * 2**-8  # half of the last place
    assert wide.packed_bytes == 64 * 48 * 4


def test_a_processor_without_half_precision_gets_a_wide_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    for half, expected in ((True, (torch.bfloat16,)), (False, (torch.float32, torch.bfloat16))):
        monkeypatch.setattr("stoker.contexts.inference.kernels.multiplies_half", lambda half=half: half)
        assert linear.packed_dtypes(torch.bfloat16) == expected
        assert linear.packed_dtypes(torch.float32) == (torch.float32,)
        assert linear.packed_dtypes(torch.float16) == ()


@pytest.mark.parametrize(
    ("declared", "free", "expected"),
    [
        (0, 1 << 40, "float32"),
        (0, 3_000, "bfloat16"),  # the host has room for twice the weights, and not for twice the wide copy
        (0, 1_000, ""),
        (564_003_000, 1 << 40, "float32"),
        (564_002_900, 1 << 40, "bfloat16"),
        (564_001_900, 1 << 40, ""),
    ],
)
def test_a_copy_is_made_where_there_is_room(
    declared: int, free: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(25, 20, bias=False).bfloat16()  # 1,000 bytes; a wide copy has 2,000
    model.dtype = torch.bfloat16
    monkeypatch.setattr("stoker.contexts.inference.kernels.multiplies_half", lambda: False)
    monkeypatch.setattr("stoker.contexts.ambient.device_memory_bytes", lambda: declared)
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Free", (), {"available": free})())
    found = choosing._packs(model)
    assert found == (getattr(torch, expected) if expected else None)
