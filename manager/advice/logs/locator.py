"""Find the first lines of a log that matter (SchedMate §3.3, the failure locator).

The paper takes logs for half sorted, ordinary lines and then errors, and finds the border by binary search over
chunks. `chunked_search` does that, for files that are too long to read. `locate` reads a log once, from its
beginning, and so also finds what is not sorted: warnings that look bad, failures that were overcome, ranks that talk
on while one is dead.

A line is masked (its digits go) and looked up by its hash; only the first line of each masked form is looked at: its
words of severity, and, where templates of good runs are there, whether a good run prints it too. Bad lines form
*episodes*, which ordinary lines end. The failure is the last episode, if the log ends in it; a sign of broken
hardware in an earlier one goes before. In an episode the first grave line counts that is no consequence of another
rank's end.

Memory is bounded: see `reading` and `episodes`.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable

from stoker.manager.advice.logs.episodes import BEFORE_LINES, QUIET_LINES, BadLine, Episode, hardware_rules
from stoker.manager.advice.logs.fault import Located, LogLine
from stoker.manager.advice.logs.reading import LineReader, LogSource, clipped, shown
from stoker.manager.advice.logs.rules import ROWS, FaultRule
from stoker.manager.advice.logs.signs import TRACEBACK, Gravity, gravity, hasty_gravity, may_be_bad, overcome
from stoker.manager.advice.logs.templates import LineTemplates, masked_line
from stoker.manager.advice.secrets import masked

AFTER_LINES = 160
"""With the lines before, the paper's 200 lines around the first one that matters."""
_MOST_KINDS = 100_000
_MOST_EPISODES = 24
_NOVEL_LOOKUPS = 20_000
"""So many kinds of harmless-looking lines are looked up among the templates of good runs; Drain is slow."""
_WHOLE_LOOKS = 20_000
"""So many kinds of lines are looked at with all patterns; in what comes then, "error" alone is an error."""
_NOVEL_GAP = 5
_CHUNK_BYTES = 256 << 10


def locate(
    source: LogSource, known: LineTemplates | None = None, *, rules: tuple[FaultRule, ...] = ROWS
) -> Located | None:
    """The first lines of a log that matter; None if nothing in it looks like a failure.

    `known`: the templates of good runs of the same function. Raises OSError for a path that cannot be opened; whatever
    the log holds, nothing else.
    """
    scan = _Scan(known)
    scan.read(source)
    return scan.result(rules)


class _Scan:
    """One pass over a log."""

    def __init__(self, known: LineTemplates | None) -> None:
        self.lines = 0
        self._known = known
        self._kinds: dict[int, Gravity] = {}
        self._recent: deque[tuple[int, bytes]] = deque(maxlen=BEFORE_LINES)
        self._episodes: list[Episode] = []
        self._open: Episode | None = None
        self._novel: list[tuple[int, bytes]] = []
        self._novel_lookups = _NOVEL_LOOKUPS
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
                grade = self._grade(key, line, reader.number)
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

    def _grade(self, key: int, line: bytes, number: int) -> Gravity:
        """How bad the first line of a kind looks."""
        found = Gravity.PLAIN
        if may_be_bad(line):
            self._looks -= 1
            found = gravity(shown(line)) if self._looks > 0 else hasty_gravity(line)
        if self._known is not None and line.strip():
            if found is not Gravity.PLAIN:
                found = Gravity.PLAIN if self._known.knows(line) else found
            elif self._novel_lookups > 0:
                self._novel_lookups -= 1
                if not self._known.knows(line):
                    self._remember_novel(number, line)
        if len(self._kinds) >= _MOST_KINDS:
            self._kinds.clear()
        self._kinds[key] = found
        return found

    def _remember_novel(self, number: int, line: bytes) -> None:
        if self._novel and number - self._novel[-1][0] > _NOVEL_GAP:
            self._novel.clear()
        if len(self._novel) < AFTER_LINES:
            self._novel.append((number, line))

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
        return self._located_novel()

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

    def _located_novel(self) -> Located | None:
        """The last lines that no good run has printed, if the log ends with them."""
        if not self._novel or self.lines - self._novel[-1][0] > _NOVEL_GAP:
            return None
        number = self._novel[0][0]
        first, *after = _lines([(at, shown(each)) for at, each in self._novel])
        before = [(at, shown(each)) for at, each in self._recent if at < number]
        return Located(first, before=_lines(before), after=tuple(after), signs=(first,), lines=self.lines)


def _lines(lines: list[tuple[int, str]]) -> tuple[LogLine, ...]:
    return tuple(LogLine(number, masked(text)) for number, text in lines)


def looks_bad(chunk: bytes) -> bool:
    """The classifier of chunks for `chunked_search`: True if a line of the chunk looks like a failure."""
    seen = set()
    for line in chunk.split(b"\n"):
        key = hash(masked_line(line))
        if key not in seen:
            seen.add(key)
            if may_be_bad(line) and gravity(shown(clipped(line))) >= Gravity.ERROR:
                return True
    return False


def chunked_search(
    path: os.PathLike[str],
    is_bad: Callable[[bytes], bool] = looks_bad,
    known: LineTemplates | None = None,
    *,
    chunk_bytes: int = _CHUNK_BYTES,
    rules: tuple[FaultRule, ...] = ROWS,
) -> Located | None:
    """What `locate` finds from the first bad chunk of a file on, found by binary search (§3.3): a log of a gigabyte
    takes a dozen reads. Right only if all chunks are good before the failure and bad behind it. Lines are numbered from
    the beginning of that chunk. Raises OSError if the file cannot be opened."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        low, high = 0, -(-size // chunk_bytes)
        while low < high:
            middle = (low + high) // 2
            file.seek(middle * chunk_bytes)
            if is_bad(file.read(chunk_bytes)):
                high = middle
            else:
                low = middle + 1
        file.seek(max(0, min(low, size // chunk_bytes) - 1) * chunk_bytes)  # with a chunk of context
        return locate(file, known, rules=rules)
