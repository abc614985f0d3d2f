"""Maps report their lengths, so the manager knows the remaining work."""

from __future__ import annotations

from collections import deque

import pytest
from core.builders import Cluster, Make, recipe

from stoker.manager.core.events import ClientGone
from stoker.manager.core.outlook import MAX_OPEN_MAPS
from stoker.protocol import pace, to_client
from stoker.protocol import to_manager as say
from stoker.protocol.show_status import render


def report(number: int = 1, *, name: str = "verify", context: str = "bare", **how: int | bool) -> say.MapReport:
    return say.MapReport(number, name, context, **how)


def line_of_maps(c: Cluster) -> str:
    (line,) = [line for line in render(c.status()) if line.startswith("  maps")]
    return " ".join(line.split())


def test_session_forecast_includes_unsent_items_of_open_maps(cluster: Make) -> None:
    c = cluster(pilots=2).tell("ana", report(total=100, unsent=95)).calls(5).ready()
    c.wait(2).end("1", run_s=2.0).end("2", run_s=2.0)
    assert c.status().left_s == 98.0, "3 calls that are here and 95 others, of 2 s each, on two libraries"
    c.tell("ana", report(total=100, unsent=95, over=True))
    assert c.status().left_s == 3.0
    assert c.status().maps == ()


def test_map_has_its_own_progress_and_forecast(cluster: Make) -> None:
    c = cluster(pilots=1).calls(1).ready().tell("ana", report(total=1000, done=200, kept=200, unsent=790))
    for number in range(1, 61):
        c.wait(1).tell("ana", report(total=1000, done=200 + 2 * number, kept=200, unsent=790 - 2 * number))
    (found,) = c.status().maps
    assert (found.function, found.total, found.done, found.kept) == ("verify", 1000, 320, 200)
    assert abs(found.rate - 2.0) < 0.2
    assert abs(found.left_s - 340) < 40
    assert line_of_maps(c).startswith("maps verify 320 of 1,000 (200 kept by earlier runs) 2.0/s about 5 min")


def test_map_without_a_length_has_no_forecast(cluster: Make) -> None:
    c = cluster(pilots=2).tell("ana", report(done=2)).calls(5).ready()
    c.wait(2).end("1", run_s=2.0).end("2", run_s=2.0)
    assert c.status().left_s == 0.0
    assert line_of_maps(c) == "maps verify 2 done its length is unknown, so there is no forecast"
    assert "done in" not in render(c.status())[0]


def test_map_of_an_undefined_context_does_not_change_the_forecast(cluster: Make) -> None:
    c = cluster(pilots=2).define(recipe("a")).calls(5, context="a").ready()
    c.tell("ana", report(total=100, unsent=95, context="b"), report(2, context="b"))
    c.wait(2).end("1", run_s=2.0).end("2", run_s=2.0)
    assert c.status().left_s == 3.0


def test_maps_of_a_disconnected_program_are_not_shown(cluster: Make) -> None:
    c = cluster(pilots=1).client("bob").tell("bob", report(total=10)).tell("ana", report(total=20))
    assert [each.total for each in c.status().maps] == [20, 10]
    c.event(ClientGone("bob"))
    assert [each.total for each in c.status().maps] == [20]


def test_map_report_with_impossible_numbers_is_refused(cluster: Make) -> None:
    c = cluster().tell("ana", report(total=-2))
    assert "total is -2" in c.hears("ana", to_client.Rejected).reason
    assert c.status().maps == ()


def test_number_of_remembered_open_maps_is_bounded(cluster: Make) -> None:
    c = cluster().tell("ana", *(report(number, total=number) for number in range(MAX_OPEN_MAPS + 1)))
    totals = [each.total for each in c.status().maps]
    assert (len(totals), totals[0]) == (MAX_OPEN_MAPS, 1)


def bursts(period_s: int, *, until: int, count: int = 8) -> pace.Counts:
    counts: pace.Counts = deque()
    for second in range(0, until, period_s):
        pace.add_recent_count(counts, count, now=float(second))
    return counts


@pytest.mark.parametrize("period_s", [1, 2, 5, 8, 14])
def test_result_rate_is_constant_between_two_regular_bursts(period_s: int) -> None:
    for now in range(100, 100 + period_s):
        counts = bursts(period_s, until=now + 1)
        rate = pace.recent_rate_per_second(counts, now=now + 0.5)
        assert rate == pytest.approx(8 / period_s, rel=0.05), "it once swung by a factor of two"


def test_result_rate_falls_when_a_burst_is_missing() -> None:
    counts = bursts(5, until=100)
    rates = [pace.recent_rate_per_second(counts, now=float(now)) for now in (96, 105, 110, 120, 124)]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < rates[0] / 2
    assert pace.recent_rate_per_second(counts, now=130.0) == 0.0


def test_result_rate_starts_with_the_first_results() -> None:
    counts: pace.Counts = deque()
    assert pace.recent_rate_per_second(counts, now=5.0) == 0.0
    pace.add_recent_count(counts, 2, now=7.2)
    assert pace.recent_rate_per_second(counts, now=7.9) == 2.0
    assert pace.recent_rate_per_second(counts, now=11.0) == 0.5
