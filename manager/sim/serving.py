"""The batch of a simulated engine. Engines on the same device compute one after another, in turns."""

from __future__ import annotations

import math

import msgspec
from msgspec.structs import replace

from stoker.manager.sim.device import DeviceTurns, RunningWork
from stoker.manager.sim.log import TokenTimes
from stoker.manager.sim.runs import RunningLibrary, Surroundings
from stoker.manager.sim.virtual_engine import VirtualEngine
from stoker.manager.sim.world import TICK_S, EngineModel
from stoker.pilot.core.turns import EngineOutlook, UnreadPrompt
from stoker.protocol import to_agent
from stoker.protocol.calls import CallProgress, CallSpec
from stoker.protocol.ids import CallId, DeviceId

_LOOK_S, _REPORT_S = 1.0, 10.0
"""Seconds between two checks of the load, and between two reports (as in `stoker.pilot.library.connection`). A cache
that will be too small is reported at the next check.
"""


class EngineRun(msgspec.Struct, frozen=True, gc=False):
    spec: CallSpec
    batch: ServedBatch
    began_at: float

    def leave(self, library: RunningLibrary, *, keep: bool = False) -> CallProgress:  # noqa: ARG002 (as other runs)
        self.batch.remove(self.spec.call)
        sim = library.sim
        sim.calls_log.stopped(sim.agenda.now, self.spec, library.where, rank=0, kept_s=0.0)
        return CallProgress(self.spec.call, total=1.0)


class ServedBatch:
    def __init__(
        self, library: RunningLibrary, engine: VirtualEngine, turns: DeviceTurns, *, device_ids: tuple[DeviceId, ...]
    ) -> None:
        self.engine = engine
        self.number = library.number
        self.device_ids = device_ids
        self._library = library
        self._turns = turns
        self._sim: Surroundings = library.sim
        self._work: RunningWork | None = None
        self._reports = False
        self._reported_at = 0.0
        self._paused_until = 0.0  # Time until which the engine begins no step; 0 without a pause
        self._ended_at = 0.0  # End of the last engine step, not rounded to the resolution of the agenda

    @property
    def due_at(self) -> float:
        return self.engine.due_at

    def unread(self, spec: CallSpec) -> UnreadPrompt:
        times = self._sim.tokens[spec.call]
        self._set_load_grace(times)
        return UnreadPrompt(times.prompt, times.due_at + times.load_grace_s, times.tpot_s, times.most)

    def required_bytes(self, spec: CallSpec, model: EngineModel) -> int:
        features = spec.features
        tokens = self.engine.batch.peak_tokens(
            prompt=self._sim.tokens[spec.call].prompt, output=features.expected_output if features is not None else 0
        )
        return model.weights_bytes + tokens * model.token_bytes

    def outlook(self, *, pause_s: float = 0.0) -> EngineOutlook:
        """Return the open requests of the engine. `pause_s`: seconds of a cache resize before the next step."""
        now = self._sim.agenda.now
        ready_at = max(self._paused_until, now) + pause_s if pause_s else self._paused_until
        found = self.engine.outlook(self.number, now, ready_at=ready_at)
        return found if self._library.ready_at < math.inf else replace(found, rows=1, length=1.0)

    def _set_load_grace(self, times: TokenTimes) -> None:
        """Delay the deadlines of a call by the library's load, if the call arrived before the library was ready
        (SLINFER §IX-A).
        """
        library = self._library
        if not times.seen:
            times.load_grace_s = library.ready_at - library.ordered_at if times.came_at < library.ready_at else 0.0

    def begin(self, spec: CallSpec) -> EngineRun | str:
        now = self._sim.agenda.now
        times = self._sim.tokens[spec.call]
        why = self.engine.why_not(times)
        if why:
            return why
        self._set_load_grace(times)
        self.engine.add(spec.call, times, now=now)
        self._shorten_current_work()
        if not self._paused_until:
            self._turns.ask(self)
        if not self._reports:
            self._reports = True
            self._reported_at = now
            self._sim.agenda.after(_LOOK_S, self._report)
        return EngineRun(spec, self, now)

    def remove(self, call: CallId) -> None:
        self.engine.remove(call, now=self._sim.agenda.now)
        self._shorten_current_work()
        if not len(self.engine) and self._work is None:
            self._turns.leave(self)

    def pause(self, seconds: float) -> None:
        """Begin no step for `seconds` after the current step, because the cache is resized."""
        agenda = self._sim.agenda
        self.interrupt()
        self._paused_until = agenda.now + seconds
        if self._work is None:
            self._turns.leave(self)

    def resume(self) -> None:
        self._paused_until = 0.0
        if len(self.engine) and self._work is None and not self._library.is_over:
            self._turns.ask(self)

    def resize(self, model: EngineModel, memory_bytes: int) -> bool:
        """Change the memory of the cache. Return False if an open request would not fit."""
        why = self.engine.resize(model.limits(memory_bytes), now=self._sim.agenda.now)
        self._shorten_current_work()
        return not why

    def vanish(self) -> None:
        if self._work is not None:
            self._library.devices[0].stop(self._work)
            self._clear_current_work()
        self.engine.halt(self._sim.agenda.now)
        self._sim.engine_steps.add(self.engine.counts)
        self._turns.leave(self)

    def _report(self) -> None:
        library = self._library
        self._reports = not library.is_over and len(self.engine) > 0
        if not self._reports:
            return
        agenda = self._sim.agenda
        load = self.engine.load(agenda.now)
        if load.is_cache_too_small or agenda.now >= self._reported_at + _REPORT_S:
            self._reported_at = agenda.now
            library.say(to_agent.BatchReport(load))
        agenda.after(_LOOK_S, self._report)

    def take_turn(self, *, leap: bool) -> bool:
        now, devices = self._sim.agenda.now, self._library.devices
        at = self._ended_at if abs(self._ended_at - now) <= TICK_S else now
        if not self.engine.begin(at, leap=leap and all(device.is_idle for device in devices)):
            return False
        seconds = max(0.0, self.engine.ends_at - now)
        self._work = self._library.compute(seconds, part=1.0, then=self._finish_step, args=())
        if self.engine.is_in_burst:
            for device in devices:
                device.before_more_work = self.interrupt
        return True

    def interrupt(self) -> None:
        if self.engine.interrupt(self._sim.agenda.now):
            self._shorten_current_work()

    def _shorten_current_work(self) -> None:
        work = self._work
        if work is not None and self.engine.ends_at < work.began_at + work.seconds - TICK_S:
            self._library.devices[0].shorten(work, max(0.0, self.engine.ends_at - work.began_at))

    def _finish_step(self) -> None:
        sim, library = self._sim, self._library
        assert self._work is not None
        library.devices[0].done(self._work)
        self._clear_current_work()
        now, ends_at = sim.agenda.now, self.engine.ends_at
        # `now` is later than `ends_at` if other calls ran on the device.
        self._ended_at = ends_at if abs(now - ends_at) <= TICK_S else now
        for call in self.engine.end(self._ended_at):
            if not library.is_over:
                library.served(CallId(call))
        if library.is_over:
            return
        self._turns.ended(self, again=len(self.engine) > 0 and not self._paused_until)

    def _clear_current_work(self) -> None:
        self._work = None
        for device in self._library.devices:
            device.before_more_work = None
