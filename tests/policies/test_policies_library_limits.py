from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from core.builders import Cluster, Make, devices, recipe
from core.desk import SESSION
from policies import stubs

from stoker.contexts.recipe import LibraryLimits, Recipe
from stoker.manager.core.events import ClientGone, SessionKept
from stoker.manager.core.nouns import Library, LibraryState, PilotState
from stoker.manager.core.registry import combine_limits
from stoker.manager.core.seams import Action, Unload, View
from stoker.manager.policies import HottestFirst
from stoker.manager.policies.keep_alive import IdleTimers
from stoker.protocol import to_client, to_pilot, wire
from stoker.protocol import to_manager as say
from stoker.protocol.blocks import BlockPhase, ProvisioningRule, Source
from stoker.protocol.calls import Failure, FailureKind


def limited(name: str = "a", *, least: int = 0, most: int = 0, keep_alive_s: float | None = None) -> Recipe:
    return msgspec.structs.replace(recipe(name), limits=LibraryLimits(least, most, keep_alive_s))


def states(c: Cluster, context: str = "a") -> list[LibraryState]:
    return [x.state for x in c.context(context).libraries.values()]


def keep_alive_timers(c: Cluster) -> list[str]:
    return [key for key in c.core.state.timers if "keep-alive" in key]


def unloaded(c: Cluster, context: str = "a") -> Cluster:
    for library in list(c.context(context).libraries.values()):
        if library.state is LibraryState.STOPPING:
            c.die(library, failure=None)
    return c


# ---- the largest number


def test_loaded_libraries_never_exceed_max_libraries(cluster: Make) -> None:
    c = cluster(pilots=3).define(limited(most=1)).calls(50, context="a").wait(5)
    assert c.lives_on("a") == ["p1"]
    c.hot(context="a", load_s=0.1, run_s=0.0).wait(60)
    assert c.lives_on("a") == ["p1"]
    c.join("p4", "p5").calls(50, context="a").wait(60)
    assert c.lives_on("a") == ["p1"]
    assert "max_libraries = 1 allows no more" in c.story(f"c-{c.context('a').queue.head().id}")


def test_stopping_library_counts_until_it_has_ended(cluster: Make) -> None:
    c = cluster(pilots=2).define(limited(most=1, keep_alive_s=1.0)).call("x", context="a").ready().end("x").wait(1)
    assert states(c) == [LibraryState.STOPPING]
    c.call("y", context="a").wait(30)
    assert c.lives_on("a") == ["p1"]
    assert "a library of a is stopping; max_libraries = 1 allows no more" in c.story(f"c-{c.the_call('y').id}")
    unloaded(c)
    assert states(c) == [LibraryState.LOADING]


def test_limit_ignores_libraries_of_a_long_disconnected_pilot(cluster: Make) -> None:
    c = cluster(pilots=2).define(limited(most=1)).call("x", context="a").ready()
    c.cut("p1").call("y", context="a").wait(1)
    assert c.lives_on("a") == ["p1"], "it may be a blip"
    c.wait(10)
    assert c.lives_on("a") == ["p1", "p2"]
    c.ready(only="p2").end("y").come_back("p1", lib1=("x",)).end("x")
    assert sorted(state.value for state in states(c)) == ["ready", "stopping"], "the one too many goes"


def test_gang_larger_than_max_libraries_fails(cluster: Make) -> None:
    c = cluster(pilots=3).define(limited(most=2)).call("g", context="a", gang=(3, 3)).call("h", context="a")
    failure = c.ended["g"].failure
    assert failure.kind is FailureKind.NO_DEVICE
    assert "at most 2 libraries of context a may be loaded at once; ask for fewer" in failure.message
    assert "for a larger max_libraries" in failure.message
    assert "h" not in c.ended


def test_gang_error_says_that_another_program_set_the_limit(cluster: Make) -> None:
    c = cluster(pilots=4).define(limited(most=4)).client("bob").tell("bob", say.DefineRecipe(limited(most=1)))
    c.call("g", context="a", gang=(3, 3)).wait(2)
    message = c.ended["g"].failure.message
    assert "at most 1 libraries of context a may be loaded at once" in message
    assert "because another program set max_libraries = 1" in message
    assert "for a larger max_libraries there" in message


def test_lowered_limit_unloads_idle_libraries(cluster: Make) -> None:
    c = cluster(pilots=3).define(limited(most=3)).calls(3, context="a").ready().end("1", "2")
    assert len(c.lives_on("a")) == 3
    c.define(limited(most=1))
    assert sorted(state.value for state in states(c)) == ["ready", "stopping", "stopping"]
    assert c.holders("3")[0].state is LibraryState.READY, "what runs goes on"


