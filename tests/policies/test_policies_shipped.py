"""Test every shipped policy and baseline in small simulated worlds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from core.builders import Make, recipe
from sim.worlds import calls, model, source, world

from benchmarks.baselines.loading import ROOT, policy
from stoker.contexts.recipe import Awareness
from stoker.errors import ConfigError
from stoker.manager.live.session_policies import find_policy
from stoker.manager.policies import SHIPPED, find_shipped_policy
from stoker.manager.sim.client import Arrival
from stoker.manager.sim.log import LoggedEvent
from stoker.manager.sim.run import RunOutcome, Simulation
from stoker.manager.sim.world import ContextModel, DeviceKind, Files, Links, Rate, SourceModel, World, limit_awareness
from stoker.site import BASELINES, POLICY_NAMES, Duration, Policy, Size

GB = 1_000_000_000
EVERY = (*SHIPPED, *BASELINES)


def simulate(name: str, small: World, arrivals: list[Arrival]) -> tuple[Simulation, RunOutcome]:
    policies = policy(name).make()
    run = Simulation(limit_awareness(small, policies.awareness), arrivals, policies)
    return run, run.run()


def test_site_file_accepts_the_names_of_shipped_policies() -> None:
    assert tuple(SHIPPED) == POLICY_NAMES
    assert all(one.about.endswith(".") and one.name == name for name, one in SHIPPED.items())


def test_each_lookup_returns_a_new_policy() -> None:
    for name in EVERY:
        first, second = policy(name).make(), policy(name).make()
        assert first.residency is not second.residency
        assert first.residency.provisioning is first.provisioning


@pytest.mark.parametrize("name", BASELINES)
def test_error_for_a_baseline_name_gives_the_path_of_its_file(name: str) -> None:
    where = BASELINES[name]
    with pytest.raises(
        ConfigError, match=rf"'{name}' is a baseline of a paper and .* give the path of its file: \"{where}\"$"
    ):
        find_shipped_policy(name)
    assert find_policy(where, folder=ROOT).about.endswith(".")
    with pytest.raises(ValueError, match=rf"name = '{name}' is a baseline of a paper"):
        Policy(name=name)


@pytest.mark.parametrize("name", EVERY)
def test_policies_end_every_call_once_while_devices_change(name: str) -> None:
    pool = source([(0.0, 3), (35.0, 1), (60.0, 4)])
    run, outcome = simulate(name, world(pool, model(item_cv=0.5)), calls(60, every_s=0.7))
    ended = Counter(
        call for call, what in zip(run.log.call, run.log.what, strict=True) if what == LoggedEvent.CALL_ENDED
    )
    assert (outcome.complete, outcome.calls, outcome.failed) == (True, 60, {})
    assert set(ended.values()) == {1}


def test_decisions_and_arrivals_do_not_depend_on_the_hash_seed() -> None:
    script = (
        "from policies.test_policies_shipped import *\n"
        "spread = world(source([(0.0, 4), (12.0, 2)]), model(load_cv=0.3, item_cv=0.5))\n"
        "from sim import test_sim_workload as calls_of\n"
        "print(calls_of.digest_of(calls_of.SHAPES))\n"
        "print(*(simulate(name, spread, calls(20))[0].log.digest() for name in EVERY))\n"
    )
    logs = set()
    for hash_seed in ("0", "77"):
        env = {
            **os.environ,
            "PYTHONHASHSEED": hash_seed,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), str(ROOT)]),
        }
        done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
        logs.add(done.stdout)
    assert len(logs) == 1


# ---- levels of awareness


def loaded_from(name: str, shared: float, disk: float) -> RunOutcome:
    """Simulate four calls of 1 s on one device. The context needs 10 GB of files."""
    context = model(load_s=0.0, files=(Files("weights", Size(10 * GB)),), page_cache=False)
    links = Links(shared=Rate(shared * GB), disk=Rate(disk * GB))
    return simulate(name, world(source(1), context, links=links), calls(4))[1]


def test_lower_awareness_reloads_more_parts_of_a_context() -> None:
    # Reading the files takes 10 s from shared storage and 2 s from the disk.
    assert loaded_from("default", 1.0, 5.0).ended_at == pytest.approx(10.0 + 2.0 + 4 * 1.0)
    assert loaded_from("disk-only", 1.0, 5.0).ended_at == pytest.approx(10.0 + 4 * (2.0 + 1.0))
    assert loaded_from("no-awareness", 1.0, 5.0).ended_at == pytest.approx(4 * (10.0 + 1.0))


def test_awareness_of_a_context_is_never_increased() -> None:
    forgetful = world(source(1), model(awareness=Awareness.NONE))
    assert limit_awareness(forgetful, Awareness.DISK) == forgetful
    assert limit_awareness(forgetful, None) is forgetful


def test_retiring_libraries_get_successors_if_there_is_room() -> None:
    context = model(load_s=100.0, awareness=Awareness.DISK)
    _, outcome = simulate("default", world(source(10), context), calls(30))
    assert outcome.ended_at == pytest.approx(3 * 101.0)


# ---- whole devices


def two_contexts(memory_bytes: int = 8 * GB) -> World:
    context = ContextModel(
        device_memory_bytes=Size(memory_bytes), load_s={"": Duration(10.0)}, item_s={"": Duration(1.0)}
    )
    pool = SourceModel("pool", "gpu", capacity=1, max_blocks=1)
    return World(
        devices={"gpu": DeviceKind(Size(24 * GB))}, sources=(pool,), contexts={"a": context, "b": context},
        delays=world(pool, context).delays,
    )  # fmt: skip


def test_exclusive_policy_gives_a_device_to_one_context_at_a_time() -> None:
    both = [Arrival(0.0, name) for name in "ab" for _ in range(5)]
    shared, exclusive = (simulate(name, two_contexts(), both)[1] for name in ("default", "exclusive"))
    assert shared.ended_at == pytest.approx(10.0 + 10.0)  # both contexts load at once and share the device
    assert exclusive.ended_at >= 2 * (10.0 + 5.0)
    # `exclusive` makes decisions every second and when a context becomes idle
    assert exclusive.ended_at < 2 * (10.0 + 5.0) + 5.0


def test_exclusive_reports_a_context_larger_than_any_device() -> None:
    _, outcome = simulate("exclusive", two_contexts(30 * GB), [Arrival(0.0, "a")])
    (why,) = outcome.failed
    assert "can be loaded nowhere: it needs 30.0 GB of memory" in why


# ---- random


def test_random_policy_sends_calls_to_random_libraries() -> None:
    few_at_a_time = calls(8) + [Arrival(20.0 + 0.6 * n, "llm") for n in range(200)]

    def used(name: str) -> list[int]:
        run, _ = simulate(name, world(source(8, init_blocks=8), model(load_s=1.0)), few_at_a_time)
        began = (p for p, what in zip(run.log.pilot, run.log.what, strict=True) if what == LoggedEvent.CALL_BEGAN)
        return sorted(Counter(began).values(), reverse=True)

    hottest, random = used("default"), used("random")
    assert len(hottest) == len(random) == 8
    assert sum(hottest[:2]) > 0.9 * 200  # two libraries are enough for the calls
    assert max(random) < 0.3 * 200


@pytest.mark.parametrize("name", EVERY)
def test_replayed_events_lead_to_equal_decisions(cluster: Make, name: str) -> None:
    here = cluster(policies=policy(name).make).define(recipe("a", memory="3 GB"), recipe("b", memory="5 GB"))
    here.join("p1", "p2", "p3").calls(6, context="a").calls(3, context="b").lose("p2").join("p4").wait(1.0)
    assert here.core.state.libraries  # the `cluster` fixture replays these decisions after the test
