"""The latency of a runtime by its length, and that of dynamic compilation, from the numbers of §2.

Latency rises in steps of 64 tokens (§3.3). The paper gives the first step and the last one; those between lie on a
line. Within a step it rises a little, by what lies between the 20 and the 64 tokens of §2.
"""

from __future__ import annotations

from math import ceil

import msgspec

from benchmarks.papers.arlo.settings import BASE_MS, SLO_S

LONGEST = 512
STEP = 64
RATIO = {"base": 4.22, "large": 5.25}
"""How much longer 512 tokens take than 64 (§2.1)."""
RATIO_20 = 4.28
"""How much longer 512 tokens take than 20, on Bert-Base (§2.2)."""
_WITHIN_STEP = (1 - RATIO["base"] / RATIO_20) * STEP / (STEP - 20)
"""By how much the latency rises over one step."""
INFLATION = 1.22, 3.56
"""Of dynamic compilation: the least and the most (§2.2). At which lengths is in Figure 2 alone."""


def inflation(shape: str, tokens: int) -> float:
    """How much longer a dynamically compiled runtime takes: always the least (`flat`), rising with the length from the
    least to the most, or falling from the most to the least."""
    least, most = INFLATION
    along = (tokens - 1) / (LONGEST - 1)
    if shape == "flat":
        return least
    return least + (most - least) * {"rising": along, "falling": 1 - along}[shape]


class LatencyProfile(msgspec.Struct, frozen=True):
    """One model. `longest_ms`: what 512 tokens take."""

    model: str
    longest_ms: float = BASE_MS

    @property
    def slo_s(self) -> float:
        """The objective of a request."""
        return SLO_S[self.model]

    def static_s(self, tokens: int) -> float:
        """A runtime that is compiled for this length, for one request."""
        step = max(1, ceil(tokens / STEP))
        first = 1 / RATIO[self.model]
        at_step = first + (1 - first) * (step - 1) / (LONGEST // STEP - 1)
        below = (step * STEP - max(1, tokens)) / STEP
        return self.longest_ms / 1000 * at_step * (1 - _WITHIN_STEP * below)

    def dynamic_s(self, tokens: int, shape: str) -> float:
        """Dynamic compilation: nothing is padded, and everything takes longer."""
        return self.static_s(tokens) * inflation(shape, tokens)

    def capacity(self, tokens: int) -> int:
        """Requests that a runtime of this length answers within the objective (M_i)."""
        return max(1, int(self.slo_s / self.static_s(tokens)))

    def mean_s(self, lengths: list[int], runtimes: int) -> float:
        """The mean time that requests keep their ideal runtimes busy."""
        step = LONGEST // runtimes
        by_length = [self.static_s(step * max(1, ceil(tokens / step))) for tokens in range(LONGEST + 1)]
        return sum(by_length[tokens] for tokens in lengths) / len(lengths)


def lengths_of(runtimes: int) -> tuple[int, ...]:
    """The lengths of so many runtimes: evenly spaced up to the longest (§3.3)."""
    return tuple(LONGEST * (number + 1) // runtimes for number in range(runtimes))
