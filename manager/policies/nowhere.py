"""Explain to users why no device can load a context, or why a gang can never run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from stoker.contexts.recipe import NO_LIMITS
from stoker.manager.core.blame import is_pilot_repeatedly_unfit, why_pilot_is_unfit
from stoker.manager.core.deadlines import has_source_time_for_load, has_time_for_load
from stoker.manager.core.nouns import Context, Pilot, PilotState
from stoker.manager.core.seams import FailCall, Provisioning, View
from stoker.manager.policies.making_room import Minimum
from stoker.manager.policies.where_to_load import (
    accepts_device_kind,
    can_use_device_after_quarantine,
    count_device_sets,
    count_fitting_libraries,
    requests_cpu_kind,
    required_bytes_if_known,
)
from stoker.protocol.calls import Failure, FailureKind
from stoker.units import show_bytes, show_seconds

_SHOWN_LINES = 5


def why_nowhere(
    view: View, context: Context, *, minimum: Minimum, provisioning: Provisioning, patience_s: float
) -> Failure | None:
    """Return why no present or future device can load the context; None if a device can, or if this is unknown."""
    impossible = _no_device_failure(view, context, minimum=minimum, provisioning=provisioning)
    return impossible or _unfit_pilots_failure(view, context, minimum=minimum, patience_s=patience_s)


def hopeless_gangs(view: View, context: Context) -> list[FailCall]:
    if not context.queue.gang_count:
        return []
    limit = context.limits.most or math.inf
    fit = _max_library_count(view, context) if view.pilots else math.inf
    most, plan = min(limit, fit), []
    hopeless = (call for call in context.queue.waiting_gang_calls() if call.group.options.gang[0] > most)
    for call in sorted(hopeless, key=lambda call: call.id):
        wants = call.group.options.gang[0]
        own = context.reported_limits.get(call.group.client.id, NO_LIMITS).most or math.inf
        if fit < limit:
            where = "fit on the present and possible devices"
            instead = "for more devices in the site file ([pilot] max_blocks, [provider] nodes)"
        elif own < wants:
            where, instead = "may be loaded at once", "for a larger max_libraries"
        else:
            where = f"may be loaded at once, because another program set max_libraries = {limit:g}"
            instead = "for a larger max_libraries there; or use a session of your own"
        text = (
            f"a gang of {wants} can run nowhere: at most {most:g} libraries of context {context.recipe.name} {where};"
            f" ask for fewer (@app(gang=...), or the count of session.warm), or {instead}"
        )
        plan.append(FailCall(call.id, Failure(FailureKind.NO_DEVICE, text)))
    return plan


def _no_device_failure(view: View, context: Context, *, minimum: Minimum, provisioning: Provisioning) -> Failure | None:
    if too_short := _short_walltime_failure(view, context):
        return too_short
    pilots = [p for p in view.pilots.values() if p.state is PilotState.HERE]
    needs = context.recipe.needs
    if not pilots or provisioning.may_bring(view, context):
        return None
    if any(_pilot_can_hold_context(context, p, minimum) for p in pilots):
        return None
    devices = [device.facts for pilot in pilots for device in pilot.devices.values()]
    spare = " (spare cores, for kinds that name them)"
    seen = Counter(f"{facts.kind} {show_bytes(facts.memory_bytes)}{spare * facts.spare}" for facts in devices)
    wants = [f"{needs.devices} devices of one kind on one pilot"] if needs.devices > 1 else []
    if needs.kinds:
        wants.append("kind " + " or ".join(needs.kinds))
    if memory := max(required_bytes_if_known(context, facts) for facts in devices):
        wants.append(f"{show_bytes(memory)} of memory")
    return Failure(
        FailureKind.NO_DEVICE,
        f"context {context.recipe.name} can be loaded nowhere: it needs {', '.join(wants) or 'a device'}; "
        f"devices seen: {', '.join(f'{what} x {count}' for what, count in seen.items())}"
        f"{_suggest_placement_fix(context, pilots)}",
    )


def _suggest_placement_fix(context: Context, pilots: Iterable[Pilot]) -> str:
    by_pilot = [
        [device.facts for device in pilot.devices.values() if accepts_device_kind(context, device.facts)]
        for pilot in pilots
    ]
    of_kind = [facts for each in by_pilot for facts in each]
    smaller = [facts for facts in of_kind if required_bytes_if_known(context, facts) > facts.memory_bytes]
    is_host, wants = any(facts.on_host for facts in smaller or of_kind), context.recipe.needs.devices
    if wants > 1:
        fewer = (count for count in range(wants - 1, 0, -1) if any(count_device_sets(each, count) for each in by_pilot))
        most = 0 if smaller else next(fewer, 0)
        more = f'set [pilot] devices = "cpu:{wants}"' if is_host else f"ask for {wants} GPUs a node ([provider] gpus)"
        return f"\n  {more} in the site file, or load it over fewer devices (devices={most})" if most else ""
    if not smaller:
        return ""
    if not is_host:
        gpus = "ask for GPUs with more memory in the site file ([provider] gpus)"
        return f"\n  {gpus}, or load the model in a smaller dtype"
    needed = max(required_bytes_if_known(context, facts) for facts in smaller)
    together = max(sum(facts.memory_bytes for facts in each if facts.on_host) for each in by_pilot)
    have = f"\n  the CPU devices of one pilot have {show_bytes(together)} together: "
    if needed <= together:
        return f'{have}set [pilot] devices = "cpu:{max(1, together // needed)}" in the site file'
    return f"{have}ask for more in the site file ([provider] memory)"


def _unfit_pilots_failure(view: View, context: Context, *, minimum: Minimum, patience_s: float) -> Failure | None:
    """Return a failure that lists the pilots' faults, or None while a pilot can hold the context or may join soon."""
    waited = view.now - context.starved_since if context.starved_since is not None else 0.0
    emptied = any(block.emptied_at is not None and not block.release_reason for block in view.blocks.values())
    if waited < patience_s or emptied or any(source.coming_blocks for source in view.sources.values()):
        return None
    there = (PilotState.HERE, PilotState.CUT)
    able = [p for p in view.pilots.values() if p.state in there and _pilot_can_hold_context(context, p, minimum)]
    reasons = [why_pilot_is_unfit(pilot, context.recipe.key, view.now) for pilot in able]
    repeatedly = all(is_pilot_repeatedly_unfit(pilot, context.recipe.key) for pilot in able)
    if not reasons or not all(reasons) or not repeatedly:
        return None
    said = [f"no pilot of the session can hold context {context.recipe.name}:", *dict.fromkeys(reasons)]
    if len(said) > _SHOWN_LINES:
        said[_SHOWN_LINES:] = [f"and {len(said) - _SHOWN_LINES} more like these"]
    return Failure(FailureKind.PILOT, "\n  ".join(said))


