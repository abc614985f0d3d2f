from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import stoker
from stoker.contexts import causal_lm, folders
from stoker.contexts.folders import ProgramFolder, current_umask, is_visible_here, program_folder


def _folder(path: Path) -> ProgramFolder:
    found = program_folder(path)
    assert found is not None
    return found


def test_recreated_folder_is_not_taken_for_the_original_folder(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    home = _folder(tmp_path / "run")
    assert home.path == str(tmp_path / "run")
    assert is_visible_here(msgspec.msgpack.decode(msgspec.msgpack.encode(home), type=ProgramFolder))
    (tmp_path / "run").rename(tmp_path / "moved")
    assert not is_visible_here(home)
    (tmp_path / "run").mkdir()
    assert not is_visible_here(home)
    assert program_folder(tmp_path / "gone") is None


def test_equal_inode_on_a_local_disk_does_not_identify_the_folder() -> None:
    """Nodes installed from one image have equal inodes on their own disks."""
    for path in ("/dev", "/proc"):
        local = _folder(Path(path))
        assert is_visible_here(local)
        assert not is_visible_here(msgspec.structs.replace(local, boot="another boot"))


def test_equal_inode_on_a_shared_disk_identifies_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device number of a shared disk differs between machines."""
    home = msgspec.structs.replace(_folder(tmp_path), boot="another boot", device=7)
    for kind, seen in (("nfs4", True), ("lustre", True), ("ext4", False), ("tmpfs", False)):
        mount = f"1 2 {os.major(os.stat(tmp_path).st_dev)}:{os.minor(os.stat(tmp_path).st_dev)} / /x rw - {kind} y rw"
        (tmp_path / "mounts").write_text(f"0 2 0:0 / /y rw - proc z rw\n{mount}\n")
        monkeypatch.setattr(folders, "_MOUNT_TABLE", str(tmp_path / "mounts"))
        assert is_visible_here(home) is seen, kind


@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0,
    reason="this user may not make mount namespaces, in which a node has other files under the same path",
)
def test_private_mount_of_a_node_is_not_the_programs_folder(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "node").mkdir()
    (tmp_path / "home").write_bytes(msgspec.msgpack.encode(_folder(tmp_path / "run")))
    look = (
        "import msgspec, sys\nfrom stoker.contexts.folders import *\n"
        "print(is_visible_here(msgspec.msgpack.decode(open(sys.argv[1], 'rb').read(), type=ProgramFolder)))"
    )
    for mount, seen in (("true", "True"), (f"mount --bind {tmp_path}/node {tmp_path}/run", "False")):
        script = f'{mount} && exec "$@"'
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", script, "sh", sys.executable, "-c", look, str(tmp_path / "home")],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout.strip() == seen, done.stderr


def test_reading_the_umask_does_not_change_the_umask() -> None:
    before = os.umask(0o027)
    try:
        assert current_umask() == 0o027
        assert _folder(Path(".")).umask == 0o027
    finally:
        os.umask(before)


def _load() -> str:
    with open("model.txt") as file:
        return file.read()


def test_user_loader_makes_a_separate_context_in_each_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader may read files by relative names. A built-in context is the same in every folder."""
    made = {}
    for name in "ab":
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        made[name] = stoker.context(_load)(), causal_lm("somebody/a-model")
        assert stoker.context(_load)().key == made[name][0].key
    own, other = made["a"][0], made["b"][0]
    assert own.key != other.key
    assert made["a"][1].key == made["b"][1].key
    assert own.home is not None
    assert own.home.path == str(tmp_path / "a")
