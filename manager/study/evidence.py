"""What is known before a run: of the function and its context from the performance store, of the site from what
managers recorded there (`stoker.contexts.performance`), and of both from the site file. And how much of it there is.

Pilots that are lost are taken to be lost at a constant rate: losses over the time that pilots were here, whatever ended
it (the maximum-likelihood estimate for exponential times of which most are cut short).

A manager remembers what calls took, not how many inputs they had. So calls of another size than those that were
measured are taken to cost as much an input: too much where a call has a fixed cost that its inputs share, too little
where a larger call does not fit as well. Either way it is said.
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

MUCH_RUNS, SOME_RUNS = 30, 5
MUCH_LOADS, SOME_LOADS = 3, 1
MUCH_WAITS, SOME_WAITS = 10, 3
ANOTHER_DAY = 0.1
UNKNOWN_MEMORY_BYTES = 16_000_000_000
_SHOWN_SIMILAR = 3
_HOUR_S = 3600.0


class Sureness(enum.Enum):
    """How far a forecast can be relied on."""

    GOOD = "good"
    """What it rests on was measured here, often enough."""
    FAIR = "fair"
    """Measured, but seldom, or in part elsewhere."""
    POOR = "poor"
    """Something that matters was hardly measured at all."""


class Work(msgspec.Struct, frozen=True):
    """The work: a number of inputs through one function, and the inputs of one call.

    `function`: the function as its calls are remembered, with its module or file: `mine.functions:score`, or
    `/home/ana/claims.py:verify`. `measured_per_call`: the inputs of the calls that were measured (0 = the same number).
    """

    app: str
    function: str
    inputs: int
    inputs_per_call: int = 1
    measured_per_call: int = 0

    @property
    def calls(self) -> int:
        """Calls in all."""
        return -(-self.inputs // self.inputs_per_call)

    @property
    def called(self) -> str:
        """The function's own name: `score`."""
        return self.function.rpartition(":")[2]

    @property
    def larger(self) -> float:
        """A call against one that was measured, by their inputs."""
        return self.inputs_per_call / (self.measured_per_call or self.inputs_per_call)


class MeasuredTime(msgspec.Struct, frozen=True):
    """A time that was measured `count` times: its mean in seconds, and its standard deviation over the mean. Calls are
    measured together, some at a time: then what is counted, and spreads, are their means."""

    mean_s: float = 0.0
    cv: float = 0.0
    count: int = 0

    @property
    def error(self) -> float:
        """The standard error of the mean, over the mean. What was measured a few times is seldom as like itself as it
        seems: another day is taken to differ by `ANOTHER_DAY`, whatever the spread of what was seen."""
        return math.hypot(self.cv, ANOTHER_DAY) / math.sqrt(self.count) if self.count else 0.0


PILOT_HERE = MeasuredTime(1.0, 0.5)
"""From the start of a program on this machine until its pilot is there: no source gives it, so nobody records it."""


class Reason(msgspec.Struct, frozen=True):
    """Something that a forecast rests on (`sureness`: how well)."""

    text: str
    sureness: Sureness


class Evidence(msgspec.Struct, frozen=True):
    """What a forecast is made from. `lost_per_s`: the rate at which a pilot is lost; `most`: the most pilots that the
    source was seen to give at once (0 = nobody has looked)."""

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
        """As sure as the weakest part of it."""
        order = list(Sureness)
        return max((reason.sureness for reason in self.reasons), key=order.index, default=Sureness.POOR)


class MeasuredCosts(Protocol):
    """What the performance store knows; or what is estimated in its place, from `similar` recipes."""

    def recipes_of(self, function: str) -> list[Remembered]:
        """Recipes on which calls of a function were measured, the last one first."""

    def estimates(self, recipe_key: str) -> dict[str, Estimate]:
        """What is known of a recipe, by kind of device."""


def gather(
    site: Site,
    work: Work,
    *,
    performance: MeasuredCosts,
    availability: Availability,
    kind: str = "",
    similar: Sequence[str] = (),
) -> Evidence:
    """What is known of this work on this site. `kind`: a kind of device that was measured, instead of the one that
    suits the site best; `similar`: the recipes that it was estimated from, if it was not measured. Raises SessionError
    where nothing was measured."""
    measured = _measured(performance, work)
    seen = availability.waits[-1].devices if availability.waits else None
    expected = kind or (seen.kind if seen is not None else _kind_of(site))
    chosen = _nearest_kind(expected, measured)
    facts = measured[chosen]
    run = facts.functions[work.function]
    load = MeasuredTime(facts.load_s + facts.start_s, _over(facts.load_sd, facts.load_s + facts.start_s), facts.loads)
    runs = MeasuredTime(run.mean * work.larger, _over(run.sd, run.mean), run.count)
    devices = seen.count if seen is not None else _devices_of(site, chosen)
    memory = seen.memory_bytes if seen is not None else 0
    return Evidence(
        kind=chosen,
        devices=devices,
        memory_bytes=memory or max(UNKNOWN_MEMORY_BYTES, 2 * (facts.device_bytes or facts.resident_bytes)),
        load=load,
        run=runs,
        wait=_time([wait.wait_s for wait in availability.waits]),
        boot=PILOT_HERE if site.is_local else _time([wait.boot_s for wait in availability.waits]),
        lost_per_s=_lost_per_s(availability),
        most=availability.most,
        reasons=(
            *(
                _estimated(work, facts=facts, kind=chosen, load=load, similar=similar)
                if similar
                else _of_function(work, expected, facts=facts, kind=chosen, load=load)
            ),
            *_of_site(site, availability, devices=devices, is_seen=seen is not None),
        ),
    )


