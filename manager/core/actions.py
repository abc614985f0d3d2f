"""Check the actions that policies return, carry them out, and record advice. An invalid action changes nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TypeVar

from stoker.manager.core import blame, block_orders, ending, events, holding, libraries, pilots, queues, seams
from stoker.manager.core.deadlines import apply_forecast_action
from stoker.manager.core.manager import Manager
from stoker.manager.core.nodes import exclude_node_if_devices_failed
from stoker.manager.core.nouns import Call, CallState, Library, LibraryState, PilotState
from stoker.manager.core.seams import Action, PolicyError
from stoker.protocol.bounds import is_valid_progress
from stoker.protocol.calls import CallProgress, Failure, FailureKind, GangPlace
from stoker.protocol.ids import LibraryId, RecipeKey
from stoker.protocol.to_client import ProgressReports
from stoker.protocol.to_pilot import EvictCall

_SHOWN_ACTIONS = 4


def carry_out(manager: Manager, plan: Iterable[Action] | None, *, seam: str) -> None:
    """Carry out the actions of a policy in order. A generator sees the effect of each action before it yields the
    next action.
    """
    if plan is None:  # a custom policy may return None by mistake
        error = PolicyError("the policy returned None; return a sequence of actions, or () for no action")
        manager.report_illegal_action(error, seam=seam)
        return
    done: list[Action] = []
    for action in plan:
        done.append(action)
        try:
            apply_action(manager, action, seam=seam)
        except PolicyError as error:
            if manager.strict:
                shown = ", ".join(map(repr, done[-_SHOWN_ACTIONS:]))
                raise PolicyError(f"{error}; the {seam} policy returned {shown}") from error
            manager.report_illegal_action(error, seam=seam)


def apply_action(manager: Manager, action: Action, *, seam: str) -> None:
    match action:
        case seams.Send():
            _send_call(manager, action)
        case seams.SendGang():
            _send_gang(manager, action)
        case seams.Drop():
            dropped = Failure(FailureKind.DROPPED, action.reason, retry_after_s=action.retry_after_s)
            ending.fail_call(manager, _find_waiting_call(manager, action.call), dropped)
        case seams.Evict():
            _evict_call(manager, action)
        case seams.TakeBack():
            if action.count < 1:
                raise PolicyError(f"TakeBack of {action.count} calls is not allowed; count must be at least 1")
            holding.request_calls_back(manager, _find_library(manager, action.library), action.count)
        case seams.Load():
            _load_context(manager, action)
        case seams.Unload():
            libraries.stop_library(manager, _find_library(manager, action.library), reason=action.reason)
        case seams.Sleep():
            libraries.order_sleep(manager, _find_connected_library(manager, action.library))
        case seams.Wake():
            libraries.order_wake(manager, _find_connected_library(manager, action.library))
        case seams.Resize():
            _resize_library(manager, action)
        case seams.FailCall():
            ending.fail_call(manager, _find_waiting_call(manager, action.call), action.failure)
        case seams.FailWaiting():
            context = _find_record(manager.state.contexts, action.recipe, "context")
            libraries.fail_waiting_calls(manager, context, action.failure)
        case seams.Forecast():
            apply_forecast_action(manager, action)
        case seams.Timer():
            manager.set_timer(f"{seam}/{action.key}", action.at)
        case seams.WantBlocks():
            source = _find_record(manager.state.sources, action.source, "source")
            if not 1 <= action.count <= source.requestable_blocks:
                has = f"which has {len(source.blocks)} blocks and may have {source.source.most}"
                raise PolicyError(f"{action.count} blocks cannot be requested from {action.source}, {has}")
            block_orders.request_blocks(manager, source, action.count)
        case seams.ReleaseBlock():
            block_orders.release_block(
                manager, _find_record(manager.state.blocks, action.block, "block"), action.reason
            )
        case seams.Quarantine():
            _quarantine_pilot_devices(manager, action)
        case seams.Ask():
            _request_advice(manager, action)
        case _:
            raise PolicyError(f"{action!r} is not an action")


_K = TypeVar("_K")
_V = TypeVar("_V")


def _find_record(records: Mapping[_K, _V], id: _K, what: str) -> _V:
    found = records.get(id)
    if found is None:
        raise PolicyError(f"there is no {what} {id}")
    return found


def _find_waiting_call(manager: Manager, id: int) -> Call:
    call = manager.state.calls.get(id)
    if call is None or call.state is not CallState.WAITING:
        raise PolicyError(f"call {id} is not waiting")
    return call


def _find_library(manager: Manager, id: LibraryId) -> Library:
    return _find_record(manager.state.libraries, id, "library")


def _find_connected_library(manager: Manager, id: LibraryId) -> Library:
    library = _find_library(manager, id)
    if library.pilot.state is not PilotState.HERE:
        raise PolicyError(f"the pilot of library {id} is {library.pilot.state.value}")
    return library


def _find_library_with_room(manager: Manager, id: LibraryId, call: Call) -> Library:
    library = _find_library(manager, id)
    if not holding.can_take_call(manager, library, call):
        of = library.context.recipe.name
        raise PolicyError(f"library {id} ({of}, {library.state.value}, load {library.load}) cannot take call {call.id}")
    return library


def _send_call(manager: Manager, action: seams.Send) -> None:
    call = _find_waiting_call(manager, action.call)
    library, group = _find_library_with_room(manager, action.library, call), call.group
    if group.options.gang[0] > 1:
        raise PolicyError(f"call {call.id} needs a gang of {group.options.gang[0]} libraries; use SendGang")
    if (action.reserve_bytes or action.preempts) and not action.offer:
        raise PolicyError(f"call {call.id} is not an offer; only an offer may set reserve_bytes or preempts")
    for other in action.preempts:
        if other == library.id or not set(library.devices) & set(_find_library(manager, other).devices):
            raise PolicyError(f"library {library.id} cannot preempt library {other}: they share no device")
    if action.reserve_bytes and not action.preempts:
        libraries.change_promised_memory(manager, library, action.reserve_bytes, sends_order=False)
    queues.remove_call_from_queue(manager, call)
    if not action.offer:
        holding.assign_call(manager, library, call)
    else:
        holding.assign_offered_call(manager, library, call)
        call.note(manager.state.now, f"offered to lib-{library.id} on {library.pilot.id}")
        order = holding.build_run_order(
            library, group, [call.spec], offer=True, reserve_bytes=action.reserve_bytes,
            waited_s=_wait_seconds_without_load(manager, library, call), preempts=action.preempts,
        )  # fmt: skip
        manager.send_to_pilot(library.pilot, order)


def _wait_seconds_without_load(manager: Manager, library: Library, call: Call) -> float:
    """Return the seconds that a call has waited, minus the load time of the library (SLINFER §IX-A)."""
    if call.id in manager.state.reports:
        return manager.state.now - call.submitted_at
    load_s = library.ready_at - library.started_at if call.submitted_at < library.ready_at else 0.0
    return max(0.0, manager.state.now - call.submitted_at - load_s)


def _send_gang(manager: Manager, action: seams.SendGang) -> None:
    call = _find_waiting_call(manager, action.call)
    smallest, largest = call.group.options.gang
    if not smallest <= len(action.libraries) <= largest or len(set(action.libraries)) != len(action.libraries):
        raise PolicyError(f"call {call.id} needs {smallest} to {largest} libraries, got {len(action.libraries)}")
    members = tuple(_find_library_with_room(manager, id, call) for id in action.libraries)
    queues.remove_call_from_queue(manager, call)
    holding.assign_call_to_gang(manager, members, call)
    for rank, library in enumerate(members):
        queues.update_load_index(manager, library)
        place = GangPlace(rank, len(members))
        manager.send_to_pilot(library.pilot, holding.build_run_order(library, call.group, [call.spec], gang=place))


def _evict_call(manager: Manager, action: seams.Evict) -> None:
    call = manager.state.calls.get(action.call)
    if call is None or not call.libraries:
        raise PolicyError(f"no library holds call {action.call}")
    holder = call.libraries[0]
    if call in manager.calls_to_send.get(holder, ()):
        raise PolicyError(f"call {action.call} is sent at the end of this event, so it cannot be evicted now")
    manager.send_to_pilot(holder.pilot, EvictCall(holder.id, call.id))


def _request_advice(manager: Manager, action: seams.Ask) -> None:
    about = events.OfContext(RecipeKey(action.about)) if isinstance(action.about, str) else action.about
    name, log, start = "", "", 0
    match about:
        case events.OfContext(recipe=key):
            name = _find_record(manager.state.contexts, key, "context").recipe.name
        case events.OfFunction(function=function, recipe=key):
            cost = manager.state.costs.get((function, key))
            if cost is None:
                raise PolicyError(f"no call of function {function} on context {key} was submitted")
            name = cost.function.timing_key
        case events.OfPace(library=library, call=call):
            holder = _find_library(manager, library)
            if call not in holder.held:
                raise PolicyError(f"library {library} does not hold call {call}")
            log, start = blame.library_log_path(holder.pilot, library), holder.log_position
        case events.OfFailure():
            raise PolicyError("advice on failures cannot be requested; the manager requests it itself")
    manager.commands.append(events.AskAdvice(about, name, log, start))


def _quarantine_pilot_devices(manager: Manager, action: seams.Quarantine) -> None:
    pilot = _find_record(manager.state.pilots, action.pilot, "pilot")
    if not 0 < action.for_s < math.inf:
        raise PolicyError(f"a quarantine of {action.for_s} seconds is not allowed; it must be more than 0 and finite")
    devices = [device for device in pilot.devices.values() if action.device in (None, device.id)]
    if not devices:
        raise PolicyError(f"{pilot.id} has no device {action.device}")
    pilots.quarantine_devices(manager, pilot, devices, reason=action.reason, until=manager.state.now + action.for_s)
    exclude_node_if_devices_failed(manager, pilot)


def _load_context(manager: Manager, action: seams.Load) -> None:
    context = _find_record(manager.state.contexts, action.recipe, "context")
    pilot = _find_record(manager.state.pilots, action.pilot, "pilot")
    if pilot.state is not PilotState.HERE:
        raise PolicyError(f"{pilot.id} is {pilot.state.value}")
    if not action.devices or len(set(action.devices)) != len(action.devices):
        raise PolicyError("Load needs at least one device, and names each device only once")
    for id in action.devices:
        device = pilot.devices.get(id)
        if device is None:
            raise PolicyError(f"{pilot.id} has no device {id}")
        if device.fault:
            raise PolicyError(f"{id} of {pilot.id} is quarantined")
        staying = sum(library.state is not LibraryState.STOPPING for library in device.libraries.values())
        if 0 < device.facts.processes <= staying:
            most = f"{device.facts.processes} process at a time"
            raise PolicyError(f"{id} of {pilot.id} takes {most}, and already runs that many")
    devices = tuple(pilot.devices[id] for id in action.devices)
    libraries.load_library(manager, context, pilot, devices, action.memory_bytes)


def _resize_library(manager: Manager, action: seams.Resize) -> None:
    library = _find_connected_library(manager, action.library)
    if library.state is not LibraryState.READY:
        raise PolicyError(f"library {library.id} is {library.state.value}")
    libraries.change_promised_memory(manager, library, action.memory_bytes)


def handle_arrived_advice(manager: Manager, event: events.AdviceArrived) -> None:
    state = manager.state
    match event.about, event.advice:
        case events.OfContext() as about, events.CostAdvice(by_kind=by_kind):
            context = state.contexts.get(about.recipe)
            if context is None:
                state.count_refusal("advice on an unknown context")
                return
            libraries.apply_load_advice(context, by_kind, source=event.source)
            ending.apply_cost_advice(context, by_kind)
            manager.mark_changed("contexts", context.recipe.key)
            for name, seam in manager.seams.items():
                carry_out(manager, seam.on_advice(state, context), seam=name)
            manager.contexts_to_decide[context] = None
        case events.OfFunction() as about, events.CostAdvice(by_kind=by_kind):
            cost, context = state.costs.get((about.function, about.recipe)), state.contexts.get(about.recipe)
            if cost and context and ending.apply_run_time_advice(manager, context, cost, by_kind):
                manager.contexts_to_decide[context] = None
        case events.OfFailure() as about, events.VerdictAdvice() as verdict:
            if blame.record_advisor_verdict(manager, about, verdict):
                for name, seam in manager.seams.items():
                    carry_out(manager, seam.on_failure_verdict(state, about, verdict), seam=name)
        case events.OfPace() as about, events.PaceAdvice() as pace:
            _handle_pace_advice(manager, about, pace)
        case _, advice:
            state.count_refusal(f"{type(advice).__name__} does not fit the subject of the advice")


def _handle_pace_advice(manager: Manager, about: events.OfPace, pace: events.PaceAdvice) -> None:
    state = manager.state
    library = state.libraries.get(about.library)
    call = library.held.get(about.call) if library is not None else None
    if call is None or not is_valid_progress(pace.done, pace.total):
        return
    if (pace.done or pace.total) and call.id not in state.reports:
        said = state.printed_progress[call.id] = CallProgress(call.id, pace.done, pace.total)
        if call.group.client.connected:
            manager.send_to_client(call.group.client, ProgressReports([said]))
    for name, seam in manager.seams.items():
        carry_out(manager, seam.on_pace_advice(state, about, pace), seam=name)
