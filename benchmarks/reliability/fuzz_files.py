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
from stoker.contexts.objects import PublishedObjects
from stoker.decoding import UNREADABLE
from stoker.errors import ConfigError, ProtocolError, SessionError, StokerError
from stoker.manager.core.events import Event
from stoker.manager.factory.batch import BatchSystemError
from stoker.manager.factory.condor_ads import parse_job_ads
from stoker.manager.live import journal, lease
from stoker.manager.live.records import read_records
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
_MOST_BYTES = 60_000
"""Maximum bytes that fit into the buffer of a socket pair."""


def targets(place: Path, *, seed: int) -> list[Target]:
    """Return a target for every reader. `place`: a folder for files of readers."""
    chance = random.Random(seed)
    place.mkdir(parents=True, exist_ok=True)
    return [
        *_frames(chance), _library_frames(chance), *_zygotes(chance), *_journals(chance, place),
        *_files(place), _manifests(), *_archives(place), *_transfers(chance),
        Target(
            "library's settings", connection.decode_settings, UNREADABLE,
            [_pack(value_of(connection.LibrarySettings, chance)) for _ in range(8)],
        ),
        Target(
            "job ads", lambda data: parse_job_ads(data.decode(errors="replace"), command="condor_q"),
            (BatchSystemError,),
            [json.dumps([{"ClusterId": 1, "ProcId": 0, "JobStatus": 5, "HoldReason": "x"}, {"ClusterId": 2}]).encode()],
        ),
    ]  # fmt: skip


# ---- messages


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
        "manager, of a pilot": (wire.from_pilot_decoder, to_manager.FromPilot),
        "pilot, of the manager": (wire.to_pilot_decoder, to_pilot.ToPilot),
        "client, of the manager": (wire.to_client_decoder, to_client.ToClient),
        "library, of the agent": (wire.to_library_decoder, to_library.ToLibrary),
        "agent, of a library": (wire.to_agent_decoder, to_agent.ToAgent),
    }
    return [
        Target(f"frame: {name}", _with_hello(make()), (ProtocolError,), _messages(union, chance), share=12)
        for name, (make, union) in readers.items()
    ]


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
    right = [connection.pack_frame_body(data) for data in _messages(to_agent.ToAgent, chance)]
    right += [b"".join(right[start : start + 3]) for start in range(0, len(right) - 3, 3)]

    def read(data: bytes) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(data[:100_000])
            theirs.close()
            reader = connection.FrameReader(ours)
            while reader.receive_bytes(block=False):
                while (frame := reader.next_frame()) is not None:
                    decode(frame)

    return Target("library's socket", read, (ProtocolError,), right, share=4)


def _zygotes(chance: random.Random) -> list[Target]:
    return [
        Target(
            f"message: {name}", decode, UNREADABLE,
            [_pack(value_of(kind, chance)) for kind in union.__args__ for _ in range(5)], share=2,
        )
        for name, union, decode in (
            ("zygote, of the agent", client.ToZygote, server._decode),
            ("agent, of a zygote", client.FromZygote, client._decode),
        )
    ]  # fmt: skip


