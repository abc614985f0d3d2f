from __future__ import annotations

import time
from contextlib import ExitStack

import pytest
from polling import polls

import stoker
from benchmarks.baselines.loading import ROOT
from stoker.site import BASELINES

pytestmark = pytest.mark.long

LIMIT_S = 90


@stoker.context
def model():
    return {}


@pytest.fixture
def run(tmp_path):
    sessions = ExitStack()

    def begin(policy, devices=4):
        policy = ROOT / BASELINES.get(policy, policy)
        site = tmp_path / "site.toml"
        site.write_text(f'[policy]\nname = "{policy}"\n[pilot]\ndevices = "cpu:{devices}"\n')
        return sessions.enter_context(stoker.load(str(site), run_dir=str(tmp_path / "runs")))

    with sessions:
        yield begin


def steps(context, count, log):
    from stoker.contexts import saved_state

    place = stoker.gang()
    for step in range(saved_state(0), count):
        time.sleep(0.05 / place.size)
        if place.rank == 0:
            with open(log, "a") as file:
                file.write(f"{step} {place.size}\n")
        stoker.progress(step + 1, count, state=step + 1)
    return place.size


def noted(log):
    return [tuple(map(int, line.split())) for line in log.read_text().splitlines()]


@pytest.mark.parametrize("policy", ["infless", "elastic-flow"])
def test_jobs_with_and_without_deadlines_run_to_their_end(run, policy, tmp_path):
    run(policy)
    tune = stoker.app(context=model(), gang=(1, 4), features={"items": 20})(steps)
    soon = stoker.app(context=model(), gang=(1, 4), features={"items": 20}, deadline="60 s")(steps)
    plain = stoker.app(context=model())(lambda context: "plain")
    asked = [plain(), *(app(20, str(tmp_path / "log")) for app in (tune, soon, tune, soon))]
    said, *sizes = [future.result(LIMIT_S) for future in asked]
    assert said == "plain"
    assert set(sizes) <= {1, 2, 3, 4}


def test_running_job_returns_devices_for_a_deadline_and_resumes(run, tmp_path):
    run("elastic-flow")
    log, other = tmp_path / "long", str(tmp_path / "soon")
    tune = stoker.app(context=model(), gang=(1, 4), features={"items": 20})(steps)
    tune(20, other).result(LIMIT_S)  # this call measures the time of an item
    long = stoker.app(context=model(), gang=(1, 4), features={"items": 600})(steps)(600, str(log))
    until = time.monotonic() + LIMIT_S
    while (not log.exists() or len(noted(log)) < 20) and time.monotonic() < until:
        time.sleep(0.1)
    soon = stoker.app(context=model(), gang=(1, 1), features={"items": 20}, deadline="60 s")(steps)(20, other)
    assert soon.result(LIMIT_S) == 1
    assert long.result(LIMIT_S) in (1, 2, 4)
    done = noted(log)
    assert done[0] == (0, 4)
    assert min(size for _, size in done) < 4
    assert [step for step, _ in done] == list(range(600)), "no step was done twice, and none left out"


def takes(context, seconds, name, log):
    """Run for `seconds`; the call `first` then waits for permission to end."""
    time.sleep(seconds)
    while name == "first" and not log.with_name("go on").exists():
        time.sleep(0.02)
    with open(log, "a") as file:
        file.write(f"{name}\n")


def test_shortest_first_prefers_calls_of_the_quicker_function(run, tmp_path):
    session = run("benchmarks/baselines/shortest_first.py:shortest_first", devices=1)
    log = tmp_path / "order"
    slow = stoker.app(context=model())(lambda *given: takes(*given))
    quick = stoker.app(context=model())(takes)
    for call in (slow(0.6, "known", log), quick(0.0, "known", log)):
        call.result(LIMIT_S)
    asked = [slow(0.6, "first", log), slow(0.6, "slow", log), quick(0.0, "quick", log)]
    for more in polls(LIMIT_S):
        if session.status().queued == 2:
            break
        assert more, session.status()
    log.with_name("go on").touch()
    for call in asked:
        call.result(LIMIT_S)
    order = log.read_text().split()
    assert order.index("quick") < order.index("slow"), "the last to come goes before the second"
