from __future__ import annotations

import contextlib
import errno
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from memoryless_engine import CountingEngine
from new_process import run_python
from polling import PATIENCE_S, polls

from stoker.contexts import ambient
from stoker.contexts.ambient import Evicted, StopRequest
from stoker.contexts.inference.adapter import (
    EngineLoad,
    EngineWork,
    FinishReason,
    NewToken,
    Sampling,
    set_engine_turns_factory,
)
from stoker.contexts.inference.engine_thread import EngineThread, Generation
from stoker.errors import StokerError
from stoker.pilot.library.library_turns import LibraryTurns, TurnBoard, unpack_board_rows, unpack_engine_work
from stoker.protocol.ids import DeviceId, LibraryId


@pytest.fixture
def engine() -> CountingEngine:
    return CountingEngine()


@pytest.fixture
def thread(engine: CountingEngine) -> Iterator[EngineThread]:
    thread = EngineThread(lambda: engine)
    assert thread.engine is engine
    yield thread
    engine.gate.set()
    thread.close()
    assert engine.stopped


def written(thread: EngineThread, first: int, *, most: int = 1) -> list[int]:
    return [token.token for token in thread.submit((first,), Sampling(max_new_tokens=most)).tokens()]


def test_requests_of_several_slots_share_steps(engine: CountingEngine, thread: EngineThread) -> None:
    engine.gate.clear()
    generations = [thread.submit((10 * n,), Sampling(max_new_tokens=3), pieces=n % 2 == 0) for n in range(1, 7)]
    engine.gate.set()
    found = [[token.token for token in generation.tokens()] for generation in generations]
    assert found == [[10 * n, 10 * n + 1, 10 * n + 2] for n in range(1, 7)]
    assert engine.most_running >= 5  # 5 of 6, because the first request may start and end before the other requests


def test_tokens_are_delivered_while_the_request_runs(engine: CountingEngine, thread: EngineThread) -> None:
    generation = thread.submit((7,), Sampling(max_new_tokens=1_000_000), pieces=True)
    tokens = generation.tokens()
    assert [next(tokens).token for _ in range(3)] == [7, 8, 9]
    generation.abort()
    thread.run(lambda: None)
    thread.run(lambda: None)
    assert engine.open == {}


class Sink:
    def __init__(self, room: int) -> None:
        self.room = room
        self.came: list[str] = []

    def add(self, text: str) -> bool:
        self.room -= 1
        if self.room >= 0:
            self.came.append(text)
        return self.room >= 0

    def send(self) -> None:
        self.came.append("sent")


def test_sink_receives_the_texts_of_each_step(engine: CountingEngine, thread: EngineThread) -> None:
    engine.gate.clear()
    sink = Sink(100)
    generation = thread.submit((1,), Sampling(max_new_tokens=3), pieces=True, sink=sink)
    engine.gate.set()
    (end,) = generation.tokens()
    assert (end.text, end.finish, generation.made) == ("", FinishReason.LENGTH, 3)
    assert sink.came == ["x", "sent"] * 3, "also the last text is sent before the reader learns of the end"


def test_reader_receives_texts_that_the_sink_rejects(thread: EngineThread) -> None:
    sink = Sink(2)
    generation = thread.submit((1,), Sampling(max_new_tokens=5), pieces=True, sink=sink)
    assert [(token.token, token.text) for token in generation.tokens()] == [(3, "x"), (4, "x"), (5, "x")]
    assert sink.came == ["x", "sent", "x", "sent", "sent"]


def test_call_told_to_stop_does_not_wait_for_a_step(engine: CountingEngine, thread: EngineThread) -> None:
    """A stopped call frees its slot before the current step ends, and no later step contains its request."""
    stop = StopRequest()
    ambient.enter_call_scope(stop=stop)
    tokens = thread.submit((1,), Sampling(max_new_tokens=100_000_000), pieces=True).tokens()
    sent = thread.submit((1,), Sampling(max_new_tokens=100_000_000), pieces=True, sink=Sink(10**9))
    next(tokens)
    engine.gate.clear()
    thread_waits = engine.steps
    stop.request()
    for ask in (
        lambda: next(tokens), lambda: next(sent.tokens()),
        lambda: thread.submit((2,), Sampling()), lambda: thread.run(lambda: None),
    ):  # fmt: skip
        with pytest.raises(Evicted):
            ask()
    ambient.leave_call_scope()
    engine.gate.set()
    thread.run(lambda: None)
    assert engine.open == {}
    assert engine.steps <= thread_waits + 1


