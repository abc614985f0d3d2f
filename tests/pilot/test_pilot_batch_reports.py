from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fake_manager import FakeManager, recipe

from stoker.contexts.inference.adapter import EngineLoad
from stoker.contexts.step_times import StepSample, StepTimes, times_of
from stoker.pilot.library.connection import BatchReports
from stoker.protocol.to_agent import BatchReport
from stoker.protocol.to_manager import LibraryBatch

TIMES = times_of([StepSample(False, 4, 64, 0.1)])


class Model:
    def __init__(self) -> None:
        self.load = EngineLoad(running=1, steps=1)
        self.fresh = TIMES
        self.urgent = False

    def batch_load(self) -> EngineLoad:
        return self.load

    def take_step_times(self, *, urgent: bool = False) -> StepTimes:
        if urgent and not self.urgent:
            return StepTimes()
        found, self.fresh, self.urgent = self.fresh, StepTimes(), False
        return found


def test_changed_batch_is_reported_at_a_limited_rate_and_urgent_news_at_once() -> None:
    model, said = Model(), list[BatchReport]()
    reports = BatchReports(model, say=said.append, every_s=10)

    def at(now: float) -> list[BatchReport]:
        said.clear()
        reports.send_if_due(now)
        return list(said)

    assert at(0.0) == [BatchReport(model.load, TIMES)]
    model.load = EngineLoad(running=2, steps=7)
    assert at(9.0) == []
    assert at(10.0) == [BatchReport(model.load)]
    assert at(20.0) == [], "no change since the last report"
    model.urgent, model.fresh = True, TIMES
    assert at(21.0) == [BatchReport(model.load, TIMES)], "a profile is urgent"
    model.load = EngineLoad(running=2, cache_tokens=100, peak_tokens=100)
    assert at(22.0) == []
    model.load = EngineLoad(running=2, cache_tokens=100, peak_tokens=101)
    assert at(23.0) == [BatchReport(model.load)], "the cache will be too small"
    assert at(24.0) == []


@pytest.mark.parametrize(("load", "reported"), [(EngineLoad(running=1), True), (0.5, False)])
def test_context_may_report_load_without_step_times_but_no_other_type(load: object, reported: bool) -> None:
    said = list[BatchReport]()
    BatchReports(SimpleNamespace(batch_load=lambda: load), say=said.append).send_if_due(0.0)
    assert said == ([BatchReport(load)] if reported else [])  # type: ignore[arg-type]


def test_manager_receives_the_batch_of_a_real_library(served: FakeManager) -> None:
    def load() -> Any:
        from stoker.contexts.inference.adapter import EngineLoad as Load

        class Context:
            def batch_load(self) -> Load:
                return Load(running=5, rows=8)

        return Context()

    served.ready(recipe(load))
    assert served.wait_for(LibraryBatch).load == EngineLoad(running=5, rows=8)
