"""Search a bank for the initial prompt of a task, with a limit on the number of scored prompts.

PromptTuner §4.3.2 scores every representative, then every member of the best representative's cluster (`two_layers`). A
score is equation 1, the mean loss of a few samples' targets after the prompt.

`look_up` searches best bin first (Beis and Lowe, CVPR 1997; over hierarchies of clusters: Muja and Lowe, PAMI 2014).
Groups are queued by the score of their representatives, and the best group is processed next. A large group is replaced
by its subgroups, after their representatives are scored. In a small group, all members are scored, as one batch.
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
"""Function that returns the loss of each prompt for the task; `nan` if a prompt cannot be scored."""

LIMIT_DIVISOR = 12
"""Number of prompts in a large bank for each prompt that a lookup scores by default."""


class LookupResult(msgspec.Struct, frozen=True):
    candidate: Candidate
    loss: float
    losses: dict[Key, float]
    """Loss of each scored prompt; `inf` if scoring was impossible."""

    @property
    def scores(self) -> int:
        return len(self.losses)


def default_score_limit(layers: Layers) -> int:
    """Return how many prompts a lookup may score by default: at least all representatives and two groups."""
    least = len(layers.clusters) + 2 * layers.largest_group
    return min(len(layers), max(least, len(layers) // LIMIT_DIVISOR))


def look_up(layers: Layers, score: Score, *, limit: int = 0) -> LookupResult:
    """Return the candidate with the lowest loss. Score all representatives, and at most `limit` candidates in total (0:
    `default_score_limit`). Raises StokerError if the number of losses is wrong, or no loss is finite."""
    search = _Search(layers, score, limit=max(limit or default_score_limit(layers), len(layers.clusters)))
    search.queue_groups(layers.list_cluster_groups())
    while search.queued_groups and search.remaining_scores:
        cluster, group = search.pop_best_group()
        if parts := layers.split_group(cluster, group):
            search.queue_groups([(cluster, part) for part in parts])
        else:
            search.score_prompts(group.members)
    return search.make_result()


def two_layers(layers: Layers, score: Score) -> LookupResult:
    """Run the lookup of PromptTuner §4.3.2, and return its result."""
    search = _Search(layers, score, limit=len(layers))
    search.queue_groups(layers.list_cluster_groups())
    search.score_prompts(search.pop_best_group()[1].members)
    return search.make_result()


class _Search:
    def __init__(self, layers: Layers, score: Score, *, limit: int) -> None:
        self._layers = layers
        self._score = score
        self._limit = limit
        self.losses: dict[Key, float] = {}
        self.queued_groups: list[tuple[float, int, int, CandidateGroup]] = []
        self._arrival_numbers = itertools.count()

    @property
    def remaining_scores(self) -> int:
        return self._limit - len(self.losses)

    def queue_groups(self, groups: Sequence[tuple[int, CandidateGroup]]) -> None:
        """Score representatives up to the limit, and queue the groups whose representative has a loss."""
        self.score_prompts([group.representative for _, group in groups])
        for cluster, group in groups:
            if group.representative in self.losses:
                place = (self.losses[group.representative], next(self._arrival_numbers), cluster, group)
                heapq.heappush(self.queued_groups, place)

    def pop_best_group(self) -> tuple[int, CandidateGroup]:
        _, _, cluster, group = heapq.heappop(self.queued_groups)
        return cluster, group

    def score_prompts(self, keys: Sequence[Key]) -> None:
        fresh = [key for key in keys if key not in self.losses][: self.remaining_scores]
        if not fresh:
            return
        losses = self._score([self._layers.candidates[key].text for key in fresh])
        if len(losses) != len(fresh):
            raise StokerError(
                f"the scorer returned {len(losses)} losses for {len(fresh)} prompts; it must return one loss per prompt"
            )
        for key, loss in zip(fresh, losses, strict=True):
            self.losses[key] = math.inf if math.isnan(loss) else float(loss)

    def make_result(self) -> LookupResult:
        best = min(self.losses, key=self.losses.__getitem__)
        if self.losses[best] == math.inf:
            raise StokerError(
                f"none of {len(self.losses)} prompts has a loss that is a number; check the task's samples"
            )
        return LookupResult(candidate=self._layers.candidates[best], loss=self.losses[best], losses=self.losses)
