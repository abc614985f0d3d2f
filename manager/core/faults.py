"""Calls that devices, disks or networks failed: they run again elsewhere, and are given up after so many tries.

A library says of a call which exception it raised, and that the infrastructure caused it
(`FailureKind.INFRASTRUCTURE`, from the table in `pilot.core.infrastructure`). That costs the call nothing: what counts
as deaths of its libraries or pilots (`poison`, `suspects`) stays as it was. It waits apart, and is not sent to the same
pilot for a while (to the same devices, where devices failed). A file server that is broken for all would have it run
for ever, so it ends after `MOST_PILOTS` pilots, or `MOST_THERE` tries on one of them; from the second try on it pauses
in between. What it has saved in between wipes out what was counted, as for losses.

What becomes of the library and its device is the pilot's business: it ends a library whose device failed, and probes
the device. A gang begins again as a whole, as often as its ranks may lose each other (`gangs`). A policy that plans in
rounds sends its calls itself, also to the same pilot: there only the bound holds.
"""

from __future__ import annotations

import msgspec

from stoker.manager.core import ending, holding, libraries, reservations, verdicts
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Call, Library
from stoker.manager.core.phases import PilotState
from stoker.manager.core.trials import Fault, Trial
from stoker.protocol.calls import CallEnd, Failure, FailureKind
from stoker.protocol.ids import show_call
from stoker.units import show_seconds

MOST_PILOTS = 3
"""A call that the infrastructure failed on this many pilots is given up."""
MOST_THERE = 3
"""A call that the infrastructure failed this often on one pilot is given up."""
AVOIDS_S = (15.0, 30.0)
"""A call is kept from a pilot that failed it for so long; the last of these counts for all further times."""
PAUSE_S = (0.0, 10.0)
"""So long it is sent nowhere after its first fault, and after each further one."""
TIMER = "fault"


def is_fault(outcome: CallEnd) -> bool:
    """True if the infrastructure ended a call, which has no end by that."""
    return outcome.failure is not None and outcome.failure.kind is FailureKind.INFRASTRUCTURE


def failed(manager: Manager, library: Library, call: Call, outcome: CallEnd) -> None:
    """The infrastructure has failed a call that this library alone held and that was taken out of it: it waits again,
    or ends with its evidence."""
    assert outcome.failure is not None
    state, pilot, failure = manager.state, library.pilot, outcome.failure
    trial = reservations.trial_of(manager, call)
    if call.spec.progress != trial.saved:
        trial.gets_on(call.spec.progress)
    there = count(trial, library)
    devices = frozenset(device.id for device in library.devices) if failure.device else frozenset()
    avoided_until = state.now + AVOIDS_S[min(there, len(AVOIDS_S) - 1)]
    pause_s = PAUSE_S[min(len(trial.faults), len(PAUSE_S) - 1)]
    trial.faults.append(Fault(state.now, pilot.id, devices, avoided_until, state.now + pause_s, failure))
    pilot.note(state.now, f"failed {show_call(call.id)}: {failure.message}")
    verdicts.call_failed(manager, library, call, outcome)
    call.note(state.now, f"{ending.place_of(library)} failed it: {failure.message}")
    pilots = {fault.pilot for fault in trial.faults}
    if len(pilots) >= MOST_PILOTS or there + 1 >= MOST_THERE:
        evidence = _evidence(call, trial)
        ending.end(manager, call, msgspec.structs.replace(outcome, failure=evidence))
        return
    where = ", ".join(sorted(devices)) + f" of {pilot.id}" if devices else str(pilot.id)
    holding.requeue(manager, (call,), why=f"runs again, for {avoided_until - state.now:g} s not on {where}")
    libraries.run_again(manager, 1)
    for at in (avoided_until, state.now + pause_s):
        _wake(manager, at)


def avoided(trial: Trial, library: Library, now: float) -> bool:
    """True if a call is not to be given to a library just now: its pilot, or a device of it, has failed the call."""
    return any(
        now < fault.pauses_until
        or (
            fault.pilot == library.pilot.id
            and now < fault.avoided_until
            and (not fault.devices or any(device.id in fault.devices for device in library.devices))
        )
        for fault in trial.faults
    )


def count(trial: Trial, library: Library) -> int:
    """How often a library's pilot has failed a call."""
    return sum(fault.pilot == library.pilot.id for fault in trial.faults)


def has_elsewhere(manager: Manager, trial: Trial) -> bool:
    """True if there is a device on which a call may run now."""
    now, faults = manager.state.now, trial.faults
    if any(now < fault.pauses_until for fault in faults):
        return False
    not_now = {fault.pilot: fault.devices for fault in faults if now < fault.avoided_until}
    return any(
        pilot.state is PilotState.HERE
        and (id not in not_now or (bool(not_now[id]) and any(device not in not_now[id] for device in pilot.devices)))
        for id, pilot in manager.state.pilots.items()
    )


def due(manager: Manager) -> None:
    """Calls may be sent again to what had failed them."""
    manager.apart_due = True


def _wake(manager: Manager, at: float) -> None:
    """Look again at the calls that wait, in whole seconds: thousands may wait for the same file server."""
    second = int(at) + 1
    key = f"{TIMER}/{second}"
    if at > manager.state.now and key not in manager.state.timers:
        manager.set_timer(key, float(second))


def _evidence(call: Call, trial: Trial) -> Failure:
    faults = trial.faults
    last = faults[-1].failure
    pilots = len({fault.pilot for fault in faults})
    times = "once" if len(faults) == 1 else f"{len(faults)} times"
    lines = [f"devices, disks or networks failed it {times}, on {pilots} pilot{'s' * (pilots != 1)}:"]
    lines += [
        f"{fault.pilot}, {show_seconds(fault.at - call.submitted_at)} after the call was submitted: "
        f"{fault.failure.message}"
        for fault in faults
    ]
    return Failure(
        FailureKind.INFRASTRUCTURE, "\n  ".join(lines), last.pilot, last.library, log=last.log, device=last.device
    )
