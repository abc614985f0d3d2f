"""Libraries sleep and wake on one CPU device; a kill in any phase loses no call and leaves no process."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from faults.world import count_lines, is_alive, kill, note, site_file, until
from tiny_model import write_tiny_model

import stoker
from stoker.pilot.devices import cpu

DEVICE_BYTES = cpu.find_cpu_devices(1)[0].facts.memory_bytes
SIZE = f"{int(0.6 * DEVICE_BYTES)} B"  # the device fits one library and a sleeping library, but not two libraries


@stoker.context(memory=SIZE)
def table(folder, name):
    """Load a context that logs its events. Files in the folder (for example `slow-wake`) change the context's
    behaviour.
    """

    class Table:
        def __init__(self):
            self.name, self.folder = name, Path(folder)
            self.happens("loads")

        def happens(self, what):
            note(str(self.folder / "log"), f"{self.name} {what}")
            note(str(self.folder / f"{self.name}-{what}"), os.getpid())
            while (self.folder / f"slow-{what}").exists():
                time.sleep(0.01)
            if (self.folder / f"bad-{what}").exists():
                raise OSError(f"{self.name} {what} badly")

        def sleep(self):
            self.happens("sleeps")

        def wake(self):
            self.happens("wakes")

    return Table()


@pytest.fixture
def small(world):
    """A session whose device has too little memory for two contexts."""
    with stoker.load(site_file(world.path), run_dir=str(world.runs)) as session:
        yield session


@stoker.app
def who(context, number=0):
    return context.name, number, os.getpid()


def ask(folder, name, number=0):
    return who.with_options(context=table(str(folder), name))(number)


def pid_of(path):
    return int(until(lambda: path.exists() and path.read_text().split(), why=path.name)[-1])


def lets_sleep(folder):
    """Load `one`, then `two`, which puts `one` to sleep; return the process of `one`."""
    pid = ask(folder, "one").result(60)[2]
    assert ask(folder, "two").result(60)[0] == "two"
    until(lambda: count_lines(folder / "log").get("one sleeps"), why="one sleeps")
    return pid


def test_models_alternate_by_sleeping_without_reloading(small, tmp_path):
    first = lets_sleep(tmp_path)
    until(lambda: "1 asleep" in str(small.status()), why="the status says who sleeps")
    for number in range(4):
        assert ask(tmp_path, "one", number).result(60) == ("one", number, first)
        assert ask(tmp_path, "two", number).result(60)[:2] == ("two", number)
    log = count_lines(tmp_path / "log")
    assert (log["one loads"], log["two loads"]) == (1, 1)
    assert log["one wakes"] >= 4
    assert "to wake)" in str(small.status())


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")), reason="needs a language model"
)
def test_language_model_writes_the_same_text_after_its_sleep(small, tmp_path):
    models = []
    for seed, name in enumerate(("one", "two")):
        write_tiny_model(tmp_path / name, seed=seed)
        models.append(stoker.causal_lm(str(tmp_path / name), memory=SIZE, threads=1))

    @stoker.app
    def write(model, prompt):
        return model.generate([prompt], max_new_tokens=30)[0], os.getpid()

    before = [write.with_options(context=model)("The weather").result(120) for model in models]
    until(lambda: "1 asleep" in str(small.status()), why="one sleeps")
    again = [write.with_options(context=model)("The weather").result(120) for model in models]
    assert again == before, "the same texts, in the same processes"
    assert before[0][0] != before[1][0]


def test_library_killed_while_it_wakes_loses_no_call(small, tmp_path):
    pid = lets_sleep(tmp_path)
    slow = tmp_path / "slow-wakes"
    slow.touch()
    future = ask(tmp_path, "one", 7)
    assert pid_of(tmp_path / "one-wakes") == pid
    kill([pid])
    slow.unlink()
    name, number, again = future.result(60)
    assert (name, number) == ("one", 7)
    assert again != pid
    assert small.status().failed == 0


def test_calls_run_in_a_new_library_if_waking_their_context_raises(small, tmp_path):
    (tmp_path / "bad-wakes").touch()
    first = ask(tmp_path, "one").result(60)[2]
    for number in range(2):
        assert ask(tmp_path, "two", number).result(60)[1] == number
        assert ask(tmp_path, "one", number).result(60)[1] == number
    log = count_lines(tmp_path / "log")
    assert log["one wakes"] == 1, "the context sleeps no more"
    assert log["one loads"] >= 2
    assert not is_alive(first)
    assert re.search(
        r"ended: wake\(\) of the context table\S* raised OSError: one wakes badly", str(small.explain("lib-1"))
    )
    assert small.status().failed == 0


def test_restarted_manager_finds_the_library_that_was_waking(small, world, tmp_path):
    pid = lets_sleep(tmp_path)
    slow = tmp_path / "slow-wakes"
    slow.touch()
    future = ask(tmp_path, "one", 1)
    pid_of(tmp_path / "one-wakes")
    manager = world.manager()
    kill([manager])
    until(lambda: world.of("stoker.manager.main") not in ([], [manager]), why="another manager")
    slow.unlink()
    assert future.result(60) == ("one", 1, pid), "the same process has woken"
    assert count_lines(tmp_path / "log")["one loads"] == 1


def test_session_with_sleeping_libraries_replays_identically(world, tmp_path):
    with stoker.load(site_file(world.path), run_dir=str(world.runs)) as session:
        lets_sleep(tmp_path)
        for number in range(3):
            ask(tmp_path, "one", number).result(60)
            ask(tmp_path, "two", number).result(60)
        folder = session.folder
    shown = subprocess.run(
        [sys.executable, "-m", "stoker.manager.cli.main", "replay", str(folder)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "decisions are the same" in shown.stdout, shown.stdout + shown.stderr
