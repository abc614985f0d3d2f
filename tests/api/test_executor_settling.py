"""Slow unpickling or a slow callback of one result does not delay other results."""

from __future__ import annotations

import functools
import os
import pickle
import queue
import threading
import time
from typing import Any

import pytest
from faults.world import until
from parsl.dataflow.futures import AppFuture
from polling import PATIENCE_S

from stoker.contexts import payloads
from stoker.contexts.recipe import BARE, ObjectRef
from stoker.manager.executor import client, futures
from stoker.manager.executor import settling as settling_module
from stoker.manager.executor.client import ClientLink
from stoker.manager.executor.failures import can_unpickle_without_user_code
from stoker.manager.executor.futures import AppCallFuture, CallFuture
from stoker.manager.executor.outgoing import Submission
from stoker.manager.executor.settling import WorkerThreads
from stoker.protocol.calls import CallEnd, CallOptions, Failure, FailureKind
from stoker.protocol.ids import CallId, FunctionKey
from stoker.protocol.to_pilot import FunctionBlob

SUBMISSION = Submission(FunctionBlob(FunctionKey("f"), "f", b"function"), BARE, CallOptions())
_gates: dict[str, threading.Event] = {}


def _rebuild(name: str) -> str:
    _gates[name].wait(30)
    return f"passed {name}"


