"""Brings one object to this disk from several sources at once.

A thread reads each source. Sources are other pilots (which may themselves still be fetching and then tell what has
newly arrived), the session's seed, or a path that this host sees. Every piece is checked before it is kept, so a source
can waste time and nothing else; one that serves a wrong piece is not asked again. A connection that breaks after it was
of use is made again, and goes on with what is missing. Which piece is asked for where is the `picker`'s choice.

Who runs a fetch says where the object may be had (`offer`), again whenever that changes, and is told of sources that
failed (`lost`): what to do about it is not decided here.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from stoker.pilot.transfer.board import Board, FetchOutcome, ObjectSource, WrongBytesError
from stoker.pilot.transfer.copy import ObjectCopy
from stoker.pilot.transfer.sources import SourceAccess, SourceReader
from stoker.pilot.transfer.wire import PeerError

log = logging.getLogger("stoker.transfer")

STALL_S = 60.0
"""When no source has sent anything for this long, all of them are given up."""
_POLL_S = 0.5
_REASONS = 4
"""At most this many reasons are told when the last source has failed."""


class ObjectFetch:
    """One object on its way to `root`, a place of its own that an earlier try may have left in parts.

    `lost` is told, on threads of the fetch, of each source that is given up, and why; `begun` gets the copy as soon as
    there is one.
    """

    def __init__(
        self,
        name: str,
        root: Path,
        *,
        means: SourceAccess,
        lost: Callable[[ObjectSource, str], None] = lambda _source, _why: None,
        begun: Callable[[ObjectCopy], None] = lambda _copy: None,
        chance: random.Random | None = None,
    ) -> None:
        self._means = means
        self._lost = lost
        self._board = Board(name, root, chance=chance or random.Random(), begun=begun)
        self._lock = threading.Lock()
        self._workers: dict[ObjectSource, SourceReader] = {}
        self._wrong: set[ObjectSource] = set()
        self._telling = 0
        self._reasons: deque[str] = deque(maxlen=_REASONS)

    def offer(self, sources: Iterable[ObjectSource], *, manifest: bytes = b"") -> None:
        """Where it may be had from now on; sources that were offered before and are not now are let go. Quick.

        `manifest` must be this object's; empty where it is not known.
        """
        self._board.told = manifest or self._board.told
        offered = set(sources)
        with self._lock:
            old = [self._workers.pop(source) for source in list(self._workers) if source not in offered]
            fresh = [one for one in offered - self._wrong if one not in self._workers and not self._board.over]
            for source in fresh:
                self._workers[source] = SourceReader(source, self._board, means=self._means, ended=self._ended)
            starting = [self._workers[source] for source in fresh]
            refused = offered & self._wrong
        for worker in old:
            worker.stop()
        for worker in starting:
            worker.start()
        for source in refused:
            self._lost(source, "it served wrong bytes before")

    def run(self, *, alone_s: float = float("inf")) -> FetchOutcome:
        """Wait until all of it is there, and say how it came; a copy that was begun is closed then.

        Raises what its disk raised; PeerError when it was stopped, or when there was no source for `alone_s`.
        """
        board, alone_at = self._board, time.monotonic()
        self._take_up()
        try:
            while not board.over:
                board.wait(_POLL_S)
                now = time.monotonic()
                with self._lock:
                    alone_at = now if self._workers or self._telling else alone_at
                if now - alone_at > alone_s:
                    why = dict.fromkeys([f"no source of {board.name} is left", *self._reasons])
                    board.end(PeerError("; ".join(why)))
                if now - board.moved_at > STALL_S:
                    self._stalled(now)
        finally:
            self.stop()
        if isinstance(board.failure, WrongBytesError):
            raise PeerError(str(board.failure)) from board.failure
        if board.failure is not None:
            raise board.failure
        return board.outcome()

    def outcome(self) -> FetchOutcome:
        """How it has come so far."""
        return self._board.outcome()

    def stop(self) -> None:
        """Give it up, if it is not over; what is here stays for another try."""
        self._board.end(PeerError(f"the fetch of {self._board.name} was stopped"))
        with self._lock:
            workers, self._workers = list(self._workers.values()), {}
        for worker in workers:
            worker.stop()

    # ---- inside

    def _ended(self, worker: SourceReader, why: str, wrong: bool) -> None:
        with self._lock:
            known = self._workers.get(worker.source) is worker and not self._board.over
            if known:
                del self._workers[worker.source]
            if wrong:
                self._wrong.add(worker.source)
            self._telling += known
            if known:
                self._reasons.append(f"{worker.source}: {why}")
        if known:
            log.warning("%s from %s: %s", self._board.name, worker.source, why)
            self._lost(worker.source, why)
            with self._lock:
                self._telling -= 1

    def _stalled(self, now: float) -> None:
        self._board.moved_at = now
        with self._lock:
            workers = list(self._workers.values())
        for worker in workers:
            worker.stop(f"nothing came for {STALL_S:g} s")

    def _take_up(self) -> None:
        """With a known manifest what an earlier try has left can be looked at before any source is there."""
        if self._board.told:
            try:
                self._board.establish(self._board.told)
            except (OSError, WrongBytesError) as error:
                self._board.end(error)
