"""Texts that become part of scripts and commands: a line break in one of them would be a line of its own."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from typing import Any

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
