"""`start.pyz`: the program that starts a pilot on a node without Stoker.

    start.pyz HERE [--begun DIR] --session DIR ...

`HERE` contains `environment.json`. The pilot receives the other options. The starter copies the archive of the packages
from a path, or fetches it from the session's seed and other starters.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from stoker.connections import split_address
from stoker.contexts.manifest import PART_BYTES, Entry, EntryKind, Manifest, encode_manifest, is_manifest_of
from stoker.pilot.starter.place import (
    Environments,
    StartError,
    base_folder,
    environment_variables,
    link_or_copy,
    make_virtual_environment,
)
from stoker.pilot.transfer import wire
from stoker.pilot.transfer.board import ObjectCopy, ObjectSource
from stoker.pilot.transfer.fetch import SEED_FILE, ObjectFetch, read_key
from stoker.pilot.transfer.meeting import MOST_FAILED_SOURCES, report_to_seed
from stoker.pilot.transfer.server import ObjectServer, pack_piece_bits
from stoker.whole_files import draft_file

# ---- getting the packages

_REPORT_PAUSES_S = (0.1, 0.2, 0.5, 1.0, 2.0)
"""Seconds between two reports to the seed. With short first pauses, pilots that start together find each other soon."""
_SOURCE_WAIT_S = 10.0  # seconds without a source after which the fetch of the archive fails


def get_environment_archive(packages: dict[str, Any], archive: Path, *, session: Path) -> SharedArchiveFetch | None:
    """Fetch or copy the packages' archive to `archive`, and verify its content. Raises StartError, OSError."""
    name, source = packages["name"], packages["source"]
    if archive.exists() and _matches_object_name(archive, name):
        return None
    reasons = []
    seed = session / SEED_FILE
    if seed.exists():
        try:
            key = read_key(session / "keys" / "transfer.json")
            serving = SharedArchiveFetch(name, archive, seed=seed.read_text().strip(), key=key)
            serving.fetch_archive()
            return serving
        except (wire.PeerError, ValueError) as error:
            reasons.append(str(error))
    try:
        with draft_file(archive, draft=archive.with_name(f".{archive.name}.copied")) as draft:
            link_or_copy(source, draft)
        if _matches_object_name(archive, name):
            return None
        archive.unlink()
        reasons.append(f"{source} has changed")
    except FileNotFoundError:
        reasons.append(f"{source} does not exist on this node")
    raise StartError(f"{os.uname().nodename} cannot get the environment: {'; '.join(reasons)}")


class SharedArchiveFetch:
    """Fetches the archive of the packages and serves it to other starters. Raises OSError, ValueError."""

    def __init__(self, name: str, archive: Path, *, seed: str, key: bytes) -> None:
        self._name, self._archive, self._seed, self._key = name, archive, seed, key
        self._draft = archive.with_name(f".{archive.name}.draft")
        self._failed_sources: set[str] = set()
        self._found_no_source = False
        self._fetch = ObjectFetch(
            name, key=key, on_source_lost=lambda source, _why: self._failed_sources.add(source.address)
        )
        self._server = ObjectServer(self, key=key, host=wire.local_address_for_host(split_address(seed)[0]))
        self._is_complete = threading.Event()
        self._closed = threading.Event()

    def fetch_archive(self) -> None:
        threading.Thread(target=self._keep_updating_sources, name="starter-meet", daemon=True).start()
        try:
            self._fetch.run(self._draft, no_source_limit_s=_SOURCE_WAIT_S)
            os.replace(self._draft, self._archive)
            self._is_complete.set()
        finally:
            if not self._is_complete.is_set():
                self.close()

    def close(self) -> None:
        self._closed.set()
        self._server.close()

    def _keep_updating_sources(self) -> None:
        others: list[str] = []
        for pause_s in chain(_REPORT_PAUSES_S, repeat(_REPORT_PAUSES_S[-1])):
            with suppress(wire.PeerError):  # the seed is busy or does not answer: fetch from the known sources
                others = self._report_to_seed()
            sources = [ObjectSource(address=self._seed, origin=True)]
            self._fetch.set_sources(sources + [ObjectSource(address=one) for one in others])
            if self._closed.wait(pause_s):
                return

    def _report_to_seed(self) -> list[str]:
        copy, lost = self._fetch.copy, sorted(self._failed_sources - {self._seed})
        no_use = bool(lost) and not self._fetch.outcome().peer_bytes
        found = report_to_seed(
            self._name, self._server.address,
            have=pack_piece_bits(list(copy.arrivals), len(copy.pieces)) if copy is not None else b"",
            wants=not self._is_complete.is_set(), lost=lost,
            alone=no_use and (len(lost) >= MOST_FAILED_SOURCES or self._found_no_source), again_s=_REPORT_PAUSES_S[-1],
            seed=self._seed, key=self._key,
        )  # fmt: skip
        self._found_no_source = not found
        return found

    # ---- serving other starters

    @contextmanager
    def lend_copy(self, name: str) -> Iterator[ObjectCopy | None]:
        yield self._fetch.copy if name == self._name else None

    def is_fetching(self, name: str) -> bool:
        return name == self._name


