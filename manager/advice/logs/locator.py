"""Find the first relevant lines of a log (SchedMate §3.3, the failure locator).

The paper finds the border between ordinary lines and errors by binary search. `locate` reads the whole log, so it also
handles harmless warnings, survived failures, and ranks that print after another rank has died.

Lines that differ only in digits are graded once. Bad lines form *episodes*, which end after `QUIET_LINES` ordinary
lines. The failure is the first episode that shows broken hardware, else the episode in which the log ends, else the
last fatal episode without a retry. The relevant line is the first bad line that is no consequence of another rank's
end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from stoker.manager.advice.logs.failures import ROWS, FaultRule, Located, LogLine, matching_rules
from stoker.manager.advice.logs.reading import (
    TRACEBACK,
    Gravity,
    LineReader,
    LogSource,
    TracebackLines,
    gravity,
    may_report_error,
    overcome,
    remove_digits,
    shown,
)
from stoker.manager.advice.secrets import masked

# ---- episodes of bad lines


QUIET_LINES = 60
BEFORE_LINES = 40
_WINDOW_LINES = 400
_MOST_SIGNS = 120
_MOST_TRACEBACKS = 6
_OPEN_TRACEBACKS = 32
_ANSWER_LINES = 2
"""Maximum number of lines between an error and the message that announces a retry."""
_BREAKS_BY_ITSELF = frozenset({"gpu", "nvlink", "node"})
"""Hardware components. Their failure is the cause even if the program continues for some time."""
_SECONDARY = 2
_SEVERAL = 3


@dataclass(eq=False, slots=True)
class BadLine:
    """An error line that represents all error lines that differ only in digits. `overcome`: True if the next lines
    announce that the program continues.
    """

    number: int
    text: str
    traceback: TracebackLines | None
    last: int
    count: int = 1
    overcome: bool = False
    rules: list[FaultRule] = field(default_factory=list)

    @property
    def begins_at(self) -> int:
        return self.traceback.number if self.traceback is not None else self.number

    @property
    def rank(self) -> int:
        """Sort key: 0 for an independent failure, 2 for a consequence of another (by the rules, or because several
        ranks print it), 3 if the program continued.
        """
        if self.overcome:
            return _SECONDARY + 1
        follows = all(rule.secondary for rule in self.rules) if self.rules else self.count >= _SEVERAL
        return _SECONDARY if follows else 0


class Episode:
    """A sequence of error lines. `overcome_after`: number of the last line that announced a retry. `open`: tracebacks
    that are not complete yet.
    """

    def __init__(self, before: Iterable[tuple[int, bytes]]) -> None:
        self.window: list[tuple[int, bytes]] = list(before)
        self.tracebacks: list[TracebackLines] = []
        self.signs: dict[int, BadLine] = {}
        self.overcome_after = 0
        self.gravity = Gravity.PLAIN
        self.open: list[TracebackLines] = []
        self._most_window = len(self.window) + _WINDOW_LINES

    def keep(self, number: int, line: bytes) -> bool:
        if len(self.window) >= self._most_window:
            return False
        self.window.append((number, line))
        return True

    def sign(self, key: int, number: int, text: str, gravity: Gravity, traceback: TracebackLines | None = None) -> None:
        found = self.signs.get(key)
        if found is not None and not found.overcome:
            found.count += 1
            found.last = number
        elif found is not None or len(self.signs) < _MOST_SIGNS:
            self.signs[key] = BadLine(number, text, traceback, last=number)
        self.gravity = max(self.gravity, gravity)

    def begin_traceback(self, number: int, line: str) -> None:
        if len(self.open) < _OPEN_TRACEBACKS:
            traceback = TracebackLines(number, line)
            self.open.append(traceback)
            self.open.sort(key=lambda each: not each.marks_ranks)  # tracebacks with a rank mark see each line first
            if len(self.tracebacks) < _MOST_TRACEBACKS:
                self.tracebacks.append(traceback)
        self.gravity = Gravity.FATAL

    def add_line_to_traceback(self, number: int, line: str) -> bool:
        for traceback in [*self.open]:
            raised = len(traceback.exceptions)
            if traceback.add(number, line):
                if len(traceback.exceptions) > raised:
                    at, text = traceback.exceptions[-1]
                    key = hash(("raised", remove_digits(text.encode("utf-8", "replace"))))
                    self.sign(key, at, text, Gravity.FATAL, traceback)
                return True
            if traceback.done:
                self.open.remove(traceback)
        return False

    def record_recovery_at_line(self, number: int) -> None:
        self.overcome_after = number
        for sign in self.signs.values():
            if 0 < number - sign.last <= _ANSWER_LINES:
                sign.overcome = True

    def first(self, rules: tuple[FaultRule, ...]) -> BadLine:
        for sign in self.signs.values():
            sign.rules = matching_rules(sign.text, rules)
        return min(self.signs.values(), key=lambda sign: (sign.rank, sign.begins_at))

    def ordered(self) -> list[BadLine]:
        return sorted(self.signs.values(), key=lambda sign: sign.number)


# ---- one pass over a log


AFTER_LINES = 160
"""Lines to return after the first relevant line. The paper returns `BEFORE_LINES` + `AFTER_LINES` = 200 lines."""
_MOST_KINDS = 100_000
_MOST_EPISODES = 24
_WHOLE_LOOKS = 20_000
"""Maximum number of lines that are searched with all patterns. Lines that differ only in digits count once."""


def locate(source: LogSource, *, rules: tuple[FaultRule, ...] = ROWS) -> Located | None:
    """Return the first relevant lines of a log, or None if the log shows no failure. Raises OSError."""
    scan = _Scan()
    scan.read(source)
    return scan.result(rules)


class _Scan:
    def __init__(self) -> None:
        self.lines = 0
        self._kinds: dict[int, Gravity] = {}
        self._recent: deque[tuple[int, bytes]] = deque(maxlen=BEFORE_LINES)
        self._episodes: list[Episode] = []
        self._open: Episode | None = None
        self._looks = _WHOLE_LOOKS

    def read(self, source: LogSource) -> None:
        reader = LineReader(source)
        kinds, recent = self._kinds, self._recent
        quiet = 0
        wants_lines = False
        for line in reader:
            key = hash(remove_digits(line))
            grade = kinds.get(key)
            if grade is None:
                grade = self._grade_line(key, line)
            episode = self._open
            if episode is None:
                if grade < Gravity.ERROR:
                    recent.append((reader.number, line))
                    continue
                episode = self._begin()
                quiet, wants_lines = 0, True
            if wants_lines:
                wants_lines = episode.keep(reader.number, line)
            if grade or episode.open:
                if self._take(episode, key, reader.number, line, grade):
                    quiet = 0
            elif line:
                quiet += 1
                if quiet >= QUIET_LINES:
                    self._open = None
            recent.append((reader.number, line))
        self.lines = reader.number

    def _grade_line(self, key: int, line: bytes) -> Gravity:
        found = Gravity.PLAIN
        if may_report_error(line):
            self._looks -= 1
            if self._looks > 0:
                found = gravity(shown(line))
            elif TRACEBACK.encode() in line:
                found = Gravity.FATAL
            elif b"error" in line.lower():
                found = Gravity.ERROR
        if len(self._kinds) >= _MOST_KINDS:
            self._kinds.clear()
        self._kinds[key] = found
        return found

    def _begin(self) -> Episode:
        self._open = Episode(self._recent)
        self._episodes.append(self._open)
        if len(self._episodes) > _MOST_EPISODES:
            # Drop the least severe of the ended episodes. If several are equally severe, drop the latest of them.
            worst = min(range(len(self._episodes) - 1), key=lambda at: (self._episodes[at].gravity, -at))
            del self._episodes[worst]
        return self._open

    def _take(self, episode: Episode, key: int, number: int, line: bytes, grade: Gravity) -> bool:
        text = shown(line)
        if episode.open and episode.add_line_to_traceback(number, text):
            return True
        if grade is Gravity.FATAL and TRACEBACK in text:
            episode.begin_traceback(number, text)
        elif grade is Gravity.NOTICE and overcome(text):
            episode.record_recovery_at_line(number)
        elif grade >= Gravity.ERROR:
            episode.sign(key, number, text, grade)
        return grade >= Gravity.ERROR

    def result(self, rules: tuple[FaultRule, ...]) -> Located | None:
        candidates = [episode for episode in self._episodes if episode.signs]
        hardware = tuple(rule for rule in rules if rule.component in _BREAKS_BY_ITSELF and not rule.secondary)
        for episode in candidates:
            lasting = (sign for sign in episode.signs.values() if not sign.overcome)
            broken = next((sign for sign in lasting if matching_rules(sign.text, hardware)), None)
            if broken is not None and (episode is self._open or episode.overcome_after < broken.number):
                return self._collect_relevant_lines(episode, None if episode is self._open else broken, rules)
        survived = [each for each in candidates if each.gravity is Gravity.FATAL and not each.overcome_after]
        failed = self._open if self._open is not None and self._open.signs else survived[-1] if survived else None
        return self._collect_relevant_lines(failed, None, rules) if failed is not None else None

    def _collect_relevant_lines(self, episode: Episode, first: BadLine | None, rules: tuple[FaultRule, ...]) -> Located:
        first = first or episode.first(rules)
        number, text, traceback = first.begins_at, first.text, first.traceback
        if traceback is not None:
            text = traceback.lines[0][1]
        else:
            survived = [sign.traceback for sign in episode.signs.values() if sign.overcome]
            later = (
                each for each in episode.tracebacks if each.number >= number - BEFORE_LINES and each not in survived
            )
            traceback = next(later, None)
        window = [
            LogLine(at, masked(shown(line)))
            for at, line in episode.window
            if -BEFORE_LINES <= at - number <= AFTER_LINES
        ]
        signs = [sign for sign in episode.ordered() if sign.number >= number and not sign.overcome]
        return Located(
            LogLine(number, masked(text)),
            before=tuple(each for each in window if each.number < number),
            after=tuple(each for each in window if each.number > number),
            signs=tuple(LogLine(sign.number, masked(sign.text)) for sign in signs),
            traceback=tuple(LogLine(at, masked(line)) for at, line in (traceback.lines if traceback else ())),
            lines=self.lines,
        )