def test_waiting_job_does_not_run_if_its_call_stops(engine: CountingEngine, thread: EngineThread) -> None:
    stop, ran, raised = StopRequest(), list[int](), list[BaseException]()

    def call() -> None:
        ambient.enter_call_scope(stop=stop)
        try:
            thread.run(lambda: ran.append(1))
        except BaseException as error:
            raised.append(error)
        finally:
            ambient.leave_call_scope()

    engine.gate.clear()
    other = thread.submit((1,), Sampling(max_new_tokens=2), pieces=True)
    waits = threading.Thread(target=call)
    waits.start()
    while not thread._jobs:
        waits.join(0.001)
    stop.request()
    waits.join()
    assert isinstance(raised[0], Evicted)
    engine.gate.set()
    assert len(list(other.tokens())) == 2
    thread.run(lambda: None)
    assert ran == []


def test_failed_step_fails_its_requests_and_later_requests_run(engine, thread):
    engine.gate.clear()
    generations = [thread.submit((n,), Sampling(max_new_tokens=2)) for n in (1, 2)]
    engine.broken = RuntimeError("CUDA error: unspecified launch failure")
    engine.gate.set()
    for generation in generations:
        with pytest.raises(RuntimeError, match="unspecified launch failure"):
            list(generation.tokens())
    engine.broken = None
    assert written(thread, 3, most=2) == [3, 4]


def test_jobs_run_between_steps_and_raise_in_their_caller(engine: CountingEngine, thread: EngineThread) -> None:
    generation = thread.submit((1,), Sampling(max_new_tokens=100_000_000), pieces=True)
    assert next(generation.tokens()).token == 1
    before = engine.steps
    assert thread.run(threading.current_thread) is not threading.current_thread()
    with pytest.raises(ZeroDivisionError):
        thread.run(lambda: 1 / 0)
    assert engine.steps > before  # the batch continued during the wait
    generation.abort()


def test_holder_of_the_model_has_exclusive_access(engine: CountingEngine, thread: EngineThread) -> None:
    generation = thread.submit((1,), Sampling(max_new_tokens=100_000_000), pieces=True)
    next(generation.tokens())
    with thread.alone():
        assert thread.engine is engine
        steps = engine.steps
        with thread.alone():  # a thread may hold the engine a second time
            pass
        assert thread.run(threading.current_thread) is threading.current_thread()
        for refused in (lambda: thread.submit((1,), Sampling()), thread.close):
            with pytest.raises(StokerError, match="has exclusive use of the model"):
                refused()
        assert engine.steps == steps
    tokens = generation.tokens()
    for _ in range(5):
        next(tokens)
    generation.abort()


def test_closed_model_refuses_requests_and_fails_open_requests(engine: CountingEngine) -> None:
    thread = EngineThread(lambda: engine)
    assert thread.engine is engine
    engine.gate.clear()
    generation = thread.submit((1,), Sampling(max_new_tokens=100_000_000))
    closing = threading.Thread(target=thread.close)
    closing.start()
    engine.gate.set()
    closing.join(30)
    with pytest.raises(StokerError, match="closed"):
        list(generation.tokens())
    with pytest.raises(StokerError, match="no more requests"):
        thread.submit((1,), Sampling())
    assert engine.stopped


def test_engine_is_created_on_first_use(engine: CountingEngine) -> None:
    made: list[CountingEngine] = []

    def make() -> CountingEngine:
        if not made:
            made.append(engine)
            raise ValueError("this model cannot have it")
        return engine

    thread = EngineThread(make)
    assert thread.run(lambda: 5) == 5
    with thread.alone():
        assert thread.get_load() == EngineLoad()
    assert not made
    with pytest.raises(ValueError, match="cannot have it"):
        written(thread, 1)
    assert written(thread, 1) == [1]
    thread.close()
    assert engine.stopped


