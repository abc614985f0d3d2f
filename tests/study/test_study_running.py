from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from benchmarks.baselines.loading import ROOT
from stoker.errors import ConfigError
from stoker.manager.sim.run import SimulationError
from stoker.manager.study.log_files import read_event_log
from stoker.manager.study.measures import measure_run
from stoker.manager.study.running import (
    MOST_REPORTS_AT_SAME_TIME,
    MOST_SECONDS_WITHOUT_END,
    FinishedRun,
    StallWatch,
    Tell,
    Workers,
    log_file_name,
    simulate_all_runs,
)
from stoker.manager.study.scenario import Scenario, load_scenario, parse_scenario, shipped_scenarios
from stoker.site import BASELINES

NO_AWARENESS = str(ROOT / BASELINES["no-awareness"])
POLICIES = ("default", NO_AWARENESS)


@pytest.fixture(scope="module")
def small() -> Scenario:
    return load_scenario(shipped_scenarios()["awareness"], changes=["workload.inputs=400", "sources.gpu.capacity=4"])


@pytest.fixture(autouse=True)
def _nobody_stays() -> Iterator[None]:
    yield
    assert multiprocessing.active_children() == []


def facts(runs: list[FinishedRun]) -> dict[tuple[str, int], tuple[object, bytes]]:
    return {(run.policy, run.seed): (run.outcome, Path(run.log).read_bytes()) for run in runs}


def test_results_do_not_depend_on_the_number_of_processes(small: Scenario, tmp_path: Path) -> None:
    found = []
    for jobs in (1, 2):
        folder = tmp_path / str(jobs)
        folder.mkdir()
        found.append(facts(list(simulate_all_runs(small, policies=POLICIES, seeds=[0, 1], folder=folder, jobs=jobs))))
    assert found[0] == found[1]
    assert set(found[0]) == {(policy, seed) for policy in POLICIES for seed in (0, 1)}
    assert len({log for _, log in found[0].values()}) == 4


def test_deadlines_and_warm_devices_are_in_the_figures_of_a_run(small: Scenario, tmp_path: Path) -> None:
    urgent = replace(small, workload=replace(small.workload, deadline_s=60.0, gang=(1, 2)))
    [run] = simulate_all_runs(urgent, policies=["default"], seeds=[0], folder=tmp_path)
    log, _ = read_event_log(Path(run.log))
    measured = measure_run(log, until_s=run.outcome.ended_at)
    assert run.figures.violation_share == measured.violation_share
    assert 0 < len(measured.late) < measured.deadlines == run.outcome.calls
    assert run.figures.bound_s is None
    assert run.outcome.busy_s < run.figures.warm_s == run.outcome.warm_s < run.figures.held_s


BROKEN = """import os, time
from stoker.manager.policies import HottestFirst, KeepBlocks, LoadWhereWanted
from stoker.manager.core.seams import Policies

class Raises(HottestFirst):
    def pull(self, view, library):
        return self.count[library.id]

class Hangs(HottestFirst):
    def pull(self, view, library):
        time.sleep(600)

class Dies(HottestFirst):
    def pull(self, view, library):
        os.kill(os.getpid(), 9)

def broken(dispatch):
    provisioning = KeepBlocks()
    return Policies(dispatch(), LoadWhereWanted(provisioning=provisioning), provisioning)

raises, hangs, dies = (lambda each=each: broken(each) for each in (Raises, Hangs, Dies))
"""


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(BROKEN)
    return tmp_path / "mine.py"


