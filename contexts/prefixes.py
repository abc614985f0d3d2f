"""Prefixes that prompts share, with their computed keys and values (KV).

Calls of one program fill a template, and the KV of a beginning does not depend on what follows. So the KV of a shared
beginning is computed once and used by every later prompt. The template is found without a hint:

- The last few prompts are kept whole (*recent*). If a new prompt begins like one of them for long enough, that
  beginning is cut out and becomes a *shared* prefix, at no cost.
- A longer beginning becomes another shared prefix only if it is longer by some tokens: two claims that both start with
  "The" should not displace the template.
- Both kinds share a limit in bytes; shared prefixes are dropped least recently used first.

This file knows token ids and sizes; `cut` cuts the KV.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

KV = TypeVar("KV")

SHORTEST = 8
"""Beginnings of fewer tokens are not worth keeping."""
_LONGER = 8
_RECENT = 8


class Prefix(Generic[KV]):
    """Tokens and their KV; `size_bytes` is what the KV takes."""

    __slots__ = ("ids", "kv", "size_bytes")

    def __init__(self, ids: tuple[int, ...], kv: KV, size_bytes: int) -> None:
        self.ids = ids
        self.kv = kv
        self.size_bytes = size_bytes


class PrefixCache(Generic[KV]):
    """The shared and recent prefixes of one model. Not for several threads at once."""

    def __init__(self, *, limit_bytes: int, cut: Callable[[KV, int], KV]) -> None:
        self.limit_bytes = limit_bytes
        self.reused_tokens = 0
        """Tokens that did not have to be computed, since the beginning."""
        self._cut = cut
        self._shared: list[Prefix[KV]] = []  # in the order of last use
        self._recent: deque[Prefix[KV]] = deque(maxlen=_RECENT)

    def set_limit(self, limit_bytes: int) -> None:
        """Keep at most `limit_bytes` from now on."""
        self.limit_bytes = limit_bytes
        self._trim()

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all kept prefixes."""
        return sum(prefix.size_bytes for prefix in (*self._shared, *self._recent))

    def find(self, rows: Sequence[tuple[int, ...]]) -> tuple[Prefix[KV] | None, int]:
        """Return the longest kept prefix of all rows, and its length (at least a row's last token remains)."""
        room = min(map(len, rows)) - 1
        shared, length = self._longest(self._shared, rows, room)
        recent, longer = self._longest(self._recent, rows, room)
        if recent is not None and longer >= max(SHORTEST, length + _LONGER):
            shared, length = self.keep(recent.ids[:longer], self._cut(recent.kv, longer), _part(recent, longer)), longer
        if shared is None or length < SHORTEST:
            return None, 0
        if shared in self._shared:
            self._shared.remove(shared)
            self._shared.append(shared)
        self.reused_tokens += length * len(rows)
        return shared, length

    def wants(self, ids: tuple[int, ...]) -> bool:
        """True if this shared beginning is worth computing separately: nothing as long is kept."""
        if len(ids) < SHORTEST:
            return False
        _, shared = self._longest(self._shared, [ids], len(ids))
        return len(ids) >= shared + _LONGER

    def keep(self, ids: tuple[int, ...], kv: KV, size_bytes: int) -> Prefix[KV]:
        """Keep a shared prefix, if there is room for it at all."""
        prefix = Prefix(ids, kv, size_bytes)
        if size_bytes <= self.limit_bytes:
            self._shared.append(prefix)
            self._trim()
        return prefix

    def saw(self, ids: tuple[int, ...], kv: KV, size_bytes: int) -> None:
        """Keep a whole prompt for a while: the next may begin like it."""
        if size_bytes * 2 <= self.limit_bytes:
            self._recent.append(Prefix(ids, kv, size_bytes))
            self._trim()

    def clear(self) -> None:
        """Forget everything."""
        self._shared.clear()
        self._recent.clear()

    def _trim(self) -> None:
        while self.size_bytes > self.limit_bytes and len(self._recent) > 1:
            self._recent.popleft()
        while self.size_bytes > self.limit_bytes and self._shared:
            del self._shared[0]
        while self.size_bytes > self.limit_bytes:
            self._recent.popleft()

    @staticmethod
    def _longest(
        kept: Sequence[Prefix[KV]], rows: Sequence[tuple[int, ...]], room: int
    ) -> tuple[Prefix[KV] | None, int]:
        best, length = None, 0
        for prefix in reversed(kept):
            here = room
            for row in rows:
                here = common_length(prefix.ids, row, most=here)
                if here <= length:
                    break
            if here > length:
                best, length = prefix, here
        return best, length


def common_length(one: Sequence[int], other: Sequence[int], *, most: int) -> int:
    """Return the number of first items that two tuples share, at most `most`."""
    high = min(len(one), len(other), most)
    if high <= 0:
        return 0
    if one[:high] == other[:high]:
        return high
    low = 0
    while low < high:  # one[:low] agrees, one[:high] is not known to
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _part(prefix: Prefix[KV], length: int) -> int:
    return prefix.size_bytes * length // max(1, len(prefix.ids))