def _transfers(chance: random.Random) -> list[Target]:
    limits = transfer.WireLimits(connect_s=1.0, handshake_s=1.0, silence_s=1.0, body_s=1.0)
    headers = [
        {"op": "open", "object": "file-" + "0" * 64, "manifest": True, "body": 0},
        {"op": "piece", "index": 3, "body": 0},
        {"op": "meet", "object": "a", "address": "h:1", "have": "ff", "lost": ["b"], "again_s": 2.0, "body": 0},
        {"op": "put", "name": "result-1-000000000000", "size": 4, "sha256": "0" * 64, "body": 0},
        {"manifest": 3, "have": 0, "whole": True, "data": 4, "body": 7}, {"have": [1, 2, 3], "body": 0},
        {"error": "busy", "body": 0},
    ]  # fmt: skip
    right = [json.dumps(header, separators=(",", ":")).encode() for header in headers]
    key = bytes(32)

    def receive(pack: Callable[[transfer.Channel], bytes], then: Callable[[transfer.Channel, Any], object]) -> None:
        ours, theirs = (
            transfer.Channel(each, send_key=key, receive_key=key, limits=limits) for each in socket.socketpair()
        )
        try:
            theirs.send_body(pack(theirs))
            theirs.close()
            then(ours, ours.receive())
        finally:
            ours.close()

    def answer(ours: transfer.Channel, said: Any) -> None:
        for field in ("manifest", "have", "data"):
            fetch._receive_body(ours, said, field, most=1 << 20)
        fetch._announced_pieces(said, 10)
        meeting.answer_report(meeting.SeedMeetings(), said)

    def header(data: bytes) -> None:
        receive(lambda theirs: struct.pack("!I", len(data)) + theirs._mac(0, data) + data + bytes(64), answer)

    def raw(data: bytes) -> None:
        receive(lambda _: data[:_MOST_BYTES], lambda *_: None)

    def handshake(data: bytes) -> None:
        one, other = socket.socketpair()
        with other:
            other.sendall(data[:_MOST_BYTES])
            other.shutdown(socket.SHUT_WR)
            with _Pair(fileno=one.detach()) as taken:
                transfer.accept_peer(taken, key=key, limits=limits)

    whole = [transfer.MAGIC + chance.randbytes(32), transfer.MAGIC + chance.randbytes(64)]
    framed = [struct.pack("!I", len(data)) + bytes(16) + data for data in right]
    return [
        Target("transfer's header with a right MAC", header, (transfer.PeerError,), right, share=2, complete=False),
        Target("transfer's bytes", raw, (transfer.PeerError,), framed, complete=False),
        Target("transfer's handshake", handshake, (transfer.PeerError,), whole, complete=False),
    ]


class _Pair(socket.socket):
    def setsockopt(self, level: int, *more: Any) -> None:
        if level != socket.IPPROTO_TCP:
            super().setsockopt(level, *more)


# ---- files

_SITES = (
    'name = "lab"\n[provider]\nkind = "slurm"\npartition = "gpu"\nwalltime = "1 h"\noptions = ["--exclusive"]\n',
    '[pilot]\ndevices = "cpu:4"\ncache_size = "20 GB"\n[session]\nports = "21000-21999"\nlease = "60 s"\n',
    '[policy]\nname = "prompt-tuner"\nidle = "2 min"\n[environment]\nkind = "packed"\n',
    '[provider]\nkind = "condor"\nrequirements = \'OpSys == "LINUX"\'\nmemory = "4 GB"\ngpus = "a10:2"\n',
)


def _of_file(file: Path, read: Callable[[], object]) -> Callable[[bytes], object]:
    """Return a reader that first writes its input to `file`."""

    def both(data: bytes) -> object:
        file.write_bytes(data)
        return read()

    return both


