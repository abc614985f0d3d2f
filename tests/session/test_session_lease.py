from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
from faults.world import until
from polling import PATIENCE_S
from session.held import hold_lease

from stoker import connections
from stoker.errors import SessionError
from stoker.manager.executor.processes import create_session_folder
from stoker.manager.live import keeper, lease
from stoker.manager.live.journal import Journal
from stoker.manager.live.lease import LeaseHolder
from stoker.manager.main import main as manager_main
from stoker.protocol.session import SessionFolder

ELSEWHERE = LeaseHolder(host="login2", machine="another boot/pid:[1]", pid=7, started=70, token="theirs")
QUICK = {"patience_s": 0.4, "settle_s": 0.05, "renew_s": 0.05}

DEAD = LeaseHolder("here", lease.locks.machine_id(), 2**22 - 1, 1, "a token that is longer than that of others", 7)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "manager.lease"


def write(path: Path, holder: LeaseHolder) -> None:
    draft = path.with_suffix(".draft")
    draft.write_bytes(msgspec.json.encode(holder))
    draft.replace(path)


def insist(path: Path, holder: LeaseHolder) -> None:
    """Write this holder into the lease file, unless the file already names the holder."""
    if lease.read_lease(path) != holder:
        write(path, holder)


def no_room(file: int, data: bytes) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_lease_is_taken_over_when_its_holder_is_killed(path: Path) -> None:
    with hold_lease(path) as other:
        with pytest.raises(SessionError, match=rf"already has a manager \(pid {other.pid} on "):
            lease.take_lease(path, **QUICK)
        other.send_signal(signal.SIGSTOP)  # the stopped holder is alive but does not renew the lease
        time.sleep(0.5)
        with pytest.raises(SessionError, match="already has a manager"):
            lease.take_lease(path, **QUICK)
        other.kill()
        until(lambda: lease.is_holder_alive(lease.read_lease(path)) is False)  # a zombie counts as dead
        mine = lease.take_lease(path, patience_s=600)
    assert not mine.has_remote_predecessor
    assert mine.predecessor is not None
    assert lease.read_lease(path) == mine.holder


def test_lease_holder_with_a_reused_process_id_counts_as_dead(path: Path) -> None:
    mine = lease.take_lease(path)
    write(path, msgspec.structs.replace(mine.holder, started=mine.holder.started - 1, token="before"))
    assert lease.is_holder_alive(mine.holder)
    assert lease.take_lease(path, patience_s=600).holder.pid == os.getpid()


def test_remote_holder_is_replaced_only_after_silence(path: Path) -> None:
    write(path, ELSEWHERE)
    assert lease.is_holder_alive(ELSEWHERE) is None
    began = time.monotonic()
    mine = lease.take_lease(path, **QUICK)
    assert time.monotonic() - began >= QUICK["patience_s"]
    assert mine.has_remote_predecessor
    assert lease.read_lease(path) == mine.holder


def test_remote_holder_that_renews_is_not_replaced(path: Path) -> None:
    write(path, ELSEWHERE)
    stop = threading.Event()

    def renew() -> None:
        counter = 0
        while not stop.wait(0.05):
            counter += 1
            write(path, msgspec.structs.replace(ELSEWHERE, counter=counter))

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(SessionError, match=r"already has a manager .pid 7 on login2"):
            lease.take_lease(path, patience_s=30)
    finally:
        stop.set()
        thread.join()


def test_lease_belongs_to_the_last_of_two_competing_writers(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path, ELSEWHERE)
    third = msgspec.structs.replace(ELSEWHERE, host="login3", token="third")
    settle_s = 7.0

    class Time:
        """A replacement for `time`: while the first manager sleeps, the second manager writes its name."""

        monotonic = staticmethod(time.monotonic)
        clock_gettime, CLOCK_BOOTTIME = staticmethod(time.clock_gettime), time.CLOCK_BOOTTIME

        @staticmethod
        def sleep(seconds: float) -> None:
            if seconds != settle_s:
                time.sleep(seconds)
                return
            assert lease.read_lease(path) not in (ELSEWHERE, third)
            write(path, third)

    monkeypatch.setattr(lease, "time", Time)
    with pytest.raises(SessionError, match="login3"):
        lease.take_lease(path, patience_s=0.2, settle_s=settle_s)
    assert lease.read_lease(path) == third


