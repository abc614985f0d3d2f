from __future__ import annotations

import json

import pytest

from stoker.pilot.library.failures import in_short


def raised_by(code: str) -> BaseException:
    space = {"__name__": "theirs", "json": json}
    try:
        exec(compile(code, "/home/ana/program.py", "exec"), space)
    except BaseException as error:
        return error
    raise AssertionError("it raised nothing")


DEEP = "def f(n):\n    if not n: raise ValueError('x' * 5000)\n    f(n - 1)\nf(30)\n"
UNREADABLE = """
class Odd(Exception):
    def __str__(self): raise RuntimeError('no')
    @property
    def __notes__(self): raise RuntimeError
raise Odd()
"""


def test_exception_type_text_and_user_lines_are_reported() -> None:
    error = raised_by("def inner(row):\n    return row['claim']\n\ndef outer():\n    return inner({})\n\nouter()\n")
    told = in_short(error).splitlines()
    assert told[0] == "KeyError: 'claim'"
    assert told[-2:] == ["at /home/ana/program.py:5 in outer", "at /home/ana/program.py:2 in inner"]


def test_lines_of_installed_packages_are_left_out() -> None:
    told = in_short(raised_by("json.loads('{')\n")).splitlines()
    assert told[0].startswith("json.decoder.JSONDecodeError: Expecting property name")
    assert [line for line in told if "json/" in line] == []
    assert told[-1] == "at /home/ana/program.py:1 in <module>"


def test_long_text_and_many_frames_are_shortened() -> None:
    told = in_short(raised_by(DEEP)).splitlines()
    assert (len(told[0]), len(told)) == (400, 5)


@pytest.mark.parametrize(
    ("code", "words"),
    [(UNREADABLE, ["Odd"]), ("compile('x = ', 'settings.py', 'exec')", ["SyntaxError", "settings.py"])],
)
def test_error_without_text_or_frames_is_reported(code: str, words: list[str]) -> None:
    told = in_short(raised_by(code))
    assert all(word in told for word in words)
