"""The parts of `make gpu`, in order, and how they share its 470 seconds.

Each part has a *typical* time, measured or estimated for one H100 or H200 with 16 cores, and a *limit*. A part may use
the time that is left until the deadline, less the typical times of the parts after it, between its own typical time and
its limit. So a slow part first uses the time that earlier parts saved. A part that starts with less than half of its
typical time left, 20 s at most, is not reached. The typical times add up to less than the deadline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

IN_ALL_S = 470.0


@dataclass(frozen=True)
class Part:
    """A part: its title, seconds that it typically takes, and its limit. `needs`: parts that have to run before."""

    title: str
    typical_s: float
    limit_s: float
    needs: tuple[str, ...] = ()


KIT = Part("missing packages are installed, and the large ones are imported once", 20.0, 90.0)
PARTS: dict[str, Part] = {
    "site": Part("the site suite, tests/site", 80.0, 150.0),
    "tests": Part("tests with the marker gpu", 25.0, 80.0),
    "device": Part("devices and their bandwidth", 8.0, 45.0),
    "model": Part("a model of SmolLM2-1.7B's shape with random weights is written", 15.0, 60.0, ("device",)),
    "awareness": Part("inferences a second by awareness", 45.0, 100.0, ("device", "model")),
    "load": Part("loads from a file, a snapshot, a peer and host memory", 50.0, 110.0, ("device", "model")),
    "decode": Part("decode and prefill by batch, against Transformers and vLLM", 50.0, 110.0, ("device", "model")),
    "slinfer": Part("8 models of 1 to 3 B, slinfer against exclusive", 120.0, 440.0, ("device", "model")),
    "encoder": Part("an encoder in one length, in several, and in any length", 20.0, 60.0),
    "turns": Part("libraries on one device take turns", 8.0, 30.0),
    "tune": Part("soft prompts are tuned", 12.0, 50.0, ("device", "model")),
    "gang": Part("two ranks exchange numbers", 12.0, 50.0),
}


def with_needs(names: Sequence[str]) -> list[str]:
    """Return the parts that were asked for and the parts that they need, in order."""
    wanted = set(names) | {need for name in names for need in PARTS[name].needs}
    return [name for name in PARTS if name in wanted]


def allowed_s(name: str, *, left_s: float, later: Sequence[str]) -> float:
    """Return the seconds that a part may take; 0 if too few are left for it."""
    part = PARTS[name]
    if left_s < min(20.0, part.typical_s / 2):
        return 0.0
    spare_s = left_s - sum(PARTS[each].typical_s for each in later)
    return min(left_s, part.limit_s, max(part.typical_s, spare_s))
