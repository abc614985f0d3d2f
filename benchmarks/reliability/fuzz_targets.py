"""Every reader of bytes from outside, for the fuzzers: right inputs, what reads them, and the errors it declares."""

from __future__ import annotations

import random
from pathlib import Path

from benchmarks.reliability.fuzz_files import file_targets
from benchmarks.reliability.fuzz_frames import frame_targets
from benchmarks.reliability.fuzz_inputs import Target
from benchmarks.reliability.fuzz_nodes import node_targets


def targets(place: Path, *, seed: int, recorded: Path | None = None) -> list[Target]:
    """All readers. `place` is a folder of the caller's for files; `recorded` the journal of a real session."""
    chance = random.Random(seed)
    place.mkdir(parents=True, exist_ok=True)
    return [*frame_targets(chance), *file_targets(chance, place, recorded=recorded), *node_targets(chance, place)]
