"""A manager that tests control, with a real ROUTER socket, CURVE keys and real pilot processes."""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import zmq
import zmq.auth
from free_port import keep_port, listen_at
from zmq.auth.thread import ThreadAuthenticator

from stoker.contexts import payloads
from stoker.contexts.objects import make_object_ref
from stoker.contexts.recipe import ObjectRef, Recipe
from stoker.pilot.transfer.fetch import SEED_FILE
from stoker.protocol import wire
from stoker.protocol.calls import INLINE_LIMIT_BYTES, CallEnd, CallOptions, CallSpec
from stoker.protocol.session import KeyPair, SessionFile, SessionFolder
from stoker.protocol.to_manager import (
    CallsEnded,
    FetchFailed,
    Heartbeat,
    LibraryGone,
    LibraryReady,
    PilotHello,
    WantObjects,
)
from stoker.protocol.to_pilot import (
    Ack,
    FetchObject,
    FunctionBlob,
    HelloAgain,
    PilotWelcome,
    RunCalls,
    StartLibrary,
    StopLibrary,
)
from stoker.protocol.wire import Inbox

WAIT_S = 60.0
TRANSFER_KEY = bytes(range(32))


def recipe(loader: Callable[..., Any] | None = None, *args: Any, **more: Any) -> Recipe:
    blob = payloads.dumps((loader, args, {})) if loader is not None else b""
    key = hashlib.sha256(blob + repr(sorted(more.items())).encode()).hexdigest()[:12]
    return Recipe(key=key, name=f"test-{key[:4]}", loader=blob, **more)


def function(call: Callable[..., Any], *, takes_context: bool = False) -> FunctionBlob:
    blob = payloads.dumps((call, takes_context))
    return FunctionBlob(key=hashlib.sha256(blob).hexdigest(), name=call.__name__, blob=blob)


