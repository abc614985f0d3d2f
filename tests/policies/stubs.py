"""Minimal test policies, each for one feature of the policy interfaces (seams)."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.manager.core import seams
from stoker.manager.core.nouns import Call, CallState, Context, Library, LibraryState
from stoker.manager.policies import ExternalPilots, HottestFirst, LoadWhereWanted
from stoker.protocol.ids import LibraryId


def policies(
    *,
    dispatch: HottestFirst | None = None,
    residency: LoadWhereWanted | None = None,
    provisioning: ExternalPilots | None = None,
) -> seams.Policies:
    return seams.Policies(
        dispatch=dispatch or HottestFirst(),
        residency=residency or LoadWhereWanted(),
        provisioning=provisioning or ExternalPilots(),
    )


class Elastic(HottestFirst):
    """Dispatch in rounds like PromptTuner: a waiting gang gets up to its maximum number of free libraries."""

    period_s = 0.05

    def place(self, view: seams.View, call: Call) -> LibraryId | seams.Action | None:
        return None

    def pull(self, view: seams.View, library: Library) -> int | Sequence[seams.Action]:
        return 0

    def on_round(self, view: seams.View, changes: seams.Changes) -> Sequence[seams.Action]:
        plan: list[seams.Action] = []
        for context in view.waiting_contexts.values():
            idle = dict(context.idle)
            for call in context.queue:
                smallest, largest = call.group.options.gang
                members = [id for id, library in idle.items() if library.admits(call)][:largest]
                if len(members) >= smallest:
                    idle = {id: library for id, library in idle.items() if id not in members}
                    plan.append(seams.SendGang(call.id, tuple(members)))
        return plan


class MoreMemory(LoadWhereWanted):
    """Residency like SLINFER's watermarks: after `big` has loaded, other libraries shrink so that `big` can grow."""

    period_s = 0.1

    def __init__(self, *, small: int, large: int) -> None:
        super().__init__()
        self.small, self.large = small, large
        self.seen: list[seams.Changes] = []

    def on_round(self, view: seams.View, changes: seams.Changes) -> Sequence[seams.Action]:
        self.seen.append(changes)
        plan: list[seams.Action] = []
        for id in sorted(changes.libraries):
            library = view.libraries.get(id)
            if library is None or library.state is not LibraryState.READY:
                continue
            for other in library.devices[0].libraries.values():
                plan += self._step(other)
        return plan

    def _step(self, library: Library) -> list[seams.Action]:
        if library.unanswered_resizes or library.state is not LibraryState.READY:
            return []
        if library.context.recipe.key != "big":
            return [seams.Resize(library.id, self.small)] if library.promised_bytes > self.small else []
        fits = library.devices[0].free_bytes >= self.large - library.promised_bytes
        return [seams.Resize(library.id, self.large)] if fits and library.promised_bytes < self.large else []


class Preempt(HottestFirst):
    """Dispatch that evicts a running call of lower priority for a call without a free library."""

    def place(self, view: seams.View, call: Call) -> LibraryId | seams.Action | None:
        found = super().place(view, call)
        if found is not None or not call.group.options.priority:
            return found
        for library in call.group.context.libraries.values():
            for other in library.held.values():
                if other.holder is library and other.group.options.priority < call.group.options.priority:
                    return seams.Evict(other.id)
        return None

    asks_every_call = True


class Offer(HottestFirst):
    """Dispatch that offers calls to libraries, and offers a refused call to another library."""

    def place(self, view: seams.View, call: Call) -> LibraryId | seams.Action | None:
        tried = sum("refused" in text for _, text in call.notes or ())
        free = sorted(call.group.context.idle)
        return seams.Send(call.id, free[tried % len(free)], offer=True) if free else None

    def pull(self, view: seams.View, library: Library) -> int | Sequence[seams.Action]:
        head = library.context.queue.head()
        return (
            (seams.Send(head.id, library.id, offer=True),) if head is not None and library.load < library.slots else 0
        )


class Deadlines(HottestFirst):
    """Dispatch that drops late calls by a timer."""

    asks_every_call = True
    by_deadline = False

    def place(self, view: seams.View, call: Call) -> LibraryId | seams.Action | None:
        latest = call.group.options.objective.deadline_at
        found = super().place(view, call)
        return seams.Timer(latest, str(call.id)) if found is None and latest else found

    def on_timer(self, view: seams.View, key: str) -> Sequence[seams.Action]:
        call = view.calls.get(int(key))
        if call is None or call.state is not CallState.WAITING:
            return ()
        return (seams.Drop(call.id, f"its deadline at {call.group.options.objective.deadline_at:g} s has passed"),)


class Variants(HottestFirst):
    """Dispatch like Arlo: send a call to its first variant with a free library."""

    asks_every_call = True
    honours = frozenset({"variants"})

    def place(self, view: seams.View, call: Call) -> LibraryId | seams.Action | None:
        for key in (call.group.context.recipe.key, *call.group.options.variants):
            for id, library in view.contexts[key].idle.items():
                if library.admits(call):
                    return id
        return None


class LoadOnAdvice(LoadWhereWanted):
    """Residency that requests advice on a context without waiting, and drops the plan if the advice is bad."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: set[str] = set()

    def on_waiting_calls(self, view: seams.View, context: Context) -> Sequence[seams.Action]:
        plan = list(super().on_waiting_calls(view, context))
        if context.recipe.key not in self.asked:
            self.asked.add(context.recipe.key)
            plan.append(seams.Ask(context.recipe.key))
        return plan

    def on_advice(self, view: seams.View, context: Context) -> Sequence[seams.Action]:
        if context.advice[""].run_s < 100:
            return ()
        return tuple(seams.Drop(call.id, "it would take too long") for call in context.queue)


def fewer_rounds(policies: seams.Policies, *, period_s: float = 0.2) -> seams.Policies:
    for seam in (policies.dispatch, policies.residency):
        seam.period_s = period_s
    return policies
