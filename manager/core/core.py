"""The manager's door: `Core.handle(event, now) -> [Command]`.

One handler takes an event; each kind of message has a file of handlers. Handlers change the state by calling
transitions, and each transition module alone writes its part of the state: `holding` writes which library holds which
call, `queues` the queues, `blocks` the blocks, `libraries` and `pilot_states` those, `registry` what has a name.
Transitions change nouns (`nouns`, `state`), and imports go the same one way. `manager` collects the commands that an
event leads to.

Policies are asked as things happen (`place`, `pull`, `dry`) and, for contexts whose demand or supply changed, once at
the end of the event (`wanted`): a context is asked about again only when its queue has doubled, a device has come or
gone, or a timer fires, so that the work per event does not grow with the queue. Calls that came back are given out
again at the end of the event too, when everything that happened is known.
"""

from __future__ import annotations

import math
from typing import assert_never

from stoker.manager.core import (
    actions,
    blame,
    block_orders,
    blocks,
    deadlines,
    departures,
    dispatch,
    object_plan,
    on_client,
    on_library,
    on_pilot,
    pilots,
    queues,
    retries,
    sending,
)
from stoker.manager.core.events import (
    AdviceArrived,
    ClientGone,
    Command,
    CostAdvice,
    EndsKept,
    Event,
    EventRefused,
    FactoryTrouble,
    FormerAdvice,
    FramesRefused,
    FromClient,
    FromPilot,
    ManagerRestarted,
    Noticed,
    OfContext,
    PilotCut,
    PilotLost,
    RecordsLost,
    SessionDefined,
    SessionEnded,
    SessionKept,
    TimerFired,
)
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Context
from stoker.manager.core.seams import Changes, Policies, PolicyError, Rounds
from stoker.manager.core.state import State

_SETTLE_TURNS = 100
"""The core asks policies until they want nothing more. Policies that want more after this many turns never stop."""


def _line(context: Context) -> tuple[float, float, int]:
    """Who lacks libraries is asked about first, so that nobody takes what was freed for somebody else."""
    return context.lacking or (math.inf, 0.0, 0)


