"""Keep-alive: a library that has been idle for long enough is unloaded, and no other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from core.builders import Cluster, recipe
from policies import stubs

from stoker.manager.core.nouns import Library, LibraryState
from stoker.manager.core.seams import Action, Policies, View
from stoker.manager.policies import HottestFirst
from stoker.manager.policies.keep_alive import IdleTimers

Make = Callable[..., Cluster]


class ForTwoSeconds(HottestFirst):
    """Dispatch that lets go of libraries which are idle for two seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.keep_alive = IdleTimers(2.0)

    def dry(self, view: View, library: Library) -> Sequence[Action]:
        return (*super().dry(view, library), *self.keep_alive.idle(view, library))

    def timer(self, view: View, key: str) -> Sequence[Action]:
        return self.keep_alive.fired(view, key)


def _policies() -> Policies:
    return stubs.policies(dispatch=ForTwoSeconds())


def _is_kept(c: Cluster) -> bool:
    return [x.state for x in c.core.state.libraries.values()] == [LibraryState.READY]


def _timers(c: Cluster) -> list[str]:
    return [key for key in c.core.state.timers if key.startswith("dispatch/keep-alive/")]


@pytest.fixture
def served(cluster: Make) -> Cluster:
    """One library that has just ended its first call."""
    c = cluster(pilots=1, policies=_policies).define(recipe("a")).call("first", context="a")
    return c.ready().end("first", run_s=0.0)


def test_an_idle_library_is_unloaded_when_its_time_is_over(served: Cluster) -> None:
    assert _is_kept(served.wait(1.9))
    served.wait(0.2)
    [library] = served.core.state.libraries.values()
    assert library.state is LibraryState.STOPPING
    assert "it has served nothing for 2 s" in library.notes[-1][1]


def test_a_call_gives_it_all_of_its_time_again_and_one_timer_does_for_many_calls(served: Cluster) -> None:
    for number in range(20):
        served.wait(0.05).call(f"more-{number}", context="a").end(f"more-{number}", run_s=0.0)
        assert len(_timers(served)) == 1
    assert _is_kept(served.wait(1.9))
    assert not _is_kept(served.wait(0.2))


def test_a_library_that_runs_a_call_when_its_time_is_over_stays(served: Cluster) -> None:
    served.wait(1.0).call("long", context="a").wait(5.0)
    assert _is_kept(served)
    assert not _timers(served)
    served.end("long", run_s=5.0)
    assert _is_kept(served.wait(1.9))
    assert not _is_kept(served.wait(0.2))


def test_a_library_that_is_gone_when_its_timer_fires_is_no_trouble(served: Cluster) -> None:
    served.lose("p1").wait(3.0)
    assert not served.core.state.libraries
    assert not _timers(served)


def test_no_time_at_all_unloads_at_once_and_less_than_none_is_refused(served: Cluster) -> None:
    [library] = served.core.state.libraries.values()
    [action] = IdleTimers(0.0).idle(served.core.state, library)
    assert action.library == library.id
    with pytest.raises(ValueError, match="keep_alive_s = -1"):
        IdleTimers(-1)
    assert IdleTimers(1.0).fired(served.core.state, "somebody-else") == ()
