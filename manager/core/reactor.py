"""Handle the manager's events: this module lists the steps for each event and message.

`Core.handle(event, now) -> [Command]` is a pure function, used by the live server and the simulator. Each function
below calls the steps of one event or message in order. The steps are in other modules, and none calls a function of
this module. Policies decide again about a context only when its queue has doubled, its calls were requeued, devices
changed, or a timer fires.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, assert_never

from stoker.manager.core import (
    actions,
    blame,
    block_orders,
    blocks,
    clients,
    deadlines,
    dispatch,
    ending,
    events,
    gangs,
    holding,
    libraries,
    nodes,
    object_plan,
    objects,
    outlook,
    pilot_reports,
    pilots,
    queues,
    registry,
    report,
    retries,
    story,
)  # fmt: skip
from stoker.manager.core.events import Command, Event, FromClient, FromPilot
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Client, Library, Pilot, PilotState
from stoker.manager.core.seams import Changes, Policies, PolicyError
from stoker.manager.core.state import JOURNAL_LOST, State
from stoker.protocol import bounds, to_client, to_manager, to_pilot
from stoker.protocol.ids import ClientId, PilotId
from stoker.protocol.to_manager import ClientHello, PilotHello, Submit
from stoker.protocol.to_pilot import FunctionBlob, PilotWelcome
from stoker.protocol.wire import explain_mismatch


class Core:
    """The scheduler of one session. `state` is read-only. See `Manager` for `strict` and `watch`."""

    def __init__(
        self, session: str, policies: Policies, *, now: float = 0.0, strict: bool = False,
        watch: frozenset[int] = frozenset(),
    ) -> None:  # fmt: skip
        self.manager = Manager(State(session, now=now), policies, strict=strict, watch=watch)

    @property
    def state(self) -> State:
        return self.manager.state

    @property
    def policies(self) -> Policies:
        return self.manager.policies

    def handle(self, event: Event, now: float) -> list[Command]:
        """Handle an event, and return the commands to carry out. `now`: time in seconds, which must not decrease."""
        manager = self.manager
        manager.state.now = now
        handle_event(manager, event)
        out, manager.commands = manager.commands, []
        return out

    def pass_on(self, event: FromPilot | FromClient, now: float) -> list[Command]:
        """Return commands that forward pieces of results, which are not in the journal and never passed to `handle`."""
        return clients.forward_result_pieces(self.state, event, now)

    def start(self) -> list[Command]:
        """Return commands that set the first timers of policies."""
        out, self.manager.commands = self.manager.commands, []
        return out

    def configure(self, *, heartbeat_s: float, lease_s: float) -> None:
        """Set the heartbeat interval and the lease of new pilots."""
        self.manager.heartbeat_s, self.manager.lease_s = heartbeat_s, lease_s

    def discard_pending_commands(self) -> None:
        """Drop the commands of an event that raised an exception."""
        self.manager.commands.clear()


_MAX_DECISION_TURNS = 100  # Maximum number of times that policies decide after one event, because they might never stop
_SERVED_LAST = (math.inf, 0.0, 0)
_PIECES_IN_JOURNAL = "pieces of results in a frame for the journal"


def handle_event(manager: Manager, event: Event) -> None:
    state = manager.state
    match event:
        case FromPilot():
            on_pilot_frame(manager, event)
        case FromClient():
            on_client_frame(manager, event)
        case events.PilotCut(pilot=pilot):
            pilots.mark_pilot_disconnected(manager, pilot)
        case events.PilotLost(pilot=pilot, reason=reason):
            pilots.remove_ended_pilot(manager, pilot, reason)
        case events.ClientGone(client=client):
            clients.handle_gone_client(manager, client)
        case events.TimerFired(key=key):
            on_timer(manager, key)
        case events.AdviceArrived():
            actions.handle_arrived_advice(manager, event)
        case events.ManagerRestarted():
            on_manager_restarted(manager)
        case events.SessionDefined(sources=sources, lease_s=lease_s):
            state.lease_s = lease_s or state.lease_s
            blocks.replace_sources(manager, sources)
            nodes.check_nodes_of_all_sources(manager)
        case events.NodesHeard(records=records):
            nodes.adopt_newer_records(manager, records)
        case events.ProbeClaimed():
            nodes.request_probe_block(manager, event)
        case events.FactoryTrouble(reason=reason):
            state.factory_trouble = reason
        case events.EventRefused():
            clients.handle_refused_event(manager, event)
        case events.FramesRefused(counts=counts):
            for what, count in counts.items():
                state.count_refusal(what, count)
        case events.Noticed(text=text):
            state.add_notice(text)
        case events.RecordsLost():
            clients.mark_journal_records_lost(state)
        case events.EndsKept(ends=ends):
            state.results_of_old_journal.update({end.call: end for end in ends})
        case events.SessionKept():
            state.outlives_clients = True
        case events.SessionEnded(reason=reason):
            clients.end_session(manager, reason)
        case _:
            assert_never(event)
    finish_event(manager)


def on_manager_restarted(manager: Manager) -> None:
    state = manager.state
    if state.next_library > 1 or state.next_client:  # skip ids that may be in records that the journal has lost
        state.next_library += 1000 - state.next_library % 1000
        state.next_client += 100 - state.next_client % 100
    if state.next_block > 1:
        state.next_block += 100 - state.next_block % 100
    for pilot in state.pilots.values():
        pilots.mark_pilot_disconnected(manager, pilot.id)
    for client in state.clients.values():
        client.connected = False
        client.known_ends = client.first_unacked + len(client.unacked)
    registry.repeat_advice_requests(manager)


def on_pilot_frame(manager: Manager, event: FromPilot) -> None:
    state = manager.state
    pilot, messages = state.pilots.get(event.pilot), event.messages
    if messages and type(messages[0]) is PilotHello:
        pilot = on_pilot_hello(manager, event.pilot, messages[0])
        messages = messages[1:]
    elif pilot is None:
        pilot_reports.answer_unknown_pilot(manager, event.pilot)
    if pilot is None:
        return
    if pilot.hello_requests and event.sequence:
        state.count_refusal("frame of a pilot before the hello that the manager requested")
        return
    if not pilot.inbox.accept(event.sequence):
        state.count_refusal("repeated or early frame of a pilot")
        manager.send_to_pilot(pilot, to_pilot.Ack(pilot.inbox.last))
        return
    for message in messages:
        if pilot.state is PilotState.GONE:  # an earlier message of this frame has ended the pilot
            break
        if wrong := bounds.describe_invalid_message(message):
            pilot_reports.reject_invalid_pilot(manager, pilot, wrong)
            return
        on_pilot_message(manager, pilot, message)
    if event.sequence:
        manager.send_to_pilot(pilot, to_pilot.Ack(event.sequence))


def on_pilot_hello(manager: Manager, id: PilotId, message: PilotHello) -> Pilot | None:
    """Admit a pilot that joins, reconnects or returns. Return None if the hello is refused."""
    state = manager.state
    pilot, gone = state.pilots.get(id), state.gone_pilots.get(id)
    if wrong := pilot_reports.why_hello_is_refused(state, id, message):
        state.count_refusal("hello of a refused pilot")
        manager.commands.append(events.ToPilot(id, to_pilot.PilotRefused(wrong)))
        return None
    known = pilot or gone
    if known is not None and pilot_reports.request_newer_hello(manager, known, message):
        return None
    if gone is not None:
        pilot = pilot_reports.restore_returned_pilot(manager, gone, message)
    elif pilot is None:
        pilot = pilot_reports.add_joining_pilot(manager, id, message)
    else:
        pilots.mark_pilot_reconnected(manager, pilot)
    lost = pilot.inbox.skip_to(message.acknowledged)
    if lost:
        state.add_notice(JOURNAL_LOST)
    state.next_library = max(state.next_library, message.last_library + 1, *(x.library + 1 for x in message.libraries))
    pilots.set_pilot_walltime(manager, pilot, message.ends_in_s)
    objects.connect_peer(manager, pilot, message)
    welcome = PilotWelcome(state.session, manager.heartbeat_s, manager.lease_s, again=lost, hello=message.number)
    manager.send_to_pilot(pilot, welcome)
    pilot_reports.reconcile_pilot_with_hello(manager, pilot, message)
    pilot_reports.handle_hello_device_faults(manager, pilot, message.faults, may_lack_reports=lost)
    nodes.check_devices_at_hello(manager, pilot)
    pilots.mark_supply_changed(manager, pilot)
    return pilot


def on_pilot_message(manager: Manager, pilot: Pilot, message: Any) -> None:
    step = _LIBRARY_STEPS.get(type(message))
    if step is None:
        _PILOT_STEPS[type(message)](manager, pilot, message)
    elif (library := pilot.libraries.get(message.library)) is not None:
        step(manager, library, message)
    else:
        manager.state.count_refusal("message of a library that the pilot does not have")


_PILOT_STEPS: dict[type, Callable[[Manager, Pilot, Any], object]] = {
    to_manager.Heartbeat: pilot_reports.handle_heartbeat,
    to_manager.PilotLeaving: pilots.remove_leaving_pilot,
    to_manager.DeviceFault: pilot_reports.handle_device_fault,
    to_manager.WalltimeUpdate: pilots.update_pilot_walltime,
    to_manager.WantObjects: objects.plan_requested_fetches,
    to_manager.ObjectsCached: objects.record_arrived_objects,
    to_manager.ObjectsGone: objects.remove_lost_objects,
    to_manager.FetchFailed: objects.handle_failed_fetch,
    to_manager.SnapshotWritten: libraries.register_snapshot,
    PilotHello: lambda manager, _pilot, _message: manager.state.count_refusal("hello in the middle of a frame"),
}
_LIBRARY_STEPS: dict[type, Callable[[Manager, Library, Any], object]] = {
    to_manager.CallsEnded: dispatch.handle_ended_calls,
    to_manager.CallsReturned: dispatch.requeue_returned_calls,
    to_manager.OfferAccepted: dispatch.handle_accepted_offer,
    to_manager.CallsProgress: dispatch.handle_call_progress,
    to_manager.CallEvicted: dispatch.requeue_evicted_call,
    to_manager.GangMeets: gangs.forward_rank0_address,
    to_manager.LibraryUpdate: libraries.update_loading_phase,
    to_manager.LibraryReady: pilot_reports.handle_ready_library,
    to_manager.LibraryGone: pilot_reports.handle_ended_library,
    to_manager.LibraryResized: libraries.handle_resize_answer,
    to_manager.LibraryAsleep: libraries.record_library_asleep,
    to_manager.LibraryAwake: pilot_reports.handle_awake_library,
    to_manager.LibraryEngineReport: libraries.record_engine_load,
    to_manager.CallYielded: lambda manager, *_: manager.state.count_refusal(_PIECES_IN_JOURNAL),
}


# ---- clients
def on_client_frame(manager: Manager, event: FromClient) -> None:
    state = manager.state
    client, messages = state.clients.get(event.client), event.messages
    if messages and isinstance(messages[0], ClientHello):
        client = on_client_hello(manager, event.client, messages[0])
        messages = messages[1:]
    elif client is None or client.gone:
        state.count_refusal("frame of a client before its hello")
        return
    if client is None:
        return
    if not client.inbox.accept(event.sequence):
        state.count_refusal("repeated or early frame of a client")
        manager.send_to_client(client, to_client.Ack(client.inbox.last))
        return
    for message in messages:
        if wrong := "" if type(message) is Submit else bounds.describe_invalid_message(message):
            state.count_refusal("message of a client with an invalid value")
            manager.send_to_client(client, to_client.Rejected(wrong))
        else:
            on_client_message(manager, client, message)
    if event.sequence:
        manager.send_to_client(client, to_client.Ack(event.sequence))


def on_client_hello(manager: Manager, id: ClientId, message: ClientHello) -> Client | None:
    """Admit a client that joins or reconnects. Return None if the hello is refused."""
    state = manager.state
    wrong = explain_mismatch(message, session=state.session) or bounds.describe_invalid_message(message)
    if wrong:
        state.count_refusal("client of another session or version")
    if wrong := wrong or state.ban_reasons.get(id, ""):
        manager.commands.append(events.ToClient(id, to_client.ClientRefused(wrong)))
        return None
    client = state.clients.get(id)
    is_new = client is None
    client = client or clients.add_client(manager, id, message)
    if client is None:
        return None
    lost = client.inbox.skip_to(message.acknowledged)
    lost |= clients.reconcile_received_results(manager, client, message.received, is_new=is_new)
    if lost and not client.observer:
        pilots.begin_client_resubmission(manager, client)
    elif lost and not is_new:
        state.add_notice(JOURNAL_LOST)
    if client.unnamed is not None:
        client.inbox.last = message.acknowledged
    clients.mark_client_connected(manager, client)
    resubmits = client.unnamed is not None
    manager.send_to_client(client, to_client.ClientWelcome(state.session, client.number, again=resubmits))
    if client.unacked and client.unnamed is None:
        manager.send_to_client(client, to_client.Results(client.first_unacked, list(client.unacked)))
    if client.factory:
        state.factory_trouble = ""
        block_orders.send_blocks_to_factory(manager, client)
    if state.end_reason:
        manager.send_to_client(client, to_client.SessionOver(state.end_reason))
    return client


def on_client_message(manager: Manager, client: Client, message: to_manager.FromClient) -> None:
    state = manager.state
    match message:
        case Submit():
            on_submit(manager, client, message)
        case to_manager.Received(total=total, unused=unused):
            clients.drop_acknowledged_results(client, total)
            if unused:
                registry.forget_functions(manager, client, unused)
        case to_manager.DefineFunction(key=key, name=name, blob=blob, place=place):
            state.functions.setdefault(key, FunctionBlob(key, name, blob, place))
            client.defined.add(key)
        case to_manager.DefineRecipe(recipe=recipe):
            clients.define_recipe(manager, client, recipe)
        case to_manager.Cancel():
            clients.cancel_calls(manager, client, message)
        case to_manager.MapReport():
            outlook.record_map_report(state, client, message)
        case to_manager.AskStatus():
            manager.send_to_client(client, report.build_session_status(state))
        case to_manager.AskStory(subject=subject):
            manager.send_to_client(client, story.tell_story(state, subject))
        case to_manager.AskCalls(limit=limit, state=only):
            manager.send_to_client(client, report.list_calls(state, limit=limit, only=only))
        case to_manager.ParslBlockStates():
            on_program_blocks(manager, client, message)
        case to_manager.BlockUpdate() | to_manager.SourceTrouble() if not client.factory:
            state.count_refusal("update of blocks from a client that is not the factory")
        case to_manager.BlockUpdate():
            on_block_update(manager, message)
        case to_manager.SourceTrouble():
            block_orders.record_source_trouble(manager, message)
        case to_manager.DefineManifest(object=name, manifest=manifest):
            objects.define_manifest(manager, name, manifest)
        case to_manager.ReleaseBlock(block=block):
            pilots.release_block_pilots(manager, block)
        case to_manager.EndSession(reason=reason):
            clients.end_session(manager, reason or "its client ended it")
        case to_manager.PiecesTaken():
            state.count_refusal(_PIECES_IN_JOURNAL)
        case to_manager.Resubmitted():
            pilots.end_call_resubmission(manager, client)
        case ClientHello():
            state.count_refusal("hello in the middle of a frame")
        case _:
            assert_never(message)


def on_submit(manager: Manager, client: Client, message: Submit) -> None:
    state = manager.state
    options = clients.build_call_options(message, now=state.now)
    if clients.needs_resubmission(state, client, message):
        return
    group = state.groups.get((client.number, message.function, message.recipe, options))
    failure = clients.find_submit_failure(manager, client, message, options, is_known=group is not None)
    message = clients.remove_ended_calls(client, message)
    if failure is not None:
        clients.fail_unaccepted_calls(manager, client, (spec.call for spec in message.calls), failure)
        return
    if group is None:
        group = registry.add_group(manager, client, message, options)
    has_kept = bool(state.results_of_old_journal)
    fresh = clients.deliver_kept_results(manager, client, message.calls) if has_kept else message.calls
    if fresh:
        dispatch.submit_calls(manager, group, fresh)


def on_program_blocks(manager: Manager, client: Client, message: to_manager.ParslBlockStates) -> None:
    """Record the blocks that a client's program starts itself."""
    state = manager.state
    state.reported_blocks = dict(message.blocks)
    state.most_pilots[client.id] = message.most_pilots
    pilots.lose_pilots_of_ended_blocks(manager, message.ended)
    manager.supply_changed |= bool(state.waiting_contexts)


