"""One gateway, from its options to its end. The session and its models stay when the gateway ends.

A gateway keeps its address. Each pair of a site file and a models file has a folder below the user's state folder,
with the port and session of the gateway, and a lock by which a second gateway of the same files notices the first.
"""

from __future__ import annotations

import errno
import fcntl
import getpass
import hashlib
import ipaddress
import os
import socket
import ssl
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import uvicorn

import stoker
from stoker.apps.common.calls import session_line
from stoker.apps.common.command_line import count
from stoker.apps.common.models_file import ModelSettings, read_models
from stoker.apps.gateway.batch_files import FileStore
from stoker.apps.gateway.batches import Batches
from stoker.apps.gateway.failures import TryLater
from stoker.apps.gateway.figures import GatewayNotes
from stoker.apps.gateway.http import Gateway
from stoker.apps.gateway.keys import Guard, KeyFile
from stoker.apps.gateway.options import GatewayOptions
from stoker.apps.gateway.served import ServedModels, SessionWatch
from stoker.console import Screen, note
from stoker.contexts import state_folder
from stoker.errors import ConfigError, SessionError
from stoker.sessions import Session, honoured_by, joined_session, kept_session, policy_of

_FIRST_PORT = 8000
_PORTS = 100
_BACKLOG = 1024


class GatewayState(msgspec.Struct, frozen=True):
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
        """Lock the folder and return the last gateway's state. Raises SessionError if a gateway of the same files
        runs.
        """
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
        ports = set()
        for file in self.folder.parent.glob("*/gateway.json"):
            if file != self._file:
                with suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
                    ports.add(msgspec.json.decode(file.read_bytes(), type=GatewayState).port)
        return frozenset(ports)

    def keep(self, state: GatewayState) -> None:
        draft = self.folder / f".gateway-{os.getpid()}.json"
        draft.write_bytes(msgspec.json.encode(state))
        draft.replace(self._file)


def listen(host: str, port: int, *, kept: int, not_on: Collection[int] = ()) -> socket.socket:
    """Listen on a TCP port: `port` if given, else the `kept` one, else the first free one from 8000 that is not in
    `not_on`. Raises ConfigError if that fails.
    """
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
    """Listen on a Unix socket that only its owner may use. Raises ConfigError if that fails."""
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


def tunnel(port: int) -> str:
    """Return the command for a laptop to reach a port of this machine's loopback."""
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
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            try:
                asking.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)


_GRACE_S = 5
"""Seconds that open streams have to end when the gateway stops."""
_IDLE_S = 75
"""Seconds that an idle connection stays open. Clients close theirs earlier (HTTPX after 5 s, aiohttp after 15 s): if
both closed at the same time, a request sent then would get no answer.
"""


def serve(options: GatewayOptions, *, screen: Screen) -> int:
    """Serve until Ctrl-C or SIGTERM. Raises StokerError."""
    settings = read_models(options.models)
    keys = KeyFile.usual()
    keys.read()
    _refuse_open(options, keys)
    _check_tls(options)
    place = GatewayPlace(options.site, options.models)
    state = place.take()
    if options.uds:
        listener, port = listen_on_path(options.uds), 0
    else:
        listener = listen(options.host, options.port, kept=state.port, not_on=place.ports_of_others())
        port = int(listener.getsockname()[1])
    with listener:
        session, how = _session(options, before=state.session)
        with stoker.load(session=session) as loaded:
            place.keep(GatewayState(port=port or state.port, session=loaded.id, pid=os.getpid()))
            _refuse_unhonoured(options.models, settings, loaded)
            models = ServedModels(settings)
            screen.line(session_line(loaded))
            screen.line(f"  {how}")
            for line in (*_trouble(models), *_where(options, keys, port=port, models=models)):
                screen.line(line)
            if options.as_json:
                screen.json(_place_for_programs(options, port=port, session=loaded.id, models=models))
            notes = GatewayNotes(loaded, models, name=place.folder.name, address=_address(options, port))
            guard = Guard(keys)
            gateway = Gateway(
                models, SessionWatch(loaded, models), guard, site=loaded.executor.site.name,
                most_bytes=options.most_bytes,
                batches=Batches(
                    place.folder / "batches", FileStore(place.folder / "files"), models=options.models.resolve(),
                    session=loaded.id, guard=guard,
                ),
                notes=notes, origins=options.origins,
            )  # fmt: skip
            _run(gateway, listener, options)
            if loaded.over is not None:
                raise SessionError(
                    f"the gateway ends: {loaded.over}; the same command serves again, at the same address"
                )
            screen.line(f"the gateway has ended; session {loaded.id} keeps running: stoker down {loaded.id} ends it")
    return 0


