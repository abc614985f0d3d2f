from __future__ import annotations

import json
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker import log_files
from stoker.contexts import payloads
from stoker.errors import ProtocolError
from stoker.pilot.agent.scratch import Scratch, base_folder, remove_folders_of_dead_pilots
from stoker.pilot.library import connection
from stoker.pilot.library.connection import FrameReader, pack_frame, pack_frame_body
from stoker.pilot.library.failures import summarize_exception
from stoker.pilot.library.functions import Function, FunctionCache
from stoker.pilot.library.process import ClearableFolder
from stoker.pilot.starter.place import base_folder as base_folder_of_starter
from stoker.pilot.zygote import processes
from stoker.protocol.to_pilot import FunctionBlob


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 1_500_000), max_size=4), st.integers(0, 99))
def test_frames_survive_arbitrary_fragmentation(sizes: list[int], seed: int) -> None:
    chance = random.Random(seed)
    sent = [chance.randbytes(size) for size in sizes]
    stream = b"".join(map(pack_frame_body, sent))
    ours, theirs = socket.socketpair()

    def write() -> None:
        at = 0
        while at < len(stream):  # some fragments end inside a length field
            step = chance.choice([1, 7, 8, 9, 4096]) if chance.random() < 0.3 else 200_000
            theirs.sendall(stream[at : at + step])
            at += step
        theirs.close()

    writer = threading.Thread(target=write)
    writer.start()
    reader, got = FrameReader(ours), []
    while reader.receive_bytes(block=True):
        while (frame := reader.next_frame()) is not None:
            got.append(bytes(frame))
    writer.join()
    ours.close()
    assert got == sent


