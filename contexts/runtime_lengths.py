"""The lengths for which a model is worth a runtime of its own (Arlo §3.3). Pure.

A *runtime* pads every text to its own length. Between two steps of the latency staircase padding costs nothing, so a
runtime within a step would not be any faster; where latency rises steadily, each further runtime helps less than the
one before. So of the lengths that were profiled those are chosen that make the mean latency of the expected texts
lowest, and no more of them than pay: without any of them the mean would be at least `LEAST_GAIN` longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import inf

import msgspec

MOST_RUNTIMES = 8
"""As many as the paper compiles for BERT: 512 tokens in steps of 64."""
LEAST_GAIN = 0.05
"""§3.3 calls a change of latency below 5 % tiny."""


class LengthProfile(msgspec.Struct, frozen=True):
    """A length that was profiled: tokens, seconds for a text of it, and how many of the expected texts are at most as
    long, and longer than the profiled length before."""

    tokens: int
    seconds: float
    texts: float = 1.0


class RuntimeLengths(msgspec.Struct, frozen=True):
    """The lengths, rising; the mean latency of the expected texts with them, and with the longest one alone, in
    seconds."""

    tokens: tuple[int, ...]
    mean_s: float
    alone_s: float

    @property
    def why(self) -> str:
        """In a sentence."""
        if len(self.tokens) == 1:
            return f"one runtime of {self.tokens[0]} tokens: shorter ones would save less than {LEAST_GAIN:.0%}"
        listed = ", ".join(map(str, self.tokens))
        return f"runtimes of {listed} tokens: {1 - self.mean_s / self.alone_s:.0%} less time than the longest alone"


def choose_lengths(profile: Sequence[LengthProfile], *, most: int = MOST_RUNTIMES) -> RuntimeLengths:
    """The lengths that pay. The longest that was profiled is always among them. Raises ValueError for no profile, for
    lengths that do not rise, and if no text is expected."""
    if not profile or any(a.tokens >= b.tokens for a, b in pairwise(profile)):
        raise ValueError("lengths of a profile rise, and there is at least one")
    texts = sum(each.texts for each in profile)
    if texts <= 0 or most < 1:
        raise ValueError("no text is expected" if texts <= 0 else "at least one runtime is wanted")
    # Noise may have a shorter text take longer than a longer one, which could serve it.
    seconds = list(accumulate((each.seconds for each in reversed(profile)), min))[::-1]
    before = list(accumulate((each.texts for each in profile), initial=0.0))
    last = len(profile) - 1
    alone_s = seconds[last]
    chosen, mean_s = [last], alone_s
    for count, (total, places) in enumerate(_best_of_each_count(seconds, before, most=most), 1):
        found_s = total / texts
        if count > 1 and mean_s <= found_s * (1 + LEAST_GAIN):
            break
        chosen, mean_s = places, found_s
    return RuntimeLengths(tuple(profile[place].tokens for place in chosen), mean_s, alone_s)


def _best_of_each_count(
    seconds: Sequence[float], before: Sequence[float], *, most: int
) -> list[tuple[float, list[int]]]:
    """For one runtime, two, and so on: the least sum of latencies of all texts, and the places of the lengths.

    Dynamic programming over the length of the longest runtime so far.
    """
    places = range(len(seconds))
    costs = [before[place + 1] * seconds[place] for place in places]
    ways: list[list[int]] = [[place] for place in places]
    found = [(costs[-1], ways[-1])]
    for _ in range(1, min(most, len(seconds))):
        further, chosen = [inf] * len(seconds), list(ways)
        for place in places:
            for shorter in range(place):
                cost = costs[shorter] + (before[place + 1] - before[shorter + 1]) * seconds[place]
                if cost < further[place]:
                    further[place], chosen[place] = cost, [*ways[shorter], place]
        costs, ways = further, chosen
        found.append((costs[-1], ways[-1]))
    return found
