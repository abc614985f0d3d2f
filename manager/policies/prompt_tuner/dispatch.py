"""PromptTuner's dispatch (§4.4.1): every 50 ms, which waiting jobs start, and on how many warm replicas.

A gang is sent to all of its libraries at once, so two gangs cannot wait for each other. `together` is the warm
allocator of §6.3. Without it (an ablation) each replica of a job takes an idle device when it can and waits for
the others; once all replicas of a pool are held and none is loading, the late job with the nearest deadline
begins on what it holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from stoker.manager.core.deadlines import run_fits
from stoker.manager.core.nouns import Call, Library
from stoker.manager.core.seams import Action, Changes, Drop, Forecast, Send, SendGang, View
from stoker.manager.policies.dispatch import HottestFirst
from stoker.manager.policies.prompt_tuner.pools import PoolState, PoolStates, in_rounds
from stoker.manager.policies.prompt_tuner.scheduling import FRONT, HOPEFUL, LATE, PoolJob, allot
from stoker.protocol.ids import CallId, LibraryId
from stoker.units import show_seconds

ROUND_S = 0.05
"""§5.3."""

REFRESH_S = 0.25
"""Seconds after which a round runs although nothing but time has changed."""


class AllotInRounds(HottestFirst):
    """Dispatch: Algorithm 1 for contexts with jobs in line, the default for all others."""

    period_s = ROUND_S
    by_deadline = False

    def __init__(self, states: PoolStates, *, together: bool = True, reuse: bool = True, **hottest: Any) -> None:
        super().__init__(**hottest)
        self.states = states
        self.together = together
        self.reuse = reuse

    def place(self, view: View, call: Call) -> LibraryId | Action | Iterable[Action] | None:
        state = self.states.of(call.group.context)
        if in_rounds(call) or (state is not None and state.active):
            return None
        return super().place(view, call)

    def pull(self, view: View, library: Library) -> int | Iterable[Action]:
        state, head = self.states.of(library.context), library.context.queue.head()
        if state is not None:
            state.mark_changed()
        if head is None or in_rounds(head) or (state is not None and state.active):
            return 0
        return super().pull(view, library)

    def dry(self, view: View, library: Library) -> Iterable[Action]:
        state = self.states.of(library.context)
        if state is not None:
            state.mark_changed()
        return super().dry(view, library)

    def round(self, view: View, changes: Changes) -> Sequence[Action]:
        self.states.update(view, changes)
        plan: list[Action] = []
        for state in self.states.all.values():
            if state.left_over:
                state.left_over = False
                plan += _default_way(state)
            if state.active and (state.allot_due or view.now >= state.looked_at + REFRESH_S):
                state.allot_due, state.looked_at = False, view.now
                plan += self._allot(view, state)
        return plan

    def rests(self, view: View) -> bool:  # noqa: ARG002
        return not any(state.active or state.left_over for state in self.states.all.values())

    def _allot(self, view: View, state: PoolState) -> list[Action]:
        free = state.free(reuse=self.reuse)
        if not free:
            return []
        starts: list[tuple[PoolJob, list[Library]]] = []

        def take(job: PoolJob, count: int) -> bool:
            if any(job is other for other, _ in starts):
                return False
            members = _members(view, view.calls[CallId(job.id)], free, count=count, run_s=job.run_s[count - 1])
            if len(members) < count:
                return False
            starts.append((job, members))
            for library in members:
                free.remove(library)
            return True

        if not self.together:
            _grab(state, idle=len(free), now=view.now)
            for job, count in _late_holders(state, idle=len(free), now=view.now):
                if take(job, count):
                    del state.held[job.id]
        allot(state.line, state.pool(now=view.now, idle=len(free)), now=view.now, take=take)
        plan: list[Action] = []
        for job, members in starts:
            self.states.forget(job.id)
            plan += _start(view, job, members)
        for id, ordered in tuple(state.promises.items()):
            if ordered.promise.here >= ordered.promise.replicas:  # all have come and are no longer enough
                del state.promises[id]
                state.mark_changed()
        return plan


def _start(view: View, job: PoolJob, members: list[Library]) -> list[Action]:
    """Send a call to these libraries with its forecast, or drop it if it is late on any number of them and unwanted
    then.
    """
    id, ids = CallId(job.id), tuple(library.id for library in members)
    options = view.calls[id].group.options
    if job.deadline_at and options.objective.drop_late and not job.measures and job.is_lost(view.now):
        takes, left = show_seconds(job.run_s[-1]), show_seconds(max(0.0, job.deadline_at - view.now))
        return [Drop(id, f"on all the devices that it may have it takes {takes}, and its deadline is in {left}")]
    gang = options.gang[1] > 1
    plan: list[Action] = [SendGang(id, ids) if gang else Send(id, ids[0])]
    ends_at = view.now + job.run_s[len(ids) - 1]
    if not job.measures and (gang or job.deadline_at):
        plan.append(Forecast(id, ends_at, not job.deadline_at or ends_at <= job.deadline_at))
    return plan


def _members(view: View, call: Call, free: list[Library], *, count: int, run_s: float) -> list[Library]:
    """Return up to `count` free libraries on which the call could finish, on as few pilots as possible."""
    able = [x for x in free if x.admits(call) and run_fits(view, x.pilot, run_s)]
    if 1 < count < len(able):
        many = Counter(library.pilot.id for library in able)
        able.sort(key=lambda library: (-min(count, many[library.pilot.id]), library.pilot.id))
    return able[:count]


def _default_way(state: PoolState) -> list[Action]:
    free = state.free()
    calls = state.context.queue.first(len(free), looks=len(free)) if free else []
    pairs = ((call, library) for call, library in zip(calls, free, strict=False) if not in_rounds(call))
    return [Send(call.id, library.id) for call, library in pairs if library.admits(call)]


def _grab(state: PoolState, *, idle: int, now: float) -> None:
    """Ablation: idle replicas go one by one to jobs that want them, nearest deadline first, and stay with them."""
    state.line.advance(now)
    free = max(0, idle - sum(ordered.promise.kept for ordered in state.promises.values()))
    waits = [(kind, id) for kind, _, id in state.line.behind(FRONT) if id not in state.promises]
    line = [id for kind, id in waits if kind == HOPEFUL or (kind == LATE and id in state.held)]
    state.wanted = {id: state.line.need(id) or state.wanted[id] for id in line}
    before, state.held = state.held, {}
    for wants in (before, state.wanted):  # no job takes away what another holds
        for id in line:
            has = state.held.get(id, 0)
            more = min(free, min(wants.get(id, 0), state.wanted[id]) - has)
            if more > 0:
                state.held[id] = has + more
                free -= more


def _late_holders(state: PoolState, *, idle: int, now: float) -> list[tuple[PoolJob, int]]:
    """Return late jobs that begin on replicas they hold; if none is ready and nothing can come, the first takes what
    it needs.
    """
    late = [(state.line.jobs[id], count) for id, count in state.held.items() if not state.line.is_hopeful(id)]
    ready = [(job, count) for job, count in late if count >= state.wanted[job.id]]
    if ready or not late or sum(state.held.values()) < idle:
        return ready
    if state.promises or state.pool(now=now, idle=idle).busy:
        return []
    job, count = late[0]
    if count < job.least <= idle:
        count, state.held = job.least, {job.id: job.least}
    return [(job, count)] if count >= job.least else []
