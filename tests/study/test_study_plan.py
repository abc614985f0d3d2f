from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.baselines.loading import ROOT
from stoker.config import parse_site
from stoker.contexts.performance import Availability, BlockWait, DeviceSet, PerformanceStore, PilotLifetime
from stoker.manager.study.evidence import Evidence, Sureness, Work, gather_evidence
from stoker.manager.study.plan import calls_per_simulated_call, make_plan
from stoker.site import BASELINES, Site

A10 = DeviceSet("NVIDIA A10", 1, 24_000_000_000)
NOBODY = Availability("pool")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[PerformanceStore]:
    store = PerformanceStore(tmp_path / "performance.sqlite")
    yield store
    store.close()


def measure(
    store: PerformanceStore, *, kind: str = "NVIDIA A10", runs: int = 40, loads: int = 4, run_s: float = 2.0
) -> None:
    store.record_runs("r", kind=kind, function="verify", run_s=[run_s] * runs)
    for _ in range(loads):
        store.record_load("r", kind=kind, load_s=9.0, start_s=1.0)


def batch(text: str = "", *, pilot: str = "init_blocks = 4\nmax_blocks = 4") -> Site:
    return parse_site(
        f'name = "pool"\n[provider]\nkind = "slurm"\ngpus = "a10:1"\npoll = "0.2 s"\n{text}\n[pilot]\n{pilot}\n',
        file="pool.toml",
    )


def local(devices: str = "cpu:2") -> Site:
    return parse_site(f'name = "here"\n[pilot]\ndevices = "{devices}"\n', file="here.toml")


def known(site: Site, store: PerformanceStore, seen: Availability = NOBODY, *, work: Work) -> Evidence:
    return gather_evidence(site, work, performance=store, availability=seen)


def test_local_machine_with_two_devices_is_planned(store: PerformanceStore) -> None:
    measure(store, kind="cpu")
    work = Work("verify", "verify", 100)
    found = make_plan(local(), work, known(local(), store, work=work))
    assert found.as_written.finish_s.p50 == pytest.approx(10.0 + 50 * 2.0, rel=0.02)
    assert found.as_written.device_hours.p50 == pytest.approx(2 * 110.0 / 3600, rel=0.02)
    assert (found.best_blocks, found.best_walltime_s, found.by_blocks) == (1, 0.0, ())
    assert found.sureness is Sureness.GOOD


def test_policy_named_by_the_site_is_simulated(store: PerformanceStore) -> None:
    inputs = 100
    measure(store, kind="cpu", runs=400, loads=400)
    policy = str(ROOT / BASELINES["disk-only"])
    site = parse_site(
        f'name = "here"\n[pilot]\ndevices = "cpu:2"\n[policy]\nname = "{policy}"\n', file="here.toml"
    )  # fmt: skip
    work = Work("verify", "verify", inputs)
    found = make_plan(site, work, known(site, store, work=work))
    assert found.policy == "forgetful.py:disk_only"
    assert found.as_written.finish_s.p50 == pytest.approx(inputs / 2 * (10.0 + 2.0), rel=0.02)


def test_million_calls_are_forecast_without_simulating_each(store: PerformanceStore) -> None:
    measure(store, kind="cpu")
    work = Work("verify", "verify", 1_000_000)
    found = make_plan(local(), work, known(local(), store, work=work))
    assert found.as_written.finish_s.p50 == pytest.approx(1_000_000.0, rel=0.01)


def test_measured_queue_wait_and_cost_are_in_the_forecast(store: PerformanceStore) -> None:
    measure(store)
    seen = Availability(
        "pool", waits=(BlockWait(300.0, 20.0, A10),) * 12, stays=(PilotLifetime(3600.0, "let go"),) * 12
    )
    site, work = batch('price = 1.5\nwalltime = "4 h"'), Work("verify", "verify", 400)
    found = make_plan(site, work, known(site, store, seen, work=work))
    assert found.as_written.finish_s.p50 == pytest.approx(300 + 20 + 10 + 100 * 2.0, rel=0.05)
    assert found.as_written.device_hours.p50 == pytest.approx(4 * 210 / 3600, rel=0.1)
    assert found.price == 1.5
    assert found.sureness is Sureness.GOOD
    assert [each.blocks for each in found.by_blocks] == [1, 2, 4]
    assert found.best_blocks == 4
    assert found.best_walltime_s == 900.0


