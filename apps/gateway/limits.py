"""What one key may ask: requests and tokens in a sliding minute, and requests at a time. Times are seconds."""

from __future__ import annotations

from collections import deque

import msgspec

WINDOW_S = 60.0
_SOON_S = 1.0
"""When to ask again where another request of the key has to end first."""


class KeyLimits(msgspec.Struct, frozen=True):
    """Bounds of a key; 0 = none. Tokens are those read and written."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrent: int = 0

    @property
    def rates(self) -> KeyLimits:
        """Those of a minute alone."""
        return KeyLimits(self.requests_per_minute, self.tokens_per_minute)

    @property
    def for_batches(self) -> KeyLimits:
        """What batches may use of them: a tenth, 1 at the least, is left to other requests, if there is more than 1."""
        return KeyLimits(*(most and max(1, most - max(1, most // 10)) for most in msgspec.structs.astuple(self)))


class LimitReached(msgspec.Struct, frozen=True):
    """Why a request is refused, and when the next one may come."""

    message: str
    code: str
    retry_after_s: float


class KeyUse(msgspec.Struct):
    """What a key has asked in the last minute."""

    running: int = 0
    requests: deque[float] = msgspec.field(default_factory=deque)
    """When each began."""
    tokens: deque[tuple[float, int]] = msgspec.field(default_factory=deque)
    """When requests ended, and the tokens of each."""

    def begin(self, limits: KeyLimits, *, now: float) -> LimitReached | None:
        """Count a request that may begin; else why it may not."""
        self.forget(now)
        if reached := self._reached(limits, now):
            return reached
        self.resume()
        self.requests.append(now)
        return None

    def resume(self) -> None:
        """Count a request that runs already."""
        self.running += 1

    def end(self, tokens: int, *, now: float) -> None:
        """A request has ended; `tokens` is what it has read and written."""
        self.running -= 1
        if tokens:
            self.tokens.append((now, tokens))

    def _reached(self, limits: KeyLimits, now: float) -> LimitReached | None:
        if limits.concurrent and self.running >= limits.concurrent:
            message = f"{self.running} requests of this key are running, and {limits.concurrent} may"
            return LimitReached(message, "concurrent_requests", _SOON_S)
        if limits.requests_per_minute and len(self.requests) >= limits.requests_per_minute:
            wait_s = self.requests[-limits.requests_per_minute] + WINDOW_S - now
            message = f"this key may send {limits.requests_per_minute} requests a minute"
            return LimitReached(message, "requests_per_minute", wait_s)
        used = sum(tokens for _, tokens in self.tokens)
        if limits.tokens_per_minute and used >= limits.tokens_per_minute:
            message = f"this key may read and write {limits.tokens_per_minute:,} tokens a minute, and has used {used:,}"
            return LimitReached(message, "tokens_per_minute", self._room_in(limits.tokens_per_minute, used, now))
        return None

    def _room_in(self, most: int, used: int, now: float) -> float:
        """In how many seconds less than `most` tokens lie in the window."""
        for at, tokens in self.tokens:
            used -= tokens
            if used < most:
                return at + WINDOW_S - now
        return WINDOW_S

    def forget(self, now: float) -> None:
        """Forget what is over a minute old."""
        while self.requests and self.requests[0] <= now - WINDOW_S:
            self.requests.popleft()
        while self.tokens and self.tokens[0][0] <= now - WINDOW_S:
            self.tokens.popleft()
