from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
from fake_manager import FakeManager, function, recipe

from stoker.contexts import payloads
from stoker.protocol.calls import CallOptions, CallSpec
from stoker.protocol.to_manager import (
    CallEvicted,
    CallsEnded,
    CallsProgress,
    CallsReturned,
    LibraryGone,
    LibraryResized,
)
from stoker.protocol.to_pilot import CancelCalls, EvictCall, ResizeLibrary, RunCalls, StopLibrary, TakeBack


def _load(start: int) -> dict[str, int]:
    print("loading")
    return {"start": start}


def _add(context: dict[str, int], more: int) -> int:
    return context["start"] + more


def _sleep(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def test_context_is_loaded_once_and_given_to_calls(served: FakeManager) -> None:
    begun = time.monotonic()
    ready = served.ready(recipe(_load, 40))
    assert ready.resident_bytes > 1e6
    assert ready.peak_bytes >= ready.resident_bytes
    assert 0 < ready.start_s < time.monotonic() - begun
    assert served.results(served.run(_add, [(n,) for n in range(100)], takes_context=True)) == list(range(40, 140))


def test_each_call_reports_where_its_printed_output_is(served: FakeManager) -> None:
    def talk(word: str) -> None:
        print(word)
        os.system(f"echo {word} from a child")

    served.ready(recipe(_load, 1))
    calls = served.run(talk, [("one",), ("two",)])
    quiet = served.run(os.getpid, [()])
    served.results(calls + quiet)
    printed = [served.ends()[call].printed for call in calls]
    texts = [Path(each.path).read_bytes()[each.start : each.end].decode() for each in printed]
    assert texts == ["one\none from a child\n", "two\ntwo from a child\n"]
    assert served.ends()[quiet[0]].printed is None


def test_each_call_runs_in_an_empty_folder_or_the_configured_folder(served: FakeManager, tmp_path: Path) -> None:
    def look(how: str) -> list[str]:
        here = sorted(os.listdir("."))
        Path("file").write_text("x")
        Path("deep/er").mkdir(parents=True)
        Path("deep/er/still").write_text("x")
        if how == "leave":
            os.chdir("/")
        if how == "destroy":
            import shutil

            shutil.rmtree(os.getcwd())
        return here

    served.ready(recipe())
    calls = served.run(look, [("stay",), ("leave",), ("destroy",), ("stay",), ("stay",)])
    assert served.results(calls) == [[]] * 5
    named = CallOptions(folder=str(tmp_path / "work"))
    assert served.results(served.run(look, [("stay",)], options=named)) == [[]]
    assert (tmp_path / "work" / "file").read_text() == "x", "a named folder keeps its files"
    first, second = served.results(served.run(os.getcwd, [(), ()]))
    assert first == second
    assert first.startswith(str(served.base / "scratch"))


def test_large_payloads_are_transferred_in_both_directions(served: FakeManager) -> None:
    def double(data: Any, raw: bytes) -> tuple[Any, bytes]:
        data *= 2
        return data, raw[::-1]

    served.ready(recipe())
    data, raw = numpy.arange(600_000, dtype=numpy.float64), bytes(range(256)) * 8000
    ((back, turned),) = served.results(served.run(double, [(data, raw)]))
    assert numpy.array_equal(back, data * 2)
    assert turned == raw[::-1]


def test_many_inline_payloads_fit_in_one_frame(served: FakeManager) -> None:
    def size(data: bytes) -> bytes:
        return data[:500_000]

    served.ready(recipe())
    results = served.results(served.run(size, [(bytes([n]) * 900_000,) for n in range(40)]))
    assert [result[:1] for result in results] == [bytes([n]) for n in range(40)]


def test_process_forked_by_a_call_cannot_report_progress(served: FakeManager) -> None:
    def forks() -> int:
        import stoker

        stoker.progress(1)
        child = os.fork()
        if not child:
            os._exit(0 if stoker.progress(2) is None else 3)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    served.ready(recipe())
    calls = served.run(forks, [()])
    assert served.results(calls) == [0]
    reports = [each for message in served.said if isinstance(message, CallsProgress) for each in message.reports]
    assert {each.done for each in reports} <= {1.0}


def test_missing_function_is_requested(served: FakeManager) -> None:
    def unsent(number: int) -> int:
        return number

    served.ready(recipe())
    calls = served.run(unsent, [(1,), (2,)], blob=False)
    back = served.wait_for(CallsReturned)
    assert back.need_function
    assert back.calls == tuple(calls)
    again = served.run(unsent, [(3,)], blob=True)
    assert served.results(again) == [3]


def test_eviction_of_a_call_returns_its_last_checkpoint(served: FakeManager) -> None:
    def count(to: int) -> int:
        import time

        from stoker.contexts import ambient

        start = ambient.saved_state(0)
        for n in range(start, to):
            ambient.progress(n, to, state=n)
            time.sleep(0.01)
        return start

    served.ready(recipe())
    (call,) = served.run(count, [(100_000,)])
    served.wait_for(CallsProgress)
    served.send(EvictCall(library=1, call=call))
    evicted = served.wait_for(CallEvicted)
    assert evicted.progress.call == call
    assert evicted.progress.done > 0
    assert payloads.loads(evicted.progress.state) == evicted.progress.done
    assert served.results(served.run(_sleep, [(0.0,)])) == [0.0]


def test_later_progress_reports_do_not_discard_a_checkpoint(served: FakeManager) -> None:
    def work() -> None:
        import time

        from stoker.contexts import ambient

        ambient.progress(1)
        ambient.progress(2, state="kept")  # this report is delayed, because it follows the first report too soon
        ambient.progress(3)
        time.sleep(0.2)
        ambient.progress(4)

    served.ready(recipe())
    served.results(served.run(work, [()]))
    reports = [report for said in served.said if isinstance(said, CallsProgress) for report in said.reports]
    assert [payloads.loads(report.state) for report in reports if report.state] == ["kept"]
    assert max(report.done for report in reports) == 4


def test_last_report_of_a_call_precedes_its_end(served: FakeManager) -> None:
    def work(to: int) -> None:
        from stoker.contexts import ambient

        for done in range(to + 1):  # these reports follow each other too quickly to be sent one by one
            ambient.progress(done)

    served.ready(recipe())
    calls = served.run(work, [(3,), (5,)])
    served.results(calls)
    told: dict[int, float] = {}
    for said in served.said:
        if isinstance(said, CallsProgress):
            told |= {report.call: report.done for report in said.reports}
        elif isinstance(said, CallsEnded):
            assert all(told[end.call] == (3, 5)[calls.index(end.call)] for end in said.ends)


def test_resize_is_passed_to_the_context(served: FakeManager) -> None:
    def load() -> Any:
        class Context:
            size = 0

            def resize(self, device_memory_bytes: int) -> None:
                if device_memory_bytes == 13:
                    raise MemoryError("cannot go below 100")
                self.size = device_memory_bytes

        return Context()

    served.ready(recipe(load), device_memory_bytes=10**9)
    served.send(ResizeLibrary(library=1, device_memory_bytes=2 * 10**9))
    assert served.wait_for(LibraryResized).device_memory_bytes == 2 * 10**9
    assert served.results(served.run(lambda context: context.size, [()], takes_context=True)) == [2 * 10**9]
    for refused in (10**15, 13):
        served.said.clear()
        served.send(ResizeLibrary(library=1, device_memory_bytes=refused))
        assert served.wait_for(LibraryResized).device_memory_bytes == 2 * 10**9


def test_unrelated_resize_attribute_of_a_context_is_ignored(served: FakeManager, tmp_path: Path) -> None:
    def load() -> Any:
        import numpy

        return numpy.arange(5)

    def wait() -> None:
        while not (tmp_path / "go").exists():
            time.sleep(0.01)

    served.ready(recipe(load))
    slow = served.run(wait, [()])
    served.send(ResizeLibrary(library=1, device_memory_bytes=1000))
    served.wait_for(LibraryResized, device_memory_bytes=1000)
    assert not served.ends()  # a call without updates needs no waiting thread
    (tmp_path / "go").touch()
    served.results(slow)
    assert served.results(served.run(lambda context: context.size, [()], takes_context=True)) == [5]


def test_slots_run_concurrently_with_separate_folders_and_output(served: FakeManager, tmp_path: Path) -> None:
    def meet(name: str, place: str) -> str:
        Path(name).write_text(name)
        print(f"I am {name}")
        Path(place, name).touch()
        end = time.monotonic() + 20
        while len(os.listdir(place)) < 4 and time.monotonic() < end:
            time.sleep(0.02)
        return ",".join([*sorted(os.listdir(".")), str(len(os.listdir(place)))])

    (place := tmp_path / "place").mkdir()
    served.ready(recipe(slots=4))
    calls = served.run(meet, [(name, str(place)) for name in "abcd"])
    assert served.results(calls) == ["a,4", "b,4", "c,4", "d,4"], "all four ran at the same time"
    for call, name in zip(calls, "abcd", strict=True):
        printed = served.ends()[call].printed
        assert Path(printed.path).read_bytes()[printed.start : printed.end] == f"I am {name}\n".encode()


# ---- random orders


def _work(seconds: float) -> float:
    if seconds < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(seconds)
    return seconds


def _left(manager: FakeManager, library: int) -> list[int]:
    left: list[int] = []
    for message in manager.said:
        if getattr(message, "library", None) != library:
            continue
        if type(message) is LibraryGone:
            left += [*message.running, *message.unstarted]
        elif type(message) is CallsEnded:
            left += [end.call for end in message.ends]
        elif type(message) is CallsReturned:
            left += message.calls
    return left


@pytest.mark.parametrize("slots", [1, 3])
def test_each_call_ends_or_is_returned_exactly_once(served: FakeManager, slots: int) -> None:
    """Use random orders, returns, cancellations, stops and deaths. Calls for an ended library are refused."""
    chance, blob, made = random.Random(slots), function(_work), recipe(slots=slots)
    sent: dict[int, set[int]] = {}
    cancelled: set[int] = set()
    current = number = 0
    until = time.monotonic() + 1.0
    while time.monotonic() < until or len(sent) < 2 or len(served.ends()) <= 60:
        if current not in sent or any(type(m) is LibraryGone and m.library == current for m in served.said):
            current += 1
            sent[current] = set()
            served.ready(made, library=current)
        calls = []
        for _ in range(chance.randrange(1, 40)):
            number += 1
            odds = chance.random()
            seconds = -1.0 if odds < 0.004 else 0.04 if odds < 0.02 else 0.002 if odds < 0.1 else 0.0
            calls.append(CallSpec(number, payloads.dumps(((seconds,), {}))))
        sent[current].update(spec.call for spec in calls)
        served.send(RunCalls(current, blob.key, calls, function_blob=blob))
        if chance.random() < 0.3:
            served.send(TakeBack(current, chance.randrange(1, 20)))
        if chance.random() < 0.1:
            one = chance.choice(sorted(sent[current]))
            cancelled.add(one)
            served.send(CancelCalls(current, (one,)))
        if chance.random() < 0.02:
            served.send(StopLibrary(current, "test", drain=chance.random() < 0.7))
        while served.receive(chance.choice([0, 0, 0.005])):
            pass
    served.send(StopLibrary(current, "test"))
    for library, calls_of in sent.items():
        served.gone(library)
        served.until(lambda: calls_of <= set(_left(served, library)), what="all calls to leave")  # noqa: B023
    served.settle()
    gone: set[int] = set()
    for message in served.said:
        if type(message) is LibraryGone:
            gone.add(message.library)
            assert len(message.running) <= slots
        elif type(message) is CallsEnded:
            assert message.library not in gone
            assert all(end.ok for end in message.ends)
    for library, calls_of in sent.items():
        left = _left(served, library)
        assert set(left) == calls_of
        twice = {call for call in left if left.count(call) > 1}
        assert twice <= cancelled, "cancelling a call that has already left is answered too"
