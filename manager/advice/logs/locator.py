"""Spells of bad lines in a log: an episode begins with a bad line, and ends when `QUIET_LINES` ordinary lines follow.

What a program survived is such an episode, and so is the cascade with which it dies. An episode keeps each kind of bad
line once (digits aside), the first tracebacks, and its first lines with what stood before them: some hundred kilobytes
however long it is.

Find the first lines of a log that matter (SchedMate §3.3, the failure locator).

The paper assumes ordinary lines and then errors, and searches the border by halves. `locate` reads a log once, so it
also handles warnings that look bad, failures that were overcome, and ranks that print on while one is dead.

A line is masked (its digits go) and looked up by its hash; only the first line of each masked form is graded. Bad lines
form *episodes*: an episode begins with a bad line and ends when `QUIET_LINES` ordinary lines follow. The failure is the
last episode, if the log ends in it; a sign of broken hardware in an earlier one goes before. In an episode the first
grave line counts that is no consequence of another rank's end.

Memory is bounded: an episode keeps each kind of bad line once, the first tracebacks, and its first lines with those
before them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from stoker.manager.advice.logs.failures import ROWS, FaultRule, Located, LogLine, matching_rules
from stoker.manager.advice.logs.reading import LineReader, LogSource, OpenTracebacks, TracebackLines, masked_line, shown
from stoker.manager.advice.logs.signs import TRACEBACK, Gravity, gravity, hasty_gravity, may_be_bad, overcome
from stoker.manager.advice.secrets import masked

# ---- episodes of bad lines


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


# ---- the pass over a log


AFTER_LINES = 160
"""With the lines before, the paper's 200 lines around the first one that matters."""
_MOST_KINDS = 100_000
_MOST_EPISODES = 24
_WHOLE_LOOKS = 20_000
"""So many kinds of lines are looked at with all patterns; in what comes then, "error" alone is an error."""


def locate(source: LogSource, *, rules: tuple[FaultRule, ...] = ROWS) -> Located | None:
    """The first lines of a log that matter; None if nothing in it looks like a failure. Raises OSError for a path that
    cannot be opened."""
    scan = _Scan()
    scan.read(source)
    return scan.result(rules)


class _Scan:
    """One pass over a log."""

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
            key = hash(masked_line(line))
            grade = kinds.get(key)
            if grade is None:
                grade = self._grade(key, line)
            episode = self._open
            if episode is None:
                if grade < Gravity.ERROR:
                    recent.append((reader.number, line))
                    continue
                episode = self._begin(reader.number)
                quiet, wants_lines = 0, True
            if wants_lines:
                wants_lines = episode.keep(reader.number, line)
            if grade or episode.reads_tracebacks:
                if self._take(episode, key, reader.number, line, grade):
                    quiet = 0
            elif line:
                quiet += 1
                if quiet >= QUIET_LINES:
                    self._open = None
            recent.append((reader.number, line))
        self.lines = reader.number

    def _grade(self, key: int, line: bytes) -> Gravity:
        """How bad the first line of a kind looks."""
        found = Gravity.PLAIN
        if may_be_bad(line):
            self._looks -= 1
            found = gravity(shown(line)) if self._looks > 0 else hasty_gravity(line)
        if len(self._kinds) >= _MOST_KINDS:
            self._kinds.clear()
        self._kinds[key] = found
        return found

    def _begin(self, number: int) -> Episode:
        self._open = Episode(number, self._recent)
        self._episodes.append(self._open)
        if len(self._episodes) > _MOST_EPISODES:
            # The least grave goes; of several, the latest that has ended.
            worst = min(range(len(self._episodes) - 1), key=lambda at: (self._episodes[at].gravity, -at))
            del self._episodes[worst]
        return self._open

    def _take(self, episode: Episode, key: int, number: int, line: bytes, grade: Gravity) -> bool:
        """Give a line to an episode. Returns True if it is one of its bad lines."""
        text = ""
        if episode.reads_tracebacks:
            text = shown(line)
            if episode.in_traceback(number, text):
                return True
        if grade is Gravity.FATAL and TRACEBACK in (text := text or shown(line)):
            episode.begin_traceback(number, text)
            return True
        if grade is Gravity.NOTICE:
            if overcome(text or shown(line)):
                episode.overcame(number)
            return False
        if grade is Gravity.PLAIN:
            return False
        episode.sign(key, number, text or shown(line), grade)
        return True

    def result(self, rules: tuple[FaultRule, ...]) -> Located | None:
        candidates, hardware = [episode for episode in self._episodes if episode.signs], hardware_rules(rules)
        for episode in candidates:
            broken = episode.broken(hardware)
            if broken is not None and (episode is self._open or episode.overcome_after < broken.number):
                return self._located(episode, None if episode is self._open else broken, rules)
        if self._open is not None and self._open.signs:
            return self._located(self._open, None, rules)
        survived = [each for each in candidates if each.gravity is Gravity.FATAL and not each.overcome_after]
        if survived:
            return self._located(survived[-1], None, rules)
        return None

    def _located(self, episode: Episode, first: BadLine | None, rules: tuple[FaultRule, ...]) -> Located:
        """The failure that is an episode; it begins with `first`, or with what the rules say."""
        if first is None:
            episode.judge(rules)
            first = episode.first()
        traceback = first.traceback
        number = first.number if traceback is None else traceback.number
        text = first.text if traceback is None else traceback.lines[0][1]
        if traceback is None:
            traceback = episode.traceback_near(number, BEFORE_LINES)
        near = range(number - BEFORE_LINES, number + AFTER_LINES + 1)
        window = [LogLine(at, masked(shown(line))) for at, line in episode.window if at in near]
        return Located(
            LogLine(number, masked(text)),
            before=tuple(each for each in window if each.number < number),
            after=tuple(each for each in window if each.number > number),
            signs=tuple(
                LogLine(sign.number, masked(sign.text))
                for sign in episode.ordered()
                if sign.number >= number and not sign.overcome
            ),
            traceback=_lines(traceback.lines) if traceback is not None else (),
            lines=self.lines,
        )


def _lines(lines: list[tuple[int, str]]) -> tuple[LogLine, ...]:
    return tuple(LogLine(number, masked(text)) for number, text in lines)
