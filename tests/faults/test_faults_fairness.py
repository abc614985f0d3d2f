"""A harmful call does not affect other calls: garbage on a socket, dead pilots, walltime."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
from faults.world import count_lines, note, site_file, until

import stoker
from stoker import errors


@pytest.fixture
def site(tmp_path):
    return site_file(tmp_path, devices="cpu:2", pilots=2)


@pytest.mark.long
def test_app_that_kills_its_pilots_fails_and_other_calls_complete(world, tmp_path, site):
    log = str(tmp_path / "log")

    @stoker.app()
    def murder():
        note(log, "bad")
        me = os.getpid()
        while me > 1:  # walk from the library to its ancestors: the zygote, then the pilot
            with open(f"/proc/{me}/cmdline", "rb") as file:
                if b"stoker.pilot.main" in file.read():
                    os.kill(me, signal.SIGKILL)
                    break
            with open(f"/proc/{me}/stat") as file:
                me = int(file.read().rpartition(")")[2].split()[1])
        time.sleep(60)

    @stoker.app()
    def good(number):
        time.sleep(0.3)
        return number

    with stoker.load(site, run_dir=str(world.runs), strategy_period=0.2) as session:
        bad = murder()
        rest = [good(number) for number in range(3)]
        with pytest.raises(errors.PoisonCallError) as caught:
            bad.result(100)
        assert [each.result(60) for each in rest] == [0, 1, 2]
        text = str(caught.value)
        # A death while another library loads is not counted for the call, so the pilot may die once more.
        found = re.search(
            r"its pilot or library died ([45]) times while it ran, the last time with no other call", text
        )
        assert found is not None, text
        assert session.status().lost_pilots == int(found[1])
    assert count_lines(tmp_path / "log") == {"bad": int(found[1])}


@pytest.mark.long
def test_call_longer_than_the_walltime_fails_after_two_tries(world, site, monkeypatch):
    monkeypatch.setenv("PBS_WALLTIME", "8")  # each local pilot ends 8 s after its start

    @stoker.app()
    def long():
        time.sleep(100)

    @stoker.app()
    def saves():
        from stoker.contexts import saved_state

        begun = saved_state(0)
        for step in range(begun, 30):
            time.sleep(0.3)
            stoker.progress(step + 1, 30, state=step + 1)
        return begun

    with stoker.load(site, run_dir=str(world.runs), strategy_period=0.2):
        endless, steps = long(), saves()
        # The message names the walltime that is left at the pilot's hello: 6 to 8 of 8 s. A try that starts late in a
        # walltime does not count.
        said = r"cut off by the [678]\.\d s walltime, (twice|\d times); raise \[provider\]"
        with pytest.raises(errors.CallTimeoutError, match=said):
            endless.result(100)
        assert steps.result(100) > 0


def test_short_calls_do_not_wait_behind_a_long_call(world, site):
    @stoker.context(memory="100 MB")
    def box():
        return 1

    def wait(*model_and_seconds):
        time.sleep(model_and_seconds[-1])
        return model_and_seconds[-1]

    with stoker.load(site, run_dir=str(world.runs)) as session:
        for recipe in (box(), None):
            app = stoker.app(context=recipe)(wait)
            assert app(0).result(60) == 0
            long = app(600)
            until(lambda: session.status().running, why="the long call runs")
            short = [app(0.1) for _ in range(20)]
            assert [each.result(45) for each in short] == [0.1] * 20
            assert not long.done()
            long.cancel()
            until(lambda: not session.status().running, why="the long call has stopped")
