from __future__ import annotations

import time

import pytest
from parsl import python_app
from polling import PATIENCE_S, polls

import stoker
from stoker import errors
from stoker.manager.executor import client, map_calls

HOURS_S = 7200.0


LOAD = {"retries": 3}


@pytest.fixture(params=[-HOURS_S, HOURS_S], ids=["behind", "ahead"])
def ahead_s(request, monkeypatch, session):
    """Shift the wall clock of this program by hours, but not the clock of the manager."""
    really = time.time
    monkeypatch.setattr(time, "time", lambda: really() + request.param)
    return request.param


@pytest.mark.usefixtures("ahead_s")
def test_call_in_time_runs_and_late_call_is_dropped():
    @stoker.app(deadline="60 s", late="drop")
    def patient():
        return "in time"

    @stoker.app(deadline=0.5, late="drop")
    def hasty():
        time.sleep(0.4)

    assert patient().result(PATIENCE_S) == "in time"
    late = [hasty() for _ in range(10)]
    dropped = [future for future in late if isinstance(future.exception(PATIENCE_S), errors.CallDroppedError)]
    assert len(dropped) >= 4
    assert {future.task_record["try_id"] for future in late} == {0}, "a dropped call is not retried"


@pytest.mark.usefixtures("session")
def test_deadline_of_a_map_item_counts_from_its_submission(monkeypatch):
    @stoker.app(deadline="60 s", late="drop")
    def same(number):
        return number

    clock = Ahead()
    for module in (map_calls, client):
        monkeypatch.setattr(module, "time", clock)

    def slowly():
        for number in range(4):
            clock.seconds += 100.0
            yield number

    assert list(stoker.map(same, slowly())) == [0, 1, 2, 3]


class Ahead:
    def __init__(self):
        self.seconds = 0.0

    def monotonic(self):
        return time.monotonic() + self.seconds

    def __getattr__(self, name):
        return getattr(time, name)


@stoker.app(deadline=1.0, late="drop")
def of_stoker(path):
    with open(path, "a") as file:
        file.write("x")
    time.sleep(0.6)
    raise ValueError("again")


@python_app
def of_parsl(path, parsl_resource_specification):
    with open(path, "a") as file:
        file.write("x")
    time.sleep(0.6)
    raise ValueError("again")


@pytest.mark.usefixtures("session")
@pytest.mark.parametrize("of", ["stoker", "parsl"])
def test_retried_call_keeps_its_first_deadline(tmp_path, of):
    tries = tmp_path / "tries"
    for more in polls(PATIENCE_S):
        if of == "stoker":
            future = of_stoker(str(tries))
        else:
            wants = {"deadline_s": 1.0, "late": "drop"}
            future = of_parsl(str(tries), parsl_resource_specification=wants)
        with pytest.raises(errors.CallDroppedError, match="past its deadline"):
            future.result(PATIENCE_S)
        # try again: on a busy machine the deadline of a second may pass before the call begins
        if tries.exists() or not more:
            break
    assert tries.read_text() in ("x", "xx")
