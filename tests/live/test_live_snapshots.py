"""Test snapshots that a pilot fetches from another pilot. Processes have separate disks and a shared home."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from live.peers import Manager, Peer, Peers, until
from tiny_encoder import write_tiny_encoder

from stoker.contexts import context, encoder, payloads
from stoker.contexts.folders import SNAPSHOTS
from stoker.contexts.recipe import Recipe
from stoker.protocol import to_client
from stoker.protocol import to_manager as say
from stoker.protocol.calls import CallOptions, CallSpec
from stoker.protocol.session import KeyPair, SessionFolder

FORM = "file-abc-plain-1"


@context()
def kept(told: str, made_s: float) -> str:
    """Load a context that supports snapshots; record in `told` how each pilot loaded the context."""
    from stoker.contexts import ambient
    from stoker.contexts.folders import snapshot_folder

    pilot, notes = os.environ["STOKER_PILOT"], Path(told)
    own, came = snapshot_folder() / FORM, ambient.local_path(FORM)
    if (own / "words").is_file():
        how = f"found: {(own / 'words').read_text()}"
        ambient.offer_snapshot(FORM, own, made_s=made_s)
    elif (came / "words").is_file():
        how = f"had from a peer: {(came / 'words').read_text()}"
    else:
        own.mkdir(parents=True)
        (own / "words").write_text(f"made on {pilot}")
        (own / "rest").write_bytes(b"\0" * (9 << 20))
        ambient.offer_snapshot(FORM, own, made_s=made_s)
        how = "made here"
    (notes / pilot).write_text(how)
    return how


@context(files=("path",))
def length(path: str) -> int:
    return os.path.getsize(path)


class Hosts:
    """A manager, a client, and pilots on hosts that share only the session folder and the home folder."""

    def __init__(self, folder: SessionFolder, client: Peer, path: Path) -> None:
        self.folder, self.client, self.path = folder, client, path
        self.home = path / "home"
        self.pilots: dict[str, subprocess.Popen[bytes]] = {}
        self.calls = 0
        self.told = path

    def disk(self, host: str) -> Path:
        return self.path / host / f"stoker-{os.getuid()}"

    def pilot(self, *options: str, host: str = "") -> str:
        """Start a pilot on `host` (default: a new host) without a folder of snapshots; return its name."""
        disk, before = self.path / (host or f"host-{len(self.pilots)}"), set(self.names())
        own = {name: value for name, value in os.environ.items() if name != SNAPSHOTS}
        command = [sys.executable, "-m", "stoker.pilot.main", "--session", str(self.folder.path), "--devices", "cpu:1"]
        command += ["--scratch", str(disk), *options]
        process = subprocess.Popen(command, env=own | {"STOKER_HOME": str(self.home)})
        [name] = until(lambda: set(self.names()) - before, seconds=60, what="a pilot joining")
        self.pilots[name] = process
        return name

    def names(self) -> list[str]:
        return [pilot.pilot for pilot in self.client.status().pilots]

    def keeping(self, *options: str, host: str = "", made_s: float = 60.0) -> tuple[str, Recipe]:
        """Start the first pilot, which makes and offers the snapshot of a context; return its name and the context."""
        self.told = self.path / "told"
        self.told.mkdir()
        recipe = kept(str(self.told), made_s)
        self.define(recipe, lambda words: words)
        first = self.pilot(*options, host=host)
        self.call(recipe)
        self.offered(first, objects=1)
        assert self.how(first) == "made here"
        return first, recipe

    def how(self, name: str) -> str:
        return (self.told / name).read_text() if (self.told / name).exists() else ""

    def define(self, recipe: Recipe, function: Callable[[Any], Any]) -> None:
        code = payloads.dumps((function, True))
        self.client.send(say.DefineRecipe(recipe), say.DefineFunction("f", "f", code))  # type: ignore[arg-type]

    def call(self, recipe: Recipe, *, pilots: int = 1, seconds: float = 60.0) -> None:
        spec = CallSpec(self.calls, payloads.dumps(((), {})))  # type: ignore[arg-type]
        self.calls += 1
        options = CallOptions(gang=(pilots, pilots))
        self.client.send(say.Submit("f", recipe.key, [spec], options))  # type: ignore[arg-type]
        results = self.client.hear(to_client.Results, seconds=seconds)
        assert results.ends[0].ok, results.ends[0].failure

    def offered(self, name: str, *, objects: int) -> None:
        until(
            lambda: next(pilot.objects for pilot in self.client.status().pilots if pilot.pilot == name) >= objects,
            seconds=60,
            what="the snapshot being offered",
        )

    def end(self, name: str) -> None:
        process = self.pilots.pop(name)
        process.terminate()
        process.wait(20)
        until(lambda: name not in self.names(), seconds=30, what="the pilot's end")

    def close(self) -> None:
        self.client.send(say.EndSession("the test is over"))
        for process in self.pilots.values():
            process.send_signal(signal.SIGCONT)
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture
def hosts(folder: SessionFolder, peers: Peers, tmp_path: Path) -> Iterator[Hosts]:
    folder.write_key("transfer", KeyPair(public="", secret=secrets.token_hex(32)))
    with closing(Manager(folder)), closing(Hosts(folder, peers("client"), tmp_path)) as made:
        yield made


def test_pilots_of_one_host_share_a_fetched_snapshot(hosts: Hosts) -> None:
    first, recipe = hosts.keeping()
    others = [hosts.pilot(host="shared"), hosts.pilot(host="shared")]
    hosts.call(recipe, pilots=3)
    assert [hosts.how(name) for name in others] == [f"had from a peer: made on {first}"] * 2
    logs = [(hosts.folder.pilot_folder(name) / "pilot.log").read_text() for name in others]
    # one pilot found the object in the shared cache and fetched nothing
    assert sorted(", 0 from peers" in log for log in logs) == [False, True]
    hosts.offered(others[0], objects=1)
    # the shared home contains no snapshot
    assert not (hosts.home / "snapshots").exists()


@pytest.mark.long
def test_next_pilot_of_a_host_finds_the_snapshot_until_eviction(hosts: Hosts, tmp_path: Path) -> None:
    first, recipe = hosts.keeping("--cache-size", "16 MB", host="node")
    snapshot = hosts.disk("node") / "snapshots" / FORM
    assert (snapshot / "rest").stat().st_nlink == 2  # the cache has a hard link to the file
    hosts.end(first)
    second = hosts.pilot("--cache-size", "16 MB", host="node")
    hosts.call(recipe)
    assert hosts.how(second) == f"found: made on {first}"
    (tmp_path / "other").write_bytes(os.urandom(9 << 20))
    other = length(str(tmp_path / "other"))
    hosts.define(other, lambda size: size)
    hosts.call(other)
    until(lambda: not snapshot.exists(), seconds=30, what="the snapshot going")


def test_wait_for_a_snapshot_is_limited_to_its_creation_time(hosts: Hosts) -> None:
    first, recipe = hosts.keeping(made_s=1.0)
    second = hosts.pilot()
    hosts.pilots[first].send_signal(signal.SIGSTOP)  # the paused pilot serves nothing, and the manager gets no notice
    spec = CallSpec(hosts.calls, payloads.dumps(((), {})))  # type: ignore[arg-type]
    hosts.client.send(say.Submit("f", recipe.key, [spec], CallOptions(gang=(2, 2))))  # type: ignore[arg-type]
    until(lambda: hosts.how(second), what="the second pilot loading")
    assert hosts.how(second) == "made here"


@pytest.mark.long
@pytest.mark.slow
def test_model_is_compiled_once_for_all_pilots(hosts: Hosts, tmp_path: Path) -> None:
    for name in ("torch", "transformers"):
        pytest.importorskip(name)
    told = tmp_path / "told"
    told.mkdir()
    write_tiny_encoder(tmp_path / "tiny")
    recipe = encoder(tmp_path / "tiny", length=8, compiled=True, threads=1)

    def tell(model: Any) -> None:
        model.embed(["water boils"])
        (told / os.environ["STOKER_PILOT"]).write_text(model.origin)

    hosts.define(recipe, tell)
    first = hosts.pilot()
    hosts.call(recipe, seconds=240)
    hosts.offered(first, objects=2)
    second = hosts.pilot()
    hosts.call(recipe, pilots=2, seconds=180)
    assert (told / first).read_text().startswith("just compiled in")
    assert (told / second).read_text().startswith("another pilot compiled it in")
    assert not list((hosts.disk("host-1") / "snapshots").glob("compiled-*"))  # this host compiled nothing
