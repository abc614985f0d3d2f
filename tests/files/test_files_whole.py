from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stoker.contexts.objects import PublishedObjects, publish_objects
from stoker.contexts.recipe import ObjectRef
from stoker.whole_files import append_or_truncate, draft_file, write_whole


@contextmanager
def full_after(size: int) -> Iterator[None]:
    """Limit file sizes like a nearly full disk: one write is truncated and the next write fails."""
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("sync", [False, True])
def test_written_file_replaces_the_old_file_and_is_private(tmp_path: Path, sync: bool) -> None:
    path = tmp_path / ("n" * 250 + ".json")  # a name has at most 255 bytes
    write_whole(path, b"before", sync=sync)
    write_whole(path, b"after", sync=sync)
    assert path.read_bytes() == b"after"
    assert path.stat().st_mode & 0o777 == 0o600
    assert names(tmp_path) == [path.name]


def test_full_disk_keeps_the_old_file_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    write_whole(path, b"before")
    with full_after(100), pytest.raises(OSError, match="too large"):
        write_whole(path, b"x" * 101)
    assert path.read_bytes() == b"before"
    assert names(tmp_path) == ["facts.json"]


def test_temporary_file_keeps_the_suffix_and_is_removed_on_interrupt(tmp_path: Path) -> None:
    path = tmp_path / "plot.svg"
    path.write_text("before")

    def interrupted() -> None:
        with draft_file(path) as draft:
            assert draft.suffix == ".svg"
            assert draft.name.startswith(".")
            draft.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "before"
    assert names(tmp_path) == ["plot.svg"]


def test_concurrent_writers_of_one_file_do_not_conflict(tmp_path: Path) -> None:
    path = tmp_path / "facts"
    with draft_file(path) as one, draft_file(path) as other:
        one.write_text("one")
        other.write_text("other")
    assert path.read_text() == "one"
    assert names(tmp_path) == ["facts"]


def test_killed_writer_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "facts"
    path.write_text("before")
    program = (
        "import os, pathlib, sys\n"
        "from stoker.whole_files import draft_file\n"
        "with draft_file(pathlib.Path(sys.argv[1])) as draft:\n"
        "    draft.write_text('half')\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)])
    assert done.returncode == -signal.SIGKILL
    assert path.read_text() == "before"
    assert len(names(tmp_path)) == 2, "the test must kill the writer during its work"
    write_whole(path, b"after")
    assert path.read_text() == "after"


def test_line_that_does_not_fit_on_the_disk_is_not_appended(tmp_path: Path) -> None:
    path = tmp_path / "log"
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        append_or_truncate(file, b"one\n", at=0)
        with full_after(6), pytest.raises(OSError, match="too large"):
            append_or_truncate(file, b"two\n", at=4)
        assert path.read_bytes() == b"one\n"
        append_or_truncate(file, b"two\n", at=4)
        assert path.read_bytes() == b"one\ntwo\n"
    finally:
        os.close(file)


def test_objects_are_published_after_a_write_failed_on_a_full_disk(tmp_path: Path) -> None:
    first, second, third = (ObjectRef(name=f"object-{n}", size_bytes=1, source=f"/somewhere/{n}") for n in range(3))
    publish_objects(tmp_path, (first,))
    size = (tmp_path / "index.jsonl").stat().st_size
    with full_after(size + 10), pytest.raises(OSError, match="too large"):
        publish_objects(tmp_path, (second,))
    published = PublishedObjects(tmp_path)
    assert published.find(second.name) is None
    publish_objects(tmp_path, (third,))
    assert published.find(third.name) == third
    publish_objects(tmp_path, (second,))
    assert [published.find(each.name) for each in (first, second)] == [first, second]
