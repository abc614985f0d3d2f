"""Check and carry out the actions that policies return, and record advice.

An invalid action changes nothing and raises PolicyError. A measured value replaces an advised value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Never, NoReturn

from stoker.manager.core import (
    blame,
    block_orders,
    deadlines,
    ending,
    events,
    holding,
    libraries,
    nodes,
    pilots,
    queues,
    seams,
    sleepers,
)
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Call, CallState, Context, Gang, Library, LibraryState, Pilot, PilotState
from stoker.manager.core.seams import Action, PolicyError
from stoker.protocol.bounds import is_sound
from stoker.protocol.calls import Failure, FailureKind, GangPlace
from stoker.protocol.ids import LibraryId, PilotId, RecipeKey
from stoker.protocol.to_pilot import EvictCall, RunCalls

_SHOWN_ACTIONS = 4


def carry_out(manager: Manager, plan: Iterable[Action] | None, *, seam: str) -> None:
    """Carry out the actions of a policy in order. A policy that is a generator sees the effect of each action."""
    if plan is None:  # a custom policy may return None by mistake
        manager.report_illegal_action(
            PolicyError("None is not a plan; return a sequence of actions, () for none"), seam=seam
        )
        return
    done: list[Action] = []
    for action in plan:
        done.append(action)
        try:
            apply(manager, action, seam=seam)
        except PolicyError as error:
            if manager.strict:
                raise PolicyError(
                    f"{error}; the {seam} policy returned {', '.join(map(repr, done[-_SHOWN_ACTIONS:]))}"
                ) from error
            manager.report_illegal_action(error, seam=seam)


def apply(manager: Manager, action: Action, *, seam: str) -> None:
    match action:
        case seams.Send():
            _send(manager, action)
        case seams.SendGang():
            _send_gang(manager, action)
        case seams.Drop():
            dropped = Failure(FailureKind.DROPPED, action.reason, retry_after_s=action.retry_after_s)
            ending.fail_call(manager, _waiting(manager, action.call), dropped)
        case seams.Evict():
            _evict(manager, action)
        case seams.TakeBack():
            if action.count < 1:
                raise PolicyError(f"{action.count} calls cannot be taken back; the least is 1")
            holding.request_calls_back(manager, _library(manager, action.library), action.count)
        case seams.Load():
            _load(manager, action)
        case seams.Unload():
            libraries.stop_library(manager, _library(manager, action.library), reason=action.reason)
        case seams.Sleep():
            sleepers.order_sleep(manager, _require_connected_pilot(_library(manager, action.library)))
        case seams.Wake():
            sleepers.order_wake(manager, _require_connected_pilot(_library(manager, action.library)))
        case seams.Resize():
            _resize(manager, action)
        case seams.FailCall():
            ending.fail_call(manager, _waiting(manager, action.call), action.failure)
        case seams.FailWaiting():
            libraries.fail_waiting_calls(manager, _context(manager, action.recipe), action.failure)
        case seams.Forecast():
            deadlines.apply_forecast_action(manager, action)
        case seams.Timer():
            manager.set_timer(f"{seam}/{action.key}", action.at)
        case seams.WantBlocks():
            _request_source_blocks(manager, action)
        case seams.ReleaseBlock():
            block = manager.state.blocks.get(action.block)
            if block is None:
                raise PolicyError(f"there is no block {action.block}")
            block_orders.release_block(manager, block, action.reason)
        case seams.Quarantine():
            _quarantine_pilot_devices(manager, action)
        case seams.Ask():
            _ask(manager, action)
        case _:
            _reject_unknown_action(action)


def _reject_unknown_action(answer: Never) -> NoReturn:
    raise PolicyError(f"{answer!r} is not an action")


def _waiting(manager: Manager, id: int) -> Call:
    call = manager.state.calls.get(id)
    if call is None or call.state is not CallState.WAITING:
        raise PolicyError(f"call {id} is not waiting")
    return call


def _library(manager: Manager, id: int) -> Library:
    library = manager.state.libraries.get(LibraryId(id))
    if library is None:
        raise PolicyError(f"there is no library {id}")
    return library


def _pilot(manager: Manager, id: str) -> Pilot:
    pilot = manager.state.pilots.get(PilotId(id))
    if pilot is None:
        raise PolicyError(f"there is no pilot {id}")
    return pilot


def _context(manager: Manager, key: str) -> Context:
    context = manager.state.contexts.get(key)
    if context is None:
        raise PolicyError(f"there is no context {key}")
    return context


def _require_library_with_room(manager: Manager, id: int, call: Call) -> Library:
    library = _library(manager, id)
    if not holding.takes(manager, library, call):
        raise PolicyError(
            f"library {id} is {library.state.value}, of {library.context.recipe.name}, with load {library.load}"
        )
    return library


def _send(manager: Manager, action: seams.Send) -> None:
    call = _waiting(manager, action.call)
    library, group = _require_library_with_room(manager, action.library, call), call.group
    if group.options.gang[0] > 1:
        raise PolicyError(f"call {call.id} needs SendGang, with a gang of {group.options.gang[0]}")
    if (action.reserve_bytes or action.preempts) and not action.offer:
        raise PolicyError(f"call {call.id} is not an offer; only an offer may set reserve_bytes or preempts")
    for other in action.preempts:
        if other == library.id or not set(library.devices) & set(_library(manager, other).devices):
            raise PolicyError(f"library {library.id} cannot preempt library {other}: they share no device")
    queues.remove_call_from_queue(manager, call)
    if not action.offer:
        holding.give(manager, library, call)
    else:
        if action.reserve_bytes and not action.preempts:
            libraries.change_promised_memory(library, action.reserve_bytes)
        holding.offer(manager, library, call)
        call.note(manager.state.now, f"offered to lib-{library.id} on {library.pilot.id}")
        blob = holding.take_unsent_function_blob(library, group)
        manager.say(
            library.pilot,
            RunCalls(
                library.id, group.function.key, [call.spec], group.options, blob, offer=True,
                reserve_bytes=action.reserve_bytes, waited_s=_wait_seconds_without_load(manager, library, call),
                preempts=action.preempts,
            ),
        )  # fmt: skip


def _wait_seconds_without_load(manager: Manager, library: Library, call: Call) -> float:
    """Return how many seconds a call has waited, without the load time of the library (SLINFER §IX-A)."""
    if call.id in manager.state.reports:
        return manager.state.now - call.submitted_at
    load_s = library.ready_at - library.started_at if call.submitted_at < library.ready_at else 0.0
    return max(0.0, manager.state.now - call.submitted_at - load_s)


def _send_gang(manager: Manager, action: seams.SendGang) -> None:
    call = _waiting(manager, action.call)
    smallest, largest = call.group.options.gang
    if not smallest <= len(action.libraries) <= largest or len(set(action.libraries)) != len(action.libraries):
        raise PolicyError(f"a gang of {len(action.libraries)} for a call that needs {smallest} to {largest}")
    members = tuple(_require_library_with_room(manager, id, call) for id in action.libraries)
    queues.remove_call_from_queue(manager, call)
    holding.assign_call_to_gang(manager, members, call)
    for rank, library in enumerate(members):
        queues.update_load_index(manager, library)
        place, blob = GangPlace(rank, len(members)), holding.take_unsent_function_blob(library, call.group)
        options, key = call.group.options, call.group.function.key
        manager.say(library.pilot, RunCalls(library.id, key, [call.spec], options, blob, place))


def _evict(manager: Manager, action: seams.Evict) -> None:
    call = manager.state.calls.get(action.call)
    if call is None or call.holder is None:
        raise PolicyError(f"call {action.call} is held by no library")
    holder = call.holder.members[0] if isinstance(call.holder, Gang) else call.holder
    unsent = manager.sends.get(holder)
    if unsent and call in unsent:
        raise PolicyError(f"call {action.call} is being sent at this moment")
    manager.say(holder.pilot, EvictCall(holder.id, call.id))


def _ask(manager: Manager, action: seams.Ask) -> None:
    about = events.OfContext(RecipeKey(action.about)) if isinstance(action.about, str) else action.about
    name, log, start = "", "", 0
    match about:
        case events.OfContext(recipe=key):
            name = _context(manager, key).recipe.name
        case events.OfFunction(function=function, recipe=key):
            cost = manager.state.costs.get((function, key))
            if cost is None:
                raise PolicyError(f"no call of function {function} on context {key} was submitted")
            name = cost.function.timing_key
        case events.OfPace(library=library, call=call):
            holder = _library(manager, library)
            if call not in holder.held:
                raise PolicyError(f"library {library} does not hold call {call}")
            log, start = blame.log_of(holder), holder.printed_to
        case events.OfFailure():
            raise PolicyError("advice on failures cannot be requested; the manager requests it itself")
    manager.out.append(events.AskAdvice(about, name, log, start))


def _quarantine_pilot_devices(manager: Manager, action: seams.Quarantine) -> None:
    pilot = _pilot(manager, action.pilot)
    if not 0 < action.for_s < math.inf:
        raise PolicyError(f"a quarantine of {action.for_s} seconds is not allowed; it must be more than 0 and finite")
    devices = [device for device in pilot.devices.values() if action.device in (None, device.id)]
    if not devices:
        raise PolicyError(f"{pilot.id} has no device {action.device}")
    pilots.quarantine_devices(manager, pilot, devices, reason=action.reason, until=manager.state.now + action.for_s)
    nodes.judge_pilot(manager, pilot)


def _request_source_blocks(manager: Manager, action: seams.WantBlocks) -> None:
    source = manager.state.sources.get(action.source)
    if source is None:
        raise PolicyError(f"there is no source {action.source}")
    if not 1 <= action.count <= source.room:
        raise PolicyError(
            f"{action.count} blocks of {action.source}, which has {len(source.blocks)} of at most {source.source.most}"
        )
    block_orders.request_blocks(manager, source, action.count)


def _load(manager: Manager, action: seams.Load) -> None:
    context, pilot = _context(manager, action.recipe), _pilot(manager, action.pilot)
    if pilot.state is not PilotState.HERE:
        raise PolicyError(f"{pilot.id} is {pilot.state.value}")
    if not action.devices or len(set(action.devices)) != len(action.devices):
        raise PolicyError("a library needs at least one device, and each device only once")
    faulty = [id for id in action.devices if id in pilot.devices and pilot.devices[id].fault]
    if faulty:
        raise PolicyError(f"{faulty[0]} of {pilot.id} is quarantined")
    unknown = [id for id in action.devices if id not in pilot.devices]
    if unknown:
        raise PolicyError(f"{pilot.id} has no device {unknown[0]}")
    if action.memory_bytes < 0:
        raise PolicyError(f"{action.memory_bytes} bytes cannot be promised: the number is negative")
    for id in action.devices:
        device = pilot.devices[id]
        staying = sum(library.state is not LibraryState.STOPPING for library in device.libraries.values())
        if 0 < device.facts.processes <= staying:
            raise PolicyError(
                f"{id} of {pilot.id} takes {device.facts.processes} process at a time, and already runs that many"
            )
    libraries.load_library(
        manager, context, pilot, tuple(pilot.devices[id] for id in action.devices), action.memory_bytes
    )


def _require_connected_pilot(library: Library) -> Library:
    if library.pilot.state is not PilotState.HERE:
        raise PolicyError(f"library {library.id} is on a pilot that is {library.pilot.state.value}")
    return library


def _resize(manager: Manager, action: seams.Resize) -> None:
    library = _library(manager, action.library)
    if library.state is not LibraryState.READY or library.pilot.state is not PilotState.HERE:
        raise PolicyError(
            f"library {library.id} is {library.state.value} on a pilot that is {library.pilot.state.value}"
        )
    if action.memory_bytes < 0:
        raise PolicyError(f"{action.memory_bytes} bytes cannot be promised: the number is negative")
    libraries.resize(manager, library, action.memory_bytes)


def handle_arrived_advice(manager: Manager, event: events.AdviceArrived) -> None:
    about, advice = event.about, event.advice
    if isinstance(about, events.OfContext) and isinstance(advice, events.CostAdvice):
        _of_context(manager, about, advice, event.source)
    elif isinstance(about, events.OfFunction) and isinstance(advice, events.CostAdvice):
        _handle_function_advice(manager, about, advice)
    elif isinstance(about, events.OfFailure) and isinstance(advice, events.VerdictAdvice):
        if blame.record_advisor_verdict(manager, about, advice):
            for name, seam in manager.seams.items():
                carry_out(manager, seam.failure_judged(manager.state, about, advice), seam=name)
    elif isinstance(about, events.OfPace) and isinstance(advice, events.PaceAdvice):
        _handle_pace_advice(manager, about, advice)
    else:
        manager.state.refuse(f"{type(advice).__name__} for another kind of subject")


def _of_context(manager: Manager, about: events.OfContext, advice: events.CostAdvice, source: str) -> None:
    context = manager.state.contexts.get(about.recipe)
    if context is None:
        manager.state.refuse("advice on an unknown context")
        return
    libraries.apply_load_advice(context, advice.by_kind, source=source)
    ending.apply_cost_advice(context, advice.by_kind)
    manager.changed("contexts", context.recipe.key)
    for name, seam in manager.seams.items():
        carry_out(manager, seam.advised(manager.state, context), seam=name)
    manager.dirty[context] = None


def _handle_function_advice(manager: Manager, about: events.OfFunction, advice: events.CostAdvice) -> None:
    cost = manager.state.costs.get((about.function, about.recipe))
    context = manager.state.contexts.get(about.recipe)
    if cost is None or context is None:
        return
    if ending.apply_run_time_advice(manager, context, cost, advice.by_kind):
        manager.dirty[context] = None


def _handle_pace_advice(manager: Manager, about: events.OfPace, pace: events.PaceAdvice) -> None:
    library = manager.state.libraries.get(about.library)
    call = library.held.get(about.call) if library is not None else None
    if call is None or not is_sound(pace.done, pace.total):
        return
    if pace.done or pace.total:
        holding.record_printed_progress(manager, call, pace)
    for name, seam in manager.seams.items():
        carry_out(manager, seam.pace_told(manager.state, about, pace), seam=name)
