"""Reject worlds in which no call can run or in which a run never ends."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from stoker.config_errors import suggest_similar_name
from stoker.contexts.recipe import Awareness
from stoker.errors import ConfigError
from stoker.manager.sim.client import Arrival
from stoker.manager.sim.runs import minimum_call_s
from stoker.manager.sim.world import ContextModel, EngineFloor, SourceModel, World
from stoker.units import show_bytes, show_seconds

SettingProblem = tuple[tuple[str, ...], str, tuple[str, ...]]
"""The setting's path in the file; the problem's text, which begins with the setting's name; the path with source names
instead of source numbers.
"""


_Problems = Iterator[tuple[tuple[str, ...], str]]  # Path of a table, and problem text that begins with a setting's name


def raise_for_impossible_setting(world: World, *, wanted: Iterable[str] = (), until_s: float = 0.0) -> None:
    for at, problem, named in find_impossible_settings(world, wanted=wanted, until_s=until_s):
        table = ".".join(named[:-1])
        raise ConfigError(f"an impossible world: {f'[{table}] ' if table else ''}{problem}", key=at[-1])


def find_impossible_settings(
    world: World, *, wanted: Iterable[str] = (), until_s: float = 0.0
) -> Iterator[SettingProblem]:
    """Yield impossible settings. `wanted`: contexts that the calls use. `until_s`: time at which the run ends."""
    for table, problem in chain(
        _world_problems(world), _engine_problems(world), _workload_problems(world, wanted, until_s=until_s)
    ):
        at = (*table, re.split("[: ]", problem, maxsplit=1)[0])
        named = (at[0], world.sources[int(at[1])].name, *at[2:]) if at[0] == "sources" and len(at) > 1 else at
        yield at, problem, named


def find_world_warnings(world: World, *, wanted: Iterable[str] = ()) -> Iterator[str]:
    models = [(name, world.contexts[name]) for name in wanted]
    for source in world.sources:
        most = max(blocks for _, blocks in source.steps)
        if most > source.max_blocks:
            limit = f"max_blocks = {source.max_blocks} limits the submitted blocks"
            yield f"source {source.name}: its capacity is {most} blocks, but {limit}"
        never = f"source {source.name} never serves a call"
        if not most:
            yield f"{never}: its capacity is always 0"
            continue
        usable = [(name, model) for name, model in models if world.fits_on_node(model, source)]
        if models and not usable:
            yield f"{never}: its devices ({source.kind}) cannot hold {', '.join(name for name, _ in models)}"
        elif models and source.walltime_s:
            loads = ((_estimate_load_s(world, model, source), name) for name, model in usable)
            load_s, name = min(loads, key=lambda each: each[0])
            if load_s >= source.walltime_s:
                lasts = f"a block lasts {show_seconds(source.walltime_s)}"
                yield f"{never}: {lasts}, and {name} takes {show_seconds(load_s)} until it is loaded there"


def check_arrivals(world: World, arrivals: Iterable[Arrival]) -> Iterator[Arrival]:
    before_s, seen = 0.0, set[tuple[object, ...]]()
    served = {name for name, model in world.contexts.items() if model.engine}
    timed = any(source.walltime_s for source in world.sources)
    for number, arrival in enumerate(arrivals):
        if not before_s <= arrival.at_s < math.inf:
            raise ConfigError(f"call {number} arrives at {arrival.at_s:g} s, before the previous call's {before_s:g} s")
        before_s = arrival.at_s
        # Check calls with different token counts separately only if a walltime may interrupt a call to an engine.
        lengths = (arrival.prompt_tokens, arrival.output_tokens) if timed and arrival.context in served else ()
        times = arrival.fixed_s, arrival.shared_s
        kind = arrival.context, arrival.items, arrival.gang, times, arrival.items_done, lengths
        if kind not in seen:
            seen.add(kind)
            for problem in _call_problems(world, arrival):
                raise ConfigError(f"call {number} {problem}")
        yield arrival


def _call_problems(world: World, arrival: Arrival) -> Iterator[str]:
    name, (least, most) = arrival.context, arrival.gang
    if arrival.items < 1:
        yield f"has {arrival.items} items; a call has at least one"
    if name not in world.contexts:
        yield f"wants the unknown context {name}; {suggest_name(name, world.contexts)}"
    if not 0 <= arrival.items_done <= arrival.items:
        yield f"ends after {arrival.items_done} of its {arrival.items} items, which is impossible"
    for seconds in (arrival.fixed_s, arrival.shared_s):
        if not 0 <= seconds < math.inf:
            yield f"takes {seconds:g} s before its first item; the time must be 0 or more"
    if not 1 <= least <= most:
        yield f"wants a gang of at least {least} and at most {most} libraries, which is impossible"
    model = world.contexts[name]
    if model.engine and (arrival.items, arrival.gang, arrival.fixed_s + arrival.shared_s) != (1, (1, 1), 0.0):
        one = "such a call is one request (items = 1, no gang, fixed_s = 0, shared_s = 0)"
        yield f"wants {name}, which has an engine: {one}"
    if min(arrival.input_length, arrival.expected_output, arrival.output) < 0:
        yield "has a negative length"
    sources = _usable_sources(world, model)
    there = sum(
        min(each.max_blocks, max(blocks for _, blocks in each.steps)) * each.nodes * (each.devices // model.devices)
        for each in sources
    )
    if least > max(1, there):
        each = "a device" if model.devices == 1 else f"{model.devices} devices"
        never = f"{name} never has more than {there} libraries at a time, with {each} each"
        yield f"wants a gang of {least}, but {never}"
    loads = [_estimate_load_s(world, model, source) for source in sources]
    takes = [_minimum_call_s(world, arrival, source) for source in sources]
    spare = [source.walltime_s - load_s - call_s for source, load_s, call_s in zip(sources, loads, takes, strict=True)]
    sure = not model.item_cv and not world.delays.progress_s  # checkpoints would let a call continue in the next block
    if spare and sure and all(source.walltime_s for source in sources) and max(spare) <= 0:
        best = spare.index(max(spare))
        work = f"{arrival.output_tokens} tokens" if model.engine else f"{arrival.items_done or arrival.items} items"
        yield (
            f"of {name} can never end: {work} take {show_seconds(takes[best])} after a load of "
            f"{show_seconds(loads[best])}, and a block of {sources[best].name} lasts "
            f"{show_seconds(sources[best].walltime_s)}; raise its walltime, or give calls fewer items"
        )


def _world_problems(world: World) -> _Problems:
    if not world.sources:
        yield (), "sources: the world has no source, so no pilot can start; write [[world.sources]]"
    if not world.contexts:
        yield (), "contexts: the world has no context, so no call can run; write [world.contexts.NAME]"
    devices, names = world.devices, set[str]()
    for number, source in enumerate(world.sources):
        at = ("sources", str(number))
        if source.kind not in devices:
            yield (
                at,
                f"kind = {source.kind!r} is not a device of this world; {suggest_name(source.kind, devices)}",
            )
        if source.name in names:
            yield at, f"name = {source.name!r}: another source has the same name"
        names.add(source.name)
        for setting in ("min_blocks", "init_blocks"):
            if (value := getattr(source, setting)) > source.max_blocks:
                yield at, f"{setting} = {value} is more than max_blocks = {source.max_blocks}"
    words, sizes = {name.partition(" ")[0] for name in devices}, dict[str, int]()
    for name, model in world.contexts.items():
        at = ("contexts", name)
        for kind in model.kinds:
            if kind not in devices and kind not in words:
                yield (
                    at,
                    f"kinds has {kind!r}, which is not a device of this world; {suggest_name(kind, devices)}",
                )
        for setting, times in (("load", model.load_s), ("call", model.call_s), ("item", model.item_s)):
            for kind in filter(None, times):
                if kind not in devices:
                    yield (
                        at,
                        f"{setting} has a time for {kind!r}, which is not a device; {suggest_name(kind, devices)}",
                    )
        for files in model.files:
            if (size := sizes.setdefault(files.name, files.size_bytes)) != files.size_bytes:
                sizes_shown = f"{show_bytes(files.size_bytes)} here and {show_bytes(size)} elsewhere"
                yield at, f"files: {files.name} is {sizes_shown}; files of the same name must have the same size"
    if not 0 <= (operations := world.links.shared_operations) < math.inf:
        yield ("links",), f"shared_operations = {operations:g} a second: it must be 0 or more; 0 means no limit"


def _engine_problems(world: World) -> _Problems:
    for name, model in world.contexts.items():
        at = ("contexts", name)
        for kind in filter(None, model.engine):
            if kind not in world.devices:
                yield (
                    at,
                    f"engine has steps for {kind!r}, which is not a device; {suggest_name(kind, world.devices)}",
                )
        kinds = (source.kind for source in _usable_sources(world, model))
        missing = [kind for kind in kinds if model.engine_on_device_kind(kind) is None]
        if model.engine and missing:
            mend = "whose step times are not known; add step times, or set kinds"
            yield at, f"engine: {name} may be on {missing[0]!r}, {mend}"


def _workload_problems(world: World, wanted: Iterable[str], *, until_s: float) -> _Problems:
    for name in wanted:
        if name not in world.contexts:
            yield (), f"contexts: calls want {name}, {suggest_name(name, world.contexts)}"
            return
        of_use = _usable_sources(world, world.contexts[name])
        if of_use:
            yield from _unfinishable_run_problems(world, name, of_use, until_s=until_s)
        elif known := [source for source in world.sources if source.kind in world.devices]:
            yield ("contexts", name), _why_no_device(world, name, known)


def _why_no_device(world: World, name: str, sources: Sequence[SourceModel]) -> str:
    model = world.contexts[name]
    if suited := [source.devices for source in sources if world.fits_on_device(model, source)]:
        return (
            f"devices = {model.devices}: {name} needs {model.devices} of one node, but no suitable node has "
            f"more than {max(suited)}"
        )
    kinds = dict.fromkeys(source.kind for source in sources)
    seen = ", ".join(f"{kind} {show_bytes(world.devices[kind].memory_bytes)}" for kind in kinds)
    if not any(map(model.can_use_device_kind, kinds)):
        return f"kinds: no source has a device that {name} may use ({', '.join(model.kinds)}); known devices: {seen}"
    on = f" on {' or '.join(model.kinds)}" if model.kinds else ""
    needs = f"it needs {show_bytes(model.device_memory_bytes)}{on}"
    return f"device_memory: no device can hold {name}: {needs}; devices: {seen}"


def _unfinishable_run_problems(world: World, name: str, of_use: Sequence[SourceModel], *, until_s: float) -> _Problems:
    model, first = world.contexts[name], ("sources", str(world.sources.index(of_use[0])))
    if not any(blocks for source in of_use for _, blocks in source.steps):
        yield first, f"capacity: it is always 0 at every source that could serve {name}; no call could ever run"
        return
    if not until_s and not any(source.steps[-1][1] for source in of_use):
        gone = max(source.steps[-1][0] for source in of_use)
        yield (
            first,
            f"capacity: from {gone:g} s on, it is 0 at every source that could serve {name}; a longer run "
            'would never end: write until = "…" at the top of the file',
        )
    loads = [(source, _estimate_load_s(world, model, source)) for source in of_use]
    if all(source.walltime_s and load_s >= source.walltime_s for source, load_s in loads):
        source, load_s = max(loads, key=lambda each: each[0].walltime_s - each[1])
        yield (
            ("sources", str(world.sources.index(source))),
            f"walltime: a block lasts {show_seconds(source.walltime_s)}, and {name} takes "
            f"{show_seconds(load_s)} until it is loaded there; no call could ever run",
        )


def _usable_sources(world: World, model: ContextModel) -> list[SourceModel]:
    return [source for source in world.sources if world.fits_on_node(model, source)]


def _estimate_load_s(world: World, model: ContextModel, source: SourceModel) -> float:
    links = world.links
    size = sum(files.size_bytes for files in model.files)
    if model.awareness is Awareness.NONE:
        seconds = size / min(links.shared, links.shared_node, links.network)
    else:
        seconds = size / links.network + size / (links.memory if model.page_cache else links.disk)
    seconds += model.devices * model.device_memory_bytes / links.bus
    return source.boot_s + model.start_s + model.time_on_device_kind(model.load_s, source.kind) + seconds


def _minimum_call_s(world: World, arrival: Arrival, source: SourceModel) -> float:
    model = world.contexts[arrival.context]
    engine = model.engine_on_device_kind(source.kind)
    if engine is not None:
        return EngineFloor(engine, speed=world.devices[source.kind].speed).run_s(
            arrival.prompt_tokens, arrival.output_tokens
        )
    call_s = model.time_on_device_kind(model.call_s, source.kind)
    item_s = model.time_on_device_kind(model.item_s, source.kind)
    speed, items = world.devices[source.kind].speed, arrival.items_done or arrival.items
    before_s = arrival.fixed_s + arrival.shared_s / arrival.gang[1]
    return before_s + minimum_call_s(model, call_s / speed, items * item_s / speed, gang=arrival.gang)


def suggest_name(name: str, known: Iterable[str]) -> str:
    names = list(known)
    otherwise = f"there {'is' if len(names) == 1 else 'are'} {', '.join(names) or 'none'}"
    return suggest_similar_name(name, names, otherwise=otherwise)