def test_ending_simulations_early_keeps_logs_and_leaves_no_process(
    small: Scenario, broken: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    with closing(
        simulate_all_runs(small, policies=[f"{broken}:hangs", "default"], seeds=[1], folder=folder, jobs=2)
    ) as runs:
        assert next(runs).policy == "default"
        assert len(multiprocessing.active_children()) == 2
    assert [path.name for path in folder.iterdir()] == [log_file_name("default", 1)]


def test_killed_process_is_reported_with_its_policy_and_seed(small: Scenario, broken: Path, tmp_path: Path) -> None:
    with pytest.raises(
        SimulationError, match=r"^policy mine.py:dies, seed [34]: the process .* died \(signal 9\); .*memory"
    ):
        list(simulate_all_runs(small, policies=[f"{broken}:dies"], seeds=[3, 4], folder=tmp_path, jobs=2))


def test_policy_that_raises_is_reported_with_only_its_own_lines(small: Scenario, broken: Path, tmp_path: Path) -> None:
    with pytest.raises(SimulationError) as told:
        list(simulate_all_runs(small, policies=[f"{broken}:raises"], seeds=[0], folder=tmp_path))
    head, *lines = str(told.value).splitlines()
    assert head == "policy mine.py:raises, seed 0 failed:"
    assert 'mine.py", line 7, in pull' in lines[0]
    assert lines[-1] == "AttributeError: 'Raises' object has no attribute 'count'"
    assert "core.py" not in str(told.value)


@pytest.mark.parametrize("jobs", [1, 2])
def test_invalid_trace_is_refused_with_one_or_several_processes(tmp_path: Path, jobs: int) -> None:
    (tmp_path / "trace.csv").write_text("at_s\n0\n5\n4\n")
    text = shipped_scenarios()["static-pool"].read_text()
    head, tail = text.split("[workload]")
    tail = tail[tail.index("[world.devices") :]
    trace = '[workload]\nkind = "trace"\nformat = "csv"\ncontext = "llm"\nfile = "trace.csv"\n'
    scenario = parse_scenario(head + trace + tail, file="s.toml", folder=tmp_path)
    with pytest.raises(ConfigError, match=r"trace\.csv.*4"):
        list(simulate_all_runs(scenario, policies=["default"], seeds=[0, 1], folder=tmp_path, jobs=jobs))


def test_simulation_without_progress_is_stopped() -> None:
    told: list[tuple[float, int]] = []
    watch = StallWatch(lambda now_s, ended: told.append((now_s, ended)))
    for hour in range(10_000):  # more than a year, in which a call ends every hour
        watch(3600.0 * hour, hour // 200)
    with pytest.raises(SimulationError, match=r"^no call has ended since .* until = "):
        watch(3600.0 * 9_999 + MOST_SECONDS_WITHOUT_END, 49)
    assert len(told) == 10_000
    watch = StallWatch(lambda *_: None)
    watch(3600.0, 0)
    with pytest.raises(SimulationError, match=r"^no call has ended since the beginning, and the simulated time is "):
        watch(MOST_SECONDS_WITHOUT_END + 1.0, 0)


def test_simulation_whose_clock_stops_is_stopped() -> None:
    watch = StallWatch(lambda *_: None)
    for ended in range(MOST_REPORTS_AT_SAME_TIME):
        watch(7.0, ended)
    watch(7.0, 3)
    with pytest.raises(SimulationError, match=r"simulated time stays at 7\.0"):
        watch(7.0, 4)


def test_policy_whose_awareness_makes_a_world_impossible_is_refused(tmp_path: Path) -> None:
    changes = ["sources.gpu.walltime=45 s", "links.shared_node=500 MB/s"]
    tight = load_scenario(shipped_scenarios()["awareness"], changes=changes)
    with pytest.raises(ConfigError, match=r"^an impossible world: .* walltime: a block lasts 45 s, and llm takes 52 s"):
        list(simulate_all_runs(tight, policies=[NO_AWARENESS], seeds=[0], folder=tmp_path))


def square(task: int, tell: Tell) -> tuple[int, int]:
    tell("doing", task)
    if task == 10:
        raise ConfigError("ten is too many", key="task")
    if task == 11:
        os._exit(7)
    if task == 12:
        os.kill(os.getpid(), signal.SIGINT)
    while task == 13:
        tell(os.getpid())
        time.sleep(0.01)
    return task * task, os.getpid()


def test_every_task_runs_once_on_the_requested_processes() -> None:
    told: list[object] = []
    with Workers(square, count=2) as workers:
        done = list(workers.iterate_results([1, 2, 3, 4, 5, 6, 7, 12], on_progress=lambda *what: told.append(what)))
        assert [result for result, _ in workers.iterate_results([3], on_progress=lambda *_: None)] == [9], (
            "fewer tasks than processes"
        )
        assert list(workers.iterate_results([], on_progress=lambda *_: None)) == []
    assert sorted(result for result, _ in done) == [1, 4, 9, 16, 25, 36, 49, 144]
    assert 1 <= len({pid for _, pid in done}) <= 2
    assert os.getpid() not in {pid for _, pid in done}
    assert sorted(told) == [("doing", task) for task in (1, 2, 3, 4, 5, 6, 7, 12)]  # type: ignore[type-var]


def test_processes_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "endless.py"
    script.write_text(
        "from study.test_study_running import square\n"
        "from stoker.manager.study.running import Workers\n"
        "if __name__ == '__main__':\n"
        "    with Workers(square, count=2) as workers:\n"
        "        list(workers.iterate_results([13, 13], on_progress=lambda *what: print(*what, flush=True)))\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), str(ROOT)])}
    parent = subprocess.Popen([sys.executable, str(script)], env=env, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids: set[int] = set()
    while len(pids) < 2:
        line = parent.stdout.readline()
        assert line, "the run ended before both workers had work"
        pids |= {int(word) for word in line.split() if word != "13" and word.isdigit()}
    processes = [psutil.Process(pid) for pid in pids]
    parent.kill()
    parent.wait()
    parent.stdout.close()
    _, left = psutil.wait_procs(processes, timeout=30)
    assert left == []
