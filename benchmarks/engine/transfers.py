"""Compare transfers of a 256 MB object to sixteen pilots on separate hosts and to one pilot, at equal link speed.

Hosts are network namespaces on one switch; `tc tbf` makes the network the limit. Manager, seed and pilots are real;
pilots see no session files. The time is from the first request to the last arrival.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path

from benchmarks.harness import Skipped, end_all, in_turns, ratios, run_side, until
from benchmarks.reliability.recovery import Ended
from benchmarks.starting import keep_state_in
from benchmarks.tables import Bar, Line, Table
from stoker.contexts import payloads
from stoker.contexts.loading import ObjectPath
from stoker.contexts.objects import make_object_ref
from stoker.contexts.recipe import Recipe
from stoker.manager.cli.ask import Observer
from stoker.manager.executor.client import ClientLink
from stoker.manager.executor.outgoing import Submission
from stoker.manager.executor.processes import create_session_folder
from stoker.manager.factory import pilot_command
from stoker.pilot.transfer.fetch import SEED_FILE
from stoker.protocol import show_status
from stoker.protocol.calls import CallOptions
from stoker.protocol.ids import FunctionKey
from stoker.protocol.session import SessionFolder
from stoker.protocol.to_pilot import FunctionBlob

LIMIT_S = 300.0
Started = list[subprocess.Popen[bytes]]


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    if reason := why_not():
        raise Skipped(reason)
    pilots, size, repeats, rate = *((3, 8_000_000, 1) if quick else (16, 256_000_000, 3)), "50mbit"
    sides = {count: partial(run_side, side, pilots=count, size=size, rate=rate) for count in (1, pilots)}
    alone, together = in_turns(sides, repeats, say).values()
    seconds = [found["seconds"] for found in together], [found["seconds"] for found in alone]
    cells = {f"{pilots} pilots": seconds[0], "one pilot": seconds[1], "ratio": ratios(*seconds)}
    read, sent = ([found[name] / size for found in together] for name in ("origin_bytes", "link_bytes"))
    lines = [
        Line(what=f"seconds to {pilots} pilots and to one", cells=cells, bar=Bar(at_most=2.0), digits=1),
        Line(what="copies that pilots read from where it lies", cells={"copies": read}, bar=Bar(at_most=1.1)),
        Line(what="copies that left the link of that host, all else included", cells={"copies": sent}),
    ]
    note = f"{size / 1e6:.0f} MB; each link carries {rate} either way; pilots see no file of the session."
    return Table(lines=lines, notes=[note])


# ---- hosts in network namespaces on one switch

_CLONE_NEWNET = 0x40000000


def why_not() -> str:
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"{tool} is not there; Debian's iproute2 brings it"
    probe = f"probe-{os.getpid()}"
    done = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if done.returncode:
        return f"no network namespace can be made here: {done.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], check=False)
    return ""


class Network:
    """`count` hosts from 0, each with a link of `rate` (in `tc` syntax) in both directions."""

    def __init__(self, count: int, *, rate: str) -> None:
        self._count, self._rate = count, rate
        self._mark = f"b{os.getpid()}"
        self._switch = f"{self._mark}-switch"

    def __enter__(self) -> Network:
        try:
            _output("ip", "netns", "add", self._switch)
            _in(self._switch, "ip", "link", "add", "br0", "type", "bridge")
            _in(self._switch, "ip", "link", "set", "br0", "up")
            for number in range(self._count):
                self._connect_namespace(number)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in (*map(self.name, range(self._count)), self._switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def name(self, number: int) -> str:
        return f"{self._mark}-{number}"

    def address(self, number: int) -> str:
        return f"10.78.{number // 200}.{number % 200 + 1}"

    def command(self, number: int, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.name(number), *words]

    def enter(self, number: int) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.name(number)}", "rb") as namespace:
            if library.setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter {self.name(number)}")

    def sent_bytes(self, number: int) -> int:
        return int(_output(*self.command(number, "cat", "/sys/class/net/eth0/statistics/tx_bytes")))

    def isolate(self, *numbers: int) -> None:
        for number in numbers:
            _in(self._switch, "ip", "link", "set", f"v{number}", "type", "bridge_slave", "isolated", "on")

    def _connect_namespace(self, number: int) -> None:
        name, port = self.name(number), f"v{number}"
        _output("ip", "netns", "add", name)
        _in(name, "ip", "link", "set", "lo", "up")
        _in(self._switch, "ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
        _in(self._switch, "ip", "link", "set", port, "master", "br0", "up")
        _in(name, "ip", "address", "add", f"{self.address(number)}/16", "dev", "eth0")
        _in(name, "ip", "link", "set", "eth0", "up")
        for namespace, device in ((name, "eth0"), (self._switch, port)):
            _in(
                namespace, "tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", self._rate, "burst", "256kb",
                "latency", "60ms",
            )  # fmt: skip


def _in(namespace: str, *words: str) -> None:
    _output("ip", "netns", "exec", namespace, *words)


def _output(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


# ---- one side

HEAD = 0
_HERE = re.compile(
    r"^(\S+ \S+) INFO file-\S+ arrived: (\d+) bytes from its origin, (\d+) from peers, ([0-9.]+) s$", re.M
)


def _length(path: str) -> int:
    return os.path.getsize(path)


def _sleep_with_argument(length: int, seconds: float) -> int:
    time.sleep(seconds)
    return length


def side(pilots: int, size: int, rate: str, parted: bool = False) -> dict[str, object]:
    """Send an object of `size` bytes. `parted`: pilots cannot reach each other."""
    os.umask(0o077)
    with tempfile.TemporaryDirectory(prefix="transfers-") as place, Network(pilots + 1, rate=rate) as network:
        keep_state_in(place)
        network.enter(HEAD)
        started: Started = []
        if parted:
            network.isolate(*range(1, pilots + 1))
        try:
            return _measure(Path(place), network, started, pilots=pilots, size=size)
        finally:
            end_all(started, limit_s=20)


def _measure(place: Path, network: Network, started: Started, *, pilots: int, size: int) -> dict[str, object]:
    folder = SessionFolder(place / "session")
    (place / "files").mkdir()
    create_session_folder(folder)
    manager = ["stoker.manager.main", "--session", str(folder.path), "--interface", network.address(HEAD)]
    started.append(_start(place, "manager", *manager))
    until(folder.file.exists, LIMIT_S, "the manager")
    started.append(_start(place, "seed", "stoker.pilot.transfer.seed", "--session", str(folder.path)))
    until((folder.path / SEED_FILE).exists, LIMIT_S, "the seed")
    link = ClientLink(folder)
    try:
        link.wait_joined(LIMIT_S)
        homes = [_start_pilot(place, folder, network, number, started) for number in range(1, pilots + 1)]
        until(lambda: all(list(home.glob("pilots/*/pilot.log")) for home in homes), LIMIT_S, "the pilots")
        time.sleep(2.0 + 0.3 * pilots)  # Wait until the interpreters have started.
        before = network.sent_bytes(HEAD)
        submission = _submission(place, size)
        arguments = payloads.dumps(((2.0,), {}))
        for _ in range(6 * pilots):
            link.submit(submission, arguments, Ended())
        arrivals = until(lambda: _arrivals(homes), LIMIT_S, "the object on all hosts", every_s=0.05)
        sent = network.sent_bytes(HEAD) - before
        with Observer(folder) as observer:
            status = observer.status()
    finally:
        link.close()
    return {
        "seconds": max(end for end, *_ in arrivals) - min(end - seconds for end, *_, seconds in arrivals),
        "origin_bytes": sum(origin for _, origin, _, _ in arrivals),
        "peer_bytes": sum(peers for _, _, peers, _ in arrivals),
        "link_bytes": sent,
        "status": "\n".join(show_status.render(status)),
    }


def _start(
    place: Path, name: str, module: str, *options: str, before: list[str] | None = None
) -> subprocess.Popen[bytes]:
    with open(place / f"{name}.log", "ab") as log:
        command = [*(before or []), sys.executable, "-P", "-m", module, *options]
        return subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=place)


def _start_pilot(place: Path, folder: SessionFolder, network: Network, number: int, started: Started) -> Path:
    home = place / f"host-{number}"
    block = f"b{number}"
    pilot_command.issue_block_key(folder, block)
    (home / "keys" / "blocks").mkdir(parents=True)
    for name in ("session.json", SEED_FILE, f"keys/blocks/{block}.json", "keys/transfer.json"):
        shutil.copy(folder.path / name, home / name)
    (home / "copied").touch()
    options = ["--session", str(home), "--scratch", str(home / "scratch"), "--devices", "cpu:1", "--block", block]
    hidden = f"mount --bind '{home / 'keys'}' '{place / 'files'}' && exec \"$@\""  # hide the client's files from pilots
    on_host = network.command(number, "sh", "-c", hidden, "sh")
    started.append(_start(place, f"pilot-{number}", "stoker.pilot.main", *options, before=on_host))
    return home


def _submission(place: Path, size: int) -> Submission:
    path = place / "files" / "weights.bin"
    with path.open("wb") as file:
        while size > 0:
            file.write(os.urandom(min(size, 1 << 22)))
            size -= 1 << 22
    ref = make_object_ref(path)
    loader = payloads.dumps((_length, (ObjectPath(ref.name),), {}))
    recipe = Recipe(key=hashlib.sha256(loader).hexdigest()[:12], name="weights", loader=loader, objects=(ref,))
    blob = payloads.dumps((_sleep_with_argument, True))
    function = FunctionBlob(key=FunctionKey(hashlib.sha256(blob).hexdigest()), name="stay", blob=blob)
    return Submission(function, recipe, CallOptions())


def _arrivals(homes: list[Path]) -> list[tuple[float, int, int, float]]:
    found = []
    for home in homes:
        text = "".join(log.read_text() for log in home.glob("pilots/*/pilot.log"))
        said = _HERE.search(text)
        if said is None:
            return []
        at = datetime.strptime(said[1], "%Y-%m-%d %H:%M:%S,%f").timestamp()
        found.append((at, int(said[2]), int(said[3]), float(said[4])))
    return found
