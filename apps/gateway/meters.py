"""What was asked of a model, and how fast it answered. Times are seconds."""

from __future__ import annotations

from collections import deque

import msgspec

from stoker.apps.gateway.first_tokens import FirstTokens

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
