"""What a scheduler that thinks in rounds remembers between them: who waits for which pool, and what was promised.

Dispatch and residency share the states of all pools, and tell them what has changed. Everything in them can be found
out again from the view, and is, when they are new.

A context has a pool as soon as a call wants it by a deadline, or as a gang. While such calls wait, all waiting calls
of the context are in the pool's queue, and rounds decide; else its other calls go the default way.
"""

from __future__ import annotations

import msgspec

from stoker.manager.core.nouns import Call, CallState, Context, LibraryState, Pilot, PilotState
from stoker.manager.core.seams import Changes, View
from stoker.manager.policies.prompt_tuner.job_queue import PoolJob
from stoker.manager.policies.prompt_tuner.pool_state import OrderedReplicas, PoolState, in_rounds
from stoker.protocol.ids import LibraryId, PilotId


class PoolStates:
    """The pools of all contexts that have one."""

    def __init__(self, *, cut_s: float = 3.0, learn: bool = True) -> None:
        self.all: dict[str, PoolState] = {}
        self.cut_s = cut_s
        """Replicas that are warmed on a pilot that is cut off are given up after so long: it may be a blip."""
        self._learn = learn
        self._of: dict[int, PoolState] = {}
        """Where each waiting job is."""
        self._cut: dict[PilotId, float] = {}
        self._new = True

    def of(self, context: Context) -> PoolState | None:
        """A context's, if it has one."""
        return self.all.get(context.recipe.key)

    def update(self, view: View, changes: Changes) -> None:
        """Bring them up to date."""
        if self._new:
            self._new = False
            for context in view.hungry.values():
                self._open(view, context)
        fresh: dict[PoolState, list[PoolJob]] = {}
        for id in changes.calls:
            call, state = view.calls.get(id), self._of.get(id)
            if call is None or call.state is not CallState.WAITING:
                if state is not None:
                    self.forget(id)
            elif state is None:
                self._add(view, call, fresh)
        for state, jobs in fresh.items():
            state.line.put(jobs, now=view.now)
            state.mark_changed()
        for id in sorted(changes.libraries):
            library = view.libraries.get(LibraryId(id))
            self._libraries_changed(library.context if library is not None else None)
        if changes.pilots:
            self._libraries_changed(None)
        for state in self.all.values():
            if state.line and state.rate(view.now):
                self._rate(view, state)
        self._keep_promises(view)

    def forget(self, id: int) -> None:
        """A job waits no more."""
        state = self._of.pop(id, None)
        if state is None:
            return
        state.line.remove(id)
        state.promises.pop(id, None)
        state.held.pop(id, None)
        state.wanted.pop(id, None)
        state.mark_changed()
        if id in state.others:
            state.others.remove(id)
            return
        state.asked -= 1
        if not state.asked:
            state.left_over = bool(state.others)
            for other in sorted(state.others):
                del self._of[other]
                state.line.remove(other)
            state.others.clear()

    def _libraries_changed(self, context: Context | None) -> None:
        """Libraries of a context have changed; None: of any."""
        for state in self.all.values():
            if context is None or state.context is context:
                state.mark_changed()
            state.walk_due = True  # devices may have come free

    def _open(self, view: View, context: Context) -> None:
        """From now on all that waits there is in line, if rounds are asked to decide about any of it."""
        calls = list(context.queue)
        others: set[int] = {call.id for call in calls if not in_rounds(call)}
        if len(others) == len(calls):
            return
        state = self.all.get(context.recipe.key)
        if state is None:
            state = self.all[context.recipe.key] = PoolState(context, learn=self._learn)
        state.asked, state.others = len(calls) - len(others), others
        self._of.update(dict.fromkeys((call.id for call in calls), state))
        state.line.put([_job(view, state, call) for call in calls], now=view.now)
        state.mark_changed()

    def _add(self, view: View, call: Call, fresh: dict[PoolState, list[PoolJob]]) -> None:
        """A call waits."""
        state = self.of(call.group.context)
        if state is None or not state.asked:
            if in_rounds(call):
                self._open(view, call.group.context)
            return
        if in_rounds(call):
            state.asked += 1
        else:
            state.others.add(call.id)
        self._of[call.id] = state
        fresh.setdefault(state, []).append(_job(view, state, call))

    def _rate(self, view: View, state: PoolState) -> None:
        calls = [call for id in state.line.jobs if (call := view.calls.get(id)) is not None]
        state.line.put([state.job(call, view.reports.get(call.id)) for call in calls], now=view.now)
        state.mark_changed()

    # ---- promises

    def _keep_promises(self, view: View) -> None:
        """Note which promised replicas have come, and which never will. Who is late anyway is promised nothing."""
        self._cut = {
            id: self._cut.get(id, view.now) for id, pilot in view.pilots.items() if pilot.state is PilotState.CUT
        }
        for state in self.all.values():
            if state.line.advance(view.now):
                state.mark_changed()
            if not state.walk_due and not self._cut:
                continue
            for id, ordered in tuple(state.promises.items()):
                if not state.line.is_hopeful(id):
                    del state.promises[id]
                    state.mark_changed()
                else:
                    self._update_promise(view, state, ordered)

    def may_return(self, pilot: Pilot, now: float) -> bool:
        """Whether a pilot that is cut off has been so for a moment only."""
        return now - self._cut.get(pilot.id, now) <= self.cut_s

    def _update_promise(self, view: View, state: PoolState, ordered: OrderedReplicas) -> None:
        here, ordered.lost, ordered.loading = 0, [], set()
        for place in ordered.places:
            pilot = view.pilots.get(place[0])
            device = pilot.devices.get(place[1][0]) if pilot is not None else None
            there = device.libraries.values() if device is not None else ()
            library = next((x for x in there if x.context is state.context), None)
            if library is None or pilot is None or library.state not in (LibraryState.LOADING, LibraryState.READY):
                ordered.lost.append(place)
            elif pilot.state is PilotState.CUT and self.may_return(pilot, view.now):
                ordered.loading.add(library.id)
            elif pilot.state is not PilotState.HERE:
                ordered.lost.append(place)
            elif library.state is LibraryState.READY:
                here += 1
            else:
                ordered.loading.add(library.id)
        if here != ordered.promise.here:
            ordered.promise = msgspec.structs.replace(ordered.promise, here=here)
            state.mark_changed()


def _job(view: View, state: PoolState, call: Call) -> PoolJob:
    return state.job(call, view.reports.get(call.id) if call.spec.progress else None)
