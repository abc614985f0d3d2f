from __future__ import annotations

import contextlib
import errno
import math
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from memoryless_engine import CountingEngine
from polling import PATIENCE_S, polls

from stoker.contexts.inference.adapter import NewToken, Sampling, set_device_share_factory
from stoker.contexts.inference.engine_thread import EngineThread
from stoker.contexts.inference.engine_work import EngineWork
from stoker.pilot.library.library_turns import LibraryTurns, TurnBoard, unpack_board_rows
from stoker.pilot.library.packed_work import unpacked
from stoker.protocol.ids import DeviceId, LibraryId


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
    set_device_share_factory(lambda: LibraryTurns(path, LibraryId(3), [DeviceId("cpu:0")]))
    yield path
    set_device_share_factory(None)


def open_files(folder: Path) -> list[str]:
    """Return the open and mapped files of this process in a folder, one entry per descriptor."""
    found = list[str]()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return sorted(path for path in found if path.startswith(str(folder)))


def work_on(board: Path) -> EngineWork | None:
    for row, beside in unpack_board_rows(board.read_bytes()) if board.exists() else ():
        found = unpacked(beside)
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


def test_board_shows_the_work_of_an_engine(board: Path) -> None:
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


def test_ended_engines_leave_the_board_and_no_open_files(board: Path) -> None:
    with contextlib.closing(TurnBoard(board)) as seen:
        before = open_files(board.parent)
        for _ in range(3):
            engine = GatedEngine()
            thread = EngineThread(lambda engine=engine: engine)  # type: ignore[misc]
            asked = thread.submit((1,) * 9, Sampling(max_new_tokens=2))
            until(board, rows=0, prompts=1)
            engine.let.release(2)
            assert len(list(asked.tokens())) == 2
            assert len(seen.rows()) == 1
            thread.close()
            assert seen.rows() == []
        assert open_files(board.parent) == before
        assert [path.name for path in board.parent.iterdir()] == [board.name]


def test_sleeping_engine_takes_no_turns_until_it_wakes(board: Path) -> None:
    engine = GatedEngine()
    engine.let.release(4)
    with contextlib.closing(TurnBoard(board)) as seen:
        thread = EngineThread(lambda: engine)
        assert len(list(thread.submit((1,), Sampling(max_new_tokens=2)).tokens())) == 2
        assert len(seen.rows()) == 1
        thread.sleep()
        for more in polls(PATIENCE_S):
            if not seen.rows():
                break
            assert more, "it stays on the board"
        thread.wake()
        assert len(list(thread.submit((1,), Sampling(max_new_tokens=2)).tokens())) == 2
        assert len(seen.rows()) == 1
        thread.close()


class NotedTurns:
    shared = True

    def __init__(self) -> None:
        self.done = list[str]()

    def begin(self, *, due_at: float, step_s: float, work: Callable[[], EngineWork]) -> None:
        self.done.append(f"begins with {len(work().prompts)} prompts")

    def end(self) -> None:
        self.done.append("hands on")

    def publish(self, work: EngineWork) -> None:
        self.done.append(f"writes {work.accepted_requests} requests")

    def leave(self) -> None:
        self.done.append("rests")

    def close(self) -> None:
        self.done.append("leaves")
        raise OSError(errno.EIO, "the disk is gone")


def test_engine_releases_its_devices_before_it_publishes() -> None:
    """The engine stops even if its turns cannot be closed."""
    engine, turns = GatedEngine(), NotedTurns()
    engine.let.release(2)
    set_device_share_factory(lambda: turns)
    try:
        thread = EngineThread(lambda: engine)
        assert len(list(thread.submit((1,), Sampling(max_new_tokens=2)).tokens())) == 2
        thread.close()
    finally:
        set_device_share_factory(None)
    assert engine.stopped
    assert turns.done[-5:] == [
        "begins with 1 prompts", "begins with 0 prompts", "hands on", "writes 1 requests", "leaves",
    ]  # fmt: skip
