"""Check the numbers in messages. The decoder checks only types, and an impossible number (NaN) would damage the
manager's state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from stoker.contexts.inference.adapter import TokenCache
from stoker.contexts.recipe import LibraryLimits, ObjectRef, Recipe
from stoker.protocol import to_manager as say
from stoker.protocol.calls import PIECE_BYTES, WINDOW_PIECES, CallEnd, CallOptions, CallSpec, Features
from stoker.units import MOST_AT_ONCE, MOST_BYTES, MOST_NUMBER, MOST_S

MOST_DEFINED_BYTES = 32_000_000
"""Maximum bytes of a function or recipe, so that it fits into one frame (at most 64 MB)."""


def describe_invalid_message(message: say.FromClient | say.FromPilot) -> str:
    """Describe the first invalid value of a message, or return ""."""
    check = _CHECKS.get(type(message))
    return check(message) if check is not None else ""


def _time(name: str, value: float, *, least: float = 0.0) -> str:
    return "" if least <= value <= MOST_S else f"{name} is {value}: it must be {least:g} to {MOST_S:g} s"


def _size(name: str, value: int) -> str:
    return "" if 0 <= value <= MOST_BYTES else f"{name} is {value}: it must be 0 to {MOST_BYTES} bytes"


def _count(name: str, value: int, *, least: int = 0, most: int = MOST_NUMBER) -> str:
    return "" if least <= value <= most else f"{name} is {value}: it must be {least} to {most}"


def _first(found: Iterable[str]) -> str:
    return next(filter(None, found), "")


Check = Callable[[Any], str]


def _all(*checks: Check) -> Check:
    return lambda message: _first(check(message) for check in checks)


def _times(*names: str) -> Check:
    return lambda message: _first(_time(name, getattr(message, name)) for name in names)


def _sizes(*names: str) -> Check:
    return lambda message: _first(_size(name, getattr(message, name)) for name in names)


def _counts(*names: str, least: int = 0, most: int = MOST_NUMBER) -> Check:
    return lambda message: _first(_count(name, getattr(message, name), least=least, most=most) for name in names)


# ---- from clients


def describe_invalid_recipe(recipe: Recipe) -> str:
    """Describe the first invalid number of a recipe, or return ""."""
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


def _limits(limits: LibraryLimits) -> str:
    return _first((
        _count("limits.least", limits.least, most=MOST_AT_ONCE), _count("limits.most", limits.most, most=MOST_AT_ONCE),
        _time("limits.keep_alive_s", limits.keep_alive_s or 0.0),
    ))  # fmt: skip


def _submit(m: say.Submit) -> str:
    due = "" if m.due_in_s is None else _time("due_in_s", m.due_in_s, least=-MOST_S)
    return due or _options(m.options) or describe_invalid_calls(m.calls)


def _options(options: CallOptions) -> str:
    wants, (least, most) = options.objective, options.gang
    return _first((
        _count("priority", options.priority, least=-MOST_NUMBER),
        _time("deadline_at", wants.deadline_at, least=-MOST_S), _time("latency_s", wants.latency_s),
        _time("ttft_s", wants.ttft_s), _time("tpot_s", wants.tpot_s), _time("limit_s", options.limit_s),
        _time("ttft_per_token_s", wants.ttft_per_token_s), _time("ttft_most_s", wants.ttft_most_s),
        "" if 1 <= least <= most <= MOST_AT_ONCE else f"a gang of {least} to {most}",
        "a gang with a streamed result" if options.stream and most > 1 else "",
    ))  # fmt: skip


def describe_invalid_calls(specs: Iterable[CallSpec]) -> str:
    """Describe the first invalid value of these calls, or return ""."""
    for spec in specs:  # must be fast: this loop runs for every submitted call
        features = spec.features
        if (
            (features is not None and not _are_features_valid(features))
            or type(spec.payload) is ObjectRef
            or spec.call < 0
        ) and (wrong := _describe_invalid_call_spec(spec)):
            return f"call {spec.call}: {wrong}"
    return ""


def _are_features_valid(features: Features) -> bool:
    """Return True if `_features` would report no fault. This check is fast enough for a million calls."""
    most = MOST_NUMBER
    return (
        0 <= features.items <= most
        and 0 <= features.input_length <= most
        and 0 <= features.expected_output <= most
        and 0 <= features.most_output <= most
        and 0.0 <= features.fixed_s <= MOST_S
        and 0.0 <= features.shared_s <= MOST_S
    )


def _describe_invalid_call_spec(spec: CallSpec) -> str:
    return _first((
        _features(spec.features) if spec.features is not None else "",
        _size("size_bytes of its arguments", spec.payload.size_bytes) if isinstance(spec.payload, ObjectRef) else "",
        "a negative id" if spec.call < 0 else "",
    ))  # fmt: skip


_features = _all(_counts("items", "input_length", "expected_output", "most_output"), _times("fixed_s", "shared_s"))


# ---- from pilots


def _describe_invalid_pilot_hello(m: say.PilotHello) -> str:
    names = [device.device for device in m.devices]
    numbers = [facts.library for facts in m.libraries]
    return _first((
        "" if len(set(names)) == len(names) else f"it names a device twice: {', '.join(names)}",
        "" if len(set(numbers)) == len(numbers) else "it names a library twice",
        *(_device(device) for device in m.devices),
        *(_library(facts) for facts in m.libraries),
        *(describe_invalid_recipe(recipe) for recipe in m.recipes),
        _time("ends_in_s", m.ends_in_s), _count("acknowledged", m.acknowledged), _count("last_library", m.last_library),
        _size("sleeper_bytes", m.sleeper_bytes),
    ))  # fmt: skip


_device_numbers = _all(
    _sizes("memory_bytes", "process_bytes"), _counts("cores", "processes", "island", most=MOST_AT_ONCE)
)  # fmt: skip


def _device(device: say.DeviceFacts) -> str:
    wrong = _device_numbers(device)
    return f"device {device.device}: {wrong}" if wrong else ""


def _library(facts: say.LibraryFacts) -> str:
    return _first((
        _count("the number of a library", facts.library),
        _size("reserved_bytes", facts.reserved_bytes), _size("memory_bytes", facts.memory_bytes),
        _size("device_bytes", facts.device_bytes), _size("awake_bytes", facts.awake_bytes),
        _size("host_bytes", facts.host_bytes), _count("slots", facts.slots, most=MOST_AT_ONCE), _cache(facts.cache),
        "" if all(0 <= call < 1 << 62 for call in facts.calls) else "a call's id is out of range",
        "" if len(set(facts.calls)) == len(facts.calls) else f"library {facts.library} names a call twice",
    ))  # fmt: skip


def _cache(cache: TokenCache | None) -> str:
    if cache is None:
        return ""
    return _first((
        _size("weights_bytes", cache.weights_bytes), _count("token_bytes", cache.token_bytes, least=1, most=MOST_BYTES),
        _count("the tokens of a cache", cache.tokens, least=int(cache.is_fixed)),
    ))  # fmt: skip


def _batch(m: say.LibraryBatch) -> str:
    load = m.load
    counts = (
        load.running, load.waiting, load.steps, load.decode_steps, load.row_steps, load.most_running,
        load.prompt_tokens, load.new_tokens, load.evictions, load.rows, load.cache_tokens, load.peak_tokens,
        load.reused_tokens,
    )  # fmt: skip
    wrong = _first(
        (*(_count("a count of its batch", count, most=MOST_BYTES) for count in counts), _time("busy_s", load.busy_s))
    )
    return wrong or ("" if m.times.is_sound() else "its step times contain an impossible number")


def _ended(m: say.CallsEnded) -> str:
    most_s = MOST_S
    for end in m.ends:  # must be fast: this loop runs for every ended call
        if not 0.0 <= end.run_s <= most_s or (type(end.payload) is ObjectRef and end.payload.size_bytes < 0):
            return _end(end)
    return ""


def _end(end: CallEnd) -> str:
    return f"call {end.call}: {_time('run_s', end.run_s) or 'the size of its result is below zero'}"


def _describe_invalid_yield(m: say.CallYielded) -> str:
    return _first((
        _count("first", m.first), _count("run", m.run, most=1 << 62),
        "" if len(m.items) <= WINDOW_PIECES else f"{len(m.items)} pieces: no call may send more than {WINDOW_PIECES}",
        "" if all(len(item) <= PIECE_BYTES for item in m.items) else f"a piece of over {PIECE_BYTES} bytes",
    ))  # fmt: skip


_use = _all(_sizes("memory_bytes", "device_bytes"), _times("cpu_s"))
_arrival = _all(_sizes("size_bytes", "origin_bytes", "peer_bytes"), _times("seconds"))


def _refs(refs: Iterable[ObjectRef]) -> str:
    return _first(_size(f"size_bytes of {ref.name}", ref.size_bytes) for ref in refs)


_CHECKS: dict[type, Check] = {
    say.ClientHello: _all(_counts("received", "acknowledged"), _counts("number", least=-1, most=1 << 20)),
    say.DefineRecipe: lambda m: describe_invalid_recipe(m.recipe),
    say.Submit: _submit,
    say.MapReport: _all(_counts("map", "done", "kept"), _counts("total", "unsent", least=-1)),
    say.PiecesTaken: lambda m: _count("upto", m.upto) or _count("run", m.run, most=1 << 62),  # each piece of a stream
    say.Received: _counts("total"),
    say.AskCalls: _counts("limit"),
    say.BlockUpdate: _times("expected_in_s"),
    say.PilotHello: _describe_invalid_pilot_hello,
    say.LibraryReady: _all(
        _times("start_s", "load_s", "fetch_s"), _sizes("resident_bytes", "peak_bytes", "device_bytes"),
        _counts("slots", most=MOST_AT_ONCE), lambda m: _cache(m.cache),
    ),
    say.CallsEnded: _ended,
    say.CallYielded: _describe_invalid_yield,
    say.CallsReturned: _all(_sizes("required_bytes"), _times("over_s")),
    say.OfferAccepted: _sizes("reserve_bytes"),
    say.LibraryResized: _sizes("device_memory_bytes"),
    say.LibraryAsleep: _all(_sizes("device_memory_bytes", "host_bytes"), _times("sleep_s")),
    say.LibraryAwake: _all(_sizes("device_memory_bytes"), _times("wake_s")),
    say.LibraryBatch: _batch,
    say.Heartbeat: _all(
        _sizes("cache_bytes"), _counts("refused_frames"), lambda m: _first(_use(use) for use in m.libraries)
    ),
    say.WantObjects: lambda m: _refs(m.objects),
    say.ObjectsHere: lambda m: _first(_arrival(each) for each in m.arrivals),
    say.SnapshotHere: lambda m: _time("made_s", m.made_s) or _refs((m.object,)),
    say.WalltimeUpdate: _times("ends_in_s"),
}  # fmt: skip
"""Functions that check a message, by message type. Users choose the numbers in progress reports, so only the invalid
report is rejected (`is_sound`).
"""


def is_sound(done: float, total: float) -> bool:
    return 0.0 <= done <= MOST_S and 0.0 <= total <= MOST_S