def test_request_that_fails_by_itself_affects_no_other_request(engine: CountingEngine, thread: EngineThread) -> None:
    engine.gate.clear()
    refused, bad, good = (thread.submit((first,), Sampling(max_new_tokens=2)) for first in (0, 1, 5))
    plain = engine.step

    def step() -> list[NewToken]:
        new = plain()
        for at, token in enumerate(new):
            if token.token == 1:
                new[at] = NewToken(token.request, -1, finish=FinishReason.STOP, error="its logits are no numbers")
                engine.abort(token.request)
        return new

    engine.step = step  # type: ignore[method-assign]
    engine.gate.set()
    with pytest.raises(ValueError, match="no prompt may be zero"):
        list(refused.tokens())
    with pytest.raises(RuntimeError, match="no numbers"):
        list(bad.tokens())
    assert [token.token for token in good.tokens()] == [5, 6]


def test_interrupted_wait_for_the_model_leaves_the_model_usable(thread, monkeypatch):
    class Interrupted:
        def acquire(self, *, timeout: float) -> None:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(thread, "_model_lock", Interrupted())
        with pytest.raises(KeyboardInterrupt), thread.alone():
            pass
    assert written(thread, 1) == [1]


def test_forked_child_gets_a_clear_error(thread: EngineThread) -> None:
    child = os.fork()
    if child == 0:
        asks = (
            lambda: thread.submit((1,), Sampling()),
            lambda: thread.run(lambda: 1),
            lambda: thread.alone().__enter__(),
        )
        clear = 0
        for ask in asks:
            try:
                ask()
            except StokerError as error:
                clear += "forked" in str(error)
        thread.close()  # a second close does nothing
        os._exit(len(asks) - clear)
    assert os.waitpid(child, 0)[1] == 0


DROPS = """
import threading, time
from memoryless_engine import CountingEngine
from stoker.contexts.inference.engine_thread import EngineThread

begun = threading.Event()

class Large(CountingEngine):
    def stop(self):
        time.sleep(0.2)  # the program has dropped its engine thread by now

    def __del__(self):
        begun.set()
        time.sleep(0.5)
        print("freed", flush=True)

thread = EngineThread(Large)
thread.engine
thread.close(wait=False)
del thread
begun.wait(30)
"""


def test_program_exits_after_a_deleted_engine_freed_its_model() -> None:
    """PyTorch aborts the process if the interpreter exits while another thread frees tensors."""
    assert run_python(DROPS, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}) == "freed\n"


# ---- work and turns on the board of the pilot


class GatedEngine(CountingEngine):
    def __init__(self) -> None:
        super().__init__()
        self.let = threading.Semaphore(0)

    def step(self) -> list[NewToken]:
        assert self.let.acquire(timeout=30)
        return super().step()


