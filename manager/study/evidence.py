"""The measurements that `stoker plan` uses, and their reliability.

The performance store describes functions and contexts. Records of managers (`stoker.contexts.performance`) and the site
file describe the site. The rate of lost pilots is assumed constant: lost pilots divided by the connected time of all
pilots (the maximum-likelihood estimate for censored exponential times). The cost per input is assumed equal in calls of
any size.
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

from stoker.contexts.performance import Availability, Estimate, RecipeRecord
from stoker.errors import SessionError
from stoker.protocol.blocks import PilotEnd
from stoker.site import Site
from stoker.units import show_seconds

RUNS, LOADS, WAITS = (30, 5), (3, 1), (10, 3)  # Number of measurements for a good forecast, and for a fair forecast
DAY_TO_DAY_CV = 0.1
UNKNOWN_MEMORY_BYTES = 16_000_000_000
_MOST_SHOWN_RECIPES = 3
_HOUR_S = 3600.0


class Sureness(enum.Enum):
    GOOD = "good"
    FAIR = "fair"  # The forecast uses few measurements, or measurements from other sites or functions
    POOR = "poor"  # An important value has hardly any measurements


class Work(msgspec.Struct, frozen=True):
    """The work to forecast: a number of inputs for one function.

    `function`: name of the function with its module or file: `mine.functions:score`, `/home/ana/claims.py:verify`.
    `measured_per_call`: number of inputs of each measured call; 0 means `inputs_per_call`.
    """

    app: str
    function: str
    inputs: int
    inputs_per_call: int = 1
    measured_per_call: int = 0

    @property
    def calls(self) -> int:
        """Number of calls. The last call may have fewer inputs."""
        return -(-self.inputs // self.inputs_per_call)

    @property
    def short_name(self) -> str:
        """Name of the function, without module or file."""
        return self.function.rpartition(":")[2]

    @property
    def size_ratio(self) -> float:
        """Inputs of a planned call, divided by the inputs of a measured call."""
        return self.inputs_per_call / (self.measured_per_call or self.inputs_per_call)


class MeasuredTime(msgspec.Struct, frozen=True):
    """The mean of `count` measured times in seconds, and their standard deviation divided by the mean (`cv`)."""

    mean_s: float = 0.0
    cv: float = 0.0
    count: int = 0

    @property
    def error(self) -> float:
        """Standard error divided by the mean, including the spread between days (`DAY_TO_DAY_CV`)."""
        return math.hypot(self.cv, DAY_TO_DAY_CV) / math.sqrt(self.count) if self.count else 0.0


LOCAL_PILOT_START = MeasuredTime(1.0, 0.5)  # Assumed time until a local pilot starts; no record contains this time


class Reason(msgspec.Struct, frozen=True):
    text: str
    sureness: Sureness


class Evidence(msgspec.Struct, frozen=True):
    """The measurements and assumptions of a forecast. `most`: maximum number of pilots seen at once; 0 if unknown."""

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
    def recipes_of(self, function: str) -> list[RecipeRecord]: ...

    def estimates(self, recipe_key: str) -> dict[str, Estimate]: ...


def gather_evidence(
    site: Site, work: Work, *, performance: MeasuredCosts, availability: Availability, kind: str = "",
    similar: Sequence[str] = (),
) -> Evidence:  # fmt: skip
    """Return the measurements for a forecast. `kind`: the device kind. `similar`: recipes from which times are
    estimated.
    """
    found, measured = _find_measurements(performance, work)
    waits, stays = availability.waits, availability.stays
    seen = waits[-1].devices if waits else None
    in_site_file = "cpu" if site.pilot.devices.startswith("cpu") else site.provider.gpu_type
    expected = kind or (seen.kind if seen is not None else in_site_file)
    chosen = _choose_measured_kind(expected, measured)
    target = _choose_kind_by_speed(expected, chosen, found)
    slower = found[chosen].speed / found[target].speed if target != chosen else 1.0
    facts, devices = measured[chosen], seen.count if seen is not None else _count_devices(site, target)
    run, loads = facts.functions[work.function], found[target] if found[target].loads else facts
    load_s = loads.load_s + loads.start_s
    load = MeasuredTime(load_s, _relative_deviation(loads.load_sd, load_s), loads.loads)
    memory = seen.memory_bytes if seen is not None else 0
    lost = sum(stay.ended == PilotEnd.LOST.value for stay in stays)
    if similar:
        reasons = _explain_estimated_function(work, facts=facts, kind=chosen, load=load, similar=similar)
    else:
        reasons = _explain_measured_function(
            work, expected if target == chosen else "", facts=facts, kind=chosen, load=load
        )
    if target != chosen:
        text = f"according to other calls of its context, {target} takes {slower:.2f} times as long"
        reasons.append(Reason(text, Sureness.FAIR))
    return Evidence(
        kind=target, devices=devices,
        memory_bytes=memory or max(UNKNOWN_MEMORY_BYTES, 2 * (facts.device_bytes or facts.resident_bytes)),
        load=load,
        run=MeasuredTime(run.mean * work.size_ratio * slower, _relative_deviation(run.sd, run.mean), run.count),
        wait=_summarize_times([wait.wait_s for wait in waits]),
        boot=LOCAL_PILOT_START if site.is_local else _summarize_times([wait.boot_s for wait in waits]),
        lost_per_s=lost / max(1.0, sum(stay.stay_s for stay in stays)) if lost else 0.0, most=availability.max_pilots,
        reasons=(*reasons, *_explain_site_evidence(site, availability, devices=devices, is_seen=seen is not None)),
    )  # fmt: skip


def _find_measurements(store: MeasuredCosts, work: Work) -> tuple[Mapping[str, Estimate], Mapping[str, Estimate]]:
    """Return estimates for the function's context by device kind: first for all kinds, then for the kinds on which the
    function ran.
    """
    recipes = store.recipes_of(work.function)
    found = store.estimates(recipes[0].recipe) if recipes else {}
    useful = {kind: facts for kind, facts in found.items() if work.function in facts.functions}
    if not useful:
        is_own = work.app.rpartition(":")[2] == work.short_name
        short = "about 50 of its calls" if is_own else f"stoker run {work.app} --limit 64"
        raise SessionError(
            f"no call of {work.app} was measured yet, so a longer run cannot be forecast; make a short run first"
            f" ({short})"
        )
    return found, useful


def _choose_measured_kind(expected: str, measured: Mapping[str, Estimate]) -> str:
    """Return the measured kind that the site file names (`a10`: `NVIDIA A10`), else the kind with the most runs."""
    meant = [kind for kind in measured if kind == expected]
    meant = meant or [kind for kind in measured if expected and _matches_kind(expected, kind)]
    return max(meant or measured, key=lambda kind: measured[kind].runs)


def _choose_kind_by_speed(expected: str, chosen: str, found: Mapping[str, Estimate]) -> str:
    """Return the kind that the site file names, if its speed relative to the measured kind is known; else the measured
    kind.
    """
    if _matches_kind(expected, chosen) or not found[chosen].speed:
        return chosen
    return next((kind for kind in sorted(found) if _matches_kind(expected, kind) and found[kind].speed), chosen)


def _matches_kind(expected: str, kind: str) -> bool:
    words = expected.lower().replace("_", " ").replace("-", " ").split()
    return all(word in kind.lower() for word in words)


def _count_devices(site: Site, kind: str) -> int:
    devices = site.pilot.devices
    if devices.startswith("cpu:"):
        return int(devices[4:])
    if site.provider.gpu_count:
        return site.provider.gpu_count
    if kind.startswith("cpu"):
        return len(os.sched_getaffinity(0)) if site.is_local else max(1, site.provider.cores)
    return 1


def _explain_measured_function(
    work: Work, expected: str, *, facts: Estimate, kind: str, load: MeasuredTime
) -> list[Reason]:
    run, calls = facts.functions[work.function], facts.calls[work.function]
    fits = _matches_kind(expected, kind)
    elsewhere = "" if fits else f"; the site should have {expected}, for which no call was measured"
    spread = f", give or take {_format_share(_relative_deviation(run.sd, run.mean))}" if calls > 1 else ""
    ran = f"a call of {work.short_name} ran {show_seconds(run.mean)} on {kind}{spread}"
    sure = _rate_sureness(calls, RUNS) if fits else Sureness.POOR
    reasons = [Reason(f"{ran} ({_count_with_noun(calls, 'call')} measured){elsewhere}", sure)]
    if work.size_ratio != 1.0:
        had, has = (_count_with_noun(count, "input") for count in (work.measured_per_call, work.inputs_per_call))
        assumed = f"the measured calls are assumed to have had {had} each, and all inputs to cost the same"
        runs = f"a call of {has} runs {show_seconds(run.mean * work.size_ratio)}"
        reasons.append(Reason(f"{assumed}: {runs}", Sureness.FAIR))
    loads = f"its context loaded in {show_seconds(load.mean_s)}" if load.count else "no load of its context"
    sure = _rate_sureness(load.count, LOADS)
    return [*reasons, Reason(f"{loads} ({_count_with_noun(load.count, 'load')} measured)", sure)]


def _explain_estimated_function(
    work: Work, *, facts: Estimate, kind: str, load: MeasuredTime, similar: Sequence[str]
) -> list[Reason]:
    run = facts.functions[work.function]
    some = ", ".join(similar[:_MOST_SHOWN_RECIPES])
    more = f" and {len(similar) - _MOST_SHOWN_RECIPES} more" if len(similar) > _MOST_SHOWN_RECIPES else ""
    spread = f"give or take {_format_share(_relative_deviation(run.sd, run.mean))}, by {some}{more}"
    ran = (
        f"no call of {work.short_name} was measured; a call is estimated to run"
        f" {show_seconds(run.mean)} on {kind}, {spread}"
    )
    loads = "the time of a load is not known, and assumed to be zero"
    if load.count:
        loads = f"its context is estimated to load in {show_seconds(load.mean_s)}"
    return [Reason(ran, Sureness.POOR), Reason(loads, Sureness.POOR)]


def _count_with_noun(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def _format_share(cv: float) -> str:
    return f"{cv:.0%}" if cv >= 0.01 else "less than 1%"


def _explain_site_evidence(site: Site, seen: Availability, *, devices: int, is_seen: bool) -> list[Reason]:
    if site.is_local:
        what = f"this machine, {devices} devices: no queue, but about {show_seconds(LOCAL_PILOT_START.mean_s)}"
        return [Reason(f"{what} until the pilot starts", Sureness.GOOD)]
    reasons = []
    waits = len(seen.waits)
    if waits:
        longest = max(wait.wait_s for wait in seen.waits)
        typical = show_seconds(fmean(wait.wait_s for wait in seen.waits))
        text = f"blocks waited {typical} on average, at most {show_seconds(longest)} ({waits} were seen)"
    else:
        text = f"no block of {site.name} was seen yet: blocks are assumed to start at once"
    reasons.append(Reason(text, _rate_sureness(waits, WAITS)))
    if seen.stays:
        losses = Counter(stay.why or "unexplained" for stay in seen.stays if stay.ended == PilotEnd.LOST.value)
        hours = sum(stay.stay_s for stay in seen.stays) / _HOUR_S
        why = ", ".join(f"{count} {reason}" for reason, count in losses.most_common())
        were = "was" if losses.total() == 1 else "were"
        lost = f"{losses.total()} of {len(seen.stays)} pilots {were} lost{f' ({why})' if why else ''}"
        reasons.append(Reason(f"{lost} in {hours:.1f} pilot-hours", _rate_sureness(len(seen.stays), WAITS)))
    if not is_seen:
        text = f"a pilot is assumed to have {devices} device{'s' * (devices != 1)}, as the site file says"
        reasons.append(Reason(text, Sureness.FAIR))
    if 0 < seen.max_pilots < site.pilot.max_blocks * site.provider.pilots_per_block:
        text = f"{site.name} never gave more than {seen.max_pilots} pilots at once; no run has tried more"
        reasons.append(Reason(text, Sureness.FAIR))
    return reasons


def _rate_sureness(count: int, enough: tuple[int, int]) -> Sureness:
    much, some = enough
    return Sureness.GOOD if count >= much else Sureness.FAIR if count >= some else Sureness.POOR


def _summarize_times(seconds: Sequence[float]) -> MeasuredTime:
    if not seconds:
        return MeasuredTime()
    mean = fmean(seconds)
    return MeasuredTime(mean, _relative_deviation(pstdev(seconds), mean), len(seconds))


def _relative_deviation(sd: float, mean: float) -> float:
    return min(5.0, sd / mean) if mean > 0 else 0.0
