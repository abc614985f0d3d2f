"""The state of a session (`stoker status`) and explanations (`stoker explain`) as text."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec

from stoker.contexts import payload_layout
from stoker.contexts.recipe import BARE
from stoker.protocol.blocks import BlockPhase, BlockStatus, NodeRecord
from stoker.protocol.ids import format_block_name
from stoker.protocol.pace import format_rate
from stoker.protocol.session import GatewayNote, ServedModelFigures, WorkerFacts
from stoker.protocol.status import (
    ContextStatus,
    DeviceStatus,
    LibraryStatus,
    MapStatus,
    ObjectStatus,
    PilotStatus,
    SessionFacts,
    StoryFacts,
)
from stoker.units import show_about, show_bytes, show_line, show_seconds

# ---- blocks


_SHOWN_JOBS = 6
SILENT_S = 600.0
"""Seconds after which a running job without a pilot will probably not start a pilot."""
READ_JOB = "read the job output in the session folder's submit/"


def describe_blocks_without_pilot(jobs: Sequence[BlockStatus]) -> list[str]:
    """Return a text for each job phase: `3 queued (Priority; the first in about 11 min)`."""
    texts = []
    leaving = [job for job in jobs if job.leaving and not job.pilots and not job.probes]
    jobs = [job for job in jobs if not job.leaving and not job.probes]
    if asked := sum(job.phase == BlockPhase.ASKED.value for job in jobs):
        texts.append(f"{asked} to be submitted")
    if pending := pending_blocks(jobs):
        first = f"the first in about {show_about(soonest_start_s(pending))}" if soonest_start_s(pending) else ""
        inside = "; ".join(filter(None, (format_reasons(pending), first)))
        texts.append(f"{len(pending)} queued" + (f" ({inside})" if inside else ""))
    running = [job for job in jobs if job.phase == BlockPhase.RUNNING.value and not job.pilots]
    if suspended := sum(is_suspended(job.reason) for job in running):
        texts.append(f"{suspended} suspended by the batch system")
    working = [job for job in running if not is_suspended(job.reason)]
    starting = [job for job in working if not job.emptied_s]
    emptied = [job for job in working if job.emptied_s]
    if starting:
        longest_s = max(job.since_s for job in starting)
        advice = f": {READ_JOB}" if longest_s > SILENT_S else ""
        runs = "its job runs for" if len(starting) == 1 else "their jobs run for up to"
        texts.append(f"{len(starting)} starting ({runs} {show_seconds(longest_s)}, no pilot yet{advice})")
    if emptied:
        longest = show_seconds(max(job.emptied_s for job in emptied))
        if len(emptied) == 1:
            left = f"the pilot left {longest} ago; the batch system says that the job runs"
        else:
            left = f"the pilots left up to {longest} ago; the batch system says that the jobs run"
        texts.append(f"{len(emptied)} without a pilot ({left})")
    if leaving:
        texts.append(f"{len(leaving)} being cancelled")
    return texts


def is_suspended(reason: str) -> bool:
    return reason.startswith("suspended")


def pending_blocks(jobs: Iterable[BlockStatus]) -> list[BlockStatus]:
    return [job for job in jobs if job.phase == BlockPhase.PENDING.value]


def format_reasons(jobs: Sequence[BlockStatus]) -> str:
    counted = Counter(job.reason for job in jobs if job.reason)
    if len(counted) == 1 and counted.total() == len(jobs):
        return next(iter(counted))
    return ", ".join(f"{count} {reason}" for reason, count in counted.most_common())


def soonest_start_s(jobs: Iterable[BlockStatus]) -> float:
    return min((job.expected_in_s for job in jobs if job.expected_in_s > 0), default=0.0)


def format_start_time(seconds: float, now: datetime.datetime) -> str:
    """Return `10:42 (in 11 min)`, with a date unless the start is today."""
    at = now + datetime.timedelta(seconds=seconds)
    clock = f"{at:%H:%M}" if at.date() == now.date() else f"{at:%Y-%m-%d %H:%M}"
    return f"{clock} (in {show_seconds(seconds)})"


def format_counts_by_reason(counts: Mapping[str, int]) -> list[str]:
    return [f"{count} {how}" for how, count in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))]


def format_job_ids(jobs: Iterable[str]) -> str:
    """Return job ids as ranges: `88123-88130, 88140`."""
    ids = list(dict.fromkeys(jobs))
    if not all(id.isdecimal() for id in ids):
        return ", ".join(ids)
    ranges: list[list[int]] = []
    for number in sorted(map(int, ids)):
        if ranges and ranges[-1][1] + 1 == number:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    more = f", and {len(texts) - _SHOWN_JOBS} more" if len(texts) > _SHOWN_JOBS else ""
    return ", ".join(texts[:_SHOWN_JOBS]) + more


# ---- excluded nodes


def format_excluded_nodes(status: SessionFacts) -> list[str]:
    """Return one line per excluded node, with the state of its probe."""
    probes = {(job.source, job.probes): job for job in status.jobs if job.probes}
    lines = []
    for record in status.excluded_nodes:
        job = probes.get((record.source, record.node))
        name = f" (job {job.job})" if job is not None and job.job else ""
        lines.append(describe_excluded_node(record) + (f"; a probe is {job.phase}{name}" if job is not None else ""))
    return lines


def describe_excluded_node(record: NodeRecord) -> str:
    """Return `n2 of gpu since 2026-11-29 14:02: hung; 1 probe used the node for 9 s, the last at 2026-11-29 15:02`."""
    text = f"{record.node} of {record.source} since {_format_minute(record.since)}: {record.why}"
    if record.probed_at <= record.since:
        return f"{text}; not probed yet"
    if record.probes:
        many = "1 probe" if record.probes == 1 else f"{record.probes} probes"
        text += f"; {many} used the node for {show_seconds(record.probe_s)}"
    return ": ".join(filter(None, (f"{text}, the last at {_format_minute(record.probed_at)}", record.said)))


def _format_minute(at: float) -> str:
    return f"{datetime.datetime.fromtimestamp(at):%Y-%m-%d %H:%M}"


# ---- models of gateways


def format_gateway_rows(notes: Iterable[GatewayNote], status: SessionFacts, *, now: float) -> list[str]:
    """Return table rows for each gateway: its models that are in use or have errors, and its address."""
    rows: list[str] = []
    for note in notes:
        if silent_s := note.silent_s(now):
            rows.append(
                f"the gateway at {note.address} has not answered for {show_seconds(silent_s)}: run `stoker serve`"
                " with the same files to serve again at the same address"
            )
            continue
        rows += _format_model_rows(note.models, status)
        workers = f" by {_describe_workers(note.workers)}" if note.workers is not None else ""
        rows.append(f"served at {note.address}{workers} (pid {note.pid} on {note.host})")
    return rows


def _describe_workers(facts: WorkerFacts) -> str:
    running = f"{facts.wanted}" if facts.running == facts.wanted else f"{facts.running} of {facts.wanted}"
    restarts = f", {facts.restarts} restart{'s' * (facts.restarts != 1)}" if facts.restarts else ""
    return f"{running} workers{restarts}"


def _format_model_rows(models: Sequence[ServedModelFigures], status: SessionFacts) -> Iterator[str]:
    contexts = {context.key: context for context in status.contexts}
    shown = [model for model in models if model.trouble or _is_model_in_use(model, contexts.get(model.key))]
    yield from _align_rows([
        (model.name, _describe_served_model(model, models, contexts.get(model.key), status)) for model in shown
    ])  # fmt: skip
    if cold := len(models) - len(shown):
        yield f"{cold} other{'s' * (cold != 1)} cold" if shown else f"{cold} model{'s' * (cold != 1)}, none hot yet"


def _is_model_in_use(model: ServedModelFigures, context: ContextStatus | None) -> bool:
    used = context is not None and (context.hot or context.loading or context.asleep or context.last_failure)
    return bool(model.running or used)


def _describe_served_model(
    model: ServedModelFigures, all_models: Sequence[ServedModelFigures], context: ContextStatus | None,
    status: SessionFacts,
) -> Iterator[str]:  # fmt: skip
    if model.trouble:
        yield f"cannot be used: {show_line(model.trouble)}"
        return
    yield _format_library_counts(context) if context else "0 hot"
    yield f"{model.running} running"
    if model.tokens_per_s:
        yield f"{model.tokens_per_s:,.0f} tokens/s"
    if model.ttft_s is not None:
        objective = f" (objective {show_seconds(model.ttft_objective_s)})" if model.ttft_objective_s else ""
        ttft = f"{model.ttft_s:.2f} s" if model.ttft_s < 10 else show_seconds(model.ttft_s)
        yield f"TTFT {ttft}{objective}"
    if model.met is not None:
        yield f"{100 * model.met:.1f} % met"
    if model.refused:
        yield f"{model.refused:,} refused"
    if context and not context.hot and context.last_failure:
        yield f"could not be loaded: {context.last_failure}"
    yield from _describe_shared_devices(model, all_models, status.libraries)


def _describe_shared_devices(
    model: ServedModelFigures, all_models: Sequence[ServedModelFigures], libraries: Sequence[LibraryStatus]
) -> Iterator[str]:
    """Yield a text for each pilot where `model` shares devices with other models."""
    names = {other.recipe: other.name for other in all_models if other.recipe and other.recipe != model.recipe}
    mine = {
        (library.pilot, device) for library in libraries if library.recipe == model.recipe for device in library.devices
    }
    beside: dict[str, dict[str, None]] = {}
    for library in libraries:
        if library.recipe in names and any((library.pilot, device) in mine for device in library.devices):
            beside.setdefault(library.pilot, {})[names[library.recipe]] = None
    for pilot, others in beside.items():
        yield f"shares {pilot} with {', '.join(others)}"


# ---- stories for `stoker explain`


S = TypeVar("S", bound=StoryFacts)


def with_decoded_arguments(story: S) -> S:
    if not story.payload:
        return story
    return msgspec.structs.replace(story, payload=b"", arguments=payload_layout.show_payload(story.payload))


def format_explanation_lines(story: StoryFacts, *, today: datetime.date | None = None) -> list[str]:
    """Return the lines of `stoker explain`, with a date line before each day except `today`."""
    story = with_decoded_arguments(story)
    kind = "call " if story.subject.startswith("c-") else "library " if story.subject.startswith("lib-") else ""
    function, gap, rest_of_it = story.headline.partition("  ")
    headline = f"{function}{story.arguments}{gap}{rest_of_it}" if story.arguments else story.headline
    out, day = [f"{kind}{story.subject}  {headline}"], today
    for line in story.lines:
        when = datetime.datetime.fromtimestamp(line.at)
        if when.date() != day:
            out.append(f"  {when:%Y-%m-%d}")
        day = when.date()
        first, *rest = line.text.split("\n")
        out.append(f"  {when:%H:%M:%S}  {first}")
        out += [f"            {more}" for more in rest]
    return out


# ---- status for `stoker status`


_BAR_CHARACTERS = 8
_SHOWN_STEM = 13
_SHOWN_NOTICES = 5


def render(status: SessionFacts, *, has_ended: bool = False, policy: str = "", served: Sequence[str] = ()) -> list[str]:
    """Return the lines of `stoker status`. `policy`: "" for the default policy. `served`: rows about gateways."""
    out = [_format_headline(status, has_ended=has_ended), ""]
    for head, texts in (
        ("pilots", [_describe_pilots(status, has_ended=has_ended)]),
        ("policy", [policy] if policy else []),
        ("contexts", _align_rows([(context.title, _describe_context(context)) for context in status.contexts])),
        ("maps", [] if has_ended else [_describe_map(each) for each in status.maps]),
        ("models", served),
        (
            "objects",
            _align_rows(
                [(_shorten_object_name(each.name), _describe_object_transfers(each)) for each in status.objects]
            ),
        ),
        ("excluded", [] if has_ended else format_excluded_nodes(status)),
        ("losses", _describe_losses(status)),
        ("notices", [f"{_format_minute(line.at)} {line.text}" for line in status.notices[::-1][:_SHOWN_NOTICES]]),
        ("trouble", [] if has_ended else _format_trouble_lines(status)),
    ):
        out += [f"  {'' if number else head:<9} {text}" for number, text in enumerate(texts)]
    waiting = [context for context in status.contexts if context.queued and context.waits_for]
    if waiting and not has_ended:
        out += ["", *(f"  {_explain_wait(context, with_forecast=len(waiting) > 1)}" for context in waiting)]
    if devices := [row for pilot in status.pilots for row in _make_pilot_rows(pilot, status, has_ended=has_ended)]:
        out += ["", *_align_columns(devices)]
    return out


def _format_headline(status: SessionFacts, *, has_ended: bool) -> str:
    parts = [f"session {status.session}", f"{'was up' if has_ended else 'up'} {show_seconds(status.uptime_s)}"]
    parts.append(format_call_counts(status))
    if status.rate and not has_ended:
        parts.append(format_rate(status.rate, "calls"))
    if not has_ended and (forecast := format_forecast(status)):
        parts.append(forecast)
    return " · ".join(parts)


def format_call_counts(status: SessionFacts) -> str:
    """Return `6 calls done, 2 failed, 3 cancelled, 1 running, 5 queued`."""
    calls = [f"{status.done:,} call{'s' * (status.done != 1)} done"]
    without = {"failed": status.failed, "cancelled": status.cancelled}
    calls += [f"{number:,} {how}" for how, number in without.items() if number]
    return ", ".join([*calls, f"{status.running:,} running", f"{status.queued:,} queued"])


def format_forecast(status: SessionFacts) -> str:
    """Return `done in about 22 min`, or `done about 22 min after the first pilot`; without a forecast, an empty
    string.
    """
    open_calls = status.running + status.queued
    if not open_calls:
        return ""
    left = show_about(status.left_s)
    if any(pilot.state in ("here", "cut") for pilot in status.pilots):
        if 0 < status.left_s < 1:
            return "done in less than 1 s"
        return f"done in about {left}" if status.left_s else ""
    expected = f"expected in {show_about(status.pilot_in_s)}" if status.pilot_in_s else ""
    if status.left_s:
        return ", ".join(filter(None, (f"done about {left} after the first pilot", expected)))
    return f"first pilot {expected}" if expected else ""


def _explain_wait(context: ContextStatus, *, with_forecast: bool) -> str:
    """Return why calls of a context wait. `with_forecast`: True to add when these calls will be done."""
    done = f"; done in about {show_about(context.left_s)}" if with_forecast and context.left_s and context.hot else ""
    which = "calls without a context" if context.key == BARE.key else f"calls of {context.title}"
    return f"{which} wait: {context.waits_for}{done}"


def _describe_pilots(status: SessionFacts, *, has_ended: bool) -> str:
    if has_ended:
        return f"{len(status.pilots)} at the end"
    by_state: dict[str, list[PilotStatus]] = {}
    for pilot in status.pilots:
        by_state.setdefault(pilot.state, []).append(pilot)
    parts = [f"{len(pilots)} {state}{_count_device_kinds(pilots)}" for state, pilots in sorted(by_state.items())]
    joined = {pilot.block for pilot in status.pilots}
    parts += [
        f"block {format_block_name(block)}: {what}" for block, what in status.blocks.items() if block not in joined
    ]
    parts += describe_blocks_without_pilot(status.jobs)
    if status.ended_blocks:
        parts.append(", ".join(format_counts_by_reason(status.ended_blocks)))
    return " · ".join(parts or ["none"])


def _count_device_kinds(pilots: Sequence[PilotStatus]) -> str:
    mixed = (pilot for pilot in pilots if any(device.kind != "cpu" for device in pilot.devices))
    kinds = Counter(device.kind for pilot in mixed for device in pilot.devices)
    return f" ({', '.join(f'{count} {kind}' for kind, count in kinds.most_common())})" if kinds else ""


def _shorten_object_name(name: str) -> str:
    stem, dot, suffix = name.partition(".")
    return f"{stem[:_SHOWN_STEM]}…{dot}{suffix}" if len(stem) > _SHOWN_STEM + 8 else name


def _describe_object_transfers(each: ObjectStatus) -> Iterator[str]:
    yield show_bytes(each.size_bytes)
    fetching = f", {each.fetching} fetch it" if each.fetching else ""
    yield f"on {each.holders} pilot{'s' * (each.holders != 1)}{fetching}"
    if each.origin_bytes or each.peer_bytes:
        yield f"{show_bytes(each.origin_bytes)} read from its source, {show_bytes(each.peer_bytes)} from peers"


def _format_trouble_lines(status: SessionFacts) -> list[str]:
    lines = [f"{source}: {text}" for source, text in status.trouble.items()]
    lines += [f"{_shorten_object_name(each.name)}: {each.trouble}" for each in status.objects if each.trouble]
    for pilot in status.pilots:
        by_fault: dict[str, list[str]] = {}
        for device in pilot.devices:
            if device.fault:
                by_fault.setdefault(device.fault, []).append(device.device)
        for fault, (first, *rest) in by_fault.items():
            which = f"{first} … {rest[-1]} ({len(rest) + 1} devices) are" if rest else f"{first} is"
            lines.append(f"{pilot.pilot} {which} quarantined: {fault}")
    return lines


def _describe_context(context: ContextStatus) -> Iterator[str]:
    yield _format_library_counts(context)
    if context.memory_bytes:
        yield f"{show_bytes(context.memory_bytes)} each"
    if context.loads:
        yield f"{context.loads} load{'s' * (context.loads != 1)} of {show_seconds(context.load_s)}"
        if context.served or not context.running:
            yield _describe_calls_per_load(context)
    if context.queued:
        yield f"{context.queued:,} queued"
    for slower in context.speeds:
        yield slower.text
    if context.last_failure:
        yield f"could not be loaded: {context.last_failure}"


def _format_library_counts(context: ContextStatus) -> str:
    loading = f", {context.loading} loading" if context.loading else ""
    if not context.asleep:
        return f"{context.hot} hot{loading}"
    wakes = f" (the last one took {show_seconds(context.wake_s)} to wake)" if context.wake_s else ""
    return f"{context.hot} hot{loading}, {context.asleep} asleep{wakes}"


def _describe_map(each: MapStatus) -> str:
    kept = f" ({each.kept:,} kept by earlier runs)" if each.kept else ""
    if each.total < 0:
        return f"{each.function}   {each.done:,} done{kept}   its length is unknown, so there is no forecast"
    rate = f"{each.rate:,.1f}/s" if each.rate >= 0.095 else f"{60 * each.rate:.1f}/min" if each.rate else ""
    left = f"about {show_about(each.left_s)} left" if each.left_s and each.done < each.total else ""
    return "   ".join(filter(None, (each.function, f"{each.done:,} of {each.total:,}{kept}", rate, left)))


def _describe_calls_per_load(context: ContextStatus) -> str:
    """Return how many calls ran per load. Calls cancelled before their start do not count."""
    if not context.served:
        return "not used yet" if context.hot or context.queued else "never used"
    used = context.served / context.loads
    if used < 0.95:
        return f"used {used:.1f} times a load"
    return "used once a load" if round(used) == 1 else f"used {round(used):,} times a load"


def _describe_losses(status: SessionFacts) -> list[str]:
    if not status.lost_pilots and not status.rerun_calls:
        return []
    pilots = f"{status.lost_pilots} pilot{'s' * (status.lost_pilots != 1)}"
    if status.losses:
        pilots += f" ({', '.join(format_counts_by_reason(status.losses))})"
    calls = f"{status.rerun_calls:,} call{'s' * (status.rerun_calls != 1)} run again, 0 results lost"
    return [f"{pilots}, {calls}" if status.lost_pilots else calls]


def _make_pilot_rows(pilot: PilotStatus, status: SessionFacts, *, has_ended: bool) -> list[Sequence[str]]:
    libraries = {library.library: library for library in status.libraries}
    standing = "" if has_ended or pilot.state == "here" else pilot.state
    if standing and pilot.draining:
        standing = f"{pilot.state}: {pilot.draining}"
    walltime = f"walltime {show_seconds(pilot.ends_in_s)}" if pilot.ends_in_s else ""
    own = [walltime, format_rate(pilot.rate, "calls") if pilot.rate and not has_ended else "", standing]
    rows = [_make_device_cells(device, libraries, has_ended=has_ended) for device in pilot.devices]
    if len(rows) == 1:
        *device, fault = rows[0]
        return [(pilot.pilot, *device, *own[:2], "; ".join(filter(None, (fault, standing))))]
    return [(pilot.pilot, f"{len(rows)} devices", "", "", *own), *(("", *row[:3], "", "", row[3]) for row in rows)]


def _make_device_cells(
    device: DeviceStatus, libraries: Mapping[int, LibraryStatus], *, has_ended: bool
) -> tuple[str, ...]:
    here = [libraries[name] for name in device.libraries if name in libraries]
    return (
        device.device if device.kind == "cpu" else f"{device.device} {device.kind}",
        ", ".join(_describe_library(library) for library in here) or "-",
        _format_memory_bar(device),
        "quarantined" if device.fault and not has_ended else "",
    )


def _describe_library(library: LibraryStatus) -> str:
    name = library.recipe if library.recipe != BARE.name else "no context"
    if library.state != "ready":
        return f"{name} ({library.phase or library.state})"
    return f"{name} ({library.running} of {library.slots} slots)" if library.slots > 1 else name


def _format_memory_bar(device: DeviceStatus) -> str:
    share = device.promised_bytes / device.memory_bytes if device.memory_bytes else 0.0
    full = min(_BAR_CHARACTERS, round(share * _BAR_CHARACTERS))
    used, total = show_bytes(device.promised_bytes), show_bytes(device.memory_bytes)
    return f"{'▇' * full}{'▁' * (_BAR_CHARACTERS - full)} {used if device.promised_bytes else '0'} of {total}"


def _align_rows(rows: Sequence[tuple[str, Iterable[str]]]) -> list[str]:
    width = max((len(name) for name, _ in rows), default=0)
    return ["   ".join([name.ljust(width), *facts]) for name, facts in rows]


def _align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    used = [at for at, width in enumerate(widths) if width]
    return ["  " + "  ".join(row[at].ljust(widths[at]) for at in used).rstrip() for row in rows]