def fault(c: Cluster, name: str) -> None:
    """Fail a call with a disk error (EIO) of its pilot, so that calls avoid this pilot for a while."""
    [library] = c.holders(name)
    failure = Failure(FailureKind.INFRASTRUCTURE, "EIO", library.pilot.id, library.id)
    c.end(name, failure=failure)


def test_extra_library_is_loaded_for_a_call_that_no_library_can_run(cluster: Make) -> None:
    c = cluster().join("p1", of=devices(2)).join("p2", "p3", "p4").define(limited(most=1)).calls(20, context="a")
    c.ready()
    fault(c, "1")
    for _ in range(3):
        c.wait(1.1)
    assert c.lives_on("a") == ["p1", "p2"], "the other device of p1 would not do"
    c.ready()
    assert c.holders("1")[0].pilot.id == "p2"
    fault(c, "1")
    for _ in range(10):
        c.wait(1.1)
    assert c.lives_on("a") == ["p1", "p2"], "one more, not one more each time"
    c.wait(30)
    running = [name for name in c.ids if c.the_call(name).holder is not None]
    c.end(*running)
    assert c.the_call("1").holder is not None


def test_library_is_replaced_only_if_another_pilot_can_run_the_call(cluster: Make) -> None:
    c = cluster().define(limited(most=1)).join("p1", "p2", ends_in_s=86_400.0)
    c.tell("ana", say.DefineFunction("g", "g", b"code of g"))
    c.calls(9, context="a", function="g").ready()
    for _ in range(9):
        c.end(*[name for name in c.ids if name not in c.ended and c.the_call(name).holder is not None])
    c.call("x", context="a").wait(36_000).end("x", run_s=36_000.0).call("y", context="a")
    c.wait(60)
    assert states(c) == [LibraryState.READY], "p2 ends before the call would, too"
    c.join("p3", ends_in_s=86_400.0)
    unloaded(c).wait(1.1).ready()
    assert c.holders("y")[0].pilot.id == "p3"


# ---- keep-alive


