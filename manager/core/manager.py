"""Data that all steps of an event share: the state, the policies, and the output of the event."""

from __future__ import annotations

from typing import Literal

from stoker.manager.core.events import Command, SetTimer, ToClient, ToPilot
from stoker.manager.core.nouns import Call, Client, Context, Library, Pilot
from stoker.manager.core.seams import Changes, Policies, PolicyError, Rounds
from stoker.manager.core.state import State
from stoker.protocol import to_client, to_pilot
from stoker.protocol.calls import CallEnd, CallForecast
from stoker.protocol.ids import CallId


class Manager:
    """The core's shared data. `strict`: True if an illegal action of a policy raises. `watch`: ids of the calls whose
    records are kept.
    """

    def __init__(self, state: State, policies: Policies, *, strict: bool, watch: frozenset[int]) -> None:
        self.state = state
        self.policies = policies
        self.strict = strict
        self.watch = watch
        self.heartbeat_s, self.lease_s = 5.0, 60.0  # Values sent to new pilots
        self.out: list[Command] = []
        self.sends: dict[Library, list[Call]] = {}  # Calls sent to libraries at the end of the event (`holding`)
        self.drops: dict[tuple[Library, bool, float], list[CallId]] = {}  # Calls that libraries must drop (`holding`)
        self.results: dict[Client, list[CallEnd]] = {}  # Results sent to clients at the end of the event
        self.forecasts: dict[Client, list[CallForecast]] = {}  # Forecasts sent to clients at the end of the event
        self.returned: dict[Context, None] = {}  # Contexts whose queues must be served
        self.dirty: dict[Context, None] = {}  # Contexts for which the residency policy must decide
        self.supply_changed = False  # True if devices joined, left or have more free memory
        self.apart_due = False  # True if calls that wait apart (`retries`) may find a library, or end
        self.demand_changed = False  # True if the provisioning policy must decide, after the residency policy
        self.seams: dict[str, Rounds] = {
            "dispatch": policies.dispatch,
            "residency": policies.residency,
            "provisioning": policies.provisioning,
        }
        self.changes = {name: Changes() for name, seam in self.seams.items() if seam.period_s > 0}
        self.tracked = tuple(self.changes.values())
        self.resting: list[str] = []  # Policies that skip their rounds until something changes
        for name in self.changes:
            self.set_timer(f"round/{name}", state.now + self.seams[name].period_s)

    def say(self, pilot: Pilot, message: to_pilot.ToPilot) -> None:
        self.out.append(ToPilot(pilot.id, message))

    def tell(self, client: Client, message: to_client.ToClient) -> None:
        self.out.append(ToClient(client.id, message))

    def results_of(self, client: Client) -> list[CallEnd]:
        return self.results.setdefault(client, [])

    def set_timer(self, key: str, at: float) -> None:
        self.state.timers[key] = at
        self.out.append(SetTimer(at, key))

    def report_illegal_action(self, error: PolicyError, *, seam: str) -> None:
        if self.strict:
            raise error
        self.state.refuse(f"plan of {seam}: {error}")

    def changed(self, what: Literal["calls", "libraries", "pilots", "contexts"], id: int | str) -> None:
        for changes in self.tracked:
            getattr(changes, what).add(id)

    def resume_resting_policies(self) -> None:
        resting, self.resting = self.resting, []
        for name in resting:
            changes = self.changes[name]
            if changes.calls or changes.libraries or changes.pilots or changes.contexts:
                self.set_timer(f"round/{name}", self.state.now + self.seams[name].period_s)
            else:
                self.resting.append(name)
