"""Threads that modules start when a zygote imports them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import setproctitle

from stoker.pilot.zygote.imported_threads import ImportedThreads


@contextmanager
def thread(name: str) -> Iterator[None]:
    """A thread that the kernel knows by this name, while the block runs."""
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


def test_a_thread_is_told_of_with_the_module_that_started_it() -> None:
    with thread("before"):
        threads = ImportedThreads()
        threads.look("first")
        with thread("worker"):
            threads.look("second")
            threads.look("third")
            assert threads.harmful() == {"second": "worker"}
        assert threads.harmful() == {}


def test_a_thread_that_gives_memory_back_does_no_harm() -> None:
    """pyarrow starts one, which scikit-learn imports and Transformers imports that."""
    threads = ImportedThreads()
    with thread("jemalloc_bg_thd"), thread("other"):
        threads.look("pandas")
        assert threads.harmful() == {"pandas": "other"}
