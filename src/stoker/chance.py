"""Random numbers that are the same on every machine and for every policy.

Only the seed, the purpose and the subject (a call or a block) decide a number. Different policies therefore see
identical events. Source: SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA
2014), used as a hash of a counter.
"""

from __future__ import annotations

import math
from hashlib import blake2b
from statistics import NormalDist

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_quantile = NormalDist().inv_cdf


class Stream:
    """A stream of random numbers, determined by a seed and a purpose."""

    __slots__ = ("_base",)

    def __init__(self, seed: int, purpose: str) -> None:
        self._base = int.from_bytes(blake2b(f"{seed}/{purpose}".encode(), digest_size=8).digest(), "little")

    def uniform(self, number: int) -> float:
        """Return element `number` of the stream: a random number above 0 and below 1."""
        bits = (self._base + (number + 1) * _GOLDEN) & _MASK
        bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _MASK
        return (((bits ^ (bits >> 31)) >> 11) + 0.5) / (1 << 53)

    def exponential(self, number: int, *, mean: float) -> float:
        return -mean * math.log(self.uniform(number))

    def normal(self, number: int) -> float:
        return _quantile(self.uniform(number))

    def lognormal_factor(self, number: int, *, cv: float) -> float:
        """Return a lognormal number with mean 1 and coefficient of variation `cv`."""
        return _lognormal(self.uniform(number), cv) if cv else 1.0


def min_random_factor(*, cv: float) -> float:
    return _lognormal(0.5 / (1 << 53), cv) if cv else 1.0


def _lognormal(uniform: float, cv: float) -> float:
    variance = math.log1p(cv * cv)
    return math.exp(math.sqrt(variance) * _quantile(uniform) - variance / 2)
