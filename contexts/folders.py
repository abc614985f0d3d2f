"""The user's state folder on this machine, and the program's working folder.

Another process sees the program's folder if the path has the same inode (on the same machine, also the same device). On
another machine, the file system must be shared, because copies of a disk image have equal inodes.
"""

from __future__ import annotations

import functools
import os
from contextlib import suppress
from pathlib import Path

import msgspec

SNAPSHOTS = "STOKER_SNAPSHOTS"


def state_folder() -> Path:
    """Return the folder where Stoker keeps the user's state."""
    if named := os.environ.get("STOKER_HOME"):
        return Path(named).absolute()
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base).absolute() / "stoker"


def snapshot_folder() -> Path:
    named = os.environ.get(SNAPSHOTS)
    return Path(named).absolute() if named else state_folder() / "snapshots"


_LOCAL_FILE_SYSTEM_TYPES = frozenset({
    "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "reiserfs", "bcachefs", "vfat", "exfat", "ntfs3",
    "proc", "sysfs", "tmpfs", "ramfs", "rootfs", "devtmpfs", "overlay", "aufs", "squashfs", "erofs", "iso9660",
    "fuseblk", "fuse.fuse-overlayfs", "fuse.squashfuse", "fuse.squashfuse_ll",
})  # fmt: skip
"""Types of file systems that machines never share."""


_MOUNT_TABLE = "/proc/self/mountinfo"


class ProgramFolder(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A program's working folder and its umask. `boot`: first characters of the machine's boot id."""

    path: str
    inode: int
    device: int
    boot: str
    umask: int


def program_folder(path: str | os.PathLike[str] = ".") -> ProgramFolder | None:
    """Return the folder at `path` and this process's umask; None for an unreadable path."""
    try:
        whole = os.path.abspath(path)
        whole.encode()
        facts = os.stat(whole)
    except (OSError, UnicodeEncodeError):
        return None
    return ProgramFolder(whole, facts.st_ino, facts.st_dev, _boot_id(), current_umask())


def is_visible_here(folder: ProgramFolder) -> bool:
    with suppress(OSError):
        facts = os.stat(folder.path)
        is_its_machine = folder.boot == _boot_id() != "" and facts.st_dev == folder.device
        return facts.st_ino == folder.inode and (is_its_machine or may_be_shared(Path(folder.path)))
    return False


def may_be_shared(path: Path) -> bool:
    """True if other machines may see a file or folder. Raises OSError.

    Args:
        path: The file or folder.
    """
    return _filesystem_type(os.stat(path).st_dev) not in _LOCAL_FILE_SYSTEM_TYPES


def current_umask() -> int:
    """Return the umask. If possible, read it without setting it, because other threads may create files meanwhile."""
    with suppress(OSError), open("/proc/thread-self/status") as file:
        for line in file:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    found = os.umask(0o077)
    os.umask(found)
    return found


@functools.cache
def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read(13)
    except OSError:
        return ""


def _filesystem_type(device: int) -> str:
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with open(_MOUNT_TABLE) as file:
        for line in file:
            before, _, after = line.partition(" - ")
            if before.split(" ", 3)[2] == wanted:
                return after.partition(" ")[0]
    return "overlay"
