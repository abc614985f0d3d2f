"""Handle gang calls, which run on several libraries at once. Each library runs one rank of the call.

Rank 0 reports its address, and the manager sends the address to the other ranks. When the last rank ends, the call ends
with the result of rank 0. When a library is lost, the call is requeued with the last checkpoint of rank 0. If a rank
ends because it lost the connection to another rank (`FailureKind.GANG`), the call is requeued, at most `MOST_BREAKS`
times. No library waits for an incomplete gang, so gangs cannot deadlock.
"""

from __future__ import annotations

import msgspec

from stoker.manager.core import ending, holding
from stoker.manager.core.events import RecordPace
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Call, Gang, Library
from stoker.protocol.calls import CallEnd, CallProgress, Failure, FailureKind
from stoker.protocol.ids import RecipeKey
from stoker.protocol.to_manager import GangMeets
from stoker.protocol.to_pilot import MeetGang

_BREAKS = (FailureKind.GANG, FailureKind.INFRASTRUCTURE)  # Failures of a rank after which the gang call runs again
MOST_BREAKS = 10  # A gang call fails after this number of broken runs, even if its libraries still run


def forward_rank0_address(manager: Manager, library: Library, message: GangMeets) -> None:
    id, address = message.call, message.address
    call = library.held.get(id)
    if call is None or not isinstance(call.holder, Gang) or call.holder.members[0] is not library:
        if id not in library.zombies:
            manager.state.refuse("address of rank 0 for a call that is not a gang call")
        return
    call.holder.address = address
    for member in call.holder.members[1:]:
        manager.say(member.pilot, MeetGang(member.id, call.id, address))


def resend_rank0_address(manager: Manager, library: Library) -> None:
    for call in library.held.values():
        gang = call.holder
        if isinstance(gang, Gang) and gang.address and gang.members[0] is not library:
            manager.say(library.pilot, MeetGang(library.id, call.id, gang.address))


def record_gang_progress(manager: Manager, call: Call, gang: Gang, report: CallProgress) -> None:
    """Measure the speed of a gang call from the progress reports of rank 0. The first report may only start the
    measurement."""
    now, before = manager.state.now, gang.report
    began_at, done = before if before is not None else (call.sent_at + _seconds_until_first_item(call, gang), 0.0)
    begins = before is None and (not report.done or bool(report.state))
    if begins or report.done < done:  # the run continues from a checkpoint
        gang.report = (now, report.done)
    elif report.done > done and now > began_at:
        if before is not None or not call.spec.progress:
            ending.learn_gang_pace(call, gang, items=report.done - done, seconds=now - began_at)
        gang.report = (now, report.done)


def record_gang_member_end(manager: Manager, call: Call, library: Library, outcome: CallEnd) -> None:
    """Record that one rank of a gang call has ended. If the rank failed or was the last to end, end the call or run it
    again."""
    gang = call.holder
    if not isinstance(gang, Gang):
        manager.state.refuse("end of a gang member for a call that is not a gang call")
        return
    gang.ends[library.id] = outcome
    if not outcome.ok:
        if outcome.failure is not None and outcome.failure.kind in _BREAKS:
            _handle_break(manager, call, library, outcome)
        else:
            ending.end_call(manager, call, outcome)
    elif len(gang.ends) == len(gang.members):
        _record_gang_run(manager, call, gang)
        ending.end_call(manager, call, gang.ends[gang.members[0].id])


def count_memory_killed_rank(manager: Manager, library: Library, call: Call, failure: Failure) -> bool:
    """Count that a rank of a gang call was killed for lack of memory. Return True if the call ended because of this."""
    outcome = CallEnd(call.id, False, failure=msgspec.structs.replace(failure, kind=FailureKind.INFRASTRUCTURE))
    return _fail_if_broken_too_often(
        manager, call, library, outcome, breaks=holding.count_broken_gang(manager.state, call, by_ranks=False)
    )


def _handle_break(manager: Manager, call: Call, library: Library, outcome: CallEnd) -> None:
    if _fail_if_broken_too_often(
        manager, call, library, outcome, breaks=holding.count_broken_gang(manager.state, call, by_ranks=True)
    ):
        return
    assert outcome.failure is not None
    what = "lost its connection to the other ranks" if outcome.failure.kind is FailureKind.GANG else "failed its rank"
    why = f"lib-{library.id} on {library.pilot.id} {what}: {outcome.failure.message}"
    holding.requeue(manager, (call,), why=why)


def _fail_if_broken_too_often(manager: Manager, call: Call, library: Library, outcome: CallEnd, *, breaks: int) -> bool:
    if breaks < MOST_BREAKS:
        return False
    last = outcome.failure
    assert last is not None
    text = f"its ranks lost their connection {breaks} times; the last time on {library.pilot.id}: {last.message}"
    failure = msgspec.structs.replace(last, message=text, pilot=library.pilot.id, library=library.id)
    ending.end_call(manager, call, msgspec.structs.replace(outcome, failure=failure))
    return True


def _record_gang_run(manager: Manager, call: Call, gang: Gang) -> None:
    first = gang.ends[gang.members[0].id]
    if gang.report is None and not call.spec.progress:
        items = call.spec.features.items if call.spec.features is not None else 1
        ending.learn_gang_pace(call, gang, items=items, seconds=first.run_s - _seconds_until_first_item(call, gang))
    if first.ok and gang.report is not None:
        ending.record_processed_items(call, gang.report[1])
    known = call.group.context.paces.measured.get(len(gang.members))
    if known is not None:
        kind = gang.members[0].devices[0].facts.kind
        manager.out.append(RecordPace(RecipeKey(call.group.context.recipe.key), kind, len(gang.members), known[0]))
    ending.account_runs(manager, gang.members[0], call.group, [], others=1, seconds=first.run_s)


def _seconds_until_first_item(call: Call, gang: Gang) -> float:
    features, paces, size = call.spec.features, call.group.context.paces, len(gang.members)
    before_s = features.seconds_before_first_item(size) if features is not None else 0.0
    return before_s + (paces.meet_s if size > 1 else 0.0)
