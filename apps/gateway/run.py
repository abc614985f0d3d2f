"""Run one gateway. When the gateway ends, the session keeps its models loaded.

Each pair of a site file and a models file has a folder. The folder contains the gateway's port and session, and a lock
against a second gateway.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import ssl
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import msgspec

import stoker
from stoker.apps.common.batch_state import read_json
from stoker.apps.common.calls import format_session_line
from stoker.apps.common.command_line import format_count
from stoker.apps.common.models_file import ModelSettings, read_models
from stoker.apps.common.openai_requests import RequestRefused
from stoker.apps.gateway.batch_files import FileStore
from stoker.apps.gateway.batches import GatewayBatches
from stoker.apps.gateway.http import GatewayApplication, keep_gateway_note_updated
from stoker.apps.gateway.keys import KeyFile, KeyGuard
from stoker.apps.gateway.listening import ListeningAddress, open_listener, run_server
from stoker.apps.gateway.served import ServedModels, SessionWatch
from stoker.apps.gateway.usage import UsageFile, UsageRecorder
from stoker.apps.gateway.workers import GatewayWorkers, WorkerTask
from stoker.console import Screen, note
from stoker.contexts import state_folder
from stoker.errors import ConfigError, SessionError
from stoker.run_folder import write_whole
from stoker.sessions import Session, honoured_by, joined_session, kept_session, policy_of


class GatewayState(msgspec.Struct, frozen=True):
    port: int = 0
    session: str = ""
    pid: int = 0


class GatewayFolder:
    """A gateway's folder. `site`: site file, or empty for this machine."""

    def __init__(self, site: str, models: Path) -> None:
        named = "\n".join([str(Path(site).resolve()) if site else "", str(models.resolve())])
        digest = hashlib.sha256(named.encode()).hexdigest()[:12]
        self.folder = state_folder() / "serve" / f"{models.stem}-{digest}"
        self._file = self.folder / "gateway.json"
        self._lock: int | None = None

    def lock_and_read_state(self) -> GatewayState:
        """Lock the folder and read its state. Raises SessionError if another gateway holds the lock."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(self.folder / "gateway.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        state = read_json(self._file, GatewayState) or GatewayState()
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            where = f"at port {state.port} " if state.port else ""
            raise SessionError(f"a gateway for these files runs already {where}(pid {state.pid})") from None
        except OSError:  # without file locks, a second gateway fails because the port is in use
            pass
        return state

    def find_ports_of_other_gateways(self) -> frozenset[int]:
        others = (file for file in self.folder.parent.glob("*/gateway.json") if file != self._file)
        return frozenset(state.port for file in others if (state := read_json(file, GatewayState)) is not None)

    def write_state(self, state: GatewayState) -> None:
        write_whole(self.folder, msgspec.json.encode(state), name=self._file.name)


def run_gateway(
    file: Path, *, site: str, host: str, port: int, uds: str, tls_cert: str, tls_key: str, session: str,
    origins: tuple[str, ...], most_bytes: int, number: int, as_json: bool,
) -> int:  # fmt: skip
    """Serve the models of `file`. An empty text or a port of 0 selects the default; `number`: number of workers."""
    screen, settings, keys = Screen(json_only=as_json), read_models(file), KeyFile.at_default_path()
    _check_tls(tls_cert, tls_key)
    place = GatewayFolder(site, file)
    state, scheme = place.lock_and_read_state(), "https" if tls_cert else "http"
    others = place.find_ports_of_other_gateways()
    listener = open_listener(host, port, uds, keys=keys, scheme=scheme, last_port=state.port, excluded_ports=others)
    with listener.socket:
        session, how = _join_or_start_session(site, session, before=state.session)
        with stoker.load(session=session) as loaded:
            place.write_state(GatewayState(port=listener.port or state.port, session=loaded.id, pid=os.getpid()))
            _refuse_unsupported_settings(file, settings, loaded)
            models = ServedModels(settings, honoured=honoured_by(loaded) or frozenset())
            screen.line(format_session_line(loaded))
            screen.line(f"  {how}")
            for model in models.values():
                try:
                    model.prepare_recipe()
                except RequestRefused as error:
                    screen.line(f"  warning: the model {model.name} cannot be used: {error.why}; the others are served")
            for line in _format_address_lines(listener, keys, models):
                screen.line(line)
            if as_json:
                url = None if uds else listener.address
                screen.json(
                    {
                        "base_url": url and f"{url}/v1", "page": url and f"{url}/", "socket": uds or None,
                        "session": loaded.id, "pid": os.getpid(), "models": list(models),
                    }
                )  # fmt: skip
            guard, usage = KeyGuard(keys), UsageRecorder(UsageFile.at_default_path())
            workers = None
            if number > 1:
                task = WorkerTask(
                    parent=os.getpid(), listener=listener.socket.fileno(), session=loaded.id, settings=settings,
                    most_bytes=most_bytes, origins=origins,
                    tls=(tls_cert, tls_key) if tls_cert else None,
                )  # fmt: skip
                workers = GatewayWorkers(task, number=number, models=models, guard=guard)
            keeping = partial(
                keep_gateway_note_updated, loaded, models,
                name=place.folder.name, address=listener.address, workers=workers,
            )  # fmt: skip
            gateway = GatewayApplication(
                models, SessionWatch(loaded, models), guard, site=loaded.executor.site.name,
                most_bytes=most_bytes,
                batches=GatewayBatches(
                    place.folder / "batches", FileStore(place.folder / "files"), models=file.resolve(),
                    session=loaded.id, guard=guard, usage=usage, names=tuple(models),
                ),
                keeps=[keeping], origins=origins, usage=usage, workers=workers,
            )  # fmt: skip
            if workers is None:
                tls = {"ssl_certfile": tls_cert or None, "ssl_keyfile": tls_key or None}
                run_server(gateway, listener.socket, **tls)
            else:
                run_server(gateway)
            if loaded.over is not None:
                raise SessionError(
                    f"the gateway ends: {loaded.over}; to serve again at the same address, run the same command"
                )
            screen.line(f"the gateway has ended; session {loaded.id} keeps running: stoker down {loaded.id} ends it")
    return 0


def _join_or_start_session(site: str, named: str, *, before: str) -> tuple[str, str]:
    named = named or ("" if site else joined_session())
    if named:
        return named, f"joined session {named}"
    kept = kept_session(site or None, before=before, waiting=note)
    if kept.started:
        how = f"started session {kept.session}, which keeps running when the gateway exits (stoker down ends it)"
    else:
        how = f"joined session {kept.session}, which was already running for this site"
    return kept.session, how


def _refuse_unsupported_settings(file: Path, settings: Mapping[str, ModelSettings], session: Session) -> None:
    honoured = honoured_by(session)
    for name, each in settings.items():
        for setting, value, wish in (
            ("min", each.min or None, "min_libraries"), ("max", each.max, "max_libraries"),
            ("keep_alive", each.keep_alive, "keep_alive"),
        ):  # fmt: skip
            if value is not None and honoured is not None and wish not in honoured:
                raise ConfigError(
                    f"{file}: [models.{name}] {setting}: the policy {policy_of(session)} of session {session.id} does"
                    " not honour it; leave it out, or name another policy ([policy] name in the site file)."
                    f" The session keeps running: stoker down {session.id} ends it",
                    file=str(file), key=setting,
                )  # fmt: skip


def _check_tls(tls_cert: str, tls_key: str) -> None:
    if bool(tls_cert) != bool(tls_key):
        raise ConfigError("--tls-cert and --tls-key need each other; give both", key="tls_cert")
    if tls_cert:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tls_cert, tls_key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"--tls-cert {tls_cert}: cannot be used: {error}", key="tls_cert") from None


def _format_address_lines(listener: ListeningAddress, keys: KeyFile, models: ServedModels) -> Iterator[str]:
    yield f"  {format_count(len(models), 'model')}: {', '.join(models)}"
    yield from listener.format_help_lines(f"{listener.address}/v1     a page: {listener.address}/", path="/v1/models")
    if keys.exists:
        yield f"  {format_count(len(keys.read_current().keys), 'key')} accepted ({keys.path})"
    elif listener.port:
        yield "  no keys: everybody on this machine may send requests; stoker serve keys add NAME creates a key"
