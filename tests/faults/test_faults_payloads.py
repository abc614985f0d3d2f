from __future__ import annotations

import os
import re
import socket
import threading

import numpy as np
import parsl
import pytest
from faults.world import until

import stoker
from stoker import errors
from stoker.manager.advice.logs import FaultKind
from stoker.manager.cli import explain
from stoker.manager.cli.session_choice import find_story_of_subject

LARGE = 300_000_000


def resident(pid):
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmRSS:"))


def files_of(session):
    return sorted(path.name for path in (session.folder / "objects").iterdir())


@pytest.mark.long
@pytest.mark.slow
def test_argument_and_result_of_300_mb_are_transferred(shared, shared_world):
    @stoker.app()
    def flip(array):
        return array[::-1].copy()

    flip(np.arange(2)).result(120)  # the manager has started and finished its imports
    manager = shared_world.manager()
    before = resident(manager)
    array = np.arange(LARGE // 8)
    flipped = flip(array).result(120)
    assert flipped.nbytes == LARGE
    assert flipped[0] == array[-1]
    assert flipped[-1] == 0
    assert resident(manager) - before < 20_000_000, "payloads of this size do not pass through the manager"
    assert (shared.folder / "journal").stat().st_size < 20_000_000
    until(lambda: files_of(shared) == [], why="neither the argument nor the result is kept")
    flipped[0] = 5
    assert flipped[0] == 5, "the returned array is writable"


def test_large_results_of_a_closed_map_are_removed(shared):
    def make(number):
        return os.urandom(2_000_000)

    results = stoker.map(make, range(20))
    assert len(next(results)) == 2_000_000
    results.close()
    until(lambda: shared.executor.outstanding() == 0)
    until(lambda: all(context.running == 0 for context in shared.status().contexts))
    until(lambda: files_of(shared) == [], why="results that came after the map was closed")


def test_call_with_a_large_argument_survives_a_killed_library(shared, tmp_path):
    flag = tmp_path / "died"

    @stoker.app()
    def size(data):
        if not flag.exists():
            flag.touch()
            os._exit(1)
        return len(data)

    assert size(b"x" * 5_000_000).result(60) == 5_000_000
    until(lambda: files_of(shared) == [])


def _take(value):
    return value


class Unpicklable:
    def __reduce__(self):
        raise RuntimeError("this one stays here")


class Raises:
    """Unpickling this object raises an error, except in the process that made the object."""

    def __init__(self, error):
        self.error = error
        self.home = os.getpid()

    def __reduce__(self):
        return _open, (self.home, self.error)


def _open(home, error):
    if os.getpid() != home:
        raise error


class Unshown(Exception):
    """An exception whose `repr` raises, like an incompletely pickled exception."""

    def __repr__(self):
        raise AttributeError("no repr today")


class Odd(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


class Locked(Exception):
    def __init__(self):
        super().__init__("locked")
        self.lock = threading.Lock()


class Stuck(Exception):
    def __init__(self):
        super().__init__("stuck", Unpicklable())


def raises(kind):
    raise {
        "odd": lambda: Odd(1, 2),
        "locked": Locked,
        "stuck": Stuck,
        "socket": lambda: OSError(socket.socket()),
        "unshown": Unshown,
    }[kind]()


def returns(kind):
    return {
        "lock": threading.Lock,
        "refuses": Unpicklable,
        "generator": lambda: (number for number in range(3)),
        "here": lambda: Raises(RuntimeError("only at home")),
        "leaves": lambda: Raises(SystemExit("not here")),
    }[kind]()


@pytest.mark.parametrize("bad", [threading.Lock(), Unpicklable(), (number for number in range(3))], ids=type)
def test_unpicklable_arguments_raise_an_error(shared, bad):
    take = stoker.app()(_take)
    with pytest.raises(errors.SerializationError, match="_take") as caught:
        take(bad).result(60)
    assert caught.value.what == "argument"
    with pytest.raises(errors.SerializationError, match="_take"):
        list(stoker.map(_take, [bad]))
    assert take(1).result(60) == 1


def test_arguments_that_fail_to_unpickle_on_the_pilot_raise_an_error(shared):
    with pytest.raises(RuntimeError, match="only at home") as caught:
        stoker.app()(_take)(Raises(RuntimeError("only at home"))).result(60)
    pilot = shared.status().pilots[0].pilot
    assert caught.value.__notes__[0] == f"while the arguments of _take were unpickled on {pilot}"


class Own(Exception):
    """An exception class of the test program."""


@pytest.mark.parametrize("error", [Own("mine"), SystemExit(3)])
@pytest.mark.parametrize("where", ["function", "arguments"])
def test_exception_during_unpickling_is_reported_as_a_user_error(shared, error, where):
    bad = Raises(error)

    def holds(value):
        return value, bad

    call = stoker.app()(holds)(1) if where == "function" else stoker.app()(_take)(bad)
    kind = errors.RemoteCallError if isinstance(error, SystemExit) else type(error)
    with pytest.raises(kind) as caught:
        call.result(60)
    assert str(error) in str(caught.value)
    name = "holds was" if where == "function" else "_take were"
    assert f"{name} unpickled on" in str(caught.value.__cause__) + "".join(getattr(caught.value, "__notes__", ()))
    number = re.search(r"c-\d+", f"{caught.value} {getattr(caught.value, '__notes__', '')}")
    folder, story, _ = find_story_of_subject(shared.id, number[0])
    found = explain.diagnose_story_failure(folder, story)
    assert (found.kind, found.component) == (FaultKind.USER, "code"), found


@pytest.mark.parametrize(
    "error", [ImportError("libblas.so.3: cannot open"), ModuleNotFoundError("No module named 'x'")]
)
def test_package_missing_on_the_pilot_raises_serialization_error(shared, error):
    with pytest.raises(errors.SerializationError, match="must be installed there") as caught:
        stoker.app()(_take)(Raises(error)).result(60)
    assert f"{type(error).__name__}: {error}" in str(caught.value)


def test_returned_generator_becomes_a_list(shared):
    assert stoker.app()(returns)("generator").result(60) == [0, 1, 2]


@pytest.mark.parametrize(
    ("kind", "said"),
    [("lock", "lock"), ("refuses", "this one stays here"), ("here", "only at home"), ("leaves", "SystemExit")],
)
def test_unpicklable_results_raise_an_error(shared, kind, said):
    app = stoker.app()(returns)
    with pytest.raises(errors.SerializationError, match=said) as caught:
        app(kind).result(60)
    assert "result" in str(caught.value)
    assert caught.value.call in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "type_", "said"),
    [
        ("odd", Odd, "1 and 2"),
        ("locked", Locked, "locked"),
        ("stuck", errors.RemoteCallError, "Stuck: "),
        ("socket", errors.RemoteCallError, "OSError"),
        ("unshown", errors.RemoteCallError, "no repr today"),
    ],
)
def test_exceptions_that_are_hard_to_pickle_arrive(shared, kind, type_, said):
    app = stoker.app()(raises)
    with pytest.raises(type_) as caught:
        app(kind).result(60)
    assert said in str(caught.value)
    assert "in raises" in str(caught.value.__cause__)


