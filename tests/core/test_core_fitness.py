"""Pilots with bad disks are avoided and reported. Their failures do not count against the recipe."""

from __future__ import annotations

import msgspec
import pytest
from core.builders import Cluster, Make, devices, recipe

from stoker.contexts.recipe import ObjectRef, Recipe
from stoker.manager.core import blame, pilot_reports
from stoker.protocol import to_client
from stoker.protocol import to_manager as say
from stoker.protocol.blocks import BlockPhase, ProvisioningRule, Source
from stoker.protocol.calls import Failure, FailureKind
from stoker.protocol.to_manager import LibraryPhase
from stoker.units import parse_bytes


def full(pilot: str) -> Failure:
    return Failure(FailureKind.PILOT, f"a on {pilot}: the disk is full; make room there")


def run_out(c: Cluster, pilot: str, *, phase: LibraryPhase = LibraryPhase.FETCHING, context: str = "a") -> None:
    library = c.library(pilot, context)
    c.report(pilot, say.LibraryUpdate(library.id, phase))
    c.die(library, failure=full(pilot), loading=True)


def test_full_disk_does_not_count_as_a_load_failure_of_a_context(cluster: Make) -> None:
    c = cluster(pilots=4).define(recipe("a")).calls(4, context="a")
    for pilot in ("p1", "p2", "p3"):
        run_out(c, pilot)
    c.wait(4)
    assert c.ended == {}
    assert c.lives_on("a") == ["p4"]
    c.ready()
    for name in "1234":
        c.end(name)
    assert all(end.ok for end in c.ended.values())
    assert c.context("a").load_failures == 0


def test_full_cache_blocks_one_context_and_full_disk_every_context(cluster: Make) -> None:
    c = cluster(pilots=1).define(recipe("a", memory="2 GB"), recipe("b", memory="2 GB")).call("1", context="a")
    run_out(c, "p1")
    c.call("2", context="b")
    assert (c.lives_on("a"), c.lives_on("b")) == ([], ["p1"])
    run_out(c, "p1", phase=LibraryPhase.STARTING, context="b")
    c.call("3")
    assert c.lives_on() == []


def test_unfit_pilot_is_reported_with_advice(cluster: Make) -> None:
    c = cluster(pilots=2).define(recipe("a")).call("1", context="a")
    run_out(c, c.lives_on("a")[0])
    assert c.lives_on("a") == ["p2"]
    run_out(c, "p2")
    status = c.status()
    assert status.trouble == {p: f"a on {p}: the disk is full; make room there" for p in ("p1", "p2")}
    assert "2 of 2 connected pilots cannot load a: a on p1: the disk is full" in status.contexts[-1].waits_for
    assert "cannot load a: a on p1: the disk is full; make room there" in c.story("p1")
    assert "2 of 2 connected pilots cannot load a" in c.story("a")


def test_calls_fail_if_every_pilot_is_unfit_and_a_later_call_retries(cluster: Make) -> None:
    c = cluster(pilots=2).define(recipe("a")).call("1", context="a")
    for seconds in (0, 5, 20):
        c.wait(seconds)
        run_out(c, "p1")
        run_out(c, "p2")
        assert c.ended == {}
    c.wait(12)
    failure = c.failure("1")
    assert failure.kind is FailureKind.PILOT
    assert failure.message == "no pilot of the session can hold context a:\n  " + "\n  ".join(
        f"a on {p}: the disk is full; make room there" for p in ("p1", "p2")
    )
    c.call("2", context="a").ready().end("2")
    assert c.ended["2"].ok
    c.tell("ana", say.AskCalls(1, None), numbered=False)
    listed = c.hears("ana", to_client.Calls).calls[0]
    assert listed.error.endswith("can hold context a: a on p1: the disk is full; make room there")


@pytest.mark.parametrize("given_up", [False, True])
def test_calls_wait_while_a_disconnected_pilot_may_return(cluster: Make, given_up: bool) -> None:
    c = cluster().sources(Source("mine", ProvisioningRule.FIXED, first=2, most=2)).define(recipe("a"))
    c.block("b1", "b2", phase=BlockPhase.RUNNING).join("p1", block="b1").join("p2", block="b2")
    c.cut("p2")
    if given_up:
        c.lose("p2")
    c.call("1", context="a")
    for again_s in (5, 20, 25):
        run_out(c, "p1")
        c.wait(again_s)
    assert c.ended == {}
    c.come_back("p2").wait(1)
    assert c.lives_on("a") == ["p2"]


def test_libraries_that_fail_for_one_full_disk_count_once(cluster: Make) -> None:
    c = cluster().join("p1", of=devices(4)).define(recipe("a", memory="5 GB")).calls(8, context="a")
    libraries = list(c.context("a").libraries.values())
    assert len(libraries) == 4
    for library in libraries:
        c.report("p1", say.LibraryUpdate(library.id, LibraryPhase.FETCHING))
    for library in libraries:
        c.die(library, failure=full("p1"), loading=True)
    c.wait(blame.UNFIT_RETRY_S[0] + 1)
    assert c.ended == {}
    assert "p1" in c.lives_on("a"), "the disk may have been full for a moment"


