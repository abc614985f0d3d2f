"""Where a load that failed is tried again, under every residency policy that ships."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from core.builders import Cluster, recipe

from benchmarks.baselines.loading import policy
from stoker.manager.policies import SHIPPED
from stoker.manager.policies.where_to_load import GIVE_UP_ON_PILOT

Make = Callable[..., Cluster]


@pytest.mark.parametrize("name", SHIPPED)
def test_a_pilot_on_which_it_failed_too_often_is_left_alone_while_there_is_another(cluster: Make, name: str) -> None:
    c = cluster(pilots=1, policies=policy(name).make).define(recipe("a", memory="8 GB"))
    c.call("x", context="a").ready().end("x").join("p2")  # it is hot on p1, so failures elsewhere do not give it up
    c.call("gang", context="a", gang=(2, 2), due_in_s=10_000.0)
    for _ in range(GIVE_UP_ON_PILOT):
        c.wait(0.5).fail_load(c.library("p2", "a"))
    c.join("p3").wait(0.5)
    assert c.lives_on("a") == ["p1", "p3"]
    c.ready().wait(0.5)
    assert sorted(library.pilot.id for library in c.holders("gang")) == ["p1", "p3"]


@pytest.mark.parametrize("name", SHIPPED)
def test_a_load_that_failed_is_tried_where_it_has_not_failed_and_one_at_a_time(cluster: Make, name: str) -> None:
    c = cluster(pilots=1, policies=policy(name).make).define(recipe("a", memory="8 GB"))
    c.call("x", context="a").ready().end("x").join("p2").call("gang", context="a", gang=(4, 4), due_in_s=10_000.0)
    c.wait(0.5).fail_load(c.library("p2", "a")).join("p3", "p4", "p5").wait(0.5)
    tried = [pilot for pilot in c.lives_on("a") if pilot != "p1"]
    assert len(tried) == 1
    c.ready().wait(0.5)
    assert len(c.lives_on("a")) == 4


def test_where_there_is_no_other_pilot_it_is_tried_there_again(cluster: Make) -> None:
    c = cluster(pilots=1).define(recipe("a")).call("x", context="a").ready().end("x").join("p2")
    c.call("gang", context="a", gang=(2, 2))
    for _ in range(GIVE_UP_ON_PILOT):
        c.fail_load(c.library("p2", "a"))
    assert c.lives_on("a") == ["p1"]
    c.lose("p1").wait(5)
    assert c.lives_on("a") == ["p2"]
