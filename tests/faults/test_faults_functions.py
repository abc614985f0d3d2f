from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest
from faults.world import count_lines, note

import stoker
from stoker import errors


@stoker.context
def hot(log):
    note(log, "loaded")
    return "hot"


def stays(context, what, log):
    return what


def raises(context, what, log):
    raise LookupError(f"no label for {what}")


def exits(context, what, log):
    sys.exit(3)


def interrupts(context, what, log):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("function", "kind", "said"),
    [
        (raises, LookupError, "no label for x"),
        (exits, errors.RemoteCallError, "SystemExit(3"),
        (interrupts, errors.RemoteCallError, "KeyboardInterrupt"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_function_exception_is_raised_and_its_context_stays_loaded(shared, tmp_path, function, kind, said):
    recipe = hot(str(tmp_path / "log"))
    bad, good = (stoker.app(context=recipe)(each) for each in (function, stays))
    futures = [good(number, "") for number in range(10)]
    failing = bad("x", "")
    futures += [good(number, "") for number in range(10, 20)]
    with pytest.raises(kind) as caught:
        failing.result(60)
    assert said in str(caught.value)
    assert function.__name__ in str(caught.value.__cause__), "the remote traceback"
    assert [future.result(60) for future in futures] == list(range(20))
    assert count_lines(tmp_path / "log")["loaded"] <= 2


def dies(context, what, log):
    note(log, f"{what} killed {os.getpid()}")
    print("last words", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def exits_hard(context, what, log):
    note(log, f"{what} killed {os.getpid()}")
    print("last words", flush=True)
    os._exit(3)


def hangs_up(context, what, log):
    note(log, f"{what} killed {os.getpid()}")
    print("last words", flush=True)
    os.closerange(3, 1000)
    time.sleep(300)


@pytest.mark.parametrize(
    ("poison", "said", "facts"),
    [
        (dies, "SIGSEGV", {"signal": signal.SIGSEGV}),
        (exits_hard, "exited with code 3", {"exit_code": 3}),
        (hangs_up, "ended", {}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_call_that_kills_its_library_twice_fails_alone(shared, tmp_path, poison, said, facts):
    log = str(tmp_path / "log")
    recipe = hot(log)
    bad, good = (stoker.app(context=recipe)(each) for each in (poison, stays))
    futures = [good(number, log) for number in range(100)]
    poisoned = bad("p", log)
    futures += [good(number, log) for number in range(100, 200)]
    assert [future.result(60) for future in futures] == list(range(200))
    with pytest.raises(errors.PoisonCallError) as caught:
        poisoned.result(60)
    error, text = caught.value, str(caught.value)
    assert sum(line.startswith("p killed") for line in count_lines(tmp_path / "log")) == 2
    assert "2 times" in text
    assert said in text
    assert shared.status().pilots[0].pilot in text
    assert "last words" in text
    assert "last words" in Path(error.log).read_text()
    assert f"stoker explain {error.call}" in text
    for name, value in facts.items():
        assert getattr(error, name) == value
    assert good(1, log).result(60) == 1


def test_call_fails_if_it_exceeds_the_memory_of_its_context(shared):
    @stoker.context(memory="300 MB")
    def small():
        return 0

    @stoker.app(context=small())
    def eat(context, amount):
        taken = bytearray(os.urandom(1_000_000) * amount)
        time.sleep(300 if amount > 10 else 0)
        return len(taken)

    big, small = eat(600), eat(1)
    assert small.result(60) == 1_000_000
    with pytest.raises(errors.CallError) as caught:
        big.result(60)
    assert "declares 300 MB" in str(caught.value)
    assert "declare more" in str(caught.value)
    assert eat(2).result(60) == 2_000_000


def test_call_runs_in_its_folder_and_its_files_are_removed(shared, tmp_path):
    @stoker.app()
    def messes(path):
        os.makedirs(os.path.join(tempfile.gettempdir(), "deep/er"))
        tempfile.NamedTemporaryFile(delete=False).close()
        os.chdir(path)
        os.umask(0o777)
        os.environ["LEFT_BEHIND"] = "1"
        os.environ.pop("HOME", None)
        os.close(0)
        return os.getcwd(), os.getpid()

    @stoker.app()
    def looks():
        mask = os.umask(0)
        os.umask(mask)
        changed = [name for name in ("LEFT_BEHIND", "HOME") if name in os.environ]
        return os.listdir(os.environ["TMPDIR"]), os.getcwd(), mask, changed, os.fstat(0).st_rdev, os.getpid()

    mask = os.umask(0)
    os.umask(mask)
    kept = ["HOME"] if "HOME" in os.environ else []
    for _ in range(3):
        folder, pid = messes(str(tmp_path)).result(60)
        assert folder == str(tmp_path)
        assert looks().result(60) == ([], os.getcwd(), mask, kept, os.stat(os.devnull).st_rdev, pid)
