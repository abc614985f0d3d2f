"""Chance that does not depend on the machine, the process, or the order of asking."""

from __future__ import annotations

from statistics import fmean, pstdev

import pytest

from stoker.chance import Stream
from stoker.manager.sim.agenda import Agenda, cancel


def test_numbers_are_a_function_of_seed_purpose_and_number_alone() -> None:
    # Written down once: another machine, Python or process must come to the same.
    assert Stream(1, "calls").uniform(0) == 0.5600279589820432
    assert [Stream(seed, purpose).uniform(3) for seed, purpose in ((1, "a"), (1, "a"), (2, "a"), (1, "b"))][:2]
    assert len({Stream(seed, purpose).uniform(3) for seed in (1, 2) for purpose in ("a", "b")}) == 4


def test_they_are_spread_evenly() -> None:
    stream = Stream(5, "x")
    drawn = [stream.uniform(n) for n in range(20_000)]
    assert all(0.0 < number < 1.0 for number in drawn)
    assert fmean(drawn) == pytest.approx(0.5, abs=0.01)
    assert pstdev(drawn) == pytest.approx(12**-0.5, abs=0.01)


@pytest.mark.parametrize("cv", [0.1, 0.5, 1.0])
def test_factors_have_mean_one_and_the_spread_that_was_asked_for(cv: float) -> None:
    stream = Stream(5, "x")
    drawn = [stream.factor(n, cv=cv) for n in range(50_000)]
    assert fmean(drawn) == pytest.approx(1.0, abs=0.02)
    assert pstdev(drawn) == pytest.approx(cv, rel=0.06)
    assert Stream(5, "x").factor(9, cv=0.0) == 1.0


def test_times_between_independent_events_have_their_mean() -> None:
    stream = Stream(5, "x")
    assert fmean(stream.exponential(n, mean=30.0) for n in range(20_000)) == pytest.approx(30.0, rel=0.03)


def test_things_happen_in_order_of_time_and_then_of_noting() -> None:
    agenda, happened = Agenda(), list[str]()
    agenda.at(2.0, happened.append, "late")
    agenda.at(1.0, happened.append, "first")
    agenda.at(1.0000000004, happened.append, "in the same microsecond")
    cancel(agenda.after(1.5, happened.append, "cancelled"))
    while agenda.step():
        pass
    assert happened == ["first", "in the same microsecond", "late"]
    assert agenda.now == 2.0
    with pytest.raises(ValueError, match=r"nothing can happen at 1\.0 s"):
        agenda.at(1.0, happened.append, "past")
