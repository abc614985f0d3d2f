"""The parts of a simulated world (docs/scenarios.md). A duration that a scenario omits is 0."""

from __future__ import annotations

import enum
import math
from itertools import pairwise
from typing import Annotated

import msgspec
from msgspec.structs import replace

from stoker.contexts.batching import BatchLimits
from stoker.contexts.recipe import Awareness
from stoker.contexts.step_times import StepTable, StepTimes
from stoker.protocol.blocks import ProvisioningRule
from stoker.site import Duration, Name, Size

_Rows = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000)]
_NONE = Size(0)
TICK_S = 1e-6  # Resolution of simulated time in seconds; rounding may shorten each step of a run by it


class EngineModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An engine on one kind of device. `times`: step times at speed 1. `most_output`: output tokens reserved per
    request (0 = the request's own output).
    """

    times: StepTimes
    rows: _Rows = 32
    prefill_tokens: _Rows = 512
    cache_tokens: _Tokens = 0
    token_bytes: Size = msgspec.field(default=_NONE, name="token")
    weights_bytes: Size = msgspec.field(default=_NONE, name="weights")
    most_output: _Tokens = 0
    prefill_requests: _Tokens = 0
    mixes: bool = False
    page_tokens: _Tokens = 0

    def __post_init__(self) -> None:
        if not self.times.prefill or not self.times.decode:
            raise ValueError("times: an engine needs prefill and decode, each with a cell [tokens, length, seconds]")
        if not self.times.has_plausible_numbers():
            raise ValueError("times: a number is negative, not finite or otherwise impossible")
        for cell in (*self.times.prefill, *self.times.decode):
            if not cell.seconds > 0:
                raise ValueError(f"times: a step of {cell.tokens:g} tokens takes {cell.seconds:g} s")
        if self.token_bytes and self.cache_tokens:
            raise ValueError("cache_tokens: the setting token already sets the size of the cache; leave it out")

    def make_batch_limits(self, memory_bytes: int) -> BatchLimits:
        cache_tokens = self.cache_tokens
        if self.token_bytes:
            cache_tokens = max(1, (memory_bytes - self.weights_bytes) // self.token_bytes)
        return BatchLimits(
            self.rows, self.prefill_tokens, cache_tokens, self.prefill_requests, self.mixes, self.page_tokens
        )


class EngineFloor:
    """The minimum time of a request on an engine, whatever other requests are in the batch (`StepTable.floor`)."""

    def __init__(self, model: EngineModel, *, speed: float) -> None:
        times = model.times
        self._step_s, self._token_s = StepTable(times.decode).lower_bounds(length=1.0, most=model.rows)
        most = model.prefill_tokens + (model.rows if model.mixes else 0)
        prefill_s, self._read_s = StepTable(times.prefill).lower_bounds(length=0.5, most=most)
        if model.mixes:  # a step that reads prompts can also write a token
            self._step_s, self._token_s = min(self._step_s, prefill_s), min(self._token_s, self._read_s)
        self._speed = speed

    def run_s(self, prompt: int, output: int) -> float:
        return self._subtract_rounding_error(self._read_s * (prompt - 1) + self._step_s * (output - 1), output)

    def device_s(self, prompt: int, output: int) -> float:
        return self._subtract_rounding_error(self._read_s * (prompt - 1) + self._token_s * (output - 1), output)

    def _subtract_rounding_error(self, seconds: float, steps: int) -> float:
        return max(0.0, seconds / self._speed - TICK_S * (steps + 1))


class Rate(float):
    """Bytes per second; in a scenario `"1.2 GB/s"`. With an infinite rate, a transfer takes no time."""


UNLIMITED_RATE = Rate(math.inf)
NO_TIME = Duration(0.0)
Count = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
Share = Annotated[float, msgspec.Meta(ge=0.0, le=10.0)]


class DeviceKind(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A kind of device. `speed`: speed relative to the device kind for which the call times are given."""

    memory_bytes: Size = msgspec.field(name="memory")
    speed: float = 1.0

    def __post_init__(self) -> None:
        if not (self.speed > 0 and math.isfinite(self.speed)):
            raise ValueError(f"speed = {self.speed}: it must be more than 0")


class Links(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bandwidths of links. `shared_operations`: file operations per second on the shared storage (0 = no limit)."""

    shared: Rate = UNLIMITED_RATE
    shared_node: Rate = UNLIMITED_RATE
    shared_operations: float = 0.0
    disk: Rate = UNLIMITED_RATE
    memory: Rate = UNLIMITED_RATE
    network: Rate = UNLIMITED_RATE
    bus: Rate = UNLIMITED_RATE

    def __post_init__(self) -> None:
        for field in ("shared", "shared_node", "disk", "memory", "network", "bus"):
            if not getattr(self, field) > 0:
                raise ValueError(f"{field}: the bandwidth must be more than 0")


class Files(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Files of a context. `operations`: number of file operations (opens, stats) to read them."""

    name: Name
    size_bytes: Size = msgspec.field(name="size")
    operations: Count = 0


class ContextModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The costs of a context, in seconds per kind of device. The kind `""` is the default.

    If a library runs more calls than `slots` (0 = the engine's `rows`), all calls slow down equally. A library starts
    (`start`), reads its files, initializes (`load`), and moves `device_memory` over the bus. A call takes `call` plus
    `item` per item, divided by the speed of the device. With an `engine`, a call is a request of `input_length` tokens.
    The engine's batch determines the times (`stoker.manager.sim.virtual_engine`).
    """

    files: tuple[Files, ...] = ()
    awareness: Awareness = Awareness.FULL
    device_memory_bytes: Size = msgspec.field(default=Size(0), name="device_memory")
    kinds: tuple[str, ...] = ()
    slots: Count = 1
    start_s: Duration = msgspec.field(default=NO_TIME, name="start")
    load_s: dict[str, Duration] = msgspec.field(default_factory=dict, name="load")
    load_cv: Share = 0.0
    call_s: dict[str, Duration] = msgspec.field(default_factory=dict, name="call")
    item_s: dict[str, Duration] = msgspec.field(default_factory=dict, name="item")
    item_cv: Share = 0.0
    warm_items: Count = 0
    warm_item_s: Duration = msgspec.field(default=NO_TIME, name="warm_item")
    resize_s: Duration = msgspec.field(default=NO_TIME, name="resize")
    sleeps: bool = False
    page_cache: bool = True
    devices: Positive = 1
    gang_s: Duration = msgspec.field(default=NO_TIME, name="gang")
    gang_efficiency: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 1.0
    engine: dict[str, EngineModel] = msgspec.field(default_factory=dict)
    min_libraries: Count = 0
    max_libraries: Count = 0
    keep_alive_s: Duration | None = msgspec.field(default=None, name="keep_alive")
    family: str = ""
    longest_input: Count = 0

    def __post_init__(self) -> None:
        if bool(self.family) != bool(self.longest_input):
            raise ValueError("longest_input: a context of a family needs both family and longest_input")
        for setting, is_there in (("call", self.call_s), ("item", self.item_s), ("warm_items", self.warm_items)):
            if self.engine and is_there:
                raise ValueError(f"{setting}: the step times of its engine set the duration of a call; leave it out")

    def engine_on_device_kind(self, kind: str) -> EngineModel | None:
        return self.engine.get(kind) or self.engine.get("")

    def slots_on_device_kind(self, kind: str) -> int:
        engine = self.engine_on_device_kind(kind)
        return self.slots or (engine.rows if engine is not None else 1)

    def can_use_device_kind(self, kind: str) -> bool:
        return not self.kinds or kind in self.kinds or kind.partition(" ")[0] in self.kinds

    def time_on_device_kind(self, times: dict[str, Duration], kind: str) -> float:
        return float(times.get(kind, times.get("", 0.0)))


class Preempt(enum.Enum):
    """The rule that chooses which blocks are preempted first if a source's capacity shrinks."""

    NEWEST = "newest"
    OLDEST = "oldest"


class SourceModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A batch system with nodes of one kind. `capacity`: running blocks, as one number or steps `[seconds, blocks]`."""

    name: Name
    kind: str
    capacity: Count | tuple[tuple[float, Count], ...] = 0
    devices: Positive = 1
    nodes: Positive = 1
    sleeper_bytes: Size = msgspec.field(default=Size(0), name="sleepers")
    wait_s: Duration = msgspec.field(default=NO_TIME, name="wait")
    wait_cv: Share = 0.0
    boot_s: Duration = msgspec.field(default=NO_TIME, name="boot")
    boot_cv: Share = 0.0
    walltime_s: Duration = msgspec.field(default=NO_TIME, name="walltime")
    preempt: Preempt = Preempt.NEWEST
    rule: ProvisioningRule = ProvisioningRule.OPPORTUNISTIC
    init_blocks: Count = 0
    min_blocks: Count = 0
    max_blocks: Positive = 1
    keep_pending: Positive = 2
    idle_s: Duration = msgspec.field(default=Duration(120.0), name="idle")
    finish_within_s: Duration = msgspec.field(default=Duration(600.0), name="finish_within")

    def __post_init__(self) -> None:
        times = [at for at, _ in self.steps]
        if times and times[0] < 0:
            raise ValueError(f"capacity: {times[0]:g} s is negative")
        for before, at in pairwise(times):
            if at <= before:
                raise ValueError(f"capacity: {at:g} s does not come after {before:g} s")

    @property
    def steps(self) -> tuple[tuple[float, int], ...]:
        return ((0.0, self.capacity),) if isinstance(self.capacity, int) else self.capacity


class Delays(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Delays in seconds. `frame`: time for which a pilot collects messages before it sends them. If the log only counts
    calls, programs also collect messages.
    """

    message_s: Duration = msgspec.field(default=Duration(0.0005), name="message")
    frame_s: Duration = msgspec.field(default=NO_TIME, name="frame")
    back_s: Duration = msgspec.field(default=Duration(1.0), name="back")
    poll_s: Duration = msgspec.field(default=Duration(5.0), name="poll")
    progress_s: Duration = msgspec.field(default=NO_TIME, name="progress")


class World(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    devices: dict[str, DeviceKind]
    sources: tuple[SourceModel, ...]
    contexts: dict[str, ContextModel]
    links: Links = Links()
    delays: Delays = Delays()

    def fits_on_device(self, model: ContextModel, source: SourceModel) -> bool:
        """True if the context may use the source's kind of device and fits into the memory of one device."""
        memory_bytes = self.devices[source.kind].memory_bytes
        return model.can_use_device_kind(source.kind) and model.device_memory_bytes <= memory_bytes

    def fits_on_node(self, model: ContextModel, source: SourceModel) -> bool:
        known = source.kind in self.devices
        return known and self.fits_on_device(model, source) and model.devices <= source.devices


def limit_awareness(world: World, most: Awareness | None) -> World:
    """Return a baseline world, in which no context has a higher `awareness` than `most` (None = no limit)."""
    if most is None:
        return world
    contexts = {
        name: replace(
            model, awareness=min(model.awareness, most, key=(Awareness.NONE, Awareness.DISK, Awareness.FULL).index)
        )
        for name, model in world.contexts.items()
    }
    return replace(world, contexts=contexts)
