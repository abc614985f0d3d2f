"""How many blocks: target tracking on the tail latency, as Arlo scales (§4).

One more block is asked for when the 98th percentile of the latencies of calls that ended lately reaches 95 % of what
they want; and when it stayed below 50 % for a minute, the least busy block is let go. The first blocks, those that
`least_blocks` keeps, and everything else are as by default: contexts of no family bring blocks by their site's rule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from stoker.manager.core.nouns import Context
from stoker.manager.core.seams import Action, Changes, Provisioning, ReleaseBlock, View, WantBlocks
from stoker.manager.core.state import Block, SourceState
from stoker.manager.policies.arlo.families import is_runtime
from stoker.manager.policies.base import Quiet

_ROUND_S = 1.0
_RECENT_S = 10.0
"""Latencies of so long count as recent."""
_FEW = 20
"""Fewer recent calls, of which the first may have waited for a load, bring no block."""


class TrackLatency(Quiet):
    """Provisioning as in Arlo, around another policy. `add_at` and `release_below`: shares of the wanted latency;
    `calm_s`: for how long the latency is below the second one before a block goes."""

    period_s = _ROUND_S

    def __init__(
        self, base: Provisioning, *, add_at: float = 0.95, release_below: float = 0.5, calm_s: float = 60.0
    ) -> None:
        self.base = base
        self._add_at = add_at
        self._release_below = release_below
        self._calm_s = calm_s
        self._ends: deque[tuple[float, list[float]]] = deque()
        """When a round was, and the latencies of the calls that had ended in it, as shares of what they want."""
        self._not_before = 0.0
        """No decision before then: what was decided last has to show in recent latencies first."""
        self._look_at = 0.0
        """When the latencies of the last `calm_s` are weighed next, for a block to go."""

    def demand(self, view: View) -> Sequence[Action]:
        """What the other policy says, but for more blocks than its first where families alone want them."""
        return tuple(self._but_for_more(view, self.base.demand(view)))

    def timer(self, view: View, key: str) -> Iterable[Action]:
        """A timer of the other policy's: the same."""
        return self._but_for_more(view, self.base.timer(view, key))

    def _but_for_more(self, view: View, plan: Iterable[Action]) -> Iterator[Action]:
        """A plan without blocks that only families want, beyond the first and those that the site keeps."""
        tracked = bool(view.hungry) and all(map(is_runtime, view.hungry.values()))
        for action in plan:
            if tracked and isinstance(action, WantBlocks) and view.sources[action.source].devices:
                source = view.sources[action.source]
                lacks = source.source.least - len(source.staying)
                if lacks > 0:
                    yield WantBlocks(action.source, min(lacks, action.count))
                continue
            yield action

    def may_bring(self, view: View, context: Context) -> bool:
        """As the other policy says."""
        return self.base.may_bring(view, context)

    def round(self, view: View, changes: Changes) -> Sequence[Action]:
        """A block more, a block less, or nothing."""
        if changes.latency_shares:
            self._ends.append((view.now, changes.latency_shares))
        while self._ends and self._ends[0][0] < view.now - self._calm_s:
            self._ends.popleft()
        if view.now < self._not_before:
            return ()
        recent = self._shares(view.now - _RECENT_S)
        if len(recent) >= _FEW and _percentile(recent) >= self._add_at:
            return self._more(view)
        if view.now >= self._look_at:
            self._look_at = view.now + self._calm_s
            lately = self._shares(view.now - self._calm_s)
            if lately and _percentile(lately) < self._release_below:
                return self._fewer(view, _percentile(lately))
        return ()

    def rests(self, view: View) -> bool:
        """True when nothing has ended for a while: then there is no latency to track."""
        return not self._ends and not view.calls

    def _shares(self, since: float) -> list[float]:
        """The latencies of what ended since then, as shares of what was wanted."""
        return [share for at, some in self._ends if at >= since for share in some]

    def _more(self, view: View) -> Sequence[Action]:
        """One block of the first source that has room; none while one is on its way."""
        able = [source for source in view.sources.values() if source.room > 0 and not source.stopped]
        if not able or any(source.coming for source in view.sources.values()):
            return ()
        self._not_before = view.now + 2 * _RECENT_S
        return (WantBlocks(able[0].source.name, 1),)

    def _fewer(self, view: View, recent: float) -> Sequence[Action]:
        """The least busy block goes."""
        spare = [
            block
            for source in view.sources.values()
            if _may_shrink(source)
            for block in _staying(source)
            if not _has_a_last_one(view, block)
        ]
        if not spare:
            return ()
        self._not_before = view.now + 2 * _RECENT_S
        chosen = min(spare, key=lambda block: (_load(view, block), -block.since))
        why = f"98 of 100 calls end within {recent:.0%} of the time that they have"
        return (ReleaseBlock(chosen.id, why),)


def _percentile(shares: list[float]) -> float:
    """The 98th percentile of some."""
    ordered = sorted(shares)
    return ordered[min(len(ordered) - 1, int(0.98 * len(ordered)))]


def _may_shrink(source: SourceState) -> bool:
    return len(source.staying) > max(1, source.source.least) and not source.coming


def _staying(source: SourceState) -> list[Block]:
    return [source.blocks[id] for id in source.staying]


def _has_a_last_one(view: View, block: Block) -> bool:
    """Whether a block holds the last ready library of the longest runtime of a family: every call can run there."""
    for id in block.pilots:
        for library in view.pilots[id].libraries.values():
            context = library.context
            if is_runtime(context) and not context.lists and sum(x.usable for x in context.libraries.values()) == 1:
                return True
    return False


def _load(view: View, block: Block) -> int:
    """Calls that the libraries of a block's pilots hold."""
    return sum(library.load for id in block.pilots for library in view.pilots[id].libraries.values())
