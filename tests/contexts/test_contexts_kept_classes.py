"""Results do not change classes of the program; arguments carry class attributes to the library.
(tests/api/test_programs_captured.py tests results and exceptions of a whole program.)
"""

from __future__ import annotations

import enum
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stoker.contexts import ambient, payloads
from stoker.contexts.payloads import dumps_code

_LIBRARY = """
import sys
from stoker.contexts import ambient, payloads
from stoker.contexts.payloads import loads_code
function, pack = loads_code(sys.stdin.buffer.read())[0]
try:
    result = function()
    sys.stdout.buffer.write(pack(result) if pack else payloads.dumps(result, what="result"))
except Exception as error:
    sys.stdout.buffer.write(payloads.dump_exception(error))
"""


def of_a_library(function: Callable[[], Any], *, pack: Callable[[Any], bytes] | None = None) -> bytes:
    """Run a function in another process that lacks the classes of this test; return its pickled result or exception."""
    data = dumps_code((function, pack), what="function")
    done = subprocess.run([sys.executable, "-c", _LIBRARY], input=data, capture_output=True, timeout=60, cwd="/")
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


level = 1


class Config:
    rate = 1.0
    made = 0

    def __init__(self) -> None:
        type(self).made += 1

    def level(self) -> int:
        return level


class Colour(enum.Enum):
    RED = 1

    def level(self) -> int:
        return level


@pytest.fixture(autouse=True)
def classes_as_they_are_above() -> Any:
    yield
    Config.rate = 1.0


def train() -> Config:
    return Config()


def test_enumeration_and_its_members_are_preserved(monkeypatch: pytest.MonkeyPatch) -> None:
    method = Colour.level
    assert payloads.loads(of_a_library(lambda: Colour.RED), keep_classes=True) is Colour.RED
    assert Colour.level is method
    monkeypatch.setitem(globals(), "level", 2)
    assert Colour.RED.level() == 2


def test_argument_carries_class_attributes_set_by_the_program() -> None:
    data = payloads.dumps(Config())
    Config.rate = 0.5
    payloads.loads(data)
    assert Config.rate == 1.0


def make_there() -> list[Any]:
    class Found:
        rate = 1.0

        def level(self) -> int:
            return level

    return [Found(), Found()]


def test_class_received_with_a_result_is_complete_and_kept() -> None:
    data = of_a_library(make_there)
    first, second = payloads.loads(data, keep_classes=True)
    kind = type(first)
    assert type(second) is kind
    assert (kind.rate, first.level()) == (1.0, 1)
    kind.rate = 0.5
    again, _ = payloads.loads(data, keep_classes=True)
    assert type(again) is kind
    assert kind.rate == 0.5


class Reads:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.read_text, (self.file,)


def pack_with_and_without(kind: type[Any]) -> bytes:
    """Return two pickles of an instance: with and without the class attribute `text`."""
    whole = payloads.dumps(kind(), what="result")
    del kind.text
    return pickle.dumps((whole, payloads.dumps(kind(), what="result")))


def with_and_without_text(file: Path) -> tuple[bytes, bytes]:
    def make() -> type[Any]:
        reads = Reads(file)

        class Found:
            text = reads
            rate = 1.0

            def level(self) -> int:
                return level

        return Found

    both: tuple[bytes, bytes] = pickle.loads(of_a_library(make, pack=pack_with_and_without))
    return both


def test_class_is_complete_after_an_earlier_failed_rebuild(tmp_path: Path) -> None:
    data, _ = with_and_without_text(tmp_path / "text")
    with pytest.raises(FileNotFoundError):
        payloads.loads(data, keep_classes=True)
    (tmp_path / "text").write_text("here")
    back = payloads.loads(data, keep_classes=True)
    assert (back.text, back.level()) == ("here", 1)


def test_two_threads_rebuild_values_of_one_new_class(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    slow, quick = with_and_without_text(fifo)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(payloads.loads(slow, keep_classes=True)))
    thread.start()
    # `open` returns when the thread opens the file for reading; at this time the class exists without attributes
    with open(fifo, "w") as file:
        back = payloads.loads(quick, keep_classes=True)
        assert (back.rate, back.level()) == (1.0, 1)
        type(back).rate = 0.5
        file.write("late")
    thread.join(60)
    assert type(found[0]) is type(back)
    assert (found[0].rate, found[0].level()) == (0.5, 1)


class Family:
    children: tuple[str, ...] = ()

    def __init_subclass__(cls) -> None:
        Family.children = (*Family.children, cls.__name__)


class Child(Family):
    pass


def test_unpickling_does_not_call_init_subclass_again() -> None:
    assert type(payloads.loads(payloads.dumps(Child()), keep_classes=True)) is Child
    assert Family.children == ("Child",)


def test_class_pickled_by_name_keeps_its_attributes() -> None:
    data = dumps_code(Config(), what="result", by_name=frozenset({__name__}))
    assert b"class_by_name" in data
    Config.rate = 0.5
    assert type(payloads.loads(data, keep_classes=True)) is Config
    assert Config.rate == 0.5
    payloads.loads(data)
    assert Config.rate == 1.0


def test_received_checkpoint_does_not_change_its_class() -> None:
    data = payloads.dumps(Config(), what="checkpoint")
    Config.rate = 0.5
    ambient.enter_call_scope(hook=lambda *_: False, state=data)
    try:
        back = ambient.saved_state()
    finally:
        ambient.leave_call_scope()
    assert type(back) is Config
    assert Config.rate == 0.5
