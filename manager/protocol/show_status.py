"""A session's status as lines for people: what `stoker status` prints, and `print(session.status())`. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime

from stoker.manager.protocol import show_blocks
from stoker.manager.protocol.to_client import (
    ContextStatus,
    DeviceStatus,
    LibraryStatus,
    ObjectStatus,
    PilotStatus,
    Status,
)
from stoker.units import show_bytes, show_seconds

_BAR = 8
_SHOWN_STEM = 13
_SHOWN_NOTICES = 5


def render(status: Status, *, over: bool = False, policy: str = "") -> list[str]:
    """The lines of `stoker status`. `policy`: who decides, where it is not the default."""
    out = [_headline(status, over=over), ""]
    out += _table(
        [
            ("pilots", _pilots(status, over=over)),
            *_rows("policy", [policy] if policy else []),
            *_rows("contexts", _contexts(status.contexts)),
            *_rows("objects", _objects(status.objects)),
            *_rows("losses", [_losses(status)] if _losses(status) else []),
            *_rows("refused", [_refused(status)] if status.refused else []),
            *_rows("notices", _notices(status)),
            *_rows("trouble", [] if over else _troubles(status)),
        ]
    )
    waits = [(c.name, c.waits_for) for c in status.contexts if c.queued and c.waits_for]
    if waits and not over:
        out += ["", *(f"  {name} waits: {why}" for name, why in waits)]
    devices = [row for pilot in status.pilots for row in _devices(pilot, status, over=over)]
    if devices:
        out += ["", *_columns(devices)]
    return out


def _headline(status: Status, *, over: bool) -> str:
    parts = [f"session {status.session}", f"{'was up' if over else 'up'} {show_seconds(status.uptime_s)}"]
    calls = [f"{status.done:,} calls done", f"{status.running:,} running", f"{status.queued:,} queued"]
    without = {"failed": status.failed, "cancelled": status.cancelled}
    if any(without.values()):
        calls[0] += " (" + ", ".join(f"{number:,} {how}" for how, number in without.items() if number) + ")"
    parts.append(", ".join(calls))
    if status.rate and not over:
        parts.append(f"{status.rate:.1f} calls/s" if status.rate < 100 else f"{status.rate:,.0f} calls/s")
    if status.left_s and not over:
        parts.append(f"done in about {show_seconds(status.left_s)}")
    return " · ".join(parts)


def _pilots(status: Status, *, over: bool) -> str:
    if over:
        return f"{len(status.pilots)} at the end"
    by_state: dict[str, list[PilotStatus]] = {}
    for pilot in status.pilots:
        by_state.setdefault(pilot.state, []).append(pilot)
    parts = [f"{len(pilots)} {state}{_kinds(pilots)}" for state, pilots in sorted(by_state.items())]
    joined = {pilot.block for pilot in status.pilots}
    parts += [f"block {block}: {what}" for block, what in status.blocks.items() if block not in joined]
    parts += show_blocks.coming(status.jobs)
    if status.ended_blocks:
        parts.append(", ".join(show_blocks.ended(status.ended_blocks)))
    return " · ".join(parts or ["none"])


def _kinds(pilots: Sequence[PilotStatus]) -> str:
    """` (11 a10, 6 titanx)`: what the pilots compute on, where it is not their cores."""
    kinds = Counter(device.kind for pilot in pilots for device in pilot.devices if device.kind != "cpu")
    return f" ({', '.join(f'{count} {kind}' for kind, count in kinds.most_common())})" if kinds else ""


def _objects(objects: Sequence[ObjectStatus]) -> list[str]:
    """Objects that have travelled or do, and what was read of them where."""
    names = [_short(each.name) for each in objects]
    width = max(map(len, names), default=0)
    return ["   ".join([name.ljust(width), *_travels(each)]) for name, each in zip(names, objects, strict=True)]


def _short(name: str) -> str:
    """An object's name, without most of its digest: `file-f65dedc2….gguf`."""
    stem, dot, suffix = name.partition(".")
    return f"{stem[:_SHOWN_STEM]}…{dot}{suffix}" if len(stem) > _SHOWN_STEM + 8 else name


def _travels(each: ObjectStatus) -> Iterator[str]:
    yield show_bytes(each.size_bytes)
    yield f"on {each.holders} pilot{'s' * (each.holders != 1)}" + (f", {each.fetching} get it" if each.fetching else "")
    if each.origin_bytes or each.peer_bytes:
        yield f"{show_bytes(each.origin_bytes)} read from its source, {show_bytes(each.peer_bytes)} from peers"


