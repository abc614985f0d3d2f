"""What a run's log says of tokens, and what a table shows of it."""

from __future__ import annotations

import pytest
from sim.engines import one_world, requests, served
from sim.worlds import calls, model, simulate, source, world

from stoker.manager.policies import default_policies
from stoker.manager.sim.log import EventLog, Happened
from stoker.manager.sim.run import Simulation
from stoker.manager.study.measures import TokenFigures, token_figures


def test_the_figures_are_those_of_the_rows() -> None:
    log = EventLog()
    for call, (first, late) in enumerate([(0.1, -0.4), (0.2, 0.0), (0.9, 0.4)]):
        log.note(1.0, Happened.TOKEN_FIRST, call=call, value=first)
        log.note(1.0, Happened.TOKEN_LATE, call=call, value=late)
    log.note(2.0, Happened.TOKEN_LATE, call=3, value=float("inf"))  # it has failed
    found = token_figures(log)
    assert found is not None
    assert (found.objectives, found.met, found.met_share, found.ttft_p50_s) == (4, 2, 0.5, 0.2)


def test_where_nothing_has_an_engine_there_are_none() -> None:
    assert token_figures(simulate(world(source(1), model()), calls(3))[0].log) is None


def test_counted_calls_have_nearly_the_same_figures() -> None:
    arrivals = requests(80, every_s=0.25)
    found: list[TokenFigures] = []
    for counted in (False, True):
        run = Simulation(one_world(served()), arrivals, default_policies(), counted=counted)
        run.run()
        figures = token_figures(run.log)
        assert figures is not None
        found.append(figures)
    each, classes = found
    assert 0 < each.met < each.objectives == 80
    assert (classes.met, classes.objectives) == (each.met, each.objectives)
    assert classes.ttft_p99_s == pytest.approx(each.ttft_p99_s, rel=0.02)
    assert classes.tpot_p50_s == pytest.approx(each.tpot_p50_s, rel=0.02)
