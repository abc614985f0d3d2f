"""The numbers of the paper that are predicted, and where they are against what was found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from benchmarks.pervasive import paper, worlds
from benchmarks.pervasive.drawing import NAMES
from benchmarks.pervasive.fit import FAIR
from benchmarks.pervasive.predict import Prediction
from stoker.contexts.recipe import Awareness


def called(awareness: Awareness) -> str:
    """What the paper calls it, and the policy that does so here."""
    return f"{NAMES[awareness]} (`{worlds.POLICIES[awareness]}`)"


class Claim(msgspec.Struct, frozen=True):
    """A number of the paper's that is predicted."""

    figure: str
    awareness: Awareness
    words: str
    said: float

    def values(self, rows: Iterable[Sequence[Prediction]], *, batch: int = 0) -> list[float]:
        """What came of the runs that predict it. `batch`: of calls of so many; 0: of all."""
        return [
            one.value
            for row in rows
            for one in row
            if one.is_of(self.figure, self.awareness) and batch in (0, one.batch)
        ]

    def verdict(self, rows: Iterable[Sequence[Prediction]], *, batch: int = 0, within: float = FAIR) -> str:
        """Where the paper's number is, against the interval. As in the fit, nothing counts as off by less than
        `within`."""
        return judged(self.said, self.values(rows, batch=batch), within=within)


def judged(said: float, values: Sequence[float], *, within: float) -> str:
    """In words."""
    nearest = min(max(said, min(values)), max(values))
    off = abs(nearest / said - 1.0)
    if not off:
        return "inside"
    return f"outside by {off:.1%}, which the fit may be off too" if off <= within else f"**outside**, by {off:.1%}"


CLAIMS = (
    Claim("8", Awareness.DISK, f"8, {called(Awareness.DISK)}: inferences done", paper.FIGURE_8[Awareness.DISK]),
    Claim("8", Awareness.FULL, f"8, {called(Awareness.FULL)}: inferences done", paper.FIGURE_8[Awareness.FULL]),
    Claim("9a", Awareness.FULL, "9a, from 4 to 20 GPUs: seconds", paper.FIGURE_9A_S),
    Claim("9b", Awareness.FULL, "9b, up to 186 GPUs: seconds", paper.FIGURE_9B_S),
)
