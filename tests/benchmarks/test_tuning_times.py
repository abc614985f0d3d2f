from __future__ import annotations

import pytest

from benchmarks.tuning import tuning_times


def side(*, lookup_s: float) -> dict[str, object]:
    def spent(scale: float, bank_s: float) -> dict[str, float]:
        return {
            "bank": bank_s, "start": 2.0, "data": 0.1 * scale, "compute": 23.8 * scale, "communication": 0.1,
            "evaluation": 0.0, "checkpoints": 1.0,
        }  # fmt: skip

    one = {"spent_s": spent(1.0, 20.0), "communication": 0.0}
    two = {"spent_s": spent(0.5, lookup_s), "communication": 0.1 / 12}
    return {"iterations": 12, "machine": "a machine", "one": one, "two": two}


def test_simulator_divides_only_lookup_and_iterations_by_devices() -> None:
    assert tuning_times.simulated_s(side(lookup_s=10.0)) == pytest.approx(3.0 + (20.0 + 24.0) / 2, abs=1e-3)