def on_block_update(manager: Manager, message: to_manager.BlockUpdate) -> None:
    nodes.allow_nodes_if_none_left(manager, message)
    block = manager.state.blocks.get(message.block)
    block_orders.record_block_update(manager, message)
    nodes.record_ended_probe(manager, block, message)


# ---- timers
def on_timer(manager: Manager, key: str) -> None:
    manager.state.timers.pop(key, None)
    owner, _, rest = key.partition("/")
    if owner in manager.seams:
        actions.carry_out(manager, manager.seams[owner].on_timer(manager.state, rest), seam=owner)
    elif owner in _TIMER_STEPS:
        _TIMER_STEPS[owner](manager, rest)
    elif owner == retries.FAULT_TIMER:
        manager.set_aside_calls_due = True
    else:
        manager.state.count_refusal(f"unknown timer: {owner}")


def on_policy_round(manager: Manager, name: str) -> None:
    """Let a policy plan with the changes since its last planning round, and schedule or skip its next round."""
    seam = manager.seams[name]
    changes, manager.changes[name] = manager.changes[name], Changes()
    manager.tracked_changes = tuple(manager.changes.values())
    actions.carry_out(manager, seam.on_round(manager.state, changes), seam=name)
    if seam.may_skip_rounds(manager.state):
        manager.skipping_policies.append(name)
    else:
        manager.set_timer(f"round/{name}", manager.state.now + seam.period_s)


