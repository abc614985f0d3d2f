"""The data of a session for the page, in short lists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from stoker.sessions import ContextStatus, Status

_MOST_ROWS = 50
_MOST_PILOTS = 25
_MOST_NOTICES = 8
_NO_NAMES: Mapping[str, str] = {}


def session_figures(
    status: Status | None, *, names: Mapping[str, str] = _NO_NAMES, with_texts: bool = True
) -> dict[str, Any]:
    """Return the part of the page's figures that describes the session.

    `status`: None while the manager does not answer; `names`: names of contexts by recipe; `with_texts`: False to omit
    error messages, which may quote inputs.
    """
    if status is None:
        return {"calls": {}, **{part: [] for part in _LISTS}, "more_pilots": 0, "kinds": {}}
    short = {each.name: each.name if each.arguments else each.title for each in status.contexts}
    served, names = names, {**short, **names}
    busiest = sorted(status.contexts, key=lambda each: -(each.running + each.queued))[:_MOST_ROWS]
    keys = {each.key for each in busiest}
    contexts = [each for each in status.contexts if each.key in keys]  # in a stable order
    return {
        "uptime_s": status.uptime_s,
        "calls": {
            "queued": status.queued, "running": status.running, "done": status.done, "failed": status.failed,
            "cancelled": status.cancelled, "rate": status.rate, "left_s": status.left_s,
            "pilot_in_s": status.pilot_in_s, "lost_pilots": status.lost_pilots, "rerun": status.rerun_calls,
        },
        "maps": [_named(each, names) for each in status.maps[:_MOST_ROWS]],
        "contexts": [_context(each, served) for each in contexts],
        "failures": [
            {**_fields(each), "message": each.message if with_texts else ""} for each in status.failure_groups
        ],
        "longest": [
            {"call": each.call, "function": each.function, "context": names.get(each.context, each.context),
             "since_s": each.since_s, "where": " ".join(each.where), "ahead": each.ahead}
            for each in status.longest
        ],
        "slowest": [_named(each, names) for each in status.slowest],
        **_pilots(status, names),
        "waiting": [
            {"block": str(job.block), "source": job.source, "job": job.job, "phase": job.phase, "why": job.reason}
            for job in status.jobs
            if job.phase != "running"
        ][:_MOST_ROWS],
        "notices": [_fields(each) for each in status.notices[-_MOST_NOTICES:]],
        "faults": [{"where": where, "text": text} for where, text in status.trouble.items()][:_MOST_NOTICES],
    }  # fmt: skip


_LISTS = ("maps", "contexts", "failures", "longest", "slowest", "pilots", "waiting", "notices", "faults")


def make_history_sample(figures: Mapping[str, Any]) -> dict[str, float]:
    """Return the values of the page's history; empty while the manager does not answer."""
    calls = figures["calls"]
    if not calls:
        return {}
    models = figures.get("models")
    tokens = {"tokens": sum(each["tokens_per_s"] for each in models)} if models is not None else {}
    return {
        "rate": calls["rate"], "waiting": calls["queued"], "running": calls["running"],
        "memory": figures["memory_bytes"], "devices": figures["device_bytes"], **tokens,
    }  # fmt: skip


def _fields(struct: Any) -> dict[str, Any]:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


def _named(struct: Any, names: Mapping[str, str]) -> dict[str, Any]:
    fields = _fields(struct)
    fields["context"] = names.get(struct.context, struct.context)
    return fields


def _context(context: ContextStatus, names: Mapping[str, str]) -> dict[str, Any]:
    shown = ("hot", "loading", "asleep", "queued", "running", "loads", "load_s", "ended", "run_s", "rate", "left_s",
             "memory_bytes", "waits_for", "last_failure")  # fmt: skip
    return {
        "name": names.get(context.name, context.title), **{name: getattr(context, name) for name in shown}
    }  # fmt: skip


def _pilots(status: Status, names: Mapping[str, str]) -> dict[str, Any]:
    holds: dict[str, Counter[str]] = {}
    memory_bytes = device_bytes = 0
    for library in status.libraries:
        memory_bytes += library.memory_bytes
        device_bytes += library.device_bytes
        for device in library.devices:
            text = f"{names.get(library.recipe, library.recipe)} ({library.state})"
            holds.setdefault(f"{library.pilot}/{device}", Counter())[text] += 1
    here = [pilot for pilot in status.pilots if pilot.state != "gone"]
    kinds = Counter(device.kind for pilot in here for device in pilot.devices)
    first = sorted(status.pilots, key=lambda pilot: not any(device.fault for device in pilot.devices))[:_MOST_PILOTS]
    return {
        "memory_bytes": memory_bytes,
        "device_bytes": device_bytes,
        "pilots_here": len(here),
        "kinds": kinds,
        "more_pilots": len(status.pilots) - len(first),
        "pilots": [
            {
                "pilot": pilot.pilot, "host": pilot.host, "state": pilot.draining or pilot.state,
                "ends_in_s": pilot.ends_in_s, "rate": pilot.rate, "ended": pilot.ended,
                "devices": [
                    {
                        "device": device.device, "kind": device.kind, "memory_bytes": device.memory_bytes,
                        "promised_bytes": device.promised_bytes, "fault": device.fault,
                        "holds": [
                            text if count == 1 else f"{count} x {text}"
                            for text, count in holds.get(f"{pilot.pilot}/{device.device}", {}).items()
                        ],
                    }
                    for device in pilot.devices
                ],
            }
            for pilot in first
        ],
    }  # fmt: skip
