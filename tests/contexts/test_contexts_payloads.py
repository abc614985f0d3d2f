from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import functools
import json
import math
import pickle
import re
import signal
import subprocess
import sys
import textwrap
import threading
import types
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.contexts import payloads
from stoker.contexts.factory import recipe_of
from stoker.errors import RecipeError, SerializationError

numbers = st.integers() | st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False)
atoms = st.none() | st.booleans() | numbers | st.text() | st.binary()
values = st.recursive(
    atoms,
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner) | st.sets(st.integers())
    ),
    max_leaves=30,
)


@given(values)
def test_values_survive_a_round_trip(value: Any) -> None:
    for data in (payloads.dumps(value), b"".join(payloads.dump_parts(value))):
        back = payloads.loads(data)
        assert back == value
        assert type(back) is type(value)


def test_plain_values_use_plain_pickle() -> None:
    data = payloads.dumps(((1, "a", [2.0, None]), {"k": (b"x", {"deep": True})}))
    assert data == pickle.dumps(((1, "a", [2.0, None]), {"k": (b"x", {"deep": True})}), 5)


class Text(str):
    def __repr__(self) -> str:
        return f"Text({str.__repr__(self)})"


@pytest.mark.parametrize("value", [Text("x"), [Text("x")], {"k": Text("x")}, {Text("k"): 1}, (1, (2, Text("x")))])
def test_subclasses_of_plain_types_keep_their_class(value: Any) -> None:
    back = payloads.loads(payloads.dumps(value))
    assert back == value
    assert repr(back) == repr(value)


def test_large_arrays_are_stored_outside_the_pickle() -> None:
    array = numpy.arange(200_000, dtype=numpy.float64).reshape(400, 500)
    parts = payloads.dump_parts(((array,), {}))
    assert any(isinstance(part, memoryview) and part.nbytes == array.nbytes for part in parts)
    assert sum(len(bytes(part)) for part in parts if not isinstance(part, memoryview)) < 2_000
    big = next(part for part in parts if len(part) == array.nbytes)
    assert numpy.shares_memory(numpy.frombuffer(big, dtype=numpy.uint8), array)


def test_arrays_are_restored_writable_and_separate() -> None:
    array = numpy.arange(50_000)
    data = payloads.dumps([array, array[::2], numpy.asfortranarray(array.reshape(500, 100))])
    one, strided, fortran = payloads.loads(data)
    assert (one == array).all()
    assert (strided == array[::2]).all()
    assert (fortran == array.reshape(500, 100)).all()
    assert fortran.flags.f_contiguous
    one[0] = 99  # the array is a copy: a view of read-only bytes would raise here
    assert array[0] == 0
    assert payloads.loads(data)[0][0] == 0


def test_loaded_array_is_a_view_only_of_writable_memory() -> None:
    data = bytearray(payloads.dumps([numpy.zeros(50_000)]))
    assert numpy.shares_memory(payloads.loads(data)[0], numpy.frombuffer(data, dtype=numpy.uint8))
    array = numpy.zeros(50_000)
    array.flags.writeable = False
    assert not payloads.loads(payloads.dumps([array]))[0].flags.writeable


def test_loaded_arrays_are_aligned_to_64_bytes() -> None:
    data = bytearray(64 + len(payloads.dumps([numpy.zeros(50_000), numpy.ones(50_001)])))
    shift = -numpy.frombuffer(data, dtype=numpy.uint8).ctypes.data % 64
    made = payloads.dumps([numpy.zeros(50_000), numpy.ones(50_001)])
    data[shift : shift + len(made)] = made
    for array in payloads.loads(memoryview(data)[shift : shift + len(made)]):
        assert array.ctypes.data % 64 == 0


def test_truncated_and_invalid_bytes_are_an_error() -> None:
    whole = payloads.dumps([numpy.zeros(50_000)])
    for data in (*(whole[:cut] for cut in (1, 5, 20, 70, -1)), b"", b"xyz", b"B"):
        with pytest.raises(SerializationError):
            payloads.loads(data)


class Holder:
    def __init__(self) -> None:
        self.lock = threading.Lock()


def using(lock: Any) -> Any:
    return lambda: lock.acquire()


@pytest.mark.parametrize(
    ("value", "what", "says"),
    [
        (((1, {"model": [Holder()]}), {}), "argument", r"argument 1, \['model'\]\[0\]\.lock.*_thread\.lock"),
        (((), {"door": threading.Lock()}), "argument", "argument 'door'"),
        (using(threading.Lock()), "function", "'lock' that it closes over"),
        ((n for n in range(3)), "result", "the result can't be sent back.*generator"),
    ],
)
def test_error_names_the_part_that_cannot_be_pickled(value: Any, what: str, says: str) -> None:
    with pytest.raises(SerializationError, match=says) as caught:
        payloads.dumps(value, what=what)
    assert caught.value.what == what


