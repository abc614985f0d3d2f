from __future__ import annotations

from typing import Any

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


def test_changed_batch_is_reported_at_a_limited_rate() -> None:
    model, said = Model(), list[BatchReport]()
    reports = BatchReports(model, say=said.append, every_s=10)
    reports.send_if_due(0.0)
    assert said == [BatchReport(model.load, TIMES)]
    model.load = EngineLoad(running=2, steps=7)
    reports.send_if_due(9.0)
    assert len(said) == 1
    reports.send_if_due(10.0)
    reports.send_if_due(20.0)  # no change since the last report
    assert said[1:] == [BatchReport(model.load)]


def test_cache_that_will_be_too_small_is_reported_at_once() -> None:
    model, said = Model(), list[BatchReport]()
    reports = BatchReports(model, say=said.append, every_s=10)
    reports.send_if_due(0.0)
    model.load = EngineLoad(running=2, cache_tokens=100, peak_tokens=100)
    reports.send_if_due(1.0)
    assert len(said) == 1
    model.load = EngineLoad(running=2, cache_tokens=100, peak_tokens=101)
    reports.send_if_due(2.0)
    reports.send_if_due(3.0)  # no change since the last report
    assert [report.load.peak_tokens for report in said] == [0, 101]


def test_profile_is_sent_at_once() -> None:
    model, said = Model(), list[BatchReport]()
    reports = BatchReports(model, say=said.append, every_s=10)
    reports.send_if_due(0.0)
    model.urgent, model.fresh = True, TIMES
    reports.send_if_due(1.0)
    assert [report.times for report in said] == [TIMES, TIMES]


def test_context_may_report_load_without_step_times() -> None:
    class Bare:
        def batch_load(self) -> EngineLoad:
            return EngineLoad(running=1)

    said = list[BatchReport]()
    BatchReports(Bare(), say=said.append).send_if_due(0.0)
    assert said == [BatchReport(EngineLoad(running=1))]


def test_attributes_with_another_meaning_are_ignored() -> None:
    class Other:
        def batch_load(self) -> float:
            return 0.5

    said = list[BatchReport]()
    BatchReports(Other(), say=said.append).send_if_due(0.0)
    assert said == []


def test_manager_receives_the_batch_of_a_real_library(served: FakeManager) -> None:
    def load() -> Any:
        from stoker.contexts.inference.adapter import EngineLoad as Load

        class Context:
            def batch_load(self) -> Load:
                return Load(running=5, rows=8)

        return Context()

    served.ready(recipe(load))
    assert served.wait_for(LibraryBatch).load == EngineLoad(running=5, rows=8)