_TIMER_STEPS: dict[str, Callable[[Manager, str], object]] = {
    "round": on_policy_round,
    "gone": clients.forget_absent_client,
    "walltime": pilots.check_walltime,
    "loss": blocks.finalize_loss_reasons_by_id,
    "deadline": deadlines.check_queue_deadlines,
    "emptied": block_orders.release_block_without_pilots,
    pilots.QUARANTINE_TIMER: pilots.end_quarantine,
    nodes.NODES_TIMER: nodes.check_nodes_of_source,
    blame.OUTPUT_TIMER: blame.ask_advisor_about_output,
    queues.STUCK_TIMER: dispatch.requeue_stuck_backlogs,
}


# ---- the end of an event
def finish_event(manager: Manager) -> None:
    """After an event, serve queues, let policies decide, and create the messages to send."""
    if manager.state.reserved_pilots and retries.has_idle_reserved_pilot(manager.state):
        manager.set_aside_calls_due = True
    has_changed = manager.supply_changed or manager.demand_changed or manager.set_aside_calls_due
    if has_changed or manager.contexts_to_serve or manager.contexts_to_decide:
        _serve_queues_and_run_policies(manager)
    transfers = manager.state.transfers
    if transfers.leaving or transfers.unsettled or transfers.freed or transfers.changed:
        object_plan.plan_pending_transfers(manager)
    if manager.calls_to_drop:
        holding.send_call_drop_orders(manager)
    if manager.forecasts:
        deadlines.send_forecasts(manager)
    if manager.calls_to_send:
        holding.send_pending_calls(manager)
    if manager.results_to_send:
        ending.send_results(manager)
    if manager.skipping_policies:
        manager.schedule_skipped_rounds()


