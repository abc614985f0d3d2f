"""Calls run in the folder of the program if the pilot sees it, else in a private folder. The private folder is cleared
after each call.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_manager import FakeManager, recipe

from stoker.contexts import scratch
from stoker.contexts.folders import ProgramFolder, program_folder
from stoker.pilot.core.turns import CallQueue
from stoker.pilot.library.functions import CallCompatibility, Function, RunnableCall
from stoker.pilot.library.process import DAMAGE_CHECK_S, ClearableFolder
from stoker.protocol.calls import CallOptions, CallSpec, LeftoverFiles
from stoker.protocol.to_library import Run
from stoker.protocol.to_pilot import FunctionBlob


def home_of(path: Path, *, umask: int = 0o022) -> ProgramFolder:
    path.mkdir(exist_ok=True)
    found = program_folder(path)
    assert found is not None
    return msgspec.structs.replace(found, umask=umask)


def at(path: Path, **more: Any) -> CallOptions:
    return CallOptions(home=home_of(path, **more))


def unseen(path: Path) -> CallOptions:
    """Return options for a pilot on another machine, where this path is a different folder."""
    home = home_of(path)
    return CallOptions(home=msgspec.structs.replace(home, inode=home.inode + 1))


def write(name: str, text: str = "x") -> str:
    Path(name).write_text(text)
    return os.getcwd()


def test_calls_of_two_programs_run_in_their_own_folders(served: FakeManager, tmp_path: Path) -> None:
    served.ready(recipe())
    one, other = at(tmp_path / "one"), at(tmp_path / "other")
    for turn in range(3):
        for options, place in ((one, "one"), (other, "other")):
            assert served.results(served.run(write, [(f"{turn}",)], options=options)) == [str(tmp_path / place)]
    assert sorted(os.listdir(tmp_path / "one")) == sorted(os.listdir(tmp_path / "other")) == ["0", "1", "2"]
    shutil.rmtree(tmp_path / "one")
    [where] = served.results(served.run(os.getcwd, [()], options=one))
    assert where.startswith(str(served.base / "scratch")), "a removed folder is no longer visible"
    assert all(end.left is None for end in served.ends().values())


def test_slots_serve_programs_in_two_folders_at_once(served: FakeManager, tmp_path: Path) -> None:
    def meet(name: str, place: str) -> tuple[str, str, str]:
        Path(place, name).touch()
        end = time.monotonic() + 60
        while len(os.listdir(place)) < 4 and time.monotonic() < end:
            time.sleep(0.01)
        Path(f"of-{name}").write_text("x")
        return os.getcwd(), oct(os.stat(f"of-{name}").st_mode & 0o777), str(len(os.listdir(place)))

    (place := tmp_path / "place").mkdir()
    served.ready(recipe(slots=4))
    one, other = at(tmp_path / "one", umask=0o002), at(tmp_path / "other", umask=0o027)
    calls = served.run(meet, [("a", str(place)), ("b", str(place))], options=one)
    calls += served.run(meet, [("c", str(place)), ("d", str(place))], options=other)
    first, second = (str(tmp_path / "one"), "0o664", "4"), (str(tmp_path / "other"), "0o640", "4")
    assert served.results(calls) == [first, first, second, second]


def test_loader_and_calls_have_the_folder_and_umask_of_the_program(served: FakeManager, tmp_path: Path) -> None:
    def modes(found: list[str]) -> list[str]:
        import subprocess

        write("file")
        os.mkdir("folder")
        subprocess.run(["sh", "-c", "echo x > child"], check=True)
        return [*found, *(oct(os.stat(name).st_mode & 0o777) for name in ("file", "folder", "child"))]

    def load() -> list[str]:
        write("loaded")
        return [Path("model.txt").read_text(), oct(os.stat("loaded").st_mode & 0o777)]

    made = msgspec.structs.replace(recipe(load), home=home_of(tmp_path / "run", umask=0o002))
    (tmp_path / "run" / "model.txt").write_text("weights")
    served.ready(made)
    calls = served.run(modes, [()], options=at(tmp_path / "run", umask=0o007), takes_context=True)
    assert served.results(calls) == [["weights", "0o664", "0o660", "0o770", "0o660"]]
    seen = []
    for place, folders, _ in os.walk(served.base / "scratch"):
        for name in fnmatch.filter(folders, "lib-*"):
            with contextlib.suppress(FileNotFoundError):  # a library of an earlier test may end now
                seen.append(os.stat(os.path.join(place, name)).st_mode & 0o077)
    assert seen
    assert not any(seen)


@pytest.mark.parametrize("slots", [1, 2])
def test_temporary_files_are_private_to_a_call_and_then_deleted(
    served: FakeManager, tmp_path: Path, slots: int
) -> None:
    def leave() -> tuple[list[str], bool]:
        found = os.listdir(scratch())
        (scratch() / "mine").write_text("x")
        is_own = str(scratch()).startswith(str(base))
        if slots == 1:
            tempfile.mkdtemp()
            os.close(tempfile.mkstemp()[0])
            is_own &= tempfile.gettempdir() == os.environ["TMPDIR"]
            is_own &= os.path.realpath(tempfile.gettempdir()).startswith(str(base))
        return found, is_own

    base = served.base / "scratch"
    served.ready(recipe(slots=slots))
    assert served.results(served.run(leave, [()] * 6, options=at(tmp_path / "run"))) == [([], True)] * 6
    assert os.listdir(tmp_path / "run") == []


def test_manager_of_multiprocessing_works_in_two_calls(served: FakeManager, tmp_path: Path) -> None:
    """multiprocessing remembers its temporary folder, which is cleared after the first call."""

    def shares() -> int:
        import multiprocessing

        with multiprocessing.get_context("fork").Manager() as manager:
            shared = manager.list([1, 2])
            return len(shared)

    served.ready(recipe())
    assert served.results(served.run(shares, [(), ()], options=at(tmp_path / "run"))) == [2, 2]


def test_sockets_of_multiprocessing_work_in_calls_of_slots(served: FakeManager, tmp_path: Path) -> None:
    def listens() -> bool:
        from multiprocessing.connection import Listener

        time.sleep(2 * DAMAGE_CHECK_S)
        with Listener(family="AF_UNIX"):
            return True

    served.ready(recipe(slots=2))
    assert served.results(served.run(listens, [()] * 3, options=at(tmp_path / "run"))) == [True] * 3


def test_exception_whose_attribute_raises_does_not_end_the_library(served: FakeManager, tmp_path: Path) -> None:
    def fails() -> None:
        class Odd(FileNotFoundError):
            @property
            def filename(self) -> str:  # type: ignore[override]
                raise KeyError("filename")

        raise Odd(2, "no such file", "claims.csv")

    served.ready(recipe())
    [error] = served.results(served.run(fails, [()], options=unseen(tmp_path / "run")))
    assert type(error).__name__ == "Odd"
    assert served.results(served.run(os.getpid, [()])) != [None]


def test_lost_files_are_named_if_the_folder_is_not_shared(served: FakeManager, tmp_path: Path) -> None:
    def fails() -> None:
        for n in range(9):
            write(f"part-{n}")
        raise ValueError("not today")

    served.ready(recipe())
    options = unseen(tmp_path / "run")
    calls = served.run(write, [(name,) for name in ("result.txt", "other.txt")], options=options)
    where = served.results(calls)
    assert all(place.startswith(str(served.base / "scratch")) for place in where)
    assert os.listdir(tmp_path / "run") == []
    assert [served.ends()[call].left for call in calls] == [
        LeftoverFiles("write", (name,), 1, str(tmp_path / "run")) for name in ("result.txt", "other.txt")
    ]
    quiet, failed = served.run(os.getcwd, [()], options=options) + served.run(fails, [()], options=options)
    served.results([quiet, failed])
    assert served.ends()[quiet].left is None
    left = served.ends()[failed].left
    assert (left.names, left.count) == (tuple(f"part-{n}" for n in range(5)), 9)


def test_error_for_a_missing_relative_file_says_how_to_send_the_file(served: FakeManager, tmp_path: Path) -> None:
    def read() -> str:
        return Path("model.pkl").read_text()

    served.ready(recipe())
    here, there = (
        served.results(served.run(read, [()], options=options))[0]
        for options in (at(tmp_path / "run"), unseen(tmp_path / "run"))
    )
    assert (type(here), type(there)) == (FileNotFoundError, FileNotFoundError)
    assert not getattr(here, "__notes__", [])
    (note,) = there.__notes__
    assert '@context(files=("model.pkl",))' in note
    assert str(tmp_path / "run") in note


def test_library_that_cannot_clear_its_scratch_ends_after_the_call(served: FakeManager, tmp_path: Path) -> None:
    def spoils() -> str:
        place = scratch()
        (place / "left").write_text("x")
        shutil.rmtree(place.parent)
        place.parent.write_text("a file where its folder was")
        return "hours of work"

    served.ready(recipe())
    (call,) = served.run(spoils, [()], options=at(tmp_path / "run"))
    assert served.results([call]) == ["hours of work"]
    served.gone()
    assert "could not be removed" in served.logs()


def test_two_programs_run_in_turn_if_threads_share_a_folder(tmp_path: Path) -> None:
    function = Function(FunctionBlob("f", "f", b"x"))  # type: ignore[arg-type]

    def work(call: int, options: CallOptions) -> RunnableCall:
        spec = CallSpec(call, b"")  # type: ignore[arg-type]
        return RunnableCall(spec, Run("f", [spec], options), function)  # type: ignore[arg-type]

    one, other = at(tmp_path / "one"), at(tmp_path / "other")
    queue: CallQueue[RunnableCall] = CallQueue()
    for call, options in enumerate((one, one, other, unseen(tmp_path / "own"), unseen(tmp_path / "own"))):
        queue.add(call, work(call, options))  # type: ignore[arg-type]
    turns = CallCompatibility()
    turns.has_shared_folder = True
    assert [taken.spec.call if (taken := turns.take_next_call(queue, slot)) else None for slot in range(3)] == [
        0,
        1,
        None,
    ]
    turns.record_call_end(0)
    assert turns.take_next_call(queue, 0) is None
    turns.record_call_end(1)
    for call in (2, 3, 4):  # all calls of this test use one private folder
        taken = turns.take_next_call(queue, 0)
        assert taken.spec.call == call
        assert turns.take_next_call(queue, 1) is None
        turns.record_call_end(0)


def test_process_state_changed_by_a_call_is_restored_afterwards(served: FakeManager, tmp_path: Path) -> None:
    def changes(n: int) -> tuple[Any, ...]:
        mask = os.umask(0o777)
        found = os.environ.get("LEFT"), os.getcwd(), mask, os.fstat(0).st_rdev, type(os.environ).__name__
        os.environ["LEFT"] = "1"
        os.chdir("/")
        os.close(n % 3)
        if n % 2:
            os.environ = {}  # type: ignore[assignment]  # noqa: B003
        return found

    served.ready(recipe())
    wanted = (None, str(tmp_path / "run"), 0o022, os.stat(os.devnull).st_rdev, "_Environ")
    assert served.results(served.run(changes, [(n,) for n in range(60)], options=at(tmp_path / "run"))) == [wanted] * 60


def test_temporary_folder_has_a_short_path_for_sockets(tmp_path: Path) -> None:
    place = tmp_path / ("deep" * 20) / "tmp"
    place.parent.mkdir(parents=True)
    short = ClearableFolder(str(place)).short_path
    assert len(short) < 40
    script = "import socket, sys; socket.socket(socket.AF_UNIX).bind(sys.argv[1] + '/' + 'x' * 60)"
    subprocess.run([sys.executable, "-c", script, short], check=True)
    assert os.listdir(place) == ["x" * 60]
    near = f"/tmp/{tmp_path.name[:20]}-{os.getpid()}"
    assert ClearableFolder(near).short_path == near
    shutil.rmtree(near)
