"""Find the first relevant lines of a log (SchedMate §3.3, the failure locator).

The paper finds the border between ordinary lines and errors by binary search. `locate_failure` reads the whole log, so
it also handles harmless warnings, survived failures, and ranks that print after another rank has died.

Lines that differ only in digits are graded once. Bad lines form *episodes*, which end after `QUIET_LINES` ordinary
lines. The failure is the first episode that shows broken hardware, else the episode in which the log ends, else the
last fatal episode without a retry. The relevant line is the first bad line that is no consequence of another rank's
end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from stoker.manager.advice.logs.failures import LOG_RULES, FaultRule, LocatedFailure, LogLine, find_matching_rules
from stoker.manager.advice.logs.reading import (
    TRACEBACK,
    LineReader,
    LogSeverity,
    LogSource,
    TracebackLines,
    announces_recovery,
    assess_severity,
    may_report_error,
    printable_text,
    remove_digits,
)
from stoker.manager.advice.secrets import mask_secrets

# ---- episodes of bad lines


QUIET_LINES = 60
BEFORE_LINES = 40
_WINDOW_LINES = 400
_MOST_SIGNS = 120
_MOST_TRACEBACKS = 6
_OPEN_TRACEBACKS = 32
_LINES_UNTIL_RETRY = 2
"""Maximum number of lines between an error and the message that announces a retry."""
_DECISIVE_COMPONENTS = frozenset({"gpu", "nvlink", "node"})
"""Hardware components. If one of them fails, it is the cause, even if the program continues for some time."""
_SECONDARY = 2
_SEVERAL_RANKS = 3


@dataclass(eq=False, slots=True)
class ErrorLine:
    """An error line that stands for all error lines that differ from it only in digits. `is_survived`: True if the next
    lines announce that the program continues.
    """

    number: int
    text: str
    traceback: TracebackLines | None
    last_number: int
    count: int = 1
    is_survived: bool = False
    rules: list[FaultRule] = field(default_factory=list)

    @property
    def first_line_number(self) -> int:
        return self.traceback.number if self.traceback is not None else self.number

    @property
    def cause_rank(self) -> int:
        """Return a sort key: 0 for an independent failure, 2 for a consequence of another failure (a rule says so, or
        several ranks print it), 3 if the program continued.
        """
        if self.is_survived:
            return _SECONDARY + 1
        follows = all(rule.secondary for rule in self.rules) if self.rules else self.count >= _SEVERAL_RANKS
        return _SECONDARY if follows else 0


class ErrorEpisode:
    """A sequence of error lines. `last_recovery_line`: number of the last line that announced a retry.
    `open_tracebacks`: tracebacks that are not complete yet.
    """

    def __init__(self, before: Iterable[tuple[int, bytes]]) -> None:
        self.window: list[tuple[int, bytes]] = list(before)
        self.tracebacks: list[TracebackLines] = []
        self.error_lines: dict[int, ErrorLine] = {}
        self.last_recovery_line = 0
        self.severity = LogSeverity.PLAIN
        self.open_tracebacks: list[TracebackLines] = []
        self._most_window = len(self.window) + _WINDOW_LINES

    def add_to_window(self, number: int, line: bytes) -> bool:
        if len(self.window) >= self._most_window:
            return False
        self.window.append((number, line))
        return True

    def record_error(
        self, key: int, number: int, text: str, severity: LogSeverity, traceback: TracebackLines | None = None
    ) -> None:
        found = self.error_lines.get(key)
        if found is not None and not found.is_survived:
            found.count += 1
            found.last_number = number
        elif found is not None or len(self.error_lines) < _MOST_SIGNS:
            self.error_lines[key] = ErrorLine(number, text, traceback, last_number=number)
        self.severity = max(self.severity, severity)

    def begin_traceback(self, number: int, line: str) -> None:
        if len(self.open_tracebacks) < _OPEN_TRACEBACKS:
            traceback = TracebackLines(number, line)
            self.open_tracebacks.append(traceback)
            # Tracebacks with a rank mark are offered each line first, because the others accept lines of any rank.
            self.open_tracebacks.sort(key=lambda each: not each.has_rank_mark)
            if len(self.tracebacks) < _MOST_TRACEBACKS:
                self.tracebacks.append(traceback)
        self.severity = LogSeverity.FATAL

    def add_line_to_traceback(self, number: int, line: str) -> bool:
        for traceback in [*self.open_tracebacks]:
            raised = len(traceback.exceptions)
            if traceback.add_if_part(number, line):
                if len(traceback.exceptions) > raised:
                    at, text = traceback.exceptions[-1]
                    key = hash(("raised", remove_digits(text.encode("utf-8", "replace"))))
                    self.record_error(key, at, text, LogSeverity.FATAL, traceback)
                return True
            if traceback.is_complete:
                self.open_tracebacks.remove(traceback)
        return False

    def record_recovery_at_line(self, number: int) -> None:
        self.last_recovery_line = number
        for sign in self.error_lines.values():
            if 0 < number - sign.last_number <= _LINES_UNTIL_RETRY:
                sign.is_survived = True

    def find_root_error(self, rules: tuple[FaultRule, ...]) -> ErrorLine:
        for sign in self.error_lines.values():
            sign.rules = find_matching_rules(sign.text, rules)
        return min(self.error_lines.values(), key=lambda sign: (sign.cause_rank, sign.first_line_number))

    def errors_in_order(self) -> list[ErrorLine]:
        return sorted(self.error_lines.values(), key=lambda sign: sign.number)


# ---- one pass over a log


AFTER_LINES = 160
"""Lines to return after the first relevant line. The paper returns `BEFORE_LINES` + `AFTER_LINES` = 200 lines."""
_MOST_KINDS = 100_000
_MOST_EPISODES = 24
_MOST_FULL_SEARCHES = 20_000
"""Maximum number of lines that are searched with all patterns. Lines that differ only in digits count once."""


def locate_failure(source: LogSource, *, rules: tuple[FaultRule, ...] = LOG_RULES) -> LocatedFailure | None:
    """Return the first relevant lines of a log, or None if the log shows no failure. Raises OSError."""
    scan = _LogScan()
    scan.read_lines(source)
    return scan.build_result(rules)


class _LogScan:
    def __init__(self) -> None:
        self.lines = 0
        self._kinds: dict[int, LogSeverity] = {}
        self._recent: deque[tuple[int, bytes]] = deque(maxlen=BEFORE_LINES)
        self._episodes: list[ErrorEpisode] = []
        self._open: ErrorEpisode | None = None
        self._searches_left = _MOST_FULL_SEARCHES

    def read_lines(self, source: LogSource) -> None:
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
                if grade < LogSeverity.ERROR:
                    recent.append((reader.number, line))
                    continue
                episode = self._begin_episode()
                quiet, wants_lines = 0, True
            if wants_lines:
                wants_lines = episode.add_to_window(reader.number, line)
            if grade or episode.open_tracebacks:
                if self._add_to_episode(episode, key, reader.number, line, grade):
                    quiet = 0
            elif line:
                quiet += 1
                if quiet >= QUIET_LINES:
                    self._open = None
            recent.append((reader.number, line))
        self.lines = reader.number

    def _grade_line(self, key: int, line: bytes) -> LogSeverity:
        found = LogSeverity.PLAIN
        if may_report_error(line):
            self._searches_left -= 1
            if self._searches_left > 0:
                found = assess_severity(printable_text(line))
            elif TRACEBACK.encode() in line:
                found = LogSeverity.FATAL
            elif b"error" in line.lower():
                found = LogSeverity.ERROR
        if len(self._kinds) >= _MOST_KINDS:
            self._kinds.clear()
        self._kinds[key] = found
        return found

    def _begin_episode(self) -> ErrorEpisode:
        self._open = ErrorEpisode(self._recent)
        self._episodes.append(self._open)
        if len(self._episodes) > _MOST_EPISODES:
            # Drop the least severe of the ended episodes. If several are equally severe, drop the latest of them.
            worst = min(range(len(self._episodes) - 1), key=lambda at: (self._episodes[at].severity, -at))
            del self._episodes[worst]
        return self._open

    def _add_to_episode(self, episode: ErrorEpisode, key: int, number: int, line: bytes, grade: LogSeverity) -> bool:
        text = printable_text(line)
        if episode.open_tracebacks and episode.add_line_to_traceback(number, text):
            return True
        if grade is LogSeverity.FATAL and TRACEBACK in text:
            episode.begin_traceback(number, text)
        elif grade is LogSeverity.NOTICE and announces_recovery(text):
            episode.record_recovery_at_line(number)
        elif grade >= LogSeverity.ERROR:
            episode.record_error(key, number, text, grade)
        return grade >= LogSeverity.ERROR

    def build_result(self, rules: tuple[FaultRule, ...]) -> LocatedFailure | None:
        candidates = [episode for episode in self._episodes if episode.error_lines]
        hardware = tuple(rule for rule in rules if rule.component in _DECISIVE_COMPONENTS and not rule.secondary)
        for episode in candidates:
            lasting = (sign for sign in episode.error_lines.values() if not sign.is_survived)
            broken = next((sign for sign in lasting if find_matching_rules(sign.text, hardware)), None)
            if broken is not None and (episode is self._open or episode.last_recovery_line < broken.number):
                return self._collect_relevant_lines(episode, None if episode is self._open else broken, rules)
        survived = [each for each in candidates if each.severity is LogSeverity.FATAL and not each.last_recovery_line]
        failed = self._open if self._open is not None and self._open.error_lines else survived[-1] if survived else None
        return self._collect_relevant_lines(failed, None, rules) if failed is not None else None

    def _collect_relevant_lines(
        self, episode: ErrorEpisode, first: ErrorLine | None, rules: tuple[FaultRule, ...]
    ) -> LocatedFailure:
        first = first or episode.find_root_error(rules)
        number, text, traceback = first.first_line_number, first.text, first.traceback
        if traceback is not None:
            text = traceback.lines[0][1]
        else:
            survived = [sign.traceback for sign in episode.error_lines.values() if sign.is_survived]
            later = (
                each for each in episode.tracebacks if each.number >= number - BEFORE_LINES and each not in survived
            )
            traceback = next(later, None)
        window = [
            LogLine(at, mask_secrets(printable_text(line)))
            for at, line in episode.window
            if -BEFORE_LINES <= at - number <= AFTER_LINES
        ]
        signs = [sign for sign in episode.errors_in_order() if sign.number >= number and not sign.is_survived]
        return LocatedFailure(
            LogLine(number, mask_secrets(text)),
            before=tuple(each for each in window if each.number < number),
            after=tuple(each for each in window if each.number > number),
            error_lines=tuple(LogLine(sign.number, mask_secrets(sign.text)) for sign in signs),
            traceback=tuple(LogLine(at, mask_secrets(line)) for at, line in (traceback.lines if traceback else ())),
            lines=self.lines,
        )
