"""Read a PEFT adapter's files without a GPU library: the adapter's kind, and whether the adapter fits a base model.

A LoRA adds `x A^T B^T * scale` to the result of a projection (arXiv:2106.09685). A soft prompt is a list of vectors
ahead of the prompt's embeddings (arXiv:2104.08691).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from stoker.contexts.model_source import read_json_object
from stoker.units import show_bytes

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
LORA, SOFT_PROMPT = "LORA", "PROMPT_TUNING"
VECTORS = "prompt_embeddings"
GROUPS: Mapping[str, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"), "out": ("o_proj",), "up": ("gate_proj", "up_proj"), "down": ("down_proj",),
}  # fmt: skip
"""A layer's projections in groups; the projections of a group have the same input."""
_LORA_TENSOR_NAME = re.compile(
    r"(?:base_model\.model\.)?(model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+))\.lora_([AB])\.weight"
)
_MAX_HEADER_BYTES = 100_000_000
_UNSUPPORTED_OPTIONS = {
    "use_dora": "DoRA", "lora_bias": "biases", "modules_to_save": "whole modules",
    "fan_in_fan_out": "transposed weights", "layer_replication": "repeated layers",
}  # fmt: skip

Shapes = dict[str, tuple[int, int]]


class BaseShapes(msgspec.Struct, frozen=True):
    layers: int
    width: int
    projections: Shapes


class ProjectionLora(msgspec.Struct, frozen=True):
    """The LoRA of one projection: the names of its two tensors, and the factor `scale` of their product."""

    layer: int
    projection: str
    down: str
    up: str
    scale: float


class AdapterFiles(msgspec.Struct, frozen=True):
    """The content of an adapter's files. `virtual_tokens`: number of vectors in its soft prompt; 0 for a LoRA."""

    folder: str
    virtual_tokens: int
    low_rank: tuple[ProjectionLora, ...]
    shapes: dict[str, tuple[int, ...]]

    @property
    def max_rank(self) -> int:
        return max((self.shapes[each.down][0] for each in self.low_rank), default=0)

    def check_fits_base_model(self, base: BaseShapes | None) -> None:
        """Raise ValueError if the base model's sizes do not match."""
        if base is not None and (why := self._find_mismatch(base)):
            raise ValueError(
                f"{self.folder} is an adapter of another base model: {why}; use the base model of this adapter"
            )

    def _find_mismatch(self, base: BaseShapes) -> str:
        found = self.shapes.get(VECTORS)
        if found is not None and found[1] != base.width:
            return f"its soft prompt has {found[1]} numbers per token, and the base model has {base.width}"
        for each in self.low_rank:
            if each.layer >= base.layers:
                return f"it has layer {each.layer}, and the base model has {base.layers} layers"
            wanted = base.projections[each.projection]
            has = self.shapes[each.down][1], self.shapes[each.up][0]
            if has != wanted:
                where = f"{each.projection} of layer {each.layer}"
                return f"{where} maps {has[0]} to {has[1]} numbers, but {wanted[0]} to {wanted[1]} in the base model"
        return ""


def read_adapter_files(folder: str) -> AdapterFiles:
    """Read an adapter's files. Raises ValueError if Stoker cannot serve the adapter."""
    adapter_folder = Path(folder)
    for name in (CONFIG, WEIGHTS):
        if not (adapter_folder / name).is_file():
            raise ValueError(f"{folder} is not a PEFT adapter: it has no {name}, which PEFT's save_pretrained writes")
    config, shapes = read_json_object(folder, CONFIG), _read_tensor_shapes(adapter_folder / WEIGHTS)
    kind = config.get("peft_type")
    if kind == SOFT_PROMPT:
        if list(shapes) != [VECTORS] or len(shapes[VECTORS]) != 2 or not all(shapes[VECTORS]):
            raise ValueError(
                f"{adapter_folder / WEIGHTS} must contain only {VECTORS}; it has {', '.join(sorted(shapes)[:4])}"
            )
        return AdapterFiles(folder, shapes[VECTORS][0], (), shapes)
    if kind != LORA:
        raise ValueError(
            f"{adapter_folder / CONFIG}: peft_type = {kind!r:.60} is not supported; use {LORA} or {SOFT_PROMPT}"
        )
    if unsupported := [(name, what) for name, what in _UNSUPPORTED_OPTIONS.items() if config.get(name)]:
        name, what = unsupported[0]
        raise ValueError(
            f"{adapter_folder / CONFIG}: {name} = {config[name]!r:.60}: {what} is not supported; use plain LoRA"
        )
    return AdapterFiles(folder, 0, _find_projection_loras(adapter_folder, config, shapes), shapes)


