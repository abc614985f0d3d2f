"""Compute how fast kinds of devices run one context, from the times of equal work on pairs of kinds."""

from __future__ import annotations

import math
from collections.abc import Mapping

SAME = 1.1
"""Two device kinds count as equally fast if their times differ by less than this factor."""

Pair = tuple[str, str]


def relative_speeds(ratios: Mapping[Pair, tuple[float, float]]) -> dict[str, float]:
    """Return the speed of each kind relative to the fastest; empty if all are equally fast.

    Each kind joins by its pair with the largest weight, so a speed never depends on two contradictory ratios.
    `ratios`: by pair, seconds of the first kind divided by seconds of the second, and the weight.
    """
    logs: dict[str, float] = {}
    left = dict(ratios)
    while joining := [pair for pair in left if not logs or (pair[0] in logs) != (pair[1] in logs)]:
        pair = slower, other = max(joining, key=lambda pair: (left[pair][1], pair))
        log = math.log(left.pop(pair)[0])
        if slower in logs:
            logs[other] = logs[slower] - log
        else:
            logs[slower] = logs.setdefault(other, 0.0) + log
    fastest = min(logs.values(), default=0.0)
    speeds = {kind: math.exp(fastest - log) for kind, log in logs.items()}
    speeds = {kind: speed if speed * SAME < 1.0 else 1.0 for kind, speed in speeds.items()}
    return speeds if min(speeds.values(), default=1.0) < 1.0 else {}
