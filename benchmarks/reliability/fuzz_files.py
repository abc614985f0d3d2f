"""List every reader of bytes: messages between processes, and files of a session."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import socket
import struct
import tarfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.reliability.fuzz_inputs import Target, value_of
from stoker.config import format_site_toml, load_site, parse_site
from stoker.contexts import manifest
from stoker.contexts.objects import Published
from stoker.decoding import UNREADABLE
from stoker.errors import ConfigError, ProtocolError, SessionError, StokerError
from stoker.manager.core.events import Event
from stoker.manager.factory.batch import BatchTrouble
from stoker.manager.factory.condor_ads import parse_job_ads
from stoker.manager.live import journal, lease
from stoker.pilot.library import connection
from stoker.pilot.starter import main
from stoker.pilot.starter.place import StartError, unpack
from stoker.pilot.transfer import fetch, meeting
from stoker.pilot.transfer import wire as transfer
from stoker.pilot.zygote import client, server
from stoker.protocol import to_agent, to_client, to_library, to_manager, to_pilot, wire
from stoker.protocol.session import KeyPair, SessionFile, SessionFolder
from stoker.run_folder import RecordLog

_pack = msgspec.msgpack.Encoder().encode


def _messages(union: Any, chance: random.Random) -> list[bytes]:
    kinds = union.__args__ if hasattr(union, "__args__") else (union,)
    found = []
    for _ in range(4):
        for kind in kinds:
            with suppress(ValueError):
                found.append(wire.encode([value_of(kind, chance)], sequence=chance.randrange(100)))
        with suppress(ValueError):
            found.append(wire.encode([value_of(chance.choice(kinds), chance) for _ in range(3)]))
    return found


def _frames(chance: random.Random) -> list[Target]:
    readers: dict[str, tuple[Any, Any]] = {
        "manager, of a client": (wire.from_client_decoder, to_manager.FromClient),
        "manager, of a pilot": (wire.from_pilot, to_manager.FromPilot),
        "pilot, of the manager": (wire.to_pilot_decoder, to_pilot.ToPilot),
        "client, of the manager": (wire.to_client_decoder, to_client.ToClient),
        "library, of the agent": (wire.to_library_decoder, to_library.ToLibrary),
        "agent, of a library": (wire.to_agent_decoder, to_agent.ToAgent),
    }
    found = []
    for name, (make, union) in readers.items():
        right = _messages(union, chance)
        found.append(
            Target(f"frame: {name}", read=_with_hello(make()), declared=(ProtocolError,), right=right, share=12)
        )
    return found


def _with_hello(read: Callable[[bytes], object]) -> Callable[[bytes], object]:
    def both(data: bytes) -> object:
        try:
            return read(data)
        except ProtocolError:
            wire.decode_other_version_hello(data)
            raise

    return both


def _library_frames(chance: random.Random) -> Target:
    decode = wire.to_agent_decoder()
    right = [connection.pack_raw(data) for data in _messages(to_agent.ToAgent, chance)]
    right += [b"".join(right[start : start + 3]) for start in range(0, len(right) - 3, 3)]

    def read(data: bytes) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(data[:100_000])
            theirs.close()
            reader = connection.FrameReader(ours)
            while reader.fill(block=False):
                while (frame := reader.next()) is not None:
                    decode(frame)

    return Target("library's socket", read=read, declared=(ProtocolError,), right=right, share=4)


def _zygotes(chance: random.Random) -> list[Target]:
    found = []
    for name, union, decode in (
        ("zygote, of the agent", client.ToZygote, server._decode),
        ("agent, of a zygote", client.FromZygote, client._decode),
    ):
        right = [_pack(value_of(kind, chance)) for kind in union.__args__ for _ in range(5)]
        found.append(Target(f"message: {name}", read=decode, declared=UNREADABLE, right=right, share=2))
    return found


def _settings(chance: random.Random) -> Target:
    right = [_pack(value_of(connection.Settings, chance)) for _ in range(8)]
    return Target("library's settings", read=connection.decode_settings, declared=UNREADABLE, right=right)


def _manifests() -> Target:
    def entry(name: bytes, size: int) -> manifest.Entry:
        parts = bytes(32) * -(-size // manifest.PART_BYTES)
        return manifest.Entry(name, manifest.EntryKind.FILE, size_bytes=size, parts=parts)

    folder = manifest.Manifest(
        manifest.EntryKind.FOLDER,
        (
            entry(b"a", 10),
            manifest.Entry(b"b", manifest.EntryKind.FOLDER),
            entry(b"b/c", 5 << 20),
            manifest.Entry(b"d", manifest.EntryKind.LINK, target=b"a"),
        ),
    )
    right = [
        manifest.encode(folder),
        manifest.encode(manifest.Manifest(manifest.EntryKind.FILE, (entry(b"", 9 << 20),))),
        manifest.encode(manifest.Manifest(manifest.EntryKind.FOLDER, ())),
    ]

    def read(data: bytes) -> None:
        manifest.pieces(manifest.decode(data))

    return Target("manifest", read=read, declared=(ValueError,), right=right, share=4)


def _starters(place: Path) -> list[Target]:
    archive, into, facts = place / "packages.tar.gz", place / "unpacked", place / "environment.json"
    into.mkdir(exist_ok=True)

    def tar(*members: tuple[str, bytes]) -> bytes:
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as made:
            for name, data in members:
                info = tarfile.TarInfo(name)
                info.size = len(data)
                made.addfile(info, io.BytesIO(data))
            link = tarfile.TarInfo("link")
            link.type, link.linkname = tarfile.SYMTYPE, "a"
            made.addfile(link)
        return out.getvalue()

    plain = [tar(("a", b"text" * 10), ("deep/b", b"")), tar(("x" * 200, b"long name"))]
    environment = {
        "packages": {"name": "file-" + "0" * 64, "source": "/x", "size_bytes": 10},
        "unpacked_bytes": 20,
        "interpreter": "",
        "python": "3.11",
    }

    def unpack_one(data: bytes) -> None:
        archive.write_bytes(data)
        unpack(archive, into)

    def inside(data: bytes) -> None:
        unpack_one(gzip.compress(data, 0))

    def read(data: bytes) -> object:
        facts.write_bytes(data)
        return main._read(facts)

    return [
        Target("archive of an environment", read=unpack_one, declared=(StartError, OSError),
               right=[gzip.compress(data, 1, mtime=0) for data in plain]),
        Target("archive's members", read=inside, declared=(StartError, OSError), right=plain),
        Target("environment.json", read=read, declared=(StartError,), right=[json.dumps(environment).encode()]),
    ]  # fmt: skip


def _transfers(chance: random.Random) -> list[Target]:
    limits = transfer.WireLimits(connect_s=1.0, handshake_s=1.0, silence_s=1.0, body_s=1.0)
    headers = [
        {"op": "open", "object": "file-" + "0" * 64, "manifest": True, "body": 0},
        {"op": "piece", "index": 3, "body": 0},
        {"op": "meet", "object": "a", "address": "h:1", "have": "ff", "lost": ["b"], "again_s": 2.0, "body": 0},
        {"op": "put", "name": "result-1-000000000000", "size": 4, "sha256": "0" * 64, "body": 0},
        {"manifest": 3, "have": 0, "whole": True, "data": 4, "body": 7},
        {"have": [1, 2, 3], "body": 0},
        {"error": "busy", "body": 0},
    ]
    right = [json.dumps(header, separators=(",", ":")).encode() for header in headers]
    key = bytes(32)

    def channels() -> tuple[transfer.Channel, transfer.Channel]:
        one, other = socket.socketpair()
        return (
            transfer.Channel(one, send_key=key, receive_key=key, limits=limits),
            transfer.Channel(other, send_key=key, receive_key=key, limits=limits),
        )

    def header(data: bytes) -> None:
        ours, theirs = channels()
        try:
            theirs.send_body(struct.pack("!I", len(data)) + theirs._mac(0, data) + data + bytes(64))
            theirs.close()
            said = ours.receive()
            for field in ("manifest", "have", "data"):
                fetch._body(ours, said, field, most=1 << 20)
            fetch._indices(said, 10)
            meeting.answer(meeting.SeedMeetings(), said)
        finally:
            ours.close()

    def raw(data: bytes) -> None:
        ours, theirs = channels()
        try:
            theirs.send_body(data[:60_000])
            theirs.close()
            ours.receive()
        finally:
            ours.close()

    def handshake(data: bytes) -> None:
        one, other = socket.socketpair()
        with other:
            other.sendall(data[:60_000])
            other.shutdown(socket.SHUT_WR)
            with _Pair(fileno=one.detach()) as taken:
                transfer.accept(taken, key=key, limits=limits)

    whole = [transfer.MAGIC + chance.randbytes(32), transfer.MAGIC + chance.randbytes(64)]
    framed = [struct.pack("!I", len(data)) + bytes(16) + data for data in right]
    return [
        Target(
            "transfer's header with a right MAC", read=header, declared=(transfer.PeerError,), right=right, share=2,
            complete=False,
        ),
        Target("transfer's bytes", read=raw, declared=(transfer.PeerError,), right=framed, complete=False),
        Target("transfer's handshake", read=handshake, declared=(transfer.PeerError,), right=whole, complete=False),
    ]  # fmt: skip


class _Pair(socket.socket):
    def setsockopt(self, level: int, *more: Any) -> None:
        if level != socket.IPPROTO_TCP:
            super().setsockopt(level, *more)


_SITES = (
    'name = "lab"\n[provider]\nkind = "slurm"\npartition = "gpu"\nwalltime = "1 h"\noptions = ["--exclusive"]\n',
    '[pilot]\ndevices = "cpu:4"\ncache_size = "20 GB"\n[session]\nports = "21000-21999"\nlease = "60 s"\n',
    '[policy]\nname = "prompt-tuner"\nidle = "2 min"\n[environment]\nkind = "packed"\n',
    '[provider]\nkind = "condor"\nrequirements = \'OpSys == "LINUX"\'\nmemory = "4 GB"\ngpus = "a10:2"\n',
)


def _journals(chance: random.Random, place: Path, recorded: Path | None) -> list[Target]:
    file = place / "journal"
    events = []
    for kind in Event.__args__:
        for _ in range(3):
            with suppress(ValueError, TypeError):
                events.append(value_of(kind, chance))

    def clear() -> None:
        for other in place.glob("journal*"):
            other.unlink()

    def written(some: list[Any]) -> bytes:
        clear()
        made = journal.Journal(file)
        for number, event in enumerate(some):
            made.write(float(number + 1), event)
        made.close()
        return file.read_bytes()

    right = [written(chance.choices(events, k=count)) for count in (0, 1, 1, 2, 5, 20)]
    if recorded is not None:
        right.append(recorded.read_bytes()[:200_000])
    first = _pack((1.0, events[0]))
    whole = written(events[:1])
    before = whole[: whole.index(first) - 8]
    bodies = [_pack((1.0, event)) for event in events]

    def read(data: bytes) -> None:
        file.write_bytes(data)
        for _ in journal.read_events_and_checks(file):
            pass

    def repair(data: bytes) -> None:
        file.write_bytes(data)
        try:
            journal.Journal(file).close()
            for _ in journal.read(file):
                pass
        finally:
            clear()

    def body(data: bytes) -> None:
        file.write_bytes(before + struct.pack("<II", len(data), zlib.crc32(data)) + data)
        for _ in journal.read_events_and_checks(file):
            pass

    return [
        Target("journal", read=read, declared=(SessionError,), right=right, share=2),
        Target("journal, opened to go on", read=repair, declared=(SessionError,), right=right),
        Target("journal's record with a right checksum", read=body, declared=(), right=bodies, share=2),
    ]


def _session_files(place: Path) -> list[Target]:
    folder = SessionFolder(place / "session")
    folder.make()
    facts = msgspec.json.encode(SessionFile("k3v9", wire.VERSION, "tcp://127.0.0.1:21000", "x" * 40))
    pair = msgspec.json.encode(KeyPair("p" * 40, "s" * 40))
    holder = msgspec.json.encode(lease.LeaseHolder("n1", "m", 1, 2, "t"))
    path = folder.path / "manager.lease"

    def session(data: bytes) -> object:
        folder.file.write_bytes(data)
        return folder.read()

    def key(data: bytes) -> object:
        folder.key_file("client").write_bytes(data)
        return folder.read_key("client")

    def held(data: bytes) -> object:
        path.write_bytes(data)
        return lease.read(path)

    return [
        Target("session.json", read=session, declared=(SessionError,), right=[facts]),
        Target("key file", read=key, declared=(SessionError,), right=[pair]),
        Target("lease", read=held, declared=(SessionError,), right=[holder]),
    ]


def _sites(place: Path) -> list[Target]:
    file = place / "site.toml"
    right = [text.encode() for text in _SITES]
    right += [format_site_toml(parse_site(text, file="s.toml")).encode() for text in _SITES]

    def parse(data: bytes) -> object:
        return parse_site(data.decode(errors="replace"), file="s.toml")

    def load(data: bytes) -> object:
        file.write_bytes(data)
        return load_site(file)

    return [
        Target("site file's text", read=parse, declared=(ConfigError,), right=right, share=1),
        Target("site file", read=load, declared=(ConfigError,), right=right[:4]),
    ]


def _published(place: Path) -> Target:
    objects = place / "objects"
    objects.mkdir(exist_ok=True)
    file = Published(objects)._file
    line = {"name": "file-" + "0" * 64, "size_bytes": 4, "source": "/x"}
    right = [(json.dumps(line) + "\n").encode() * 3]

    def read(data: bytes) -> object:
        file.write_bytes(data)
        return Published(objects).find("file-" + "0" * 64)

    return Target("published objects", read=read, declared=(), right=right)


def _record_log(place: Path) -> Target:
    file = place / "results.jsonl"

    def read(data: bytes) -> None:
        file.write_bytes(data)
        log = RecordLog(file, key=("claim", "prompt"))
        os.close(log._file)

    right = [b'{"claim":1,"prompt":"a","answer":"yes"}\n{"claim":2,"prompt":"a"}\n']
    return Target("record log", read=read, declared=(StokerError,), right=right)


def _condor_ads() -> Target:
    ads = [{"ClusterId": 1, "ProcId": 0, "JobStatus": 5, "HoldReason": "x"}, {"ClusterId": 2}]
    return Target(
        "job ads",
        read=lambda data: parse_job_ads(data.decode(errors="replace"), command="condor_q"),
        declared=(BatchTrouble,),
        right=[json.dumps(ads).encode()],
    )


def targets(place: Path, *, seed: int, recorded: Path | None = None) -> list[Target]:
    chance = random.Random(seed)
    place.mkdir(parents=True, exist_ok=True)
    return [
        *_frames(chance), _library_frames(chance), *_zygotes(chance), _settings(chance),
        *_journals(chance, place, recorded), *_session_files(place), *_sites(place), _published(place),
        _record_log(place), _condor_ads(), _manifests(), *_starters(place), *_transfers(chance),
    ]  # fmt: skip