def check_adapter(folder: str, *, base: str) -> None:
    """Raise ValueError if Stoker cannot serve an adapter, or if the adapter does not fit the base model.

    Args:
        folder: Folder of the adapter.
        base: Folder of the base model, a file in that folder, or a name on the model hub.
    """
    place = Path(base).parent if base.endswith(".safetensors") else base
    read_adapter_files(folder).check_fits_base_model(read_base_shapes(str(place)))


@functools.lru_cache(maxsize=256)
def soft_prompt_length(folder: str) -> int:
    """Return the number of vectors in an adapter's soft prompt; 0 for a LoRA. Raises ValueError."""
    return read_adapter_files(folder).virtual_tokens


def read_base_shapes(source: str) -> BaseShapes | None:
    config = read_json_object(source, "config.json")
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
    numbers = [config.get(name) for name in names]
    if not all(type(number) is int and number > 0 for number in numbers):
        return None
    layers, width, inner, heads = (int(number or 0) for number in numbers)
    size = config.get("head_dim") or width // heads
    keys = (config.get("num_key_value_heads") or heads) * size
    return BaseShapes(layers, width, {
        "q_proj": (width, heads * size), "k_proj": (width, keys), "v_proj": (width, keys),
        "o_proj": (heads * size, width), "gate_proj": (width, inner), "up_proj": (width, inner),
        "down_proj": (inner, width),
    })  # fmt: skip


def _find_projection_loras(
    adapter_folder: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]]
) -> tuple[ProjectionLora, ...]:
    found: dict[tuple[int, str, str], dict[str, str]] = {}
    known = {name for names in GROUPS.values() for name in names}
    for name in shapes:
        match = _LORA_TENSOR_NAME.fullmatch(name)
        if match is None or match[3] not in known:
            raise ValueError(
                f"{adapter_folder / WEIGHTS}: {name} is not supported; LoRA may be on {', '.join(sorted(known))}"
            )
        found.setdefault((int(match[2]), match[3], match[1]), {})[match[4]] = name
    pairs = []
    for (layer, projection, module), names in sorted(found.items()):
        down, up = (shapes.get(names.get(part, ""), ()) for part in "AB")
        if len(down) != 2 or len(up) != 2 or not down[0] or down[0] != up[1]:
            raise ValueError(f"{adapter_folder / WEIGHTS}: the shapes of lora_A and lora_B of {module} do not match")
        pairs.append(
            ProjectionLora(
                layer, projection, names["A"], names["B"], _lora_scale(adapter_folder, config, module, rank=down[0])
            )
        )
    if not pairs:
        raise ValueError(f"{adapter_folder / WEIGHTS} holds no LoRA weights")
    return tuple(pairs)


def _lora_scale(adapter_folder: Path, config: dict[str, Any], module: str, *, rank: int) -> float:
    patterns = config.get("alpha_pattern")
    matching = (
        value
        for pattern, value in (patterns.items() if isinstance(patterns, dict) else ())
        if re.match(rf"(.*\.)?({pattern})$", module)
    )
    alpha = next(matching, config.get("lora_alpha"))
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ValueError(f"{adapter_folder / CONFIG}: lora_alpha = {alpha!r:.60} is not a number")
    return float(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def read_safetensors_header(file: Path) -> tuple[dict[str, Any], int]:
    """Return the header entries by tensor name, and the offset of the first tensor. Raises OSError, ValueError."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        if size > _MAX_HEADER_BYTES:
            raise ValueError(f"{file}: its header would take {show_bytes(size)}; it is not a safetensors file")
        header = msgspec.json.decode(opened.read(size), type=dict[str, Any])
    header.pop("__metadata__", None)
    return header, 8 + size


def _read_tensor_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    try:
        header, _ = read_safetensors_header(file)
        return {name: tuple(map(int, each["shape"])) for name, each in header.items()}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{file} cannot be read as safetensors ({type(error).__name__}: {error})") from None
