"""The search for a task's initial prompt by score, within a limit of scores.

PromptTuner §4.3.2: score every representative, then every member of the best one's cluster. `score` is equation 1, the
mean loss of a few samples' targets after the prompt; nothing is tuned. `two_layers` does that, for comparison. Its cost
depends on the best cluster's size, and it never looks at a second cluster, where the best prompt often is.

`look_up` spends a fixed number of scores best bin first (Beis and Lowe, CVPR 1997; over hierarchies of clusters: Muja
and Lowe, PAMI 2014): groups wait in the order of their representatives' scores, and the best is taken next. If it is
large, representatives of its subgroups are scored, and the subgroups join the others; if it is small, its members are
scored, from the representative outwards. No candidate is scored twice. All candidates of a step go to the scorer
together, so that it can batch them.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence

import msgspec

from stoker.errors import StokerError
from stoker.tuning.bank.candidates import Candidate, Key
from stoker.tuning.bank.layers import CandidateGroup, Layers

Score = Callable[[Sequence[str]], Sequence[float]]
"""Returns the loss of each prompt for the task; lower is better. A prompt that cannot be scored may be `nan`."""

SAVING = 12
"""The default limit of a lookup is the bank's size divided by this, but at least one path down."""


class LookupResult(msgspec.Struct, frozen=True):
    """The result of a lookup, and its cost."""

    candidate: Candidate
    loss: float
    losses: dict[Key, float]
    """By scored candidate; `inf` without a loss."""
    steps: tuple[int, ...]
    """Numbers of candidates that were scored together."""

    @property
    def scores(self) -> int:
        return len(self.losses)

    def best(self, count: int) -> list[Key]:
        """Return the candidates of lowest loss, best first: a short list for tuning."""
        return sorted(self.losses, key=self.losses.__getitem__)[:count]


def default_limit(layers: Layers) -> int:
    """Return the default number of scores: every representative and a few groups; all of a small bank."""
    least = len(layers.clusters) + 2 * layers.largest_group
    return min(len(layers), max(least, len(layers) // SAVING))


def look_up(layers: Layers, score: Score, *, limit: int = 0) -> LookupResult:
    """Return the candidate of lowest loss among at most `limit` scored ones (0: `default_limit`), all representatives
    included. Raises StokerError for a wrong number of losses, or no loss at all."""
    search = _Search(layers, score, limit=max(limit or default_limit(layers), len(layers.clusters)))
    search.wait(layers.tops())
    while search.waiting and search.remaining:
        cluster, group = search.next()
        parts = layers.parts(cluster, group)
        if parts:
            search.wait([(cluster, part) for part in parts])
        else:
            search.ask(group.members)
    return search.found()


def two_layers(layers: Layers, score: Score) -> LookupResult:
    """Run the paper's lookup: every representative, then all of the best one's cluster."""
    search = _Search(layers, score, limit=len(layers))
    search.wait(layers.tops())
    search.ask(search.next()[1].members)
    return search.found()


def brute_force(layers: Layers, score: Score) -> LookupResult:
    """Score every candidate, as a reference."""
    search = _Search(layers, score, limit=len(layers))
    search.ask(list(layers.candidates))
    return search.found()


class _Search:
    def __init__(self, layers: Layers, score: Score, *, limit: int) -> None:
        self._layers = layers
        self._score = score
        self._limit = limit
        self.losses: dict[Key, float] = {}
        self.waiting: list[tuple[float, int, int, CandidateGroup]] = []
        self._steps: list[int] = []
        self._turns = itertools.count()

    @property
    def remaining(self) -> int:
        return self._limit - len(self.losses)

    def wait(self, groups: Sequence[tuple[int, CandidateGroup]]) -> None:
        """Queue groups by the loss of their representative, within the limit; of equals, the first."""
        self.ask([group.representative for _, group in groups])
        for cluster, group in groups:
            if group.representative in self.losses:
                place = (self.losses[group.representative], next(self._turns), cluster, group)
                heapq.heappush(self.waiting, place)

    def next(self) -> tuple[int, CandidateGroup]:
        _, _, cluster, group = heapq.heappop(self.waiting)
        return cluster, group

    def ask(self, keys: Sequence[Key]) -> None:
        fresh = [key for key in keys if key not in self.losses][: self.remaining]
        if not fresh:
            return
        losses = self._score([self._layers.candidates[key].text for key in fresh])
        if len(losses) != len(fresh):
            raise StokerError(f"the scorer gave {len(losses)} losses for {len(fresh)} prompts; it must give one each")
        self._steps.append(len(fresh))
        for key, loss in zip(fresh, losses, strict=True):
            self.losses[key] = math.inf if math.isnan(loss) else float(loss)

    def found(self) -> LookupResult:
        best = min(self.losses, key=self.losses.__getitem__)
        if self.losses[best] == math.inf:
            raise StokerError(
                f"none of {len(self.losses)} prompts has a loss that is a number; check the task's samples"
            )
        return LookupResult(
            candidate=self._layers.candidates[best],
            loss=self.losses[best],
            losses=self.losses,
            steps=tuple(self._steps),
        )
