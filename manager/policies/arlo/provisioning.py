"""Scale the number of blocks by the tail latency (target tracking), as Arlo does (§4).

Request a block if the 98th percentile of recent latencies is at least 95 % of the objective. Release the least busy
block if the percentile of the last minute is below 50 % of the objective. Otherwise the base policy decides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from stoker.manager.core.nouns import Context
from stoker.manager.core.seams import Action, Changes, Provisioning, ReleaseBlock, View, WantBlocks
from stoker.manager.core.state import Block
from stoker.manager.policies.arlo.allocation import is_runtime_variant
from stoker.manager.policies.base import Quiet

_ROUND_S = 1.0
_ADD_AT, _RELEASE_BELOW = 0.95, 0.5  # Request or release a block at these shares of the latency objective
_RELEASE_WINDOW_S = 60.0  # Seconds over which the percentile must be below `_RELEASE_BELOW`
_RECENT_S = 10.0
_LEAST_CALLS = 20  # With fewer recent calls request no block, because the first calls may have waited for a load


class ScaleBlocksByLatency(Quiet):
    period_s = _ROUND_S

    def __init__(self, base: Provisioning) -> None:
        self.base = base
        self._latency_shares: deque[tuple[float, list[float]]] = deque()
        """Time of each scheduling round, and latencies of its ended calls as shares of their latency objectives."""
        self._next_decision_at = 0.0  # Wait until latencies show the effect of the last decision
        self._next_release_check_at = 0.0

    def demand(self, view: View) -> Sequence[Action]:
        return tuple(self._limit_block_requests(view, self.base.demand(view)))

    def on_timer(self, view: View, key: str) -> Iterable[Action]:
        return self._limit_block_requests(view, self.base.on_timer(view, key))

    def _limit_block_requests(self, view: View, plan: Iterable[Action]) -> Iterator[Action]:
        tracked = bool(view.waiting_contexts) and all(map(is_runtime_variant, view.waiting_contexts.values()))
        for action in plan:
            if not (tracked and isinstance(action, WantBlocks) and (source := view.sources[action.source]).devices):
                yield action
            elif (lacks := source.source.least - len(source.staying_blocks)) > 0:
                yield WantBlocks(action.source, min(lacks, action.count))

    def may_bring(self, view: View, context: Context) -> bool:
        return self.base.may_bring(view, context)

    def on_round(self, view: View, changes: Changes) -> Sequence[Action]:
        if changes.latency_shares:
            self._latency_shares.append((view.now, changes.latency_shares))
        while self._latency_shares and self._latency_shares[0][0] < view.now - _RELEASE_WINDOW_S:
            self._latency_shares.popleft()
        if view.now < self._next_decision_at:
            return ()
        recent = self._shares_since(view.now - _RECENT_S)
        if len(recent) >= _LEAST_CALLS and _percentile_98(recent) >= _ADD_AT:
            return self._request_block(view)
        if view.now >= self._next_release_check_at:
            self._next_release_check_at = view.now + _RELEASE_WINDOW_S
            lately = self._shares_since(view.now - _RELEASE_WINDOW_S)
            if lately and _percentile_98(lately) < _RELEASE_BELOW:
                return self._release_block(view, _percentile_98(lately))
        return ()

    def may_skip_rounds(self, view: View) -> bool:
        return not self._latency_shares and not view.calls

    def _shares_since(self, since: float) -> list[float]:
        return [share for at, some in self._latency_shares if at >= since for share in some]

    def _request_block(self, view: View) -> Sequence[Action]:
        able = [source for source in view.sources.values() if source.requestable_blocks > 0 and not source.stop_reason]
        if not able or any(source.coming_blocks for source in view.sources.values()):
            return ()
        self._next_decision_at = view.now + 2 * _RECENT_S
        return (WantBlocks(able[0].source.name, 1),)

    def _release_block(self, view: View, recent: float) -> Sequence[Action]:
        spare = [
            source.blocks[id]
            for source in view.sources.values()
            if len(source.staying_blocks) > max(1, source.source.least) and not source.coming_blocks
            for id in source.staying_blocks
            if not _has_only_longest_library(view, source.blocks[id])
        ]
        if not spare:
            return ()
        self._next_decision_at = view.now + 2 * _RECENT_S

        libraries = {block: [x for id in block.pilots for x in view.pilots[id].libraries.values()] for block in spare}
        chosen = min(spare, key=lambda block: (sum(x.load for x in libraries[block]), -block.phase_since))
        return (ReleaseBlock(chosen.id, f"98 % of the calls end within {recent:.0%} of their latency objective"),)


def _percentile_98(shares: list[float]) -> float:
    ordered = sorted(shares)
    return ordered[min(len(ordered) - 1, int(0.98 * len(ordered)))]


def _has_only_longest_library(view: View, block: Block) -> bool:
    contexts = (library.context for id in block.pilots for library in view.pilots[id].libraries.values())
    longest = (context for context in contexts if is_runtime_variant(context) and not context.variants)
    return any(len(context.usable_libraries) == 1 for context in longest)
