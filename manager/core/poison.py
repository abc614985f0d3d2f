"""Calls that end their libraries: tried by themselves, and given up when they do it again."""

from __future__ import annotations

import msgspec

from stoker.manager.core import ending, suspects
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Call, Library
from stoker.manager.core.phases import LibraryState
from stoker.protocol.calls import Failure, FailureKind

SIGKILL = 9

# A call whose library was ended so often for the sake of others has the next one for itself.
CUTS_BESIDE = 2

# A call that has killed this many libraries is a poison call: the first death may have been the node's fault.
POISON_KILLS = 2


def killed_its_library(manager: Manager, library: Library, call: Call, failure: Failure, *, alone: bool) -> bool:
    """A library died while it ran this call. True if that makes it a poison call, which ends here. Of several calls
    that ran there nobody knows which did it: each is tried again by itself (see `feeding`). The same holds for a death
    from outside (no memory left, a dead zygote) while other libraries of the pilot were at work (see `suspects`)."""
    text = f"its library died ({failure.message})"
    outside = failure.signal == SIGKILL or failure.kind is FailureKind.CONTEXT
    beside = library.pilot.libraries.values()
    at_work = any(x.held.keys() - {call.id} or x.state is LibraryState.LOADING for x in beside)  # no rank of its own
    if alone:
        suspects.library_killed(manager, library, call, failure, certain=not at_work)
        if outside and at_work:
            call.note(manager.state.now, f"{text} while other libraries of {library.pilot.id} were at work")
            return False
    past = call.remember()
    past.kills += 1
    call.by_itself = True
    if not alone:
        past.kills = min(past.kills, POISON_KILLS - 1)
        call.note(manager.state.now, f"{text} while it ran other calls too; it is tried again by itself")
        return False
    call.note(manager.state.now, f"{text}, {past.kills} of {POISON_KILLS} before it is given up")
    if past.kills < POISON_KILLS:
        return False
    kind = FailureKind.MEMORY if failure.kind is FailureKind.MEMORY else FailureKind.POISON
    text = f"it ended its library {past.kills} times; the last time: {failure.message}"
    ending.fail(manager, call, msgspec.structs.replace(failure, kind=kind, message=text))
    return True


def cut_beside(manager: Manager, library: Library, call: Call, failure: Failure) -> None:
    """A library was ended for another call's sake while it ran this one. That may happen again and again beside calls
    that run into their time limits, so the call soon has a library for itself."""
    past = call.remember()
    past.cuts_beside += 1
    call.by_itself |= past.cuts_beside >= CUTS_BESIDE
    more = "; it has a library for itself from now on" if call.by_itself else ""
    call.note(manager.state.now, f"lib-{library.id} was ended while it ran there ({failure.message}){more}")
