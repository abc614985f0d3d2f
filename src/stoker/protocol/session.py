"""The session folder: the files of a session on disk.

    <session folder>/            0700
        session.json             address, session id, protocol version, the manager's public key
        keys/                    0700; one CURVE key pair a role: server, client (0600); `transfer` holds the secret of
                                 transfers between pilots, and no key pair; blocks/ has a key pair for each block's
                                 pilots, from its request until its end
        journal                  every event of the manager, in order; journal.* are its earlier parts and snapshots
        manager.log              and factory.log, seed.log, advisor.log, client.log
        manager.lease            the manager's process (see `manager.live.lease`), with manager.lock
        manager.end              for a moment: `stoker down` ends a manager that reads no messages
        manager.json             how the manager of a session that stays was started
        policies.json            which policies decide, if not the default ones; policies/ has files of the user's
        seed.address             the address of the seed, if any
        jobs-left                what the factory could not cancel at the end; empty when all is well
        sites/                   the site files of its sources of pilots
        sources/                 what programs leave of their sources for the advisor (`ProgramSource`)
        submit/                  submitted scripts, and their jobs' output
        objects/                 payloads over 1 MB and files that clients hand in, by cache name
        gateways/                the models of each `stoker serve` (`GatewayNote`)
        pilots/<pilot>/          pilot.log, lib-<n>.log: output of pilots and their libraries

`STOKER_HOME` (default `$XDG_STATE_HOME/stoker`, else `~/.local/state/stoker`) is the user's state folder; `sessions/`
in it holds one link a session, named by its id, newest last.

Of each function and loader a program leaves its source in `sources/` for the advisor, which runs on the same machine;
the text of a source file is stored once, by its digest. The manager reads neither.

A gateway rewrites its note in `gateways/NAME.json` every few seconds and removes it when it ends. The note of a killed
gateway stays, and its age tells. So `stoker status` works without a key, wherever the folder can be read.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from stoker.contexts.folders import state_folder
from stoker.decoding import UNREADABLE
from stoker.errors import SessionError
from stoker.whole_files import draft_of, write_whole

IDENTITY_MARK = b"~"
"""A pilot connects to the manager as `name~secret`: only a peer that knows the secret can replace its connection."""
_BLOCK = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_CURVE_ROLES = ("server", "client", "pilot")
_Z85_KEY = re.compile(r"[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}")

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
"""The Python version of this process. Functions that travel as bytecode crash or compute wrongly in another one."""

S = TypeVar("S", bound=msgspec.Struct)


class SessionFile(msgspec.Struct, frozen=True):
    """The content of `session.json`. `server_key`: public, in Z85; `python`: the version of the session's programs and
    pilots, as `3.12` (empty: an older manager)."""

    session: str
    protocol: int
    address: str
    server_key: str
    created_at: float = 0.0
    site: str = "local"
    python: str = ""

    @property
    def is_for_this_python(self) -> bool:
        return self.python in ("", PYTHON)


class KeyPair(msgspec.Struct, frozen=True):
    """A CURVE key pair, in Z85."""

    public: str
    secret: str


class _End(msgspec.Struct, frozen=True):
    """The end of the session in a manager's lease."""

    over: str = ""


