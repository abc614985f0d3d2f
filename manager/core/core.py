"""The manager's door: `Core.handle(event, now) -> [Command]`.

The reactor is free functions over a `Core` (`clients`, `pilots`, `calls`, `libraries`, `actions`), which collect what
is to be said in its out-tray. One event may say many things to one peer; calls for one library and results for one
client leave together, at the end of the event.

Policies are asked as things happen (`place`, `pull`, `dry`) and, for contexts whose demand or supply changed, once at
the end of the event (`wanted`): a context is asked about again only when its queue has doubled, a device has come or
gone, or a timer fires, so that the work per event does not grow with the queue. Calls that came back are given out
again at the end of the event too, when everything that happened is known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, assert_never

from stoker.manager.core import (
    actions,
    blocks,
    clients,
    deadlines,
    departures,
    feeding,
    forecasts,
    holes,
    libraries,
    losses,
    objects,
    pilots,
    refusing,
    stuck,
    suspects,
    walltime,
)
from stoker.manager.core.commands import Command, SetTimer, ToClient, ToPilot
from stoker.manager.core.events import (
    AdviceArrived,
    ClientGone,
    EndsKept,
    Event,
    EventRefused,
    FactoryTrouble,
    FromClient,
    FromPilot,
    ManagerRestarted,
    Noticed,
    PilotCut,
    PilotLost,
    RecordsLost,
    SessionDefined,
    SessionEnded,
    SessionKept,
    TimerFired,
)
from stoker.manager.core.seams import Action, Changes, Policies, PolicyError, Rounds
from stoker.manager.core.state import Call, Client, Context, Library, Pilot, State
from stoker.manager.protocol import to_client, to_pilot
from stoker.manager.protocol.calls import CallEnd, CallForecast
from stoker.manager.protocol.ids import CallId
from stoker.manager.protocol.to_pilot import CancelCalls, RunCalls

_SETTLE_TURNS = 100
_SHOWN_ACTIONS = 4
"""Policies that have not come to rest after so many turns of asking never will."""


def _shown(plan: Sequence[Action], *, seam: str) -> str:
    """A plan, for whoever reads what is wrong with it."""
    more = f", … ({len(plan)} in all)" if len(plan) > _SHOWN_ACTIONS else ""
    return f"{seam} wanted {', '.join(map(repr, plan[:_SHOWN_ACTIONS]))}{more}"


def _line(context: Context) -> tuple[float, float, int]:
    """Who lacks libraries is asked about first, so that nobody takes what was freed for somebody else."""
    return context.lacking or (math.inf, 0.0, 0)


class Core:
    """The state, the policies, and an out-tray.

    `strict` raises on a policy's illegal action (tests); else the action is refused and counted. `watch` lists calls
    whose story is wanted: they are kept when they end.
    """

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
        self.state = State(session, now=now)
        self.policies = policies
        self.strict = strict
        self.watch = watch
        self.heartbeat_s = heartbeat_s
        self.lease_s = lease_s
        self.out: list[Command] = []
        self.sends: dict[Library, list[Call]] = {}
        self.returned: dict[Context, None] = {}
        self.dirty: dict[Context, None] = {}
        self.supply_changed = False
        """Devices came or went, or have more room: contexts with waiting calls are asked about."""
        self.apart_due = False
        """Calls that are apart (`suspects`) may find a place, or their end."""
        self.demand_changed = False
        """Provisioning is asked, once residency has made of it what it can."""
        self._results: dict[Client, list[CallEnd]] = {}
        self._drops: dict[tuple[Library, bool, float], list[CallId]] = {}
        self.forecasts: dict[Client, list[CallForecast]] = {}
        self._seams: tuple[tuple[str, Rounds], ...] = (
            ("dispatch", policies.dispatch),
            ("residency", policies.residency),
            ("provisioning", policies.provisioning),
        )
        self._changes = {name: Changes() for name, seam in self._seams if seam.period_s > 0}
        self.tracked = tuple(self._changes.values())
        self._resting: list[str] = []
        """Seams that need no round until something changes."""
        for name, seam in self._seams:
            if seam.period_s > 0:
                self.set_timer(f"round/{name}", now + seam.period_s)

    # ---- the door

    def handle(self, event: Event, now: float) -> list[Command]:
        """What is to be done about an event. `now` is in seconds and never goes back."""
        self.state.now = now
        match event:
            case FromPilot():
                pilots.frame(self, event)
            case FromClient():
                clients.frame(self, event)
            case PilotCut():
                pilots.cut(self, event.pilot)
            case PilotLost():
                pilots.lost(self, event.pilot, event.reason)
            case ClientGone():
                departures.gone(self, event.client)
            case TimerFired():
                self._timer(event.key)
            case AdviceArrived():
                self._advice(event)
            case ManagerRestarted():
                pilots.restarted(self)
            case SessionDefined(sources=sources, lease_s=lease_s):
                self.state.lease_s = lease_s or self.state.lease_s
                blocks.define(self, sources)
            case FactoryTrouble(reason=reason):
                self.state.factory_trouble = reason
            case EventRefused():
                refusing.refused(self, event)
            case Noticed(text=text):
                self.state.notice(text)
            case RecordsLost():
                holes.records_lost(self, event)
            case EndsKept(ends=ends):
                holes.ends_kept(self, ends)
            case SessionKept():
                self.state.kept = True
            case SessionEnded(reason=reason):
                clients.end_session(self, reason)
            case _:
                assert_never(event)
        self._settle()
        out, self.out = self.out, []
        return out

    def start(self) -> list[Command]:
        """What is to be done before the first event: the timers that rounds need."""
        out, self.out = self.out, []
        return out

    # ---- what the reactor's functions use

    def say(self, pilot: Pilot, message: to_pilot.ToPilot) -> None:
        """Put a message to a pilot in the out-tray."""
        self.out.append(ToPilot(pilot.id, message))

    def tell(self, client: Client, message: to_client.ToClient) -> None:
        """Put a message to a client in the out-tray."""
        self.out.append(ToClient(client.id, message))

    def hold(self, library: Library, calls: list[Call]) -> None:
        """Calls go to a library when the event is over; the caller reclassifies the library."""
        held = library.held
        for call in calls:
            held[call.id] = call
            if call.by_itself:
                library.suspect = call
        batch = self.sends.get(library)
        if batch is None:
            self.sends[library] = calls
        else:
            batch += calls

    def drop(self, library: Library, call: CallId, *, running: bool, grace_s: float) -> None:
        """A library is told to drop a call when the event is over."""
        self._drops.setdefault((library, running, grace_s), []).append(call)

    def forget_drops(self) -> None:
        """Nobody needs to be told to drop anything: everything ends."""
        self._drops.clear()

    def results_of(self, client: Client) -> list[CallEnd]:
        """Ends that go to a client when the event is over."""
        batch = self._results.get(client)
        if batch is None:
            batch = self._results[client] = []
        return batch

    def set_timer(self, key: str, at: float) -> None:
        """Ask the shell for a timer."""
        self.state.timers[key] = at
        self.out.append(SetTimer(at, key))

    def apply(self, plan: Sequence[Action] | None, *, seam: str) -> None:
        """Carry out a policy's actions, in order."""
        if plan is None:  # a slip that policies of other people's own make
            self.illegal(PolicyError("None is no plan: that is a sequence of actions, () for none"), seam=seam)
            return
        for action in plan:
            try:
                actions.apply(self, action, seam=seam)
            except PolicyError as error:
                if self.strict:
                    raise PolicyError(f"{error}; {_shown(plan, seam=seam)}") from error
                self.illegal(error, seam=seam)

    def illegal(self, error: PolicyError, *, seam: str) -> None:
        """A policy asked for what cannot be: nothing was changed, and it is counted (or raised, in tests)."""
        if self.strict:
            raise error
        self.state.refuse(f"plan of {seam}: {error}")

    def changed(self, what: Literal["calls", "libraries", "pilots", "contexts"], id: int | str) -> None:
        """Tell policies that think in rounds that something changed."""
        for changes in self.tracked:
            getattr(changes, what).add(id)

    # ---- the end of an event

    def _settle(self) -> None:
        if self.state.reserved and suspects.may_begin(self.state):
            self.apart_due = True
        if self.returned or self.dirty or self.supply_changed or self.demand_changed or self.apart_due:
            self._ask()
        objects.settle(self)
        for (library, running, grace_s), dropped in self._drops.items():
            self.say(library.pilot, CancelCalls(library.id, tuple(dropped), running, grace_s))
        self._drops.clear()
        if self.forecasts:
            forecasts.send(self)
        if self.sends:
            self._send_calls()
        if self._results:
            self.send_results()
        if self._resting:
            self._wake()

    def _ask(self) -> None:
        for _ in range(_SETTLE_TURNS):
            if self.returned:
                returned, self.returned = self.returned, {}
                for context in returned:
                    feeding.serve(self, context)
            elif self.apart_due:
                self.apart_due = False
                suspects.settle(self)
            elif self.supply_changed:
                self.supply_changed, self.demand_changed = False, True
                self.dirty.update(dict.fromkeys(self.state.hungry.values()))
            elif self.dirty:
                dirty, self.dirty = sorted(self.dirty, key=_line), {}
                for context in dirty:
                    if context.queue.count:
                        context.asked_at = self.state.now
                        self.apply(self.policies.residency.wanted(self.state, context), seam="residency")
            elif self.demand_changed:
                self.demand_changed = False
                self.apply(self.policies.provisioning.demand(self.state), seam="provisioning")
            else:
                return
        self.returned, self.dirty, self.supply_changed, self.demand_changed = {}, {}, False, False
        self.illegal(PolicyError("it does not come to rest"), seam="residency")

    def _send_calls(self) -> None:
        sends, self.sends = self.sends, {}
        for library, calls in sends.items():
            start, total = 0, len(calls)
            while start < total:
                group = calls[start].group
                stop = start + 1
                while stop < total and calls[stop].group is group:
                    stop += 1
                specs = [call.spec for call in (calls if stop - start == total else calls[start:stop])]
                blob = feeding.blob_for(library, group)
                self.say(library.pilot, RunCalls(library.id, group.function.key, specs, group.options, blob))
                start = stop

    def send_results(self) -> None:
        """Number the ends that wait for their clients, and send them to those that are connected."""
        results, self._results = self._results, {}
        for client, ends in results.items():
            if not ends:
                continue
            first = client.first_unacked + len(client.unacked)
            client.unacked.extend(ends)
            if client.connected and client.unnamed is None:
                self.tell(client, to_client.Results(first, ends))

    # ---- timers, rounds, advice

    def _timer(self, key: str) -> None:
        self.state.timers.pop(key, None)
        owner, _, rest = key.partition("/")
        if owner == "round":
            self._round(rest)
            return
        if owner == "gone":
            departures.gone_long(self, rest)
            return
        if owner == "walltime":
            walltime.due(self, rest)
            return
        if owner == "loss":
            losses.due(self, rest)
            return
        if owner == "deadline":
            deadlines.due(self, rest)
            return
        if owner == "emptied":
            blocks.emptied(self, rest)
            return
        if owner == stuck.TIMER:
            stuck.due(self)
            return
        for name, seam in self._seams:
            if name == owner:
                self.apply(seam.timer(self.state, rest), seam=name)
                return
        self.state.refuse(f"timer of nobody: {owner}")

    def _round(self, name: str) -> None:
        seam = dict(self._seams)[name]
        changes, fresh = self._changes[name], Changes()
        self._changes[name] = fresh
        self.tracked = tuple(self._changes.values())
        self.apply(seam.round(self.state, changes), seam=name)
        if seam.rests(self.state):
            self._resting.append(name)
        else:
            self.set_timer(f"round/{name}", self.state.now + seam.period_s)

    def _wake(self) -> None:
        """Something may have changed for policies that rest."""
        resting, self._resting = self._resting, []
        for name in resting:
            changes = self._changes[name]
            if changes.calls or changes.libraries or changes.pilots or changes.contexts:
                self.set_timer(f"round/{name}", self.state.now + dict(self._seams)[name].period_s)
            else:
                self._resting.append(name)

    def _advice(self, event: AdviceArrived) -> None:
        context = self.state.contexts.get(event.recipe)
        if context is None:
            self.state.refuse("advice on an unknown context")
            return
        libraries.advise(context, event.by_kind)
        self.changed("contexts", context.recipe.key)
        for name, seam in self._seams:
            self.apply(seam.advised(self.state, context), seam=name)
        self.dirty[context] = None
