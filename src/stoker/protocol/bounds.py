"""Check the numbers in messages. The decoder checks only types, but a number out of range (NaN) would damage the
manager's state. Users choose the numbers in progress reports, so the manager drops an invalid report (`is_sound`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from stoker.contexts.inference.adapter import TokenCache
from stoker.contexts.recipe import ObjectRef, Recipe
from stoker.protocol import to_manager as say
from stoker.protocol.calls import PIECE_BYTES, WINDOW_PIECES, CallOptions, CallSpec, Features
from stoker.units import MOST_AT_ONCE, MOST_BYTES, MOST_NUMBER, MOST_S

MOST_DEFINED_BYTES = 32_000_000
"""Maximum bytes of a function or recipe, to fit into one frame (at most 64 MB)."""

Bounds = tuple[float, float]
Check = Callable[[Any], str]

_FEW: Bounds = (0, MOST_AT_ONCE)
_SIGNED_S: Bounds = (-MOST_S, MOST_S)
_OR_UNKNOWN: Bounds = (-1, MOST_NUMBER)
_ID: Bounds = (0, 1 << 62)


def describe_invalid_message(message: say.FromClient | say.FromPilot) -> str:
    """Describe the first invalid value of a message, or return ""."""
    check = _CHECKS.get(type(message))
    return check(message) if check is not None else ""


def _numbers(names: str, **bounds: Bounds) -> Check:
    """Return a function that checks fields. `bounds` gives the valid range of a field; otherwise the suffix of its name
    decides (`_s`, `_bytes`, or none of them).
    """

    def bounds_of(name: str) -> Bounds:
        return 0, MOST_S if name.endswith("_s") else MOST_BYTES if name.endswith("_bytes") else MOST_NUMBER

    fields = [(name, *bounds.get(name, bounds_of(name))) for name in names.split()]

    def check(message: Any) -> str:
        for name, least, most in fields:
            value = getattr(message, name)
            if value is not None and not least <= value <= most:
                return f"{name} is {value}: it must be {least:g} to {most:g}"
        return ""

    return check


def _first(found: Iterable[str]) -> str:
    return next(filter(None, found), "")


def _all(*checks: Check) -> Check:
    return lambda message: _first(check(message) for check in checks)


# ---- from clients

_needs = _numbers("devices memory_bytes device_memory_bytes disk_bytes load_limit_s", devices=(1, MOST_AT_ONCE))
_limits = _numbers("least most keep_alive_s", least=_FEW, most=_FEW)
_recipe = _all(
    lambda recipe: "" if recipe.key else "it has no key",
    _numbers("slots calls_per_library", slots=_FEW),
    lambda recipe: _needs(recipe.needs) or _limits(recipe.limits) or _describe_invalid_refs(recipe.objects),
)


def _describe_invalid_recipe(recipe: Recipe) -> str:
    wrong = _recipe(recipe)
    return f"recipe {recipe.name}: {wrong}" if wrong else ""


_size = _numbers("size_bytes")


def _describe_invalid_refs(refs: Iterable[ObjectRef]) -> str:
    return _first(f"object {ref.name}: {wrong}" for ref in refs if (wrong := _size(ref)))


_due = _numbers("due_in_s", due_in_s=_SIGNED_S)
_objective = _numbers(
    "deadline_at latency_s ttft_s tpot_s ttft_per_token_s ttft_most_s", deadline_at=_SIGNED_S
)  # fmt: skip
_shared = _numbers("priority limit_s", priority=(-MOST_NUMBER, MOST_NUMBER))


def _options(options: CallOptions) -> str:
    least, most = options.gang
    if not 1 <= least <= most <= MOST_AT_ONCE:
        return f"a gang of {least} to {most} libraries is impossible"
    if options.stream and most > 1:
        return "a gang cannot stream its result"
    return _shared(options) or _objective(options.objective)


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
    """True if `_features` finds no fault. Must be fast: a client may submit a million calls."""
    most = MOST_NUMBER
    return (
        0 <= features.items <= most
        and 0 <= features.input_length <= most
        and 0 <= features.expected_output <= most
        and 0 <= features.most_output <= most
        and 0.0 <= features.fixed_s <= MOST_S
        and 0.0 <= features.shared_s <= MOST_S
    )


_features = _numbers("items input_length expected_output most_output fixed_s shared_s")


def _describe_invalid_call_spec(spec: CallSpec) -> str:
    if spec.call < 0:
        return "a negative id"
    refs = [spec.payload] if isinstance(spec.payload, ObjectRef) else []
    return _describe_invalid_refs(refs) or (_features(spec.features) if spec.features is not None else "")


# ---- from pilots

_device = _numbers("memory_bytes process_bytes cores processes island", cores=_FEW, processes=_FEW, island=_FEW)
_loaded = _numbers(
    "library reserved_bytes memory_bytes device_bytes awake_bytes host_bytes slots", slots=_FEW
)  # fmt: skip


def _describe_invalid_hello(m: say.PilotHello) -> str:
    names = [device.device for device in m.devices]
    numbers = [facts.library for facts in m.libraries]
    if len(set(names)) < len(names):
        return f"it names a device twice: {', '.join(names)}"
    if len(set(numbers)) < len(numbers):
        return "it names a library twice"
    return _first((
        *(f"device {device.device}: {wrong}" for device in m.devices if (wrong := _device(device))),
        *map(_library, m.libraries), *map(_describe_invalid_recipe, m.recipes),
    ))  # fmt: skip


def _library(facts: say.LibraryFacts) -> str:
    if not all(0 <= call < 1 << 62 for call in facts.calls):
        return "a call's id is out of range"
    if len(set(facts.calls)) < len(facts.calls):
        return f"library {facts.library} names a call twice"
    return _loaded(facts) or _cache(facts.cache)


def _cache(cache: TokenCache | None) -> str:
    return "" if cache is None else (_fixed_cache if cache.is_fixed else _any_cache)(cache)


_any_cache = _numbers("weights_bytes token_bytes tokens", token_bytes=(1, MOST_BYTES))
_fixed_cache = _numbers("weights_bytes token_bytes tokens", token_bytes=(1, MOST_BYTES), tokens=(1, MOST_NUMBER))

_LOAD = (
    "running waiting steps decode_steps row_steps most_running prompt_tokens new_tokens evictions rows cache_tokens"
    " peak_tokens reused_tokens"
)
_load = _numbers(f"{_LOAD} busy_s", **dict.fromkeys(_LOAD.split(), (0, MOST_BYTES)))


def _ended(m: say.CallsEnded) -> str:
    most_s = MOST_S
    for end in m.ends:  # must be fast: this loop runs for every ended call
        if not 0.0 <= end.run_s <= most_s:
            return f"call {end.call}: run_s is {end.run_s}"
        if type(end.payload) is ObjectRef and end.payload.size_bytes < 0:
            return f"call {end.call}: the size of its result is below zero"
    return ""


def _describe_invalid_pieces(m: say.CallYielded) -> str:
    if len(m.items) > WINDOW_PIECES:
        return f"{len(m.items)} pieces: no call may send more than {WINDOW_PIECES}"
    if any(len(item) > PIECE_BYTES for item in m.items):
        return f"a piece has over {PIECE_BYTES} bytes"
    return _piece(m)


_piece = _numbers("first run", run=_ID)
_use = _numbers("memory_bytes device_bytes cpu_s")
_arrival = _numbers("size_bytes origin_bytes peer_bytes seconds", seconds=(0, MOST_S))

_CHECKS: dict[type, Check] = {
    say.ClientHello: _numbers("received acknowledged number", number=(-1, 1 << 20)),
    say.DefineRecipe: lambda m: _describe_invalid_recipe(m.recipe),
    say.Submit: lambda m: _due(m) or _options(m.options) or describe_invalid_calls(m.calls),
    say.MapReport: _numbers("map done kept total unsent", total=_OR_UNKNOWN, unsent=_OR_UNKNOWN),
    say.PiecesTaken: _numbers("upto run", run=_ID),
    say.Received: _numbers("total"),
    say.AskCalls: _numbers("limit"),
    say.BlockUpdate: _numbers("expected_in_s"),
    say.PilotHello: _all(_describe_invalid_hello, _numbers("ends_in_s acknowledged last_library sleeper_bytes")),
    say.LibraryReady: _all(
        _numbers("start_s load_s fetch_s resident_bytes peak_bytes device_bytes slots", slots=_FEW),
        lambda m: _cache(m.cache),
    ),
    say.CallsEnded: _ended,
    say.CallYielded: _describe_invalid_pieces,
    say.CallsReturned: _numbers("required_bytes over_s"),
    say.OfferAccepted: _numbers("reserve_bytes"),
    say.LibraryResized: _numbers("device_memory_bytes"),
    say.LibraryAsleep: _numbers("device_memory_bytes host_bytes sleep_s"),
    say.LibraryAwake: _numbers("device_memory_bytes wake_s"),
    say.LibraryBatch: lambda m: (
        _load(m.load) or ("" if m.times.is_sound() else "its step times contain an impossible number")
    ),
    say.Heartbeat: _all(_numbers("cache_bytes refused_frames"), lambda m: _first(map(_use, m.libraries))),
    say.WantObjects: lambda m: _describe_invalid_refs(m.objects),
    say.ObjectsHere: lambda m: _first(map(_arrival, m.arrivals)),
    say.SnapshotHere: _all(_numbers("made_s"), lambda m: _describe_invalid_refs((m.object,))),
    say.WalltimeUpdate: _numbers("ends_in_s"),
}


def is_sound(done: float, total: float) -> bool:
    return 0.0 <= done <= MOST_S and 0.0 <= total <= MOST_S
