"""Templates of log lines: what a function prints when all is well.

Drain (`drain`) sorts lines into templates, in which what varies is left out. A line that fits a template of good runs
is no news in a bad one. Drain takes some ten microseconds a line, so a line is first masked: its digits go, and what
is left is looked up by its hash. Only lines whose masked form is new reach Drain.

Templates are kept in a file. A damaged one is ignored, `damage` says so, and the templates begin anew.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from stoker.manager.advice.logs.drain import Drain, words_of
from stoker.manager.advice.logs.reading import LineReader, LogSource, shown
from stoker.whole_files import write_whole

MOST_TEMPLATES = 4000
_MOST_HASHES = 50_000
_MOST_WORDS = 60
"""Drain looks at so many words of a line; a longer line counts as its beginning."""
_SIMILAR = 0.5
_DIGITS = b"0123456789"
_VERSION = 1


def masked_line(line: bytes) -> bytes:
    """The line without its digits. Lines of a loop that differ in numbers alone become the same."""
    return line.translate(None, _DIGITS)


class _TemplateFile(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    templates: list[str]


class LineTemplates:
    """The templates of the lines of good runs. `damage`: why a file of templates was ignored; empty: it was not."""

    def __init__(self, *, most: int = MOST_TEMPLATES) -> None:
        self.damage = ""
        self._most = most
        self._drain = Drain(similar=_SIMILAR, most=most)
        self._hashes: dict[int, bool] = {}

    def __len__(self) -> int:
        return len(self._drain)

    @classmethod
    def load(cls, path: Path) -> LineTemplates:
        """The templates of a file; none where there is no file, or where it is damaged."""
        found = cls()
        try:
            kept = msgspec.json.decode(path.read_bytes(), type=_TemplateFile)
            if kept.version != _VERSION:
                raise ValueError(f"version {kept.version} is not {_VERSION}")
        except FileNotFoundError:
            return found
        except (OSError, ValueError) as error:
            found.damage = f"{path} holds no templates of log lines ({error}): they begin anew"
            return found
        for template in kept.templates[: found._most]:
            found._drain.restore(template.split())
        return found

    def save(self, path: Path) -> None:
        """Write the templates, whole or not at all. Raises OSError."""
        templates = sorted(self._drain)
        write_whole(path, msgspec.json.encode(_TemplateFile(_VERSION, templates)))

    def learn(self, source: LogSource) -> None:
        """Take in the log of a good run. Raises OSError for a path that cannot be opened."""
        seen: set[int] = set()
        for line in LineReader(source):
            key = hash(masked_line(line))
            if key not in seen:
                if len(seen) < _MOST_HASHES:
                    seen.add(key)
                self._drain.add(words_of(shown(line), _MOST_WORDS))
        self._hashes.clear()

    def knows(self, line: bytes | str) -> bool:
        """True if a good run has printed a line of this template."""
        line = line if isinstance(line, bytes) else line.encode("utf-8", "replace")
        key = hash(masked_line(line))
        known = self._hashes.get(key)
        if known is None:
            if len(self._hashes) >= _MOST_HASHES:
                self._hashes.clear()
            known = self._hashes[key] = self._drain.knows(words_of(shown(line), _MOST_WORDS))
        return known
