"""Arguments and results over 1 MB, on a pilot that sees no file of its session: they travel through the session's seed.

Where the session's folder is seen a large payload is a file in it, and nothing is to be done.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from stoker.contexts.recipe import ObjectRef
from stoker.errors import StokerError
from stoker.manager.protocol.calls import CallEnd, CallSpec, Failure, FailureKind
from stoker.manager.protocol.ids import CallId
from stoker.manager.protocol.to_manager import CallsEnded, CallsReturned
from stoker.manager.protocol.to_pilot import RunCalls
from stoker.pilot.agent.agent import Agent
from stoker.pilot.agent.failures import failure_of, is_ours
from stoker.pilot.agent.library import Library
from stoker.pilot.agent.objects import Lack
from stoker.pilot.cache import Bringing, DiskError, Pin
from stoker.pilot.transfer.board import Source
from stoker.pilot.transfer.client import put

log = logging.getLogger("stoker.pilot")

_PAUSES_S = (0.5, 2.0, 5.0)
"""How long after a failure it is tried again: the seed may just be started anew."""


def path_of(agent: Agent, library: Library, spec: CallSpec, ref: ObjectRef) -> str:
    """Where the arguments of a call lie here."""
    pin = library.arguments.get(spec.call)
    return pin.path if pin is not None else ref.source or str(agent.session.objects / ref.name)


def bring(agent: Agent, library: Library, order: RunCalls, then: Callable[[], None]) -> bool:
    """Whether arguments of these calls have to be brought first. The order then waits in its library; when they are
    here it no longer waits, and `then` is called, unless none of its calls is left."""
    if not agent.objects.carried:
        return False
    wanted = [
        (spec.call, spec.payload)
        for spec in order.calls
        if type(spec.payload) is ObjectRef and spec.call not in library.arguments
    ]
    if not wanted:
        return False
    library.waiting.append(order)

    def run() -> None:
        pins: dict[CallId, Pin] = {}
        troubles: dict[CallId, Lack] = {}
        for call, ref in wanted:
            try:
                pins[call] = _bring(agent, ref)
            except (StokerError, OSError) as error:
                what = f"its arguments could not be had from the session's seed: {error}"
                troubles[call] = Lack(what, ours=is_ours(error))
        agent.later(lambda: _brought(agent, library, order, pins, troubles, then))

    threading.Thread(target=run, name="payloads-bring", daemon=True).start()
    return True


def hand_in(agent: Agent, library: Library, ends: list[CallEnd]) -> list[CallEnd]:
    """Calls have ended: large results go to the seed, and their ends are told later. Returns those to be told now."""
    if not agent.objects.carried:
        return ends
    for call in [call for call in library.arguments if call not in library.state.held]:
        library.arguments.pop(call).release()
    large = [end for end in ends if isinstance(end.payload, ObjectRef)]
    if large:
        agent.handing_in += 1

        def run() -> None:
            done = [_hand_in(agent, library, end) for end in large]
            agent.later(lambda: _handed_in(agent, library, done))

        threading.Thread(target=run, name="payloads-hand-in", daemon=True).start()
    return [end for end in ends if not isinstance(end.payload, ObjectRef)]


# ---- inside


def _bring(agent: Agent, ref: ObjectRef) -> Pin:
    pauses = iter(_PAUSES_S)
    while True:
        here = agent.cache.find(ref.name)
        if here is not None:
            return here
        bringing = Bringing(agent.cache, ref, key=agent.objects.key)
        bringing.offer([Source(address=agent.objects.seed(), label="the session's seed", origin=True)])
        try:
            return bringing.run(alone_s=0.0)[0]
        except DiskError:
            raise
        except StokerError:
            pause = next(pauses, None)
            if pause is None:
                raise
            time.sleep(pause)


def _brought(
    agent: Agent,
    library: Library,
    order: RunCalls,
    pins: dict[CallId, Pin],
    troubles: dict[CallId, Lack],
    then: Callable[[], None],
) -> None:
    waits = any(one is order for one in library.waiting)
    library.waiting = [one for one in library.waiting if one is not order]
    for call, pin in pins.items():
        if waits and call in library.state.held:
            library.arguments[call] = pin
        else:
            pin.release()
    order.calls[:] = [spec for spec in order.calls if spec.call not in troubles]
    held = [call for call in troubles if call in library.state.held]
    failed = library.state.ended([call for call in held if not troubles[call].ours])
    if failed:
        ends = [CallEnd(call, ok=False, failure=_failure(agent, library, troubles[call].reason)) for call in failed]
        agent.link.post(CallsEnded(library.state.library, ends))
    back = library.state.returned([call for call in held if troubles[call].ours])
    if back:  # another pilot may have room for them
        reason = f"{library.state.recipe.name} on {agent.options.pilot}: {troubles[back[0]].reason}"
        library.cause = library.cause or failure_of(agent, library, FailureKind.PILOT, reason)
        agent.link.post(CallsReturned(library.state.library, tuple(back), refused=reason))
    if waits and order.calls:
        then()


def _hand_in(agent: Agent, library: Library, end: CallEnd) -> CallEnd:
    ref = end.payload
    if not isinstance(ref, ObjectRef):
        return end
    path, pauses = Path(ref.source), iter(_PAUSES_S)
    while True:
        try:
            with (
                path.open("rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
                memoryview(data) as view,
            ):
                place = put(ref.name, [view], address=agent.objects.seed(), key=agent.objects.key)
            end = msgspec.structs.replace(end, payload=msgspec.structs.replace(ref, source=place))
            break
        except (StokerError, OSError) as error:
            what = f"its result of {ref.size_bytes} bytes could not be handed to the session's seed: {error}"
            log.warning("call %d: %s", end.call, what)
            pause = next(pauses, None)
            if pause is None:
                end = CallEnd(end.call, ok=False, run_s=end.run_s, failure=_failure(agent, library, what))
                break
            time.sleep(pause)
    path.unlink(missing_ok=True)
    return end


def _handed_in(agent: Agent, library: Library, ends: list[CallEnd]) -> None:
    agent.handing_in -= 1
    agent.link.post(CallsEnded(library.state.library, ends))


def _failure(agent: Agent, library: Library, message: str) -> Failure:
    return failure_of(agent, library, FailureKind.SERIALIZATION, f"{message} (on {agent.options.pilot})")
