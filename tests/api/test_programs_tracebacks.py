"""Errors show the user's lines and advice, but no frame of Stoker."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stoker.errors import ConfigError
from stoker.tracebacks import remove_stoker_frames

SITE = 'name = "here"\n[pilot]\ndevices = "cpu:1"\n'
OWN = ("manager/executor", "site-packages/parsl")
STOKER_RUN = ("-m", "stoker.manager.cli.entry", "run")


@pytest.fixture(scope="module")
def stderr_of(run_program_in):
    def stderr_of(folder: Path, text: str, *command: str) -> str:
        (folder / "here.toml").write_text(SITE)
        done = run_program_in(folder, text, command=command)
        assert done.returncode == 1, done.stdout + done.stderr
        return done.stderr

    return stderr_of


CALL = """
import stoker

@stoker.app
def label_of(text):
    return {"yes": 1}[text]

if __name__ == "__main__":
    with stoker.load("here.toml"):
        list(stoker.map(label_of, ["yes", "no"]))
"""
SEVERAL = """
import multiprocessing
import sys
import stoker

@stoker.app
def label_of(text):
    return {"yes": 1}[text]

def items():
    yield 1
    raise ValueError("row 2 is bad")

def square(number):
    return number * number

@stoker.app
def squares_of_main(count):
    with multiprocessing.Pool(1) as pool:
        return pool.map(square, range(count))

@stoker.app
def squares_of_helpers(count):
    from helpers import square

    with multiprocessing.Pool(1) as pool:
        return pool.map(square, range(count))

def told(run):
    try:
        run()
    except Exception:
        sys.excepthook(*sys.exc_info())  # print the exception like the end of a program
    print("----", file=sys.stderr)

if __name__ == "__main__":
    with stoker.load("here.toml"):
        told(lambda: list(stoker.map(label_of, ["yes", "no"])))
        told(lambda: list(stoker.map(abs, items())))
        told(lambda: squares_of_main(3).result())
        raise SystemExit(str(squares_of_helpers(3).result()))
"""


@pytest.fixture(scope="module")
def several(tmp_path_factory, stderr_of):
    folder = tmp_path_factory.mktemp("program")
    (folder / "helpers.py").write_text("def square(number):\n    return number * number\n")
    said = stderr_of(folder, SEVERAL).split("----\n")
    return dict(zip(("call", "inputs", "pool", "advice taken"), said, strict=True))


@pytest.mark.parametrize("way", ["python", pytest.param("stoker run", marks=pytest.mark.long)])
def test_exception_of_a_call_shows_only_frames_of_the_user(tmp_path, several, stderr_of, way):
    said = several["call"] if way == "python" else stderr_of(tmp_path, CALL, *STOKER_RUN)
    assert "return {" in said, "the line in the library, which is the cause"
    assert "direct cause of the following exception" in said
    assert 'list(stoker.map(label_of, ["yes", "no"]))' in said
    assert "KeyError: 'no'\ncall c-1" in said
    assert not any(place in said for place in OWN)


def test_input_error_of_a_map_shows_the_map_line_and_the_input_frame(several):
    said = several["inputs"]
    assert "list(stoker.map(abs, items()))" in said
    assert "in items" in said
    assert "ValueError: row 2 is bad" in said
    assert not any(place in said for place in OWN)


def test_process_pool_in_a_call_error_says_how_to_define_functions(several):
    said = several["pool"]
    assert "pickle, which multiprocessing uses, finds square by its module and name" in said
    assert "Import square inside the call from a file next to the program (from helpers import square)" in said
    assert several["advice taken"].strip().endswith("[0, 1, 4]")


OPTIONS = {
    "stoker.load('hree.toml')": "stoker.errors.ConfigError: hree.toml: no such file; did you mean here.toml?",
    "stoker.context(memory=16)(dict)": "RecipeError: @context(memory=16): 16 is not a size",
    "stoker.app(timeout='2')(dict)": "SpecificationError: timeout: '2' is not a duration",
    "stoker.app()(abs)(1)": "SessionError: abs was called before a site was loaded",
}


def test_error_before_a_session_shows_only_the_line_of_the_user(tmp_path, stderr_of):
    tried = "\n".join(f"try:\n    {line}\nexcept Exception:\n    told()" for line in OPTIONS)
    told = "def told():\n    sys.excepthook(*sys.exc_info())\n    print('----', file=sys.stderr)"
    shown = stderr_of(tmp_path, f"import sys\nimport stoker\n{told}\n{tried}\nstoker.load('hree.toml')\n")
    *handled, uncaught = shown.split("----\n")
    for said, (line, why) in zip([*handled, uncaught], [*OPTIONS.items(), next(iter(OPTIONS.items()))], strict=True):
        place, shows, *rest = said.splitlines()[1:]
        assert place.startswith(f'  File "{os.path.realpath(tmp_path)}/program.py", line ')
        assert shows == f"    {line}"
        assert why in "\n".join(rest)
        assert said.count("  File ") == 1


def test_error_inside_stoker_keeps_its_whole_traceback() -> None:
    from stoker.units import show_bytes

    with pytest.raises(TypeError) as caught:
        show_bytes(None)  # type: ignore[arg-type]
    remove_stoker_frames(caught.value)
    assert caught.value.__traceback__ is not None
    assert caught.value.__traceback__.tb_next is not None


def test_cause_of_an_exception_is_kept_with_trimmed_frames() -> None:
    from stoker.config import load_site

    def load() -> None:
        try:
            load_site(3)  # type: ignore[arg-type]
        except ConfigError as error:
            raise RuntimeError("no site") from error

    with pytest.raises(RuntimeError) as caught:
        load()
    remove_stoker_frames(caught.value)
    cause = caught.value.__cause__
    assert isinstance(cause, ConfigError)
    assert cause.__traceback__ is not None
    assert (cause.__traceback__.tb_frame.f_code.co_name, cause.__traceback__.tb_next) == ("load", None)