def test_unfit_pilot_is_retried_after_growing_pauses(cluster: Make) -> None:
    c = cluster(pilots=1).define(recipe("a")).call("1", context="a").ready().join("p2").calls(8, context="a")
    for again_s in (*blame.UNFIT_RETRY_S, blame.UNFIT_RETRY_S[-1]):
        run_out(c, "p2")
        c.wait(again_s - 2)
        assert c.lives_on("a") == ["p1"]
        assert c.status().trouble
        c.wait(4)
        assert c.lives_on("a") == ["p1", "p2"]
        assert not c.status().trouble
    c.ready()
    c.die(c.library("p2", "a"), failure=full("p2"))
    c.wait(blame.UNFIT_RETRY_S[0] + 2)
    assert c.lives_on("a") == ["p1", "p2"], "it has worked there meanwhile: the first try comes soon again"


# ---- a cache with objects in use
def test_full_disk_that_ends_a_library_is_not_blamed_on_its_call(cluster: Make) -> None:
    c = cluster(pilots=2).define(recipe("a")).call("1", context="a").ready(only="p1")
    for _ in range(3):
        library = next(iter(c.context("a").libraries.values()))
        c.die(library, "1", failure=full(library.pilot.id))
        assert c.the_call("1").get_or_create_history().library_deaths == 0
        blame.mark_pilot_fit(c.pilot("p1"), "a")
        blame.mark_pilot_fit(c.pilot("p2"), "a")
        c.wait(2).ready()
        c.by_hand = True
    assert c.ended == {}


def with_files(name: str, size: str, *, file: str = "") -> Recipe:
    files = (ObjectRef(file or f"file-of-{name}", parse_bytes(size), "/models"),)
    return msgspec.structs.replace(recipe(name, memory="1 GB"), objects=files)


def in_use(c: Cluster, context: str, *, lacks: str) -> None:
    library = c.library("p1", context)
    c.report("p1", say.LibraryUpdate(library.id, LibraryPhase.FETCHING))
    c.report("p1", say.LibraryGone(library.id, full("p1"), loading=True, cache_lacks_bytes=parse_bytes(lacks)))


def ended(c: Cluster, context: str) -> None:
    library = c.library("p1", context)
    c.report("p1", say.LibraryGone(library.id))


def states(c: Cluster, *contexts: str) -> list[str]:
    return [c.library("p1", context).state.value for context in contexts]


def used_once(c: Cluster, *contexts: str) -> None:
    for context in contexts:
        c.call(f"of-{context}", context=context).ready().end(f"of-{context}").wait(1)


def test_only_libraries_needed_for_cache_space_end(cluster: Make) -> None:
    c = cluster(pilots=1).define(with_files("a", "1 GB"), with_files("b", "4 GB"), with_files("c", "4 GB"))
    used_once(c, "a", "b")
    c.call("c1", context="c")
    in_use(c, "c", lacks="3 GB")
    assert states(c, "a", "b") == ["ready", "stopping"]


def test_calls_wait_if_idle_libraries_would_free_too_little_cache(cluster: Make) -> None:
    c = cluster(pilots=1).define(with_files("a", "6 GB"), with_files("b", "7 GB"), with_files("z", "3 GB"))
    used_once(c, "z")
    c.call("long", context="a").ready().call("b1", context="b")
    for _ in range(30):
        in_use(c, "b", lacks="6 GB")
        c.wait(pilot_reports.RETRY_WHILE_FILES_USED_S + 0.1)
    assert states(c, "a", "z") == ["ready", "ready"]
    assert "b1" not in c.ended
    assert len(c.core.state.pilots["p1"].notes) < 10
    c.end("long")
    in_use(c, "b", lacks="6 GB")
    assert states(c, "a", "z") == ["stopping", "ready"]
    ended(c, "a")
    c.wait(pilot_reports.FILES_FREED_AFTER_S + 0.1).ready().end("b1")
    assert c.ended["b1"].ok


def test_context_with_shared_files_is_not_ended_for_cache_space(cluster: Make) -> None:
    shared = [with_files(name, "4 GB", file="shared") for name in "ac"]
    c = cluster(pilots=1).define(*shared, with_files("b", "1 GB"))
    used_once(c, "a", "b")
    c.call("3", context="c")
    in_use(c, "c", lacks="1 GB")
    assert states(c, "a", "b") == ["ready", "stopping"]


def test_call_fails_if_ending_libraries_cannot_free_enough_cache(cluster: Make) -> None:
    c = cluster(pilots=1).define(with_files("a", "4 GB"), with_files("b", "1 GB"))
    used_once(c, "b")
    c.call("1", context="a")
    for seconds in (0, 5, 20):
        c.wait(seconds)
        in_use(c, "a", lacks="2 GB")
        assert states(c, "b") == ["ready"]
    c.wait(12)
    assert c.ended["1"].failure is not None
