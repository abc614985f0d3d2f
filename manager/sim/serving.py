"""The batch of a simulated engine. Engines on the same device compute one after another, in turns."""

from __future__ import annotations

import math

import msgspec
from msgspec.structs import replace

from stoker.manager.sim.device import DeviceTurns, DeviceWork
from stoker.manager.sim.log import TokenTimes
from stoker.manager.sim.runs import RunningLibrary, SimulationBase
from stoker.manager.sim.virtual_engine import VirtualEngine
from stoker.manager.sim.world import TICK_S, EngineModel
from stoker.pilot.core.turns import EngineOutlook, UnreadPrompt
from stoker.protocol import to_agent
from stoker.protocol.calls import CallProgress, CallSpec
from stoker.protocol.ids import CallId, DeviceId

_CHECK_INTERVAL_S, _REPORT_INTERVAL_S = 1.0, 10.0
"""Seconds between two checks of the engine's load, and between two load reports (as in
`stoker.pilot.library.connection`). A cache that will be too small is reported at the next check.
"""


class EngineRun(msgspec.Struct, frozen=True, gc=False):
    spec: CallSpec
    batch: ServedBatch
    began_at: float

    def leave_run(self, library: RunningLibrary, *, is_time_useful: bool = False) -> CallProgress:  # noqa: ARG002 (as other runs)
        self.batch.remove_call(self.spec.call)
        sim = library.sim
        sim.calls_log.log_stop(sim.agenda.now, self.spec, library.log_place, rank=0, kept_s=0.0)
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
        self._sim: SimulationBase = library.sim
        self._work: DeviceWork | None = None
        self._is_reporting = False
        self._reported_at = 0.0
        self._paused_until = 0.0  # Time until which the engine begins no step; 0 without a pause
        self._ended_at = 0.0  # End of the last engine step, not rounded to the resolution of simulated time

    @property
    def due_at(self) -> float:
        return self.engine.due_at

    def make_unread_prompt(self, spec: CallSpec) -> UnreadPrompt:
        times = self._sim.tokens[spec.call]
        self._set_load_grace(times)
        return UnreadPrompt(times.prompt, times.due_at + times.load_grace_s, times.tpot_s, times.most)

    def required_bytes(self, spec: CallSpec, model: EngineModel) -> int:
        features = spec.features
        tokens = self.engine.batch.peak_tokens(
            prompt=self._sim.tokens[spec.call].prompt, output=features.expected_output if features is not None else 0
        )
        return model.weights_bytes + tokens * model.token_bytes

    def describe_engine(self, *, pause_s: float = 0.0) -> EngineOutlook:
        """Return the open requests of the engine. `pause_s`: seconds of a cache resize before the next step."""
        now = self._sim.agenda.now
        ready_at = max(self._paused_until, now) + pause_s if pause_s else self._paused_until
        found = self.engine.describe_requests(self.number, now, ready_at=ready_at)
        return found if self._library.ready_at < math.inf else replace(found, rows=1, length=1.0)

    def _set_load_grace(self, times: TokenTimes) -> None:
        """Delay the deadlines of a call by the library's load time, if the call arrived before the library was ready
        (SLINFER §IX-A).
        """
        library = self._library
        if not times.seen:
            times.load_grace_s = library.ready_at - library.ordered_at if times.came_at < library.ready_at else 0.0

    def begin_request(self, spec: CallSpec) -> EngineRun | str:
        now = self._sim.agenda.now
        times = self._sim.tokens[spec.call]
        why = self.engine.find_refusal_reason(times)
        if why:
            return why
        self._set_load_grace(times)
        self.engine.add_request(spec.call, times, now=now)
        self._shorten_current_work()
        if not self._paused_until:
            self._turns.request_turn(self)
        if not self._is_reporting:
            self._is_reporting = True
            self._reported_at = now
            self._sim.agenda.schedule_after(_CHECK_INTERVAL_S, self._report_load)
        return EngineRun(spec, self, now)

    def remove_call(self, call: CallId) -> None:
        self.engine.remove_request(call, now=self._sim.agenda.now)
        self._shorten_current_work()
        if not len(self.engine) and self._work is None:
            self._turns.remove_taker(self)

    def pause_steps(self, seconds: float) -> None:
        """Begin no step for `seconds` after the current step, because the cache is resized."""
        agenda = self._sim.agenda
        self.interrupt()
        self._paused_until = agenda.now + seconds
        if self._work is None:
            self._turns.remove_taker(self)

    def resume_steps(self) -> None:
        self._paused_until = 0.0
        if len(self.engine) and self._work is None and not self._library.is_over:
            self._turns.request_turn(self)

    def resize_cache(self, model: EngineModel, memory_bytes: int) -> bool:
        """Change the memory of the cache. Return False if an open request would not fit."""
        why = self.engine.apply_limits(model.make_batch_limits(memory_bytes), now=self._sim.agenda.now)
        self._shorten_current_work()
        return not why

    def end_silently(self) -> None:
        if self._work is not None:
            self._library.devices[0].stop_work(self._work)
            self._clear_current_work()
        self.engine.stop_computing(self._sim.agenda.now)
        self._sim.engine_steps.add(self.engine.counts)
        self._turns.remove_taker(self)

    def _report_load(self) -> None:
        library = self._library
        self._is_reporting = not library.is_over and len(self.engine) > 0
        if not self._is_reporting:
            return
        agenda = self._sim.agenda
        load = self.engine.measure_load(agenda.now)
        if load.is_cache_too_small or agenda.now >= self._reported_at + _REPORT_INTERVAL_S:
            self._reported_at = agenda.now
            library.report_to_pilot(to_agent.BatchReport(load))
        agenda.schedule_after(_CHECK_INTERVAL_S, self._report_load)

    def take_turn(self, *, whole_burst: bool) -> bool:
        now, devices = self._sim.agenda.now, self._library.devices
        at = self._ended_at if abs(self._ended_at - now) <= TICK_S else now
        if not self.engine.begin_steps(at, whole_burst=whole_burst and all(device.is_idle for device in devices)):
            return False
        seconds = max(0.0, self.engine.ends_at - now)
        self._work = self._library.begin_work(seconds, part=1.0, then=self._finish_step, args=())
        if self.engine.is_in_burst:
            for device in devices:
                device.before_more_work = self.interrupt
        return True

    def interrupt(self) -> None:
        if self.engine.end_burst_early(self._sim.agenda.now):
            self._shorten_current_work()

    def _shorten_current_work(self) -> None:
        work = self._work
        if work is not None and self.engine.ends_at < work.began_at + work.seconds - TICK_S:
            self._library.devices[0].shorten_work(work, max(0.0, self.engine.ends_at - work.began_at))

    def _finish_step(self) -> None:
        sim, library = self._sim, self._library
        assert self._work is not None
        library.devices[0].finish_work(self._work)
        self._clear_current_work()
        now, ends_at = sim.agenda.now, self.engine.ends_at
        # `now` is later than `ends_at` if other calls shared the device.
        self._ended_at = ends_at if abs(now - ends_at) <= TICK_S else now
        for call in self.engine.end_steps(self._ended_at):
            if not library.is_over:
                library.end_served_call(CallId(call))
        if library.is_over:
            return
        self._turns.end_turn(self, needs_another_turn=len(self.engine) > 0 and not self._paused_until)

    def _clear_current_work(self) -> None:
        self._work = None
        for device in self._library.devices:
            device.before_more_work = None
