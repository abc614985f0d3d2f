"""`stoker.map` limits the bytes of received and expected results, and reports its progress to the manager."""

from __future__ import annotations

from pathlib import Path

import pytest

import stoker
from stoker.manager.executor.map_window import GROW_S, WINDOW_BYTES, CallWindow, MapReporter
from stoker.protocol.calls import CallEnd
from stoker.protocol.ids import CallId
from stoker.protocol.to_manager import MapReport

KB, MB = 1_000, 1_000_000


def large(number, size):
    import os

    return number, os.urandom(size)


def came(stream):
    ends = [end for end in (*stream._ready.values(), *stream._arrived) if isinstance(end, CallEnd)]
    return sum(len(end.payload) if isinstance(end.payload, bytes) else end.payload.size_bytes for end in ends)


@pytest.mark.parametrize(("ordered", "size", "count"), [(True, 300 * KB, 60), (False, 1_200 * KB, 20)])
def test_slow_loop_over_large_results_has_bounded_memory(session, until, ordered, size, count):
    app = stoker.app()(lambda number: large(number, size))
    stream = stoker.map(app, range(count), ordered=ordered)
    window = stream._window
    window.most_bytes = 6 * MB
    window._clock = lambda: 0.0  # the clock does not advance, so a slow first result does not widen the window
    held, on_disk, numbers = [], [], []
    for number, data in stream:
        assert len(data) == size
        numbers.append(number)
        until(lambda: len(stream._arrived) == len(window.in_flight))  # the loop is slower than the pilots
        held.append(came(stream))
        on_disk.append(sum(file.stat().st_size for file in Path(session.folder).rglob("result-*")))
    assert sorted(numbers) == list(range(count))
    assert not ordered or numbers == list(range(count))
    assert 2 * MB < max(held) < 8 * MB
    assert max(on_disk) < 8 * MB
    assert window.held_bytes == 0


def test_results_after_a_slow_first_item_are_bounded_and_delivered(session, tmp_path, until):
    gate = str(tmp_path / "go")

    def gated(number):
        import os
        import time

        while number == 0 and not os.path.exists(gate):
            time.sleep(0.01)
        return number, os.urandom(60 * KB)

    stream = stoker.map(gated, range(400))  # the 64 calls before the first result return 4 MB
    stream._window.most_bytes = 6 * MB
    wait, sent = stream._wait_for_result, []

    def look():  # the loop waits for the first item while results of other items arrive
        sent.append(came(stream))
        if stream._free_call_count() == 0 and sent[-1] > 4 * MB:
            Path(gate).touch()
        wait()

    stream._wait_for_result = look
    assert [number for number, _ in stream] == list(range(400))
    assert max(sent) < 8 * MB


def test_results_larger_than_the_bound_arrive_one_at_a_time(session, until):
    stream = stoker.map(lambda number: large(number, 500 * KB), range(8))
    stream._window.most_bytes = 400 * KB
    stream._window._clock = lambda: 0.0
    for _ in range(8):
        next(stream)
        until(lambda: len(stream._arrived) == len(stream._window.in_flight))
        assert came(stream) <= 600 * KB
    with pytest.raises(StopIteration):
        next(stream)


class Calls:
    def __init__(self, most_calls: int, *, most_bytes: int = WINDOW_BYTES) -> None:
        self.now = 0.0
        self.window = CallWindow(most_calls, most_bytes=most_bytes, clock=lambda: self.now)
        self.sent = 0
        self.ready: list[int] = []

    def fill(self) -> int:
        room = self.window.free_call_count(ready=len(self.ready))
        for _ in range(room):
            self.window.in_flight[CallId(self.sent)] = (self.sent, 10)
            self.sent += 1
        self.window.count_argument_bytes(10 * room)
        return room

    def end(self, count: int, *, size_bytes: int) -> None:
        for call in list(self.window.in_flight)[:count]:
            del self.window.in_flight[call]
            self.ready.append(size_bytes)
        self.window.count_ended_calls(count, argument_bytes=10 * count, result_bytes=count * size_bytes)

    def take(self) -> None:
        self.window.held_bytes -= self.ready.pop(0)


def test_map_window_doubles_slowly_before_the_first_result():
    calls = Calls(2_000)
    assert calls.fill() == 64
    assert calls.fill() == 0
    calls.now = 1.0
    assert calls.window.seconds_until_growth() == GROW_S - 1.0
    calls.now = 0.0
    for most in (128, 256, 512, 1_024, 2_000):
        calls.now += GROW_S
        calls.fill()
        assert len(calls.window.in_flight) == most
    assert calls.window.seconds_until_growth() is None


def test_small_result_raises_the_map_window_to_its_maximum_at_once():
    calls = Calls(2_000)
    calls.fill()
    calls.end(1, size_bytes=100)
    calls.take()
    calls.fill()
    assert len(calls.window.in_flight) == 2_000
    assert calls.window.seconds_until_growth() is None


def test_map_window_is_computed_from_the_mean_size_of_recent_results():
    calls = Calls(2_000)
    calls.fill()
    calls.end(56, size_bytes=1 * MB)
    assert calls.fill() == 192  # 56 MB have arrived, and 200 MB are expected
    for _ in range(20):
        calls.take()
    assert calls.fill() == 20
    calls.end(220, size_bytes=1_000)  # the window allows many small results
    assert calls.fill() > 1_000


def test_map_window_grows_while_the_loop_waits_for_results():
    calls = Calls(2_000)
    calls.fill()
    calls.end(64, size_bytes=100 * MB)
    while calls.ready:
        calls.take()
    assert calls.fill() == 2
    for _ in range(40):
        calls.window.raise_limit_after_starvation()
        calls.fill()
        calls.end(1, size_bytes=100 * MB)
        calls.take()
        calls.fill()
    assert len(calls.window.in_flight) > 100
    calls.end(60, size_bytes=100 * MB)
    for _ in range(50):
        calls.take()
        assert calls.fill() == 0
    calls.end(len(calls.window.in_flight), size_bytes=100 * MB)
    while calls.ready:
        calls.take()
    assert calls.fill() == 2


# ---- reports


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def made(items, *, batch_size=None):
    told: list[MapReport] = []
    clock = Clock()
    reports = MapReporter(told.append, name="f", context="c", items=items, batch_size=batch_size, clock=clock)
    return reports, told, clock


def facts(report):
    return report.total, report.done, report.kept, report.unsent, report.over


def test_map_sends_at_most_one_report_per_second():
    reports, told, clock = made(100)
    reports.count_sent(20)
    reports.count_sent(20)
    reports.count_ended(5)
    assert [facts(each) for each in told] == [(100, 0, 0, 80, False)]
    clock.now = 1.5
    reports.count_ended(5)
    assert facts(told[-1]) == (100, 10, 0, 60, False)
    reports.close()
    reports.close()
    reports.count_ended(1)
    assert [facts(each) for each in told[2:]] == [(100, 10, 0, 60, True)]


def test_map_report_counts_items_of_batches_and_kept_results():
    reports, told, clock = made(10, batch_size=4)
    reports.count_kept()
    clock.now = 2.0
    reports.count_sent(2)
    assert facts(told[-1]) == (10, 4, 4, 0, False)
    clock.now = 4.0
    reports.count_ended(2)
    assert facts(told[-1]) == (10, 10, 4, 0, False)


def test_map_over_items_without_a_length_reports_no_total():
    reports, told, _ = made(None)
    reports.count_sent(3)
    assert facts(told[-1]) == (-1, 0, 0, -1, False)


def test_map_that_sends_no_calls_reports_nothing():
    reports, told, _ = made(0)
    reports.close()
    assert told == []
