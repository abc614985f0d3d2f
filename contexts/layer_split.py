"""Split a model's layers over several GPUs, which compute one after the other (docs/decisions/094).

The first device also has the embedding, last norm and head, because these parts may share weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def assign_devices(config: Any, devices: Sequence[str]) -> dict[str, str]:
    """Return the device of each part of a causal model, balanced by bytes. Raises ValueError for too few layers."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    path, layers = _find_layers(model)
    if len(layers) < len(devices):
        raise ValueError(f"the model has {len(layers)} layers, which cannot be split over {len(devices)} devices")
    sizes = [_parameter_bytes(layer) for layer in layers]
    found = {
        f"{path}.{number}": device
        for number, device in enumerate(_assign_layers(sizes, _parameter_bytes(model), devices))
    }
    parent, before = model, ""
    for name in path.split("."):
        for other, _ in [*parent.named_children(), *parent.named_parameters(recurse=False)]:
            if other != name:
                found[before + other] = devices[0]
        parent, before = getattr(parent, name), f"{before}{name}."
    return found


def install_device_hooks(model: Any, split: dict[str, str], *, first: str) -> None:
    """Install hooks that move each part's inputs to its device. The model's inputs and results are on `first`.

    `from_pretrained` would choose an arbitrary first device.
    """
    from accelerate import dispatch_model

    dispatch_model(model, split, main_device=first, skip_keys=model._skip_keys_device_placement)


def device_of_module(split: dict[str, str], name: str) -> str:
    while name not in split:
        name = name.rpartition(".")[0]
    return split[name]


def _find_layers(model: Any) -> tuple[str, Any]:
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    lists = [each for each in model.named_modules() if isinstance(each[1], torch.nn.ModuleList) and len(each[1])]
    for name, part in sorted(lists, key=lambda each: each[0].count(".")):
        if not kinds or type(part[0]).__name__ in kinds:
            return name, part
    raise ValueError(f"{type(model).__name__} has no list of layers to split")


def _parameter_bytes(part: Any) -> int:
    return sum(weight.numel() * weight.element_size() for weight in part.parameters())


def _assign_layers(sizes: Sequence[int], total: int, devices: Sequence[str]) -> list[str]:
    begins, numbers = total - sum(sizes), []
    for size in sizes:
        numbers.append(min(int((begins + size / 2) * len(devices) / total), len(devices) - 1))
        begins += size
    if not set(range(1, len(devices))) <= set(numbers):  # a device has no layer, so balance the number of layers
        numbers = [number * len(devices) // len(sizes) for number in range(len(sizes))]
    return [devices[number] for number in numbers]
