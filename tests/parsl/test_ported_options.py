from __future__ import annotations

import functools
import os
from pathlib import Path

import parsl
import pytest
from parsl import File, python_app
from parsl.data_provider.staging import Staging
from parsl.executors import ThreadPoolExecutor

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


def test_apps_maps_and_contexts_run_in_the_named_folder(load, tmp_path):
    load(working_dir=str(tmp_path / "here"))  # a pilot makes the folder
    where = [stoker.app(os.getcwd)().result(60), folder().result(60), *stoker.map(lambda item: os.getcwd(), range(2))]
    hot = stoker.context(lambda: None)
    where.append(stoker.app(context=hot())(lambda context: os.getcwd())().result(60))
    assert all(os.path.samefile(folder, tmp_path / "here") for folder in where)


@pytest.mark.long
def test_apps_and_maps_run_on_their_named_executors(load, local):
    load(others=(ThreadPoolExecutor(label="threads"), StokerExecutor(label="other", provider=local())))

    def pilot(item):
        return os.environ.get("STOKER_PILOT", "here")

    places = {python_app(pilot, executors=[label])(0).result(60) for label in ("threads", "stoker", "other")}
    assert len(places) == 3
    assert "here" in places
    direct = stoker.app(executors=["other"])(pilot)(0).result(60)
    assert set(stoker.map(stoker.app(executors=["other"])(pilot), range(3))) == {direct}
    assert set(stoker.map(python_app(pilot, executors=["other"]), range(3))) == {direct}
    assert set(stoker.map(stoker.app(executors=["stoker"])(pilot), range(3))) != {direct}
    with pytest.raises(errors.ConfigError, match="no executor 'nowhere' is loaded; loaded are stoker, threads, other"):
        stoker.map(stoker.app(executors=["nowhere"])(pilot), range(3))
    with pytest.raises(errors.ConfigError, match=r"'threads' is a ThreadPoolExecutor.*@python_app"):
        stoker.app(executors=["stoker", "threads"])(abs)(1)
    assert stoker.app(executors=["stoker"])(abs)(-1).result(60) == 1


def test_parsl_retries_apply_to_apps_but_not_to_maps(load, tmp_path):
    load(config={"retries": 2})

    @python_app
    def third_time_lucky(log):
        with open(log, "a") as file:
            file.write("x")
        with open(log) as file:
            if len(file.read()) < 3:
                raise ValueError("not yet")
        return "lucky"

    assert third_time_lucky(str(tmp_path / "tries")).result(60) == "lucky"
    with pytest.raises(errors.ConfigError, match="cache=True"):
        stoker.map(stoker.app(cache=True)(abs), [1])
    with pytest.raises(errors.ConfigError, match="timeout"):
        stoker.map(stoker.app(lambda item, walltime=5: item), [1])
    with pytest.raises(errors.ConfigError, match="timeout"):
        stoker.map(functools.partial(stoker.app(lambda item, walltime=None: item), walltime=5), [1])
    with pytest.raises(ZeroDivisionError) as failed:
        list(stoker.map(lambda item: 1 // item, [1, 0]))
    assert failed.value.__notes__[-1].endswith(
        "item 1, counted from 0; maps do not retry: retries=2 is for calls of apps"
    )


@pytest.mark.long
def test_scaled_in_block_is_cancelled_after_drain_s(load, local, until):
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

    def stage_in(self, dm, executor, file, parent_fut):  # Parsl defines this signature
        file.local_path = str(self.place / file.filename)


class PutsInPlace(Staging):
    """Fetches a file within the call, as Parsl's HTTPInTaskStaging does."""

    def can_stage_in(self, file):
        return file.scheme == "note"

    def stage_in(self, dm, executor, file, parent_fut):
        file.local_path = f"{file.path.strip('/')}.txt"

    def replace_task(self, dm, executor, file, function):
        name, text = file.local_path, file.netloc

        def wrapped(*args, **kwargs):
            with open(name, "w") as made:
                made.write(text)
            return function(*args, **kwargs)

        return wrapped


def test_storage_access_providers_stage_files(load, tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "data.txt").write_text("staged")
    monkeypatch.chdir(tmp_path)
    load(storage_access=[Elsewhere(tmp_path / "data"), PutsInPlace()])
    assert read(File("elsewhere://somewhere/data.txt")).result(60) == "staged"

    @stoker.app
    def read_input(inputs=()):
        with open(inputs[0].filepath) as file:
            return file.read()

    assert read_input(inputs=[File("note://hello/name")]).result(60) == "hello"


@pytest.mark.long
def test_program_that_clears_parsl_itself_can_load_again(tmp_path):
    stoker.load(run_dir=str(tmp_path))
    parsl.clear()
    with stoker.load(run_dir=str(tmp_path)):
        assert stoker.app(pow)(2, 5).result(60) == 32
