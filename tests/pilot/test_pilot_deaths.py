from __future__ import annotations

import os
import re
import signal
import stat
import threading
import time
from pathlib import Path

import psutil
import pytest
from fake_manager import FakeManager, alive, descendants, gone, recipe
from polling import PATIENCE_S

from stoker.contexts.recipe import Awareness, Needs
from stoker.protocol.calls import CallOptions, FailureKind, OutputRange
from stoker.protocol.to_manager import LibraryReady
from stoker.protocol.to_pilot import StopLibrary


def _nothing() -> None:
    return None


def _sleep(seconds: float) -> None:
    time.sleep(seconds)


def _part(printed: OutputRange | None) -> str:
    return Path(printed.path).read_bytes()[printed.start : printed.end or None].decode()


def test_last_output_belongs_to_the_call_that_died(served: FakeManager) -> None:
    def talk(number: int) -> int:
        print(f"OSError: [Errno 28] No space left on device, says call {number}")
        return number

    def die() -> None:
        print("last words")
        os.write(2, b"and those of C code\n")
        os.kill(os.getpid(), signal.SIGSEGV)

    served.ready(recipe())
    assert served.results(served.run(talk, [(number,) for number in range(6)])) == list(range(6))
    calls = served.run(die, [()])
    left = served.gone()
    failure = left.failure
    assert (left.running, failure.kind, failure.signal) == (tuple(calls), FailureKind.DIED, signal.SIGSEGV)
    assert "SIGSEGV" in failure.message
    assert failure.tail == "last words\nand those of C code"
    assert _part(failure.printed) == "last words\nand those of C code\n"


def test_last_output_of_a_call_in_a_multi_slot_library_is_its_own(served: FakeManager, tmp_path: Path) -> None:
    def talk() -> None:
        print("of another call")
        os.write(1, b"of its child\n")

    def die() -> None:
        print("before the others")
        (tmp_path / "told").touch()
        while not (tmp_path / "go").exists():
            time.sleep(0.01)
        print("last words", end="", flush=True)
        signal.raise_signal(signal.SIGSEGV)  # the signal arrives in this thread

    served.ready(recipe(slots=2))
    served.run(die, [()])
    served.until((tmp_path / "told").exists)
    served.results(served.run(talk, [(), (), ()]))
    (tmp_path / "go").touch()
    failure = served.gone().failure
    assert failure.tail == "before the others\nlast words"
    assert _part(failure.printed) == failure.tail


def test_calls_that_died_together_have_no_last_output(served: FakeManager, tmp_path: Path) -> None:
    def sit(number: int) -> None:
        print("call", number)
        (tmp_path / str(number)).touch()
        while not (tmp_path / "go").exists():
            time.sleep(0.01)
        signal.raise_signal(signal.SIGSEGV)  # the signal arrives in this thread

    served.ready(recipe(slots=2))
    served.run(sit, [(1,), (2,)])
    served.until(lambda: (tmp_path / "1").exists() and (tmp_path / "2").exists())
    (tmp_path / "go").touch()
    left = served.gone()
    assert len(left.running) == 2
    assert (left.failure.tail, left.failure.printed) == ("", None)
    assert sorted(Path(left.failure.log).read_text().splitlines()[-2:]) == ["call 1", "call 2"]


def test_loader_that_hangs_fails_after_load_limit(served: FakeManager) -> None:
    served.start(recipe(_sleep, 60.0, needs=Needs(load_limit_s=0.5)))
    left = served.gone()
    assert left.loading
    assert left.failure.kind is FailureKind.CONTEXT
    assert "load_limit" in left.failure.message


def _talks() -> int:
    for _ in range(40_000):
        print("x" * 99)
    return 5


def test_loader_that_prints_megabytes_succeeds(served: FakeManager) -> None:
    served.ready(recipe(_talks))
    assert served.results(served.run(lambda context: context, [()], takes_context=True)) == [5]


def test_children_that_fork_twice_die_with_their_library(served: FakeManager) -> None:
    def spawn() -> list[int]:
        read, write = os.pipe()
        if os.fork() == 0:
            os.setsid()
            for _ in range(3):
                if os.fork() == 0:
                    os.write(write, b"%d " % os.getpid())
                    time.sleep(600)
            os._exit(0)
        os.wait()
        pids: list[int] = []
        while len(pids) < 3:
            pids += map(int, os.read(read, 100).split())
        return pids

    served.ready(recipe(spawn))
    (pids,) = served.results(served.run(lambda context: context, [()], takes_context=True))
    assert all(map(alive, pids))
    served.send(StopLibrary(library=1, reason="test"))
    assert served.gone().failure is None
    assert gone(pids)


def test_forked_child_that_returns_from_a_call_serves_no_calls(served: FakeManager) -> None:
    def split() -> int:
        return os.fork() and os.getpid()

    served.ready(recipe())
    first, second = served.results(served.run(split, [(), ()]))
    assert [first] == [second] == served.results(served.run(os.getpid, [()]))


