"""Calls that arrive, or that a library refused: each goes to a library with room, or waits."""

from __future__ import annotations

from msgspec import Struct

from stoker.manager.core import actions, deadlines, feeding, holding, queues, repair
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Call, Context, Group
from stoker.manager.core.seams import PolicyError
from stoker.protocol.calls import CallSpec


def arrive(manager: Manager, group: Group, specs: list[CallSpec]) -> None:
    """Accept calls of one group: each goes to a library with room, or waits."""
    fresh = holding.accept(manager, group, specs)
    if not fresh:
        return
    group.open_calls += len(fresh)
    group.client.open_calls += len(fresh)
    group.client.last_call = max(group.client.last_call, fresh[-1].id)
    if manager.tracked:
        for changes in manager.tracked:
            changes.calls.update(call.id for call in fresh)
    context = group.context
    if manager.state.orphans:
        fresh = repair.claim(manager, fresh)
        if not fresh:
            return
    if group.options.objective.deadline_at and manager.policies.dispatch.by_deadline:
        fresh = deadlines.came(manager, fresh)
        if not fresh:
            return
    _enter(manager, context, fresh)
    if context.queue.timed:
        deadlines.watch(manager, context)


def _enter(manager: Manager, context: Context, fresh: list[Call]) -> None:
    """New calls of one group go to libraries with room, or wait."""
    dispatch = manager.policies.dispatch
    few = len(fresh) <= dispatch.places_one_by_one_up_to and not context.queue.count
    if few or dispatch.asks_every_call:
        for call in fresh:
            place(manager, call)
        return
    queues.enter(context, fresh)
    if context.index:
        feeding.serve(manager, context)
    if context.queue.count:
        queues.hungry(manager, context)


def place(manager: Manager, call: Call, *, again: bool = False) -> None:
    """Ask where a waiting call that is in no queue should go. `again`: it was sent somewhere before."""
    context = call.group.context
    answer = manager.policies.dispatch.place(manager.state, call)
    if isinstance(answer, int):
        library = manager.state.libraries.get(answer)
        if library is not None and holding.takes(manager, library, call) and call.group.options.gang[0] <= 1:
            holding.give(manager, library, call)
            return
        manager.illegal(PolicyError(f"call {call.id} cannot be placed in library {answer}"), seam="dispatch")
        answer = None
    if again:
        queues.put_in_place(call)
    else:
        queues.enter(context, [call])
    if answer is not None:
        actions.carry_out(manager, (answer,) if isinstance(answer, Struct) else answer, seam="dispatch")
    if context.queue.count:
        queues.hungry(manager, context)


def retry(manager: Manager, call: Call, *, why: str) -> None:
    """A held call that its library refused, or was made to give up, is placed anew."""
    holding.wait_again(manager, call, why=why)
    if call.id in manager.state.trials:
        queues.come_back(manager, call)
        manager.returned[call.group.context] = None
    else:
        place(manager, call, again=True)