class FakeManager:
    """The manager side of one pilot. `lease_s`: the pilot exits after these seconds without its manager."""

    def __init__(self, folder: Path, *, lease_s: float = 20) -> None:
        self.folder = SessionFolder(folder / "session")
        self.folder.create_folders()
        self.base = folder
        self.keys: dict[str, KeyPair] = {}
        for role in ("server", "client", "pilot"):
            public, secret = zmq.curve_keypair()
            self.keys[role] = KeyPair(public.decode(), secret.decode())
            self.folder.write_key(role, self.keys[role])
        self.acks = True
        self.lease_s = lease_s
        self.said: list[Any] = []
        self.hellos: list[PilotHello] = []
        self.heartbeats: list[Heartbeat] = []
        self.peer = b""
        self.inbox = Inbox()
        self.welcomes = True
        self.plans = True
        """True if the manager answers object requests at once with the source."""
        self.wanted: list[ObjectRef] = []
        self._decode = wire.from_pilot_decoder()
        self._context = zmq.Context()
        self._auth = ThreadAuthenticator(self._context)
        self._auth.start()
        self._auth.configure_curve(domain="*", location=zmq.auth.CURVE_ALLOW_ANY)
        self._port = keep_port()
        self._endpoint = f"tcp://127.0.0.1:{self._port.getsockname()[1]}"
        self.listen()
        self.pilots: list[subprocess.Popen[bytes]] = []
        self._calls = 0
        self._sent_functions: set[tuple[int, str]] = set()
        self._running: set[int] = set()
        self._last_library = self._earlier = 0
        """The last library number in the pilot, now and before this test."""

    def take_key(self) -> None:
        """Give pilots a transfer key, and answer object requests only when the test says so."""
        self.folder.write_key("transfer", KeyPair(public="", secret=TRANSFER_KEY.hex()))
        self.plans = False

    def listen(self) -> None:
        router = self._context.socket(zmq.ROUTER)
        router.linger = 0
        router.router_handover = True
        router.sndhwm = router.rcvhwm = 0
        router.curve_server = True
        router.curve_publickey = self.keys["server"].public.encode()
        router.curve_secretkey = self.keys["server"].secret.encode()
        listen_at(self._endpoint, router)
        self.socket = router
        server = self.keys["server"].public
        self.folder.write(SessionFile(session="test", protocol=wire.VERSION, address=self._endpoint, server_key=server))

    def hang_up(self) -> None:
        """Stop listening until `listen`. The port stays reserved."""
        self.socket.close()

    # ---- pilots

    def start_pilot(
        self, *arguments: str, folder: Path | None = None, settings: str = "", **environment: str
    ) -> subprocess.Popen[bytes]:
        begin = ["-c", f"{settings}; from stoker.pilot.main import main; raise SystemExit(main())"]
        pilot = subprocess.Popen(
            [sys.executable, *(begin if settings else ["-m", "stoker.pilot.main"]),
             "--session", str(self.folder.path), "--scratch", str(self.base / "scratch"),
             *(arguments or ("--devices", "cpu:2"))],
            env={**os.environ, **environment},
            cwd=folder or self.base,
        )  # fmt: skip
        self.pilots.append(pilot)
        return pilot

    def close(self) -> None:
        """End every pilot and check that no process or file is left."""
        trees = [descendants(pilot.pid) for pilot in self.pilots]
        for pilot in self.pilots:
            if pilot.poll() is None:
                pilot.send_signal(signal.SIGTERM)
        for pilot, tree in zip(self.pilots, trees, strict=True):
            try:
                until = time.monotonic() + WAIT_S
                while pilot.poll() is None and time.monotonic() < until:
                    if self.socket.closed or not self.receive(0.02):
                        time.sleep(0.005)
                pilot.wait(1)
            finally:
                pilot.kill()
                pilot.wait()
            assert gone(tree), (
                f"left behind: {[psutil.Process(pid).cmdline() for pid in tree if psutil.pid_exists(pid)]}"
            )
        self.socket.close()
        self._auth.stop()
        self._context.term()
        self._port.close()
        left = list((self.base / "scratch").glob("stoker-*/pilot-*"))
        assert not left, left
        shutil.rmtree(self.base / "scratch", ignore_errors=True)

    # ---- talking

    def send(self, *messages: Any) -> None:
        """Send orders. Each test numbers its libraries from 1; this method adds the last number of earlier tests."""
        orders = [
            msgspec.structs.replace(each, library=each.library + self._earlier) if hasattr(each, "library") else each
            for each in messages
        ]
        started = {each.library for each in orders if isinstance(each, StartLibrary)}
        self._running |= started
        self._last_library = max(self._last_library, *started, 0)
        self.socket.send_multipart([self.peer, wire.encode(orders)])

    def _with_own_numbers(self, message: Any) -> Any:
        """Translate library numbers back to those of the test; return None for a library of another test."""
        if isinstance(message, Heartbeat | PilotHello):
            return msgspec.structs.replace(message, libraries=(*filter(None, map(self._own, message.libraries)),))
        if isinstance(message, LibraryGone):
            self._running.discard(message.library)
            message = msgspec.structs.replace(message, failure=message.failure and self._own(message.failure))
        return self._own(message) if hasattr(message, "library") else message

    def _own(self, message: Any) -> Any:
        if not message.library or not self._earlier:  # a failure may concern no library
            return message
        own = message.library - self._earlier
        return msgspec.structs.replace(message, library=own) if own > 0 else None

    def begin_test(self) -> None:
        """Stop the libraries of earlier tests on this pilot, and forget all messages."""
        for number in sorted(self._running):
            self.send(StopLibrary(library=number - self._earlier, reason="the test is over"))  # type: ignore[arg-type]
        self.until(lambda: not self._running, what="the libraries of the last test to end")
        self._earlier = self._last_library
        self._sent_functions.clear()
        for messages in (self.said, self.heartbeats, self.wanted):
            messages.clear()

    def receive(self, timeout_s: float) -> bool:
        if not self.socket.poll(timeout_s * 1000):
            return False
        peer, data = self.socket.recv_multipart()
        frame = self._decode(data)
        self.peer = peer
        if not self.inbox.accept(frame.sequence):
            return True
        for message in filter(None, map(self._with_own_numbers, frame.messages)):
            if isinstance(message, PilotHello):
                self.hellos.append(message)
                if self.welcomes:
                    self.send(PilotWelcome(session="test", heartbeat_s=0.5, lease_s=self.lease_s))
            elif isinstance(message, WantObjects):
                self.wanted += message.objects
                self.send(*(FetchObject(ref, origin=True) for ref in message.objects if self.plans))
            elif isinstance(message, FetchFailed) and message.origin and self.plans:
                self.send(FetchObject(ObjectRef(message.name, 0)))  # no sources: no other copy exists
            elif isinstance(message, Heartbeat):
                self.heartbeats.append(message)
            else:
                self.said.append(message)
        if frame.sequence and self.acks:
            self.send(Ack(frame.sequence))
        return True

    def until(self, found: Callable[[], Any], *, what: str = "", wait_s: float = WAIT_S) -> Any:
        end = time.monotonic() + wait_s
        while True:
            got = found()
            if got:
                return got
            if time.monotonic() > end:
                raise AssertionError(f"waited {wait_s} s for {what or found}; it said {self.said}\n{self.logs()}")
            self.receive(0.05)

    def wait_for(self, kind: type, *, wait_s: float = WAIT_S, **fields: Any) -> Any:
        def search() -> Any:
            for message in self.said:
                if type(message) is kind and all(getattr(message, name) == value for name, value in fields.items()):
                    return message
            return None

        return self.until(search, what=f"{kind.__name__} {fields}", wait_s=wait_s)

    def hello(self) -> PilotHello:
        return self.until(lambda: self.hellos and self.hellos[-1], what="hello")

    def settle(self) -> None:
        """Wait until the pilot has read all sent messages, by requesting another hello."""
        known = len(self.hellos)
        self.send(HelloAgain(self.inbox.last))
        self.until(lambda: len(self.hellos) > known, what="a hello that confirms all messages")

    def logs(self) -> str:
        return "\n".join(f"{path}:\n{path.read_text()[-3000:]}" for path in self.folder.path.glob("pilots/*/*.log"))

    # ---- libraries and calls

    def start(self, made: Recipe, *, library: int = 1, devices: tuple[str, ...] = ("cpu:0",), **more: Any) -> None:
        if not self.peer:
            self.hello()
        self.send(StartLibrary(library=library, recipe=made, devices=devices, **more))

    def ready(self, made: Recipe, *, library: int = 1, **more: Any) -> LibraryReady:
        self.start(made, library=library, **more)
        return self.wait_for(LibraryReady, library=library)

    def run(
        self,
        call: Callable[..., Any] | FunctionBlob,
        arguments: list[tuple[Any, ...]],
        *,
        library: int = 1,
        options: CallOptions | None = None,
        takes_context: bool = False,
        blob: bool | None = None,
        ids: list[int] | None = None,
    ) -> list[int]:
        """Send calls with new ids, or with `ids` to repeat calls; return the ids."""
        sent = call if isinstance(call, FunctionBlob) else function(call, takes_context=takes_context)
        specs = []
        for id, one in zip(ids or itertools.count(self._calls + 1), arguments, strict=False):
            self._calls = max(self._calls, id)
            specs.append(CallSpec(call=id, payload=self._payload(one)))  # type: ignore[arg-type]
        fresh = (library, sent.key) not in self._sent_functions if blob is None else blob
        self._sent_functions.add((library, sent.key))
        self.send(
            RunCalls(
                library=library,
                function=sent.key,
                calls=specs,
                options=options or CallOptions(),
                function_blob=sent if fresh else None,
            )
        )
        return [spec.call for spec in specs]

    def _payload(self, arguments: tuple[Any, ...]) -> bytes | ObjectRef:
        data = payloads.dumps((arguments, {}))
        if len(data) <= INLINE_LIMIT_BYTES:
            return data
        draft = self.folder.objects / f"draft-{self._calls}"
        draft.write_bytes(data)
        ref = make_object_ref(draft, digest_cache_file=self.base / "memo")
        path = draft.rename(self.folder.objects / f"{ref.name}~ana")  # the name has the format that a client uses
        return ObjectRef(name=ref.name, size_bytes=ref.size_bytes, source=str(path))

    def ends(self) -> dict[int, CallEnd]:
        return {end.call: end for message in self.said if type(message) is CallsEnded for end in message.ends}

    def results(self, calls: list[int], *, wait_s: float = WAIT_S) -> list[Any]:
        self.until(lambda: set(calls) <= set(self.ends()), what=f"calls {calls[:3]}...", wait_s=wait_s)
        ends = self.ends()
        out: list[Any] = []
        for call in calls:
            end = ends[call]
            data: Any = end.payload
            if isinstance(data, ObjectRef):
                data = Path(data.source).read_bytes()
            out.append(payloads.loads(data) if end.ok else end.failure or payloads.load_exception(data))
        return out

    def gone(self, library: int = 1, *, wait_s: float = WAIT_S) -> LibraryGone:
        return self.wait_for(LibraryGone, library=library, wait_s=wait_s)


@contextmanager
def carried_session(manager: FakeManager, folder: Path) -> Iterator[Path]:
    """Start the seed of the session, and copy the files of a job without shared files."""
    seed = subprocess.Popen(
        [sys.executable, "-P", "-m", "stoker.pilot.transfer.seed", "--session", str(manager.folder.path)]
    )
    try:
        manager.until((manager.folder.path / SEED_FILE).exists, what="the seed")
        copy = SessionFolder(folder / "session")
        copy.key_file("pilot").parent.mkdir(parents=True)
        for name in ("session.json", SEED_FILE, "keys/pilot.json", "keys/transfer.json"):
            shutil.copy(manager.folder.path / name, copy.path / name)
        (copy.path / "copied").touch()
        yield copy.path
    finally:
        seed.kill()
        seed.wait()


def descendants(pid: int) -> list[int]:
    try:
        top = psutil.Process(pid)
        return [pid, *(child.pid for child in top.children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def gone(pids: list[int], *, wait_s: float = WAIT_S) -> bool:
    until = time.monotonic() + wait_s
    while any(alive(pid) for pid in pids):
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
