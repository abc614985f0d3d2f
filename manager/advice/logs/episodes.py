"""Spells of bad lines in a log: an episode begins with a bad line, and ends when `QUIET_LINES` ordinary lines follow.

What a program survived is such an episode, and so is the cascade with which it dies. An episode keeps each kind of bad
line once (digits aside), the first tracebacks, and its first lines with what stood before them: some hundred kilobytes
however long it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from stoker.manager.advice.logs.rules import FaultRule, matching_rules
from stoker.manager.advice.logs.signs import Gravity
from stoker.manager.advice.logs.templates import masked_line
from stoker.manager.advice.logs.tracebacks import OpenTracebacks, TracebackLines

QUIET_LINES = 60
BEFORE_LINES = 40
_WINDOW_LINES = 400
_MOST_SIGNS = 120
_MOST_TRACEBACKS = 6
_OPEN_TRACEBACKS = 32
_STEP_BACK_LINES = 3
"""A plain error this close above the first line that matters belongs to it."""
_ANSWER_LINES = 2
"""A program says so soon after a failure that it tries again."""
_BREAKS_BY_ITSELF = frozenset({"gpu", "nvlink", "node"})
"""Components whose failure a program may seem to survive for a while."""


class BadLine:
    """A line that looks bad: the first of its kind, and how many of them there were."""

    __slots__ = ("count", "gravity", "last", "number", "overcome", "rules", "text", "traceback")

    def __init__(self, number: int, text: str, gravity: Gravity, traceback: TracebackLines | None = None) -> None:
        self.number = number
        self.text = text
        self.gravity = gravity
        self.count = 1
        self.last = number
        self.overcome = False
        """True if the next line says that the program tries again, or goes on."""
        self.rules: list[FaultRule] = []
        self.traceback = traceback


class Episode:
    """One spell of bad lines."""

    def __init__(self, number: int, before: Iterable[tuple[int, bytes]]) -> None:
        self.number = number
        self.window: list[tuple[int, bytes]] = list(before)
        self.tracebacks: list[TracebackLines] = []
        self.signs: dict[int, BadLine] = {}
        self.overcome_after = 0
        """The last line that told of another try or way."""
        self.gravity = Gravity.PLAIN
        self._open = OpenTracebacks()
        self._most_window = len(self.window) + _WINDOW_LINES

    def keep(self, number: int, line: bytes) -> bool:
        """Add a line to the window. Returns False if the window is full."""
        if len(self.window) >= self._most_window:
            return False
        self.window.append((number, line))
        return True

    def sign(self, key: int, number: int, text: str, gravity: Gravity) -> None:
        """Take in a bad line."""
        found = self.signs.get(key)
        if found is not None and not found.overcome:
            found.count += 1
            found.last = number
        elif found is not None or len(self.signs) < _MOST_SIGNS:
            self.signs[key] = BadLine(number, text, gravity)
        self.gravity = max(self.gravity, gravity)

    def begin_traceback(self, number: int, line: str) -> None:
        """A traceback begins here."""
        if len(self._open) < _OPEN_TRACEBACKS:
            traceback = TracebackLines(number, line)
            self._open.add(traceback)
            if len(self.tracebacks) < _MOST_TRACEBACKS:
                self.tracebacks.append(traceback)
        self.gravity = Gravity.FATAL

    @property
    def reads_tracebacks(self) -> bool:
        """True while a traceback has not ended."""
        return len(self._open) > 0

    def in_traceback(self, number: int, line: str) -> bool:
        """Give a line to the tracebacks that have not ended. Returns True if it is of one."""
        for traceback in self._open.candidates(line):
            said = len(traceback.exceptions)
            if traceback.add(number, line):
                if len(traceback.exceptions) > said:
                    self._raised(traceback)
                return True
            if traceback.done:
                self._open.remove(traceback)
        return False

    def _raised(self, traceback: TracebackLines) -> None:
        number, text = traceback.exceptions[-1]
        key = hash(("raised", masked_line(text.encode("utf-8", "replace"))))
        found = self.signs.get(key)
        if found is not None and not found.overcome:
            found.count += 1
            found.last = number
        elif found is not None or len(self.signs) < _MOST_SIGNS:
            self.signs[key] = BadLine(number, text, Gravity.FATAL, traceback)

    def overcame(self, number: int) -> None:
        """A line says that the program goes on: what failed just before it is no failure."""
        self.overcome_after = number
        for sign in self.signs.values():
            if 0 < number - sign.last <= _ANSWER_LINES:
                sign.overcome = True

    def judge(self, rules: tuple[FaultRule, ...]) -> None:
        """Look each bad line up in the table of rules."""
        for sign in self.signs.values():
            sign.rules = matching_rules(sign.text, rules)

    def first(self) -> BadLine:
        """The bad line with which the failure begins: the first that is no consequence of another."""
        best = min(self.signs.values(), key=lambda sign: (_rank(sign), _begins(sign)))
        for sign in sorted(self.signs.values(), key=_begins, reverse=True):
            gap = _begins(best) - _begins(sign)
            if 0 < gap <= _STEP_BACK_LINES and _rank(sign) < _SECONDARY and sign.traceback is None:
                best = sign
        return best

    def broken(self, rules: tuple[FaultRule, ...]) -> BadLine | None:
        """The first bad line that tells of hardware or a node that failed, and was not overcome. `rules`: those of such
        failures."""
        lasting = (sign for sign in self.signs.values() if not sign.overcome)
        return next((sign for sign in lasting if matching_rules(sign.text, rules)), None)

    def traceback_near(self, number: int, before: int) -> TracebackLines | None:
        """The first traceback from so many lines before a line on, which nothing overcame."""
        overcome = [sign.traceback for sign in self.signs.values() if sign.overcome]
        return next((each for each in self.tracebacks if each.number >= number - before and each not in overcome), None)

    def ordered(self) -> Iterator[BadLine]:
        """The bad lines by number."""
        yield from sorted(self.signs.values(), key=lambda sign: sign.number)


_SECONDARY = 2
_SEVERAL = 3


def _rank(sign: BadLine) -> int:
    """0: a failure by itself. 2: what follows from another failure: the rules say so, or several ranks say it, for the
    cause is one's alone. 3: what was overcome."""
    if sign.overcome:
        return _SECONDARY + 1
    follows = all(rule.secondary for rule in sign.rules) if sign.rules else sign.count >= _SEVERAL
    return _SECONDARY if follows else 0


def _begins(sign: BadLine) -> int:
    return sign.traceback.number if sign.traceback is not None else sign.number


def hardware_rules(rules: tuple[FaultRule, ...]) -> tuple[FaultRule, ...]:
    """The rows of what may break without an end to the program at once."""
    return tuple(rule for rule in rules if rule.component in _BREAKS_BY_ITSELF and not rule.secondary)
