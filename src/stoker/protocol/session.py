"""The session folder: what a session is on disk, and where everything in it lies.

    <session folder>/            0700
        session.json             address, session id, protocol version, the manager's public key
        keys/                    0700; one CURVE key pair a role: server, client (0600); `transfer` holds the secret of
                                 transfers between pilots, and no key pair; blocks/ has a key pair for each block's
                                 pilots, from when it is asked for until it is over
        journal                  every event of the manager, in order; journal.* are its earlier parts and snapshots
        manager.log              and factory.log, seed.log, advisor.log, client.log
        manager.lease            who runs the manager (see `manager.live.lease`), beside manager.lock
        manager.end              for a moment: `stoker down` ends a manager that reads no messages
        manager.json             how the manager of a session that stays was started
        policies.json            which policies decide, if not the default ones; policies/ has files of the user's
        seed.address             where the seed listens, if there is one
        jobs-left                what the factory could not cancel at the end; empty when all is well
        sites/                   the site files of its sources of pilots
        sources/                 what programs leave of their sources for the advisor (`program_source`)
        submit/                  what was submitted to batch systems, and what those jobs printed
        objects/                 payloads over 1 MB and files that clients hand in, by cache name
        gateways/                what `stoker serve` says of its models (see `gateway_notes`)
        pilots/<pilot>/          pilot.log, lib-<n>.log: what pilots and their libraries print

`STOKER_HOME` (default `$XDG_STATE_HOME/stoker`, else `~/.local/state/stoker`) is the user's state folder; `sessions/`
in it holds one link a session, named by its id, newest last.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TypeVar

import msgspec

from stoker.contexts.folders import state_folder
from stoker.decoding import UNREADABLE
from stoker.errors import SessionError
from stoker.whole_files import write_whole

IDENTITY_MARK = b"~"
"""A pilot connects to the manager as `name~secret`: only a peer that knows the secret can replace its connection."""
_BLOCK = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_CURVE_ROLES = ("server", "client", "pilot")
_Z85_KEY = re.compile(r"[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}")

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
"""The Python of this process. Functions that travel as bytecode run in no other: it crashes, or computes wrongly."""

S = TypeVar("S", bound=msgspec.Struct)


class SessionFile(msgspec.Struct, frozen=True):
    """The content of `session.json`. `address` is a ZeroMQ endpoint; `server_key` is public, in Z85; `python` is the
    version of the session's programs and pilots, as `3.12` (empty: a manager of before this was written)."""

    session: str
    protocol: int
    address: str
    server_key: str
    created_at: float = 0.0
    site: str = "local"
    python: str = ""

    @property
    def is_for_this_python(self) -> bool:
        """Whether functions of this process can run in the session, and functions of the session here."""
        return self.python in ("", PYTHON)


class KeyPair(msgspec.Struct, frozen=True):
    """A CURVE key pair, in Z85."""

    public: str
    secret: str


class _End(msgspec.Struct, frozen=True):
    """What a manager's lease says of the session's end: why it is over; empty while it is not."""

    over: str = ""


