from __future__ import annotations

import msgspec
import pytest
from sim.worlds import model, simulate, source, world

from stoker.manager.sim.client import Arrival
from stoker.manager.sim.log import LoggedEvent
from stoker.manager.sim.world import Links, Rate, World
from stoker.site import Size

TURNS = 6


def two_models(*, sleepers_gb: int, sleeps: bool = True) -> World:
    """Return a world with one GPU of 24 GB and two contexts of 16 GB; a load takes 10 s, a move over the bus 1.6 s."""
    pool = source(1, sleeper_bytes=Size(sleepers_gb * 10**9))
    one = model(memory_gb=16, load_s=10.0, sleeps=sleeps)
    made = world(pool, one, links=Links(bus=Rate(10e9)))
    return msgspec.structs.replace(made, contexts={"one": one, "two": one})


def alternate(made: World) -> tuple[float, int]:
    """Send a request every 60 s to two models in turn; return the seconds of the last answer and the count of loads."""
    arrivals = [Arrival(60.0 * n, ("one", "two")[n % 2]) for n in range(TURNS)]
    run, _ = simulate(made, arrivals)
    happened = list(run.log.what)
    assert happened.count(LoggedEvent.CALL_ENDED) == TURNS
    ended = max(at for at, kind in zip(run.log.at_s, happened, strict=True) if kind == LoggedEvent.CALL_ENDED)
    return ended, happened.count(LoggedEvent.LIBRARY_READY)


def test_sleeping_model_answers_sooner_than_a_loading_model() -> None:
    ended_at, loads = alternate(two_models(sleepers_gb=40))
    assert loads == 2
    assert ended_at == pytest.approx(60 * (TURNS - 1) + 1.6 + 1.6 + 1.0, abs=0.1), "sleep, wake, call"


@pytest.mark.parametrize("made", [two_models(sleepers_gb=0), two_models(sleepers_gb=40, sleeps=False)])
def test_each_change_of_model_needs_a_load_without_sleep(made: World) -> None:
    ended_at, loads = alternate(made)
    assert loads == TURNS
    assert ended_at == pytest.approx(60 * (TURNS - 1) + 10 + 1.6 + 1.0, abs=0.1)
