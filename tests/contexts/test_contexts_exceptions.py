from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from new_process import run_python

from stoker.contexts.payloads import RemoteTraceback, dump_exception, load_exception
from stoker.errors import ContextError, RemoteCallError


def travel(raising: Any) -> BaseException:
    try:
        raising()
    except BaseException as error:
        return load_exception(dump_exception(error))
    raise AssertionError("it did not raise")


def raises(error: BaseException) -> Any:
    def deep_in_the_function() -> None:
        raise error

    return deep_in_the_function


class TwoArguments(Exception):
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{reason} ({code})")
        self.code = code


class KeywordOnly(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(code)
        self.code = code


class WithLock(Exception):
    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.good = "kept"
        self.lock = threading.Lock()


class LockArgument(Exception):
    pass


class BadString(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no string today")


class BadReduce(Exception):
    def __reduce__(self) -> Any:
        raise RuntimeError("not me")


class RefusesToBeMade(Exception):
    def __reduce__(self) -> Any:
        return _fail, ()


def _fail() -> None:
    raise OSError("not on this machine")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("'MAYBE' is not a label"),
        KeyError("x"),
        FileNotFoundError(2, "No such file", "model.bin"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        SystemExit(3),
        ContextError("the loader raised", context="llm-1", pilot="n1"),
        TwoArguments(3, "odd"),
        KeywordOnly(code=5),
    ],
    ids=lambda error: type(error).__name__,
)
def test_exception_arrives_with_its_own_type(error: BaseException) -> None:
    back = travel(raises(error))
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert repr(back.args) == repr(error.args)
    assert vars(back).items() >= vars(error).items()
    cause = back.__cause__
    assert isinstance(cause, RemoteTraceback)
    assert "deep_in_the_function" in str(cause)


def test_remote_exception_chain_is_shown_and_sent_again() -> None:
    def chained() -> None:
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise ValueError("outer") from error

    once = travel(chained)
    text = str(once.__cause__)
    assert all(said in text for said in ("KeyError: 'inner'", "direct cause", "ValueError: outer"))
    again = travel(raises(once))
    assert type(again) is ValueError
    assert "chained" in str(again.__cause__)


def test_unpicklable_part_of_an_exception_is_left_out() -> None:
    error = WithLock("held")
    back = travel(raises(error))
    assert type(back) is WithLock
    assert back.good == "kept"
    assert back.lock is not error.lock  # __init__ made a new lock, because locks cannot be pickled
    assert any("lock" in note for note in back.__notes__)
    back = travel(raises(LockArgument(threading.Lock())))
    assert isinstance(back, RemoteCallError)
    assert back.kind.endswith("LockArgument")
    assert "deep_in_the_function" in back.traceback


@pytest.mark.parametrize(
    "error", [BadReduce("x"), RefusesToBeMade("x"), BadString("x")], ids=lambda error: type(error).__name__
)
def test_exception_with_a_broken_method_is_sent(error: BaseException) -> None:
    back = travel(raises(error))
    assert type(back) is type(error)
    assert back.args == ("x",)
    assert back.__cause__ is not None


def test_exceptions_of_main_and_unknown_modules_are_sent(tmp_path: Path) -> None:
    """Raise exceptions of classes in `__main__` of another process and in a module that this process can't import."""
    (tmp_path / "elsewhere.py").write_text(
        "import threading\nclass Lost(Exception):\n    pass\nclass Plain(Exception):\n    lock = threading.Lock()\n"
    )
    program = """
        import sys; sys.path.insert(0, ".")
        import elsewhere
        from stoker.contexts.payloads import dump_exception
        class Mine(Exception):
            def __init__(self, a, b):
                super().__init__(a); self.b = b
        for number, error in enumerate((Mine(1, 2), elsewhere.Lost("gone"), elsewhere.Plain("gone"))):
            try:
                raise error
            except Exception as e:
                open(str(number), "wb").write(dump_exception(e))
    """
    run_python(program, cwd=tmp_path)
    mine, lost, plain = (load_exception((tmp_path / str(number)).read_bytes()) for number in range(3))
    assert (type(mine).__name__, mine.args, mine.b) == ("Mine", (1,), 2)  # type: ignore[attr-defined]
    assert (type(lost).__name__, lost.args) == ("Lost", ("gone",))
    # A class that can't be pickled by value is pickled by name, and this process does not know the name.
    assert isinstance(plain, RemoteCallError)
    assert plain.kind == "elsewhere.Plain"
    assert "gone" in str(plain)
    assert "elsewhere" in str(plain)


def test_exception_keeps_its_type_if_tblib_is_installed():
    """Parsl imports tblib, which bypasses `__init__`. Imports cannot be undone, so use another process."""
    program = """
import tblib.pickling_support
from stoker.contexts import payloads
tblib.pickling_support.install()
error = payloads.load_exception(payloads.dump_exception(UnicodeDecodeError("utf-8", b"\\xff", 0, 1, "bad byte")))
print(type(error).__name__, error)
"""
    said = "UnicodeDecodeError 'utf-8' codec can't decode byte 0xff in position 0: bad byte\n"
    assert run_python(program) == said


def test_members_of_an_exception_group_keep_their_types() -> None:
    inner = ExceptionGroup("inner", [KeywordOnly(code=3), ValueError("plain")])
    whole = ExceptionGroup("outer", [TwoArguments(7, "why"), inner])
    whole.good = "kept"  # type: ignore[attr-defined]
    back = travel(raises(whole))
    assert type(back) is ExceptionGroup
    assert (back.message, vars(back)["good"]) == ("outer", "kept")
    first, second = back.exceptions
    assert (type(first), str(first), vars(first)["code"]) == (TwoArguments, "why (7)", 7)
    assert isinstance(second, ExceptionGroup)
    assert [type(member) for member in second.exceptions] == [KeywordOnly, ValueError]
    assert second.exceptions[0].code == 3  # type: ignore[attr-defined]
    assert isinstance(back.__cause__, RemoteTraceback)
