"""Dispatch by a multi-level queue: Arlo's Request Scheduler (§3.4, Algorithm 1) for the libraries of a family.

A level is a runtime with libraries. Its head is the least loaded library. A call is sent to the first level whose head
has a load below the level's threshold. Thresholds fall from level to level, to keep longer runtimes free for long
calls. If all levels are congested, the level of the shortest runtime gets the call if its head can answer in time.
Otherwise the call waits in the manager (in the paper, in the queue of the level) for the first library with capacity.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

from stoker.manager.core.deadlines import has_time_for_call
from stoker.manager.core.nouns import Call, Context, Library
from stoker.manager.core.queues import contexts_serving_group
from stoker.manager.core.seams import Action, Send, View
from stoker.manager.policies.arlo.allocation import (
    ArrivalCounts,
    RuntimeTimes,
    family_runtimes_shortest_first,
    is_runtime_variant,
)
from stoker.manager.policies.base import MOST_COMPARED
from stoker.manager.policies.dispatch import HottestFirst
from stoker.protocol.ids import LibraryId

THRESHOLD, DECAY, PEEKED = 0.85, 0.9, 6  # Lambda, alpha and L of Algorithm 1 (§5)

Head = TypeVar("Head")


def load_thresholds_by_level(
    *, threshold: float = THRESHOLD, decay: float = DECAY, peeked: int = PEEKED
) -> tuple[float, ...]:
    return tuple(threshold * decay**peek for peek in range(peeked))


def choose_head(heads: Iterable[tuple[int, int, Head]], thresholds: Sequence[float]) -> tuple[Head | None, bool]:
    """Choose the head that gets a call, by Algorithm 1; None if `heads` is empty.

    `heads`: open calls, capacity and head of each level that can serve the call, shortest level first. `thresholds`:
    share of its capacity at which each level passes the call to the next level. If all examined levels are congested,
    return the head of the first level, and True.
    """
    first: Head | None = None
    for threshold, (load, capacity, head) in zip(thresholds, heads, strict=False):
        if load < threshold * capacity:
            return head, False
        first = head if first is None else first
    return first, True


class MultiLevelQueue(HottestFirst):
    asks_every_call = True
    honours = HottestFirst.honours | {"variants", "latency_s"}

    def __init__(
        self, times: RuntimeTimes, arrivals: ArrivalCounts, *, threshold: float, decay: float, peeked: int
    ) -> None:
        super().__init__()
        self._times = times
        self._arrivals = arrivals
        self._thresholds = load_thresholds_by_level(threshold=threshold, decay=decay, peeked=peeked)

    def window(self, view: View, library: Library) -> int:
        context = library.context
        if not is_runtime_variant(context):
            return super().window(view, library)
        return self._times.capacity(context) if context.runs and not library.is_stuck else library.slots

    def place(self, view: View, call: Call) -> LibraryId | Action | Iterable[Action] | None:
        if not is_runtime_variant(call.group.context) or call.group.options.gang[1] > 1:
            return super().place(view, call)
        if not call.sent_at:
            self._arrivals.record_arrival(call.group.context, view.now)
            self._times.remember_objective(call)
        heads = (
            (library.load, self._times.capacity(context), library)
            for context in contexts_serving_group(call.group) if (library := self._find_head(view, context, call))
        )  # fmt: skip
        library, is_congested = choose_head(heads, self._thresholds)
        if library is None or (is_congested and library.load >= self.window(view, library)):
            return None
        return library.id

    def pull(self, view: View, library: Library) -> int | Iterable[Action]:
        context = library.context
        if not is_runtime_variant(context) or context.queue.gang_count:
            return super().pull(view, library)
        head = context.queue.first_single_call()
        if head is None or not has_time_for_call(view, library, head):
            return 0
        room = self.window(view, library) - library.load
        return min(room, -(-context.queue.count // max(1, len(context.index))))

    def pull_others(self, view: View, library: Library) -> Iterator[Action]:
        """Send waiting calls of shorter runtimes that Algorithm 1 demotes, nearest runtime first."""
        family = family_runtimes_shortest_first(library.context)
        for distance, shorter in enumerate(reversed(family[: family.index(library.context)]), 1):
            while (call := shorter.queue.first_single_call()) is not None and self._may_take_demoted_call(
                view, library, call, distance=distance
            ):
                yield Send(call.id, library.id)

    def _may_take_demoted_call(self, view: View, library: Library, call: Call, *, distance: int) -> bool:
        window = self.window(view, library)
        fits = library.load < window and library.admits(call) and has_time_for_call(view, library, call)
        if not fits or library.context.recipe.key not in call.group.options.variants:
            return False
        if not len(call.group.context.index):
            return True
        is_peeked = distance < len(self._thresholds)
        return is_peeked and library.load < self._thresholds[distance] * self._times.capacity(library.context)

    def _find_head(self, view: View, context: Context, call: Call) -> Library | None:
        free = [
            x for x in islice(context.index.free_libraries_hottest_first(), MOST_COMPARED) if _can_run(view, x, call)
        ]
        if free:
            return min(free, key=lambda library: library.load)
        busy = islice(context.index.libraries_with_backlog_room(), MOST_COMPARED)
        return next((library for library in busy if _can_run(view, library, call)), None)


def _can_run(view: View, library: Library, call: Call) -> bool:
    return library.admits(call) and has_time_for_call(view, library, call)