class SessionFolder:
    """Paths of a session, and its two small files. Raises SessionError where a file is missing or unreadable."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()

    @property
    def file(self) -> Path:
        """`session.json`."""
        return self.path / "session.json"

    @property
    def journal(self) -> Path:
        """The manager's journal."""
        return self.path / "journal"

    @property
    def launch(self) -> Path:
        """How the manager of a session that outlives programs is started."""
        return self.path / "manager.json"

    @property
    def progress(self) -> Path:
        """The file that a manager touches once in its life, when the first call has ended (`manager.live.restarts`)."""
        return self.path / "manager.progress"

    @property
    def clock(self) -> Path:
        """The file by which a manager that is started again goes on with the clock of the one before
        (`manager.live.clock`)."""
        return self.path / "manager.clock"

    @property
    def manager_log(self) -> Path:
        """The manager's log."""
        return self.path / "manager.log"

    @property
    def lease(self) -> Path:
        """The file that says who runs the manager, and at the end that the session is over (`manager.live.lease`)."""
        return self.path / "manager.lease"

    @property
    def asked_to_end(self) -> Path:
        """The file by which `stoker down` ends a session whose manager reads no messages: its disk is full, and so much
        waits for room that it takes no more."""
        return self.path / "manager.end"

    def over(self) -> str:
        """Why the session is over; empty while it is not, or where that cannot be read."""
        try:
            return msgspec.json.decode(self.lease.read_bytes(), type=_End).over
        except (OSError, *UNREADABLE):
            return ""

    @property
    def objects(self) -> Path:
        """Where clients put objects for pilots, and pilots large results for clients."""
        return self.path / "objects"

    @property
    def sources(self) -> Path:
        """What programs leave of their sources for the advisor (`program_source`)."""
        return self.path / "sources"

    @property
    def sites(self) -> Path:
        """The session's site files, `NAME.toml` each."""
        return self.path / "sites"

    @property
    def submit(self) -> Path:
        """Submit scripts of blocks, and what their jobs print."""
        return self.path / "submit"

    @property
    def is_carried(self) -> bool:
        """Whether this is a copy on a node that does not see the session's own folder: address and keys, no more."""
        return (self.path / "copied").is_file()

    def pilot(self, pilot: str) -> Path:
        """The folder of a pilot's logs."""
        return self.path / "pilots" / pilot

    def key_file(self, role: str) -> Path:
        """The key pair of a role: `server`, `client`; or `pilot`, where pilots of no block are let in."""
        return self.path / "keys" / f"{role}.json"

    @property
    def block_keys(self) -> Path:
        """The folder of the blocks' key pairs."""
        return self.path / "keys" / "blocks"

    def block_key_file(self, block: str) -> Path:
        """The key pair of a block's pilots. Raises SessionError for what is no block's name."""
        if not _BLOCK.fullmatch(block):
            raise SessionError(f"{block!r} is no name of a block")
        return self.block_keys / f"{block}.json"

    def read_block_key(self, block: str) -> KeyPair:
        """The key pair of a block's pilots."""
        return self._read(self.block_key_file(block), KeyPair)

    def write_block_key(self, block: str, pair: KeyPair) -> None:
        """Write a block's key pair, readable by its owner alone."""
        self._write(self.block_key_file(block), pair)

    def read_pilot_key(self, block: str) -> KeyPair:
        """The key pair of a pilot: its block's, which lies beside a folder that was carried; else the session's."""
        if block:
            beside = self.path.parent / f"{block}.json"
            for file in (self.block_key_file(block), *([beside] if self.is_carried else [])):
                if file.exists():
                    return self._read(file, KeyPair)
        if not self.key_file("pilot").exists():
            raise SessionError(f"{self.path} has no key for pilots of block {block!r}: the block is over, or unknown")
        return self.read_key("pilot")

    def read(self) -> SessionFile:
        """The session's address and identity."""
        return self._read(self.file, SessionFile)

    def read_key(self, role: str) -> KeyPair:
        """The key pair of a role."""
        file = self.key_file(role)
        try:
            pair = self._read(file, KeyPair)
        except SessionError as error:
            raise SessionError(f"{error}{self._without(role)}") from error
        if role in _CURVE_ROLES and not (_Z85_KEY.fullmatch(pair.public) and _Z85_KEY.fullmatch(pair.secret)):
            raise SessionError(f"{file} is damaged: it holds no key pair{self._without(role)}")
        return pair

    def _without(self, role: str) -> str:
        """What to do without a role's key pair, if that is not plain from what is wrong with it."""
        if role not in _CURVE_ROLES or not self.file.exists():
            return ""
        return (
            "; without it no program or command can join the session. Put the file back from a copy, or end the session"
            f" by hand: cancel its jobs and its manager, which {self.lease} names"
        )

    def write(self, content: SessionFile) -> None:
        """Write `session.json`, whole or not at all."""
        self._write(self.file, content)

    def write_key(self, role: str, pair: KeyPair) -> None:
        """Write a role's key pair, readable by its owner alone."""
        self._write(self.key_file(role), pair)

    def make(self) -> None:
        """Make the folder and those inside it, closed to everybody else."""
        for folder in (self.path, self.path / "keys", self.objects, self.path / "pilots", self.sites, self.submit):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)

    def _read(self, path: Path, kind: type[S]) -> S:
        try:
            return msgspec.json.decode(path.read_bytes(), type=kind)
        except OSError as error:
            raise SessionError(f"{self.path} is not a session folder that you can read: {error}") from error
        except UNREADABLE as error:
            raise SessionError(f"{path} is damaged: {error}") from error

    def _write(self, path: Path, content: msgspec.Struct) -> None:
        # A host that crashes now leaves the old file or this one, never an empty one.
        write_whole(path, msgspec.json.format(msgspec.json.encode(content)), sync=True)


def changed_at(path: Path) -> float:
    """When a file or a link was changed last, in seconds since the epoch; 0 for one that is gone. Other programs make
    and remove sessions at any moment."""
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:
        return 0.0


def holds_session(folder: str | os.PathLike[str]) -> bool:
    """Whether there is a session in a folder that this user may read."""
    return os.path.exists(os.path.join(folder, "session.json"))


def is_begun(folder: str | os.PathLike[str]) -> bool:
    """Whether a session that outlives programs was made in a folder, and its manager has not listened yet."""
    return not holds_session(folder) and os.path.exists(os.path.join(folder, "manager.json"))


def named_folder(name: str) -> SessionFolder | None:
    """The session in the folder of this name; None where no session is there. Raises SessionError for a folder that is
    closed to this user."""
    try:
        return SessionFolder(name) if name and Path(name, "session.json").exists() else None
    except PermissionError as error:
        text = f"{name} cannot be read ({error.strerror}): only the user who began a session can use it"
        raise SessionError(text) from None
    except OSError:  # too long for the name of a folder
        return None


def find_session(name: str = "") -> SessionFolder:
    """A session's folder by id (or a unique beginning of one), by path, or the newest. Raises SessionError."""
    named = named_folder(name)
    if named is not None:
        return named
    links = sorted((state_folder() / "sessions").glob("*"), key=changed_at)
    links = [x for x in links if holds_session(x) and x.name.startswith(name) and not x.name.startswith(".")]  # a draft
    if not links:
        what = f"no session {name!r}" if name else "no session"
        raise SessionError(f"{what} on this machine; `stoker.load()` in a program or `stoker run APP` starts one")
    return SessionFolder(links[-1].resolve())