def _files(place: Path) -> list[Target]:
    folder, file = SessionFolder(place / "session"), "file-" + "0" * 64
    objects, site = place / "objects", place / "site.toml"
    folder.create_folders()
    objects.mkdir(exist_ok=True)
    held, results = folder.path / "manager.lease", place / "results.jsonl"
    sites = [text.encode() for text in _SITES]
    written = [format_site_toml(parse_site(text, file="s.toml")).encode() for text in _SITES]
    published = json.dumps({"name": file, "size_bytes": 4, "source": "/x"}) + "\n"

    def encoded(value: Any) -> list[bytes]:
        return [msgspec.json.encode(value)]

    def parse(data: bytes) -> object:
        return parse_site(data.decode(errors="replace"), file="s.toml")

    def open_log() -> None:
        os.close(RecordLog(results, key=("claim", "prompt"))._file)

    return [
        Target("session.json", _of_file(folder.file, folder.read), (SessionError,),
               encoded(SessionFile("k3v9", wire.VERSION, "tcp://127.0.0.1:21000", "x" * 40))),
        Target("key file", _of_file(folder.key_file("client"), lambda: folder.read_key("client")), (SessionError,),
               encoded(KeyPair("p" * 40, "s" * 40))),
        Target("lease", _of_file(held, lambda: lease.read_lease(held)), (SessionError,),
               encoded(lease.LeaseHolder("n1", "m", 1, 2, "t"))),
        Target("site file's text", parse, (ConfigError,), [*sites, *written]),
        Target("site file", _of_file(site, lambda: load_site(site)), (ConfigError,), sites),
        Target("published objects",
               _of_file(PublishedObjects(objects)._index_file, lambda: PublishedObjects(objects).find(file)), (),
               [published.encode() * 3]),
        Target("record log", _of_file(results, open_log), (StokerError,),
               [b'{"claim":1,"prompt":"a","answer":"yes"}\n{"claim":2,"prompt":"a"}\n']),
    ]  # fmt: skip


def _manifests() -> Target:
    def entry(name: bytes, size: int) -> manifest.Entry:
        parts = bytes(32) * -(-size // manifest.PART_BYTES)
        return manifest.Entry(name, manifest.EntryKind.FILE, size_bytes=size, parts=parts)

    folder = manifest.Entry(b"b", manifest.EntryKind.FOLDER)
    link = manifest.Entry(b"d", manifest.EntryKind.LINK, target=b"a")
    right = [
        manifest.Manifest(manifest.EntryKind.FOLDER, (entry(b"a", 10), folder, entry(b"b/c", 5 << 20), link)),
        manifest.Manifest(manifest.EntryKind.FILE, (entry(b"", 9 << 20),)),
        manifest.Manifest(manifest.EntryKind.FOLDER, ()),
    ]

    def read(data: bytes) -> None:
        manifest.group_into_pieces(manifest.decode_manifest(data))

    return Target("manifest", read, (ValueError,), [manifest.encode_manifest(each) for each in right], share=4)


def _archives(place: Path) -> list[Target]:
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
    packages = {"name": "file-" + "0" * 64, "source": "/x", "size_bytes": 10}
    environment = {"packages": packages, "unpacked_bytes": 20, "interpreter": "", "python": "3.11"}
    unpack_one = _of_file(archive, lambda: unpack(archive, into))
    return [
        Target("archive of an environment", unpack_one, (StartError, OSError),
               [gzip.compress(data, 1, mtime=0) for data in plain]),
        Target("archive's members", lambda data: unpack_one(gzip.compress(data, 0)), (StartError, OSError), plain),
        Target("environment.json", _of_file(facts, lambda: main._read_environment_facts(facts)), (StartError,),
               [json.dumps(environment).encode()]),
    ]  # fmt: skip


def _journals(chance: random.Random, place: Path) -> list[Target]:
    file, events = place / "journal", list[Any]()
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
            made.add_event(float(number + 1), event)
        made.close()
        return file.read_bytes()

    right = [written(chance.choices(events, k=count)) for count in (0, 1, 1, 2, 5, 20)]
    whole = written(events[:1])
    before = whole[: whole.index(_pack((1.0, events[0]))) - 8]

    def read() -> None:
        for _ in read_records(file):
            pass

    def repair() -> None:
        try:
            journal.Journal(file).close()
            for _ in read_records(file):
                pass
        finally:
            clear()

    def body(data: bytes) -> None:
        file.write_bytes(before + struct.pack("<II", len(data), zlib.crc32(data)) + data)
        read()

    return [
        Target("journal", _of_file(file, read), (SessionError,), right, share=2),
        Target("journal, opened to go on", _of_file(file, repair), (SessionError,), right),
        Target("journal's record with a right checksum", body, (), [_pack((1.0, event)) for event in events], share=2),
    ]
