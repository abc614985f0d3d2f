"""The session folder: the files of a session on disk.

    <session folder>/            0700
        session.json             address, session id, protocol version, the manager's public key
        keys/                    0700; CURVE key pairs (0600) of server and client; the secret `transfer` for transfers
                                 between pilots; blocks/ has a key pair for each block that has not ended
        journal                  events of the manager, in order; journal.*: earlier parts and snapshots
        manager.log              log of the manager; other logs: factory.log, seed.log, advisor.log, client.log
        manager.lease            names the manager's process (`manager.live.lease`); used with manager.lock
        manager.end              written by `stoker down`, to stop a manager that reads no messages
        manager.progress         touched when the manager's first call has ended (`manager.live.keeper`)
        manager.clock            from which a restarted manager continues its clock (`manager.live.clock`)
        manager.json             command that restarts the manager of a session that continues when programs end
        policies.json            policies other than the default; policies/ has the files of the user's policies
        seed.address             address of the seed
        jobs-left                jobs that the factory could not cancel at the end of the session
        sites/                   site files
        sources/                 source code of functions and loaders for the advisor (`ProgramSource`)
        submit/                  submit scripts, and the output of jobs
        objects/                 payloads over 1 MB and files from clients, by cache name
        gateways/                a file per `stoker serve` process, with its models (`GatewayNote`)
        pilots/<pilot>/          pilot.log, and lib-<n>.log of each library

The folder `sessions/` in the user's state folder (`contexts.folders`) has a link to each session, named by session id.
A gateway rewrites its file in `gateways/` every few seconds, so an old file shows that the gateway was killed.
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
from stoker.decoding import UNREADABLE, read_json
from stoker.errors import SessionError
from stoker.whole_files import write_whole

IDENTITY_MARK = b"~"
"""Separator in the identity `name~secret` of a pilot's connection. Only a peer that knows the secret can replace the
connection."""
_BLOCK = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_CURVE_ROLES = ("server", "client", "pilot")
_Z85_KEY = re.compile(r"[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}")

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
"""Python version of this process. Stoker sends functions as bytecode, which runs only in the same version."""

S = TypeVar("S", bound=msgspec.Struct)


class SessionFile(msgspec.Struct, frozen=True):
    """Content of `session.json`. `server_key`: the manager's public key in Z85. `python`: Python version of the
    manager."""

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


class _SessionEnd(msgspec.Struct, frozen=True):
    """The part of `manager.lease` about the end of the session. `over`: the reason (empty: not ended)."""

    over: str = ""


class SessionFolder:
    """The paths in a session's folder, and methods that read its small files. These methods raise SessionError."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = folder = Path(path).absolute()
        self.file = folder / "session.json"
        self.journal = folder / "journal"
        self.launch = folder / "manager.json"
        self.progress = folder / "manager.progress"
        self.clock = folder / "manager.clock"
        self.manager_log = folder / "manager.log"
        self.lease = folder / "manager.lease"
        self.end_request = folder / "manager.end"
        self.objects = folder / "objects"
        self.sources = folder / "sources"
        self.sites = folder / "sites"
        self.submit = folder / "submit"
        self.block_keys = folder / "keys" / "blocks"

    def end_reason(self) -> str:
        """Return why the session has ended (empty: it has not ended)."""
        end = read_json(self.lease, _SessionEnd)
        return end.over if end is not None else ""

    @property
    def is_copied(self) -> bool:
        return (self.path / "copied").is_file()

    def pilot_folder(self, pilot: str) -> Path:
        return self.path / "pilots" / pilot

    def key_file(self, role: str) -> Path:
        """Return the key file of `server`, `client`, or `pilot` (for pilots without a block)."""
        return self.path / "keys" / f"{role}.json"

    def block_key_file(self, block: str) -> Path:
        """Return a block's key file. Raises SessionError for an invalid name."""
        if not _BLOCK.fullmatch(block):
            raise SessionError(f"{block!r} is not the name of a block")
        return self.block_keys / f"{block}.json"

    def read_block_key(self, block: str) -> KeyPair:
        return self._read(self.block_key_file(block), KeyPair)

    def write_block_key(self, block: str, pair: KeyPair) -> None:
        self._write(self.block_key_file(block), pair)

    def read_pilot_key(self, block: str) -> KeyPair:
        """Return the key pair of `block`, or else the key pair of pilots without a block."""
        if block:
            beside = self.path.parent / f"{block}.json"
            for file in (self.block_key_file(block), *([beside] if self.is_copied else [])):
                if file.exists():
                    return self._read(file, KeyPair)
        if not self.key_file("pilot").exists():
            raise SessionError(
                f"{self.path} has no key for pilots of block {block!r}: the block has ended, or is unknown"
            )
        return self.read_key("pilot")

    def read(self) -> SessionFile:
        return self._read(self.file, SessionFile)

    def read_key(self, role: str) -> KeyPair:
        file = self.key_file(role)
        try:
            pair = self._read(file, KeyPair)
        except SessionError as error:
            raise SessionError(f"{error}{self._advise_on_missing_key(role)}") from error
        if role in _CURVE_ROLES and not (_Z85_KEY.fullmatch(pair.public) and _Z85_KEY.fullmatch(pair.secret)):
            raise SessionError(f"{file} is damaged: it contains no key pair{self._advise_on_missing_key(role)}")
        return pair

    def _advise_on_missing_key(self, role: str) -> str:
        """Return advice about a missing key pair, as the end of an error message."""
        if role not in _CURVE_ROLES or not self.file.exists():
            return ""
        return (
            "; without it no program or command can join the session. Put the file back from a copy, or end the session"
            f" by hand: cancel its jobs, and stop its manager (see {self.lease})"
        )

    def write(self, content: SessionFile) -> None:
        self._write(self.file, content)

    def write_key(self, role: str, pair: KeyPair) -> None:
        self._write(self.key_file(role), pair)

    def create_folders(self) -> None:
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
        # After a crash of the host, the file has the old or the new content, and is never empty.
        write_whole(path, msgspec.json.format(msgspec.json.encode(content)), sync=True)


