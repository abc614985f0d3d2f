from __future__ import annotations

import math

import pytest
from msgspec.structs import replace
from sim.worlds import NOW, calls, model, source, world

from stoker.contexts.recipe import Awareness
from stoker.errors import ConfigError
from stoker.manager.sim.check import check_arrivals, find_impossible_settings, raise_for_impossible_setting
from stoker.manager.sim.client import Arrival
from stoker.manager.sim.world import Files, Links, Rate, World
from stoker.site import Duration, Size

GB = 1_000_000_000


def test_world_that_can_run_its_calls_passes_the_check() -> None:
    raise_for_impossible_setting(world(source([(0.0, 2), (60.0, 1)]), model()), wanted=["llm"])


def test_empty_world_is_refused() -> None:
    assert [each[0] for each in find_impossible_settings(World({}, (), {}))] == [("sources",), ("contexts",)]


def test_unknown_context_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^an impossible world: contexts: calls want llms, did you mean llm\?$"):
        raise_for_impossible_setting(world(source(1), model()), wanted=["llms"])


def test_checked_load_time_includes_boot_and_file_transfers() -> None:
    files = (Files("weights", Size(10 * GB)),)
    pool = source(1, walltime_s=Duration(25.0), boot_s=Duration(3.0))
    links = Links(shared=Rate(1.0 * GB), network=Rate(2.0 * GB), bus=Rate(8.0 * GB))
    # boot 3 s, load 10 s, call 1 s; files take 5 s from the disk or 10 s from shared storage
    for awareness, seconds in ((Awareness.FULL, "19 s"), (Awareness.NONE, "24 s")):
        context = model(files=files, awareness=awareness)
        raise_for_impossible_setting(world(pool, context, links=links), wanted=["llm"])
        short = source(1, walltime_s=Duration(15.0), boot_s=Duration(3.0))
        with pytest.raises(ConfigError, match=f"lasts 15 s, and llm takes {seconds} until it is loaded"):
            raise_for_impossible_setting(world(short, context, links=links), wanted=["llm"])


@pytest.mark.parametrize("at_s", [[0.0, 5.0, 4.0], [0.0, 3.0, math.nan], [0.0, 0.0, math.inf], [0.0, 9.0, -1.0]])
def test_calls_with_decreasing_arrival_times_are_refused(at_s: list[float]) -> None:
    arrivals = check_arrivals(world(source(1), model()), [Arrival(at, "llm") for at in at_s])
    with pytest.raises(ConfigError, match=r"^call 2 arrives at .* s, before the previous call's"):
        list(arrivals)


def test_impossible_calls_are_refused() -> None:
    here = world(source(1), model())
    with pytest.raises(ConfigError, match=r"^call 0 wants the unknown context lm; did you mean llm\?"):
        list(check_arrivals(here, [Arrival(0.0, "lm")]))
    with pytest.raises(ConfigError, match=r"^call 1 has 0 items"):
        list(check_arrivals(here, [Arrival(0.0, "llm"), Arrival(0.0, "llm", items=0)]))
    assert list(check_arrivals(here, calls(3))) == calls(3)
    for wrong, said in (
        ({"items": 5, "items_done": 6}, "ends after 6 of its 5 items"),
        ({"fixed_s": -1.0}, "takes -1 s before its first item"),
        ({"shared_s": -1.0}, "takes -1 s before its first item"),
        ({"gang": (3, 2)}, "wants a gang of at least 3 and at most 2 libraries, which is impossible"),
        ({"gang": (0, 2)}, "wants a gang of at least 0 and at most 2 libraries, which is impossible"),
    ):
        with pytest.raises(ConfigError, match=f"^call 0 {said}"):
            list(check_arrivals(here, [Arrival(0.0, "llm", **wrong)]))


def test_gang_larger_than_the_number_of_libraries_is_refused() -> None:
    here = world(source([(0.0, 1), (60.0, 3)], devices=5), model(devices=2))
    assert len(list(check_arrivals(here, [Arrival(0.0, "llm", gang=(6, 8))]))) == 1
    said = r"^call 0 wants a gang of 7, but llm never has more than 6 libraries at a time, with 2 devices each$"
    with pytest.raises(ConfigError, match=said):
        list(check_arrivals(here, [Arrival(0.0, "llm", gang=(7, 8))]))


def test_context_with_more_devices_than_a_node_is_refused() -> None:
    raise_for_impossible_setting(world(source(1, devices=4), model(devices=4)), wanted=["llm"])
    with pytest.raises(
        ConfigError, match=r"devices = 4: llm needs 4 of one node, but no suitable node has more than 3"
    ):
        raise_for_impossible_setting(world(source(9, devices=3), model(devices=4)), wanted=["llm"])


def test_call_longer_than_the_life_of_every_block_is_refused() -> None:
    here = world(source(1, walltime_s=Duration(60.0)), model())
    assert len(list(check_arrivals(here, calls(2, items=49)))) == 2
    with pytest.raises(ConfigError, match=r"call 0 of llm can never end: 60 items take 1 min after a load of 10 s"):
        list(check_arrivals(here, calls(2, items=60)))
    assert list(check_arrivals(world(source(1), model()), calls(1, items=60)))


def test_long_call_is_accepted_if_gangs_or_checkpoints_shorten_it() -> None:
    four = world(source(4, walltime_s=Duration(60.0)), model(gang_s=Duration(2.0)))
    for shorter in ({"gang": (1, 4)}, {"items_done": 20}):
        assert list(check_arrivals(four, [Arrival(0.0, "llm", 60, **shorter)]))
    with pytest.raises(ConfigError, match="60 items take 52 s after a load of 10 s"):
        list(check_arrivals(four, [Arrival(0.0, "llm", 60, gang=(2, 2), fixed_s=20.0)]))
    kept = world(source(1, walltime_s=Duration(60.0)), model(), delays=replace(NOW, progress_s=Duration(5.0)))
    assert list(check_arrivals(kept, calls(1, items=600)))