def test_replaced_holder_notices_and_changes_nothing(path: Path) -> None:
    mine, heard = lease.take_lease(path, **QUICK), []
    mine.start_renewing(heard.append)
    until(lambda: lease.read_lease(path).counter >= 2)
    until(lambda: heard or insist(path, ELSEWHERE))
    assert heard == [ELSEWHERE]
    mine.release()
    assert lease.read_lease(path) == ELSEWHERE


def test_holder_notices_that_its_folder_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "session"
    folder.mkdir()
    mine, heard = lease.take_lease(folder / "manager.lease", **QUICK), []
    mine.start_renewing(heard.append)
    folder.rename(tmp_path / "away")
    until(lambda: heard)
    assert heard == [None]


def test_released_lease_is_free_unless_the_session_is_over(path: Path) -> None:
    mine = lease.take_lease(path, **QUICK)
    mine.start_renewing(lambda _: None)
    mine.release()
    assert lease.read_lease(path) is None
    again = lease.take_lease(path, **QUICK)
    assert again.predecessor is None
    again.release(over="stoker down")
    with pytest.raises(SessionError, match=r"the session is over \(stoker down\)"):
        lease.take_lease(path, **QUICK)


def test_lease_waits_for_space_on_a_full_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter([errno.ENOSPC, errno.EDQUOT])
    real = os.write

    def write(file: int, data: bytes) -> int:
        code = next(sizes, 0)
        if code:
            raise OSError(code, os.strerror(code))
        return real(file, data)

    monkeypatch.setattr(os, "write", write)
    mine = lease.take_lease(path, room_s=30.0)
    assert lease.read_lease(path) == mine.holder
    assert [each.name for each in path.parent.iterdir() if each.suffix != ".lock"] == [path.name]
    mine.release()


def test_manager_reuses_the_lease_of_a_dead_holder_on_a_full_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path, DEAD)
    heard: list[LeaseHolder | None] = []
    with monkeypatch.context() as full:
        full.setattr(os, "write", no_room)
        mine = lease.take_lease(path, renew_s=0.05)
        assert lease.read_lease(path) == mine.holder
        mine.start_renewing(heard.append)
        until(lambda: lease.read_lease(path).counter >= 2)
    mine.release()
    assert heard == []
    assert lease.read_lease(path) is None


@pytest.mark.parametrize("holder", [None, msgspec.structs.replace(DEAD, machine="another")])
def test_lease_fails_on_a_full_disk_unless_its_holder_is_dead(
    path: Path, monkeypatch: pytest.MonkeyPatch, holder: LeaseHolder | None
) -> None:
    if holder is not None:
        write(path, holder)
    with monkeypatch.context() as full:
        full.setattr(os, "write", no_room)
        with pytest.raises(lease.NoDiskSpaceError, match="No space left on device; make room there"):
            lease.take_lease(path, patience_s=0.1, room_s=0.3)
    assert lease.read_lease(path) == holder


def test_lease_file_of_a_dead_holder_replaced_elsewhere_is_kept(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path, DEAD)
    real = os.pwrite

    def replaced(file: int, data: bytes, at: int) -> int:
        path.unlink()
        path.write_bytes(msgspec.json.encode(ELSEWHERE))
        return real(file, data, at)

    monkeypatch.setattr(os, "write", no_room)
    monkeypatch.setattr(os, "pwrite", replaced)
    with pytest.raises(SessionError, match=r"already has a manager .*login2"):
        lease.take_lease(path, room_s=5.0)
    assert lease.read_lease(path) == ELSEWHERE


@pytest.mark.parametrize("is_new", [False, True])
def test_keeper_retries_after_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_new: bool) -> None:
    def take(path: Path, **_: object) -> lease.Lease:
        raise lease.NoDiskSpaceError(f"the lease {path} cannot be written")

    folder = SessionFolder(tmp_path / "session")
    create_session_folder(folder)
    if not is_new:
        folder.file.touch()
    monkeypatch.setattr(lease, "take_lease", take)
    monkeypatch.setattr(connections, "raise_descriptor_limit", lambda: None)
    monkeypatch.setattr("stoker.manager.main.log_to_file", lambda path: None)
    before = signal.getsignal(signal.SIGINT)
    try:
        assert manager_main(["--session", str(folder.path)]) == (1 if is_new else keeper.MANAGER_FAILED)
    finally:
        signal.signal(signal.SIGINT, before)