@pytest.fixture
def board(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "turns"
    set_engine_turns_factory(lambda: LibraryTurns(path, LibraryId(3), [DeviceId("cpu:0")]))
    yield path
    set_engine_turns_factory(None)


def open_files(folder: Path) -> list[str]:
    """Return the open and mapped files of this process in a folder, one entry per descriptor."""
    found = list[str]()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # `listdir` has closed its own descriptor
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return sorted(path for path in found if path.startswith(str(folder)))


def work_on(board: Path) -> EngineWork | None:
    for row, beside in unpack_board_rows(board.read_bytes()) if board.exists() else ():
        found = unpack_engine_work(beside)
        if row.library == 3 and found is not None:
            return found[1]
    return None


def until(board: Path, *, rows: int, prompts: int) -> EngineWork:
    for more in polls(PATIENCE_S):
        work = work_on(board)
        if work is not None and (work.rows, len(work.prompts)) == (rows, prompts):
            return work
        assert more, f"the board says {work}"
    raise AssertionError


def test_turn_board_shows_the_requests_and_deadlines_of_an_engine(board: Path) -> None:
    engine = GatedEngine()
    thread = EngineThread(lambda: engine)
    asked = thread.submit((1,) * 9, Sampling(max_new_tokens=2), due_at=1e9, tpot_s=0.5)
    work = until(board, rows=0, prompts=1)
    assert (list(work.prompts), work.accepted_requests, work.peak_tokens) == ([(9, 1e9, 0.5, 2)], 1, 9)
    engine.let.release()
    work = until(board, rows=1, prompts=0)
    assert (work.length, work.due_at, work.tpot_s, work.late_at) == (10.0, 1e9 + 0.5, 0.5, math.inf)
    assert list(work.answers) == [(1e9 + 0.5, 0.5, 1)]
    engine.let.release()
    assert len(list(asked.tokens())) == 2
    assert until(board, rows=0, prompts=0).accepted_requests == 1
    thread.submit((1,) * 9, Sampling(max_new_tokens=2))
    # 9 prompt tokens plus 2 tokens, the mean output of earlier requests
    assert until(board, rows=0, prompts=1).peak_tokens == 11
    engine.let.release(5)
    assert until(board, rows=0, prompts=0).accepted_requests == 2
    thread.close()


def test_closed_engines_are_removed_from_the_turn_board(board: Path) -> None:
    with contextlib.closing(TurnBoard(board)) as seen:
        before = open_files(board.parent)
        for _ in range(3):
            engine = GatedEngine()
            thread = EngineThread(lambda engine=engine: engine)  # type: ignore[misc]
            asked = thread.submit((1,) * 9, Sampling(max_new_tokens=2))
            until(board, rows=0, prompts=1)
            engine.let.release(2)
            assert len(list(asked.tokens())) == 2
            assert len(seen.read_rows()) == 1
            thread.close()
            assert seen.read_rows() == []
        assert open_files(board.parent) == before
        assert [path.name for path in board.parent.iterdir()] == [board.name]


def test_sleeping_engine_takes_no_turns_until_it_wakes(board: Path) -> None:
    engine = GatedEngine()
    engine.let.release(4)
    with contextlib.closing(TurnBoard(board)) as seen:
        thread = EngineThread(lambda: engine)
        assert len(list(thread.submit((1,), Sampling(max_new_tokens=2)).tokens())) == 2
        assert len(seen.read_rows()) == 1
        thread.sleep()
        for more in polls(PATIENCE_S):
            if not seen.read_rows():
                break
            assert more, "it stays on the board"
        thread.wake()
        assert len(list(thread.submit((1,), Sampling(max_new_tokens=2)).tokens())) == 2
        assert len(seen.read_rows()) == 1
        thread.close()


class NotedTurns:
    shared = True

    def __init__(self) -> None:
        self.done = list[str]()

    def begin(self, *, due_at: float, step_s: float, work: Callable[[], EngineWork]) -> float:
        self.done.append(f"begins with {len(work().prompts)} prompts")
        return 1000.0

    def end(self) -> None:
        self.done.append("hands on")

    def publish(self, work: EngineWork) -> None:
        self.done.append(f"writes {work.accepted_requests} requests")

    def leave(self) -> None:
        self.done.append("rests")

    def close(self) -> None:
        self.done.append("leaves")
        raise OSError(errno.EIO, "the disk is gone")


class RequestDuringWait(NotedTurns):
    """Submits another request while the engine waits for its first turn."""

    def __init__(self) -> None:
        super().__init__()
        self.thread: EngineThread | None = None
        self.late = list[Generation]()

    def begin(self, *, due_at: float, step_s: float, work: Callable[[], EngineWork]) -> float:
        if not self.late:
            while self.thread is None:
                time.sleep(0.001)
            self.late.append(self.thread.submit((2,), Sampling(max_new_tokens=1)))
        return super().begin(due_at=due_at, step_s=step_s, work=work)


def test_request_joins_the_step_for_which_the_engine_waits() -> None:
    engine, turns = GatedEngine(), RequestDuringWait()
    engine.let.release(1)  # one step only
    set_engine_turns_factory(lambda: turns)
    try:
        thread = turns.thread = EngineThread(lambda: engine)
        asked = thread.submit((1,), Sampling(max_new_tokens=1))
        assert len(list(asked.tokens())) == 1
        assert len(list(turns.late[0].tokens())) == 1
        thread.close()
    finally:
        set_engine_turns_factory(None)


def test_engine_ends_its_device_turn_before_it_publishes_its_work() -> None:
    """The engine stops even if its turns cannot be closed."""
    engine, turns, steps_s = GatedEngine(), NotedTurns(), list[float]()
    engine.let.release(2)
    set_engine_turns_factory(lambda: turns)
    try:
        thread = EngineThread(lambda: engine, stepped=steps_s.append)
        assert len(list(thread.submit((1,), Sampling(max_new_tokens=2)).tokens())) == 2
        thread.close()
    finally:
        set_engine_turns_factory(None)
    assert engine.stopped
    assert [1000 <= step_s < 1100 for step_s in steps_s] == [True, True], "a step's time contains the handover"
    assert turns.done[-5:] == [
        "begins with 1 prompts", "begins with 0 prompts", "hands on", "writes 1 requests", "leaves",
    ]  # fmt: skip
