"""Errors show the user's lines and advice, and no frame of Stoker."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from stoker.errors import ConfigError
from stoker.tracebacks import trim

SITE = 'name = "here"\n[pilot]\ndevices = "cpu:1"\n'
OWN = ("manager/executor", "site-packages/parsl")


def stderr_of(folder: Path, text: str, *command: str) -> str:
    (folder / "program.py").write_text(textwrap.dedent(text))
    (folder / "here.toml").write_text(SITE)
    words = [sys.executable, *command, "program.py"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stderr


CALL = """
    import stoker

    @stoker.app
    def label_of(text):
        return {"yes": 1}[text]

    if __name__ == "__main__":
        with stoker.load("here.toml"):
            list(stoker.map(label_of, ["yes", "no"]))
    """


@pytest.mark.parametrize("command", [(), ("-m", "stoker.manager.cli.entry", "run")], ids=["python", "stoker run"])
def test_an_exception_of_a_call_shows_the_users_frames_alone(tmp_path: Path, command: tuple[str, ...]) -> None:
    said = stderr_of(tmp_path, CALL, *command)
    assert "return {" in said, "the line in the library, which is the cause"
    assert "direct cause of the following exception" in said
    assert 'list(stoker.map(label_of, ["yes", "no"]))' in said
    assert "KeyError: 'no'\ncall c-1" in said
    assert not any(place in said for place in OWN)


def test_an_error_of_an_option_shows_the_users_line_alone(tmp_path: Path) -> None:
    said = stderr_of(tmp_path, "import stoker\nstoker.load('hree.toml')\n")
    assert said.splitlines()[1:] == [
        f'  File "{os.path.realpath(tmp_path)}/program.py", line 2, in <module>',
        "    stoker.load('hree.toml')",
        "stoker.errors.ConfigError: hree.toml: no such file; did you mean here.toml?",
    ]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("@stoker.context(memory=16)\ndef load(): ...", "RecipeError: @context(memory=16): 16 is not a size"),
        ("@stoker.app(timeout='2')\ndef run(): ...", "SpecificationError: timeout: '2' is not a duration"),
        ("stoker.app()(abs)(1)", "SessionError: abs was called before a site was loaded"),
    ],
)
def test_an_error_before_a_session_shows_the_users_line_alone(tmp_path: Path, line: str, why: str) -> None:
    said = stderr_of(tmp_path, f"import stoker\n{line}\n")
    assert why in said
    assert said.count("  File ") == 1


def test_an_error_of_the_users_inputs_keeps_both_of_their_frames(tmp_path: Path) -> None:
    said = stderr_of(
        tmp_path,
        """
        import stoker

        def items():
            yield 1
            raise ValueError("row 2 is bad")

        if __name__ == "__main__":
            with stoker.load("here.toml"):
                list(stoker.map(abs, items()))
        """,
    )
    assert "list(stoker.map(abs, items()))" in said
    assert "in items" in said
    assert "ValueError: row 2 is bad" in said
    assert not any(place in said for place in OWN)


def test_an_error_of_stoker_itself_stays_whole() -> None:
    from stoker.units import show_bytes

    with pytest.raises(TypeError) as caught:
        show_bytes(None)  # type: ignore[arg-type]
    trim(caught.value)
    assert caught.value.__traceback__ is not None
    assert caught.value.__traceback__.tb_next is not None


def test_a_cause_is_trimmed_and_kept() -> None:
    from stoker.config import load_site

    def load() -> None:
        try:
            load_site(3)  # type: ignore[arg-type]
        except ConfigError as error:
            raise RuntimeError("no site") from error

    with pytest.raises(RuntimeError) as caught:
        load()
    trim(caught.value)
    cause = caught.value.__cause__
    assert isinstance(cause, ConfigError)
    assert cause.__traceback__ is not None
    assert (cause.__traceback__.tb_frame.f_code.co_name, cause.__traceback__.tb_next) == ("load", None)


def test_a_session_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    run = ("-m", "stoker.manager.cli.entry", "run", "--session", "nosuch")
    said = stderr_of(tmp_path, "raise SystemExit('it ran')\n", *run)
    assert said.startswith("no session 'nosuch' on this machine")
    assert len(said.splitlines()) == 1


def test_pool_in_a_call_says_how_its_function_is_found(tmp_path: Path) -> None:
    said = stderr_of(
        tmp_path,
        """
        import multiprocessing
        import stoker

        def square(number):
            return number * number

        @stoker.app
        def squares(count):
            with multiprocessing.Pool(1) as pool:
                return pool.map(square, range(count))

        if __name__ == "__main__":
            with stoker.load("here.toml"):
                print(squares(3).result())
        """,
    )
    assert "pickle, which multiprocessing uses, finds square by its module and name" in said
    assert "Import it inside the call from a file next to the program (from helpers import square)" in said


def test_that_advice_works(tmp_path: Path) -> None:
    (tmp_path / "helpers.py").write_text("def square(number):\n    return number * number\n")
    said = stderr_of(
        tmp_path,
        """
        import multiprocessing
        import stoker

        @stoker.app
        def squares(count):
            from helpers import square

            with multiprocessing.Pool(1) as pool:
                return pool.map(square, range(count))

        if __name__ == "__main__":
            with stoker.load("here.toml"):
                raise SystemExit(str(squares(3).result()))
        """,
    )
    assert said.strip().endswith("[0, 1, 4]")
