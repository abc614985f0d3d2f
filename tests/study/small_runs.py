from __future__ import annotations

from typing import Any

from sim.worlds import calls, model, simulate, source, world

from stoker.manager.sim.log import EventLog


def small_run(*, seed: int = 0, **more: Any) -> EventLog:
    """Return the log of a hundred calls of 1 s on two devices. A load takes 10 s; one device is preempted at
    30.5 s.
    """
    return simulate(world(source([(0.0, 2), (30.5, 1)]), model(**more)), calls(100), seed=seed)[0].log
