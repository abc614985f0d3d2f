"""Check the numbers in messages. The decoder checks only types, but a number out of range, such as NaN, would damage
the manager's state. The numbers in progress reports come from users' code, so the manager drops an invalid report.
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
"""Maximum bytes of a function or recipe, so that it fits into one frame (at most 64 MB)."""

Bounds = tuple[float, float]
Check = Callable[[Any], str]

_COUNT: Bounds = (0, MOST_AT_ONCE)
_SIGNED_S: Bounds = (-MOST_S, MOST_S)
_OR_UNKNOWN: Bounds = (-1, MOST_NUMBER)
_ID: Bounds = (0, 1 << 62)


def describe_invalid_message(message: say.FromClient | say.FromPilot) -> str:
    """Describe the first invalid value of a message, or return ""."""
    check = _CHECKS.get(type(message))
    return check(message) if check is not None else ""


def _make_range_check(names: str, **bounds: Bounds) -> Check:
    """Return a function that checks the fields `names`. `bounds`: valid range of a field. For other fields, the end of
    the name (`_s`, `_bytes`, or neither) decides the valid range.
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


def _first_nonempty(found: Iterable[str]) -> str:
    return next(filter(None, found), "")


def _combine_checks(*checks: Check) -> Check:
    return lambda message: _first_nonempty(check(message) for check in checks)


# ---- from clients

_check_needs = _make_range_check(
    "devices memory_bytes device_memory_bytes disk_bytes load_limit_s", devices=(1, MOST_AT_ONCE)
)
_check_limits = _make_range_check("least most keep_alive_s", least=_COUNT, most=_COUNT)
_check_recipe = _combine_checks(
    lambda recipe: "" if recipe.key else "it has no key",
    _make_range_check("slots calls_per_library", slots=_COUNT),
    lambda recipe: _check_needs(recipe.needs) or _check_limits(recipe.limits) or _describe_invalid_refs(recipe.objects),
)


def _describe_invalid_recipe(recipe: Recipe) -> str:
    wrong = _check_recipe(recipe)
    return f"recipe {recipe.name}: {wrong}" if wrong else ""


_check_size = _make_range_check("size_bytes")


def _describe_invalid_refs(refs: Iterable[ObjectRef]) -> str:
    return _first_nonempty(f"object {ref.name}: {wrong}" for ref in refs if (wrong := _check_size(ref)))


_check_due_time = _make_range_check("due_in_s", due_in_s=_SIGNED_S)
_check_objective = _make_range_check(
    "deadline_at latency_s ttft_s tpot_s ttft_per_token_s ttft_most_s", deadline_at=_SIGNED_S
)  # fmt: skip
_check_priority_and_limit = _make_range_check("priority limit_s", priority=(-MOST_NUMBER, MOST_NUMBER))


def _describe_invalid_options(options: CallOptions) -> str:
    least, most = options.gang
    if not 1 <= least <= most <= MOST_AT_ONCE:
        return f"a gang of {least} to {most} libraries is impossible"
    if options.stream and most > 1:
        return "a gang cannot stream its result"
    return _check_priority_and_limit(options) or _check_objective(options.objective)


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
    """True if `_check_features` finds no fault. The check must be fast: a client may submit a million calls."""
    most = MOST_NUMBER
    return (
        0 <= features.items <= most
        and 0 <= features.input_length <= most
        and 0 <= features.expected_output <= most
        and 0 <= features.most_output <= most
        and 0.0 <= features.fixed_s <= MOST_S
        and 0.0 <= features.shared_s <= MOST_S
    )


_check_features = _make_range_check("items input_length expected_output most_output fixed_s shared_s")


def _describe_invalid_call_spec(spec: CallSpec) -> str:
    if spec.call < 0:
        return "a negative id"
    refs = [spec.payload] if isinstance(spec.payload, ObjectRef) else []
    return _describe_invalid_refs(refs) or (_check_features(spec.features) if spec.features is not None else "")


# ---- from pilots

_check_device = _make_range_check(
    "memory_bytes process_bytes cores processes island", cores=_COUNT, processes=_COUNT, island=_COUNT
)
_check_library_numbers = _make_range_check(
    "library reserved_bytes memory_bytes device_bytes awake_bytes host_bytes slots", slots=_COUNT
)  # fmt: skip


