from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from stoker.pilot.starter.place import Environments, StartError, base_folder, make_virtual_environment

FILES = {"lib/a.py": "a = 1\n", "lib/b/c.py": "c = 3\n", "bin/run": "run"}


def make_archive(path: Path) -> None:
    source = path.with_name("source")
    for name, text in FILES.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    with tarfile.open(path, "w:gz") as tar:
        for name in FILES:
            tar.add(source / name, name)


@pytest.fixture
def enter(tmp_path: Path) -> Callable[..., Path]:
    archive = tmp_path / "some.tar.gz"
    make_archive(archive)

    def go(name: str = "one", *, keep_bytes: int = 10**9, room_bytes: int = 100) -> Path:
        def get(target: Path) -> None:
            with (tmp_path / "gets").open("a") as log:
                log.write(f"{name}\n")
            target.write_bytes(archive.read_bytes())

        home = Environments(tmp_path, max_bytes=keep_bytes)
        return home.prepare_and_lock(
            name, needed_bytes=room_bytes, get_archive=get, make_usable=lambda folder: (folder / "ready").touch()
        )

    return go


def gets(folder: Path) -> list[str]:
    return (folder / "gets").read_text().split()


def close_locks(folder: Path) -> None:
    for number in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{number}").startswith(str(folder / "environments")):
                os.close(int(number))
        except OSError:
            continue


def test_unfinished_unpacking_of_a_killed_starter_is_completed(enter: Callable[..., Path], tmp_path: Path):
    draft = tmp_path / "environments" / "one.draft"
    (draft / "lib").mkdir(parents=True)
    (draft / "lib" / "half").write_text("half a fi")
    folder = enter()
    assert not (folder / "lib" / "half").exists()
    assert not draft.exists()
    close_locks(tmp_path)
    folder.with_name("one.files").unlink()  # the copy is incomplete without the list of files, which is written last
    (folder / "lib" / "a.py").write_text("a")
    (folder / "bin" / "run").unlink()
    assert {name: (enter() / name).read_text() for name in FILES} == FILES
    assert gets(tmp_path) == ["one", "one"]


def test_incomplete_interpreter_is_completed(tmp_path: Path):
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    source, folder = tmp_path / "source", tmp_path / "folder"
    (source / "base" / "bin").mkdir(parents=True)
    (source / "base" / "lib").mkdir()
    (source / "base" / "bin" / f"python{version}").symlink_to(sys.executable)
    for name in ("one", "two", "three"):
        (source / "base" / "lib" / f"{name}.py").write_text(name * 100)
    with tarfile.open(tmp_path / "base.tar.gz", "w:gz") as tar:
        for path in sorted(source.rglob("*")):
            if not path.is_dir():
                tar.add(path, path.relative_to(source))
    (folder / "base" / "lib").mkdir(parents=True)
    (folder / "base" / "lib" / "one.py").write_text("one" * 100)
    (folder / "base" / "lib" / "two.py").write_text("tw")
    make_virtual_environment(folder, version=version, named="", base=tmp_path / "base.tar.gz")
    for name in ("one", "two", "three"):
        assert (folder / "base" / "lib" / f"{name}.py").read_text() == name * 100
    assert (folder / "bin" / "python").resolve() == Path(sys.executable).resolve()


def test_environment_unused_for_long_is_removed(enter: Callable[..., Path], tmp_path: Path):
    old, used = enter("old"), enter("used")
    close_locks(tmp_path)
    held = os.open(tmp_path / "environments" / "used.used", os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_SH)
    for name in ("old", "used"):
        os.utime(tmp_path / "environments" / f"{name}.used", (1e9, 1e9))
    assert enter("new").is_dir()
    assert used.is_dir(), "a process uses the environment"
    assert not old.exists()
    assert not (tmp_path / "environments" / "old.tar.gz").exists()
    os.close(held)


def test_several_starters_at_once_unpack_one_environment(tmp_path: Path):
    make_archive(tmp_path / "some.tar.gz")
    code = (
        "import shutil, sys, time; from pathlib import Path; from stoker.pilot.starter.place import Environments\n"
        "def get(target):\n"
        "    Path(sys.argv[1], 'gets').open('a').write('one ')\n"
        "    time.sleep(0.3)\n"
        "    shutil.copy(Path(sys.argv[1], 'some.tar.gz'), target)\n"
        "environments = Environments(Path(sys.argv[1]))\n"
        "place = environments.prepare_and_lock('one', needed_bytes=1, get_archive=get, make_usable=lambda _: None)\n"
        "print((place / 'lib' / 'b' / 'c.py').read_text())"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=60)[0].strip() for process in started]
    assert said == ["c = 3"] * 2
    assert gets(tmp_path) == ["one"]


def test_deleted_files_are_restored_and_other_files_stay(enter: Callable[..., Path], tmp_path: Path):
    folder = enter()
    assert enter() == folder
    assert (folder / "ready").exists()
    assert gets(tmp_path) == ["one"], "the environment is unpacked once"
    (folder / "lib" / "b" / "c.py").unlink()
    (folder / "lib" / "a.py").write_text("used by somebody\n")
    assert enter() == folder
    assert (folder / "lib" / "b" / "c.py").read_text() == "c = 3\n"
    assert (folder / "lib" / "a.py").read_text() == "used by somebody\n"
    assert gets(tmp_path) == ["one", "one"]


def test_unused_environments_are_removed_for_space(enter: Callable[..., Path], tmp_path: Path):
    old, newer = enter("old"), enter("newer")
    close_locks(tmp_path)
    kept = enter("kept", keep_bytes=120)
    assert not old.exists()
    assert newer.exists()
    enter("last", keep_bytes=101)
    assert not newer.exists()
    assert kept.exists()  # this environment is in use


def test_missing_space_is_reported_with_numbers(enter: Callable[..., Path], tmp_path: Path):
    with pytest.raises(StartError, match=r"needs 1000000\.0 GB in .*environments.* are free; set \[pilot\] scratch"):
        enter(room_bytes=10**15)
    assert not (tmp_path / "gets").exists()


@pytest.mark.parametrize("name", ["../out", "/tmp/out", "lib/../../out"])
def test_archives_with_paths_outside_their_folder_are_refused(tmp_path: Path, name: str):
    def get(target: Path) -> None:
        with tarfile.open(target, "w:gz") as tar:
            tar.addfile(tarfile.TarInfo(name))

    with pytest.raises(StartError, match="is damaged"):
        Environments(tmp_path).prepare_and_lock(
            "bad", needed_bytes=1, get_archive=get, make_usable=lambda _folder: None
        )


def test_scratch_folder_expands_a_variable_and_contains_the_user_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FAST_DISK", str(tmp_path / "fast"))
    monkeypatch.delenv("NO_DISK", raising=False)
    assert base_folder("$FAST_DISK") == tmp_path / "fast" / f"stoker-{os.getuid()}"
    with pytest.raises(StartError, match="scratch is \\$NO_DISK, a variable"):
        base_folder("$NO_DISK")