class SessionFolder:
    """The paths of a session, and its two small files. Raises SessionError if a file is missing or unreadable."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = folder = Path(path).absolute()
        self.file = folder / "session.json"
        self.journal = folder / "journal"
        self.launch = folder / "manager.json"
        self.progress = folder / "manager.progress"
        """A manager touches it once, when its first call has ended (`manager.live.keeper`)."""
        self.clock = folder / "manager.clock"
        """From it a restarted manager continues the clock (`manager.live.clock`)."""
        self.manager_log = folder / "manager.log"
        self.lease = folder / "manager.lease"
        self.asked_to_end = folder / "manager.end"
        self.objects = folder / "objects"
        self.sources = folder / "sources"
        self.sites = folder / "sites"
        self.submit = folder / "submit"
        self.block_keys = folder / "keys" / "blocks"

    def over(self) -> str:
        """Return why the session is over; empty if it is not, or that cannot be read."""
        try:
            return msgspec.json.decode(self.lease.read_bytes(), type=_End).over
        except (OSError, *UNREADABLE):
            return ""

    @property
    def is_carried(self) -> bool:
        """True for a copy (address and keys only) on a node that does not see the session's own folder."""
        return (self.path / "copied").is_file()

    def pilot(self, pilot: str) -> Path:
        return self.path / "pilots" / pilot

    def key_file(self, role: str) -> Path:
        """`role`: `server`, `client`, or `pilot` if pilots without a block may join."""
        return self.path / "keys" / f"{role}.json"

    def block_key_file(self, block: str) -> Path:
        """Raises SessionError for an invalid block name."""
        if not _BLOCK.fullmatch(block):
            raise SessionError(f"{block!r} is no name of a block")
        return self.block_keys / f"{block}.json"

    def read_block_key(self, block: str) -> KeyPair:
        return self._read(self.block_key_file(block), KeyPair)

    def write_block_key(self, block: str, pair: KeyPair) -> None:
        self._write(self.block_key_file(block), pair)

    def read_pilot_key(self, block: str) -> KeyPair:
        """Return a pilot's key pair: of its block (next to a carried folder), else of the session."""
        if block:
            beside = self.path.parent / f"{block}.json"
            for file in (self.block_key_file(block), *([beside] if self.is_carried else [])):
                if file.exists():
                    return self._read(file, KeyPair)
        if not self.key_file("pilot").exists():
            raise SessionError(f"{self.path} has no key for pilots of block {block!r}: the block is over, or unknown")
        return self.read_key("pilot")

    def read(self) -> SessionFile:
        return self._read(self.file, SessionFile)

    def read_key(self, role: str) -> KeyPair:
        file = self.key_file(role)
        try:
            pair = self._read(file, KeyPair)
        except SessionError as error:
            raise SessionError(f"{error}{self._without(role)}") from error
        if role in _CURVE_ROLES and not (_Z85_KEY.fullmatch(pair.public) and _Z85_KEY.fullmatch(pair.secret)):
            raise SessionError(f"{file} is damaged: it holds no key pair{self._without(role)}")
        return pair

    def _without(self, role: str) -> str:
        """Return what to do without a role's key pair, unless the error says it."""
        if role not in _CURVE_ROLES or not self.file.exists():
            return ""
        return (
            "; without it no program or command can join the session. Put the file back from a copy, or end the session"
            f" by hand: cancel its jobs and its manager, which {self.lease} names"
        )

    def write(self, content: SessionFile) -> None:
        self._write(self.file, content)

    def write_key(self, role: str, pair: KeyPair) -> None:
        self._write(self.key_file(role), pair)

    def make(self) -> None:
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
    """Return the time of the last change in seconds since the epoch; 0 if the file is gone."""
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:
        return 0.0


def holds_session(folder: str | os.PathLike[str]) -> bool:
    """True if the folder holds a session that this user may read."""
    return os.path.exists(os.path.join(folder, "session.json"))


def is_begun(folder: str | os.PathLike[str]) -> bool:
    """True if a session that outlives programs was made here and its manager does not listen yet."""
    return not holds_session(folder) and os.path.exists(os.path.join(folder, "manager.json"))


def named_folder(name: str) -> SessionFolder | None:
    """Return the session in the folder of this name, or None. Raises SessionError for a folder that is closed to this
    user."""
    try:
        return SessionFolder(name) if name and Path(name, "session.json").exists() else None
    except PermissionError as error:
        text = f"{name} cannot be read ({error.strerror}): only the user who began a session can use it"
        raise SessionError(text) from None
    except OSError:  # too long for the name of a folder
        return None


