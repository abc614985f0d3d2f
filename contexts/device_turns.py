"""The interface by which an engine asks for its turn on devices that it shares with other libraries.

A library process offers turns (`stoker.pilot.library.library_turns`) before its context loads. Without an offer an
engine computes at any time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import NamedTuple, Protocol

log = logging.getLogger(__name__)


class OpenRequest(Protocol):
    """A request that an engine has. `made`: tokens that it has written; `first_due_at`: when the first is due, each
    further one `tpot_s` later (0: nobody waits for those)."""

    made: int
    prompt_tokens: int
    first_due_at: float
    tpot_s: float


class EngineWork(NamedTuple):
    """The work of an engine at the beginning of a step; others decide by it whether one more request would be in time.
    `rows` requests write, of the mean length `length` in tokens. `due_at`: when the most urgent token that is not late
    is due; `tpot_s`: the requests' shortest time per output token (infinity and 0: no deadlines). `late_at`: when the
    most urgent late token was due (infinity: none). `prompts` are unread: tokens, due time of the first token, and time
    per output token; the most urgent first. `taken_up`: requests since the start. `peak_tokens`: tokens in the cache if
    all requests peak at once (SLINFER eq. 2)."""

    rows: int = 0
    length: float = 0.0
    due_at: float = inf
    tpot_s: float = 0.0
    late_at: float = inf
    prompts: Sequence[tuple[int, float, float]] = ()
    taken_up: int = 0
    peak_tokens: int = 0


def work_of(requests: Iterable[OpenRequest], *, now: float, taken_up: int, mean_output: float) -> EngineWork:
    """Return the work of an engine with these requests. `mean_output`: mean tokens written by requests that have
    ended."""
    rows, total, due_at, tpot_s, late_at, peak = 0, 0, inf, 0.0, inf, 0.0
    prompts: list[tuple[int, float, float]] = []
    for request in requests:
        made, prompt, each_s = request.made, request.prompt_tokens, request.tpot_s
        peak += prompt + (made if made > mean_output else mean_output)
        if not made:
            prompts.append((prompt, request.first_due_at, each_s))
            continue
        rows += 1
        total += prompt + made
        if each_s:
            at = request.first_due_at + made * each_s
            if at < now:
                if at < late_at:
                    late_at = at
            elif at < due_at:
                due_at = at
            if each_s < tpot_s or not tpot_s:
                tpot_s = each_s
    if len(prompts) > 1:
        prompts.sort(key=lambda prompt: prompt[1])
    length = total / rows if rows else 0.0
    return EngineWork(rows, length, due_at, tpot_s, late_at, prompts, taken_up, int(peak))


class EngineTurns(Protocol):
    """The turns of one engine. Used by one thread."""

    @property
    def shared(self) -> bool:
        """True if another library has these devices too. Costs no system call."""

    def begin(self, *, due_at: float, step_s: float, work: Callable[[], EngineWork]) -> None:
        """Wait for a turn and hold it. `due_at`: when the most urgent token is due, of `time.monotonic`; `step_s`:
        how long the iteration probably takes, 0 if nobody knows. `work`: what `publish` is given: asked for when the
        next library has been woken, so that it does not wait for that."""

    def end(self) -> None:
        """Release the turn: no step is due now."""

    def publish(self, work: EngineWork) -> None:
        """Show the engine's work to other libraries. Costs no system call."""

    def close(self) -> None:
        """Release the devices: the engine has ended."""


_make: Callable[[], EngineTurns] | None = None


def offer_turns(make: Callable[[], EngineTurns] | None) -> None:
    """Set the function that makes turns for each engine of this process; None: no turns."""
    global _make
    _make = make


def new_turns() -> EngineTurns | None:
    """Return turns for one engine; None without an offer, or if they cannot be made."""
    try:
        return _make() if _make is not None else None
    except OSError as error:
        log.warning("this engine computes without turns: %s", error)
        return None
