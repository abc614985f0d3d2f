"""Process faults: processes of a machine are killed, terminated or frozen."""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Sequence

from batch.chaos import Stage, Step, Way
from batch.chaos_victims import HEAD, node_of
from faults.world import is_alive, kill

BLINK_S = (0.05, 1.5)
"""Seconds that a process is usually frozen."""
FROZEN_S = (1.0, 6.0)
"""Seconds of a freeze that exceeds the tolerated silence."""
ALL_FROZEN_S = (0.5, 3.0)
MANAGERS_A_MINUTE = 3


class Processes:
    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._managers: deque[float] = deque(maxlen=MANAGERS_A_MINUTE)

    def ways(self) -> dict[str, Way]:
        victims = self._stage.victims
        factory, seed = "stoker.manager.factory.main", "stoker.pilot.transfer.seed"
        return {
            "library": Way(600, self._kill_library),
            "library told to end": Way(200, self._tell_library),
            "frozen library": Way(500, lambda step: self._freeze(victims.libraries(), step, BLINK_S)),
            "zygote": Way(200, self._kill_zygote),
            "frozen zygote": Way(200, lambda step: self._freeze(victims.zygotes(), step, BLINK_S)),
            "pilot": Way(150, self._kill_pilot),
            "pilot told to end": Way(80, self._tell_pilot),
            "frozen pilot": Way(200, lambda step: self._freeze(victims.pilots(), step, FROZEN_S)),
            "pilot blinks": Way(400, lambda step: self._freeze(victims.pilots(), step, BLINK_S)),
            "manager": Way(200, self._kill_manager),
            "frozen manager": Way(300, lambda step: self._freeze(victims.managers(), step, BLINK_S)),
            "keeper": Way(100, lambda step: self._kill(victims.keepers(), step)),
            "factory": Way(150, lambda step: self._kill(victims.of(factory), step)),
            "frozen factory": Way(150, lambda step: self._freeze(victims.of(factory), step, FROZEN_S)),
            "seed": Way(150, lambda step: self._kill(victims.of(seed), step)),
            "frozen seed": Way(150, lambda step: self._freeze(victims.of(seed), step, FROZEN_S)),
            "guest": Way(100, lambda _step: self._kill_client("guest")),
            "attach": Way(100, lambda _step: self._kill_client("attach")),
            "all frozen": Way(50, self._freeze_all),
        }

    def _kill(self, candidates: Sequence[tuple[str, int]], step: Step) -> str:
        if not candidates:
            return ""
        name, pid = step.of(candidates)
        kill([pid])
        return name

    def _freeze(self, candidates: Sequence[tuple[str, int]], step: Step, span: tuple[float, float]) -> str:
        if not candidates or not self._stage.is_free("all frozen"):
            return ""
        name, pid = step.of(candidates)
        key, seconds = f"frozen {pid}", step.between(span)
        if not self._stage.is_free(key):
            return ""
        kill([pid], signal.SIGSTOP)
        self._stage.hold(key, seconds, lambda: kill([pid], signal.SIGCONT))
        return f"{name} for {seconds:.1f} s"

    def _freeze_all(self, step: Step) -> str:
        """Freeze all processes, like a sleeping laptop or a migrated virtual machine."""
        pids = [pid for _, pid in self._stage.victims.everything()]
        if any(not self._stage.is_free("all frozen", f"frozen {pid}") for pid in pids):
            return ""
        seconds = step.between(ALL_FROZEN_S)
        kill(pids, signal.SIGSTOP)

        def thaw() -> None:
            # send SIGCONT twice, because `nsenter` stops itself again when its program is stopped
            kill(pids, signal.SIGCONT)
            self._stage.hold("nsenter", 0.5, lambda: kill(pids, signal.SIGCONT))

        self._stage.hold("all frozen", seconds, thaw)
        return f"{len(pids)} processes for {seconds:.1f} s"

    # ---- pilots, libraries and zygotes

    def _kill_library(self, step: Step) -> str:
        return self._hit(self._stage.victims.libraries(), step, lambda pid: [pid], lambda pid: kill([pid]))

    def _tell_library(self, step: Step) -> str:
        """Terminate a library but not the agent, like a batch system that signals every process of a job."""
        candidates = self._stage.victims.libraries()
        if not candidates:
            return ""
        name, pid = step.of(candidates)
        kill([pid], signal.SIGTERM)
        return name

    def _kill_zygote(self, step: Step) -> str:
        """Kill a zygote while none of its libraries loads, because a context fails after two deaths during loads."""
        of = self._stage.victims.libraries_of
        candidates = [(name, pid) for name, pid in self._stage.victims.zygotes() if of(pid)]
        return self._hit(candidates, step, of, lambda pid: kill([pid]))

    def _kill_pilot(self, step: Step) -> str:
        return self.end_pilot(step, lambda pid: kill([pid]))

    def _tell_pilot(self, step: Step) -> str:
        return self.end_pilot(step, lambda pid: kill([pid], signal.SIGTERM))

    def end_pilot(self, step: Step, end: Callable[[int], object], *, head: bool = True) -> str:
        candidates = [(name, pid) for name, pid in self._stage.victims.pilots() if head or name != HEAD]
        libraries = self._stage.victims.libraries
        return self._hit(candidates, step, lambda pid: [each for _, each in libraries(node=node_of(pid))], end)

    def _hit(
        self,
        candidates: Sequence[tuple[str, int]],
        step: Step,
        libraries_of: Callable[[int], Sequence[int]],
        hit: Callable[[int], object],
    ) -> str:
        """Call `hit` on a candidate if all calls of its libraries run for the first time; return its name, else ""."""
        if not candidates or not self._stage.is_free("all frozen"):
            return ""
        name, victim = step.of(candidates)
        libraries = [pid for pid in libraries_of(victim) if self._stage.is_free(f"frozen {pid}")]
        kill(libraries, signal.SIGSTOP)
        try:
            if not all(map(self._stage.victims.is_innocent, libraries)):
                return ""
            hit(victim)
        finally:
            kill(libraries, signal.SIGCONT)
        return name

    # ---- managers and clients

    def _kill_manager(self, step: Step) -> str:
        if not self.may_kill_manager():
            return ""
        found = self._kill(self._stage.victims.managers(), step)
        if found:
            self.manager_was_killed()
        return found

    def may_kill_manager(self) -> bool:
        """True if fewer than `MANAGERS_A_MINUTE` managers were killed in the last minute."""
        full = len(self._managers) == MANAGERS_A_MINUTE
        return not full or time.monotonic() - self._managers[0] > 60

    def manager_was_killed(self) -> None:
        self._managers.append(time.monotonic())

    def _kill_client(self, name: str) -> str:
        pids = [pid for pid in self._stage.victims.clients(name) if is_alive(pid)]
        kill(pids)
        if pids:
            self._stage.restart(name)
        return name if pids else ""