def test_more_blocks_than_calls_can_use_are_not_advised(store: PerformanceStore) -> None:
    measure(store)
    site, work = batch(pilot="init_blocks = 16\nmax_blocks = 16"), Work("verify", "verify", 4)
    found = make_plan(site, work, known(site, store, work=work))
    assert found.best_blocks <= 4


def test_losses_are_listed_with_their_reasons(store: PerformanceStore) -> None:
    measure(store)
    stays = [("lost", "preempted by Slurm")] * 2 + [("lost", "")] + [("let go", "")] * 3
    seen = Availability("pool", stays=tuple(PilotLifetime(1800.0, ended, why) for ended, why in stays))
    found = known(batch(), store, seen, work=Work("verify", "verify", 100))
    said = "3 of 6 pilots were lost (2 preempted by Slurm, 1 unexplained) in 3.0 pilot-hours"
    assert said in [reason.text for reason in found.reasons]


def test_forecast_from_few_measurements_is_wide_and_says_so(store: PerformanceStore) -> None:
    store.record_runs("r", kind="cpu", function="verify", run_s=[1.0, 3.0])
    work = Work("verify", "verify", 1000)
    evidence = known(local(), store, work=work)
    assert evidence.run.error == pytest.approx(0.5, rel=0.01)
    found = make_plan(local(), work, evidence).as_written.finish_s
    assert evidence.sureness is Sureness.POOR
    assert found.p90 > 1.3 * found.p10
    assert any("(2 calls measured)" in reason.text for reason in evidence.reasons)


def test_device_kind_named_by_the_site_is_used(store: PerformanceStore) -> None:
    measure(store)
    store.record_runs("r", kind="NVIDIA TITAN X", function="verify", run_s=[5.0] * 500)
    work = Work("verify", "verify", 10)
    assert known(batch(), store, work=work).kind == "NVIDIA A10"
    other = parse_site('name = "h"\n[provider]\nkind = "slurm"\ngpus = "h100:2"\n', file="h.toml")
    evidence = known(other, store, work=work)
    assert evidence.kind == "NVIDIA TITAN X"
    assert evidence.devices == 2
    assert evidence.sureness is Sureness.POOR
    assert any("h100, for which no call was measured" in reason.text for reason in evidence.reasons)


def test_device_speed_from_other_calls_scales_the_measured_time(store: PerformanceStore) -> None:
    measure(store, kind="cpu", run_s=6.0)
    work = Work("verify", "verify", 100)
    assert known(batch(), store, work=work).sureness is Sureness.POOR
    store.record_time_ratio("r", kind="cpu", other="NVIDIA A10", ratio=3.0)
    evidence = known(batch(), store, work=work)
    assert (evidence.kind, evidence.run.mean_s) == ("NVIDIA A10", pytest.approx(2.0))
    texts = {reason.text: reason.sureness for reason in evidence.reasons}
    assert texts["according to other calls of its context, NVIDIA A10 takes 0.33 times as long"] is Sureness.FAIR
    assert known(local(), store, work=work).run.mean_s == 6.0


def test_joined_simulated_calls_stay_far_below_the_walltime() -> None:
    work = Work("verify", "verify", 40_000)
    assert calls_per_simulated_call(work, devices=4, walltime_s=0.0, each_s=60.0) == 80
    assert calls_per_simulated_call(work, devices=4, walltime_s=3600.0, each_s=60.0) == 3
    assert calls_per_simulated_call(work, devices=4, walltime_s=900.0, each_s=60.0) == 1
    assert calls_per_simulated_call(work, devices=4, walltime_s=3600.0, each_s=0.1) == 80
    assert calls_per_simulated_call(work, devices=1000, walltime_s=3600.0, each_s=0.1) == 2


def test_plan_reports_the_most_pilots_that_a_site_ever_provided(store: PerformanceStore) -> None:
    from stoker.contexts.performance import PilotCount

    measure(store)
    seen = Availability("pool", waits=(BlockWait(1.0, 1.0, A10),) * 12, counts=(PilotCount(1.0, "s", 2),))
    evidence = known(batch(), store, seen, work=Work("verify", "verify", 10))
    assert evidence.most == 2
    assert any("never gave more than 2 pilots" in reason.text for reason in evidence.reasons)
