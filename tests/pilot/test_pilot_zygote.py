from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import setproctitle

from stoker.pilot.library import connection
from stoker.pilot.zygote.client import Exited, Fork, Forked, FromZygote, Zygote
from stoker.pilot.zygote.server import ImportedThreads

LIMIT_S = 30.0
COUNT = 1_000
"""Number of orders that exceeds the socket buffer."""


def test_orders_wait_until_an_importing_zygote_reads(tmp_path: Path) -> None:
    gate = tmp_path / "go on"
    (tmp_path / "slow_to_import.py").write_text(
        f"import os, time\nwhile not os.path.exists({str(gate)!r}):\n    time.sleep(0.01)\n"
    )
    zygote = Zygote(
        ("slow_to_import",),
        log=tmp_path / "log",
        scratch=tmp_path / "scratch",
        environ={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
    )
    try:
        for _ in range(COUNT):
            zygote.kill(999)
        assert zygote.unsent
        ours, theirs = socket.socketpair()
        folder = tmp_path / "lib-1"
        folder.mkdir()
        entry = "stoker.pilot.library.main:serve"
        zygote.fork(Fork(1, entry, log=str(tmp_path / "lib.log"), folder=str(folder), environment={}), theirs)
        assert theirs.fileno() >= 0, "it is kept until it is sent"
        gate.touch()
        said: list[FromZygote] = []
        ends_at = time.monotonic() + LIMIT_S
        while not any(isinstance(message, Forked) for message in said):
            assert time.monotonic() < ends_at, said
            zygote.push()
            said += zygote.receive() or []
            time.sleep(0.005)
        assert not zygote.unsent
        assert theirs.fileno() < 0
        with ours:
            ours.sendall(connection.pack_raw(b"no settings"))
        while not any(isinstance(message, Exited) for message in said):
            assert time.monotonic() < ends_at, said
            said += zygote.receive() or []
            time.sleep(0.005)
    finally:
        zygote.destroy()


def test_dead_zygote_receives_no_order_and_is_reported(tmp_path: Path) -> None:
    zygote = Zygote((), log=tmp_path / "log", scratch=tmp_path / "scratch", environ=os.environ)
    zygote.stop()
    ends_at = time.monotonic() + LIMIT_S
    while zygote.receive() is not None:
        assert time.monotonic() < ends_at
        time.sleep(0.005)
    zygote.kill(1)
    assert not zygote.unsent
    assert zygote.receive() is None
    zygote.destroy()


@contextmanager
def thread(name: str) -> Iterator[None]:
    named, over = threading.Event(), threading.Event()

    def work() -> None:
        setproctitle.setthreadtitle(name)
        named.set()
        over.wait()

    started = threading.Thread(target=work)
    started.start()
    named.wait()
    yield
    over.set()
    started.join()


def test_started_thread_is_reported_with_its_module() -> None:
    threads = ImportedThreads()
    before = threads.harmful()  # threads of the test process itself
    threads.attribute_new_threads("first")
    with thread("worker"):
        threads.attribute_new_threads("second")
        threads.attribute_new_threads("third")
        assert threads.harmful() == {**before, "second": "worker"}
    assert threads.harmful() == before


def test_thread_without_a_known_module_is_reported() -> None:
    """Examples: a profiler that a `.pth` file starts, or a thread that a module starts after its import."""
    with thread("profiler"):
        threads = ImportedThreads()
        threads.attribute_new_threads("torch")
        assert "profiler" in threads.harmful()["code before the imports"]
    with thread("late"):
        assert threads.harmful()["something later"] == "late"


def test_thread_that_returns_memory_to_the_system_is_harmless() -> None:
    """pyarrow starts such a thread. pandas imports pyarrow, scikit-learn pandas, and Transformers scikit-learn."""
    threads = ImportedThreads()
    with thread("jemalloc_bg_thd"), thread("other"):
        threads.attribute_new_threads("pandas")
        assert threads.harmful()["pandas"] == "other"
