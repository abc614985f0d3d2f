"""`stoker status`: the session in a dozen lines. `render` is pure: a Status in, lines out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import click

from stoker.manager.cli import console
from stoker.manager.cli.ask import Observer, SessionEndedError
from stoker.manager.cli.sessions import find, status_of
from stoker.manager.protocol.to_client import ContextStatus, DeviceStatus, LibraryStatus, PilotStatus, Status
from stoker.units import show_bytes, show_seconds

_BAR = 8
_WATCH_EVERY_S = 1.0
_WATCH_EVERY_ON_A_PIPE_S = 10.0


@click.command()
@click.argument("session", default="")
@click.option("--json", "as_json", is_flag=True, help="One JSON document, for programs.")
@click.option("--watch", is_flag=True, help="Keep it on the screen until Ctrl-C.")
def status(session: str, as_json: bool, watch: bool) -> None:
    """Pilots, devices, contexts, queues and rates of a session (the newest unless SESSION names one)."""
    if watch and as_json:
        raise click.UsageError("--watch is for people and --json for programs: ask again instead")
    if watch:
        _watch(session)
        return
    folder, answer = status_of(session)
    if as_json:
        console.json({"over": answer.over, "folder": str(folder.path), "status": answer.status})
        return
    if answer.over:
        console.line(f"{answer.over}; this is how it ended")
    console.lines(render(answer.status, over=bool(answer.over)))


def _watch(session: str) -> None:
    every_s = _WATCH_EVERY_S if console.is_terminal() else _WATCH_EVERY_ON_A_PIPE_S
    try:
        with Observer(find(session)) as observer, console.redrawn() as place:
            while True:
                place.show(render(observer.status()))
                time.sleep(every_s)
    except SessionEndedError as ended:
        console.line(str(ended))


def render(status: Status, *, over: bool = False) -> list[str]:
    """The lines of `stoker status`."""
    out = [_headline(status, over=over), ""]
    out += _table(
        [
            ("pilots", _pilots(status, over=over)),
            *(("contexts" if not n else "", text) for n, text in enumerate(_contexts(status.contexts))),
            *((("losses", _losses(status)),) if _losses(status) else ()),
            *((("refused", _refused(status)),) if status.refused else ()),
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
    by_state: dict[str, int] = {}
    for pilot in status.pilots:
        by_state[pilot.state] = by_state.get(pilot.state, 0) + 1
    parts = [f"{count} {state}" for state, count in sorted(by_state.items())] or ["none"]
    joined = {pilot.block for pilot in status.pilots}
    parts += [f"block {block}: {what}" for block, what in status.blocks.items() if block not in joined]
    return " · ".join(parts)


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
                pilot.state if first and pilot.state != "here" and not over else "",
            )
        )
    return rows


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


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    used = [at for at, width in enumerate(widths) if width]
    return ["  " + "  ".join(row[at].ljust(widths[at]) for at in used).rstrip() for row in rows]
