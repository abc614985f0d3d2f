"""Checks of the numbers in messages: the decoder checks only types.

A number that no correct peer sends (a negative slot count, a NaN) would break the manager's records later, far from its
cause. `wrong_with` returns the fault in words for the sender.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from stoker.contexts.recipe import LibraryLimits, ObjectRef, Recipe
from stoker.protocol import to_manager as say
from stoker.protocol.calls import PIECE_BYTES, WINDOW_PIECES, CallEnd, CallOptions, CallSpec, Features
from stoker.units import MOST_AT_ONCE, MOST_BYTES, MOST_NUMBER, MOST_S

MOST_DEFINED_BYTES = 32_000_000
"""The largest function or recipe: each is sent in one frame, and a manager accepts frames of 64 MB."""


def wrong_with(message: say.FromClient | say.FromPilot) -> str:
    """Return the wrong value of a message in words; empty if none is wrong."""
    check = _CHECKS.get(type(message))
    return check(message) if check is not None else ""


def _time(name: str, value: float, *, least: float = 0.0) -> str:
    return "" if least <= value <= MOST_S else f"{name} is {value}: it has to be {least:g} to {MOST_S:g} s"


def _size(name: str, value: int) -> str:
    return "" if 0 <= value <= MOST_BYTES else f"{name} is {value}: it has to be 0 to {MOST_BYTES} bytes"


def _count(name: str, value: int, *, least: int = 0, most: int = MOST_NUMBER) -> str:
    return "" if least <= value <= most else f"{name} is {value}: it has to be {least} to {most}"


def _first(found: Iterable[str]) -> str:
    return next(filter(None, found), "")


# ---- from clients


def _client_hello(m: say.ClientHello) -> str:
    return _first((
        _count("received", m.received), _count("acknowledged", m.acknowledged),
        _count("number", m.number, least=-1, most=1 << 20),
    ))  # fmt: skip


def wrong_with_recipe(recipe: Recipe) -> str:
    """Return the wrong number of a recipe in words; empty if none is wrong."""
    needs = recipe.needs
    wrong = _first((
        "" if recipe.key else "it has no key",
        _count("slots", recipe.slots, most=MOST_AT_ONCE),
        _count("calls_per_library", recipe.calls_per_library),
        _count("needs.devices", needs.devices, least=1, most=MOST_AT_ONCE),
        _size("needs.memory_bytes", needs.memory_bytes),
        _size("needs.device_memory_bytes", needs.device_memory_bytes),
        _size("needs.disk_bytes", needs.disk_bytes),
        _time("needs.load_limit_s", needs.load_limit_s),
        _limits(recipe.limits),
        _refs(recipe.objects),
    ))  # fmt: skip
    return f"recipe {recipe.name}: {wrong}" if wrong else ""


def _map_report(m: say.MapReport) -> str:
    return _first((
        _count("map", m.map), _count("total", m.total, least=-1), _count("done", m.done), _count("kept", m.kept),
        _count("unsent", m.unsent, least=-1),
    ))  # fmt: skip


def _limits(limits: LibraryLimits) -> str:
    return _first((
        _count("limits.least", limits.least, most=MOST_AT_ONCE), _count("limits.most", limits.most, most=MOST_AT_ONCE),
        _time("limits.keep_alive_s", limits.keep_alive_s or 0.0),
    ))  # fmt: skip


def _submit(m: say.Submit) -> str:
    due = "" if m.due_in_s is None else _time("due_in_s", m.due_in_s, least=-MOST_S)
    return due or _options(m.options) or wrong_with_calls(m.calls)


def _options(options: CallOptions) -> str:
    wants, (least, most) = options.objective, options.gang
    return _first((
        _count("priority", options.priority, least=-MOST_NUMBER),
        _time("deadline_at", wants.deadline_at, least=-MOST_S), _time("latency_s", wants.latency_s),
        _time("ttft_s", wants.ttft_s), _time("tpot_s", wants.tpot_s), _time("limit_s", options.limit_s),
        _time("ttft_per_token_s", wants.ttft_per_token_s), _time("ttft_most_s", wants.ttft_most_s),
        "" if 1 <= least <= most <= MOST_AT_ONCE else f"a gang of {least} to {most}",
        "a gang whose result comes in pieces" if options.stream and most > 1 else "",
    ))  # fmt: skip


def wrong_with_calls(specs: Iterable[CallSpec]) -> str:
    """Return the wrong value of these calls in words; empty if none is wrong."""
    for spec in specs:  # the hot path
        features = spec.features
        if (
            (features is not None and not _are_sound(features)) or type(spec.payload) is ObjectRef or spec.call < 0
        ) and (wrong := _spec(spec)):
            return f"call {spec.call}: {wrong}"
    return ""


def _are_sound(features: Features) -> bool:
    """The fast path of `_features`, for a million calls."""
    most = MOST_NUMBER
    return (
        0 <= features.items <= most
        and 0 <= features.input_length <= most
        and 0 <= features.expected_output <= most
        and 0.0 <= features.fixed_s <= MOST_S
        and 0.0 <= features.shared_s <= MOST_S
    )


def _spec(spec: CallSpec) -> str:
    return _first((
        _features(spec.features) if spec.features is not None else "",
        _size("size_bytes of its arguments", spec.payload.size_bytes) if isinstance(spec.payload, ObjectRef) else "",
        "a negative id" if spec.call < 0 else "",
    ))  # fmt: skip


def _features(features: Features) -> str:
    return _first((
        _count("items", features.items), _count("input_length", features.input_length),
        _count("expected_output", features.expected_output), _time("fixed_s", features.fixed_s),
        _time("shared_s", features.shared_s),
    ))  # fmt: skip


# ---- from pilots


def _pilot_hello(m: say.PilotHello) -> str:
    names = [device.device for device in m.devices]
    numbers = [facts.library for facts in m.libraries]
    return _first((
        "" if len(set(names)) == len(names) else f"it names a device twice: {', '.join(names)}",
        "" if len(set(numbers)) == len(numbers) else "it names a library twice",
        *(_device(device) for device in m.devices),
        *(_library(facts) for facts in m.libraries),
        *(wrong_with_recipe(recipe) for recipe in m.recipes),
        _time("ends_in_s", m.ends_in_s), _count("acknowledged", m.acknowledged), _count("last_library", m.last_library),
    ))  # fmt: skip


def _device(device: say.DeviceFacts) -> str:
    wrong = _first((
        _size("memory_bytes", device.memory_bytes), _count("cores", device.cores, most=MOST_AT_ONCE),
        _size("process_bytes", device.process_bytes), _count("processes", device.processes, most=MOST_AT_ONCE),
        "" if 0 < device.speed <= MOST_S else f"speed is {device.speed}",
    ))  # fmt: skip
    return f"device {device.device}: {wrong}" if wrong else ""


def _library(facts: say.LibraryFacts) -> str:
    return _first((
        _count("the number of a library", facts.library),
        _size("reserved_bytes", facts.reserved_bytes), _size("memory_bytes", facts.memory_bytes),
        _size("device_bytes", facts.device_bytes), _count("slots", facts.slots, most=MOST_AT_ONCE),
        "" if all(0 <= call < 1 << 62 for call in facts.calls) else "a call's id is out of range",
        "" if len(set(facts.calls)) == len(facts.calls) else f"library {facts.library} names a call twice",
    ))  # fmt: skip


def _ready(m: say.LibraryReady) -> str:
    return _first((
        _time("start_s", m.start_s), _time("load_s", m.load_s), _time("fetch_s", m.fetch_s),
        _size("resident_bytes", m.resident_bytes), _size("peak_bytes", m.peak_bytes),
        _size("device_bytes", m.device_bytes), _count("slots", m.slots, most=MOST_AT_ONCE),
    ))  # fmt: skip


def _batch(m: say.LibraryBatch) -> str:
    load = m.load
    counts = (
        load.running, load.waiting, load.steps, load.decode_steps, load.row_steps, load.most_running,
        load.prompt_tokens, load.new_tokens, load.evictions, load.rows,
    )  # fmt: skip
    wrong = _first(
        (*(_count("a count of its batch", count, most=MOST_BYTES) for count in counts), _time("busy_s", load.busy_s))
    )
    return wrong or ("" if m.times.is_sound() else "the times of its steps hold a number that no measurement gives")


def _ended(m: say.CallsEnded) -> str:
    most_s = MOST_S
    for end in m.ends:  # the hot path too
        if not 0.0 <= end.run_s <= most_s or (type(end.payload) is ObjectRef and end.payload.size_bytes < 0):
            return _end(end)
    return ""


def _end(end: CallEnd) -> str:
    return f"call {end.call}: {_time('run_s', end.run_s) or 'the size of its result is below zero'}"


def _yielded(m: say.CallYielded) -> str:
    return _first((
        _count("first", m.first), _count("run", m.run, most=1 << 62),
        "" if len(m.items) <= WINDOW_PIECES else f"{len(m.items)} pieces: no call may send more than {WINDOW_PIECES}",
        "" if all(len(item) <= PIECE_BYTES for item in m.items) else f"a piece of over {PIECE_BYTES} bytes",
    ))  # fmt: skip


def _heartbeat(m: say.Heartbeat) -> str:
    return _first((
        _size("cache_bytes", m.cache_bytes), _count("refused_frames", m.refused_frames),
        *(_size("memory_bytes", use.memory_bytes) for use in m.libraries),
        *(_size("device_bytes", use.device_bytes) for use in m.libraries),
        *(_time("cpu_s", use.cpu_s) for use in m.libraries),
    ))  # fmt: skip


def _arrivals(m: say.ObjectsHere) -> str:
    return _first(
        wrong
        for each in m.arrivals
        for wrong in (
            _size("size_bytes", each.size_bytes), _size("origin_bytes", each.origin_bytes),
            _size("peer_bytes", each.peer_bytes), _time("seconds", each.seconds),
        )
    )  # fmt: skip


def _refs(refs: Iterable[ObjectRef]) -> str:
    return _first(_size(f"size_bytes of {ref.name}", ref.size_bytes) for ref in refs)


_CHECKS: dict[type, Callable[[Any], str]] = {
    say.ClientHello: _client_hello,
    say.DefineRecipe: lambda m: wrong_with_recipe(m.recipe),
    say.Submit: _submit,
    say.MapReport: _map_report,
    say.PiecesTaken: lambda m: _count("upto", m.upto) or _count("run", m.run, most=1 << 62),
    say.Received: lambda m: _count("total", m.total),
    say.AskCalls: lambda m: _count("limit", m.limit),
    say.BlockUpdate: lambda m: _time("expected_in_s", m.expected_in_s),
    say.PilotHello: _pilot_hello,
    say.LibraryReady: _ready,
    say.CallsEnded: _ended,
    say.CallYielded: _yielded,
    say.LibraryResized: lambda m: _size("device_memory_bytes", m.device_memory_bytes),
    say.LibraryBatch: _batch,
    say.Heartbeat: _heartbeat,
    say.WantObjects: lambda m: _refs(m.objects),
    say.ObjectsHere: _arrivals,
    say.SnapshotHere: lambda m: _time("made_s", m.made_s) or _refs((m.object,)),
    say.WalltimeUpdate: lambda m: _time("ends_in_s", m.ends_in_s),
}
"""Messages with numbers. Of a call's progress single reports are refused (`is_sound`): they are the user's words."""


def is_sound(done: float, total: float) -> bool:
    return 0.0 <= done <= MOST_S and 0.0 <= total <= MOST_S