def test_invalid_lease_is_reported(path: Path) -> None:
    path.write_text("nonsense")
    with pytest.raises(SessionError, match="is damaged"):
        lease.take_lease(path)


def test_journal_copy_excludes_later_writes_of_the_old_holder(tmp_path: Path) -> None:
    old = Journal(tmp_path / "journal")
    before = (tmp_path / "journal").read_bytes()
    lease.copy_journal(tmp_path / "journal")
    os.write(old._fd, b"late")
    assert (tmp_path / "journal").read_bytes() == before
    new = Journal(tmp_path / "journal")  # the lock of the old journal does not block the new journal
    new.close()
    old.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["journal"]


def test_holder_with_an_old_lease_waits_until_it_is_confirmed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(lease, "_boot_clock_s", lambda: now[0])
    held = lease.take_lease(path, **QUICK)
    held.wait_until_lease_confirmed()  # the wait returns at once, because the lease is fresh
    now[0] += lease.CONFIRMED_FOR_S + 1  # time passes without renewals, like on a suspended machine
    waits = threading.Thread(target=held.wait_until_lease_confirmed, daemon=True)
    waits.start()
    waits.join(0.2)
    assert waits.is_alive()
    held.start_renewing(lambda other: None)
    waits.join(PATIENCE_S)
    assert not waits.is_alive()
    held.release()


def test_replaced_holder_never_becomes_the_holder_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(lease, "_boot_clock_s", lambda: now[0])
    held = lease.take_lease(path, **QUICK)
    now[0] += lease.CONFIRMED_FOR_S + 1
    write(path, ELSEWHERE)
    lost: list[LeaseHolder | None] = []
    held.start_renewing(lost.append)
    waits = threading.Thread(target=held.wait_until_lease_confirmed, daemon=True)
    waits.start()
    until(lambda: lost == [ELSEWHERE])
    waits.join(0.2)
    assert waits.is_alive()
    held.release()
    waits.join(PATIENCE_S)


def test_session_end_is_written_on_a_full_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = lease.take_lease(path, **QUICK)
    with monkeypatch.context() as full:
        full.setattr(os, "write", no_room)
        mine.release(over="stoker down", unwritten="No space left on device")
    there = lease.read_lease(path)
    assert (there.token, there.over, there.unwritten) == (mine.holder.token, "stoker down", "No space left on device")
    assert lease.why_journal_is_incomplete(path) == "No space left on device"


def test_failed_write_on_a_full_disk_leaves_the_lease_unchanged(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, real = lease.take_lease(path, **QUICK), os.pwrite
    sizes = iter([10])
    with monkeypatch.context() as full:
        full.setattr(os, "write", no_room)
        full.setattr(os, "pwrite", lambda file, data, at: real(file, data[: next(sizes, len(data))], at))
        mine.release(over="stoker down")
    assert lease.read_lease(path) == mine.holder


FULL = """
import errno, os, sys, time
from pathlib import Path
from stoker.manager.live import lease
path = Path(sys.argv[1], "manager.lease")
held = lease.take_lease(path, renew_s=0.05)
fill = os.open(path.with_name("fill"), os.O_WRONLY | os.O_CREAT)
for size in (1 << 16, 1):  # fill the last page of the disk too
    try:
        while True:
            os.write(fill, bytes(size))
    except OSError as error:
        assert error.errno == errno.ENOSPC, error
held.on_renewed = lambda: print(lease.read_lease(path).counter, flush=True)
held.start_renewing(lambda other: print("lost", flush=True))
time.sleep(600)
"""


def _can_mount() -> bool:
    if os.geteuid() or shutil.which("unshare") is None:
        return False
    mount = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    return not subprocess.run(mount, capture_output=True).returncode


@pytest.mark.skipif(not _can_mount(), reason="a small disk needs root and unshare(1)")
def test_lease_is_renewed_on_a_full_disk(tmp_path: Path) -> None:
    mount = 'mount -t tmpfs -o size=1m none "$0"; exec "$@"'
    holder = ["unshare", "--mount", "sh", "-c", mount, str(tmp_path), sys.executable, "-c", FULL, str(tmp_path)]
    with subprocess.Popen(holder, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            counters = [int(process.stdout.readline()) for _ in range(3)]
            assert counters == sorted(set(counters))
        finally:
            process.kill()