def _pilot_can_hold_context(context: Context, pilot: Pilot, minimum: Minimum) -> bool:
    able = (
        device.facts
        for device in pilot.devices.values()
        if can_use_device_after_quarantine(context, device) and minimum(context, device) <= device.facts.memory_bytes
    )
    return count_device_sets(able, context.recipe.needs.devices) > 0


def _max_library_count(view: View, context: Context) -> float:
    here: dict[str, list[int]] = {}
    for pilot in view.pilots.values():
        if pilot.state in (PilotState.HERE, PilotState.CUT):
            facts = [device.facts for device in pilot.devices.values()]
            here.setdefault(pilot.source, []).append(count_fitting_libraries(context, facts))
    if not view.sources:
        rooms = [room for of_source in here.values() for room in of_source]
        known = view.most_pilots.values()
        more = sum(known) if known and all(known) else math.inf
        return max(sum(rooms), more * max(rooms, default=0)) if any(rooms) else math.inf
    total = 0.0
    for name, source in view.sources.items():
        rooms = here.pop(name, [])
        each = float(source.source.slots // context.recipe.needs.devices) or math.inf
        if source.devices:
            each = float(max([count_fitting_libraries(context, source.devices), *rooms]))
        elif requests_cpu_kind(context):  # `slots` does not count spare cores, so set no limit
            each = math.inf
        total += max(sum(rooms), source.source.most * source.source.nodes * each)
    return total + sum(map(sum, here.values()))


def _short_walltime_failure(view: View, context: Context) -> Failure | None:
    sources = [source.source for source in view.sources.values()]
    if not sources or any(has_source_time_for_load(context, source) for source in sources):
        return None
    devices = (device for pilot in view.pilots.values() for device in pilot.devices.values())
    if any(has_time_for_load(view, context, device) for device in devices):
        return None
    have = ", ".join(f"{source.name} {show_seconds(source.walltime_s)}" for source in sources)
    return Failure(
        FailureKind.NO_DEVICE,
        f"context {context.recipe.name} {_load_time_text(context)}, longer than a pilot may run (walltime: {have}; "
        "a part of it is reserved for a clean exit); ask for more in the site file ([provider] walltime)",
    )


def _load_time_text(context: Context) -> str:
    if context.load_s:
        calls = f" and its calls {show_seconds(context.run_s)}" if context.run_s else ""
        return f"takes {show_seconds(context.load_s)} to load{calls}"
    cut = f"was still loading after {show_seconds(context.longest_cut_load_s)}"
    return f"{cut} when its pilot's walltime was over ({context.loads_cut_by_walltime} times)"
