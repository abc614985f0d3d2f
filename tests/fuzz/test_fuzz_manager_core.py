"""The manager core raises no exception on random events of valid types (see `benchmarks.reliability.fuzz_manager`).
STOKER_FUZZ_EVENTS sets the number of events.
"""

from __future__ import annotations

import os
import random

import pytest

from benchmarks.reliability import fuzz_manager

SEEDS = 8
EVENTS = max(300, int(os.environ.get("STOKER_FUZZ_EVENTS", "0")) // SEEDS)
A_SESSION = 2000
"""Number of random events per session."""


@pytest.mark.parametrize("seed", range(SEEDS))
def test_manager_core_accepts_random_events(seed: int) -> None:
    for number, start in enumerate(range(0, EVENTS, A_SESSION)):
        chance = random.Random(seed + SEEDS * number)
        fuzz_manager.live(chance, count=min(A_SESSION, EVENTS - start))
