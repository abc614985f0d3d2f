from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import setproctitle
from live.peers import until

from stoker.pilot.library import connection
from stoker.pilot.zygote.client import Exited, Fork, Forked, FromZygote, Zygote
from stoker.pilot.zygote.server import ImportedThreads

COUNT = 1_000
"""Number of orders, more than the socket buffer holds."""


def test_orders_are_queued_until_the_zygote_finishes_its_imports(tmp_path: Path) -> None:
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
    said: list[FromZygote] = []

    def has_said(kind: type) -> bool:
        zygote.send_unsent()
        said.extend(zygote.receive_messages() or [])
        return any(isinstance(message, kind) for message in said)

    try:
        for _ in range(COUNT):
            zygote.kill_library(999)
        assert zygote.has_unsent
        ours, theirs = socket.socketpair()
        folder = tmp_path / "lib-1"
        folder.mkdir()
        entry = "stoker.pilot.library.main:serve"
        zygote.fork_library(Fork(1, entry, log=str(tmp_path / "lib.log"), folder=str(folder), environment={}), theirs)
        assert theirs.fileno() >= 0, "it is kept until it is sent"
        gate.touch()
        until(lambda: has_said(Forked))
        assert not zygote.has_unsent
        assert theirs.fileno() < 0
        with ours:
            ours.sendall(connection.pack_frame_body(b"no settings"))
        until(lambda: has_said(Exited))
    finally:
        zygote.kill_and_reap()


def test_dead_zygote_receives_no_order_and_is_reported(tmp_path: Path) -> None:
    zygote = Zygote((), log=tmp_path / "log", scratch=tmp_path / "scratch", environ=os.environ)
    zygote.kill_zygote()
    until(lambda: zygote.receive_messages() is None)
    zygote.kill_library(1)
    assert not zygote.has_unsent
    zygote.kill_and_reap()


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


def modules_of(threads: ImportedThreads, name: str) -> list[str]:
    """Return the modules of harmful threads with this name. Threads of earlier tests may start or end meanwhile."""
    return [module for module, names in threads.find_harmful_threads().items() if name in names.split(", ")]


def test_thread_is_reported_with_the_module_that_started_it() -> None:
    """A thread of jemalloc is harmless. Transformers imports pyarrow, which starts such a thread."""
    threads = ImportedThreads()
    threads.attribute_new_threads("first")
    with thread("jemalloc_bg_thd"), thread("second's worker"):
        threads.attribute_new_threads("second")
        threads.attribute_new_threads("third")
        assert modules_of(threads, "second's worker") == ["second"]
        assert modules_of(threads, "jemalloc_bg_thd") == []
    assert modules_of(threads, "second's worker") == []


def test_thread_without_a_known_module_is_reported() -> None:
    """Examples: a profiler that a `.pth` file starts, or a thread that a module starts after its import."""
    with thread("early profiler"):
        threads = ImportedThreads()
        threads.attribute_new_threads("torch")
        assert modules_of(threads, "early profiler") == ["code before the imports"]
    with thread("late thread"):
        assert modules_of(threads, "late thread") == ["something later"]