def test_killed_idle_library_is_reported(served: FakeManager) -> None:
    served.ready(recipe())
    (pid,) = served.results(served.run(os.getpid, [()]))
    os.kill(pid, signal.SIGKILL)
    left = served.gone()
    assert (left.failure.signal, left.loading, left.running, left.unstarted) == (signal.SIGKILL, False, (), ())


def test_memory_of_a_child_process_counts_for_the_call(served: FakeManager) -> None:
    def eat() -> None:
        if os.fork() == 0:
            data = b"x" * 400_000_000
            time.sleep(20)
            os._exit(len(data) == 0)
        time.sleep(20)

    served.ready(recipe(needs=Needs(memory_bytes=200_000_000)), memory_bytes=200_000_000)
    calls = served.run(eat, [()])
    left = served.gone()
    assert left.failure.kind is FailureKind.MEMORY
    assert left.running == tuple(calls)


def test_suspended_time_of_a_job_counts_for_no_time_limit(manager: FakeManager, tmp_path: Path) -> None:
    def waits() -> None:
        started.touch()
        while not go.exists():
            time.sleep(0.01)

    pilot = manager.start_pilot(settings="from stoker.pilot.core import limits; limits.SUSPENSION_DELAY_S = 1.0")
    manager.ready(recipe())
    started, go = tmp_path / "started", tmp_path / "go"
    calls = manager.run(waits, [()], options=CallOptions(limit_s=4.0))
    manager.until(started.exists, what="the call runs")
    job = [*reversed(descendants(pilot.pid)), pilot.pid]
    for pid in job:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(4.2)
    for pid in job:
        os.kill(pid, signal.SIGCONT)
    before = len(manager.heartbeats)
    manager.until(lambda: len(manager.heartbeats) >= before + 2, what="the pilot has looked at its limits")
    go.touch()
    assert manager.results(calls) == [None]


@pytest.mark.long
@pytest.mark.parametrize("awareness", [Awareness.NONE, Awareness.DISK])
def test_call_without_awareness_runs_in_a_new_interpreter(served: FakeManager, awareness: Awareness) -> None:
    def fresh() -> tuple[int, bool]:
        import sys

        return os.getppid(), "stoker.pilot.zygote.server" in sys.modules

    served.ready(recipe(awareness=awareness, calls_per_library=1))
    calls = served.run(fresh, [(), ()])
    left = served.gone()
    assert left.failure is None
    assert left.unstarted == (calls[1],)
    ((_, has_zygote),) = served.results(calls[:1])
    assert not has_zygote


def test_killed_pilot_leaves_no_process(alone: FakeManager) -> None:
    def spawn() -> int:
        import subprocess

        return subprocess.Popen(["sleep", "600"], start_new_session=True).pid

    alone.ready(recipe())
    (child,) = alone.results(alone.run(spawn, [()]))
    pilot = alone.pilots[0]
    tree = descendants(pilot.pid)
    assert child in tree
    assert len(tree) >= 4
    pilot.kill()
    pilot.wait()
    assert gone(tree)
    assert alone.until(lambda: not list(alone.base.glob("scratch/stoker-*/pilot-*")))


def test_killed_zygote_is_replaced_and_blames_no_loading_context(served: FakeManager, tmp_path: Path) -> None:
    def load() -> None:
        (tmp_path / "loading").touch()
        time.sleep(600)

    served.ready(recipe())
    (zygote,) = served.results(served.run(os.getppid, [()]))
    served.start(recipe(load), library=2)
    served.until((tmp_path / "loading").exists)
    tree = descendants(zygote)
    os.kill(zygote, signal.SIGKILL)
    idle, loading = served.gone(1), served.gone(2)
    assert "zygote" in idle.failure.message
    assert "zygote" in loading.failure.message
    assert (loading.loading, loading.failure.kind) == (True, FailureKind.PILOT)
    assert gone(tree)
    served.ready(recipe(), library=3)
    assert served.results(served.run(_nothing, [()], library=3)) == [None]


def test_module_that_kills_its_zygote_fails_only_one_library(served: FakeManager) -> None:
    (served.base / "crashing_module.py").write_text("import os\nos.abort()\n")
    served.ready(recipe(preload=("no_such_module", "json")))  # a failing preload has no effect
    served.start(recipe(preload=("crashing_module",)), library=2)
    left = served.gone(2)
    assert "crashing_module" in left.failure.message
    assert left.loading
    assert served.results(served.run(_nothing, [()])) == [None]


def test_module_that_starts_threads_gives_libraries_a_fresh_process(served: FakeManager) -> None:
    (served.base / "threaded_module.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(999,), daemon=True).start()\n"
    )
    served.ready(recipe(preload=("threaded_module",)))
    assert served.results(served.run(_nothing, [()])) == [None]
    assert "the import of threaded_module started threads (" in served.logs()


