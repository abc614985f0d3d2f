from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.papers.prompt_tuner.jobs import Bank
from benchmarks.papers.prompt_tuner.scenarios import Case, System
from benchmarks.papers.prompt_tuner.searching import runs_in, simulated
from benchmarks.papers.prompt_tuner.simulate import simulate
from stoker.manager.sim.run import SimulationError
from stoker.manager.study.running import WorkerDiedError

FEW = (("gpt2-base", 8), ("vicuna-7b", 6))


def case(*, policy: str = "default", seed: int = 0, bank: Bank = Bank.BUDGET) -> Case:
    return Case(FEW, 1.0, System(policy, bank=bank), seed, gpus=8)


def test_run_has_all_its_jobs_and_never_exceeds_its_gpus() -> None:
    found = simulate(case())
    assert (found.jobs, found.unfinished, found.refused) == (14, 0, 0)
    assert found.banked > 0
    assert 0.0 < found.busy_s <= found.held_s <= found.all_s
    assert found.all_s >= 8 * 1200.0
    assert simulate(case(bank=Bank.NEVER)).banked == 0


@pytest.mark.parametrize("jobs", [1, 2])
def test_unknown_policy_stops_the_evaluation_and_names_its_case(jobs: int, tmp_path: Path) -> None:
    cases = [case(policy="nobody", seed=seed) for seed in range(2)]
    with pytest.raises(SimulationError, match="policy 'nobody' is not a policy") as raised:
        runs_in(tmp_path).bring(cases, simulated, jobs=jobs)
    assert "nobody" in str(raised.value)
    assert not isinstance(raised.value, WorkerDiedError)
    assert list(tmp_path.iterdir()) == []
