"""What a library says of calls that have ended.

The hot path. What is done here a call is done a million times, so the ends of one frame are handled together, and what
is counted is counted a batch.
"""

from __future__ import annotations

from stoker.contexts.recipe import ObjectRef
from stoker.manager.core import (
    accounting,
    call_records,
    ending,
    faults,
    feeding,
    gangs,
    holding,
    indexing,
    repair,
    reservations,
)
from stoker.manager.core.commands import DiscardObject
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Call, Gang, Group, Library
from stoker.protocol import pace
from stoker.protocol.calls import CallEnd


def ended(manager: Manager, library: Library, ends: list[CallEnd]) -> None:
    """Calls of a library have ended."""
    open_calls = manager.state.calls
    plain = not manager.watch and not manager.tracked
    first = not library.context.runs
    group: Group | None = None
    good: list[CallEnd] = []
    others, seconds, total = 0, 0.0, 0
    rest, place = iter(ends), 0
    while place < len(ends):
        if plain:
            count, call, group, seconds = holding.end_good(manager, library, rest, group, seconds)
            good += ends[place : place + count]
            place += count
            if place == len(ends):
                break
        else:
            call = holding.take_out(library, ends[place].call)
        outcome, place = ends[place], place + 1
        if call is None or call.holder is not library:
            total += _odd_end(manager, library, call, outcome)
            continue
        if faults.is_fault(outcome):
            faults.failed(manager, library, call, outcome)
            continue
        if call.group is not group:
            if group is not None:
                total += accounting.account(manager, library, group, good, others=others, seconds=seconds)
            group, good, others, seconds = call.group, [], 0, 0.0
        seconds += outcome.run_s
        if plain and outcome.ok:
            holding.end_one(manager, call)
            good.append(outcome)
            continue
        others += 1
        if not outcome.ok:
            total += accounting.account(manager, library, group, good, others=others, seconds=seconds)
            good, others, seconds = [], 0, 0.0
        ending.end(manager, call, outcome)  # watched: it costs what any other does, or a replay would differ
    if group is not None:
        total += accounting.account(manager, library, group, good, others=others, seconds=seconds)
        if first and library.context.queue.count:
            manager.dirty[library.context] = None
    call_records.all_ended(manager.state, ends)
    if manager.state.trials:
        for outcome in ends:
            if outcome.call not in open_calls:
                reservations.ended(manager, outcome.call)
    if library.stuck:
        indexing.gets_on(library)
    holding.progressed(manager, library)
    for outcome in reversed(ends):
        if outcome.printed is not None:
            library.printed_to = outcome.printed.end
            break
    library.served += total
    library.context.served += total
    library.pilot.ended += total
    if total:
        now = manager.state.now
        second = int(now)
        for counts in (manager.state.rate, library.context.rate, library.pilot.rate):
            if counts and counts[-1][0] == second:  # `recent.add`, without the call
                counts[-1][1] += total
            else:
                pace.count_recent(counts, total, now=now)
    feeding.pull(manager, library)


def _odd_end(manager: Manager, library: Library, call: Call | None, outcome: CallEnd) -> int:
    """The end of a call that this library does not hold alone. Returns how many calls it ran for that: 0 or 1."""
    if call is not None and type(call.holder) is Gang:
        gangs.ended(manager, call, library, outcome)
        return 1
    if not holding.slot_is_free(library, outcome.call):
        manager.state.refuse("late or repeated end of a call")
        return 0
    still_open = manager.state.calls.get(outcome.call)
    if faults.is_fault(outcome):
        repair.orphan_failed(manager.state, outcome.call)
        return 1
    if still_open is not None and _may_count(still_open, library):
        ending.finished_elsewhere(manager, still_open, library, outcome)
        return 1
    if repair.end_orphan(manager.state, outcome) or outcome.call in manager.state.forgotten:
        return 1
    if isinstance(outcome.payload, ObjectRef):
        manager.out.append(DiscardObject(outcome.payload.source))
    return 1


def _may_count(call: Call, library: Library) -> bool:
    """Whether an end counts that comes from a pilot which had been given up: its call is still open."""
    options = call.group.options  # of a stream its client may lack pieces that came from there
    return options.gang[1] == 1 and not options.stream and not any(device.fault for device in library.devices)