@pytest.mark.parametrize(
    "stray",
    [b"garbage!", b"x" + pack_frame(["a"]), pack_frame(["a"])[1:] + pack_frame(["a"]), b"\xff" * 8, b"\0" * 8],
    ids=["text", "a byte too many", "a byte too few", "endless", "zeros"],
)
def test_invalid_frames_are_refused_without_allocating_memory(stray: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reader = FrameReader(ours)
        theirs.sendall(pack_frame(["good"]) + stray)
        reader.receive_bytes(block=True)
        first = reader.next_frame()
        assert first is not None
        assert msgspec.msgpack.decode(first) == [0, ["good"]]
        with pytest.raises(ProtocolError, match="do not begin a frame"):
            reader.next_frame()
        assert len(reader._buffer) < 1 << 20


def test_long_frame_allocates_memory_as_it_arrives() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reader = FrameReader(ours)
        theirs.sendall(
            connection._FRAME_HEAD.pack(connection._FRAME_MARK | connection.MOST_FRAME_BYTES - 1) + b"few bytes"
        )
        assert reader.receive_bytes(block=False)
        assert reader.next_frame() is None
        assert sys.getsizeof(reader._buffer) < 2**20


def test_least_recently_used_functions_are_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    def blob(name: str, size: int) -> FunctionBlob:
        return FunctionBlob(key=name, name=name, blob=bytes(size))  # type: ignore[arg-type]

    monkeypatch.setattr("stoker.pilot.library.functions._MOST_FUNCTIONS", 3)
    monkeypatch.setattr("stoker.pilot.library.functions._MOST_FUNCTION_BYTES", 2500)
    functions = FunctionCache()
    assert functions.find_or_add("a", None) is None
    first = functions.find_or_add("a", blob("a", 100))
    for name in "bc":
        functions.find_or_add(name, blob(name, 100))
    assert functions.find_or_add("a", None) is first
    functions.find_or_add("d", blob("d", 1000))
    assert [functions.find_or_add(name, None) is not None for name in "abcd"] == [True, False, True, True]
    functions.find_or_add("large", blob("large", 5000))
    assert [functions.find_or_add(name, None) is not None for name in ("a", "c", "d", "large")] == [
        False,
        False,
        False,
        True,
    ]


@pytest.fixture
def cleared(tmp_path: Path) -> ClearableFolder:
    return ClearableFolder(str(tmp_path / "slot"))


def test_cleared_folder_notices_a_file_within_one_clock_tick(cleared: ClearableFolder) -> None:
    assert not cleared.has_changed()
    for n in range(200):
        Path(cleared.path, f"file-{n}").write_text("x")
        assert cleared.has_changed()
        cleared.clear()
        assert not cleared.has_changed()
        assert os.listdir(cleared.path) == []


def test_cleared_folder_keeps_listed_files_and_removes_other_files(cleared: ClearableFolder, tmp_path: Path) -> None:
    Path(cleared.path, "of the loader").write_text("x")
    cleared.keep_present_entries()
    assert not cleared.has_changed()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    os.symlink(outside, os.path.join(cleared.path, "link"))
    Path(cleared.path, "locked/inner").mkdir(parents=True)
    assert sorted(cleared.names_to_clear()) == ["link", "locked"]
    cleared.clear()
    assert os.listdir(cleared.path) == ["of the loader"]
    assert (outside / "precious").exists()


@pytest.mark.parametrize("harm", ["removed", "replaced", "closed"])
def test_cleared_folder_is_made_again_but_no_other_folder_is_cleared(cleared: ClearableFolder, harm: str) -> None:
    if harm == "closed":
        os.close(cleared._descriptor)
    else:
        shutil.rmtree(cleared.path)
    if harm == "replaced":
        os.mkdir(cleared.path)
    assert cleared.has_changed()
    if harm == "removed":
        cleared.clear()
        assert os.path.isdir(cleared.path)
        assert not cleared.has_changed()
    else:
        with pytest.raises(OSError, match=r"another folder has its name|Bad file descriptor"):
            cleared.clear()


@pytest.mark.parametrize("base", [base_folder, base_folder_of_starter])
def test_scratch_folder_of_another_user_is_left_alone(tmp_path: Path, base: Callable[[str], Path]) -> None:
    mine = f"stoker-{os.getuid()}"
    (tmp_path / "other").mkdir()
    (tmp_path / mine).symlink_to(tmp_path / "other")
    (tmp_path / f"{mine}-2").touch()
    for _ in range(2):
        assert base(str(tmp_path)) == tmp_path / f"{mine}-3"
    (tmp_path / f"{mine}-3").rmdir()
    for number in (3, 4, 5):
        (tmp_path / f"{mine}-{number}").touch()
    with pytest.raises(Exception, match=r"belongs to another user; set \[pilot\] scratch"):
        base(str(tmp_path))


def test_only_scratch_folders_of_dead_pilots_are_removed(tmp_path: Path) -> None:
    base = base_folder(str(tmp_path))
    assert base.stat().st_mode & 0o777 == 0o700
    here = Scratch(base, pilot="here")
    (base / "pilot-dead").mkdir()
    (base / "pilot-dead" / "alive").write_bytes(b"")
    remove_folders_of_dead_pilots(base)
    assert [folder.name for folder in base.glob("pilot-*")] == ["pilot-here"]
    (here.path / "alive").unlink()  # a cleanup job may remove the lock
    (base / "pilot-empty").mkdir()
    (base / "pilot-half" / "lib-1").mkdir(parents=True)
    remove_folders_of_dead_pilots(base)
    assert [folder.name for folder in base.glob("pilot-*")] == ["pilot-here"]
    here.remove()
    assert not list(base.glob("pilot-*"))


def test_log_tail_is_text_even_if_the_log_is_not_utf_8(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"\n".join(b"line %d \xff" % n for n in range(5000)))
    lines = log_files.read_last_lines(str(log), lines=3).splitlines()
    assert [line[:9] for line in lines] == ["line 4997", "line 4998", "line 4999"]
    assert log_files.read_last_lines(str(tmp_path / "nowhere")) == ""


def test_memory_is_measured_exactly_before_a_library_is_blamed() -> None:
    mine = processes.resident_bytes(os.getpid())
    assert mine > 10_000_000
    assert 0 < processes.proportional_bytes(os.getpid()) <= mine
    assert processes.MemoryLimitCheck().bytes_if_over_limit(os.getpid(), mine * 10, now=0.0) == 0
    assert processes.MemoryLimitCheck().bytes_if_over_limit(os.getpid(), 1_000_000, now=0.0) > 1_000_000


PRINTS = """
import os, sys
os.dup2(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
os.dup2(1, 2)
from stoker.pilot.library.call_records import LogTail, ThreadTail
tail = {tail}
tail.begin_call()
print("x" * 100_000)
print("to the other one", file=sys.stderr, flush=True)
said = tail.take_output()
os.write(int(sys.argv[2]), repr(said and (said.start, said.end)).encode())
"""


@pytest.mark.parametrize("tail", ['LogTail("log")', 'ThreadTail("log", "kept", on_log_length=lambda size: None)'])
@pytest.mark.parametrize("disk", ["full", "with room"])
def test_full_disk_for_the_log_loses_output_but_not_the_call(tmp_path: Path, tail: str, disk: str) -> None:
    log = "/dev/full" if disk == "full" else str(tmp_path / "log")
    read, write = os.pipe()
    command = [sys.executable, "-c", PRINTS.format(tail=tail), log, str(write)]
    code = subprocess.run(command, cwd=tmp_path, pass_fds=[write], check=False).returncode
    os.close(write)
    with open(read) as pipe:
        said = pipe.read()
    assert said == ("None" if disk == "full" else "(0, 100018)")
    assert code == 0


class Slow:
    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, ()


def _rebuild() -> Slow:
    time.sleep(0.05)  # the other slots arrive while this slot sleeps
    return Slow()


def test_slots_that_open_a_function_together_share_one_object() -> None:
    together = threading.Barrier(3)
    function = Function(FunctionBlob(key="f", name="f", blob=payloads.dumps((Slow(), False))))  # type: ignore[arg-type]

    def first(_slot: int) -> Any:
        together.wait(20)
        return function.unpickle()[0]

    with ThreadPoolExecutor(3) as slots:
        opened = list(slots.map(first, range(3)))
    assert opened[0] is opened[1] is opened[2]


# ---- short texts of exceptions


def raised_by(code: str) -> BaseException:
    space = {"__name__": "theirs", "json": json}
    try:
        exec(compile(code, "/home/ana/program.py", "exec"), space)
    except BaseException as error:
        return error
    raise AssertionError("it raised nothing")


DEEP = "def f(n):\n    if not n: raise ValueError('x' * 5000)\n    f(n - 1)\nf(30)\n"
UNREADABLE = """
class Odd(Exception):
    def __str__(self): raise RuntimeError('no')
    @property
    def __notes__(self): raise RuntimeError
raise Odd()
"""


def test_exception_type_text_and_user_lines_are_reported() -> None:
    error = raised_by("def inner(row):\n    return row['claim']\n\ndef outer():\n    return inner({})\n\nouter()\n")
    told = summarize_exception(error).splitlines()
    assert told[0] == "KeyError: 'claim'"
    assert told[-2:] == ["at /home/ana/program.py:5 in outer", "at /home/ana/program.py:2 in inner"]


def test_traceback_leaves_out_lines_of_installed_packages() -> None:
    told = summarize_exception(raised_by("json.loads('{')\n")).splitlines()
    assert told[0].startswith("json.decoder.JSONDecodeError: Expecting property name")
    assert [line for line in told if "json/" in line] == []
    assert told[-1] == "at /home/ana/program.py:1 in <module>"


def test_long_text_and_many_frames_are_shortened() -> None:
    told = summarize_exception(raised_by(DEEP)).splitlines()
    assert (len(told[0]), len(told)) == (400, 5)


@pytest.mark.parametrize(
    ("code", "words"),
    [(UNREADABLE, ["Odd"]), ("compile('x = ', 'settings.py', 'exec')", ["SyntaxError", "settings.py"])],
)
def test_error_without_text_or_frames_is_reported(code: str, words: list[str]) -> None:
    told = summarize_exception(raised_by(code))
    assert all(word in told for word in words)
