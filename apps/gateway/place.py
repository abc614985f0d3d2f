"""Where a gateway listens: the same address each time, whatever ended it.

Each pair of a site file and a models file has a folder of its own below the user's state folder. It keeps the port and
the session of the gateway, and a lock by which a second gateway of the same files sees that there is one.
"""

from __future__ import annotations

import errno
import fcntl
import getpass
import hashlib
import ipaddress
import os
import socket
import stat
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import msgspec

from stoker.contexts import state_folder
from stoker.errors import ConfigError, SessionError

_FIRST_PORT = 8000
_PORTS = 100
_BACKLOG = 1024


class GatewayState(msgspec.Struct, frozen=True):
    """What a gateway finds again: its port (0: it listens on none), its session, and its process."""

    port: int = 0
    session: str = ""
    pid: int = 0


class GatewayPlace:
    """The folder of the gateway of these files. `site`: empty for this machine."""

    def __init__(self, site: str, models: Path) -> None:
        named = "\n".join([str(Path(site).resolve()) if site else "", str(models.resolve())])
        digest = hashlib.sha256(named.encode()).hexdigest()[:12]
        self.folder = state_folder() / "serve" / f"{models.stem}-{digest}"
        self._file = self.folder / "gateway.json"
        self._lock: int | None = None

    def take(self) -> GatewayState:
        """What the last gateway left. Raises SessionError if one of the same files runs."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(self.folder / "gateway.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        state = GatewayState()
        with suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
            state = msgspec.json.decode(self._file.read_bytes(), type=GatewayState)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            where = f"at port {state.port} " if state.port else ""
            raise SessionError(f"a gateway for these files runs already {where}(pid {state.pid})") from None
        except OSError:  # a file system without locks: the port says the same
            pass
        return state

    def ports_of_others(self) -> frozenset[int]:
        """The ports that this user's other gateways come back to, whether they run now or not."""
        ports = set()
        for file in self.folder.parent.glob("*/gateway.json"):
            if file != self._file:
                with suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
                    ports.add(msgspec.json.decode(file.read_bytes(), type=GatewayState).port)
        return frozenset(ports)

    def keep(self, state: GatewayState) -> None:
        """Write what the next gateway finds."""
        draft = self.folder / f".gateway-{os.getpid()}.json"
        draft.write_bytes(msgspec.json.encode(state))
        draft.replace(self._file)


def listen(host: str, port: int, *, kept: int, not_on: Collection[int] = ()) -> socket.socket:
    """A socket that listens on a TCP port: `port` if one is named, else the one that was `kept`, else the first free
    one from 8000 that is not in `not_on`. Raises ConfigError where that cannot be."""
    wanted = port or kept
    from_first = [each for each in range(_FIRST_PORT, _FIRST_PORT + _PORTS) if each not in not_on]
    for each in [wanted] if wanted else from_first:
        try:
            return _bound(host, each)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ConfigError(f"cannot listen on {host} port {each}: {error.strerror or error}") from None
    if port:
        raise ConfigError(f"port {port} of {host} is taken; name another one with --port", key="port")
    if kept:
        raise ConfigError(
            f"port {kept} of {host}, where this gateway was before, is taken by another program: end that one, or move"
            " with --port N, and tell your clients",
            key="port",
        )
    raise ConfigError(f"the ports {_FIRST_PORT} to {_FIRST_PORT + _PORTS - 1} are taken; name another with --port")


def listen_on_path(path: str) -> socket.socket:
    """A Unix socket that its owner alone may use. Raises ConfigError where that cannot be."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        _remove_dead_socket(path)
        made.bind(path)
    except OSError as error:
        made.close()
        raise ConfigError(f"--uds {path}: {error.strerror or error}", key="uds") from None
    finally:
        os.umask(before)
    made.listen(_BACKLOG)
    return made


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def tunnel(port: int) -> str:
    """What a person types on a laptop to reach a port of this machine's loopback."""
    return f"ssh -L {port}:127.0.0.1:{port} {getpass.getuser()}@{socket.gethostname()}"


def _bound(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(_BACKLOG)
    except BaseException:
        made.close()
        raise
    return made


def _remove_dead_socket(path: str) -> None:
    """A socket whose gateway was killed stays in the file system."""
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            try:
                asking.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)
