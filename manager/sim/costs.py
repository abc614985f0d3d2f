"""What a context costs at the least on each source of pilots, in seconds: on the way to it, and for each call.

The least is taken over all that a policy may do: keep the files or read them again, load early, try until chance is
kind. `stoker.manager.sim.bound` says what follows from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import msgspec

from stoker.chance import least_factor
from stoker.contexts.recipe import Awareness
from stoker.manager.sim.engine_model import TICK_S, EngineFloor
from stoker.manager.sim.world import ContextModel, DeviceKind, Links, SourceModel, World

_STEPS = 10
"""Steps from the order to load until a context is hot, at the most."""


class LeastCall(msgspec.Struct, frozen=True, gc=False):
    """What the clairvoyant knows of a call: how much longer than the mean it takes (`factor`), its tokens."""

    at_s: float
    context: str
    items: int
    factor: float
    fixed_s: float
    gang: bool
    prompt: int
    output: int


class Placement(msgspec.Struct, frozen=True):
    """A context on the devices of one source; see `stoker.manager.sim.library` for what a load consists of.

    `source`: its number. `starts_at`, `pilot_at`: the earliest start of a block, and when its pilot can be there.
    `known_at`: when the first call wants the context. `slots`: its calls that a device runs at a time at full speed;
    `at_once`: those that one library runs; `devices`: what it takes. `boot_s`: from a block's start to its pilots.
    `first_s`: from there until a call can begin; `once_s`: of that, what no later call has to wait for again;
    `again_s`: what each call takes up besides itself. `begins_at`: the earliest time at which a call of the context can
    begin here.
    """

    context: str
    source: int
    speed: float
    slots: int
    at_once: int
    device_bytes: int
    memory_bytes: int
    starts_at: float
    pilot_at: float
    known_at: float
    boot_s: float
    first_s: float
    once_s: float
    again_s: float
    begins_at: float
    call_s: float
    item_s: float
    devices: int
    floor: EngineFloor | None = None
    """The least that its engine takes for a call, if it has one."""

    def run_s(self, call: LeastCall) -> float:
        """The least that a call takes here."""
        if self.floor is not None:
            return self.floor.run_s(call.prompt, call.output)
        return max(0.0, call.factor * (self.call_s + call.items * self.item_s) + call.fixed_s - TICK_S)

    def device_s(self, call: LeastCall) -> float:
        """The least that a device here computes for it."""
        return self.run_s(call) / self.slots if self.floor is None else self.floor.device_s(call.prompt, call.output)


class _Way(msgspec.Struct, frozen=True):
    """The steps of a load that a world's links and a context's model determine, in seconds.

    `fetch_s`: the files to a node, over its link; `kept_s`: a load from a node that has them; `afresh_s`: a load that
    reads them from the shared storage.
    """

    fetch_s: float
    kept_s: float
    afresh_s: float


def places_of(world: World, first_at: Mapping[str, float]) -> list[Placement]:
    """Where each of these contexts may be. `first_at`: when the first call of each comes."""
    pilots_at = {number: at for number, source in enumerate(world.sources) if (at := _pilot_at(source)) < math.inf}
    return [
        place
        for name in first_at
        for number in pilots_at
        for place in _place(world, name, number, pilots_at=pilots_at, first_at=first_at)
    ]


def _place(
    world: World, name: str, number: int, *, pilots_at: Mapping[int, float], first_at: Mapping[str, float]
) -> Iterator[Placement]:
    source, model = world.sources[number], world.contexts[name]
    device = world.devices[source.kind]
    if model.device_memory_bytes > device.memory_bytes or not _may_be_on(model, source.kind):
        return
    if model.devices > source.devices:
        return
    way = _way(world.links, model, source.kind)
    known_at = first_at[name]
    here_at = max(pilots_at[number], known_at)
    begins_at = here_at + way.afresh_s
    first_s = again_s = way.afresh_s
    if model.awareness is not Awareness.NONE:
        again_s = min(way.kept_s, way.afresh_s)
        first_s = min(way.fetch_s + way.kept_s, way.afresh_s)
        fetched_at = _fetched_at(world, model, number, pilots_at=pilots_at, first_at=first_at)
        begins_at = min(begins_at, max(here_at, fetched_at) + way.kept_s)
    boot_s = _boot_s(source)
    if source.walltime_s and boot_s + first_s >= source.walltime_s:
        return
    stays, slots, engine = model.awareness is Awareness.FULL, model.slots_on(source.kind), model.engine_on(source.kind)
    yield Placement(
        context=name, source=number, speed=device.speed, slots=slots, at_once=slots if stays else 1,
        device_bytes=device.memory_bytes, memory_bytes=model.device_memory_bytes, starts_at=_starts_at(source),
        pilot_at=pilots_at[number], known_at=known_at, boot_s=boot_s, first_s=first_s, once_s=first_s if stays else 0.0,
        again_s=0.0 if stays else again_s, begins_at=begins_at, devices=model.devices,
        floor=EngineFloor(engine, speed=device.speed) if engine is not None else None,
        **_rates(model, device, source.kind),
    )  # fmt: skip


def _fetched_at(
    world: World, model: ContextModel, number: int, *, pilots_at: Mapping[int, float], first_at: Mapping[str, float]
) -> float:
    """When a node of this source can have all files of a context. A file is wanted as soon as any context that is kept
    on disk wants it; what is wanted from a time on is fetched after that."""
    links, wanted_at = world.links, dict.fromkeys((files.name for files in model.files), math.inf)
    for name, at in first_at.items():
        if world.contexts[name].awareness is not Awareness.NONE:
            wanted_at.update(
                (f.name, min(at, wanted_at[f.name])) for f in world.contexts[name].files if f.name in wanted_at
            )
    nodes = sum(source.nodes * min(source.max_blocks, max(n for _, n in source.steps)) for source in world.sources)
    all_read = min(links.shared, nodes * min(links.shared_node, links.network))
    fetched_at = 0.0
    for from_s in set(wanted_at.values()):
        late = [files for files in model.files if wanted_at[files.name] >= from_s]
        size, operations = sum(files.size_bytes for files in late), sum(files.operations for files in late)
        copy_s = max(size / all_read, operations / (links.shared_operations or math.inf))
        read_at = max(min(pilots_at.values()), from_s) + copy_s
        fetched_at = max(fetched_at, max(pilots_at[number], from_s) + size / links.network, read_at)
    return fetched_at


def _rates(model: ContextModel, device: DeviceKind, kind: str) -> dict[str, float]:
    call_s, item_s = model.of_kind(model.call_s, kind), model.of_kind(model.item_s, kind)
    return {"call_s": call_s / device.speed, "item_s": item_s / device.speed}


def _way(links: Links, model: ContextModel, kind: str) -> _Way:
    size = sum(files.size_bytes for files in model.files)
    operations_s = sum(files.operations for files in model.files) / (links.shared_operations or math.inf)
    one_node = min(links.shared_node, links.network)
    work_s = model.start_s + model.of_kind(model.load_s, kind) * least_factor(cv=model.load_cv)
    work_s += model.devices * model.device_memory_bytes / links.bus - _STEPS * TICK_S
    read_s = size / (max(links.memory, links.disk) if model.page_cache else links.disk)
    return _Way(
        fetch_s=size / links.network,
        kept_s=max(0.0, read_s + work_s),
        afresh_s=max(0.0, max(size / min(links.shared, one_node), operations_s) + work_s),
    )


# ---- pilots


def _starts_at(source: SourceModel) -> float:
    """When a block can start, as far as the queue goes."""
    return max(0.0, source.wait_s * least_factor(cv=source.wait_cv) - TICK_S)


def _boot_s(source: SourceModel) -> float:
    return max(0.0, source.boot_s * least_factor(cv=source.boot_cv) - TICK_S)


def _pilot_at(source: SourceModel) -> float:
    """When its first pilot can be there; infinite if it never has any."""
    starts_at, blocks = _starts_at(source), 0
    for at, count in (*source.steps, (math.inf, 0)):
        if at > starts_at and blocks:
            break
        starts_at, blocks = max(starts_at, at), count
    return starts_at + _boot_s(source)


def _may_be_on(model: ContextModel, kind: str) -> bool:
    """As `stoker.manager.policies.sizes.is_of_kind`: by a kind's whole name or its first word."""
    return not model.kinds or kind in model.kinds or kind.partition(" ")[0] in model.kinds
