"""Options of the executor that Parsl's users know, each with what it does."""

from __future__ import annotations

import os
from pathlib import Path

from parsl import File, python_app
from parsl.data_provider.staging import Staging

import stoker
from stoker import StokerExecutor


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


def test_calls_without_a_context_run_in_the_folder_that_was_named(load, tmp_path):
    (tmp_path / "here").mkdir()
    load(working_dir=str(tmp_path / "here"))
    assert os.path.samefile(folder().result(60), tmp_path / "here")


def test_a_block_that_is_scaled_in_is_cancelled_when_its_time_is_over(load, local, until):
    executor = load(provider=local(min_blocks=0), drain_s=0.5, config={"strategy": "none"})
    future = nap(300)
    until(lambda: executor.ask_status().running == 1)
    assert executor.scale_in_facade(1) == ["0"]
    until(lambda: not executor.ask_status().pilots, limit_s=20.0)
    assert not future.done()


class Elsewhere(Staging):
    """Stages files of a scheme of its own from a folder."""

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


def test_the_manager_listens_in_the_range_of_ports(load, tmp_path):
    site = tmp_path / "site.toml"
    site.write_text('[session]\nports = "23400-23460"\n')
    executor: StokerExecutor = load(site=str(site))
    assert nap(0).result(60) == 0
    port = int(executor.link.folder.read().address.rpartition(":")[2])
    assert 23400 <= port <= 23460
