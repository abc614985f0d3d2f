"""Numbers in the paper Pervasive Context Management (§4)."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec

from stoker.contexts.recipe import Awareness

INFERENCES = 150_000
ROUNDED_S = 100.0
A10, TITAN = "NVIDIA A10", "NVIDIA TITAN X (Pascal)"
EACH = 10
"""GPUs of each kind (§4.1)."""
MODEL_BYTES, ENVIRONMENT_BYTES, LOADED_BYTES = 3_700_000_000, 10_500_000_000, 7_400_000_000
"""Sizes of the model on disk, the environment, and the loaded model (§4.1)."""
SHARED_BYTES_PER_S = 84e9 / 8
"""Bandwidth of the shared file system: 84 Gb/s (§4.1)."""


class Run(msgspec.Struct, frozen=True):
    """`batch`: inferences per call. `most`: upper limit of the seconds, or 0."""

    figure: str
    awareness: Awareness
    batch: int
    seconds: float
    most: float = 0.0

    def error(self, seconds: float) -> float:
        said = min(max(seconds, self.seconds), self.most) if self.most else self.seconds
        return seconds / said - 1.0


RUNS = (
    Run("6", Awareness.NONE, 100, 10_400.0), Run("6, 7", Awareness.DISK, 100, 5_300.0),
    Run("6, 7", Awareness.FULL, 100, 2_900.0), Run("7", Awareness.DISK, 1, 141_100.0),
    Run("7", Awareness.DISK, 1000, 3_200.0), Run("7", Awareness.FULL, 1, 3_300.0),
    Run("7", Awareness.FULL, 1000, 2_900.0, 3_300.0),
)  # fmt: skip
"""Runs of §4.2 and §4.3. With full awareness and 1000 inferences per call, the paper gives only bounds: best and worst.
"""


REDUCTIONS = (
    (Awareness.FULL, Awareness.NONE, 0.721),
    (Awareness.DISK, Awareness.NONE, 0.491),
    (Awareness.FULL, Awareness.DISK, 0.453),
)
"""Share by which a version reduces the run time of another version (§4.2)."""
SPREAD = 0.136
"""Run time of the worst call size divided by the best under full awareness, minus 1 (§4.3)."""

PREEMPTED_FROM_S, PREEMPTED_EVERY_S = 900.0, 60.0
"""One GPU is lost each minute, A10s first (§4.4)."""
FIGURE_8 = {Awareness.DISK: 46_000.0, Awareness.FULL: 62_900.0}
"""Completed inferences (three GPUs dropped out early under full awareness)."""
LOST_EARLY = 3

FIGURE_9A_S, FIGURE_9A_GPUS = 5_000.0, (4, 20)
FIGURE_9A_TEXT = "gradually goes to 20 opportunistic GPUs"
FIGURE_9B_S, FIGURE_9B_GPUS = 783.0, 186
FIGURE_9B_TEXT = "quickly grabs up to 186 transiently available GPUs"
"""Texts from §4.5."""

_KINDS = tomllib.loads(Path(__file__).with_name("gpus.toml").read_text())
TABLE_1, SINGLE, TENSOR = (
    {kind: float(facts[what]) for kind, facts in _KINDS.items()} for what in ("count", "single", "tensor")
)
"""GPUs by kind (Table 1), and their peak rates in 10^12 operations/s: with 32 bits, and on tensor cores."""
OLD = frozenset({TITAN, "NVIDIA GeForce GTX 1080 Ti", "NVIDIA GeForce GTX TITAN X"})
