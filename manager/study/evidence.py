"""Knowledge before a run: of function and context from the performance store, of the site from managers' records
(`stoker.contexts.performance`) and the site file; and how much of it.

Pilots are lost at a constant rate: losses over the time that pilots were here (the maximum-likelihood estimate
for censored exponential times).

A manager remembers seconds of calls, not their inputs. Calls of another size are taken to cost as much an input;
the forecast says so.
"""

from __future__ import annotations

import enum
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev
from typing import Protocol

import msgspec

from stoker.contexts.performance import Availability, Estimate, Remembered
from stoker.errors import SessionError
from stoker.protocol.blocks import PilotEnd
from stoker.site import Site
from stoker.units import show_seconds

RUNS, LOADS, WAITS = (30, 5), (3, 1), (10, 3)
"""How many measurements make a good forecast, and a fair one."""
ANOTHER_DAY = 0.1
UNKNOWN_MEMORY_BYTES = 16_000_000_000
_SHOWN_SIMILAR = 3
_HOUR_S = 3600.0


class Sureness(enum.Enum):
    GOOD = "good"
    FAIR = "fair"
    """Measured seldom, or partly elsewhere."""
    POOR = "poor"
    """Something that matters was hardly measured."""


class Work(msgspec.Struct, frozen=True):
    """A number of inputs through one function, and the inputs of one call.

    `function`: with its module or file, as `mine.functions:score` or `/home/ana/claims.py:verify`.
    `measured_per_call`: inputs of the measured calls (0 = the same).
    """

    app: str
    function: str
    inputs: int
    inputs_per_call: int = 1
    measured_per_call: int = 0

    @property
    def calls(self) -> int:
        """Number of calls, the last one maybe with fewer inputs."""
        return -(-self.inputs // self.inputs_per_call)

    @property
    def called(self) -> str:
        """Name of the function, without its module or file."""
        return self.function.rpartition(":")[2]

    @property
    def larger(self) -> float:
        """Inputs of a call in relation to those of the measured calls."""
        return self.inputs_per_call / (self.measured_per_call or self.inputs_per_call)


class MeasuredTime(msgspec.Struct, frozen=True):
    """A time that was measured `count` times: mean in seconds, standard deviation over mean."""

    mean_s: float = 0.0
    cv: float = 0.0
    count: int = 0

    @property
    def error(self) -> float:
        """Standard error over the mean, at least the spread between days (`ANOTHER_DAY`)."""
        return math.hypot(self.cv, ANOTHER_DAY) / math.sqrt(self.count) if self.count else 0.0


PILOT_HERE = MeasuredTime(1.0, 0.5)
"""Seconds until a local pilot is there; no record has it."""


class Reason(msgspec.Struct, frozen=True):
    """A fact that a forecast rests on, and how reliable it is."""

    text: str
    sureness: Sureness


class Evidence(msgspec.Struct, frozen=True):
    """The input of a forecast.

    `lost_per_s`: rate at which a pilot is lost; `most`: the most pilots seen at once (0 = unknown).
    """

    kind: str
    devices: int
    memory_bytes: int
    load: MeasuredTime
    run: MeasuredTime
    wait: MeasuredTime
    boot: MeasuredTime
    lost_per_s: float
    most: int
    reasons: tuple[Reason, ...]

    @property
    def sureness(self) -> Sureness:
        order = list(Sureness)
        return max((reason.sureness for reason in self.reasons), key=order.index, default=Sureness.POOR)


class MeasuredCosts(Protocol):
    def recipes_of(self, function: str) -> list[Remembered]: ...

    def estimates(self, recipe_key: str) -> dict[str, Estimate]: ...


def gather(
    site: Site,
    work: Work,
    *,
    performance: MeasuredCosts,
    availability: Availability,
    kind: str = "",
    similar: Sequence[str] = (),
) -> Evidence:
    """Return what is known of this work on this site.

    `kind`: a measured kind of device instead of the site's; `similar`: recipes that an estimate comes from.
    Raises SessionError if nothing was measured.
    """
    measured = _measured(performance, work)
    waits, stays = availability.waits, availability.stays
    seen = waits[-1].devices if waits else None
    in_site_file = "cpu" if site.pilot.devices.startswith("cpu") else site.provider.gpu_type
    expected = kind or (seen.kind if seen is not None else in_site_file)
    chosen = _nearest_kind(expected, measured)
    facts, devices = measured[chosen], seen.count if seen is not None else _devices_of(site, chosen)
    run, load_s = facts.functions[work.function], facts.load_s + facts.start_s
    load = MeasuredTime(load_s, _over(facts.load_sd, load_s), facts.loads)
    memory = seen.memory_bytes if seen is not None else 0
    lost = sum(stay.ended == PilotEnd.LOST.value for stay in stays)
    if similar:
        reasons = _estimated(work, facts=facts, kind=chosen, load=load, similar=similar)
    else:
        reasons = _of_function(work, expected, facts=facts, kind=chosen, load=load)
    return Evidence(
        kind=chosen, devices=devices,
        memory_bytes=memory or max(UNKNOWN_MEMORY_BYTES, 2 * (facts.device_bytes or facts.resident_bytes)),
        load=load, run=MeasuredTime(run.mean * work.larger, _over(run.sd, run.mean), run.count),
        wait=_time([wait.wait_s for wait in waits]),
        boot=PILOT_HERE if site.is_local else _time([wait.boot_s for wait in waits]),
        lost_per_s=lost / max(1.0, sum(stay.stay_s for stay in stays)) if lost else 0.0, most=availability.most,
        reasons=(*reasons, *_of_site(site, availability, devices=devices, is_seen=seen is not None)),
    )  # fmt: skip


def _measured(store: MeasuredCosts, work: Work) -> Mapping[str, Estimate]:
    recipes = store.recipes_of(work.function)
    found = store.estimates(recipes[0].recipe) if recipes else {}
    useful = {kind: facts for kind, facts in found.items() if work.function in facts.functions}
    if not useful:
        is_own = work.app.rpartition(":")[2] == work.called
        short = "some tens of its calls" if is_own else f"stoker run {work.app} --limit 64"
        raise SessionError(
            f"nothing was measured of {work.app} yet, so nothing can be said of a longer run; make a short one first"
            f" ({short})"
        )
    return useful


# ---- the devices that are meant


def _nearest_kind(expected: str, measured: Mapping[str, Estimate]) -> str:
    """Return the measured kind that a site file's name means (`a10` for `NVIDIA A10`), else the most measured one."""
    meant = [kind for kind in measured if kind == expected]
    meant = meant or [kind for kind in measured if expected and _is_meant(expected, kind)]
    return max(meant or measured, key=lambda kind: measured[kind].runs)


def _is_meant(expected: str, kind: str) -> bool:
    words = expected.lower().replace("_", " ").replace("-", " ").split()
    return all(word in kind.lower() for word in words)


def _devices_of(site: Site, kind: str) -> int:
    devices = site.pilot.devices
    if devices.startswith("cpu:"):
        return int(devices[4:])
    if site.provider.gpu_count:
        return site.provider.gpu_count
    if kind.startswith("cpu"):
        return len(os.sched_getaffinity(0)) if site.is_local else max(1, site.provider.cores)
    return 1


# ---- how much was measured


def _of_function(work: Work, expected: str, *, facts: Estimate, kind: str, load: MeasuredTime) -> list[Reason]:
    run, calls = facts.functions[work.function], facts.calls[work.function]
    fits = _is_meant(expected, kind)
    elsewhere = "" if fits else f"; the site should have {expected}, of which nothing was measured"
    spread = f", give or take {_share(_over(run.sd, run.mean))}" if calls > 1 else ""
    ran = f"a call of {work.called} ran {show_seconds(run.mean)} on {kind}{spread}"
    sure = _level(calls, RUNS) if fits else Sureness.POOR
    reasons = [Reason(f"{ran} ({_counted(calls, 'call')} measured){elsewhere}", sure)]
    if work.larger != 1.0:
        text = (
            "the calls that were measured are taken to have had {} each, and each input to cost the same: "
            "a call of {} runs {}"
        )
        sizes = _counted(work.measured_per_call, "input"), _counted(work.inputs_per_call, "input")
        reasons.append(Reason(text.format(*sizes, show_seconds(run.mean * work.larger)), Sureness.FAIR))
    loads = f"its context loaded in {show_seconds(load.mean_s)}" if load.count else "no load of its context"
    sure = _level(load.count, LOADS)
    return [*reasons, Reason(f"{loads} ({_counted(load.count, 'load')} measured)", sure)]


def _estimated(work: Work, *, facts: Estimate, kind: str, load: MeasuredTime, similar: Sequence[str]) -> list[Reason]:
    run = facts.functions[work.function]
    some = ", ".join(similar[:_SHOWN_SIMILAR])
    more = f" and {len(similar) - _SHOWN_SIMILAR} more" if len(similar) > _SHOWN_SIMILAR else ""
    text = f"no call of {work.called} was measured; one is estimated to run {show_seconds(run.mean)} on {kind}, give"
    reasons = [Reason(f"{text} or take {_share(_over(run.sd, run.mean))}, by {some}{more}", Sureness.POOR)]
    loads = f"its context is estimated to load in {show_seconds(load.mean_s)}" if load.count else "a load of it is not"
    return [*reasons, Reason(loads + ("" if load.count else " known, and taken to last no time"), Sureness.POOR)]


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def _share(cv: float) -> str:
    return f"{cv:.0%}" if cv >= 0.01 else "less than 1%"


def _of_site(site: Site, seen: Availability, *, devices: int, is_seen: bool) -> list[Reason]:
    if site.is_local:
        what = f"this machine, {devices} devices: nothing to wait for, but about {show_seconds(PILOT_HERE.mean_s)}"
        return [Reason(f"{what} until the pilot is there", Sureness.GOOD)]
    reasons = []
    waits = len(seen.waits)
    if waits:
        longest = max(wait.wait_s for wait in seen.waits)
        typical = show_seconds(fmean(wait.wait_s for wait in seen.waits))
        text = f"blocks waited {typical} on the mean, {show_seconds(longest)} at the longest ({waits} were seen)"
    else:
        text = f"no block of {site.name} was seen yet: they are taken to start at once"
    reasons.append(Reason(text, _level(waits, WAITS)))
    if seen.stays:
        losses = Counter(stay.why or "unexplained" for stay in seen.stays if stay.ended == PilotEnd.LOST.value)
        hours = sum(stay.stay_s for stay in seen.stays) / _HOUR_S
        why = ", ".join(f"{count} {reason}" for reason, count in losses.most_common())
        were = "was" if losses.total() == 1 else "were"
        lost = f"{losses.total()} of {len(seen.stays)} pilots {were} lost{f' ({why})' if why else ''}"
        reasons.append(Reason(f"{lost} in {hours:.1f} pilot-hours", _level(len(seen.stays), WAITS)))
    if not is_seen:
        text = f"a pilot is taken to have {devices} device{'s' * (devices != 1)}, as the site file says"
        reasons.append(Reason(text, Sureness.FAIR))
    if 0 < seen.most < site.pilot.max_blocks * site.provider.pilots:
        text = f"{site.name} never gave more than {seen.most} pilots at once; no run has tried it"
        reasons.append(Reason(text, Sureness.FAIR))
    return reasons


def _level(count: int, enough: tuple[int, int]) -> Sureness:
    much, some = enough
    return Sureness.GOOD if count >= much else Sureness.FAIR if count >= some else Sureness.POOR


def _time(seconds: Sequence[float]) -> MeasuredTime:
    if not seconds:
        return MeasuredTime()
    mean = fmean(seconds)
    return MeasuredTime(mean, _over(pstdev(seconds), mean), len(seconds))


def _over(sd: float, mean: float) -> float:
    return min(5.0, sd / mean) if mean > 0 else 0.0