class ForTwoSeconds(HottestFirst):
    """Dispatch that unloads a library after two idle seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.keep_alive = IdleTimers(2.0)

    def on_out_of_calls(self, view: View, library: Library) -> Sequence[Action]:
        return (*super().on_out_of_calls(view, library), *self.keep_alive.handle_idle_library(view, library))

    def on_timer(self, view: View, key: str) -> Sequence[Action]:
        return self.keep_alive.handle_timer(view, key)


@pytest.fixture(params=["by its context's limit", "by a policy"])
def served(cluster: Make, request: pytest.FixtureRequest) -> Cluster:
    if request.param == "by a policy":
        c = cluster(pilots=1, policies=lambda: stubs.policies(dispatch=ForTwoSeconds())).define(recipe("a"))
    else:
        c = cluster(pilots=1).define(limited(keep_alive_s=2.0))
    return c.call("x", context="a").ready().end("x")


def test_library_is_unloaded_after_keep_alive_and_reloaded(served: Cluster) -> None:
    assert states(served.wait(1.9)) == [LibraryState.READY]
    assert states(served.wait(0.2)) == [LibraryState.STOPPING]
    assert "it was idle for 2 s" in served.library(context="a").notes[-1][1]
    unloaded(served).forget()
    assert served.pilot().devices["cpu:0"].free_bytes == served.pilot().devices["cpu:0"].facts.memory_bytes
    served.call("y", context="a")
    assert served.hears("p1", to_pilot.StartLibrary).recipe.key == "a"


def test_calls_restart_the_keep_alive_with_one_timer(served: Cluster) -> None:
    for number in range(20):
        served.wait(0.05).call(f"more-{number}", context="a").end(f"more-{number}", run_s=0.0)
        assert len(keep_alive_timers(served)) == 1
    assert states(served.wait(1.9)) == [LibraryState.READY]
    assert states(served.wait(0.2)) == [LibraryState.STOPPING]


def test_keep_alive_does_not_unload_a_busy_library(served: Cluster) -> None:
    served.wait(1.0).call("long", context="a").wait(50.0)
    assert states(served) == [LibraryState.READY]
    assert not keep_alive_timers(served)
    assert states(served.end("long").wait(1.9)) == [LibraryState.READY]
    assert states(served.wait(0.2)) == [LibraryState.STOPPING]


def test_min_libraries_stay_loaded_in_an_idle_session(cluster: Make) -> None:
    c = cluster(pilots=3).define(limited(least=1, keep_alive_s=2.0)).calls(3, context="a").ready().end("1", "2", "3")
    c.wait(10)
    assert sorted(state.value for state in states(c)) == ["ready", "stopping", "stopping"]
    unloaded(c)
    assert not keep_alive_timers(c), "no timer fires for what is to stay"
    assert states(c.wait(1000)) == [LibraryState.READY]


def test_zero_keep_alive_unloads_at_once_and_negative_is_refused(cluster: Make) -> None:
    c = cluster(pilots=1).define(limited(keep_alive_s=0.0)).call("x", context="a").ready().end("x")
    assert states(c) == [LibraryState.STOPPING]
    c = cluster(pilots=1).define(recipe("a")).call("x", context="a").ready().end("x")
    [action] = IdleTimers(0.0).handle_idle_library(c.core.state, c.library(context="a"))
    assert action == Unload(c.library(context="a").id, "it was idle for 0 s")
    with pytest.raises(ValueError, match="keep_alive_s = -1"):
        IdleTimers(-1)
    assert IdleTimers(1.0).handle_timer(c.core.state, "somebody-else") == ()


@pytest.mark.parametrize("keep_alive_s", [0.0, 5.0])
def test_keep_alive_does_not_unload_libraries_reserved_for_a_gang(cluster: Make, keep_alive_s: float) -> None:
    c = cluster(pilots=2).define(limited(keep_alive_s=keep_alive_s), recipe("b", memory="8 GB"))
    c.call("long", context="b").ready().call("g", context="a", gang=(2, 2)).ready().wait(60)
    assert states(c) == [LibraryState.READY], "the other device is busy"
    c.end("long").wait(60)
    unloaded(c, "b").wait(1).ready()
    assert len(c.holders("g")) == 2
    c.end("g").wait(keep_alive_s + 0.1)
    assert states(c) == [LibraryState.STOPPING] * 2


def test_libraries_reserved_for_a_cancelled_gang_are_unloaded(cluster: Make) -> None:
    c = cluster(pilots=2).define(limited(keep_alive_s=5.0), recipe("b", memory="8 GB")).call("long", context="b")
    c.ready().call("g", context="a", gang=(2, 2)).ready().wait(60)
    c.tell("ana", say.Cancel([c.ids["g"]])).wait(5.1)
    assert states(c) == [LibraryState.STOPPING]


def test_changed_keep_alive_applies_at_once(cluster: Make) -> None:
    c = cluster(pilots=1).define(limited(keep_alive_s=3600.0)).call("x", context="a").ready().end("x").wait(100)
    c.define(limited(keep_alive_s=110.0)).wait(5)
    assert states(c) == [LibraryState.READY]
    assert len(keep_alive_timers(c)) == 1
    assert states(c.wait(5.1)) == [LibraryState.STOPPING]
    c = cluster(pilots=1).define(limited(keep_alive_s=10.0)).call("x", context="a").ready().end("x").wait(5)
    c.define(limited(keep_alive_s=60.0)).wait(50)
    assert states(c) == [LibraryState.READY]
    assert states(c.wait(5.1)) == [LibraryState.STOPPING]


# ---- several programs, and recovery


@pytest.mark.parametrize(
    ("said", "holds"),
    [
        ([LibraryLimits(1, 4, 10.0), LibraryLimits(2, 3, 60.0)], LibraryLimits(2, 3, 60.0)),
        ([LibraryLimits(5, 0, None), LibraryLimits(0, 2, None)], LibraryLimits(2, 2, None)),
        ([LibraryLimits(0, 0, 0.0)], LibraryLimits(0, 0, 0.0)),
        ([], LibraryLimits()),
    ],
)
def test_strictest_library_limit_of_several_programs_applies(said: list[LibraryLimits], holds: LibraryLimits) -> None:
    assert combine_limits(said) == holds == combine_limits(said[::-1])


def test_connected_programs_set_the_limits_and_the_last_limits_stay(cluster: Make) -> None:
    c = cluster(pilots=3).client("bob").define(limited(least=1, most=2, keep_alive_s=5.0))
    c.tell("bob", say.DefineRecipe(limited(most=1, keep_alive_s=50.0)))
    assert c.context("a").limits == LibraryLimits(1, 1, 50.0)
    leave(c, "bob")
    assert c.context("a").limits == LibraryLimits(1, 2, 5.0)
    c.client("eve").tell("eve", say.DefineRecipe(recipe("a")))
    assert c.context("a").limits == LibraryLimits(1, 2, 5.0), "who names none says nothing"
    leave(c, "ana")
    assert c.context("a").limits == LibraryLimits(0, 2, 5.0), "only who is here has devices kept"
    c.tell("eve", say.DefineRecipe(limited(most=7)))
    assert c.context("a").limits == LibraryLimits(0, 7, None), "until another one names limits"


def leave(c: Cluster, client: str) -> None:
    c.event(ClientGone(client))


def test_min_libraries_of_a_program_are_unloaded_after_it_leaves(cluster: Make) -> None:
    c = cluster(pilots=1).client("eve").define(limited(least=1, keep_alive_s=5.0)).call("x", context="a")
    c.ready().end("x").wait(60)
    assert states(c) == [LibraryState.READY]
    leave(c, "ana")
    assert states(c) == [LibraryState.STOPPING], "it had been idle for longer than that already"


def test_program_that_reconnects_has_its_limits_again(cluster: Make) -> None:
    c = cluster(pilots=2).event(SessionKept()).client("eve").define(limited(least=1, most=1, keep_alive_s=5.0))
    c.tell("eve", say.DefineRecipe(limited(most=3)))
    leave(c, "ana")
    assert c.context("a").limits == LibraryLimits(0, 3, None)
    c.tell("eve", say.DefineRecipe(limited(most=4)))
    come_back(c, "ana")
    assert c.context("a").limits == LibraryLimits(1, 1, 5.0)
    leave(c, "eve")
    leave(c, "ana")
    assert c.context("a").limits == LibraryLimits(0, 1, 5.0)
    come_back(c, "ana")
    assert c.context("a").limits == LibraryLimits(1, 1, 5.0), "also the least number"


def come_back(c: Cluster, client: str) -> None:
    taken = c.core.state.clients[client].inbox.last
    received = c.core.state.clients[client].first_unacked
    c.tell(client, say.ClientHello(wire.VERSION, SESSION, received, acknowledged=taken), numbered=False)


def test_calls_with_limits_are_refused_if_no_policy_honours_them(cluster: Make) -> None:
    from stoker.manager.policies.arlo import arlo
    from stoker.manager.policies.prompt_tuner import prompt_tuner

    for policies in (prompt_tuner, arlo):
        c = cluster(pilots=1, policies=policies).define(recipe("a")).call("fine", context="a")
        c.define(limited(most=1, keep_alive_s=1.0)).call("not", context="a")
        assert c.ended["not"].failure.kind is FailureKind.DROPPED
        assert "leave out max_libraries, keep_alive" in c.ended["not"].failure.message
        assert c.context("a").limits == LibraryLimits()
        c.ready().end("fine")
        c.define(recipe("a")).call("taken-back", context="a")
        assert "taken-back" not in c.ended


# ---- pilots


def source(**how: object) -> Source:
    return Source(
        "here", rule=ProvisioningRule.DEMAND, most=4, first=0, least=0, idle_s=60.0, finish_within_s=1.0, **how
    )


def came(c: Cluster, block: str, pilot: str) -> Cluster:
    return c.block(block, phase=BlockPhase.RUNNING).join(pilot, block=block)


def test_pilots_beyond_the_library_limit_are_not_requested(cluster: Make) -> None:
    c = cluster().sources(source()).define(limited(most=2)).calls(100, context="a").wait(1)
    assert len(c.asked()) == 2
    without = cluster().sources(source()).define(recipe("a")).calls(100, context="a").wait(1)
    assert len(without.asked()) > 2


def test_idle_pilot_is_released_unless_a_library_must_stay_loaded(cluster: Make) -> None:
    for least, goes in ((0, True), (1, False)):
        c = cluster().sources(source()).define(limited(least=least, keep_alive_s=10.0)).call("x", context="a").wait(1)
        [block] = c.asked()
        came(c, block, "p1").ready().end("x").wait(11)
        unloaded(c).forget().wait(200)
        released = [x for x in c.mail.get("factory", ()) if isinstance(x, to_client.CancelBlocks)]
        assert bool(released) is goes or c.pilot().is_released is goes


def test_releasing_blocks_together_keeps_the_minimum_of_libraries(cluster: Make) -> None:
    c = cluster().sources(source(), msgspec.structs.replace(source(), name="there"))
    c.define(limited(least=1)).calls(4, context="a").wait(1)
    blocks = c.asked()
    for number, block in enumerate(blocks, 1):
        came(c, block, f"p{number}")
    c.ready().end("1", "2", "3", "4").wait(200)
    assert sum(x.pilot.state is PilotState.HERE for x in c.context("a").libraries.values()) == 1
    assert sum(p.is_released for p in c.core.state.pilots.values()) == 3


def test_block_is_requested_if_present_pilots_cannot_run_the_call(cluster: Make) -> None:
    c = cluster().sources(source(walltime_s=86_400.0)).define(limited(most=1)).call("x", context="a").wait(1)
    [block] = c.asked()
    c.block(block, phase=BlockPhase.RUNNING).join("p1", block=block, ends_in_s=86_400.0).ready().wait(36_000)
    c.end("x", run_s=36_000.0).call("y", context="a").wait(1)
    [other] = c.asked()
    assert states(c) == [LibraryState.READY]
    c.block(other, phase=BlockPhase.RUNNING).join("p2", block=other, ends_in_s=86_400.0)
    unloaded(c).ready()
    assert c.holders("y")[0].pilot.id == "p2"
