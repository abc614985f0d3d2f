"""What an encoder's network is given: rows of tokens as tensors, padded on the right to the longest of them, or to the
shape of a runtime. It loads torch."""

from __future__ import annotations

from typing import NamedTuple

import torch


class TokenRow(NamedTuple):
    """A text's tokens, and which of a pair's texts each is of (empty where the model is not told)."""

    ids: list[int]
    types: list[int]


class RuntimeShape(NamedTuple):
    """The shape of every batch of a runtime: tokens of each text, and how many texts."""

    length: int
    batch: int = 1


def network_inputs(
    rows: list[TokenRow], shape: RuntimeShape | None, *, padding: int, device: torch.device
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """What the network is given, `[texts, tokens]` each, and the texts' lengths.

    `padding`: the id of the padding token. In a runtime's shape, the first text stands in the places that are left.
    """
    if shape is not None:
        rows = [*rows, *rows[:1] * (shape.batch - len(rows))]
    width = shape.length if shape is not None else max(len(row.ids) for row in rows)
    lengths = torch.tensor([len(row.ids) for row in rows], device=device)
    seen = torch.arange(width, device=device)[None, :] < lengths[:, None]
    ids = [row.ids + [padding] * (width - len(row.ids)) for row in rows]
    inputs = {"input_ids": torch.tensor(ids, device=device), "attention_mask": seen.long()}
    if rows[0].types:
        types = [row.types + [0] * (width - len(row.types)) for row in rows]
        inputs["token_type_ids"] = torch.tensor(types, device=device)
    return inputs, lengths