def _serve_queues_and_run_policies(manager: Manager) -> None:
    """Send waiting calls to libraries, and let policies decide until they return no more actions."""
    state, policies = manager.state, manager.policies
    for _ in range(_MAX_DECISION_TURNS):
        if manager.contexts_to_serve:
            returned, manager.contexts_to_serve = manager.contexts_to_serve, {}
            for context in returned:
                dispatch.serve_queue(manager, context)
        elif manager.set_aside_calls_due:
            manager.set_aside_calls_due = False
            retries.place_set_aside_calls(manager)
        elif manager.supply_changed:
            manager.supply_changed, manager.demand_changed = False, True
            manager.contexts_to_decide.update(dict.fromkeys(state.waiting_contexts.values()))
        elif manager.contexts_to_decide:
            # The context that has waited longest is first. Otherwise another could take the device freed for it.
            dirty = sorted(manager.contexts_to_decide, key=lambda x: x.starvation_order or _SERVED_LAST)
            manager.contexts_to_decide = {}
            for context in dirty:
                if context.queue.count:
                    context.residency_ran_at = state.now
                    actions.carry_out(manager, policies.residency.on_waiting_calls(state, context), seam="residency")
        elif manager.demand_changed:
            manager.demand_changed = False
            actions.carry_out(manager, policies.provisioning.demand(state), seam="provisioning")
        else:
            return
    manager.contexts_to_serve, manager.contexts_to_decide = {}, {}
    manager.supply_changed = manager.demand_changed = False
    manager.report_illegal_action(PolicyError("the policy keeps returning actions for one event"), seam="residency")