def _run(gateway: Gateway, listener: socket.socket, options: GatewayOptions) -> None:
    config = uvicorn.Config(
        gateway.application(), log_level="warning", access_log=False, lifespan="on", server_header=False,
        timeout_graceful_shutdown=_GRACE_S, timeout_keep_alive=_IDLE_S, ssl_certfile=options.tls_cert or None,
        ssl_keyfile=options.tls_key or None,
    )  # fmt: skip
    server = uvicorn.Server(config)
    gateway.when_over = lambda: setattr(server, "should_exit", True)
    try:
        server.run(sockets=[listener])
    except KeyboardInterrupt:  # uvicorn has ended in good order, and raises the signal again
        pass


def _session(options: GatewayOptions, *, before: str) -> tuple[str, str]:
    named = options.session or ("" if options.site else joined_session())
    if named:
        return named, f"joined session {named}"
    kept = kept_session(options.site or None, before=before, waiting=note)
    if kept.started:
        return kept.session, f"started session {kept.session}, which stays when the gateway ends (stoker down ends it)"
    return kept.session, f"joined session {kept.session}, which was up for this site"


def _refuse_open(options: GatewayOptions, keys: KeyFile) -> None:
    if not options.uds and not is_loopback(options.host) and not keys.exists:
        raise ConfigError(
            f"--host {options.host}: other machines could use your models, and there are no keys; make one first:"
            " stoker serve keys add NAME",
            key="host",
        )


def _refuse_unhonoured(file: Path, settings: Mapping[str, ModelSettings], session: Session) -> None:
    honoured = honoured_by(session)
    for name, each in settings.items():
        asked = {
            "min": ("min_libraries", each.min > 0),
            "max": ("max_libraries", each.max is not None),
            "keep_alive": ("keep_alive", each.keep_alive is not None),
        }
        for setting, (wish, is_set) in asked.items():
            if is_set and honoured is not None and wish not in honoured:
                raise ConfigError(
                    f"{file}: [models.{name}] {setting}: the policy {policy_of(session)} of session {session.id} does"
                    " not honour it; leave it out, or serve from one with another ([policy] name in the site file)."
                    f" The session keeps running: stoker down {session.id} ends it",
                    file=str(file),
                    key=setting,
                )


def _check_tls(options: GatewayOptions) -> None:
    if bool(options.tls_cert) != bool(options.tls_key):
        raise ConfigError("--tls-cert and --tls-key go together", key="tls_cert")
    if options.tls_cert:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(options.tls_cert, options.tls_key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"--tls-cert {options.tls_cert}: cannot be used: {error}", key="tls_cert") from None


def _trouble(models: ServedModels) -> Iterator[str]:
    """Read the folder of each model. Yield a warning for each unusable one."""
    for model in models.values():
        try:
            model.prepare()
        except TryLater as error:
            yield f"  warning: the model {model.name} cannot be used: {error.why}; the others are served"


def _where(options: GatewayOptions, keys: KeyFile, *, port: int, models: ServedModels) -> Iterator[str]:
    address = _address(options, port)
    yield f"  {count(len(models), 'model')}: {', '.join(models)}"
    if options.uds:
        asked = f"{_scheme(options)}://stoker/v1/models"
        yield f"  {address} (a Unix socket, yours alone): curl --unix-socket {address} {asked}"
    else:
        yield f"  {address}/v1     a page: {address}/"
        if is_loopback(options.host):
            yield f"  from your laptop: {tunnel(port)}"
    if keys.exists:
        yield f"  {count(len(keys.read()), 'key')} may ask ({keys.path})"
    elif not options.uds:
        yield "  open: everybody on this machine may ask, until there is a key: stoker serve keys add NAME"


def _place_for_programs(options: GatewayOptions, *, port: int, session: str, models: ServedModels) -> dict[str, Any]:
    """Return the gateway's address as JSON. `base_url`: the URL for OpenAI's clients; None for a Unix socket."""
    address = _address(options, port)
    return {
        "base_url": None if options.uds else f"{address}/v1",
        "page": None if options.uds else f"{address}/",
        "socket": options.uds or None,
        "session": session,
        "pid": os.getpid(),
        "models": list(models),
    }


def _address(options: GatewayOptions, port: int) -> str:
    if options.uds:
        return options.uds
    host = f"[{options.host}]" if ":" in options.host else options.host
    return f"{_scheme(options)}://{host}:{port}"


def _scheme(options: GatewayOptions) -> str:
    return "https" if options.tls_cert else "http"
