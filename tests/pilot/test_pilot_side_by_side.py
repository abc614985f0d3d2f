"""Functions with clashing modules run in turn in the slots, and each function finds its own modules."""

from __future__ import annotations

import importlib
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_manager import FakeManager, recipe

from stoker.contexts import user_modules
from stoker.contexts.loading import load_context
from stoker.contexts.payloads import dumps_arguments, dumps_code
from stoker.contexts.recipe import ObjectRef, Recipe
from stoker.pilot.core.turns import CallQueue
from stoker.pilot.library.functions import CallCompatibility, Function, RunnableCall
from stoker.protocol.calls import CallOptions, CallSpec
from stoker.protocol.ids import CallId, FunctionKey, LibraryId
from stoker.protocol.to_library import Run
from stoker.protocol.to_manager import CallsReturned
from stoker.protocol.to_pilot import CancelCalls, FunctionBlob, TakeBack


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with modules of the sending program, which pilots do not search."""
    made = tmp_path / "program"
    made.mkdir()
    monkeypatch.syspath_prepend(str(made))
    return made


def blob(call: Callable[..., Any], folder: Path, *, whose: str) -> FunctionBlob:
    (folder / "sbs_util.py").write_text(f"WHOSE = {whose!r}\n")
    data = dumps_code((call, False), what="function")
    return FunctionBlob(key=FunctionKey(f"{call.__name__}-{whose}"), name=call.__name__, blob=data)


def note_and_import(log: str, until: str = "", begun: int = 0) -> str:
    """Log the start and end of the call; in between, wait for the file `until` and for `begun` started calls."""
    import os
    import time

    def note(word: str) -> None:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(descriptor, f"{word}\n".encode())
        os.close(descriptor)

    note("begins")

    def have_begun() -> int:
        with open(log) as file:
            return file.read().count("begins")

    while (until and not os.path.exists(until)) or have_begun() < begun:
        time.sleep(0.01)
    time.sleep(0.1)
    from sbs_util import WHOSE

    note(f"{WHOSE} ends")
    return WHOSE


def plain(*_: Any) -> str:
    return "plain"


def pause() -> str:
    time.sleep(0.1)
    return "paused"


def test_functions_with_clashing_modules_run_in_turn_and_in_order(served: FakeManager, folder: Path) -> None:
    served.ready(recipe(slots=4))
    log = folder / "log"
    programs = [blob(note_and_import, folder, whose=whose) for whose in ("a", "b")]
    counts = (2, 1, 3, 2, 1, 1)
    calls = [
        served.run(programs[turn % 2], [(str(log), "", sum(counts[: turn + 1]))] * count)
        for turn, count in enumerate(counts)
    ]
    assert [served.results(some) for some in calls] == [
        ["a"] * 2, ["b"], ["a"] * 3, ["b"] * 2, ["a"], ["b"]
    ]  # fmt: skip
    running, most, ended = 0, 0, ""
    for line in log.read_text().splitlines():
        running += 1 if line == "begins" else -1
        most = max(most, running)
        if line != "begins":
            ended += line[0]
    assert ended == "aabaaabbab"
    assert most == 3  # calls of one program run concurrently after the wait


def test_call_that_waits_for_its_modules_can_be_cancelled(served: FakeManager, folder: Path) -> None:
    served.ready(recipe(slots=3))
    log, go = folder / "log", folder / "go"
    (first,) = served.run(blob(note_and_import, folder, whose="a"), [(str(log), str(go))])
    served.until(log.exists, what="the first call to begin")
    # this call ends while another call waits for modules
    (beside,) = served.run(pause, [()], options=CallOptions(limit_s=2.0))
    second, third = served.run(
        blob(note_and_import, folder, whose="b"), [(str(log),)] * 2, options=CallOptions(limit_s=2.0)
    )
    last, newest = served.run(plain, [(), ()])
    assert served.results([beside]) == ["paused"]
    time.sleep(2.3)  # time limits run neither for the ended call nor for the waiting call
    served.send(CancelCalls(library=LibraryId(1), calls=(CallId(second),)))
    assert served.wait_for(CallsReturned).calls == (second,)
    served.send(TakeBack(library=LibraryId(1), count=1))
    served.wait_for(CallsReturned, calls=(newest,))
    assert set(served.ends()) == {beside}
    go.touch()
    assert served.results([first, third, last]) == ["a", "b", "plain"]
    assert log.read_text().splitlines() == ["begins", "a ends", "begins", "b ends"]


def import_often() -> str:
    import time

    found = ""
    for _ in range(6):
        import sbs_util

        found += sbs_util.WHOSE
        time.sleep(0.002)
    return found


class Slow:
    """An object that unpickles slowly, like objects that import torch."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        time.sleep(0.3)


