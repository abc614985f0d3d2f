from __future__ import annotations

import math
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from live.peers import until

from stoker.contexts.ambient import StopRequest
from stoker.contexts.inference.adapter import EngineWork, GenerationRequest, summarize_work
from stoker.contexts.inference.engine_thread import Generation
from stoker.pilot.library import library_turns
from stoker.pilot.library.library_turns import (
    MOST_ROWS,
    WORK_BYTES,
    LibraryTurns,
    TurnBoard,
    TurnRow,
    TurnState,
    pack_engine_work,
    unpack_engine_work,
)
from stoker.protocol.ids import DeviceId, LibraryId

WORKER = Path(__file__).with_name("turn_worker.py")
GPU = (DeviceId("gpu:0"),)
Span = tuple[str, float, float]


class Workers:
    """Worker processes on one turn board; the fixture kills the remaining workers."""

    def __init__(self, folder: Path) -> None:
        self.board = folder / "turns"
        self.folder = folder
        self.running: list[subprocess.Popen[bytes]] = []

    def start(
        self, library: int, *, devices: str = "gpu:0", iterations: int = 20, step_s: float = 0.01, due_s: float = 1.0
    ) -> subprocess.Popen[bytes]:
        arguments = [self.board, library, devices, self.out(library), iterations, step_s, due_s]
        worker = subprocess.Popen([sys.executable, str(WORKER), *map(str, arguments)])
        self.running.append(worker)
        return worker

    def out(self, library: int) -> Path:
        return self.folder / f"out-{library}"

    def spans(self, *libraries: int) -> list[Span]:
        found = []
        for library in libraries:
            for line in self.out(library).read_text().splitlines():
                if not line.startswith("began"):
                    name, began, ended = line.split()
                    found.append((name, float(began), float(ended)))
        return sorted(found, key=lambda span: span[1])

    def holds(self, library: int) -> bool:
        out = self.out(library)
        return out.exists() and out.read_text().rpartition("\n")[0].rpartition("\n")[2].startswith("began")

    def wait(self) -> None:
        for worker in self.running:
            assert worker.wait(60) == 0


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    found = Workers(tmp_path)
    yield found
    for worker in found.running:
        if worker.poll() is None:
            worker.kill()
            worker.wait()


def overlaps(spans: list[Span]) -> list[tuple[Span, Span]]:
    return [(one, other) for one, other in pairwise(spans) if other[1] < one[2]]


def test_iterations_on_one_device_never_overlap_and_all_complete(workers: Workers) -> None:
    holder, board = LibraryTurns(workers.board, LibraryId(9), GPU), TurnBoard(workers.board)
    holder.begin(step_s=60.0)  # keep the turn until all workers have joined
    for library in (1, 2, 3):
        workers.start(library, iterations=25, step_s=0.008)
    until(lambda: sum(row.state is TurnState.WAITS for row in board.read_rows()) == 3)
    holder.end()
    holder.close()
    workers.wait()
    spans = workers.spans(1, 2, 3)
    assert len(spans) == 75
    changes = sum(one[0] != other[0] for one, other in pairwise(spans))
    assert changes > 20  # the workers take turns
    assert overlaps(spans) == []


def test_library_on_two_devices_needs_the_turn_of_each_device(workers: Workers) -> None:
    workers.start(1, devices="gpu:0,gpu:1", iterations=15)
    workers.start(2, devices="gpu:0", iterations=15)
    workers.start(3, devices="gpu:1", iterations=15)
    workers.wait()
    assert overlaps(workers.spans(1, 2)) == []
    assert overlaps(workers.spans(1, 3)) == []


def test_library_with_the_earlier_deadline_gets_the_next_turn(workers: Workers) -> None:
    holder = LibraryTurns(workers.board, LibraryId(9), GPU)
    holder.begin(step_s=60.0)
    workers.start(1, iterations=1, due_s=500.0)
    workers.start(2, iterations=1, due_s=0.05)
    board = TurnBoard(workers.board)
    until(lambda: sum(row.state is TurnState.WAITS for row in board.read_rows()) == 2)
    holder.end()
    workers.wait()
    assert [name for name, _, _ in workers.spans(1, 2)] == ["2", "1"]
    holder.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_killed_or_stopped_turn_holder_is_skipped_within_100_ms(workers: Workers, how: signal.Signals) -> None:
    waiter = LibraryTurns(workers.board, LibraryId(9), GPU)
    waiter.begin()
    waiter.end()
    took = []
    for library in (1, 2, 3):
        lost = workers.start(library, iterations=1, step_s=30.0)
        until(lambda number=library: workers.holds(number))  # type: ignore[misc]
        lost.send_signal(how)
        if how is signal.SIGKILL:
            lost.wait()
        began = time.monotonic()
        waiter.begin()
        took.append(time.monotonic() - began)
        waiter.end()
    assert min(took) < 0.1  # use the minimum, because a busy machine may delay single attempts


