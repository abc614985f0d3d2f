"""Listen at an address, and serve requests."""

from __future__ import annotations

import errno
import getpass
import ipaddress
import os
import socket
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import uvicorn
from starlette.types import ASGIApp

from stoker.apps.gateway.keys import KeyFile
from stoker.errors import ConfigError

FIRST_PORT = 8000
FIRST_PAGE_PORT = 8100
"""First port for dashboards, above the default ports of gateways."""
_PORTS = 100
_BACKLOG = 1024


class ListeningAddress(NamedTuple):
    socket: socket.socket
    port: int
    """The port number; 0 for a Unix socket."""
    address: str
    """A URL, or the path of the Unix socket."""
    scheme: str = "http"

    def format_help_lines(self, shown: str, *, path: str) -> Iterator[str]:
        """Yield lines that explain how to reach the address: the text `shown` for a port, or a curl command that reads
        `path` from a Unix socket.
        """
        if not self.port:
            curl = f"curl --unix-socket {self.address} {self.scheme}://stoker{path}"
            yield f"  {self.address} (a Unix socket, yours alone): {curl}"
            return
        yield f"  {shown}"
        if is_loopback(str(self.socket.getsockname()[0])):
            tunnel = f"{self.port}:127.0.0.1:{self.port} {getpass.getuser()}@{socket.gethostname()}"
            yield f"  from your laptop: ssh -L {tunnel}"


def open_listener(
    host: str, port: int, uds: str, *, keys: KeyFile, scheme: str = "http", **choice: Any
) -> ListeningAddress:
    """Listen at an address. Raises ConfigError, for example if other machines could connect without keys. `choice`: see
    `listen_on_port`.
    """
    keys.read_current()
    if uds:
        return ListeningAddress(listen_on_path(uds), 0, uds, scheme)
    if not is_loopback(host) and not keys.exists:
        raise ConfigError(
            f"--host {host}: other machines could use your models, and there are no keys; make a key first:"
            " stoker serve keys add NAME",
            key="host",
        )
    listener = listen_on_port(host, port, **choice)
    port = int(listener.getsockname()[1])
    return ListeningAddress(listener, port, f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}", scheme)


def listen_on_port(
    host: str, port: int, *, last_port: int = 0, excluded_ports: Collection[int] = (), first_port: int = FIRST_PORT
) -> socket.socket:
    """Listen on `port`, else on `last_port`, else on the first free port from `first_port` that is not excluded."""
    wanted = port or last_port
    from_first = [each for each in range(first_port, first_port + _PORTS) if each not in excluded_ports]
    for each in [wanted] if wanted else from_first:
        try:
            return _bind_socket(host, each)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ConfigError(f"cannot listen on {host} port {each}: {error.strerror or error}") from None
    if port:
        raise ConfigError(f"port {port} of {host} is in use; choose another port with --port", key="port")
    if last_port:
        raise ConfigError(
            f"port {last_port} of {host}, where this gateway was before, is taken by another program: end that program,"
            " or choose another port with --port N and tell your clients",
            key="port",
        )
    raise ConfigError(
        f"the ports {first_port} to {first_port + _PORTS - 1} are in use; choose another port with --port"
    )


def listen_on_path(path: str) -> socket.socket:
    """Listen on a Unix socket that only its owner may use."""
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
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _bind_socket(host: str, port: int) -> socket.socket:
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
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            try:
                asking.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)


GRACE_S = 5
"""Seconds that streams may continue when the gateway stops."""
_IDLE_S = 75
"""Seconds that an idle connection stays open. Clients close idle connections earlier (HTTPX after 5 s, aiohttp after
15 s), so the server never closes a connection while a client sends a request.
"""


class WebApplication(Protocol):
    """A web application. `stop_server`: stops the server, set by `run_server`."""

    stop_server: Callable[[], None]

    def build_application(self) -> ASGIApp: ...


def run_server(served: WebApplication, *listeners: socket.socket, **options: Any) -> None:
    """Serve until Ctrl-C or a call of `stop_server`. `options`: further arguments of uvicorn's Config."""
    config = uvicorn.Config(
        served.build_application(), log_level="warning", access_log=False, lifespan="on", server_header=False,
        timeout_graceful_shutdown=GRACE_S, timeout_keep_alive=_IDLE_S, **options,
    )  # fmt: skip
    server = uvicorn.Server(config)
    served.stop_server = lambda: setattr(server, "should_exit", True)
    try:
        server.run(sockets=list(listeners))
    except KeyboardInterrupt:  # no error: uvicorn raises it again after a clean stop
        pass
