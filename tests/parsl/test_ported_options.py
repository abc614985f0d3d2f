"""Executor options that Parsl's users know, and their effects."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import parsl
import pytest
from parsl import File, python_app
from parsl.data_provider.staging import Staging

import stoker
from stoker import StokerExecutor, errors


@python_app
def folder():
    import os

    return os.getcwd()


@python_app
def nap(seconds):
    import time

    time.sleep(seconds)
    return seconds


@python_app
def read(file):
    with open(file.filepath) as opened:
        return opened.read()


def test_calls_run_in_the_folder_that_was_named(load, tmp_path):
    (tmp_path / "here").mkdir()
    load(working_dir=str(tmp_path / "here"))
    assert os.path.samefile(folder().result(60), tmp_path / "here")


def test_apps_maps_and_contexts_run_in_the_named_folder_too(load, tmp_path):
    load(working_dir=str(tmp_path / "here"))  # a pilot makes it
    where = [stoker.app(os.getcwd)().result(60), *stoker.map(lambda item: os.getcwd(), range(2))]
    hot = stoker.context(lambda: None)
    where.append(stoker.app(context=hot())(lambda context: os.getcwd())().result(60))
    assert all(os.path.samefile(folder, tmp_path / "here") for folder in where)


@pytest.mark.long
def test_a_map_runs_on_the_executor_that_its_app_names(load, local):
    load(others=(StokerExecutor(label="other", provider=local()),))

    def pilot(item):
        return os.environ["STOKER_PILOT"]

    direct = stoker.app(executors=["other"])(pilot)(0).result(60)
    assert set(stoker.map(stoker.app(executors=["other"])(pilot), range(3))) == {direct}
    assert set(stoker.map(python_app(pilot, executors=["other"]), range(3))) == {direct}
    assert set(stoker.map(stoker.app(executors=["stoker"])(pilot), range(3))) != {direct}
    with pytest.raises(errors.ConfigError, match="no executor 'nowhere' is loaded; there are stoker, other"):
        stoker.map(stoker.app(executors=["nowhere"])(pilot), range(3))


def test_map_refuses_parsls_options_it_ignores(load):
    load(config={"retries": 2})
    with pytest.raises(errors.ConfigError, match="cache=True"):
        stoker.map(stoker.app(cache=True)(abs), [1])
    with pytest.raises(errors.ConfigError, match="timeout"):
        stoker.map(stoker.app(lambda item, walltime=5: item), [1])
    with pytest.raises(errors.ConfigError, match="timeout"):
        stoker.map(functools.partial(stoker.app(lambda item, walltime=None: item), walltime=5), [1])
    with pytest.raises(ZeroDivisionError) as failed:
        list(stoker.map(lambda item: 1 // item, [1, 0]))
    assert failed.value.__notes__[-1].endswith(
        "item 1, counted from 0; it was not tried again: retries=2 is for calls of apps"
    )


@pytest.mark.long
def test_a_block_that_is_scaled_in_is_cancelled_when_its_time_is_over(load, local, until):
    executor = load(provider=local(min_blocks=0), drain_s=0.5, config={"strategy": "none"})
    future = nap(300)
    until(lambda: executor.ask_status().running == 1)
    assert executor.scale_in_facade(1) == ["0"]
    until(lambda: not executor.ask_status().pilots, limit_s=20.0)
    assert not future.done()


class Elsewhere(Staging):
    """Stages files of a custom scheme from a folder."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def can_stage_in(self, file: File) -> bool:
        return file.scheme == "elsewhere"

    def stage_in(self, dm, executor, file, parent_fut):  # Parsl's interface
        file.local_path = str(self.place / file.filename)


def test_files_are_staged_by_the_providers_that_were_named(load, tmp_path):
    (tmp_path / "data.txt").write_text("staged")
    load(storage_access=[Elsewhere(tmp_path)])
    assert read(File("elsewhere://somewhere/data.txt")).result(60) == "staged"


def test_arguments_that_are_ignored_for_the_cache(load):
    @stoker.app(cache=True, ignore_for_cache=["label"])
    def who(number, label=""):
        return number, label

    load()
    assert who(1, label="a").result(60) == (1, "a")
    assert who(1, label="b").result(60) == (1, "a"), "it is known already"
    assert who(2, label="b").result(60) == (2, "b")


@pytest.mark.long
def test_the_manager_listens_in_the_range_of_ports(load, tmp_path):
    site = tmp_path / "site.toml"
    site.write_text('[session]\nports = "23400-23460"\n')
    executor: StokerExecutor = load(site=str(site))
    assert nap(0).result(60) == 0
    port = int(executor.link.folder.read().address.rpartition(":")[2])
    assert 23400 <= port <= 23460


@pytest.mark.long
def test_a_program_that_clears_parsl_itself_can_load_again(tmp_path):
    stoker.load(run_dir=str(tmp_path))
    parsl.clear()
    with stoker.load(run_dir=str(tmp_path)):
        assert stoker.app(pow)(2, 5).result(60) == 32
