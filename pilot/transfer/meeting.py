"""Lets starting pilots find each other at the session's seed before they connect to the manager.

Every few seconds, a pilot that starts on a bare node reports its wanted object and its pieces to the seed. The seed
answers with a few other pilots as sources. While several pilots take part, the seed sends each piece once (`server`).
It sends a piece again only if no pilot reports the piece, or if the pilots with the piece do not serve the requesting
pilot.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from stoker.pilot.transfer import wire
from stoker.pilot.transfer.server import MOST_PEERS

SOURCES_PER_ANSWER = MOST_PEERS - 1  # number of source pilots in each answer of the seed
MOST_FAILED_SOURCES = 2 * SOURCES_PER_ANSWER  # number of failed source pilots after which a host counts as isolated
MISSED_REPORTS = 4.0  # a pilot counts as gone after 4 report intervals without a report
# Seconds before the seed sends a piece again: 4 while no pilot has reported the piece, 15 after a report.
UNREPORTED_RESEND_S, REPORTED_RESEND_S = 4.0, 15.0
_CHECK_S = 0.5
_MOST_PILOTS = 20_000
_ALL_PIECES = -1  # every bit set: all pieces


class SeedMeetings:
    """The seed's records of which pilots fetch or have each object. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chance = random.Random()
        self._meetings: dict[str, _ObjectReports] = {}

    def record_report(
        self, name: str, address: str, *, have: bytes = b"", wants: bool = True, lost: Iterable[str] = (),
        alone: bool = False, again_s: float = 2.0,
    ) -> list[str]:  # fmt: skip
        """Record which pieces the pilot at `address` has (all pieces if not `wants`). Return the addresses of other
        pilots as sources.
        """
        with self._lock:
            meeting = self._meetings.setdefault(name, _ObjectReports())
            now = time.monotonic()
            meeting.remove_expired_reports(now)
            one = meeting.reports.get(address)
            if one is None:
                if not address or len(meeting.reports) >= _MOST_PILOTS:
                    return []
                one = meeting.reports[address] = _PilotReport()
            one.expires_at = now + MISSED_REPORTS * again_s
            one.failed_sources.update(lost)
            one.is_isolated, one.piece_bits = alone, int.from_bytes(have, "little") if wants else _ALL_PIECES
            meeting.record_held_pieces(have, until=one.expires_at)
            meeting.choose_sources(address, one, count=SOURCES_PER_ANSWER if wants else 0, chance=self._chance)
            return list(one.sources)

    def resend_delay_s(self, name: str, index: int, host: str) -> float:
        """Return the seconds that a host must wait for a piece that the seed has already sent to another pilot."""
        with self._lock:
            meeting, now = self._meetings.get(name), time.monotonic()
            if meeting is None:
                return 0.0
            meeting.remove_expired_reports(now)
            if len(meeting.reports) < 2 or host in meeting.isolated_hosts:
                return 0.0
            return REPORTED_RESEND_S if meeting.held_until.get(index, 0.0) > now else UNREPORTED_RESEND_S


@dataclass(slots=True)
class _PilotReport:
    is_isolated: bool = False
    piece_bits: int = 0  # the pilot's pieces, one bit per piece
    expires_at: float = 0.0
    requesters: int = 0
    sources: dict[str, None] = field(default_factory=dict)
    failed_sources: set[str] = field(default_factory=set)


class _ObjectReports:
    def __init__(self) -> None:
        self.reports: dict[str, _PilotReport] = {}
        self.held_until: dict[int, float] = {}  # by piece: time until which a pilot with the piece counts as present
        self.isolated_hosts: set[str] = set()  # hosts that no other pilot serves
        self._check_at = 0.0

    def record_held_pieces(self, have: bytes, *, until: float) -> None:
        for place, bits in enumerate(have):
            for index in range(8 * place, 8 * place + 8):
                if bits >> (index & 7) & 1:
                    self.held_until[index] = max(until, self.held_until.get(index, 0.0))

    def remove_expired_reports(self, now: float) -> None:
        if now < self._check_at:
            return
        self._check_at = now + _CHECK_S
        for address in [address for address, one in self.reports.items() if one.expires_at <= now]:
            for source in self.reports.pop(address).sources:
                self._release_source(source)
        self.isolated_hosts = {
            address.rpartition(":")[0].strip("[]") for address, one in self.reports.items() if one.is_isolated
        }

    def choose_sources(self, address: str, one: _PilotReport, *, count: int, chance: random.Random) -> None:
        for source in [x for x in one.sources if x in one.failed_sources or x not in self.reports or not count]:
            del one.sources[source]
            self._release_source(source)
        helps = any(self.reports[source].piece_bits & ~one.piece_bits for source in one.sources)
        if not count or (helps and len(one.sources) == count):
            return
        others = [x for x in self.reports if x != address and x not in one.sources and x not in one.failed_sources]
        chance.shuffle(others)
        others.sort(key=lambda x: self.reports[x].requesters)
        if len(one.sources) == count:  # no current source has a piece that this pilot lacks: replace a source
            others = [x for x in others if self.reports[x].piece_bits & ~one.piece_bits][:1]
            for source in list(one.sources)[: len(others)]:
                del one.sources[source]
                self._release_source(source)
        for source in others[: count - len(one.sources)]:
            one.sources[source] = None
            self.reports[source].requesters += 1

    def _release_source(self, address: str) -> None:
        if address in self.reports:
            self.reports[address].requesters -= 1


def report_to_seed(name: str, address: str, *, seed: str, key: bytes, **more: Any) -> list[str]:
    """Report this pilot's pieces to the seed, and return the addresses of other pilots. Raises PeerError."""
    channel = wire.connect_to_peer(seed, key=key)
    try:
        more["have"] = more.get("have", b"").hex()
        channel.send({"op": "meet", "object": name, "address": address, **more})
        others = channel.receive().get("others")
        if not isinstance(others, list) or not all(isinstance(one, str) for one in others):
            raise wire.PeerError(f"{seed} did not name the other pilots")
        return others
    finally:
        channel.close()


def answer_report(meetings: SeedMeetings, request: dict[str, Any]) -> list[str]:
    """Record a pilot's report, and return source pilots. Raises PeerError if the report is malformed."""
    lost, again_s = request.get("lost", []), request.get("again_s", 2.0)
    if not isinstance(lost, list) or not isinstance(again_s, (int, float)):
        raise wire.PeerError("a pilot sent an invalid report")
    try:
        have = bytes.fromhex(str(request.get("have") or ""))
    except ValueError as error:
        raise wire.PeerError(f"a pilot does not say which pieces it has: {error}") from error
    return meetings.record_report(
        str(request.get("object")), str(request.get("address") or ""), have=have,
        wants=bool(request.get("wants", True)), lost=map(str, lost), alone=bool(request.get("alone")),
        again_s=float(again_s),
    )  # fmt: skip
