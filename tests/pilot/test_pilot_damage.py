"""A library undoes the side effects of a call if possible. Otherwise the library ends and later calls run elsewhere."""

from __future__ import annotations

import decimal
import os
import resource
import time
from typing import Any

import pytest
from fake_manager import FakeManager, recipe

from stoker.protocol.calls import FailureKind


def _limited() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def _leak(count: int) -> None:
    for _ in range(count):
        os.dup(0)
    time.sleep(0.01)


def _leak_all() -> None:
    while True:
        os.dup(0)


def _leak_all_in_silence() -> None:
    try:
        _leak_all()
    except OSError:
        pass


def _open_one() -> bool:
    with open("/dev/null") as file:
        return file.readable()


def _keep_files() -> None:
    """Open files that only the garbage collector closes."""
    files: list[Any] = [open("/dev/null") for _ in range(10)]  # noqa: SIM115
    files.append(files)
    time.sleep(0.01)


def test_library_that_leaks_descriptors_ends_before_a_call_fails(served: FakeManager) -> None:
    served.ready(recipe(_limited))
    calls = served.run(_leak, [(5,)] * 60)
    left = served.gone()
    assert left.failure.kind is FailureKind.DIED
    assert "file descriptors" in left.failure.message
    assert "the limit is 128 files" in left.failure.tail
    assert left.running == ()
    served.until(lambda: {*served.ends(), *left.unstarted} >= set(calls))
    assert all(end.ok for end in served.ends().values())
    assert left.unstarted


def test_call_that_takes_all_descriptors_keeps_its_exception(served: FakeManager) -> None:
    served.ready(recipe(_limited))
    good, bad, after = (served.run(call, [()])[0] for call in (_open_one, _leak_all, _open_one))
    left = served.gone()
    (error,) = served.results([bad])
    assert isinstance(error, OSError)
    assert "Too many open files" in str(error)
    assert served.results([good]) == [True]
    assert left.running == ()
    assert left.unstarted in ((after,), ())
    served.ready(recipe(_limited), library=2)
    assert served.results(served.run(_open_one, [()], library=2)) == [True]


@pytest.mark.long
def test_call_that_fails_because_of_earlier_leaks_runs_elsewhere(served: FakeManager) -> None:
    """Several short calls share one check for leaked descriptors. An earlier call since the last check took the last
    descriptor.
    """
    served.ready(recipe(_limited))
    served.results(served.run(_open_or_leak, [(False,)] * 50))
    calls = served.run(_open_or_leak, [(False,)] * 3 + [(True,), (False,), (False,)])
    left = served.gone()
    served.until(lambda: {*served.ends(), *left.running, *left.unstarted} >= set(calls))
    assert "file descriptors" in left.failure.message
    assert all(end.ok for end in served.ends().values())


def _open_or_leak(leak: bool) -> None:
    if leak:
        _leak_all_in_silence()
    else:
        os.close(os.open("/dev/null", os.O_RDONLY))


def test_files_in_reference_cycles_do_not_end_a_library(served: FakeManager) -> None:
    served.ready(recipe(_limited))
    first = served.results(served.run(os.getpid, [()]))
    served.results(served.run(_keep_files, [()] * 40))
    assert served.results(served.run(os.getpid, [()])) == first


@pytest.mark.long
def test_loader_that_leaves_few_descriptors_is_not_loaded_repeatedly(served: FakeManager) -> None:
    def load() -> None:
        _limited()
        _leak_all_in_silence()
        os.closerange(124, 128)

    served.ready(recipe(load))
    first = served.results(served.run(os.getpid, [()]))
    (error,) = served.results(served.run(_leak_all, [()]))
    assert isinstance(error, OSError)
    (error,) = served.results(served.run(_open_one, [()]))
    assert isinstance(error, OSError)
    assert served.results(served.run(os.getpid, [()])) == first


def test_loader_that_leaves_no_descriptor_is_reported(served: FakeManager) -> None:
    def load() -> None:
        _limited()
        _leak_all_in_silence()

    served.start(recipe(load))
    left = served.gone()
    assert left.failure.kind is FailureKind.CONTEXT
    assert "Too many open files" in left.failure.message


def test_descriptor_leak_does_not_fail_a_call_in_another_slot(served: FakeManager) -> None:
    served.ready(recipe(_limited, slots=2))
    (slow,) = served.run(time.sleep, [(1.0,)])
    leaks = served.run(_leak, [(30,)] * 3)
    left = served.gone()
    assert slow in served.ends() or slow in left.unstarted
    assert all(end.ok for end in served.ends().values())
    assert {*served.ends(), *left.running, *left.unstarted} == {slow, *leaks}


