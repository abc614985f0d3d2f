"""Every reader of bytes from outside, for the fuzzers: right inputs, what reads them, and the errors it declares."""

from __future__ import annotations

import random
from pathlib import Path

from benchmarks.fuzz_files import file_targets
from benchmarks.fuzz_frames import frame_targets
from benchmarks.fuzz_nodes import node_targets
from benchmarks.fuzz_target import Target


def targets(place: Path, *, seed: int, recorded: Path | None = None) -> list[Target]:
    """All readers. `place` is a folder of the caller's for files; `recorded` the journal of a real session."""
    chance = random.Random(seed)
    place.mkdir(parents=True, exist_ok=True)
    return [*frame_targets(chance), *file_targets(chance, place, recorded=recorded), *node_targets(chance, place)]
