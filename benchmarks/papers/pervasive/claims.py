"""The numbers of the paper that are predicted, and where they are against what was found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from benchmarks.papers.pervasive import paper, worlds
from benchmarks.papers.pervasive.drawing import NAMES
from benchmarks.papers.pervasive.predict import Prediction
from stoker.contexts.recipe import Awareness


def called(awareness: Awareness) -> str:
    """What the paper calls it, and the policy that does so here."""
    return f"{NAMES[awareness]} (`{worlds.POLICIES[awareness]}`)"


class Variant(msgspec.Struct, frozen=True):
    """One assumption about what the text leaves open, and the interval that all sets give under it."""

    name: str
    low: float
    high: float

    def holds(self, said: float) -> bool:
        """Whether the paper's number lies in it."""
        return self.low <= said <= self.high


class Claim(msgspec.Struct, frozen=True):
    """A number of the paper's that is predicted. `text`: what else the paper says of that run, in its own words.
    `unit`: as it follows the number."""

    figure: str
    awareness: Awareness
    words: str
    said: float
    text: str = ""
    unit: str = ""

    def values(self, rows: Iterable[Sequence[Prediction]], *, batch: int = 0) -> list[float]:
        """The results of the runs that predict the claim: those of `batch` inferences a call, or all if it is 0."""
        return [one.value for row in rows for one in self._of(row, batch)]

    def variants(self, rows: Iterable[Sequence[Prediction]], *, batch: int) -> list[Variant]:
        """The intervals that each variant has by itself, over the sets."""
        found: dict[str, list[float]] = {}
        for row in rows:
            for one in self._of(row, batch):
                found.setdefault(one.variant, []).append(one.value)
        return [Variant(name, min(values), max(values)) for name, values in found.items()]

    def outside(self, rows: Iterable[Sequence[Prediction]], *, batch: int = 0) -> float:
        """How far outside the interval the paper's number is, as a part of it; 0 inside."""
        return outside(self.said, self.values(rows, batch=batch))

    def verdict(self, rows: Iterable[Sequence[Prediction]], *, batch: int = 0) -> str:
        """Where the paper's number is, against the interval."""
        return judged(self.said, self.values(rows, batch=batch))

    def _of(self, row: Sequence[Prediction], batch: int) -> list[Prediction]:
        return [one for one in row if one.is_of(self.figure, self.awareness) and batch in (0, one.batch)]


def outside(said: float, values: Sequence[float]) -> float:
    """How far a number is from the nearest end of an interval, as a part of the number; 0 inside."""
    nearest = min(max(said, min(values)), max(values))
    return abs(nearest / said - 1.0)


def judged(said: float, values: Sequence[float]) -> str:
    """In words. An interval of sets that are off by up to a tolerance has that tolerance in it: none is added."""
    if off := outside(said, values):
        return f"**outside** by {off:.1%}"
    return "inside, at its end" if said in (min(values), max(values)) else "inside"


CLAIMS = (
    Claim("8", Awareness.DISK, f"8, {called(Awareness.DISK)}: inferences done", paper.FIGURE_8[Awareness.DISK]),
    Claim("8", Awareness.FULL, f"8, {called(Awareness.FULL)}: inferences done", paper.FIGURE_8[Awareness.FULL]),
    Claim("9a", Awareness.FULL, "9a, from 4 to 20 GPUs: seconds", paper.FIGURE_9A_S, paper.FIGURE_9A_TEXT, " s"),
    Claim("9b", Awareness.FULL, "9b, up to 186 GPUs: seconds", paper.FIGURE_9B_S, paper.FIGURE_9B_TEXT, " s"),
)
PARTIAL, FULL = CLAIMS[:2]
"""Figure 8's."""
