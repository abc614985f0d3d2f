"""Shows the progress bar of a `map`, and logs lines while calls of the map wait.

Results from an earlier run count as done, but not towards the rate. If stderr is a pipe, a line every 10 seconds
replaces the bar.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console

from stoker.progress_display import ProgressBar
from stoker.protocol.pace import WorkPace, format_time_left
from stoker.protocol.status import ContextStatus
from stoker.protocol.to_client import Status
from stoker.units import show_seconds

Follow = Callable[[int, int | None], None]
"""Receives the number of results, and the total (None if unknown)."""

REDRAW_S = 0.1
NOTEBOOK_S = 0.5
LINE_S = 10.0
STATUS_S = 1.0


_active_bars: list[MapProgress] = []


def print_above_progress_bar(text: str) -> bool:
    live = _active_bars[-1].live if _active_bars else None
    if live is None:
        return False
    live.console.print(text, markup=False, highlight=False, soft_wrap=True)
    return True


class MapProgress:
    def __init__(
        self, name: str, total: int | None, ask_status: Callable[[float], Status | None], *, kept: int = 0
    ) -> None:
        self._name = name
        self._total = total
        self._kept = kept if total is None else min(kept, total)
        self.kept_taken = 0
        self._ask_status = ask_status
        self._started = self._drawn = time.monotonic()
        self._asked = 0.0
        self._hot = ""
        self._done = 0
        self._pace = WorkPace(self._started)
        self.live: ProgressBar | None = None
        self._facts = f"{self._kept}/{total}" if total is not None else str(self._kept)
        ipython = sys.modules.get("IPython")
        shell = ipython.get_ipython() if ipython is not None else None
        self._line = NotebookStatusLine() if getattr(shell, "kernel", None) is not None else None
        console = Console(stderr=True)
        if self._line is None and console.is_terminal:
            self.live = ProgressBar(name, total=total, done=self._kept, facts=lambda: self._facts, console=console)
            self.live.start()
            _active_bars.append(self)
        self._pause_s = REDRAW_S if self.live is not None else NOTEBOOK_S if self._line is not None else LINE_S

    def __call__(self, done: int, total: int | None) -> None:  # noqa: ARG002
        now = time.monotonic()
        done -= self.kept_taken
        self._pace.add(done - self._done, now)
        self._done = done
        if now - self._drawn >= self._pause_s:
            self._draw(now)

    def close(self) -> None:
        self._draw(time.monotonic(), last=True)
        if self.live is not None:
            _active_bars.remove(self)
            self.live.stop()
            self.live = None

    def _draw(self, now: float, *, last: bool = False) -> None:
        self._drawn = now
        if not last and now - self._asked > STATUS_S:
            self._asked = now
            status = self._ask_status(0.2)
            if status is not None:
                hot = sum(context.hot for context in status.contexts)
                loading = sum(context.loading for context in status.contexts)
                self._hot = f"hot {hot}" + (f" · loading {loading}" if loading else "")
                if not hot:
                    self._pace.record_wait(now)
        elapsed = now - self._started
        per_s = self._pace.per_second(now) if not last else self._done / max(elapsed, 1e-9)
        rate = f"{per_s:,.1f}/s" if elapsed > 0.5 and per_s else ""
        shown = self._done + (self.kept_taken if last else max(self._kept, self.kept_taken))
        if self._total is not None and not last:
            shown = min(shown, self._total)
        rest = 0 if self._total is None else self._total - shown
        left = format_time_left(self._pace.left_s(rest, now)) if rest and not last else ""
        of = shown if self._total is None else f"{shown}/{self._total}"
        if self.live is not None:
            self._facts = "  ".join(filter(None, (str(of), rate, self._hot, left)))
            self.live.set_done(shown, refresh=True)
            return
        how_far = format_progress_bar(shown, self._total) if self._line is not None else of
        text = "  ".join(
            filter(None, (f"{self._name} {how_far}", rate, self._hot, f"elapsed {show_seconds(elapsed)}", left))
        )
        if self._line is not None:
            self._line.show(text)
        else:
            sys.stderr.write(f"{text}\n")


logger = logging.getLogger("stoker.news")

FIRST_S = 10.0
"""Seconds that calls wait before the first line is logged, and minimum seconds between lines about one subject."""
SAME_REASON_S = 60.0
CHECK_S = 2.0
CHECK_SELDOM_S = 30.0
"""Seconds between two status requests while pilots work."""
_NUMBER = re.compile(r"\d[\d.,:]*( (s|min|h|days?)\b)?")


class WaitNoticeLogger:
    """Logs on a separate thread why calls wait, each reason at most once a minute.

    `is_own_context` returns True for a context key of this program's calls. `why_silent` and `journal_trouble` describe
    a fault of the manager, or return "". With `faults_only`, only faults are logged.
    """

    def __init__(
        self, *, ask: Callable[[], Status | None], has_open_calls: Callable[[], bool],
        journal_trouble: Callable[[], str], is_own_context: Callable[[str], bool], why_silent: Callable[[], str],
        say: Callable[[str], None] | None = None, faults_only: bool = False,
    ) -> None:  # fmt: skip
        self._faults_only = faults_only
        self._ask = ask
        self._has_open_calls = has_open_calls
        self._is_own_context = is_own_context
        self._why_silent = why_silent
        self._journal_trouble = journal_trouble
        self._show_notice = say or _show_notice
        self._ask_at = 0.0
        self._true_since: dict[str, float] = {}
        """By condition, for example a silent manager: time since which it is true."""
        self._logged_at: dict[tuple[str, str], float] = {}
        """Time of the last line, by subject and reason (without numbers)."""
        self._peer_trouble = self._last_journal_trouble = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stoker-news", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def report_wait_reason_if_due(self, now: float) -> None:
        if not self._has_open_calls():
            self._true_since.clear()
            return
        since = self._true_since.setdefault("wait", now)
        trouble = self._journal_trouble()
        if trouble:  # log no other reason while the journal cannot be written
            self._log_rarely("journal", "", trouble, now)
        elif self._last_journal_trouble:
            self._logged_at.pop(("journal", ""), None)
            self._show_notice("the session's journal can be written again: calls and results continue")
        self._last_journal_trouble = trouble
        if trouble or now < self._ask_at:
            return
        status = self._ask()
        why = "" if status is not None else self._why_silent()
        if self._has_been_true_long("silence", bool(why), now):
            self._log_rarely("silence", "", why, now)
        if status is None:
            return
        if self._faults_only:
            self._ask_at = now + CHECK_SELDOM_S
            return
        cold = {context.name for context in status.contexts if context.queued and not context.hot}
        loading = [library for library in status.libraries if library.loading_s > 0 and library.recipe in cold]
        slow = max(loading, key=lambda library: library.loading_s, default=None)
        able = any(not device.fault for pilot in status.pilots for device in pilot.devices)
        waiting = [context for context in status.contexts if context.waits_for]
        stuck = next((context.waits_for for context in waiting if not able or self._is_stuck(context)), "")
        if able and slow is None and not stuck:
            self._ask_at = now + (FIRST_S / 2 if now - since < 2 * FIRST_S else CHECK_SELDOM_S)
        peers = status.trouble.get("peers", "")
        if peers and not self._peer_trouble:
            self._peer_trouble = peers
            self._show_notice(peers)
        if slow is not None and slow.loading_s >= FIRST_S:
            last = f"; the last line of its log: {slow.line}" if slow.line else ""
            text = f"context {slow.recipe} is loading ({show_seconds(slow.loading_s)}){last}"
            self._log_rarely("load", f"{slow.recipe} {slow.line}", text, now)
        if self._has_been_true_long("stuck", bool(stuck), now):
            self._log_rarely("stuck", stuck, f"{stuck}; more: stoker status {status.session}", now)

    def _has_been_true_long(self, what: str, is_true: bool, now: float) -> bool:
        """Return True if a condition has been true for `FIRST_S`."""
        if not is_true:
            self._true_since.pop(what, None)
            if what == "stuck":
                self._logged_at = {key: at for key, at in self._logged_at.items() if key[0] != what}
            return False
        return now - self._true_since.setdefault(what, now) >= FIRST_S

    def _log_rarely(self, subject: str, reason: str, text: str, now: float) -> None:
        """Log a line, unless this subject was logged within `FIRST_S` or this reason within `SAME_REASON_S`."""
        reason = _NUMBER.sub("", reason)
        self._logged_at = {key: at for key, at in self._logged_at.items() if now - at < SAME_REASON_S}
        recent = [at for key, at in self._logged_at.items() if key[0] == subject and now - at < FIRST_S]
        if not recent and (subject, reason) not in self._logged_at:
            self._logged_at[subject, reason] = now
            self._show_notice(text)

    def _is_stuck(self, context: ContextStatus) -> bool:
        return context.queued > 0 and not context.hot and not context.loading and self._is_own_context(context.key)

    def _run(self) -> None:
        while not self._stop.wait(min(CHECK_S, FIRST_S)):
            try:
                self.report_wait_reason_if_due(time.monotonic())
            except Exception:  # a failed print must not stop this thread
                logger.exception("the session's status could not be shown")


def _show_notice(text: str) -> None:
    if not print_above_progress_bar(text):
        logger.warning("%s", text)


WIDTH = 30


class NotebookStatusLine:
    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, text: str) -> None:
        from IPython.display import display  # installed only with notebooks

        data = {"text/plain": text}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


def format_progress_bar(done: int, total: int | None) -> str:
    if not total:
        return f"{done:,}"
    full = WIDTH * min(done, total) // total
    return f"{'━' * full}{'─' * (WIDTH - full)} {done:,}/{total:,}"