def test_slow_unpickling_does_not_replace_modules_of_other_calls(served: FakeManager, folder: Path) -> None:
    served.ready(recipe(slots=8))
    programs = {whose: blob(import_often, folder, whose=whose) for whose in "abcd"}
    expected: list[str] = []
    calls: list[int] = []
    for first, second in itertools.pairwise(programs):
        calls += served.run(programs[first], [()] * 8)
        slow = Slow()
        slow.number = len(calls)  # type: ignore[attr-defined]
        served.run(lambda slow=slow: slow.__class__.__name__, [()] * 5)
        for _ in range(15):
            calls += served.run(programs[second], [()])
            served.run(plain, [()])
        expected += [first * 6] * 8 + [second * 6] * 15
    assert served.results(calls) == expected


def test_function_is_unpickled_again_after_a_module_was_replaced(served: FakeManager, folder: Path) -> None:
    def of(number: int) -> FunctionBlob:
        (folder / "sbs_util.py").write_text(f"class Kind:\n    number = {number}\n{'#' * number}\n")
        sys.modules.pop("sbs_util", None)
        importlib.invalidate_caches()
        kind = importlib.import_module("sbs_util").Kind

        def is_one() -> tuple[bool, int]:
            import sbs_util

            return sbs_util.Kind is kind, kind.number

        data = dumps_code((is_one, False), what="function")
        return FunctionBlob(key=FunctionKey(str(number)), name="is_one", blob=data)

    served.ready(recipe())
    order = [0, 1, *range(24), 0, 1, 0]
    functions = [of(number) for number in range(24)]
    sys.modules.pop("sbs_util", None)
    calls = [served.run(functions[number], [()])[0] for number in order]
    assert served.results(calls) == [(True, number) for number in order]


def queue_of(*calls: tuple[Function, bytes | ObjectRef]) -> CallQueue[RunnableCall]:
    """Return a queue of calls 1, 2, ..., each with its function and arguments."""
    queue = CallQueue[RunnableCall]()
    run = Run(function=FunctionKey(""), calls=[], options=CallOptions())
    for number, (function, payload) in enumerate(calls, start=1):
        queue.add(CallId(number), RunnableCall(CallSpec(call=CallId(number), payload=payload), run, function))
    return queue


def bare() -> Function:
    """Return a function without modules."""
    code = dumps_code((plain, False), what="function")
    return Function(FunctionBlob(key=FunctionKey("plain"), name="plain", blob=code))


class Model:
    def whose(self) -> str:
        from sbs_util import WHOSE

        return WHOSE


@pytest.mark.parametrize("in_a_file", [False, True])
def test_call_waits_if_its_argument_needs_a_conflicting_module(folder: Path, in_a_file: bool) -> None:
    function = Function(blob(note_and_import, folder, whose="a"))
    (folder / "sbs_util.py").write_text("WHOSE = 'b'\n")
    payload: Any = dumps_arguments(((Model(),), {}))
    if in_a_file:
        (folder / "arguments").write_bytes(payload)
        payload = ObjectRef(name="large", size_bytes=len(payload), source=str(folder / "arguments"))
    queue = queue_of((function, b""), (bare(), b""), (bare(), payload), (function, b""), (function, b""))
    slots = CallCompatibility()
    begun = [slots.take_next_call(queue, slot) for slot in (0, 1)]
    assert [one is not None and one.spec.call for one in begun] == [1, 2]
    assert slots.take_next_call(queue, 2) is None
    assert queue.remove_newest(1) == [5]
    assert slots.record_call_end(0)
    third = slots.take_next_call(queue, 2)
    assert third.spec.call == 3
    assert slots.take_next_call(queue, 0) is None  # call 4 clashes with call 3 and must wait
    assert slots.record_call_end(2)
    assert slots.take_next_call(queue, 0) is not None
    assert not len(queue)


def test_function_with_other_modules_than_its_context_runs_alone(folder: Path) -> None:
    def load() -> None:
        import sbs_util  # noqa: F401

    (folder / "sbs_util.py").write_text("WHOSE = 'context'\n")
    try:
        load_context(Recipe(key="k", name="n", loader=dumps_code((load, (), {}), what="loader")), {})
        same, other = (Function(blob(note_and_import, folder, whose=whose)) for whose in ("context", "b"))
        queue = queue_of((bare(), b""), (same, b""), (other, b""), (bare(), b""))
        slots = CallCompatibility()
        assert [slots.take_next_call(queue, slot) is None for slot in range(3)] == [False, False, True]
        slots.record_call_end(0)
        assert slots.take_next_call(queue, 0) is None
        slots.record_call_end(1)
        assert slots.take_next_call(queue, 0) is not None
        assert slots.take_next_call(queue, 1) is None
    finally:
        user_modules._finder.clear()
        sys.modules.pop("sbs_util", None)
