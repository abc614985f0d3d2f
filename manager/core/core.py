"""The manager's door: `Core.handle(event, now) -> [Command]`.

The reactor is free functions over a `Core` (`clients`, `pilots`, `calls`, `libraries`, `actions`), which collect what is to
be said in its out-tray. One event may say many things to one peer; calls for one library and results for one client
leave together, at the end of the event.

Policies are asked as things happen (`place`, `pull`, `dry`) and, for contexts whose demand or supply changed, once at the
end of the event (`wanted`): a context is asked about again only when its queue has doubled, a device has come or gone, or a
timer fires, so that the work per event does not grow with the queue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import assert_never

from stoker.manager.core import actions, clients, libraries, pilots
from stoker.manager.core.commands import Command, SetTimer, ToClient, ToPilot
from stoker.manager.core.events import (
    AdviceArrived,
    ClientGone,
    Event,
    FromClient,
    FromPilot,
    ManagerRestarted,
    PilotCut,
    PilotLost,
    TimerFired,
)
from stoker.manager.core.seams import Action, Changes, Policies, PolicyError, Rounds
from stoker.manager.core.state import Call, Client, Context, Library, Pilot, State
from stoker.manager.protocol import to_client, to_pilot
from stoker.manager.protocol.calls import CallEnd
from stoker.manager.protocol.to_pilot import RunCalls


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
        self.results: dict[Client, list[CallEnd]] = {}
        self.dirty: dict[Context, None] = {}
        self.supply_changed = False
        self._seams: tuple[tuple[str, Rounds], ...] = (
            ("dispatch", policies.dispatch),
            ("residency", policies.residency),
            ("provisioning", policies.provisioning),
        )
        self._changes = {name: Changes() for name, seam in self._seams if seam.period_s > 0}
        self.tracked = tuple(self._changes.values())
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
                clients.gone(self, event.client)
            case TimerFired():
                self._timer(event.key)
            case AdviceArrived():
                self._advice(event)
            case ManagerRestarted():
                pilots.restarted(self)
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

    def hold(self, library: Library, call: Call) -> None:
        """A call goes to a library when the event is over; the caller reclassifies the library."""
        library.held[call.id] = call
        batch = self.sends.get(library)
        if batch is None:
            self.sends[library] = [call]
        else:
            batch.append(call)

    def deliver(self, client: Client, end: CallEnd) -> None:
        """A call's end goes to its client when the event is over."""
        batch = self.results.get(client)
        if batch is None:
            self.results[client] = [end]
        else:
            batch.append(end)

    def set_timer(self, key: str, at: float) -> None:
        """Ask the shell for a timer."""
        self.state.timers[key] = at
        self.out.append(SetTimer(at, key))

    def apply(self, plan: Sequence[Action], *, seam: str) -> None:
        """Carry out a policy's actions, in order. An illegal one changes nothing and is counted (or raised)."""
        for action in plan:
            try:
                actions.apply(self, action, seam=seam)
            except PolicyError as error:
                if self.strict:
                    raise
                self.state.refuse(f"plan of {seam}: {error}")

    # ---- the end of an event

    def _settle(self) -> None:
        if self.supply_changed:
            self.supply_changed = False
            for context in self.state.hungry.values():
                self.dirty[context] = None
            self.apply(self.policies.provisioning.demand(self.state), seam="provisioning")
        rounds = 0
        while self.dirty and rounds < 8:
            rounds += 1
            dirty, self.dirty = self.dirty, {}
            for context in dirty:
                if context.queue.count:
                    self.apply(self.policies.residency.wanted(self.state, context), seam="residency")
        if self.sends:
            self._send_calls()
        if self.results:
            self._send_results()

    def _send_calls(self) -> None:
        sends, self.sends = self.sends, {}
        for library, calls in sends.items():
            start, total = 0, len(calls)
            while start < total:
                group = calls[start].group
                stop = start + 1
                while stop < total and calls[stop].group is group:
                    stop += 1
                blob = None
                if group.function.key not in library.functions:
                    library.functions.add(group.function.key)
                    blob = group.function
                specs = [call.spec for call in (calls if stop - start == total else calls[start:stop])]
                self.say(library.pilot, RunCalls(library.id, group.function.key, specs, group.options, blob))
                start = stop

    def _send_results(self) -> None:
        results, self.results = self.results, {}
        for client, ends in results.items():
            first = client.first_unacked + len(client.unacked)
            client.unacked.extend(ends)
            if client.connected:
                self.tell(client, to_client.Results(first, ends))

    # ---- timers, rounds, advice

    def _timer(self, key: str) -> None:
        self.state.timers.pop(key, None)
        owner, _, rest = key.partition("/")
        if owner == "round":
            self._round(rest)
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
        self.set_timer(f"round/{name}", self.state.now + seam.period_s)
        self.apply(seam.round(self.state, changes), seam=name)

    def _advice(self, event: AdviceArrived) -> None:
        context = self.state.contexts.get(event.recipe)
        if context is None:
            self.state.refuse("advice on an unknown context")
            return
        libraries.advise(context, event.by_kind)
        for name, seam in self._seams:
            self.apply(seam.advised(self.state, context), seam=name)
        self.dirty[context] = None

    def changed(self, pick: Callable[[Changes], set[int]], id: int) -> None:
        """Tell policies that think in rounds that something changed."""
        for changes in self.tracked:
            pick(changes).add(id)
