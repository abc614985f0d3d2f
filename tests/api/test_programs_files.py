from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from parsl import bash_app, python_app

import stoker
from stoker import errors
from stoker.contexts.folders import ProgramFolder, program_folder
from stoker.manager.executor.options import CallFolder


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("program")
    (folder / "model.pkl").write_bytes(pickle.dumps({"weight": 5}))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


@pytest.fixture(scope="module")
def session(here: Path) -> Iterator[Any]:
    with stoker.load(progress=False) as session:
        yield session


@pytest.fixture
def elsewhere(session: Any, monkeypatch: pytest.MonkeyPatch) -> ProgramFolder:
    home = program_folder()
    elsewhere = msgspec.structs.replace(home, inode=home.inode + 1)
    monkeypatch.setattr(session.executor, "call_place", CallFolder(home=elsewhere))
    return elsewhere


def test_relative_files_work_as_with_parsl(session: Any, here: Path) -> None:
    @stoker.context(slots=2)
    def model():
        with open("model.pkl", "rb") as file:
            return pickle.load(file)

    @stoker.app(context=model())
    def score(model, i):
        with open(f"result{i}.txt", "w") as file:
            file.write(str(model["weight"] * i))
        return i

    @stoker.app
    def reads(i):
        return Path(f"result{i}.txt").read_text()

    @python_app
    def parsls():
        Path("of parsl.txt").write_text("x")

    @bash_app
    def shell(stdout="shell.txt"):
        return "cat model.pkl | wc -c; echo x > of-bash.txt"

    @stoker.app(gang=2)
    def together():
        Path(f"rank{stoker.gang().rank}.txt").write_text("x")

    assert list(stoker.map(score, range(3))) == [0, 1, 2]
    assert list(stoker.map(reads, range(3))) == ["0", "5", "10"]
    parsls().result(60)
    assert shell().result(60) == 0
    together().result(60)
    stoker.app(context=model())(lambda model: Path("made").mkdir())().result(60)
    assert Path("shell.txt").read_text().strip() == str(os.path.getsize("model.pkl"))
    wanted = {"of parsl.txt", "of-bash.txt", "rank0.txt", "rank1.txt", "made", *(f"result{i}.txt" for i in range(3))}
    assert wanted <= set(os.listdir(here))


@pytest.mark.usefixtures("elsewhere")
def test_files_left_on_the_pilot_are_reported_once(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    @stoker.app
    def leaves(i):
        Path(f"lost{i}.txt").write_text("x")

    @stoker.app
    def reads():
        return Path("model.pkl").read_bytes()

    with caplog.at_level(logging.WARNING, logger="stoker"):
        for i in range(3):
            leaves(i).result(60)
        with pytest.raises(FileNotFoundError) as missing:
            reads().result(60)
    (said,) = [record.getMessage() for record in caplog.records if "left files" in record.getMessage()]
    assert said.startswith("test_files_left_on_the_pilot_are_reported_once.leaves left files")
    assert "lost0.txt" in said
    assert f"does not see {here}" in said
    assert any('@context(files=("model.pkl",))' in note for note in missing.value.__notes__)
    assert not list(here.glob("lost*.txt"))


def test_file_sent_to_the_pilot_keeps_its_relative_name(here: Path, elsewhere: ProgramFolder) -> None:
    (here / "data").mkdir()
    (here / "data" / "words.txt").write_text("a b")

    @stoker.context(files=("model.pkl", "data/words.txt"))
    def model():
        return pickle.loads(Path("model.pkl").read_bytes()), Path("data/words.txt").read_text()

    @stoker.app(context=msgspec.structs.replace(model(), home=elsewhere))
    def use(loaded, i):
        Path(f"left{i}").write_text("x")
        return loaded, Path("data/words.txt").read_text(), sorted(os.listdir("."))

    for i in range(2):
        assert use(i).result(60) == (({"weight": 5}, "a b"), "a b", ["data", f"left{i}", "model.pkl"])


@pytest.mark.usefixtures("session")
def test_open_file_is_refused_as_an_argument() -> None:
    log = open("log.txt", "w+")  # noqa: SIM115

    @stoker.app
    def note(number, file=None):
        print("note", number, file=file or log)

    @stoker.app
    def returns():
        return open("model.pkl", "rb")

    @stoker.app
    def plain(value):
        return str(value)

    with log, tempfile.NamedTemporaryFile("w+") as temporary:
        with pytest.raises(errors.SerializationError, match=r"'log' that it closes over is an open file 'log\.txt'"):
            note(1).result(60)
        with pytest.raises(errors.SerializationError, match=r"variable 'log'.*open file"):
            list(stoker.map(note, range(2)))
        with pytest.raises(errors.SerializationError, match="argument 0 is a temporary file"):
            plain(temporary).result(60)
        with pytest.raises(errors.SerializationError, match=r"result is an open file 'model\.pkl'"):
            returns().result(60)
        assert os.path.exists(temporary.name)
        assert plain(3).result(60) == "3"


_PROGRAM = """
import os, sys, stoker

@stoker.context
def model():
    return open("model.txt").read()

@stoker.app(context=model())
def use(model, i):
    open(f"out{i}.txt", "w").write(model)
    return model, os.getcwd()

@stoker.app
def bare(i):
    return os.getcwd()

with stoker.load(session=sys.argv[1], progress=False):
    print(set(stoker.map(use, range(20))) | set(stoker.map(bare, range(20))))
"""


def test_programs_in_two_folders_share_a_session_but_no_files(session: Any, here: Path) -> None:
    (here / "program.py").write_text(_PROGRAM)
    for name in "ab":
        (here / name).mkdir()
        (here / name / "model.txt").write_text(f"model {name}")
    command = [sys.executable, str(here / "program.py"), str(session.folder)]
    programs = {name: subprocess.Popen(command, cwd=here / name, stdout=subprocess.PIPE, text=True) for name in "ab"}
    said = {name: program.communicate(timeout=120)[0] for name, program in programs.items()}
    for name in "ab":
        assert eval(said[name]) == {(f"model {name}", str(here / name)), str(here / name)}
        assert {Path(here, name, f"out{i}.txt").read_text() for i in range(20)} == {f"model {name}"}