def find_session(name: str = "") -> SessionFolder:
    """Return a session's folder by id (or a unique prefix), by path, or the newest. Raises SessionError."""
    named = named_folder(name)
    if named is not None:
        return named
    links = sorted((state_folder() / "sessions").glob("*"), key=changed_at)
    links = [x for x in links if holds_session(x) and x.name.startswith(name) and not x.name.startswith(".")]  # a draft
    if not links:
        what = f"no session {name!r}" if name else "no session"
        raise SessionError(f"{what} on this machine; `stoker.load()` in a program or `stoker run APP` starts one")
    return SessionFolder(links[-1].resolve())


# ---- sources of programs, for the advisor


LONGEST_TEXT = 1_000_000
"""In characters."""

Plain = str | int | float | bool | None


class ProgramSource(msgspec.Struct, frozen=True):
    """The source around a function or a loader. `function`: its dotted name; `file`: the origin of the text (empty: a
    notebook, a prompt); `folder`: the program's, whose modules may be read; `arguments`: plain ones of a loader."""

    text: str
    function: str
    file: str = ""
    folder: str = ""
    arguments: dict[str, Plain] = {}


def source_file(sources: Path, key: str) -> Path:
    return sources / f"{key}.json"


def text_file(sources: Path, digest: str) -> Path:
    return sources / f"{digest}.text"


def read_source(sources: Path, key: str) -> tuple[ProgramSource, str] | None:
    """Return a source and its text; None if unreadable."""
    try:
        source = msgspec.json.decode(source_file(sources, key).read_bytes(), type=ProgramSource)
        return source, text_file(sources, source.text).read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError, msgspec.MsgspecError):
        return None


# ---- notes of gateways


WRITTEN_EVERY_S = 2.0
SILENT_AFTER_S = 15.0
"""An older note is from a gateway that was killed or cannot write."""


class ServedModelFigures(msgspec.Struct, frozen=True):
    """One model of a gateway. `key`, `recipe`: its context's key and name (empty: its folder has not been read; if it
    could not be, `trouble` says why). `ttft_s`: the median of the last streams. `met`: the share of them that met their
    objectives; None: no objective, or no stream yet."""

    name: str
    key: str = ""
    recipe: str = ""
    running: int = 0
    tokens_per_s: float = 0.0
    ttft_s: float | None = None
    ttft_objective_s: float | None = None
    met: float | None = None
    trouble: str = ""


class GatewayNote(msgspec.Struct, frozen=True):
    """`address`: a URL or the path of a Unix socket. `at`: the time of writing, in seconds since 1970."""

    address: str
    host: str
    pid: int
    models: tuple[ServedModelFigures, ...] = ()
    at: float = 0.0

    def silent_s(self, now: float) -> float:
        """Return for how many seconds the gateway has been silent; 0 if it still writes.

        Args:
            now: Seconds since the epoch.
        """
        age = now - self.at
        return age if age > SILENT_AFTER_S else 0.0


def write_gateway_note(session: Path, name: str, note: GatewayNote) -> None:
    """Write the note of a gateway, atomically.

    Args:
        session: The session's folder.
        name: The gateway's name.
        note: The note.

    Raises:
        OSError: The note cannot be written.
    """
    file = _note_file(session, name)
    file.parent.mkdir(mode=0o700, exist_ok=True)
    with draft_of(file) as draft:
        draft.write_bytes(msgspec.json.encode(note))


def remove_gateway_note(session: Path, name: str) -> None:
    """Remove the note of a gateway.

    Args:
        session: The session's folder.
        name: The gateway's name.
    """
    with suppress(OSError):
        _note_file(session, name).unlink()


def gateway_notes(folder: SessionFolder) -> list[GatewayNote]:
    found = []
    for file in (folder.path / "gateways").glob("[!.]*.json"):
        with suppress(OSError, *UNREADABLE):
            found.append(msgspec.json.decode(file.read_bytes(), type=GatewayNote))
    return sorted(found, key=lambda note: note.address)


def _note_file(session: Path, name: str) -> Path:
    return session / "gateways" / f"{name}.json"
