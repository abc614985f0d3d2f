"""Figures of one model: what was asked of it, how fast it answered, and when a first token is due. Times are seconds.

Admission decides by the forecast. For a model that is not loaded it is the rest of the load, as long as earlier loads
took. For a loaded model it is the later of two. The session's: waiting calls leave its queue as fast as running ones
end, so a new call waits for `queued * run_s / running`. The gateway's: each stream that had its first token has shown
how long that took behind how many others without one; a line through the last of them (least squares) gives the time
for as many as there are now. It sees prompts that an engine has accepted and not read yet.

Both forecasts err towards accepting: without measurements there is no forecast, the line is followed to twice the
longest queue that was seen, and the length of the request's own prompt does not count.
"""

from __future__ import annotations

from collections import deque

import msgspec

from stoker.units import show_seconds

# ---- first tokens


_SEEN = 64
_LEAST_SEEN = 8
UNKNOWN_LOAD_S = 10.0
"""What the first load of a model is taken for."""


class ModelFacts(msgspec.Struct, frozen=True):
    """A model in the session at one moment. `load_s`: what loading it took, and `loading_s`: since when it loads;
    `run_s`: what a call of it took."""

    hot: int = 0
    loading: int = 0
    queued: int = 0
    running: int = 0
    load_s: float = 0.0
    loading_s: float = 0.0
    run_s: float = 0.0
    waits_for: str = ""
    failure: str = ""

    @property
    def state(self) -> str:
        """In a word."""
        return "hot" if self.hot else "loading" if self.loading else "cold"

    @property
    def hot_in_s(self) -> float:
        """When it may be loaded, as far as earlier loads say."""
        return 0.0 if self.hot else max(1.0, (self.load_s or UNKNOWN_LOAD_S) - self.loading_s)


class FirstTokens(msgspec.Struct):
    """The streams of one model that have no token yet (`waiting`), and how long the last ones waited."""

    waiting: int = 0
    _seen: deque[tuple[int, float]] = msgspec.field(default_factory=lambda: deque(maxlen=_SEEN))
    """Of each stream: how many waited when it came, and its time to the first token."""

    def begin(self) -> int:
        """A stream has come. How many waited before it."""
        self.waiting += 1
        return self.waiting - 1

    def end(self, before: int, ttft_s: float | None) -> None:
        """A stream waits no more. `ttft_s`: None if it had no token, or one that says nothing of the next."""
        self.waiting -= 1
        if ttft_s is not None:
            self._seen.append((before, ttft_s))

    def expected_s(self, waiting: int) -> float:
        """The time to the first token of a stream that finds `waiting` others waiting; 0 while too few streams were
        measured."""
        if len(self._seen) < _LEAST_SEEN:
            return 0.0
        count = len(self._seen)
        mean_x, mean_y = sum(x for x, _ in self._seen) / count, sum(y for _, y in self._seen) / count
        spread = sum((x - mean_x) ** 2 for x, _ in self._seen)
        rise = sum((x - mean_x) * (y - mean_y) for x, y in self._seen) / spread if spread else 0.0
        rise = max(0.0, rise)
        most = 2 * max(x for x, _ in self._seen) + 1
        return max(0.0, mean_y + rise * (min(waiting, most) - mean_x))


class FirstTokenForecast(msgspec.Struct, frozen=True):
    """When a request that comes now may have its first token, why then, and how long that takes where none waits."""

    first_token_s: float
    because: str
    alone_s: float

    def later_s(self, objective_s: float) -> float:
        """The seconds after which a request would be in time. 0 if it would be in time now. Also 0 if it would be late
        even with the model for itself: to refuse it would not help."""
        return 0.0 if self.alone_s > objective_s else max(0.0, self.first_token_s - objective_s)


def forecast(facts: ModelFacts, first: FirstTokens) -> FirstTokenForecast:
    """The forecast for a request that comes now."""
    alone_s = first.expected_s(0)
    if not facts.hot:
        load = f"a load took {show_seconds(facts.load_s)}" if facts.load_s else "no load of it has been measured"
        return FirstTokenForecast(facts.hot_in_s + alone_s, f"it is {facts.state}, and {load}", alone_s)
    queued_s = facts.queued * facts.run_s / facts.running if facts.running else 0.0
    own_s = first.expected_s(first.waiting)
    if queued_s + alone_s > own_s:
        because = f"{facts.queued} calls wait, {facts.running} run, and one takes {show_seconds(facts.run_s)}"
        return FirstTokenForecast(queued_s + alone_s, because, alone_s)
    return FirstTokenForecast(own_s, f"{first.waiting} streams wait for their first token", alone_s)


# ---- meters


_RATE_S = 10.0
_RECENT = 500


class ModelMeter(msgspec.Struct):
    """Figures of one model. `ttft` and `tpot` are of the requests that were answered last; objectives of 0 are none."""

    ttft_objective_s: float = 0.0
    tpot_objective_s: float = 0.0
    running: int = 0
    requests: int = 0
    failed: int = 0
    tokens: int = 0
    """Tokens written."""
    asked_at: float = 0.0
    """When a request came last."""
    first: FirstTokens = msgspec.field(default_factory=FirstTokens)
    ttft: deque[float] = msgspec.field(default_factory=lambda: deque(maxlen=_RECENT))
    tpot: deque[float] = msgspec.field(default_factory=lambda: deque(maxlen=_RECENT))
    _written: deque[tuple[float, int]] = msgspec.field(default_factory=deque)
    _met: deque[bool] = msgspec.field(default_factory=lambda: deque(maxlen=_RECENT))

    def begin(self, now: float) -> None:
        """A request has come."""
        self.running += 1
        self.requests += 1
        self.asked_at = now

    def write(self, tokens: int, now: float) -> None:
        """Count `tokens` more that were written."""
        self.tokens += tokens
        self._written.append((now, tokens))
        self._forget(now)

    def end(self, *, failed: bool, ttft_s: float | None = None, tpot_s: float | None = None) -> None:
        """A request has ended. `ttft_s`, `tpot_s`: of one that was streamed."""
        self.running -= 1
        self.failed += failed
        if ttft_s is not None:
            self.ttft.append(ttft_s)
            if tpot_s is not None:
                self.tpot.append(tpot_s)
            if self.ttft_objective_s or self.tpot_objective_s:
                late = 0 < self.ttft_objective_s < ttft_s
                slow = tpot_s is not None and 0 < self.tpot_objective_s < tpot_s
                self._met.append(not (late or slow or failed))

    def rate(self, now: float) -> float:
        """Tokens a second over the last ten seconds."""
        self._forget(now)
        return sum(tokens for _, tokens in self._written) / _RATE_S

    @property
    def met(self) -> float | None:
        """The share of the last streams that met the objectives; None: there are none."""
        return sum(self._met) / len(self._met) if self._met else None

    def _forget(self, now: float) -> None:
        while self._written and self._written[0][0] <= now - _RATE_S:
            self._written.popleft()


def median(values: deque[float]) -> float | None:
    """The middle one; None of none."""
    return sorted(values)[len(values) // 2] if values else None
