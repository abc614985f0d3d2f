"""Test contexts and calls of a TaskVine library process without TaskVine."""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stoker.contexts import context, payloads
from stoker.contexts.folders import program_folder
from stoker.contexts.recipe import Recipe
from stoker.pilot.taskvine import messages
from stoker.pilot.taskvine.pool_library import make_library_failure
from stoker.protocol.calls import CallEnd, CallOptions, CallSpec, FailureKind, OutputRange
from stoker.protocol.ids import CallId, FunctionKey, LibraryId
from stoker.protocol.to_pilot import StartLibrary

PROGRAM = Path(__file__).with_name("library_program.py")


class Process:
    def __init__(self, folder: Path, recipe: Recipe) -> None:
        self.logs, self.running, self.here = folder / "logs", folder / "running", folder / "here"
        for each in (self.logs, self.running, self.here, folder / "objects"):
            each.mkdir(parents=True)
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(PROGRAM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.pid = self._process.pid
        self._tickets = itertools.count(1)
        setup = messages.VineLibrarySetup(
            pilot="pool", logs=str(self.logs), objects=str(folder / "objects"), running=str(self.running), recipe=recipe
        )
        self._say((messages.encode(setup), str(self.here)))

    def send(
        self,
        function: Callable[..., Any] | None,
        *arguments: Any,
        limit_s: float = 0.0,
        call: int | None = None,
        options: CallOptions | None = None,
    ) -> int:
        """Send an order with a call for each argument, numbered from `call`; return its ticket."""
        ticket = next(self._tickets)
        first = 100 * ticket if call is None else call
        calls = [CallSpec(CallId(first + n), payloads.dumps(((x,), {}))) for n, x in enumerate(arguments)]
        name = getattr(function, "__name__", "")
        order = messages.PoolOrder(
            ticket, FunctionKey(name), name, calls if function else [], options or CallOptions(limit_s=limit_s)
        )  # fmt: skip
        self._say((messages.encode(order), payloads.dumps((function, True), what="function")))
        return ticket

    def take(self, *, stays: bool = True) -> messages.PoolAnswer:
        """Check that the process is in the order folder if `stays`, else in another folder."""
        answer, is_there = pickle.load(self._process.stdout)
        assert is_there is stays
        return messages.decode_answer(answer)

    def ask(self, function: Callable[..., Any] | None, *arguments: Any, **more: Any) -> messages.PoolAnswer:
        self.send(function, *arguments, **more)
        return self.take()

    def printed(self, end: CallEnd) -> str:
        assert end.printed is not None
        return Path(end.printed.path).read_bytes()[end.printed.start : end.printed.end].decode()

    def wait(self) -> int:
        return self._process.wait(30)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()

    def _say(self, value: Any) -> None:
        pickle.dump(value, self._process.stdin)
        self._process.stdin.flush()


@context
def table(words):
    return {word: len(word) for word in words}


@pytest.fixture
def start(tmp_path):
    started = []

    def start(recipe: Recipe) -> Process:
        started.append(Process(tmp_path / f"library-{len(started)}", recipe))
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.fixture
def library(start):
    return start(table(["pilot", "call"]))


def value(end: CallEnd) -> Any:
    assert end.ok, end
    return payloads.loads(end.payload)


def look_up(words, word):
    print("looking up", word)
    return words[word]


def doze(_words, seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.05)
    return "awake"


def test_calls_of_an_order_use_the_context_in_sequence(library):
    answer = library.ask(look_up, "pilot", "call")
    assert [value(end) for end in answer.ends] == [5, 4]
    assert [library.printed(end) for end in answer.ends] == ["looking up pilot\n", "looking up call\n"]
    assert answer.held.pid == library.pid
    assert answer.held.resident_bytes > 1_000_000
    assert [library.ask(look_up, "call").held.orders for _ in range(2)] == [1, 2]
    assert not list(library.running.iterdir())


def test_exception_in_a_call_does_not_end_the_library(library):
    def leave(_words, what):
        raise {"exit": SystemExit(3), "interrupt": KeyboardInterrupt()}[what]

    held = library.ask(None)  # an order without calls reports the library state
    assert (held.ends, held.held.failure, held.held.orders) == ([], None, 0)
    *ends, unknown = library.ask(leave, "exit", "interrupt", "nothing").ends
    assert [type(payloads.load_exception(end.payload)) for end in ends] == [SystemExit, KeyboardInterrupt]
    error = payloads.load_exception(unknown.payload)
    assert type(error) is KeyError
    assert "leave" in str(error.__cause__)
    assert library.ask(look_up, "pilot").held.pid == library.pid


def test_call_runs_in_its_own_folder(library):
    def leave_behind(_words, name):
        before = os.listdir()
        Path(name).write_text("mine")
        return os.getcwd(), before

    (first, nothing), (second, still_nothing) = (value(end) for end in library.ask(leave_behind, "a", "b").ends)
    assert first == second
    assert nothing == still_nothing == []


def test_call_over_its_time_limit_is_stopped_and_its_context_stays(library):
    answer = library.ask(doze, 600, limit_s=1.0)
    failure = answer.ends[0].failure
    assert failure.kind is FailureKind.TIMEOUT
    assert "its limit, 1 s" in failure.message
    after = library.ask(look_up, "pilot")
    assert (after.held.pid, value(after.ends[0])) == (library.pid, 5)


def test_cancelled_call_is_stopped_and_runs_in_a_later_order(library):
    ticket = library.send(doze, 600, 0, call=100)
    messages.stop_file(str(library.running), ticket, CallId(100)).touch()
    stopped, good = library.take().ends
    assert stopped.failure.kind is FailureKind.CANCELLED
    assert value(good) == "awake"
    [end] = library.ask(doze, 1.2, call=100).ends  # this call is longer than two checks for a stop file
    assert value(end) == "awake"


def test_note_names_the_running_call_of_a_dead_library(library):
    def die(words, word):
        if word == "die":
            print("last words")
            os.kill(os.getpid(), signal.SIGKILL)
        print("survived", word)
        return words[word]

    ticket = library.send(die, "pilot", "die", "call")
    assert library.wait() == -signal.SIGKILL
    note = messages.read_and_remove_note(str(library.running), ticket)
    assert note.call == 100 * ticket + 1
    assert "survived pilot" in Path(note.log).read_text()
    ordered = StartLibrary(LibraryId(1), table(["pilot"]), ())
    failure = make_library_failure(ordered, note, taskvine_message="it ended", loading=False, pilot="pool")
    assert failure.tail == "last words"
    assert failure.printed == OutputRange(note.log, len("survived pilot\n"), 0)
    assert messages.read_and_remove_note(str(library.running), ticket) is None


def test_failed_loader_is_reported_and_its_process_exits(start):
    @context
    def broken():
        print("trying")
        raise FileNotFoundError("/no/such/file")

    library = start(broken())
    answer = library.ask(look_up, "pilot")
    assert answer.ends == []
    assert answer.held.failure.kind is FailureKind.CONTEXT
    assert "the loader raised FileNotFoundError: /no/such/file" in answer.held.failure.message
    assert "in broken" in answer.held.failure.tail
    assert "trying" in Path(answer.held.log).read_text()
    assert library.wait() == 1


def test_loader_over_its_time_limit_has_failed(start):
    @context(load_limit="1 s")
    def slow():
        time.sleep(600)

    assert "ran longer than 1 s" in start(slow()).ask(None).held.failure.message


def test_context_over_its_memory_limit_ends(start):
    @context(memory="150 MB")
    def modest():
        return []

    def grow(kept, megabytes):
        kept.append(bytearray(b"x" * megabytes * 1_000_000))
        time.sleep(60)

    library = start(modest())
    ticket = library.send(grow, 300)
    assert library.wait() == 3
    note = messages.read_and_remove_note(str(library.running), ticket)
    assert (note.call, note.reason) == (100 * ticket, messages.MEMORY_LIMIT_EXCEEDED)


def test_calls_run_in_the_folder_of_the_program_with_its_umask(start, tmp_path):
    def load():
        return Path("model.txt").read_text()

    def works(model, name):
        import tempfile

        found = os.environ.pop("LEFT", ""), os.listdir(tempfile.gettempdir()), os.fstat(0).st_mode > 0
        os.environ["LEFT"] = "1"
        tempfile.mkdtemp()
        Path(name).write_text(model)
        os.close(0)
        return os.getcwd(), oct(os.stat(name).st_mode & 0o777), found

    run = tmp_path / "run"
    run.mkdir()
    (run / "model.txt").write_text("weights")
    home = msgspec.structs.replace(program_folder(run), umask=0o002)
    library = start(msgspec.structs.replace(context(load)(), home=home))
    ends = library.ask(works, "a", "b", options=CallOptions(home=home)).ends
    assert [value(end) for end in ends] == [(str(run), "0o664", ("", [], True))] * 2
    assert (run / "a").read_text() == (run / "b").read_text() == "weights"


def test_result_arrives_although_the_folder_of_the_worker_is_gone(library):
    def outlives(_words, here):
        import shutil

        shutil.rmtree(here)
        return "hours of work"

    library.send(outlives, str(library.here))
    answer = library.take(stays=False)
    assert value(answer.ends[0]) == "hours of work"
    assert library.wait() == 1
    (log,) = library.logs.iterdir()
    assert "the library ends: the files that a call left could not be removed" in log.read_text()
