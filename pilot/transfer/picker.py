"""Which piece to ask which source for next.

Rarest first, ties by chance, as in BitTorrent (Cohen, "Incentives Build Robustness in BitTorrent", 2003): what few have
is copied first, so that many can hand it on, and pilots that fetch the same object at once choose different pieces and
then have something for each other. Where we differ: the one source that reads the place that an object comes from is
asked only for what no other source has or is about to have, because that place should be read once.

Near the end a piece may hang at a slow source while others have nothing to do: one that was asked for long ago is asked
for a second time elsewhere, and who comes first wins.

A choice looks at a sample, so it costs the same whatever the object's size. Clock and chance are given: no I/O here.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

S = TypeVar("S")

SAMPLE = 48
AGAIN_S, AGAIN = 1.0, 3.0
"""At the end a piece may be asked for elsewhere too, `AGAIN_S` after it was asked for, and `AGAIN` times as long as
pieces took lately."""
SPARED_S = 5.0
"""Where the object comes from is spared what other sources have, as long as something comes so often."""


@dataclass(slots=True)
class _Asked:
    sources: int
    since: float


@dataclass(slots=True)
class _Offer:
    """What one source has: those pieces that are not here yet (and some that are, until they are looked at)."""

    origin: bool
    pieces: list[int] = field(default_factory=list)
    known: bytearray = field(default_factory=bytearray)
    asked: set[int] = field(default_factory=set)


class Picker(Generic[S]):
    """The pieces of one object, and who has them. Not thread-safe."""

    def __init__(self, count: int, *, chance: random.Random) -> None:
        self._here = bytearray(count)
        self._left = count
        self._holders = [0] * count
        self._asked: dict[int, _Asked] = {}
        self._offers: dict[S, _Offer] = {}
        self._chance = chance
        self._moved_at = 0.0
        self._took_s = 0.0

    @property
    def missing(self) -> int:
        """How many pieces are missing."""
        return self._left

    def add(self, source: S, *, origin: bool = False) -> None:
        """A source has come; it has nothing yet."""
        self._offers[source] = _Offer(origin=origin, known=bytearray(len(self._here)))

    def has(self, source: S, indices: Iterable[int]) -> None:
        """A source has these pieces."""
        offer = self._offers[source]
        for index in indices:
            if not offer.known[index]:
                offer.known[index] = 1
                if not offer.origin:
                    self._holders[index] += 1
                if not self._here[index]:
                    offer.pieces.append(index)

    def has_not(self, source: S, index: int) -> None:
        """A source was asked for a piece and does not give it now; it will say when it does."""
        offer = self._offers[source]
        self._unask(offer, index)
        if offer.known[index]:
            offer.known[index] = 0
            if not offer.origin:
                self._holders[index] -= 1
            if index in offer.pieces:
                offer.pieces.remove(index)

    def gone(self, source: S) -> None:
        """A source is no more: what it was asked for can be asked for elsewhere."""
        offer = self._offers.pop(source, None)
        if offer is None:
            return
        for index in list(offer.asked):
            self._unask(offer, index)
        if not offer.origin:
            for index, known in enumerate(offer.known):
                self._holders[index] -= known

    def arrived(self, index: int, now: float) -> bool:
        """A piece is here; False if it was already."""
        for offer in self._offers.values():
            offer.asked.discard(index)
        asked = self._asked.pop(index, None)
        if self._here[index]:
            return False
        if asked is not None:
            self._took_s += (now - asked.since - self._took_s) / 4
        self._here[index] = 1
        self._left -= 1
        self._moved_at = now
        return True

    def take(self, source: S, now: float) -> int | None:
        """The piece to ask this source for now; it counts as asked for. None when there is none."""
        offer = self._offers.get(source)
        if offer is None:
            return None
        found = self._free(offer, now)
        if found is None:
            found = self._late(offer, now)
        if found is not None:
            asked = self._asked.get(found)
            self._asked[found] = _Asked(1 + (asked.sources if asked else 0), now)
            offer.asked.add(found)
        return found

    # ---- inside

    def _free(self, offer: _Offer, now: float) -> int | None:
        """The rarest that nobody was asked for, among a sample; all are looked at when the sample has none (but for a
        source that is spared: it will be asked again soon)."""
        spared = offer.origin and now - self._moved_at < SPARED_S
        here, asked, holders, pieces = self._here, self._asked, self._holders, offer.pieces
        for size in (SAMPLE,) if spared else (SAMPLE, len(pieces)):
            best, fewest = None, len(self._offers) + 1
            place = self._chance.randrange(len(pieces)) if pieces else 0
            for _ in range(min(size, len(pieces))):
                place = place % len(pieces)
                index = pieces[place]
                if here[index]:
                    pieces[place] = pieces[-1]
                    pieces.pop()
                    if not pieces:
                        return best
                    continue
                if index not in asked and holders[index] < fewest and not (spared and holders[index]):
                    best, fewest = index, holders[index]
                place += 1
            if best is not None:
                return best
        return None

    def _late(self, offer: _Offer, now: float) -> int | None:
        """When all that is missing was asked for: a piece that was asked for once, long ago."""
        if len(self._asked) < self._left:
            return None
        patience_s = max(AGAIN_S, AGAIN * self._took_s) + (SPARED_S if offer.origin else 0.0)
        late = [
            index
            for index, asked in self._asked.items()
            if asked.sources == 1 and now - asked.since > patience_s and offer.known[index] and index not in offer.asked
        ]
        return self._chance.choice(late) if late else None

    def _unask(self, offer: _Offer, index: int) -> None:
        if index in offer.asked:
            offer.asked.discard(index)
            asked = self._asked.get(index)
            if asked is not None:
                asked.sources -= 1
                if asked.sources <= 0:
                    del self._asked[index]
