from __future__ import annotations

import bz2
import functools
import gzip
import io
import logging
import mmap
import os
import socket
import sys
import tarfile
import tempfile
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stoker
from stoker.contexts import by_value, payloads
from stoker.errors import RecipeError, SerializationError


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("five!")
    return tmp_path


def _mapped() -> mmap.mmap:
    with open("notes.txt", "r+b") as file:
        return mmap.mmap(file.fileno(), 0)


HANDLES: dict[str, Callable[[], Any]] = {
    **{f"mode {mode}": functools.partial(open, "notes.txt", mode) for mode in ("r", "w+", "rb", "wb", "r+b")},
    "of a descriptor": lambda: os.fdopen(os.dup(2), "w"),
    "temporary text": lambda: tempfile.NamedTemporaryFile("w+", dir="."),  # noqa: SIM115
    "temporary without a name": lambda: tempfile.TemporaryFile("w+"),  # noqa: SIM115
    "spooled": tempfile.SpooledTemporaryFile,
    "temporary folder": lambda: tempfile.TemporaryDirectory(dir="."),
    "gzip": lambda: gzip.open("notes.gz", "w"),  # noqa: SIM115
    "gzip over memory": lambda: gzip.GzipFile(fileobj=io.BytesIO(), mode="w"),
    "bz2": lambda: bz2.open("notes.bz2", "w"),  # noqa: SIM115
    "zip": lambda: zipfile.ZipFile("notes.zip", "w"),
    "tar": lambda: tarfile.open("notes.tar", "w"),  # noqa: SIM115
    "mapped": _mapped,
    "socket": socket.socket,
}


class Holder:
    def __init__(self, log: Any) -> None:
        self.log = log

    def write(self) -> None:
        """A method of an object with an open handle."""


class Slotted:
    __slots__ = ("log",)

    def __init__(self, log: Any) -> None:
        self.log = log


def _using_global(handle: Any) -> Callable[[], Any]:
    module = types.ModuleType("__main__")
    exec("def note():\n    return LOG", vars(module))
    vars(module)["LOG"] = handle
    found: Callable[[], Any] = vars(module)["note"]
    return found


PLACES: dict[str, Callable[[Any], Any]] = {
    "itself": lambda handle: handle,
    "attribute": Holder,
    "slot": Slotted,
    "list in a dict in a tuple": lambda handle: (1, {"log": [handle]}),
    "partial": lambda handle: functools.partial(print, file=handle),
    "method": lambda handle: Holder(handle).write,
    "closure": lambda handle: lambda: handle,
    "global": _using_global,
    "class": lambda handle: type("Keeper", (), {"log": handle, "__module__": "__main__"}),
}


@pytest.mark.parametrize("kind", HANDLES)
def test_open_handle_is_refused_at_any_depth(kind: str) -> None:
    handle = HANDLES[kind]()
    try:
        for place in PLACES.values():
            with pytest.raises(SerializationError):
                payloads.dumps(((place(handle),), {}))
            with pytest.raises(SerializationError):
                payloads.dumps(place(handle), what="result")
    finally:
        getattr(handle, "close", getattr(handle, "cleanup", None))()


@pytest.mark.parametrize(
    ("place", "what"),
    [
        ("itself", "argument 0 is an open file 'notes.txt' (mode 'r+')"),
        ("attribute", "argument 0, .log is an open file 'notes.txt'"),
        ("list in a dict in a tuple", "argument 0, [1]['log'][0] is an open file"),
        ("partial", "argument 0, bound argument file is an open file"),
        ("closure", "argument 0, variable 'handle' that it closes over is an open file"),
        ("global", "argument 0, global 'LOG' that it uses is an open file"),
    ],
)
def test_open_file_error_names_its_place_and_the_remedy(place: str, what: str) -> None:
    with open("notes.txt", "r+") as file, pytest.raises(SerializationError) as refused:
        payloads.dumps(((PLACES[place](file),), {}))
    assert what in str(refused.value)
    assert "Pass its path, and open it in the function." in str(refused.value)
    with open("notes.txt") as file, pytest.raises(SerializationError) as refused:
        payloads.dumps([file], what="result")
    assert str(refused.value) == (
        "the result holds an open file 'notes.txt' (mode 'r') at [0], which can't leave the library. Read it in the"
        " function and return its content, or return its path."
    )
    with open("notes.txt", "w+") as file, pytest.raises(RecipeError):
        stoker.context(lambda: file)()


def test_refused_temporary_file_and_folder_are_kept() -> None:
    with tempfile.NamedTemporaryFile("w+", dir=".") as file, tempfile.TemporaryDirectory(dir=".") as folder:
        for value in (file, [file], Holder(file)):
            with pytest.raises(SerializationError, match=r"temporary file.*\.name"):
                payloads.dumps(((value,), {}))
        with pytest.raises(SerializationError, match="temporary folder"):
            payloads.dumps(((folder and Holder(tempfile.TemporaryDirectory(dir=".")),), {}))
        assert os.path.exists(file.name)
        assert os.path.isdir(folder)


def test_function_of_a_module_with_an_open_file_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the module were pickled by name, the import in the library would truncate the file of the program."""
    (here / "keeps_a_log.py").write_text("LOG = open('log.txt', 'w+')\ndef note():\n    LOG.write('x')\n")
    monkeypatch.syspath_prepend(str(here))
    import keeps_a_log

    try:
        with pytest.raises(SerializationError, match=r"global 'LOG'.*log\.txt"):
            payloads.dumps((keeps_a_log.note, False), what="function")
    finally:
        keeps_a_log.LOG.close()
        sys.modules.pop("keeps_a_log")


def test_streams_and_files_in_memory_can_be_sent() -> None:
    assert payloads.loads(payloads.dumps(sys.stdout)) is sys.stdout
    assert payloads.loads(payloads.dumps([sys.stderr])) == [sys.stderr]
    assert payloads.loads(payloads.dumps(io.StringIO("text"))).read() == "text"
    assert payloads.loads(payloads.dumps(io.BytesIO(b"bytes"))).read() == b"bytes"
    assert payloads.loads(payloads.dumps(PLACES["closure"](sys.stderr)))() is sys.stderr
    assert type(payloads.loads(payloads.dumps(Reopened()))).__name__ == "Reopened"


class Reopened(io.RawIOBase):
    def __reduce__(self) -> tuple[Any, ...]:
        return Reopened, ()


class Workspace:
    def __del__(self) -> None:
        """A finalizer that would remove files."""


def test_object_with_a_finalizer_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    by_value.warn_about_finalizer.cache_clear()
    with caplog.at_level(logging.WARNING, logger="stoker.captured"):
        payloads.dumps([Workspace()])
        payloads.dumps([Workspace()])
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("Workspace has a __del__ method, which also runs when the library deletes its copy")