def _describe_invalid_hello(m: say.PilotHello) -> str:
    names = [device.device for device in m.devices]
    numbers = [facts.library for facts in m.libraries]
    if len(set(names)) < len(names):
        return f"it names a device twice: {', '.join(names)}"
    if len(set(numbers)) < len(numbers):
        return "it names a library twice"
    return _first_nonempty((
        *(f"device {device.device}: {wrong}" for device in m.devices if (wrong := _check_device(device))),
        *map(_describe_invalid_library, m.libraries), *map(_describe_invalid_recipe, m.recipes),
    ))  # fmt: skip


def _describe_invalid_library(facts: say.LibraryFacts) -> str:
    if not all(0 <= call < 1 << 62 for call in facts.calls):
        return "a call's id is out of range"
    if len(set(facts.calls)) < len(facts.calls):
        return f"library {facts.library} names a call twice"
    return _check_library_numbers(facts) or _describe_invalid_cache(facts.cache)


def _describe_invalid_cache(cache: TokenCache | None) -> str:
    return "" if cache is None else (_check_fixed_cache if cache.is_fixed else _check_cache)(cache)


_check_cache = _make_range_check("weights_bytes token_bytes tokens", token_bytes=(1, MOST_BYTES))
_check_fixed_cache = _make_range_check(
    "weights_bytes token_bytes tokens", token_bytes=(1, MOST_BYTES), tokens=(1, MOST_NUMBER)
)

_ENGINE_LOAD_FIELDS = (
    "running waiting steps decode_steps row_steps most_running prompt_tokens new_tokens evictions rows cache_tokens"
    " peak_tokens reused_tokens"
)
_check_engine_load = _make_range_check(
    f"{_ENGINE_LOAD_FIELDS} busy_s", **dict.fromkeys(_ENGINE_LOAD_FIELDS.split(), (0, MOST_BYTES))
)


def _describe_invalid_ends(m: say.CallsEnded) -> str:
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
    return _check_piece(m)


_check_piece = _make_range_check("first run", run=_ID)
_check_library_use = _make_range_check("memory_bytes device_bytes cpu_s")
_check_arrival = _make_range_check("size_bytes origin_bytes peer_bytes seconds", seconds=(0, MOST_S))

_CHECKS: dict[type, Check] = {
    say.ClientHello: _make_range_check("received acknowledged number", number=(-1, 1 << 20)),
    say.DefineRecipe: lambda m: _describe_invalid_recipe(m.recipe),
    say.Submit: lambda m: _check_due_time(m) or _describe_invalid_options(m.options) or describe_invalid_calls(m.calls),
    say.MapReport: _make_range_check("map done kept total unsent", total=_OR_UNKNOWN, unsent=_OR_UNKNOWN),
    say.PiecesTaken: _make_range_check("upto run", run=_ID),
    say.Received: _make_range_check("total"),
    say.AskCalls: _make_range_check("limit"),
    say.BlockUpdate: _make_range_check("expected_in_s"),
    say.PilotHello: _combine_checks(
        _describe_invalid_hello, _make_range_check("ends_in_s acknowledged last_library sleeper_bytes")
    ),
    say.LibraryReady: _combine_checks(
        _make_range_check("start_s load_s fetch_s resident_bytes peak_bytes device_bytes slots", slots=_COUNT),
        lambda m: _describe_invalid_cache(m.cache),
    ),
    say.CallsEnded: _describe_invalid_ends,
    say.CallYielded: _describe_invalid_pieces,
    say.CallsReturned: _make_range_check("required_bytes over_s"),
    say.OfferAccepted: _make_range_check("reserve_bytes"),
    say.LibraryResized: _make_range_check("device_memory_bytes"),
    say.LibraryAsleep: _make_range_check("device_memory_bytes host_bytes sleep_s"),
    say.LibraryAwake: _make_range_check("device_memory_bytes wake_s"),
    say.LibraryEngineReport: lambda m: (
        _check_engine_load(m.load)
        or ("" if m.times.has_plausible_numbers() else "its step times contain an impossible number")
    ),
    say.Heartbeat: _combine_checks(
        _make_range_check("cache_bytes refused_frames"), lambda m: _first_nonempty(map(_check_library_use, m.libraries))
    ),
    say.WantObjects: lambda m: _describe_invalid_refs(m.objects),
    say.ObjectsCached: lambda m: _first_nonempty(map(_check_arrival, m.arrivals)),
    say.SnapshotWritten: _combine_checks(_make_range_check("made_s"), lambda m: _describe_invalid_refs((m.object,))),
    say.WalltimeUpdate: _make_range_check("ends_in_s"),
}


def is_valid_progress(done: float, total: float) -> bool:
    return 0.0 <= done <= MOST_S and 0.0 <= total <= MOST_S
