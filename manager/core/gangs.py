"""Handle gang calls, which run on several libraries at once. Each library runs one rank of the call.

Rank 0 reports its address, and the manager sends the address to the other ranks. When the last rank ends, the call ends
with the result of rank 0. If a library is lost, or a rank loses its connection to another rank, the call is requeued
with rank 0's last checkpoint. After `MAX_BROKEN_RUNS` such runs the call fails. A gang call is sent only when enough
libraries are free, so no library waits for others, and gangs cannot deadlock.
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

# Failures of a rank after which its gang call runs again
_FAILURES_THAT_RESTART_GANG = (FailureKind.GANG, FailureKind.INFRASTRUCTURE)
MAX_BROKEN_RUNS = 10  # A gang call fails after this number of runs that ended because a rank failed


def forward_rank0_address(manager: Manager, library: Library, message: GangMeets) -> None:
    id, address = message.call, message.address
    call = library.held.get(id)
    if call is None or not isinstance(call.holder, Gang) or call.holder.members[0] is not library:
        if id not in library.withdrawn_calls:
            manager.state.count_refusal("address of rank 0 for a call that is not a gang call")
        return
    call.holder.address = address
    for member in call.holder.members[1:]:
        manager.send_to_pilot(member.pilot, MeetGang(member.id, call.id, address))


def resend_rank0_address(manager: Manager, library: Library) -> None:
    for call in library.held.values():
        gang = call.holder
        if isinstance(gang, Gang) and gang.address and gang.members[0] is not library:
            manager.send_to_pilot(library.pilot, MeetGang(library.id, call.id, gang.address))


def record_gang_progress(manager: Manager, call: Call, gang: Gang, report: CallProgress) -> None:
    """Measure the speed of a gang call from rank 0's reports. The first report may only start the measurement."""
    now, before = manager.state.now, gang.report
    began_at, done = before if before is not None else (call.sent_at + _seconds_until_first_item(call, gang), 0.0)
    begins = before is None and (not report.done or bool(report.state))
    # start measuring here: a run that continues from a checkpoint did not process the earlier items
    if begins or report.done < done:
        gang.report = (now, report.done)
    elif report.done > done and now > began_at:
        if before is not None or not call.spec.progress:
            ending.learn_gang_pace(call, gang, items=report.done - done, seconds=now - began_at)
        gang.report = (now, report.done)


def record_gang_member_end(manager: Manager, call: Call, library: Library, outcome: CallEnd) -> None:
    """Record that a rank has ended. If the rank failed, or was the last to end, end the call or requeue it."""
    gang, failure = call.holder, outcome.failure
    assert isinstance(gang, Gang)
    gang.ends[library.id] = outcome
    if not outcome.ok:
        if failure is None or failure.kind not in _FAILURES_THAT_RESTART_GANG:
            ending.end_call(manager, call, outcome)
        elif not _fail_if_broken_too_often(manager, call, library, outcome, is_reported_by_rank=True):
            what = "lost its connection to the other ranks" if failure.kind is FailureKind.GANG else "failed its rank"
            why = f"lib-{library.id} on {library.pilot.id} {what}: {failure.message}"
            holding.requeue_calls(manager, (call,), why=why)
    elif len(gang.ends) == len(gang.members):
        _record_gang_run(manager, call, gang)
        ending.end_call(manager, call, gang.ends[gang.members[0].id])


def count_memory_killed_rank(manager: Manager, library: Library, call: Call, failure: Failure) -> bool:
    """Count a run in which a rank was killed for lack of memory. Return True if too many runs have failed."""
    outcome = CallEnd(call.id, False, failure=msgspec.structs.replace(failure, kind=FailureKind.INFRASTRUCTURE))
    return _fail_if_broken_too_often(manager, call, library, outcome, is_reported_by_rank=False)


def _fail_if_broken_too_often(
    manager: Manager, call: Call, library: Library, outcome: CallEnd, *, is_reported_by_rank: bool
) -> bool:
    """Count a run that a failed rank ended. Return True if the call now fails.

    `is_reported_by_rank`: False if the rank was killed, so that it could not report its failure.
    """
    state, last = manager.state, outcome.failure
    breaks = state.broken_run_counts[call.id] = state.broken_run_counts.get(call.id, 0) + 1
    if is_reported_by_rank:
        state.broken_runs[call.id] = call.sent_at
    if breaks < MAX_BROKEN_RUNS or last is None:
        return False
    where = library.pilot.id
    text = f"its ranks failed or lost their connection {breaks} times; the last time on {where}: {last.message}"
    failure = msgspec.structs.replace(last, message=text, pilot=where, library=library.id)
    ending.end_call(manager, call, msgspec.structs.replace(outcome, failure=failure))
    return True


def _record_gang_run(manager: Manager, call: Call, gang: Gang) -> None:
    rank0, context = gang.members[0], call.group.context
    first = gang.ends[rank0.id]
    if gang.report is None and not call.spec.progress:
        items = call.spec.features.items if call.spec.features is not None else 1
        ending.learn_gang_pace(call, gang, items=items, seconds=first.run_s - _seconds_until_first_item(call, gang))
    if gang.report is not None:
        context.paces.record_processed_share(call.spec.features, gang.report[1])
    known = context.paces.measured.get(len(gang.members))
    if known is not None:
        manager.commands.append(RecordPace(RecipeKey(context.recipe.key), rank0.kind, len(gang.members), known[0]))
    ending.count_runs_and_send_results(manager, rank0, call.group, [], others=1, seconds=first.run_s)


def _seconds_until_first_item(call: Call, gang: Gang) -> float:
    features, paces, size = call.spec.features, call.group.context.paces, len(gang.members)
    before_s = features.seconds_before_first_item(size) if features is not None else 0.0
    return before_s + (paces.meet_s if size > 1 else 0.0)
