"""What loads and runs have cost before, by context and device kind, and what sources of pilots have given: kept across
sessions. The core asks for the first; `stoker plan` reads both."""

from __future__ import annotations

from typing import assert_never

from stoker.contexts.folders import state_folder
from stoker.contexts.performance import AvailabilityStore, DeviceSet, Estimate, PerformanceStore
from stoker.manager.core.events import (
    AdviceArrived,
    AskAdvice,
    ContextAdvice,
    CostAdvice,
    OfContext,
    Record,
    RecordLoad,
    RecordPace,
    RecordPilots,
    RecordRuns,
    RecordStay,
    RecordSteps,
    RecordWait,
)


def performance() -> PerformanceStore:
    """The user's measurements of contexts and calls."""
    return PerformanceStore(state_folder() / "performance.sqlite")


def availability() -> AvailabilityStore:
    """The user's record of what sources of pilots have given."""
    return AvailabilityStore(state_folder() / "availability.sqlite")


class History:
    """The user's stores. Where one cannot be opened it says so once and knows nothing."""

    def __init__(self, *, session: str) -> None:
        self._store = performance()
        self._sources = availability()
        self._session = session

    def record(self, command: Record) -> None:
        """Remember something. Runs are remembered as the mean of those since the last record."""
        match command:
            case RecordLoad():
                self._store.record_load(
                    command.recipe,
                    kind=command.kind,
                    load_s=command.load_s,
                    start_s=command.start_s,
                    resident_bytes=command.resident_bytes,
                    peak_bytes=command.peak_bytes,
                    device_bytes=command.device_bytes,
                    slots=command.slots,
                )
            case RecordRuns(recipe=recipe, kind=kind, function=function, calls=calls, run_s=run_s):
                if calls:
                    mean_s = run_s / calls
                    self._store.record_runs(
                        recipe, kind=kind, function=function, run_s=[mean_s], calls=calls, items=command.items / calls
                    )
            case RecordPace(recipe=recipe, kind=kind, size=size, pace_s=pace_s):
                self._store.record_pace(recipe, kind=kind, size=size, pace_s=pace_s)
            case RecordSteps(recipe=recipe, kind=kind, times=times):
                self._store.record_steps(recipe, kind=kind, times=times)
            case RecordWait(source=source, wait_s=wait_s, boot_s=boot_s):
                devices = DeviceSet(command.kind, command.devices, command.memory_bytes)
                self._sources.record_wait(source, wait_s=wait_s, boot_s=boot_s, devices=devices)
            case RecordStay(source=source, stay_s=stay_s, end=end, loss=loss):
                self._sources.record_stay(source, stay_s=stay_s, ended=end.value, why=loss.value if loss else "")
            case RecordPilots(source=source, pilots=pilots):
                self._sources.record_count(source, session=self._session, pilots=pilots)
            case _:
                assert_never(command)

    def answer(self, ask: AskAdvice) -> AdviceArrived | None:
        """What is known of a context, or None. The advisor is asked about other subjects."""
        if not isinstance(ask.about, OfContext):
            return None
        known, steps = self._store.estimates(ask.about.recipe), self._store.step_times(ask.about.recipe)
        for kind in steps:
            known.setdefault(kind, Estimate())
        if not known:
            return None
        by_kind = {
            kind: ContextAdvice(
                load_s=e.load_s + e.start_s,
                load_sd_s=e.load_sd,
                resident_bytes=e.resident_bytes if kind.startswith("cpu") else e.device_bytes,
                peak_bytes=e.peak_bytes if kind.startswith("cpu") else e.device_bytes,
                run_s=e.run_s,
                run_sd_s=e.run_sd,
                paces={size: measured.mean for size, measured in e.paces.items()},
                slots=e.slots,
                steps=steps.get(kind),
            )
            for kind, e in known.items()
        }
        return AdviceArrived(ask.about, CostAdvice(by_kind))

    def close(self) -> None:
        """Let go of the stores."""
        self._store.close()
        self._sources.close()