def _measured(store: MeasuredCosts, work: Work) -> Mapping[str, Estimate]:
    """By kind of device, from the recipe that calls of the function used last."""
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


def _kind_of(site: Site) -> str:
    """What the site file says of them; empty: nothing."""
    if site.pilot.devices.startswith("cpu"):
        return "cpu"
    return site.provider.gpu_type


def _nearest_kind(expected: str, measured: Mapping[str, Estimate]) -> str:
    """That of the measured kinds which is meant by a name in a site file (`a10` for `NVIDIA A10`), else the one that
    was measured most."""
    meant = [kind for kind in measured if kind == expected]
    meant = meant or [kind for kind in measured if expected and _is_meant(expected, kind)]
    return max(meant or measured, key=lambda kind: measured[kind].runs)


def _is_meant(expected: str, kind: str) -> bool:
    words = expected.lower().replace("_", " ").replace("-", " ").split()
    return all(word in kind.lower() for word in words)


def _devices_of(site: Site, kind: str) -> int:
    """Devices of a pilot, as far as the site file says."""
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
    sure = _level(calls, much=MUCH_RUNS, some=SOME_RUNS) if fits else Sureness.POOR
    reasons = [Reason(f"{ran} ({_counted(calls, 'call')} measured){elsewhere}", sure)]
    if work.larger != 1.0:
        reasons.append(_of_size(work, run.mean))
    loads = f"its context loaded in {show_seconds(load.mean_s)}" if load.count else "no load of its context"
    sure = _level(load.count, much=MUCH_LOADS, some=SOME_LOADS)
    return [*reasons, Reason(f"{loads} ({_counted(load.count, 'load')} measured)", sure)]


def _estimated(work: Work, *, facts: Estimate, kind: str, load: MeasuredTime, similar: Sequence[str]) -> list[Reason]:
    run = facts.functions[work.function]
    some = ", ".join(similar[:_SHOWN_SIMILAR])
    more = f" and {len(similar) - _SHOWN_SIMILAR} more" if len(similar) > _SHOWN_SIMILAR else ""
    text = f"no call of {work.called} was measured; one is estimated to run {show_seconds(run.mean)} on {kind}, give"
    reasons = [Reason(f"{text} or take {_share(_over(run.sd, run.mean))}, by {some}{more}", Sureness.POOR)]
    loads = f"its context is estimated to load in {show_seconds(load.mean_s)}" if load.count else "a load of it is not"
    return [*reasons, Reason(loads + ("" if load.count else " known, and taken to last no time"), Sureness.POOR)]


def _of_size(work: Work, run_s: float) -> Reason:
    measured, now = _counted(work.measured_per_call, "input"), _counted(work.inputs_per_call, "input")
    whole = show_seconds(run_s * work.larger)
    text = f"the calls that were measured are taken to have had {measured} each, and each input to cost the same:"
    return Reason(f"{text} a call of {now} runs {whole}", Sureness.FAIR)


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
    reasons.append(Reason(text, _level(waits, much=MUCH_WAITS, some=SOME_WAITS)))
    losses = Counter(stay.why or "unexplained" for stay in seen.stays if stay.ended == PilotEnd.LOST.value)
    hours = sum(stay.stay_s for stay in seen.stays) / _HOUR_S
    if seen.stays:
        why = ", ".join(f"{count} {reason}" for reason, count in losses.most_common())
        were = "was" if losses.total() == 1 else "were"
        lost = f"{losses.total()} of {len(seen.stays)} pilots {were} lost{f' ({why})' if why else ''}"
        text = f"{lost} in {hours:.1f} pilot-hours"
        reasons.append(Reason(text, _level(len(seen.stays), much=MUCH_WAITS, some=SOME_WAITS)))
    if not is_seen:
        reasons.append(
            Reason(
                f"a pilot is taken to have {devices} device{'s' * (devices != 1)}, as the site file says", Sureness.FAIR
            )
        )
    if 0 < seen.most < site.pilot.max_blocks * site.provider.pilots:
        text = f"{site.name} never gave more than {seen.most} pilots at once; whether it would, nobody has seen"
        reasons.append(Reason(text, Sureness.FAIR))
    return reasons


def _level(count: int, *, much: int, some: int) -> Sureness:
    if count >= much:
        return Sureness.GOOD
    return Sureness.FAIR if count >= some else Sureness.POOR


def _lost_per_s(seen: Availability) -> float:
    lost = sum(stay.ended == PilotEnd.LOST.value for stay in seen.stays)
    return lost / max(1.0, sum(stay.stay_s for stay in seen.stays)) if lost else 0.0


def _time(seconds: Sequence[float]) -> MeasuredTime:
    if not seconds:
        return MeasuredTime()
    mean = fmean(seconds)
    return MeasuredTime(mean, _over(pstdev(seconds), mean), len(seconds))


def _over(sd: float, mean: float) -> float:
    return min(5.0, sd / mean) if mean > 0 else 0.0
