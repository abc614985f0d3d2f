"""PEFT adapters in the continuous engine. Requests of several adapters and of the base model share each step.

The low-rank matrices of all adapters in a step are stacked. Each step needs one product with all A, a mask that keeps
each row's own part, and one product with all B of a projection. Thus the number of operations does not depend on the
number of adapters (S-LoRA, arXiv:2311.03285, has a kernel for this). A soft prompt occupies the first positions of its
request.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch.nn.functional import linear

from stoker.contexts.adapter_files import GROUPS, VECTORS, WEIGHTS, BaseShapes, read_adapter_files
from stoker.contexts.inference.options import OptionRefused

_WEIGHTS_PER_ADAPTER_BYTE = 4  # several cached adapters need at most 1/4 of the base model's bytes
_ID_RANGE = 1 << 32


class Adapter:
    """Weights of an adapter: A `[rank, in]` and scaled B `[out, rank]` by layer and projection, or a soft prompt."""

    _numbers = itertools.count(1)

    def __init__(self, folder: str, base: BaseShapes | None, *, dtype: torch.dtype) -> None:
        """Read an adapter. Raises ValueError if the files are damaged, or belong to another base model."""
        files = read_adapter_files(folder)
        files.check_fits_base_model(base)
        file = Path(folder, WEIGHTS)
        try:
            tensors = safetensors.torch.load_file(file)
        except Exception as error:  # safetensors raises its own exceptions and those of the file system
            raise ValueError(f"{file} cannot be read ({error})") from None
        if not all(bool(part.isfinite().all()) for part in tensors.values()):
            raise ValueError(f"{file} holds numbers that are not finite")
        self.vectors = tensors[VECTORS].to(dtype) if files.virtual_tokens else None
        self.matrices = {
            (each.layer, each.projection): (tensors[each.down].to(dtype), (tensors[each.up] * each.scale).to(dtype))
            for each in files.low_rank
        }
        self.number = next(self._numbers)
        parts = [*itertools.chain(*self.matrices.values()), *([] if self.vectors is None else [self.vectors])]
        self.size_bytes = sum(part.nbytes for part in parts)

    @property
    def virtual_tokens(self) -> int:
        return 0 if self.vectors is None else len(self.vectors)

    def prefix_cache_key(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Return the cache key of a token prefix, which differs between adapters."""
        return tuple(id + self.number * _ID_RANGE for id in ids)


class AdapterCache:
    """The most recently used adapters of a base model, by name. `share_of`: bytes of the base model's weights."""

    def __init__(self, folders: Mapping[str, str], base: BaseShapes, *, dtype: torch.dtype, share_of: int) -> None:
        self._folders = folders
        self._base, self._dtype, self._limit = base, dtype, share_of // _WEIGHTS_PER_ADAPTER_BYTE
        self._kept: OrderedDict[str, Adapter] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def size_bytes(self) -> int:
        return sum(each.size_bytes for each in self._kept.values())

    def get(self, name: str) -> Adapter:
        """Return an adapter. Raises ValueError if the adapter is unknown or unsupported."""
        folder = find_adapter_folder(self._folders, name)
        with self._lock:
            if name not in self._kept:
                try:
                    self._kept[name] = Adapter(folder, self._base, dtype=self._dtype)
                except ValueError as error:
                    raise OptionRefused("adapter", f"the adapter {name} cannot be served: {error}") from None
            self._kept.move_to_end(name)
            while len(self._kept) > 1 and self.size_bytes > self._limit:
                self._kept.popitem(last=False)
            return self._kept[name]


def find_adapter_folder(folders: Mapping[str, str], name: str) -> str:
    if name not in folders:
        has = f"there are {', '.join(folders)}" if folders else "it was loaded without any"
        raise OptionRefused("adapter", f"the model has no adapter {name!r:.200}; {has}")
    return folders[name]


class _LoraStack(NamedTuple):
    """LoRA matrices of all adapters for one group of projections. `down`: stacked matrices A, `[ranks, in]`. `owners`:
    the adapter of each rank. `ups`: for each projection, ranks, columns in the group's result, and stacked matrices B,
    `[ranks, out]`.
    """

    down: torch.Tensor
    owners: tuple[int, ...]
    ups: tuple[tuple[slice, slice, torch.Tensor], ...]

    @property
    def size_bytes(self) -> int:
        return sum(part.nbytes for part in (self.down, *(up for _, _, up in self.ups)))