def _notices(status: Status) -> list[str]:
    """What has happened to the session itself, the latest first."""
    shown = list(reversed(status.notices))[:_SHOWN_NOTICES]
    return [f"{datetime.fromtimestamp(line.at):%Y-%m-%d %H:%M} {line.text}" for line in shown]


def _troubles(status: Status) -> list[str]:
    """What is wrong just now, a line each."""
    lines = [f"{source}: {text}" for source, text in status.trouble.items()]
    lines += [f"{_short(each.name)}: {each.trouble}" for each in status.objects if each.trouble]
    return lines + [
        f"{pilot.pilot} {device.device} is quarantined: {device.fault}"
        for pilot in status.pilots
        for device in pilot.devices
        if device.fault
    ]


def _contexts(contexts: Sequence[ContextStatus]) -> list[str]:
    width = max((len(context.name) for context in contexts), default=0)
    return ["   ".join([context.name.ljust(width), *_facts(context)]) for context in contexts]


def _facts(context: ContextStatus) -> Iterator[str]:
    yield f"{context.hot} hot" + (f", {context.loading} loading" if context.loading else "")
    if context.memory_bytes:
        yield f"{show_bytes(context.memory_bytes)} each"
    if context.loads:
        yield f"{context.loads} load{'s' * (context.loads != 1)} of {show_seconds(context.load_s)}"
        used = round(context.ended / context.loads)
        yield "used once a load" if used == 1 else f"used {used:,} times a load"
    if context.queued:
        yield f"{context.queued:,} queued"
    if context.last_failure:
        yield f"could not be loaded: {context.last_failure}"


def _losses(status: Status) -> str:
    if not status.lost_pilots and not status.rerun_calls:
        return ""
    pilots = f"{status.lost_pilots} pilot{'s' * (status.lost_pilots != 1)}"
    if status.losses:
        pilots += f" ({', '.join(show_blocks.ended(status.losses))})"
    return f"{pilots}, {status.rerun_calls} call{'s' * (status.rerun_calls != 1)} run again, 0 results lost"


def _refused(status: Status) -> str:
    return ", ".join(f"{count} {what}" for what, count in sorted(status.refused.items()))


def _devices(pilot: PilotStatus, status: Status, *, over: bool) -> list[Sequence[str]]:
    libraries = {library.library: library for library in status.libraries}
    rows: list[Sequence[str]] = []
    for number, device in enumerate(pilot.devices):
        here = [libraries[name] for name in device.libraries if name in libraries]
        first = number == 0
        rows.append(
            (
                pilot.pilot if first else "",
                device.device if device.kind == "cpu" else f"{device.device} {device.kind}",
                " ".join(_library(library) for library in here) or "-",
                _memory(device),
                (f"walltime {show_seconds(pilot.ends_in_s)}" if pilot.ends_in_s else "") if first else "",
                f"{pilot.rate:.1f} calls/s" if first and pilot.ended else "",
                _standing(pilot, device, first=first) if not over else "",
            )
        )
    return rows


def _standing(pilot: PilotStatus, device: DeviceStatus, *, first: bool) -> str:
    """What is out of the ordinary with a device, or with its pilot (said beside the first)."""
    if device.fault:
        return "quarantined"
    if not first or pilot.state == "here":
        return ""
    return f"{pilot.state}: {pilot.draining}" if pilot.draining else pilot.state


def _library(library: LibraryStatus) -> str:
    if library.state == "ready":
        return library.recipe
    return f"{library.recipe} ({library.phase or library.state})"


def _memory(device: DeviceStatus) -> str:
    share = device.promised_bytes / device.memory_bytes if device.memory_bytes else 0.0
    full = min(_BAR, round(share * _BAR))
    used, total = show_bytes(device.promised_bytes), show_bytes(device.memory_bytes)
    return f"{'▇' * full}{'▁' * (_BAR - full)} {used if device.promised_bytes else '0'} of {total}"


def _table(rows: Sequence[tuple[str, str]]) -> list[str]:
    return [f"  {head:<9} {text}" for head, text in rows]


def _rows(head: str, texts: Sequence[str]) -> list[tuple[str, str]]:
    """Rows of the table, of which the first has the head."""
    return [(head if number == 0 else "", text) for number, text in enumerate(texts)]


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    used = [at for at, width in enumerate(widths) if width]
    return ["  " + "  ".join(row[at].ljust(widths[at]) for at in used).rstrip() for row in rows]