def _do(code: str) -> None:
    exec(code)


@pytest.mark.parametrize("slots", [1, 2])
def test_output_closed_by_a_call_is_reopened_for_the_next_call(served: FakeManager, slots: int) -> None:
    def say() -> int:
        print("hello from the next call")
        return os.getpid()

    harms = (
        "import os; os.close(1); os.close(2)",
        "import os; os.dup2(os.open(os.devnull, os.O_WRONLY), 1)",
        "import sys; sys.stdout.close()",
        "import sys; sys.stdout = None",
    )
    for library, harm in enumerate(harms, start=1):
        served.ready(recipe(slots=slots), library=library)
        before = served.results(served.run(os.getpid, [()], library=library))
        assert served.results(served.run(_do, [(harm,)], library=library)) == [None]
        (call,) = served.run(say, [()], library=library)
        assert served.results([call]) == before, harm
        printed = served.ends()[call].printed
        assert printed is not None
        with open(printed.path, "rb") as log:
            log.seek(printed.start)
            assert log.read(printed.end - printed.start) == b"hello from the next call\n", harm


LIMIT = "import resource; resource.setrlimit(resource.{0}, ({1}, resource.getrlimit(resource.{0})[1]))"


def test_library_ends_after_the_result_of_a_call_that_damages_it(served: FakeManager) -> None:
    harms = [
        ("import sys; sys.modules.clear()", "removed or replaced sys.modules['sys']"),
        ("import builtins; del builtins.open", "removed open from builtins"),
        ("import builtins; builtins.open = None", "removed open from builtins"),
        (LIMIT.format("RLIMIT_NOFILE", 4), "lowered RLIMIT_NOFILE"),
        (LIMIT.format("RLIMIT_FSIZE", 0), ""),  # writes to the log fail
        ("import sys; sys.setrecursionlimit(60)", "recursion limit"),
        ("import signal; signal.setitimer(signal.ITIMER_REAL, 600.0)", "left a timer"),
        ("import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)", "SIGCHLD"),
        ("from signal import *; pthread_sigmask(SIG_BLOCK, {SIGALRM, SIGCHLD})", "blocked signals"),
        ("import signal; signal.signal(signal.SIGTERM, signal.SIG_DFL)", "SIGTERM"),
    ]
    for library, (harm, said) in enumerate(harms, start=1):
        served.ready(recipe(), library=library)
        calls = served.run(_do, [(harm,)], library=library)
        left = served.gone(library)
        assert served.results(calls) == [None], harm
        assert left.running == ()
        assert left.failure.kind is FailureKind.DIED
        assert said in left.failure.tail
        assert "can run no more calls" in left.failure.message
    served.ready(recipe(), library=len(harms) + 1)
    assert served.results(served.run(_open_one, [()], library=len(harms) + 1)) == [True]


def test_threads_and_children_left_by_a_call_do_not_end_the_library(served: FakeManager) -> None:
    def keep() -> int:
        import subprocess
        import threading

        threading.Thread(target=time.sleep, args=(600.0,), daemon=True).start()
        return subprocess.Popen(["sleep", "600"]).pid

    def lives(child: int) -> tuple[int, bool]:
        time.sleep(0.01)
        return os.getpid(), os.path.exists(f"/proc/{child}")

    served.ready(recipe())
    (pid,) = served.results(served.run(os.getpid, [()]))
    (child,) = served.results(served.run(keep, [()]))
    assert served.results(served.run(lives, [(child,)])) == [(pid, True)]


@pytest.mark.parametrize("slots", [1, 2])
def test_context_variables_of_a_call_start_as_those_of_the_loader(served: FakeManager, slots: int) -> None:
    def loader() -> None:
        decimal.getcontext().prec = 7

    def rough() -> str:
        decimal.getcontext().prec = 3
        return third()

    def third() -> str:
        return str(decimal.Decimal(1) / 3)

    async def later() -> str:
        decimal.getcontext().prec = 2
        return third()

    served.ready(recipe(loader, slots=slots))
    assert served.results(served.run(rough, [()] * 4)) == ["0.333"] * 4
    assert served.results(served.run(later, [()] * 4)) == ["0.33"] * 4
    assert served.results(served.run(third, [()] * 4)) == ["0.3333333"] * 4