def test_library_that_exceeds_its_forecast_step_time_loses_its_turn(workers: Workers) -> None:
    LibraryTurns(workers.board, LibraryId(1), GPU).begin(step_s=0.02)  # library 1 never ends its turn
    workers.start(2, iterations=3)
    assert workers.running[0].wait(20) == 0


def test_stopped_library_takes_turns_again_when_continued(workers: Workers) -> None:
    stopped = workers.start(1, iterations=40)
    until(lambda: workers.out(1).exists() and len(workers.spans(1)) > 3)
    stopped.send_signal(signal.SIGSTOP)
    workers.start(2, iterations=30)
    until(lambda: workers.out(2).exists() and len(workers.spans(2)) > 10)
    stopped.send_signal(signal.SIGCONT)
    workers.wait()
    assert len(workers.spans(1)) == 40
    assert len(workers.spans(2)) == 30


def test_library_that_finds_the_turn_board_full_runs_without_turns(tmp_path: Path) -> None:
    board = TurnBoard(tmp_path / "turns")
    for number in range(1, MOST_ROWS + 1):
        assert board.occupy_row(LibraryId(number), GPU) is not None
    late = LibraryTurns(tmp_path / "turns", LibraryId(MOST_ROWS + 1), GPU)
    late.begin()
    late.end()
    late.close()
    assert len(board.read_rows()) == MOST_ROWS


def test_corrupt_turn_board_disturbs_turns_but_stops_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library_turns, "_BOARD_CHECK_S", 0.001)
    monkeypatch.setattr(library_turns, "_MAX_TURN_WAIT_S", 0.01)
    path, chance = tmp_path / "turns", random.Random(5)
    turns, other = (LibraryTurns(path, LibraryId(number), GPU) for number in (1, 2))
    for _ in range(200):
        turns.begin(step_s=1e-6)
        turns.end()
        other.begin(step_s=1e-6)
        with path.open("r+b") as file:
            for _ in range(chance.randrange(1, 40)):
                file.seek(chance.randrange(path.stat().st_size))
                file.write(bytes([chance.randrange(256)]))
        other.end()
    turns.close()
    other.close()


def test_opening_a_turn_board_allocates_its_whole_disk_space(tmp_path: Path) -> None:
    path = tmp_path / "turns"
    TurnBoard(path).close()
    size = path.stat().st_size
    path.unlink()
    path.touch()
    os.truncate(path, size)
    assert path.stat().st_blocks == 0
    TurnBoard(path).close()
    assert path.stat().st_blocks * 512 >= size


def test_turn_board_without_disk_space_raises_and_closes_its_file(tmp_path: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            LibraryTurns(tmp_path / "turns", LibraryId(1), GPU)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    opened = [file.path for file in psutil.Process().open_files()]
    assert not [path for path in opened if path.startswith(str(tmp_path))]


def test_library_declared_dead_joins_again_in_another_row(tmp_path: Path) -> None:
    turns, board = LibraryTurns(tmp_path / "turns", LibraryId(1), GPU), TurnBoard(tmp_path / "turns")
    turns.begin()
    [mine] = board.read_rows()
    board.free_row(mine)
    other = board.occupy_row(LibraryId(2), GPU)
    assert other.number == mine.number
    other.state = TurnState.WAITS
    board.write_turn(other)
    turns.end()
    assert [(row.library, row.state) for row in board.read_rows()] == [(2, TurnState.WAITS), (1, TurnState.IDLE)]
    assert turns.shared
    turns.close()
    assert [row.library for row in board.read_rows()] == [2]


def test_closing_library_leaves_its_reassigned_row_unchanged(tmp_path: Path) -> None:
    turns, board = LibraryTurns(tmp_path / "turns", LibraryId(1), GPU), TurnBoard(tmp_path / "turns")
    turns.begin()
    board.free_row(board.read_rows()[0])
    other = LibraryTurns(tmp_path / "turns", LibraryId(2), GPU)
    other.begin()
    waker = Path(f"{board.path}.{board.read_rows()[0].number}")
    assert waker.is_socket()
    turns.close()
    assert [row.library for row in board.read_rows()] == [2]
    assert waker.is_socket()
    other.close()
    assert not waker.exists()


def test_turn_holder_without_a_forecast_loses_its_turn_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_turns, "_MAX_TURN_WAIT_S", 0.2)
    turns, board = LibraryTurns(tmp_path / "turns", LibraryId(1), GPU), TurnBoard(tmp_path / "turns")
    # this living process has the process id of the dead holder and no step forecast
    held = board.occupy_row(LibraryId(2), GPU)
    held.state, held.held_at = TurnState.HOLDS, time.monotonic() - 5.0
    board.write_turn(held)
    turns.begin()
    # library 2 keeps the turn, because its step may be compiling
    assert [row.state for row in board.read_rows() if row.library == 2] == [TurnState.HOLDS]
    held.held_at -= 6.0
    board.write_turn(held)
    turns.begin()
    assert [row.library for row in board.read_rows() if row.state is TurnState.HOLDS] == [1]
    turns.close()


