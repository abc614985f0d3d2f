"""Texts that become part of scripts and commands: a line break in one of them would be a line of its own."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stoker.errors import SessionError

_LINE_ENDS = ("\u2028", "\u2029")
"""Unicode's own, which some readers of lines take for line breaks."""


def refuse_control_characters(settings: Any, *, of_several_lines: Iterable[str] = ()) -> None:
    """Raise ValueError if a text of a struct, or one in a list of texts, has a control character.

    Settings `of_several_lines` may have line breaks and tabs. The message begins with the name of the setting.
    """
    several = frozenset(of_several_lines)
    for name in settings.__struct_fields__:
        value = getattr(settings, name)
        allowed = "\n\t" if name in several else ""
        for text in (value,) if isinstance(value, str) else value if isinstance(value, tuple) else ():
            found = next((each for each in text if is_control_character(each) and each not in allowed), "")
            if found:
                what = "a line break" if found in "\r\n" else f"the control character U+{ord(found):04X}"
                raise ValueError(f"{name} = {text!r} has {what} in it; take it out")


def is_control_character(character: str) -> bool:
    """True for control characters, line and paragraph separators, and halves of surrogate pairs."""
    return character in _LINE_ENDS or unicodedata.category(character) in ("Cc", "Cs")


def refuse_odd_path(path: str | Path, *, what: str, advice: str) -> None:
    """Raise SessionError if a path is not valid UTF-8: messages, scripts and records are, and it stands in them."""
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        raise SessionError(
            f"{what}, {os.fsencode(path)!r}, has a name that is not valid UTF-8, which Stoker cannot use: {advice}"
        ) from None
