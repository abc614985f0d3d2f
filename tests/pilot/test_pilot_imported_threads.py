"""Threads that modules start when a zygote imports them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import setproctitle

from stoker.pilot.zygote.server import ImportedThreads


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
    threads = ImportedThreads()
    before = threads.harmful()  # the tests' own
    threads.attribute_to("first")
    with thread("worker"):
        threads.attribute_to("second")
        threads.attribute_to("third")
        assert threads.harmful() == {**before, "second": "worker"}
    assert threads.harmful() == before


def test_threads_that_no_module_has_started_are_told_of_as_well() -> None:
    """A profiler that a `.pth` file starts, or one that a module starts a moment later."""
    with thread("profiler"):
        threads = ImportedThreads()
        threads.attribute_to("torch")
        assert "profiler" in threads.harmful()["what came before the imports"]
    with thread("late"):
        assert threads.harmful()["something later"] == "late"


def test_a_thread_that_gives_memory_back_does_no_harm() -> None:
    """pyarrow starts one; pandas imports pyarrow, scikit-learn pandas, and Transformers scikit-learn."""
    threads = ImportedThreads()
    with thread("jemalloc_bg_thd"), thread("other"):
        threads.attribute_to("pandas")
        assert threads.harmful()["pandas"] == "other"