def _matches_object_name(path: Path, name: str) -> bool:
    parts, size = [], 0
    with path.open("rb") as file:
        while chunk := file.read(PART_BYTES):
            parts.append(hashlib.sha256(chunk).digest())
            size += len(chunk)
    entry = Entry(b"", EntryKind.FILE, size_bytes=size, parts=b"".join(parts))
    return is_manifest_of(name, encode_manifest(Manifest(EntryKind.FILE, (entry,))))


# ---- the starter


def main(arguments: Sequence[str] | None = None) -> int:
    """Replace this process by a pilot. Return an exit code only after a failure."""
    began = time.monotonic()
    given, rest = _create_parser().parse_known_args(arguments)
    os.umask(0o077)
    try:
        facts = _read_environment_facts(Path(given.here) / "environment.json")
        folder, archive = _prepare_environment(given, facts)
    except (StartError, OSError) as error:
        print(f"stoker: {error}", file=sys.stderr)  # noqa: T201  # the batch log shows this line
        return 1
    finally:
        if given.begun:
            shutil.rmtree(given.begun, ignore_errors=True)
    command = [str(folder / "bin" / "python"), "-P", "-m", "stoker.pilot.main", "--session", given.session, *rest]
    if given.scratch:
        command += ["--scratch", given.scratch]
    if given.cache_age is not None:
        command += ["--cache-age", f"{given.cache_age:g}"]
    if given.walltime_s:
        command += ["--walltime-s", f"{max(1.0, given.walltime_s - (time.monotonic() - began)):.0f}"]
    command += ["--environment", f"{facts['packages']['name']}={archive}"]
    os.execve(command[0], command, environment_variables(folder, begun=given.begun))


def _create_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="start.pyz", allow_abbrev=False, add_help=False)
    parser.add_argument("here")
    parser.add_argument("--begun", default="")
    parser.add_argument("--session", required=True)
    parser.add_argument("--scratch", default="")
    parser.add_argument("--cache-age", type=float, default=None)
    parser.add_argument("--walltime-s", type=float, default=0.0)
    return parser


def _read_environment_facts(file: Path) -> dict[str, Any]:
    try:
        facts: dict[str, Any] = json.loads(file.read_bytes())
        return facts
    except (OSError, ValueError) as error:
        where = f"{file} cannot be read on {os.uname().nodename}"
        raise StartError(f"{where}: {error}; the job must transfer this file") from error


def _prepare_environment(given: argparse.Namespace, facts: dict[str, Any]) -> tuple[Path, Path]:
    packages, named = facts["packages"], facts["interpreter"]
    home = Environments(base_folder(given.scratch), max_unused_s=given.cache_age)
    name = packages["name"].partition(".")[0][-32:] + ("-" + "".join(filter(str.isalnum, named)) if named else "")
    folder = home.prepare_and_lock(
        name,
        needed_bytes=facts["unpacked_bytes"] + packages["size_bytes"],
        get_archive=lambda archive: get_environment_archive(packages, archive, session=Path(given.session)),
        make_usable=lambda place: make_virtual_environment(
            place, version=facts["python"], named=named, base=Path(given.here) / "base.tar.gz"
        ),
    )
    return folder, home.archive_path(name)


if __name__ == "__main__":
    sys.exit(main())