def test_heartbeats_contain_measured_library_memory(served: FakeManager) -> None:
    def load() -> bytes:
        return b"x" * 200_000_000

    ready = served.ready(recipe(load))
    assert ready.resident_bytes > 200_000_000
    use = served.until(lambda: [u for h in served.heartbeats for u in h.libraries if u.memory_bytes > 200_000_000])[0]
    assert use.library == 1


def test_libraries_are_pinned_to_their_cores(served: FakeManager) -> None:
    def cores() -> tuple[list[int], str, str]:
        return sorted(os.sched_getaffinity(0)), os.environ["OMP_NUM_THREADS"], os.environ["CUDA_VISIBLE_DEVICES"]

    served.ready(recipe())
    served.start(recipe(), library=2, devices=("cpu:1",))
    served.wait_for(LibraryReady, library=2)
    (first,) = served.results(served.run(cores, [()]))
    (second,) = served.results(served.run(cores, [()], library=2))
    mine = sorted(psutil.Process().cpu_affinity())
    assert first == (mine[:1], "1", "")
    assert second == (mine[1:2] or mine[:1], "1", "")


def test_pilot_signalled_right_after_making_its_folder_removes_it(manager: FakeManager) -> None:
    pilot = manager.start_pilot("--devices", "cpu:1")
    folder = manager.until(lambda: next(manager.base.glob("**/stoker-*/pilot-*"), None), what="its folder")
    pilot.send_signal(signal.SIGTERM)
    assert pilot.wait(PATIENCE_S) == 0
    assert not folder.exists()


def test_error_names_the_call_that_closed_all_descriptors(served: FakeManager) -> None:
    def close() -> None:
        os.closerange(3, 1000)

    for slots in (1, 2):
        served.ready(recipe(slots=slots), library=slots)
        calls = served.run(close, [()], library=slots)
        left = served.gone(slots)
        assert "closes files that it did not open" in left.failure.message
        assert left.running == tuple(calls)


def test_call_that_writes_to_the_socket_ends_its_library_alone(served: FakeManager) -> None:
    def scribble(stray: bytes) -> None:
        for number in range(3, 64):
            try:
                if stat.S_ISSOCK(os.fstat(number).st_mode):
                    os.write(number, stray)
            except OSError:
                continue

    for library, stray in enumerate((b"hello, world\n", b"x"), start=1):
        served.ready(recipe(), library=library)
        (call,) = served.run(scribble, [(stray,)], library=library)
        left = served.gone(library)
        assert left.failure.kind is FailureKind.DIED
        assert left.running == (call,), "the manager must know which call to test alone"
        assert "wrote invalid bytes to its socket" in left.failure.message
    served.ready(recipe(), library=3)
    assert served.results(served.run(_nothing, [()], library=3)) == [None]


NO_FORK = """
import os
import sys

def fork(*_):
    raise BlockingIOError(11, "Resource temporarily unavailable")

if "stoker.pilot.zygote" in sys.orig_argv:
    os.fork = fork
"""


@pytest.mark.long
def test_lack_of_processes_is_blamed_on_the_pilot(manager: FakeManager, tmp_path: Path) -> None:
    """At the process limit of a user (RLIMIT_NPROC), every call on the pilot once failed with ContextError."""
    (tmp_path / "sitecustomize.py").write_text(NO_FORK)
    manager.start_pilot(PYTHONPATH=str(tmp_path))
    manager.hello()
    manager.start(recipe())
    left = manager.gone()
    assert left.loading
    assert left.failure.kind is FailureKind.PILOT
    assert "its process could not be created: [Errno 11]" in left.failure.message
    assert "raise the limit of processes (ulimit -u)" in left.failure.message


def _leave_a_thread_behind(begins: str) -> None:
    """Leave a thread that holds the interpreter lock after the end of the call."""

    def late() -> None:
        time.sleep(0.5)
        Path(begins).touch()
        re.match(r"(a+)+$", "a" * 60 + "b")

    threading.Thread(target=late, daemon=True).start()


@pytest.mark.long
@pytest.mark.parametrize("stuck", ["thread", "stopped"])
def test_library_that_starts_no_call_ends_and_its_calls_move(manager: FakeManager, stuck: str, tmp_path: Path) -> None:
    manager.start_pilot(settings="from stoker.pilot.core import limits; limits.NO_CALL_BEGUN_LIMIT_S = 2.0")
    manager.ready(recipe())
    if stuck == "thread":
        manager.results(manager.run(_leave_a_thread_behind, [(str(tmp_path / "begins"),)]))
        manager.until((tmp_path / "begins").exists, what="the thread to begin")
        time.sleep(0.5)  # the thread needs a few more instructions to take the lock
    else:
        (pid,) = manager.results(manager.run(os.getpid, [()]))
        os.kill(pid, signal.SIGSTOP)
    calls = manager.run(_nothing, [(), ()])
    left = manager.gone()
    assert (left.running, left.unstarted) == ((), tuple(calls))
    assert "has not begun any of its calls for" in left.failure.message
