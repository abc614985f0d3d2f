"""Compute how fast kinds of devices run one context, from the times of equal work on pairs of kinds."""

from __future__ import annotations

import math
from collections.abc import Mapping

MAX_EQUAL_RATIO = 1.1
"""Two device kinds count as equally fast if their times differ by less than this factor."""

DeviceKindPair = tuple[str, str]


def compute_relative_speeds(ratios: Mapping[DeviceKindPair, tuple[float, float]]) -> dict[str, float]:
    """Return the speed of each kind relative to the fastest; empty if all are equally fast.

    `ratios`: by pair of kinds, the seconds of the first divided by the seconds of the second, and the ratio's weight.
    Only the ratio with the largest weight connects a kind to the others; contradictory ratios are ignored.
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
    speeds = {kind: speed if speed * MAX_EQUAL_RATIO < 1.0 else 1.0 for kind, speed in speeds.items()}
    return speeds if min(speeds.values(), default=1.0) < 1.0 else {}
