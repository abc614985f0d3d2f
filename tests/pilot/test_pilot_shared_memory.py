from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path

import pytest
from fake_manager import FakeManager, gone, recipe

from stoker.contexts.recipe import Awareness
from stoker.pilot.zygote import processes
from stoker.protocol.to_pilot import StopLibrary

SEGMENTS = Path("/dev/shm")
SYSTEM_V = Path("/proc/sysvipc/shm")


@pytest.fixture
def segment() -> Iterator[shared_memory.SharedMemory]:
    """A segment of the user program that the resource tracker of this process does not know."""
    made = shared_memory.SharedMemory(create=True, size=100)
    resource_tracker.unregister(made._name, "shared_memory")  # type: ignore[attr-defined]
    yield made
    made.close()
    (SEGMENTS / made.name).unlink(missing_ok=True)


def create() -> str:
    from multiprocessing import shared_memory

    made = shared_memory.SharedMemory(create=True, size=100)
    return made.name


def create_in_children() -> list[str]:
    import multiprocessing
    from multiprocessing.shared_memory import SharedMemory

    kept.append(SharedMemory(create=True, size=100))
    found = [kept[0].name]  # type: ignore[attr-defined]
    for how in ("fork", "spawn"):
        context = multiprocessing.get_context(how)
        with context.Pool(1) as pool:
            found.append(pool.apply(SharedMemory, (None, True, 100)).name)
    lock = multiprocessing.get_context("spawn").Lock()
    kept.append(lock)
    return [*found, "sem" + lock._semlock.name.replace("/", ".")]  # type: ignore[attr-defined]


kept: list[object] = []


def attach(name: str) -> int:
    from multiprocessing import shared_memory

    found = shared_memory.SharedMemory(name)
    size = found.size
    found.close()
    return size


def system_v() -> int:
    import ctypes

    return ctypes.CDLL(None).shmget(0, 4096, 0o600)


def share_a_tensor() -> list[str]:
    import os

    import torch
    import torch.multiprocessing

    torch.multiprocessing.set_sharing_strategy("file_system")
    kept.append(torch.zeros(1000).share_memory_())
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{os.getpid()}_")]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def is_gone(*names: str) -> bool:
    return not any((SEGMENTS / name).exists() for name in names)


@pytest.mark.parametrize("awareness", [Awareness.FULL, Awareness.DISK])
def test_segment_is_removed_with_a_stopped_library(served: FakeManager, awareness: Awareness) -> None:
    served.ready(recipe(awareness=awareness))
    (name,) = served.results(served.run(create, [()]))
    assert (SEGMENTS / name).exists()
    served.send(StopLibrary(library=1, reason="test"))
    assert served.gone().failure is None
    served.until(lambda: is_gone(name))


def test_segments_and_semaphores_end_with_a_killed_library(
    served: FakeManager, segment: shared_memory.SharedMemory
) -> None:
    served.ready(recipe())
    names, size = served.results([*served.run(create_in_children, [()]), *served.run(attach, [(segment.name,)])])
    assert len(names) == 4
    assert size >= 100
    assert not is_gone(names[-1])
    served.run(die, [()])
    served.gone()
    served.until(lambda: is_gone(*names))
    assert not is_gone(segment.name), "a call only attached to it"


@pytest.mark.parametrize("killed", ["zygote", "pilot"])
def test_segment_is_removed_when_its_zygote_or_pilot_is_killed(alone: FakeManager, killed: str) -> None:
    alone.ready(recipe())
    name, zygote = alone.results([*alone.run(create, [()]), *alone.run(os.getppid, [()])])
    os.kill(zygote if killed == "zygote" else alone.pilots[0].pid, signal.SIGKILL)
    alone.until(lambda: is_gone(name))


TRACKED = """
import os
from multiprocessing import resource_tracker, shared_memory
from stoker.pilot.library import process
process.register_created_segments_only()
"""
UNLINKED = "shared_memory.SharedMemory({name!r}).unlink()"
UNREGISTERED = "resource_tracker.unregister(shared_memory.SharedMemory({name!r})._name, 'shared_memory')"
MADE_BY_A_CHILD = """
resource_tracker.ensure_running()
there, name = os.pipe()
if not os.fork():
    os.write(name, shared_memory.SharedMemory(create=True, size=100).name.encode())
    os._exit(0)
shared_memory.SharedMemory(os.read(there, 100).decode()).unlink()
"""