def test_too_deep_nesting_raises_an_error() -> None:
    value: Any = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(SerializationError):
        payloads.dumps(value)


def test_installed_code_is_sent_by_name() -> None:
    assert len(payloads.dumps(textwrap.dedent)) < 100
    assert len(payloads.dumps(math.floor)) < 100
    assert len(payloads.dumps(SerializationError)) < 100


@dataclasses.dataclass
class Wrapped:
    part: Any


FUTURE: concurrent.futures.Future[int] = concurrent.futures.Future()


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ([1, 2, 3, FUTURE], r"\[3\]"),
        ({FUTURE}, r"\[0\]"),
        ({"k": [Wrapped((FUTURE,))]}, r"\['k'\]\[0\]\.part\[0\]"),
    ],
)
def test_future_inside_a_value_is_named_in_the_error(value: Any, place: str) -> None:
    for arguments, name in ((((1, value), {}), "1"), (((), {"xs": value}), "'xs'")):
        with pytest.raises(SerializationError, match=rf"^argument {name}, {place} is a future, and only.*\.result\(\)"):
            payloads.dumps(arguments)
    with pytest.raises(SerializationError, match=rf"^the result holds a future at {place}, which can't leave"):
        payloads.dumps(value, what="result")
    with pytest.raises(RecipeError, match=r"is a future, which can't leave the program"):
        recipe_of(lambda _: None, [value])


def test_future_as_a_value_is_named_in_the_error() -> None:
    def uses() -> Any:
        return FUTURE

    with pytest.raises(SerializationError, match=r"^the result is a future, which can't leave the library"):
        payloads.dumps(FUTURE, what="result")
    with pytest.raises(SerializationError, match=r"global 'FUTURE' that it uses is a future, which can't leave"):
        payloads.dumps((uses, False, None), what="function")
    loop = asyncio.new_event_loop()
    try:
        with pytest.raises(SerializationError, match=r"^argument 0 is a future of asyncio.*when awaited"):
            payloads.dumps(((loop.create_future(),), {}))
    finally:
        loop.close()


class HandlerError(BaseException):
    pass


class SendsASignal:
    def __reduce__(self) -> tuple[Any, ...]:
        return signal.raise_signal, (signal.SIGTERM,)


class Exits:
    def __reduce__(self) -> tuple[Any, ...]:
        return sys.exit, (3,)


def raise_from_handler(error: BaseException, number: int, frame: object) -> None:
    raise error


def raise_exit(number: int, frame: object) -> None:
    raise SystemExit(1)


@pytest.mark.parametrize(
    "handler",
    [
        raise_exit,
        functools.partial(raise_from_handler, HandlerError()),
        functools.partial(raise_from_handler, OSError()),
    ],
)
def test_error_of_a_signal_handler_is_not_an_unpickling_error(handler: Any) -> None:
    data = payloads.dumps(SendsASignal())
    before = signal.signal(signal.SIGTERM, handler)
    try:
        with pytest.raises((SystemExit, HandlerError, OSError)) as caught:
            payloads.loads(data)
        assert payloads.is_interrupt(caught.value)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_system_exit_raised_by_a_pickle_is_not_an_interrupt() -> None:
    with pytest.raises(SystemExit) as caught:
        payloads.loads(payloads.dumps(Exits()))
    assert not payloads.is_interrupt(caught.value)


IMPORTED = "import json, kinds_of_objects as kinds; print(json.dumps(kinds.outcomes(vars(kinds))))"


def test_module_that_cannot_be_pickled_is_named_with_advice():
    held = types.ModuleType("held")
    held.lock = threading.Lock()
    function = types.FunctionType(compile("held", "here", "eval"), {"held": held})
    with pytest.raises(SerializationError, match=r"global 'held' .*the module held can't .*Import it in the body of"):
        payloads.dumps_code((function, (), {}), what="recipe")


@pytest.mark.parametrize("in_a_script", [True, False])
def test_every_kind_of_object_is_sent_or_refused(in_a_script: bool) -> None:
    """Objects of a script may be refused; all objects of a module next to the script are accepted."""
    folder = Path(__file__).parent
    command = ["kinds_of_objects.py"] if in_a_script else ["-c", IMPORTED]
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    text = (folder / "kinds_of_objects.py").read_text()
    names = set(re.findall(r"^(?:def )?((?:use|make|refuse)_\w+)\b", text, re.MULTILINE))
    assert names <= found.keys()
    refused = {name for name in found if in_a_script and name.startswith("refuse")}
    said = "the function can't be sent to a library at global"
    assert {name: found[name] for name in refused if said not in found[name]} == {}
    assert {name: found[name] for name in found.keys() - refused if found[name] != "ok"} == {}
