"""Every reader of bytes for the fuzzers; readers of files: a session's journal, keys and lease, site files."""

from __future__ import annotations

import json
import os
import random
import struct
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.reliability.fuzz_inputs import Target, value_of
from benchmarks.reliability.fuzz_nodes import frame_targets, node_targets
from stoker.config import load_site, parse_site, site_text
from stoker.contexts.objects import Published
from stoker.errors import ConfigError, SessionError, StokerError
from stoker.manager.core.events import Event
from stoker.manager.factory.batch import BatchTrouble
from stoker.manager.factory.condor_ads import read_ads
from stoker.manager.live import journal, lease
from stoker.protocol import wire
from stoker.protocol.session import KeyPair, SessionFile, SessionFolder
from stoker.run_folder import RecordLog

_pack = msgspec.msgpack.Encoder().encode
_SITES = (
    'name = "lab"\n[provider]\nkind = "slurm"\npartition = "gpu"\nwalltime = "1 h"\noptions = ["--exclusive"]\n',
    '[pilot]\ndevices = "cpu:4"\ncache_size = "20 GB"\n[session]\nports = "21000-21999"\nlease = "60 s"\n',
    '[policy]\nname = "prompt-tuner"\nidle = "2 min"\n[environment]\nkind = "packed"\n',
    '[provider]\nkind = "condor"\nrequirements = \'OpSys == "LINUX"\'\nmemory = "4 GB"\ngpus = "a10:2"\n',
)


def file_targets(chance: random.Random, place: Path, *, recorded: Path | None) -> list[Target]:
    return [
        *_journals(chance, place, recorded), *_session_files(place), *_sites(place), _published(place),
        _record_log(place), _condor_ads(),
    ]  # fmt: skip


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
        for _ in journal.read_checked(file):
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
        for _ in journal.read_checked(file):
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
    right += [site_text(parse_site(text, file="s.toml")).encode() for text in _SITES]

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
        read=lambda data: read_ads(data.decode(errors="replace"), command="condor_q"),
        declared=(BatchTrouble,),
        right=[json.dumps(ads).encode()],
    )


def targets(place: Path, *, seed: int, recorded: Path | None = None) -> list[Target]:
    """Return all readers. `place`: a folder for files; `recorded`: the journal of a real session."""
    chance = random.Random(seed)
    place.mkdir(parents=True, exist_ok=True)
    return [*frame_targets(chance), *file_targets(chance, place, recorded=recorded), *node_targets(chance, place)]