@pytest.mark.parametrize(
    ("does", "stays"),
    [(UNLINKED, False), (UNREGISTERED, True), (MADE_BY_A_CHILD, True)],
    ids=["unlinked", "unregistered", "made by a child"],
)
def test_attached_segment_may_be_unlinked_or_unregistered(
    segment: shared_memory.SharedMemory, does: str, stays: bool
) -> None:
    """The resource tracker once printed a KeyError. It must forget a child's segments that another process removes."""
    program = TRACKED + does.format(name=segment.name)
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert is_gone(segment.name) is not stays


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_tensor_in_shared_memory_is_removed_with_its_library(served: FakeManager) -> None:
    served.ready(recipe())
    (names,) = served.results(served.run(share_a_tensor, [()]), wait_s=60)
    assert names
    served.run(die, [()])
    served.gone()
    served.until(lambda: is_gone(*names))


@pytest.mark.skipif(not SYSTEM_V.exists(), reason="this kernel has no System V segments")
def test_system_v_segment_is_removed_with_its_library(served: FakeManager) -> None:
    def there(number: int) -> bool:
        return any(line.split()[1] == str(number) for line in SYSTEM_V.read_text().splitlines()[1:])

    own = system_v()
    try:
        served.ready(recipe())
        (number,) = served.results(served.run(system_v, [()]))
        assert there(number)
        served.run(die, [()])
        served.gone()
        served.until(lambda: not there(number))
        assert there(own), "that one is of another process"
    finally:
        processes.remove_system_v_segments({os.getpid()}, since=0.0)
    assert not there(own)


def test_process_that_resembles_a_resource_tracker_is_killed_later(tmp_path: Path) -> None:
    text = "import time; a = 'multiprocessing.resource_tracker import main'; print(flush=True); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE)
    child.stdout.readline()
    assert child.pid in processes.child_resource_trackers()
    others = {pid for pid in processes.child_resource_trackers() if pid != child.pid}
    processes.end_resource_trackers(others, wait_s=0.1)
    assert child.wait(10) == -signal.SIGKILL
    assert gone([child.pid])


def test_resource_tracker_is_recognized_from_its_start() -> None:
    """/proc shows the command line of a new program late. A tracker was once killed with its library, and the
    segments stayed.
    """
    for _ in range(20):
        tracker = subprocess.Popen(["resource_tracker import main", "600"], executable=shutil.which("sleep"))
        try:
            assert processes.is_resource_tracker(tracker.pid)
        finally:
            tracker.kill()
            os.waitid(os.P_PID, tracker.pid, os.WEXITED | os.WNOWAIT)
            assert not processes.is_resource_tracker(tracker.pid)
            tracker.wait()


TWO_ENDS = """
import os, socket, subprocess, sys, time
from stoker.pilot.zygote import processes
from stoker.pilot.zygote.client import Exited
from stoker.pilot.zygote.server import ZygoteServer

TRACKER = "import sys; a = 'resource_" + "tracker import main'; sys.stdin.read()"  # only resembles a tracker

server, told = ZygoteServer(socket.socketpair()[0], scratch=""), []
server._send = told.append
processes.adopt_orphans()
others_go_on, others_end = os.pipe()
first = os.fork()
if not first:
    subprocess.Popen([sys.executable, "-c", TRACKER], stdin=others_go_on)
    time.sleep(0.3)
    os._exit(0)
second = os.fork()
if not second:
    os.close(others_end)
    os.read(others_go_on, 1)
    os._exit(0)
os.close(others_go_on)
server._libraries = {first: 1, second: 2}
while not told:
    server._reap_children()
(tracker,) = server._trackers
os.close(others_end)  # both processes end, and no process reaps them
for pid in (tracker, second):
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
while len(told) < 2:
    server._reap_children()
server._kill_late_trackers()
print([each.orphans for each in told], server._trackers)
"""


def test_ended_resource_tracker_is_forgotten() -> None:
    """If Stoker remembered the process id, Stoker could kill another process that reuses the id."""
    said = subprocess.run([sys.executable, "-c", TWO_ENDS], capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout == "[0, 0] {}\n"