def test_lone_library_waits_if_another_takes_the_turn_concurrently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns, board = LibraryTurns(tmp_path / "turns", LibraryId(1), GPU), TurnBoard(tmp_path / "turns")
    turns.begin()
    turns.end()
    plain = TurnBoard.write_turn

    def write(own: TurnBoard, row: TurnRow) -> None:
        """Let another library start a turn just before the first library writes its turn."""
        if len(board.read_rows()) == 1:
            other = board.occupy_row(LibraryId(2), GPU)
            other.state, other.held_at, other.step_s = TurnState.HOLDS, time.monotonic(), 1e-6
            plain(board, other)
        plain(own, row)

    monkeypatch.setattr(TurnBoard, "write_turn", write)
    turns.begin()  # `begin` waits until the other library is overdue
    assert [row.library for row in board.read_rows() if row.state is TurnState.HOLDS] == [1]
    turns.close()


def generation(
    number: int, *, prompt: int = 10, made: int = 0, due_at: float = math.inf, tpot_s: float = 0.0
) -> Generation:
    request = GenerationRequest(number, (1,) * prompt, due_at=due_at, tpot_s=tpot_s)
    found = Generation(request, StopRequest(), lambda _request: None, None)
    found.made = made
    return found


def test_work_summary_distinguishes_late_tokens_from_due_tokens() -> None:
    requests = [
        generation(1, made=2, due_at=9.0, tpot_s=0.2),  # the next token of this request was due at 9.4
        generation(2, made=1, due_at=10.0, tpot_s=0.5),
        generation(3, prompt=30, made=5),  # no client waits for tokens of this request
        generation(4, prompt=50, due_at=12.0, tpot_s=0.3),
        generation(5, prompt=20, due_at=11.0),
    ]
    work = summarize_work(requests, now=10.0, accepted_requests=7, mean_output=4.0)
    assert (work.rows, work.length) == (3, (12 + 11 + 35) / 3)
    assert (work.late_at, work.due_at, work.tpot_s) == (pytest.approx(9.4), 10.5, 0.2)
    assert work.prompts == [(20, 11.0, 0.0, 64), (50, 12.0, 0.3, 64)]
    assert work.answers == [(pytest.approx(9.4), 0.2, 62), (10.5, 0.5, 63), (math.inf, 0.0, 59)]
    assert (work.accepted_requests, work.peak_tokens) == (7, 14 + 14 + 35 + 54 + 24)
    assert summarize_work([], now=10.0, accepted_requests=7, mean_output=4.0) == EngineWork(
        prompts=[], accepted_requests=7
    )


def test_packed_work_is_read_back() -> None:
    prompts, answers = [(5, 8.0, 0.25, 64), (6, math.inf, 0.0, 0)], [(7.0, 0.25, 9)]
    work = EngineWork(3, 20.5, 7.0, 0.25, math.inf, prompts, 9, 200, answers)
    data = pack_engine_work(LibraryId(4), work)
    assert len(data) <= WORK_BYTES
    assert unpack_engine_work(data.ljust(WORK_BYTES, b"?")) == (4, work)


def test_corrupt_engine_work_is_read_as_no_work() -> None:
    size = len(data := bytearray(pack_engine_work(LibraryId(4), EngineWork(3, 20.5, 7.0))))
    data = data.ljust(WORK_BYTES, b"\0")
    assert unpack_engine_work(bytes(WORK_BYTES)) is None
    chance = random.Random(1)
    for _ in range(500):
        assert unpack_engine_work(chance.randbytes(WORK_BYTES)) is None
        wrong = data.copy()
        wrong[chance.randrange(size)] ^= 1 << chance.randrange(8)
        assert unpack_engine_work(bytes(wrong)) is None


def test_handover_ends_when_the_next_library_is_awake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (LibraryTurns(tmp_path / "turns", LibraryId(number), GPU) for number in (1, 2))
    assert not second.shared  # joins the board before the first library begins
    first.begin(step_s=60.0)
    one_step = threading.Thread(target=lambda: (second.begin(step_s=60.0), time.sleep(1.2), second.end()))
    one_step.start()
    board = TurnBoard(tmp_path / "turns")
    until(lambda: any(row.state is TurnState.WAITS for row in board.read_rows()))
    wake = first._wake_engines
    monkeypatch.setattr(first, "_wake_engines", lambda rows: (wake(rows), time.sleep(0.9)))
    assert 0 < first.begin(step_s=60.0) < 0.8  # it slept while the other library computed
    one_step.join()
    for each in (first, second):
        each.close()


def test_wait_for_the_turn_of_another_library_is_no_handover(tmp_path: Path) -> None:
    first, second = (LibraryTurns(tmp_path / "turns", LibraryId(number), GPU) for number in (1, 2))
    assert not second.shared  # joins the board before the first library begins
    first.begin(step_s=60.0)
    ended = threading.Timer(0.5, first.end)
    ended.start()
    began = time.monotonic()
    handover_s = second.begin()
    assert 0 < handover_s < time.monotonic() - began - 0.4
    ended.join()
    for each in (first, second):
        each.close()
