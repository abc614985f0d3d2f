"""A map delivers results without waiting for the next item of a slow input."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time

import pytest
from polling import PATIENCE_S

import stoker
from stoker.manager.executor import mapping
from stoker.manager.executor.map_inputs import FORGOTTEN_S

SLOW_S = 0.03
QUICK = 4
"""Number of items after which an input counts as slow."""


def readers():
    return [thread for thread in threading.enumerate() if thread.name == "stoker-map-input"]


def assert_no_reader():
    for thread in readers():
        thread.join(PATIENCE_S)
    assert readers() == []


@pytest.fixture(autouse=True)
def _no_reader_before(monkeypatch):
    """Wait until the reader thread of an earlier test has ended. Items count as slow after `SLOW_S`."""
    monkeypatch.setattr(mapping, "SLOW_S", SLOW_S)
    assert_no_reader()


class Source:
    """An input of 12 items. Each item from number `QUICK` on waits until the program has read a result."""

    def __init__(self):
        self.taken = threading.Semaphore(0)
        self.late = 0
        self.closed = threading.Event()
        self.fails_at = -1

    def __iter__(self):
        try:
            for number in range(12):
                if number == self.fails_at:
                    raise ValueError(f"item {number}")
                if number < QUICK:
                    time.sleep(2 * SLOW_S)
                elif not self.taken.acquire(timeout=PATIENCE_S):
                    self.late += 1
                yield number
        finally:
            self.closed.set()

    def take(self, result, position):
        if position >= QUICK - 1:
            self.taken.release()
        return result


@pytest.mark.parametrize("ordered", [True, False])
def test_result_does_not_wait_for_the_next_input_item(session, ordered):
    source = Source()
    results = stoker.map(abs, iter(source), ordered=ordered)
    got = [source.take(result, position) for position, result in enumerate(results)]
    assert sorted(got) == list(range(12))
    assert not ordered or got == list(range(12))
    assert source.late == 0
    assert source.closed.wait(PATIENCE_S)
    assert_no_reader()


class Bell:
    """A replacement for the signal of a stream. It sets an event when the stream waits."""

    def __init__(self, bell):
        self.waited_for = threading.Event()
        self.put, self.empty, self.get_nowait = bell.put, bell.empty, bell.get_nowait
        self._get = bell.get

    def get(self, timeout):
        self.waited_for.set()
        return self._get(timeout=timeout)


def two_items():
    """Return an input of two items, an event set when item two is requested, and an event that releases item two."""
    at_item, go = threading.Event(), threading.Event()

    def items():
        yield 0
        at_item.set()
        go.wait(PATIENCE_S)
        yield 1

    return at_item, go, items


def for_ever(number):
    time.sleep(3600)
    return number


@contextlib.contextmanager
def consumed(session, results):
    """Iterate over a map on a thread. The thread must end without a result."""
    got = []
    thread = threading.Thread(target=lambda: got.extend(results), daemon=True)
    thread.start()
    yield
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert got == []
    assert not session.executor.link.open_calls


def test_closing_a_map_ends_its_waiting_loop(session, until):
    results = stoker.map(for_ever, range(2))
    results._wake_queue = bell = Bell(results._wake_queue)
    with consumed(session, results):
        assert bell.waited_for.wait(PATIENCE_S)
        results.close()
    until(lambda: session.status().running == session.status().queued == 0)


def test_calls_sent_while_a_map_closes_are_cancelled(session):
    at_item, go, items = two_items()

    results = stoker.map(for_ever, items())
    with consumed(session, results):
        assert at_item.wait(PATIENCE_S)
        results.close()
        go.set()


def test_map_closed_while_its_loop_starts_to_wait_ends(session):
    results = stoker.map(for_ever, range(2))
    results._wake_queue = bell = Bell(results._wake_queue)
    stops = iter([results.stop])

    def empty():
        for stop in stops:
            stop()
        return results._inbox.wake_queue.empty()

    bell.empty = empty
    with consumed(session, results):
        pass


def test_map_dropped_at_interpreter_exit_uses_no_modules(session, monkeypatch):
    results = stoker.map(abs, range(3))
    with monkeypatch.context() as gone:
        gone.setattr(mapping, "os", None)
        results.__del__(lambda: True)
    results.close()


@pytest.mark.parametrize("how", ["dropped", "closed"])
def test_forked_child_does_not_close_the_map_of_its_parent(session, tmp_path, how):
    gate = tmp_path / "go"

    def size(data):
        while not gate.exists():
            time.sleep(0.01)
        return data

    large = [bytes([number]) * 2_000_000 for number in range(6)]
    results = stoker.map(size, large)
    results._send_calls()
    child = os.fork()
    if not child:
        try:
            if how == "closed":
                results.close()
            else:
                del results
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    gate.touch()
    assert list(results) == large


@pytest.mark.parametrize("is_awaited", [False, True], ids=["plain", "awaited"])
def test_task_cancelled_while_taking_an_item_cancels_calls(session, is_awaited):
    at_item, go, items = two_items()

    async def awaited_items():
        yield 0
        at_item.set()
        await asyncio.sleep(20)

    async def consume():
        async for _ in stoker.amap(for_ever, awaited_items() if is_awaited else items()):
            pass

    async def run():
        before = set(threading.enumerate())
        task = asyncio.create_task(consume())
        assert await asyncio.to_thread(at_item.wait, PATIENCE_S)
        [thread] = [each for each in set(threading.enumerate()) - before if each.name == "stoker-amap"]
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go.set()
        await asyncio.to_thread(thread.join, PATIENCE_S)
        assert not thread.is_alive()
        assert not session.executor.link.open_calls

    asyncio.run(run())


class Indexed:
    """A sequence with only `__getitem__`, like data sets of PyTorch."""

    def __getitem__(self, place: int) -> int:
        return [0, -1, -2][place]


def test_items_with_only_index_access_are_accepted(session):
    assert list(stoker.map(abs, Indexed())) == [0, 1, 2]


def test_error_of_a_slow_input_is_raised_after_earlier_results(session):
    source = Source()
    source.fails_at = 8
    results = stoker.map(abs, iter(source))
    assert [source.take(next(results), position) for position in range(8)] == list(range(8))
    with pytest.raises(ValueError, match="item 8"):
        next(results)
    assert source.closed.wait(PATIENCE_S)
    assert_no_reader()


@pytest.mark.parametrize("how", ["close", "leave"])
def test_leaving_a_loop_ends_the_reader_thread_and_closes_the_input(session, how):
    source = Source()
    results = stoker.map(abs, iter(source))
    for position in range(6):
        source.take(next(results), position)
    [reader] = readers()
    if how == "close":
        results.close()
    del results
    gc.collect()
    source.taken.release()  # the reader thread finishes its current item before it ends
    reader.join(PATIENCE_S)
    assert not reader.is_alive()
    assert source.closed.wait(PATIENCE_S)


class Clock:
    """A clock that does not depend on the load of the machine."""

    now = 0.0

    def monotonic(self):
        return self.now


def hold_the_first(number, gate):
    while number == 0 and not os.path.exists(gate):
        time.sleep(0.01)
    return number


def test_input_with_few_slow_items_is_read_in_the_caller_thread(session, tmp_path, monkeypatch):
    monkeypatch.setattr(mapping, "time", clock := Clock())

    def rows():
        table = sqlite3.connect(":memory:")
        for number in range(60):
            clock.now += 3 * SLOW_S if number % 20 == 19 else 0.0
            yield table.execute(f"SELECT {number}").fetchone()[0]
        (tmp_path / "gate").touch()

    got = []
    function = functools.partial(hold_the_first, gate=str(tmp_path / "gate"))  # one call is always in flight
    for result in stoker.map(function, rows(), window=4, ordered=False):
        got.append(result)
        clock.now += FORGOTTEN_S / 10
    assert sorted(got) == list(range(60))


def test_slow_input_bound_to_its_thread_raises_an_error_with_advice(session):
    def rows():
        table = sqlite3.connect(":memory:")
        for number in range(10):
            time.sleep(2 * SLOW_S)
            yield table.execute(f"SELECT {number}").fetchone()[0]

    with pytest.raises(sqlite3.ProgrammingError, match="thread") as caught:
        list(stoker.map(abs, rows()))
    assert "make a list of it first, or give window=1" in caught.value.__notes__[0]
    assert list(stoker.map(abs, rows(), window=1)) == list(range(10))


def test_read_ahead_is_limited_to_one_window(session):
    read = []

    def items():
        for number in range(500):
            read.append(number)
            if number < QUICK:
                time.sleep(2 * SLOW_S)
            yield number

    results = stoker.map(abs, items(), window=20)
    try:
        for number in range(QUICK + 1):
            assert next(results) == number
        time.sleep(0.5)
        assert len(read) <= QUICK + 1 + 2 * 20 + 1
        assert list(results) == list(range(QUICK + 1, 500))
    finally:
        results.close()


PROGRAM = """
import time
import stoker

def items():
    for number in range(1000):
        time.sleep(0.15 if number < 6 else 600)
        yield number

with stoker.load():
    for number in stoker.map(abs, items()):
        print(number, flush=True)
"""


def test_ctrl_c_stops_a_program_with_a_slow_input(tmp_path):
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    program = subprocess.Popen(
        [sys.executable, str(file)], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert program.stdout is not None
    for line in program.stdout:
        if line == "5\n":  # the next item takes ten minutes
            break
    os.killpg(program.pid, signal.SIGINT)  # a terminal signals the whole process group
    _, complaint = program.communicate(timeout=120)  # far less than the ten minutes of the item
    assert complaint.count("stoker.map stopped: 6 results were taken; to continue, map the items after these") == 1
    assert complaint.splitlines()[-1] == "KeyboardInterrupt"