def test_manager_and_pilot_unpickle_nothing(shared, shared_world, tmp_path):
    opened = tmp_path / "opened"

    class Tells:
        def __reduce__(self):
            return _tell, (str(opened),)

    @stoker.app()
    def take(value):
        return os.getpid(), value

    library, _ = take(Tells()).result(60)
    assert {int(line) for line in opened.read_text().split()} <= {library, os.getpid()}


def _tell(path):
    with open(path, "a") as file:
        file.write(f"{os.getpid()}\n")
    return os.getpid()


def named(name):
    def function(number=1):
        return number

    function.__name__ = function.__qualname__ = name
    return function


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"priority": 10**30}, "priority: 1000"),
        ({"gang": (1, 10**30)}, "gang: "),
        ({"features": {"items": "many"}}, "features: items: 'many' is not a whole number"),
        ({"features": {"kind": "\ud800"}}, "features: kind: "),
    ],
    ids=str,
)
def test_error_names_the_call_option_that_cannot_be_sent(shared, asked, said):
    # Parsl passes options in this argument
    app = parsl.python_app(lambda value, parsl_resource_specification={}: value)
    with pytest.raises(errors.ConfigError, match=said):
        app(1, parsl_resource_specification=asked).result(60)
    assert app(2).result(60) == 2


def test_odd_function_names_and_huge_batch_sizes_are_accepted(shared):
    assert stoker.app()(named("a\ud800\nb"))(3).result(60) == 3
    assert list(stoker.map(named("\ud800"), [1, 2], batch_size=10**30)) == [[1, 2]]


@stoker.context()
def says_much(size):
    raise ValueError("much " * size)


def test_very_long_loader_error_does_not_stop_later_calls(shared):
    with pytest.raises(errors.ContextError, match="ValueError: much much") as caught:
        stoker.app(context=says_much(20_000_000))(lambda nothing: nothing)().result(60)
    assert len(str(caught.value)) < 200_000
    assert stoker.app()(lambda: 1)().result(60) == 1


@stoker.context()
def long_list(data):
    return len(data)


def test_too_large_functions_contexts_and_checkpoints_are_refused(shared):
    data = bytes(100_000_000)
    with pytest.raises(errors.SerializationError, match=r"100 MB, and at most .* are sent with a function"):
        stoker.app()(lambda: len(data))().result(60)
    with pytest.raises(errors.SerializationError, match=r"100 MB, and at most .* are sent with a context"):
        stoker.app(context=long_list(data))(lambda length: length)().result(60)

    @stoker.app()
    def report(size):
        stoker.progress(1, 2, state=bytes(size))
        return size

    with pytest.raises(errors.SerializationError, match="checkpoint of 100 MB is larger than"):
        report(100_000_000).result(60)
    assert report(15_000_000).result(60) == 15_000_000
