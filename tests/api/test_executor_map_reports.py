from __future__ import annotations

import stoker
from stoker.manager.executor.map_window import MapReports
from stoker.protocol.to_manager import MapReport


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def made(items, *, batch_size=None):
    told: list[MapReport] = []
    clock = Clock()
    reports = MapReports(told.append, name="f", context="c", items=items, batch_size=batch_size, clock=clock)
    return reports, told, clock


def facts(report):
    return report.total, report.done, report.kept, report.unsent, report.over


def test_map_sends_at_most_one_report_per_second():
    reports, told, clock = made(100)
    reports.sent(20)
    reports.sent(20)
    reports.ended(5)
    assert [facts(each) for each in told] == [(100, 0, 0, 80, False)]
    clock.now = 1.5
    reports.ended(5)
    assert facts(told[-1]) == (100, 10, 0, 60, False)
    reports.close()
    reports.close()
    reports.ended(1)
    assert [facts(each) for each in told[2:]] == [(100, 10, 0, 60, True)]


def test_items_in_batches_and_kept_results_count_as_items():
    reports, told, clock = made(10, batch_size=4)
    reports.kept()
    clock.now = 2.0
    reports.sent(2)
    assert facts(told[-1]) == (10, 4, 4, 0, False)
    clock.now = 4.0
    reports.ended(2)
    assert facts(told[-1]) == (10, 10, 4, 0, False)


def test_map_without_a_length_reports_no_length():
    reports, told, _ = made(None)
    reports.sent(3)
    assert facts(told[-1]) == (-1, 0, 0, -1, False)


def test_map_that_sends_no_calls_reports_nothing():
    reports, told, _ = made(0)
    reports.close()
    assert told == []


def test_a_session_shows_its_maps(session):
    stream = stoker.map(abs, range(-10_000, 0), window=10)
    next(stream)
    (one,) = session.status().maps
    assert (one.function, one.total, one.kept) == ("abs", 10_000, 0)
    stream.close()
    assert session.status().maps == ()
    endless = stoker.map(abs, iter(range(10_000)), window=10)
    next(endless)
    (one,) = session.status().maps
    assert one.total == -1
    endless.close()
