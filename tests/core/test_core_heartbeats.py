"""Which heartbeats are news: only those reach the core of a live manager, and its journal."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from core.builders import Cluster

from stoker.manager.core.events import FromPilot
from stoker.manager.core.pilot_reports import RECORD_S, is_heartbeat, must_be_recorded
from stoker.protocol import to_manager as say

Make = Callable[..., Cluster]
GB = 10**9


def beat(pilot: str = "p1", *uses: say.LibraryUse, **more: int) -> FromPilot:
    return FromPilot(pilot, 0, [say.Heartbeat(uses, **more)])  # type: ignore[arg-type]


def use(memory: int = 0, device: int = 0, cpu_s: float = 0.0) -> say.LibraryUse:
    return say.LibraryUse(1, memory, device, cpu_s)  # type: ignore[arg-type]


def test_a_heartbeat_that_repeats_what_is_known_is_no_news(cluster: Make) -> None:
    c = cluster(pilots=1).calls(1).ready()
    c.report("p1", say.Heartbeat((use(4 * GB, 8 * GB),), GB, 3), numbered=False)
    state = c.core.state
    for known in (
        beat("p1", use(4 * GB, 8 * GB, 99.0), cache_bytes=GB, refused_frames=3),
        beat("p1", use(4 * GB + 200_000_000, 8 * GB - 300_000_000), cache_bytes=GB + 4096, refused_frames=3),
        beat("p1", cache_bytes=GB, refused_frames=3),
    ):
        assert is_heartbeat(known)
        assert not must_be_recorded(state, known, c.now)


@pytest.mark.parametrize(
    "news",
    [
        beat("p1", use(5 * GB, 8 * GB), cache_bytes=GB, refused_frames=3),
        beat("p1", use(4 * GB, 7 * GB), cache_bytes=GB, refused_frames=3),
        beat("p1", use(4 * GB, 8 * GB), cache_bytes=GB, refused_frames=4),
        beat("p1", use(4 * GB, 8 * GB), cache_bytes=2 * GB, refused_frames=3),
    ],
)
def test_a_heartbeat_that_changes_a_fact_is_news(cluster: Make, news: FromPilot) -> None:
    c = cluster(pilots=1).calls(1).ready()
    c.report("p1", say.Heartbeat((use(4 * GB, 8 * GB),), GB, 3), numbered=False)
    assert must_be_recorded(c.core.state, news, c.now)


def test_runs_are_recorded_with_a_heartbeat_but_not_with_each(cluster: Make) -> None:
    c = cluster(pilots=1).calls(2).ready().end("1", run_s=2.0)
    state = c.core.state
    assert must_be_recorded(state, beat(), state.recorded_at + RECORD_S)
    c.wait(RECORD_S).report("p1", say.Heartbeat(), numbered=False).end("2", run_s=2.0)
    assert not must_be_recorded(state, beat(), c.now + 0.9 * RECORD_S)
    assert must_be_recorded(state, beat(), c.now + RECORD_S)


def test_a_numbered_heartbeat_is_an_event_as_any(cluster: Make) -> None:
    numbered = FromPilot("p1", 4, [say.Heartbeat()])  # type: ignore[arg-type]
    among = FromPilot("p1", 0, [say.Heartbeat(), say.PilotLeaving("bye")])  # type: ignore[arg-type]
    assert not is_heartbeat(numbered)
    assert not is_heartbeat(among)