class AdapterBank:
    """The stacked LoRA matrices of the adapters in the running batch, on the devices of their layers."""

    def __init__(self, base: BaseShapes, devices: Sequence[Any]) -> None:
        self.base = base
        self._devices = devices
        self.places: dict[Adapter, int] = {}
        self.stacks: dict[tuple[int, str], _LoraStack] = {}
        self.size_bytes = 0

    def ensure_stacked(self, adapters: Sequence[Adapter]) -> None:
        """Stack the matrices of these adapters. Do nothing if they are stacked with at most as many others."""
        wanted = [each for each in dict.fromkeys(adapters) if each.matrices]
        if all(each in self.places for each in wanted) and len(self.places) <= 2 * len(wanted):
            return
        self.clear()
        self.places = {each: place for place, each in enumerate(wanted)}
        for layer, device in enumerate(self._devices):
            for group, projections in GROUPS.items():
                if (stack := self._build_stack(wanted, layer, projections, device)) is not None:
                    self.stacks[layer, group] = stack
                    self.size_bytes += stack.size_bytes

    def clear(self) -> None:
        self.places, self.stacks, self.size_bytes = {}, {}, 0

    def _build_stack(
        self, adapters: Sequence[Adapter], layer: int, projections: Sequence[str], device: Any
    ) -> _LoraStack | None:
        downs: list[torch.Tensor] = []
        owners: list[int] = []
        ups: list[tuple[slice, slice, torch.Tensor]] = []
        at = 0
        for name in projections:
            gives, first = self.base.projections[name][1], len(owners)
            found = [(place, each.matrices[layer, name]) for place, each in enumerate(adapters)
                     if (layer, name) in each.matrices]  # fmt: skip
            for place, (down, _) in found:
                downs.append(down)
                owners += [place] * len(down)
            if found:
                up = torch.cat([up.T for _, (_, up) in found]).to(device)
                ups.append((slice(first, len(owners)), slice(at, at + gives), up))
            at += gives
        return _LoraStack(torch.cat(downs).to(device), tuple(owners), tuple(ups)) if downs else None


class AdaptedTokens:
    """The adapters of a step's tokens. `soft`: soft prompts as pairs of first token index and vectors."""

    def __init__(
        self, bank: AdapterBank, adapters: Sequence[Adapter | None], soft: Sequence[tuple[int, torch.Tensor]]
    ) -> None:
        self._bank = bank
        self._soft_prompts = soft
        places = [-1 if each is None else bank.places.get(each, -1) for each in adapters]
        self._rows = [at for at, place in enumerate(places) if place >= 0]
        self._adapts_all_rows = len(self._rows) == len(places)
        self._places = [places[at] for at in self._rows]
        self._made: dict[tuple[Any, tuple[int, ...]], tuple[torch.Tensor, torch.Tensor]] = {}

    def insert_soft_prompts(self, x: torch.Tensor) -> None:
        for at, vectors in self._soft_prompts:
            x[at : at + len(vectors)] = vectors.to(x.device)

    def add_lora(self, layer: int, group: str, x: torch.Tensor, out: torch.Tensor) -> None:
        """Add the adapters' contribution to `out`, the result of a group of projections, in place."""
        stack = self._bank.stacks.get((layer, group))
        if stack is None or not self._rows:
            return
        rows, others = self._rows_and_other_owner_mask(x.device, stack.owners)
        # Do not multiply by a mask of 0 and 1: another adapter's large numbers may overflow to infinity, and 0 times
        # infinity is NaN.
        low = linear(x if self._adapts_all_rows else x[rows], stack.down).masked_fill_(others, 0.0)
        for ranks, places, up in stack.ups:
            if self._adapts_all_rows:
                out[:, places].addmm_(low[:, ranks], up)
            else:
                out[:, places].index_add_(0, rows, low[:, ranks] @ up)

    def _rows_and_other_owner_mask(self, device: Any, owners: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        made = self._made.get((device, owners))
        if made is None:
            places = torch.tensor(self._places, device=device)
            others = places[:, None] != torch.tensor(owners, device=device)[None, :]
            made = self._made[device, owners] = torch.tensor(self._rows, device=device), others
        return made