def modification_time(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:
        return 0.0


def is_session_folder(folder: str | os.PathLike[str]) -> bool:
    return os.path.exists(os.path.join(folder, "session.json"))


def is_starting(folder: str | os.PathLike[str]) -> bool:
    """True if `stoker up` has started the session, but the manager does not listen yet."""
    return not is_session_folder(folder) and os.path.exists(os.path.join(folder, "manager.json"))


def session_at_path(name: str) -> SessionFolder | None:
    """Return the session in the folder `name`, or None. Raises SessionError if the folder is not readable."""
    try:
        return SessionFolder(name) if name and Path(name, "session.json").exists() else None
    except PermissionError as error:
        text = f"{name} cannot be read ({error.strerror}): only the user who started the session can use it"
        raise SessionError(text) from None
    except OSError:  # the name is too long for a path, so no such folder exists
        return None


def find_session(name: str = "") -> SessionFolder:
    """Return the session with this path, id or prefix of an id. For an empty `name`, return the newest session. Raises
    SessionError.
    """
    if (named := session_at_path(name)) is not None:
        return named
    links = sorted((state_folder() / "sessions").glob("*"), key=modification_time)
    # Skip unfinished links, whose names begin with a dot.
    links = [x for x in links if x.name.startswith(name) and not x.name.startswith(".") and is_session_folder(x)]
    if not links:
        what = f"no session {name!r}" if name else "no session"
        raise SessionError(f"{what} on this machine; `stoker.load()` in a program or `stoker run APP` starts one")
    return SessionFolder(links[-1].resolve())


# ---- sources of programs that the advisor reads


LONGEST_TEXT = 1_000_000
"""Maximum characters of a source text that the advisor reads."""

Plain = str | int | float | bool | None


class ProgramSource(msgspec.Struct, frozen=True):
    """The source of a function or a loader, for the advisor. `text`: digest of the source text. `file`: source file
    (empty for a notebook or an interactive prompt). `folder`: the program's folder, whose modules the advisor may read.
    `arguments`: arguments of the loader.
    """

    text: str
    function: str
    file: str = ""
    folder: str = ""
    arguments: dict[str, Plain] = {}


def program_source_file(sources: Path, key: str) -> Path:
    return sources / f"{key}.json"


def source_text_file(sources: Path, digest: str) -> Path:
    return sources / f"{digest}.text"


def read_program_source(sources: Path, key: str) -> tuple[ProgramSource, str] | None:
    try:
        source = msgspec.json.decode(program_source_file(sources, key).read_bytes(), type=ProgramSource)
        return source, source_text_file(sources, source.text).read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError, msgspec.MsgspecError):
        return None


# ---- notes of gateways


WRITTEN_EVERY_S = 2.0
SILENT_AFTER_S = 15.0
"""Seconds since its last note after which a gateway counts as killed."""


class ServedModelFigures(msgspec.Struct, frozen=True):
    """Measurements of a model that a gateway serves. `key`, `recipe`: key and name of the context (empty: the model's
    folder has not been read). `trouble`: why the folder is unreadable. `ttft_s`: median time to first token of recent
    streams. `met`: share of recent streams that met their objectives (None: no streams). `refused`: number of requests
    refused because they would have been late.
    """

    name: str
    key: str = ""
    recipe: str = ""
    running: int = 0
    tokens_per_s: float = 0.0
    ttft_s: float | None = None
    ttft_objective_s: float | None = None
    met: float | None = None
    trouble: str = ""
    refused: int = 0


class WorkerFacts(msgspec.Struct, frozen=True):
    """Worker processes of a gateway: number requested, number running, and number of restarts."""

    wanted: int
    running: int = 0
    restarts: int = 0


class GatewayNote(msgspec.Struct, frozen=True):
    """The state of a gateway. `address`: URL or path of a Unix socket. `at`: time of writing in seconds since 1970."""

    address: str
    host: str
    pid: int
    models: tuple[ServedModelFigures, ...] = ()
    at: float = 0.0
    workers: WorkerFacts | None = None

    def silent_s(self, now: float) -> float:
        """Return the age of the note in seconds; 0 if the note is recent.

        Args:
            now: Seconds since the epoch.
        """
        age = now - self.at
        return age if age > SILENT_AFTER_S else 0.0


def write_gateway_note(session: Path, name: str, note: GatewayNote) -> None:
    """Write a gateway's note atomically. Raises OSError.

    Args:
        session: The session's folder.
        name: The gateway's name.
        note: The note.
    """
    file = _gateway_note_file(session, name)
    file.parent.mkdir(mode=0o700, exist_ok=True)
    write_whole(file, msgspec.json.encode(note))


def remove_gateway_note(session: Path, name: str) -> None:
    """Remove a gateway's note.

    Args:
        session: The session's folder.
        name: The gateway's name.
    """
    with suppress(OSError):
        _gateway_note_file(session, name).unlink()


def read_gateway_notes(folder: SessionFolder) -> list[GatewayNote]:
    notes = (read_json(file, GatewayNote) for file in (folder.path / "gateways").glob("[!.]*.json"))
    return sorted(filter(None, notes), key=lambda note: note.address)


def _gateway_note_file(session: Path, name: str) -> Path:
    return session / "gateways" / f"{name}.json"