class Gated:
    """A result whose unpickling waits for a gate."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> Any:
        return _rebuild, (self.name,)


@pytest.fixture
def gate(request):
    name = request.node.name
    gate = _gates[name] = threading.Event()
    yield name, gate
    gate.set()
    del _gates[name]


def submitted(link: ClientLink, router: Any, count: int) -> list[CallFuture]:
    found = [CallFuture(link) for _ in range(count)]
    for future in found:
        future.call = link.submit(SUBMISSION, b"x", future)
    router.calls(count)
    return found


def ended(future: CallFuture, value: Any) -> CallEnd:
    assert future.call is not None
    return CallEnd(future.call, True, pickle.dumps(value, 5))


def test_slow_unpickling_of_a_result_delays_no_other_result(link, router, gate):
    name, event = gate
    slow, quick = submitted(link, router, 8), submitted(link, router, 16)[:8]
    values: list[Any] = [1, "two", [3.0], {4: None}, range(5), slice(6), complex, frozenset({8})]
    router.answer([*(ended(future, Gated(name)) for future in slow), *map(ended, quick, values)])
    assert [future.result(PATIENCE_S) for future in quick] == values
    assert not any(future.done() for future in slow)
    event.set()
    assert [future.result(PATIENCE_S) for future in slow] == [f"passed {name}"] * 8


def test_slow_callback_delays_other_callbacks_only_once(link, router, gate, monkeypatch):
    def of_parsl(_):
        gate[1].wait(30)

    of_parsl.__module__ = "parsl.dataflow.dflow"  # callbacks of Parsl run on the thread that receives results
    monkeypatch.setattr(futures, "SLOW_S", 0.0)  # every callback counts as slow
    first, second, third = submitted(link, router, 3)
    router.answer([ended(first, 1)])
    assert first.result(PATIENCE_S) == 1
    second.add_done_callback(of_parsl)
    router.answer([ended(second, 2), ended(third, 3)])
    assert third.result(PATIENCE_S) == 3
    assert not gate[1].is_set()


def test_closing_a_link_delivers_the_received_results(link, router, gate, until, monkeypatch):
    monkeypatch.setattr(client, "SETTLE_LIMIT_S", PATIENCE_S)
    name, event = gate
    (slow,) = submitted(link, router, 1)
    router.answer([ended(slow, Gated(name))])
    until(lambda: not link.open_calls)
    closing = threading.Thread(target=link.close)
    closing.start()
    until(lambda: not link._thread.is_alive())
    event.set()
    closing.join(PATIENCE_S)
    assert slow.done()
    assert slow.result(0) == f"passed {name}"


def test_future_cancelled_before_unpickling_leaves_no_file(link, router, gate, tmp_path, until, monkeypatch):
    # no second thread starts: one thread unpickles all results
    monkeypatch.setattr(link.result_threads, "start_thread_if_behind", lambda now: None)
    place = tmp_path / "result-1"
    place.write_bytes(pickle.dumps("large", 5))
    (large,) = submitted(link, router, 1)
    link.result_threads.add(lambda: gate[1].wait(30))
    router.answer([CallEnd(large.call or CallId(0), True, ObjectRef(place.name, place.stat().st_size, str(place)))])
    until(lambda: not link.open_calls)
    assert large.cancel()
    gate[1].set()
    until(lambda: not place.exists())


@pytest.mark.parametrize(
    "value", [None, 1, "text", b"bytes", 1.5, [1, [2]], (1, "2"), {"a": {1: 2}}, {1, 2}, "x" * 999]
)
def test_only_builtin_types_are_unpickled_without_user_code(value):
    assert can_unpickle_without_user_code(CallEnd(CallId(1), True, payloads.dumps(value, what="result")))
    for other in (range(3), complex, ValueError("x"), Gated, [value, {2: Gated}], len):
        assert not can_unpickle_without_user_code(CallEnd(CallId(1), True, payloads.dumps(other, what="result")))
    assert not can_unpickle_without_user_code(CallEnd(CallId(1), True, ObjectRef("result-1", 10, "/nowhere")))
    assert not can_unpickle_without_user_code(CallEnd(CallId(1), False, payloads.dump_exception(ValueError("x"))))
    assert can_unpickle_without_user_code(CallEnd(CallId(1), False, b"", 0.0, Failure(FailureKind.CANCELLED, "why")))


@pytest.fixture
def no_threads(monkeypatch):
    """Let the start of settling threads fail, as at the process limit of a user."""
    start = threading.Thread.start

    def refuse(self: threading.Thread) -> None:
        if self.name == "stoker-settling":
            raise RuntimeError("can't start new thread")
        start(self)

    return lambda: monkeypatch.setattr(threading.Thread, "start", refuse)


def test_results_are_delivered_if_no_thread_can_be_started(link, router, no_threads):
    no_threads()
    first, second, third = submitted(link, router, 3)
    router.answer([ended(first, range(1)), ended(second, range(2))])
    assert [first.result(PATIENCE_S), second.result(PATIENCE_S)] == [range(1), range(2)]
    router.answer([ended(third, range(3))])
    assert third.result(PATIENCE_S) == range(3)


def test_thread_count_grows_again_after_failed_thread_starts(no_threads, monkeypatch, gate, until):
    here, done, start = WorkerThreads("done-callbacks"), [], threading.Thread.start
    here.add(lambda: gate[1].wait(30))
    until(here._work.empty)
    no_threads()
    here.add(lambda: done.append(1))
    monkeypatch.setattr(threading.Thread, "start", start)
    assert not done
    here.add(lambda: done.append(2))
    until(lambda: len(done) == 2)
    assert not gate[1].is_set()
    gate[1].set()
    here.close(limit_s=1.0)


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(settling_module, "START_THREAD_AFTER_S", 0.002)


def test_hundred_waiting_callbacks_do_not_block_a_program(link, router, until):
    count, value = 100, range(3)
    got: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def call_again(_: Any) -> None:
        inner = CallFuture(link)
        inner.call = link.submit(SUBMISSION, b"x", inner)
        got.put(inner.result(60))

    outer = submitted(link, router, count)
    for future in outer:
        future.add_done_callback(call_again)
    router.answer([ended(future, value) for future in outer])
    answered = count

    def answer_new() -> bool:
        nonlocal answered
        new = router.calls(answered)[answered:]
        if new:
            router.answer([CallEnd(spec.call, True, pickle.dumps(value, 5)) for spec in new])
            answered += len(new)
        return got.qsize() == count

    until(answer_new)
    assert {got.get() for _ in range(count)} == {value}


def test_callbacks_that_wait_for_each_other_run_on_many_threads(link, router, until, soon, caplog, monkeypatch):
    monkeypatch.setattr(settling_module.callbacks, "_has_warned", False)  # an earlier test may have issued the warning
    count = settling_module.WARN_ABOVE_THREADS + 20
    here, last, through = submitted(link, router, count), threading.Event(), []
    for number, future in enumerate(here):
        wait = last.set if number == count - 1 else lambda: last.wait(30)
        future.add_done_callback(lambda _, wait=wait: (wait(), through.append(1)))
    router.answer([ended(future, 1) for future in here])
    assert last.wait(PATIENCE_S)
    until(lambda: len(through) == count)
    [warning] = [record.message for record in caplog.records if "done-callbacks" in record.message]
    assert "64 done-callbacks of this program run for a long time, and other callbacks wait" in warning


def test_callbacks_run_in_order_even_if_a_callback_raises(link, router, until):
    ran: list[Any] = []
    (future,) = submitted(link, router, 1)
    raised = (None, ZeroDivisionError, SystemExit, KeyboardInterrupt, GeneratorExit, None)
    for number, error in enumerate(raised):

        def callback(_: Any, number: int = number, error: Any = error) -> None:
            ran.append(number)
            if error is not None:
                raise error

        future.add_done_callback(callback)
    router.answer([ended(future, "value")])
    until(lambda: len(ran) == len(raised))
    assert ran == sorted(ran)
    future.add_done_callback(lambda ended: ran.append((threading.get_ident(), ended.result())))
    assert ran[-1] == (threading.get_ident(), "value")


@pytest.mark.parametrize("make", [lambda: CallFuture(None), lambda: AppCallFuture({})], ids=["call", "app"])  # type: ignore[arg-type]
@pytest.mark.parametrize("earlier_runs_still", [False, True])
def test_callback_runs_if_its_future_ends_during_registration(monkeypatch, gate, until, make, earlier_runs_still):
    ran: list[str] = []
    is_users, future, started = settling_module.is_user_callback, make(), threading.Event()
    if not earlier_runs_still:
        gate[1].set()
    future.add_done_callback(lambda _: (started.set(), gate[1].wait(30), ran.append("earlier")))

    def end_future(callback: Any) -> bool:
        monkeypatch.setattr(settling_module, "is_user_callback", is_users)
        future.set_result(3)
        assert started.wait(PATIENCE_S)
        if not earlier_runs_still:
            settling_module.callbacks.wait_for_open_work(limit_s=PATIENCE_S)
        return is_users(callback)

    monkeypatch.setattr(settling_module, "is_user_callback", end_future)
    future.add_done_callback(lambda ended: ran.append(f"late {ended.result()}"))
    if earlier_runs_still:
        assert not ran
    gate[1].set()
    until(lambda: ran == ["earlier", "late 3"])


def test_blocked_callback_of_a_parsl_app_delays_no_other_result(link, router, gate):
    def update(record: dict[str, Any], future: Any) -> None:
        record["app_fu"].set_result(future.result())

    update.__module__ = "parsl.dataflow.dflow"
    parsls = AppFuture({})
    parsls.add_done_callback(lambda _: gate[1].wait(30))
    first, second = submitted(link, router, 2)
    first.add_done_callback(functools.partial(update, {"app_fu": parsls}))
    router.answer([ended(first, 1), ended(second, 2)])
    assert second.result(PATIENCE_S) == 2
    assert parsls.result(PATIENCE_S) == 1
    assert not gate[1].is_set()


class OneEndsAtEachLook:
    """A clock for `wait_for_open_work`: each reading ends one callback and adds 0.2 s."""

    def __init__(self, settling: WorkerThreads) -> None:
        self.may_end = threading.Semaphore(0)
        self._settling, self._waits, self._now = settling, threading.current_thread(), 0.0

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        if threading.current_thread() is not self._waits:
            time.sleep(seconds)
            return
        left = self._settling._unfinished
        self.may_end.release()
        until(lambda: self._settling._unfinished < left)
        self._now += 0.2


def test_closing_worker_threads_waits_while_callbacks_finish(monkeypatch):
    here, done = WorkerThreads("done-callbacks"), []
    clock = OneEndsAtEachLook(here)
    monkeypatch.setattr(settling_module, "time", clock)
    for _ in range(5):
        here.add(lambda: (clock.may_end.acquire(timeout=PATIENCE_S), done.append(1)))
    here.close(limit_s=0.3)
    assert len(done) == 5


def test_closing_worker_threads_does_not_wait_for_a_hung_callback(gate):
    done = []
    there = WorkerThreads("done-callbacks")
    there.add(lambda: (gate[1].wait(100), done.append(2)))
    there.close(limit_s=0.1)
    assert not done


def test_forked_process_runs_callbacks_on_its_own_threads(gate, until):
    settling_module.callbacks.add(lambda: gate[1].wait(30))
    until(settling_module.callbacks._work.empty)
    child = os.fork()
    if not child:
        ran = threading.Event()
        settling_module.callbacks.add(ran.set)
        os._exit(0 if ran.wait(PATIENCE_S) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
