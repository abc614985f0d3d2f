from __future__ import annotations

import pytest

from benchmarks.papers.slinfer.measures import TTFT_POINTS_S, measure
from stoker.manager.sim.client import Arrival
from stoker.manager.sim.log import EventLog, LoggedEvent
from stoker.protocol.calls import Objective

WANTED = Objective(ttft_s=0.5, ttft_per_token_s=1 / 512, ttft_most_s=8.0, tpot_s=0.25)
GPU, CPU = 0, 1
KINDS = {GPU: "gpu", CPU: "cpu"}


def _arrivals(count: int) -> list[Arrival]:
    return [Arrival(10.0, "a", input_length=256, output=11, objective=WANTED) for _ in range(count)]


def _library(log: EventLog, number: int, *, pilot: int = GPU, at_s: float = 0.0, load_s: float = 2.0) -> None:
    log.add_row(at_s, LoggedEvent.LIBRARY_STARTED, library=number, pilot=pilot, value=1.0)
    log.add_row(at_s + load_s, LoggedEvent.LIBRARY_READY, library=number, pilot=pilot, value=load_s)


def _call(
    log: EventLog, call: int, *, library: int = 1, began: float = 10.0, ended: float = 13.0, first: float, tpot: float,
    late: float,
) -> None:  # fmt: skip
    log.add_row(10.0, LoggedEvent.CALL_CAME, call=call, value=1.0)
    log.add_row(began, LoggedEvent.CALL_BEGAN, call=call, library=library, value=1.0)
    log.add_row(ended, LoggedEvent.CALL_ENDED, call=call, library=library, value=1.0)
    log.add_row(ended, LoggedEvent.TOKEN_FIRST, call=call, value=first)
    log.add_row(ended, LoggedEvent.TOKEN_MEAN, call=call, value=tpot)
    log.add_row(ended, LoggedEvent.TOKEN_LATE, call=call, value=late)


def test_requests_are_judged_per_token_and_by_mean_time_per_token() -> None:
    log = EventLog()
    _library(log, 1)
    _call(log, 0, first=0.4, tpot=0.24, late=-0.1)
    _call(log, 1, first=0.4, tpot=0.24, late=0.3)  # one token was 0.3 s late, but the mean time per token is in time
    _call(log, 2, first=0.1, tpot=0.26, late=-0.1)  # each token is slow, but the early first token compensates
    _call(log, 3, first=0.6, tpot=0.01, late=0.1)
    found = measure(log, _arrivals(4), KINDS, for_s=100.0)
    assert (found.met_strict, found.met_mean, found.dropped) == (0.5, 0.5, 0.0)
    assert dict(zip(TTFT_POINTS_S, found.ttft, strict=True))[0.5] == 0.75


def test_awaited_load_extends_the_deadline_of_a_request() -> None:
    log = EventLog()
    log.add_row(10.0, LoggedEvent.CALL_CAME, call=0, value=1.0)
    _library(log, 1, at_s=10.2, load_s=2.0)
    log.add_row(12.2, LoggedEvent.CALL_BEGAN, call=0, library=1, value=1.0)
    log.add_row(13.0, LoggedEvent.CALL_ENDED, call=0, library=1, value=1.0)
    log.add_row(13.0, LoggedEvent.TOKEN_FIRST, call=0, value=2.49)
    assert measure(log, _arrivals(1), KINDS, for_s=100.0).met_mean == 1.0
    assert measure(log, _arrivals(1), KINDS, for_s=100.0, not_granted_s={"a": 0.1}).met_mean == 0.0
    log.value[-1] = 2.51
    assert measure(log, _arrivals(1), KINDS, for_s=100.0).met_mean == 0.0


def test_node_with_several_instances_is_counted_once() -> None:
    log = EventLog()
    _library(log, 1, at_s=0.0)
    _library(log, 2, at_s=10.0)
    _library(log, 3, at_s=0.0, pilot=CPU)
    log.add_row(20.0, LoggedEvent.LIBRARY_ENDED, library=1)
    log.add_row(30.0, LoggedEvent.LIBRARY_ENDED, library=2)  # library 3 remains loaded beyond the measured time
    _call(log, 0, library=1, began=10.0, ended=14.0, first=0.1, tpot=0.1, late=-1.0)
    _call(log, 1, library=1, began=12.0, ended=14.0, first=0.1, tpot=0.1, late=-1.0)
    kinds = measure(log, _arrivals(2), KINDS, for_s=100.0).kinds
    assert (kinds["gpu"].nodes, kinds["gpu"].instances) == (0.3, 0.4)
    assert kinds["cpu"].nodes == 1.0
    assert kinds["gpu"].tokens_per_s == pytest.approx(22 / 30)
    assert kinds["gpu"].running == pytest.approx(1.5)