class Core:
    """The manager's door. `state` is for reading; see `Manager` for `strict` and `watch`."""

    def __init__(
        self,
        session: str,
        policies: Policies,
        *,
        now: float = 0.0,
        strict: bool = False,
        watch: frozenset[int] = frozenset(),
        heartbeat_s: float = 5.0,
        lease_s: float = 60.0,
    ) -> None:
        self.manager = Manager(
            State(session, now=now), policies, strict=strict, watch=watch, heartbeat_s=heartbeat_s, lease_s=lease_s
        )
        self._seams: tuple[tuple[str, Rounds], ...] = (
            ("dispatch", policies.dispatch),
            ("residency", policies.residency),
            ("provisioning", policies.provisioning),
        )
        self._changes = {name: Changes() for name, seam in self._seams if seam.period_s > 0}
        self.manager.tracked = tuple(self._changes.values())
        self._resting: list[str] = []
        """Seams that need no round until something changes."""
        for name, seam in self._seams:
            if seam.period_s > 0:
                self.manager.set_timer(f"round/{name}", now + seam.period_s)

    @property
    def state(self) -> State:
        """Everything that the manager knows."""
        return self.manager.state

    @property
    def policies(self) -> Policies:
        """Who answers at the seams."""
        return self.manager.policies

    # ---- the door

    def handle(self, event: Event, now: float) -> list[Command]:
        """What is to be done about an event. `now` is in seconds and never goes back."""
        manager = self.manager
        manager.state.now = now
        match event:
            case FromPilot():
                on_pilot.on_pilot_frame(manager, event)
            case FromClient():
                on_client.on_client_frame(manager, event)
            case PilotCut():
                pilots.pilot_disconnected(manager, event.pilot)
            case PilotLost():
                pilots.pilot_lost(manager, event.pilot, event.reason)
            case ClientGone():
                departures.client_gone(manager, event.client)
            case TimerFired():
                self._timer(event.key)
            case AdviceArrived():
                actions.take_advice(manager, event, self._seams)
            case FormerAdvice():
                renewed = AdviceArrived(OfContext(event.recipe), CostAdvice(event.by_kind), event.source)
                actions.take_advice(manager, renewed, self._seams)
            case ManagerRestarted():
                on_pilot.manager_restarted(manager)
            case SessionDefined(sources=sources, lease_s=lease_s):
                manager.state.lease_s = lease_s or manager.state.lease_s
                block_orders.define_sources(manager, sources)
            case FactoryTrouble(reason=reason):
                blocks.set_factory_trouble(manager.state, reason)
            case EventRefused():
                departures.event_refused(manager, event)
            case FramesRefused(counts=counts):
                for what, count in counts.items():
                    manager.state.refuse(what, count)
            case Noticed(text=text):
                manager.state.notice(text)
            case RecordsLost():
                departures.records_lost(manager, event)
            case EndsKept(ends=ends):
                departures.ends_kept(manager, ends)
            case SessionKept():
                manager.state.kept = True
            case SessionEnded(reason=reason):
                departures.end_session(manager, reason)
            case _:
                assert_never(event)
        self._settle()
        out, manager.out = manager.out, []
        return out

    def pass_on(self, event: FromPilot | FromClient, now: float) -> list[Command]:
        """What is to be sent for a frame of pieces (see `pieces`). It changes nothing that is decided, and is in no
        journal."""
        return sending.pass_pieces_on(self.state, event, now)

    def start(self) -> list[Command]:
        """What is to be done before the first event: the timers that rounds need."""
        out, self.manager.out = self.manager.out, []
        return out

    def configure(self, *, heartbeat_s: float, lease_s: float) -> None:
        """What pilots that come are told: how often to send a heartbeat, and how long to wait for the manager."""
        self.manager.heartbeat_s, self.manager.lease_s = heartbeat_s, lease_s

    def forget_half(self) -> None:
        """Forget what an event that raised, and is not in the journal, wanted said."""
        self.manager.out.clear()

    # ---- the end of an event

    def _settle(self) -> None:
        manager = self.manager
        if manager.state.reserved and retries.may_begin_alone(manager.state):
            manager.apart_due = True
        if manager.returned or manager.dirty or manager.supply_changed or manager.demand_changed or manager.apart_due:
            self._ask()
        object_plan.settle_transfers(manager)
        if manager.drops:
            sending.send_drops(manager)
        if manager.forecasts:
            deadlines.send_forecasts(manager)
        if manager.sends:
            sending.send_calls(manager)
        if manager.results:
            sending.send_results(manager)
        if self._resting:
            self._wake()

    def _ask(self) -> None:
        manager = self.manager
        for _ in range(_SETTLE_TURNS):
            if manager.returned:
                returned, manager.returned = manager.returned, {}
                for context in returned:
                    dispatch.serve_queue(manager, context)
            elif manager.apart_due:
                manager.apart_due = False
                retries.settle_apart(manager)
            elif manager.supply_changed:
                manager.supply_changed, manager.demand_changed = False, True
                manager.dirty.update(dict.fromkeys(manager.state.hungry.values()))
            elif manager.dirty:
                dirty, manager.dirty = sorted(manager.dirty, key=_line), {}
                for context in dirty:
                    if context.queue.count:
                        context.asked_at = manager.state.now
                        actions.carry_out(
                            manager, manager.policies.residency.wanted(manager.state, context), seam="residency"
                        )
            elif manager.demand_changed:
                manager.demand_changed = False
                actions.carry_out(manager, manager.policies.provisioning.demand(manager.state), seam="provisioning")
            else:
                return
        manager.returned, manager.dirty, manager.supply_changed, manager.demand_changed = {}, {}, False, False
        manager.illegal(PolicyError("it does not come to rest"), seam="residency")

    # ---- timers, rounds, advice

    def _timer(self, key: str) -> None:
        manager = self.manager
        manager.timer_is_over(key)
        owner, _, rest = key.partition("/")
        match owner:
            case "round":
                self._round(rest)
            case "gone":
                departures.forget_gone_client(manager, rest)
            case "walltime":
                pilots.check_walltime(manager, rest)
            case "loss":
                blocks.settle_loss(manager, rest)
            case "deadline":
                deadlines.check_queue_deadlines(manager, rest)
            case retries.FAULTS_TIMER:
                retries.retry_after_faults(manager)
            case "emptied":
                block_orders.check_emptied_block(manager, rest)
            case pilots.QUARANTINE_TIMER:
                pilots.end_quarantine(manager, rest)
            case blame.PRINTING_TIMER:
                blame.ask_about_printing(manager)
            case queues.STUCK_TIMER:
                on_library.requeue_stuck_backlogs(manager)
            case "dispatch" | "residency" | "provisioning":
                seam = dict(self._seams)[owner]
                actions.carry_out(manager, seam.timer(manager.state, rest), seam=owner)
            case _:
                manager.state.refuse(f"timer of nobody: {owner}")

    def _round(self, name: str) -> None:
        manager = self.manager
        seam = dict(self._seams)[name]
        changes, fresh = self._changes[name], Changes()
        self._changes[name] = fresh
        manager.tracked = tuple(self._changes.values())
        actions.carry_out(manager, seam.round(manager.state, changes), seam=name)
        if seam.rests(manager.state):
            self._resting.append(name)
        else:
            manager.set_timer(f"round/{name}", manager.state.now + seam.period_s)

    def _wake(self) -> None:
        """Something may have changed for policies that rest."""
        manager = self.manager
        resting, self._resting = self._resting, []
        for name in resting:
            changes = self._changes[name]
            if changes.calls or changes.libraries or changes.pilots or changes.contexts:
                manager.set_timer(f"round/{name}", manager.state.now + dict(self._seams)[name].period_s)
            else:
                self._resting.append(name)
