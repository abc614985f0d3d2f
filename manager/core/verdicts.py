"""Why calls and loads have failed: what is asked about them, and what becomes of the answers.

The advisor reads logs and says whose fault a failure was. It answers late or never, and the failure has had its effect
by then: the user has the exception, or the call runs elsewhere (`faults`). A verdict is for what comes next: it is kept
with the pilot, told in the stories of call and pilot, and policies are told of it, who may quarantine what has failed
(`seams.Quarantine`).

A sweep whose calls all fail asks about each of its functions on a pilot twice at once, so that a node that fails
everything is soon found out, and then once in `AGAIN_S`.
"""

from __future__ import annotations

from stoker.manager.core.commands import AskAdvice
from stoker.manager.core.events import VerdictAdvice
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Call, Gang, Judged, Library, Pilot
from stoker.manager.core.subjects import OfFailure
from stoker.protocol.calls import CallEnd, Failure, FailureKind, Printed
from stoker.protocol.ids import CallId, show_call

AGAIN_S = 60.0
SOON_S = 2.0
"""The second question comes so long after the first at the soonest."""
FORGET_S = 600.0
"""A function that has not failed for so long begins anew."""
MOST_NAMES = 64
"""Failures of at most so many functions are asked about on a pilot."""
SHOWN_LINES = 2
LEAST_SURE = 0.5
"""A verdict that is less sure is not shown as one. Policies and `stoker explain --json` get it too."""
KEPT = 20
"""The last so many verdicts on a pilot are kept."""
SAID_CHARACTERS = 4_000
NO_CALL = CallId(-1)

UNASKED = frozenset(
    {
        FailureKind.CANCELLED, FailureKind.DROPPED, FailureKind.TIMEOUT, FailureKind.NO_DEVICE,
        FailureKind.SERIALIZATION, FailureKind.GANG, FailureKind.CONTEXT,
    }
)  # fmt: skip
"""Ends that somebody wanted, that a limit brought, or that say all there is to say."""


def call_failed(manager: Manager, holder: Library | Gang | None, call: Call, outcome: CallEnd) -> None:
    """A call has failed where it ran: ask why."""
    failure = outcome.failure
    if not isinstance(holder, Library) or (failure is not None and failure.kind in UNASKED):
        return
    said = outcome.raised if failure is None else "\n".join((failure.message, failure.tail))
    printed = outcome.printed or (failure.printed if failure is not None else None)
    log, *part = (printed.path, printed.start, printed.end) if printed is not None else ("", 0, 0)
    _ask(manager, holder, call.id, name=call.group.function.name, log=log, part=(part[0], part[1]), said=said)


def load_failed(manager: Manager, library: Library, failure: Failure) -> None:
    """A load has failed: ask why."""
    said = "\n".join((failure.message, failure.tail))
    name = library.context.recipe.name
    _ask(manager, library, NO_CALL, name=name, log=failure.log or log_of(library), part=(0, 0), said=said)


def arrived(manager: Manager, about: OfFailure, verdict: VerdictAdvice) -> bool:
    """A verdict has come. True if there is still a pilot that it is of."""
    state = manager.state
    sure = f"{verdict.kind} ({verdict.component}), {verdict.sure:.0%} sure: {verdict.means}"
    call = state.failed.get(about.call) or state.calls.get(about.call)
    is_shown = verdict.sure >= LEAST_SURE
    if call is not None and is_shown:
        call.note(state.now, "\n  ".join([f"why it failed: {sure}", *verdict.proof[:SHOWN_LINES]]))
    pilot = state.pilots.get(about.pilot)
    if pilot is None:
        return False
    what = show_call(about.call) if about.call != NO_CALL else "a load"
    if is_shown:
        pilot.note(state.now, f"why {what} failed: {sure}")
    pilot.verdicts.append(Judged(state.now, about.call, about.devices, verdict))
    del pilot.verdicts[:-KEPT]
    return True


def _ask(
    manager: Manager, library: Library, call: CallId, *, name: str, log: str, part: tuple[int, int], said: str
) -> None:
    now, pilot = manager.state.now, library.pilot
    asked = pilot.asked_why
    before = asked.get(name)
    if before is not None and now - before[0] < (SOON_S if before[1] == 1 else AGAIN_S):
        return
    if before is None and len(asked) >= MOST_NAMES:
        for old in [old for old, (at, _) in asked.items() if now - at >= FORGET_S]:
            del asked[old]
        if len(asked) >= MOST_NAMES:
            return
    is_new = before is None or now - before[0] >= FORGET_S
    asked[name] = (now, 1 if is_new or before is None else before[1] + 1)
    about = OfFailure(pilot.id, library.id, call, tuple(device.id for device in library.devices))
    said = said[-SAID_CHARACTERS:]
    manager.out.append(AskAdvice(about, name, log, part[0], part[1], said))


def printed_in(library: Library) -> Printed | None:
    """The output of the call that runs in a library, or of the one that ran last; None if it may run several at once,
    or if it has no log that is seen."""
    log = log_of(library)
    return Printed(log, library.printed_to, 0) if log and library.slots == 1 else None


def log_of(library: Library) -> str:
    """Where a library writes, if that is known."""
    pilot: Pilot = library.pilot
    return f"{pilot.folder}/lib-{library.id}.log" if pilot.folder else ""
