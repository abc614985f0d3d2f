from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import pytest
from faults.world import World, until

import stoker
from stoker.contexts.performance import PerformanceStore

SLOW_PILOT = """
import msgspec
from stoker.pilot.devices import cpu
from stoker.pilot.main import main

share = cpu.make_cpu_devices


def of_another_kind(*arguments, **how):
    return tuple(
        msgspec.structs.replace(each, facts=msgspec.structs.replace(each.facts, kind="cpu of an old node"))
        for each in share(*arguments, **how)
    )


cpu.make_cpu_devices = of_another_kind
raise SystemExit(main())
"""
OLD = "cpu of an old node"


def begin_slow_pilot(session: Any, world: World) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SLOW_PILOT, "--session", str(session.folder), "--devices", "cpu:1"]
    pilot = world.spawn(command, folder=world.path / "old node", ON_OLD_NODE="1")
    until(lambda: len(session.status().pilots) == 2, why="both pilots")
    return pilot


@pytest.mark.long
def test_speed_is_measured_and_kept_for_the_next_session(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    @stoker.context
    def number() -> int:
        return 2

    @stoker.app(context=number())
    def work(context: int, item: int) -> int:
        time.sleep(0.32 if os.environ.get("ON_OLD_NODE") else 0.08)
        return context * item

    def speed(session: Any, *, ends: str) -> str:
        [said] = [each.text for context in session.status().contexts for each in context.speeds]
        assert said.startswith(f"{OLD}: 0."), said
        assert said.endswith(ends), said
        return said

    (world.path / "one.toml").write_text('[pilot]\ndevices = "cpu:1"\n')
    monkeypatch.chdir(world.path)
    with stoker.load("one.toml", run_dir=str(world.runs)) as session:
        pilot = begin_slow_pilot(session, world)
        assert list(stoker.map(work, range(80))) == [2 * item for item in range(80)]
        assert speed(session, ends="calls") in str(session.explain("number"))
        folder = session.folder
        pilot.terminate()
        assert pilot.wait(20) == 0
    store = PerformanceStore(world.home / "performance.sqlite")
    [known] = [found for (recipe, found) in _estimates(store).items() if OLD in found]
    store.close()
    assert 0.1 < known[OLD].speed < 0.7, "0.25 on a quiet machine; a busy one adds the same to both"
    assert known["cpu"].speed == 1.0

    replay = [sys.executable, "-m", "stoker.manager.cli.main", "replay", str(folder)]
    assert "decisions are the same" in subprocess.run(replay, capture_output=True, text=True, check=True).stdout

    with stoker.load("one.toml", run_dir=str(world.runs)) as session:
        pilot = begin_slow_pilot(session, world)
        work(1).result(60)
        speed(session, ends="from earlier sessions")
        pilot.terminate()
        assert pilot.wait(20) == 0


def _estimates(store: PerformanceStore) -> dict[str, Any]:
    recipes = {found.recipe for function in store.list_functions() for found in store.recipes_of(function)}
    return {recipe: store.estimates(recipe) for recipe in recipes}
