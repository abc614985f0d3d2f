from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import pytest
from core.builders import Cluster, Make, devices

from stoker.contexts.speeds import compute_relative_speeds
from stoker.manager.core.events import ContextAdvice, RecordSpeed
from stoker.manager.core.per_context import KindRuns, Speeds, expected_seconds_on_kind
from stoker.protocol import to_manager as say
from stoker.protocol.show_status import render
from stoker.protocol.to_manager import Heartbeat

BOTH = ("A10", "cpu")


def learned(runs: Sequence[tuple[str, str, float]], *, present: Sequence[str] = BOTH) -> Speeds:
    speeds = Speeds()
    for function, kind, seconds in runs:
        speeds.add_runs((function, 0), kind, calls=1, seconds=seconds, present=frozenset(present))
    return speeds


def test_device_kind_that_runs_long_functions_is_not_called_slow() -> None:
    runs = [("short", "A10", 1.0), ("short", "A10", 1.0), ("short", "cpu", 2.0), ("long", "cpu", 200.0)] * 10
    runs += [("long", "A10", 100.0)] * 2
    assert learned(runs).of == {"A10": 1.0, "cpu": pytest.approx(0.5)}


def test_too_few_calls_give_no_device_speed() -> None:
    runs = [("f", kind, seconds) for kind, seconds in (("A10", 1.0), ("cpu", 4.0))]
    assert learned(runs * 9).of == {}
    assert learned(runs * 10).of == {"A10": 1.0, "cpu": pytest.approx(0.25)}


def test_outliers_change_the_speed_little() -> None:
    runs = [("f", "A10", 1.0), ("f", "cpu", 4.0)] * 20
    runs[1], runs[20], runs[31] = ("f", "cpu", 500.0), ("f", "A10", 90.0), ("f", "cpu", 0.02)
    assert learned(runs).of == {"A10": 1.0, "cpu": pytest.approx(0.25)}


@pytest.mark.parametrize("seed", range(5))
def test_noise_alone_gives_no_speed_difference(seed: int) -> None:
    chance = random.Random(seed)
    runs = [("f", kind, chance.expovariate(1.0)) for _ in range(200) for kind in BOTH]
    speeds = learned(runs)
    assert not speeds.of or min(speeds.of.values()) > 0.6


def test_memory_of_the_speed_comparison_is_bounded() -> None:
    speeds = learned([(f"f{n % 1000}", kind, 1.0) for n in range(5000) for kind in BOTH])
    assert len(speeds._open) <= 64
    assert all(len(logs) <= 31 for logs in speeds._logs.values())


def test_measured_speeds_replace_speeds_of_earlier_sessions() -> None:
    speeds = Speeds()
    speeds.use_advised_speeds({"cpu": 0.1, "A10": 1.0})
    assert speeds.of == {"cpu": pytest.approx(0.1), "A10": 1.0}
    assert not speeds.is_measured("cpu")
    for kind, seconds in [("A10", 1.0), ("cpu", 2.0)] * 10:
        speeds.add_runs(("f", 0), kind, calls=1, seconds=seconds, present=frozenset(BOTH))
    assert speeds.of == {"cpu": pytest.approx(0.5), "A10": 1.0}
    assert speeds.is_measured("cpu")


def test_device_kinds_without_common_calls_are_compared_indirectly() -> None:
    ratios = {("T4", "A10"): (2.0, 9.0), ("T4", "H200"): (6.0, 5.0), ("cpu", "old"): (3.0, 1.0)}
    assert compute_relative_speeds(ratios) == {"A10": pytest.approx(1 / 3), "T4": pytest.approx(1 / 6), "H200": 1.0}
    assert compute_relative_speeds({("T4", "A10"): (1.05, 9.0)}) == {}


class Known:
    def __init__(self, run_s: float, **by_kind: float) -> None:
        self.run_s = run_s
        self.by_kind = {kind: KindRuns(runs=10, run_s=seconds) for kind, seconds in by_kind.items()}


def test_run_time_on_an_unused_kind_follows_its_speed() -> None:
    speeds = Speeds()
    assert expected_seconds_on_kind(speeds, Known(1.5, A10=1.0, cpu=2.0), "cpu") == 1.5, "nothing is known of speeds"
    speeds.use_advised_speeds({"cpu": 0.25, "A10": 1.0})
    assert expected_seconds_on_kind(speeds, Known(1.0, A10=1.0), "cpu") == pytest.approx(4.0)
    assert expected_seconds_on_kind(speeds, Known(1.0, A10=1.0, cpu=3.0), "cpu") == 3.0
    assert expected_seconds_on_kind(speeds, Known(1.0, A10=1.0), "T4") == 1.0


def run_on_both(c: Cluster, *, cpu_s: float, cpu_ok: bool = True) -> Cluster:
    for _ in range(12):
        names = [str(len(c.ids) + n + 1) for n in range(2)]
        c.calls(2)
        for name in names:
            on_cpu = c.holders(name)[0].kind == "cpu"
            c.end(name, run_s=cpu_s if on_cpu else 1.0, ok=cpu_ok or not on_cpu)
    return c


def two_kinds(cluster: Make) -> Cluster:
    c = cluster().join("fast", of=devices(1, kind="A10")).join("slow")
    return c.calls(2).ready().end("1", "2").forget()


def test_device_speeds_are_shown_and_recorded(cluster: Make) -> None:
    c = run_on_both(two_kinds(cluster), cpu_s=4.0)
    (shown,) = c.status().contexts
    assert [each.text for each in shown.speeds] == ["cpu: 0.25 of A10's speed, 13 calls"]
    assert any("cpu: 0.25 of A10's speed" in line for line in render(c.status()))
    assert "cpu: 0.25 of A10's speed, 13 calls" in c.story("bare")
    c.report("fast", Heartbeat(()), numbered=False)
    [record] = c.commands(RecordSpeed)
    assert (record.kind, record.other, record.ratio) == ("A10", "cpu", pytest.approx(0.25))


def test_failed_calls_do_not_affect_device_speeds(cluster: Make) -> None:
    c = run_on_both(two_kinds(cluster), cpu_s=0.01, cpu_ok=False)
    assert c.context().speeds.of == {}


def test_speed_of_earlier_sessions_survives_a_load(cluster: Make) -> None:
    c = cluster().join("fast", of=devices(1, kind="A10")).join("slow")
    c.calls(2).advise("bare", {"A10": ContextAdvice(speed=1.0), "cpu": ContextAdvice(speed=0.25)})
    c.ready()
    assert c.context().speeds.of == {"A10": 1.0, "cpu": pytest.approx(0.25)}
    assert c.context().advice["cpu"].speed == 0.25
    assert "cpu: 0.25 of A10's speed, from earlier sessions" in c.story("bare")
    c.advise("bare", {"cpu": ContextAdvice(load_s=3.0)}, source="similar code")
    assert c.context().speeds.of["cpu"] == pytest.approx(0.25), "advice without speeds changes none"


def test_older_pilot_may_still_report_a_speed() -> None:
    told = msgspec.msgpack.encode({"device": "cpu:0", "kind": "cpu", "memory_bytes": 1, "speed": 2.0})
    assert msgspec.msgpack.decode(told, type=say.DeviceFacts).kind == "cpu"
