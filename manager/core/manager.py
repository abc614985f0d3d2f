"""Data that all functions share while the core handles an event: state, policies, and the commands to return."""

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
    """The core's shared data. `strict`: True to raise an exception if a policy returns an illegal action; False to
    only count it. `watch`: ids of the calls whose records are kept after their end.
    """

    def __init__(self, state: State, policies: Policies, *, strict: bool, watch: frozenset[int]) -> None:
        self.state = state
        self.policies = policies
        self.strict = strict
        self.watch = watch
        # Seconds between heartbeats, and seconds that a pilot waits for an absent manager
        self.heartbeat_s, self.lease_s = 5.0, 60.0
        self.commands: list[Command] = []
        self.calls_to_send: dict[Library, list[Call]] = {}  # Calls to send after the current event (see `holding`)
        # Calls that libraries must drop (see `holding`)
        self.calls_to_drop: dict[tuple[Library, bool, float], list[CallId]] = {}
        self.results_to_send: dict[Client, list[CallEnd]] = {}
        self.forecasts: dict[Client, list[CallForecast]] = {}  # Forecasts to send at the end of the current event
        self.contexts_to_serve: dict[Context, None] = {}  # Contexts whose waiting calls must be sent to free libraries
        self.contexts_to_decide: dict[Context, None] = {}  # Contexts about which the residency policy must decide
        self.supply_changed = False  # True if devices joined, left, or have more free memory than before
        # True if calls outside the queues (see `retries`) may find a library, or must end
        self.set_aside_calls_due = False
        self.demand_changed = False  # True if the provisioning policy must decide after the residency policy
        self.seams: dict[str, Rounds] = {
            "dispatch": policies.dispatch,
            "residency": policies.residency,
            "provisioning": policies.provisioning,
        }
        self.changes = {name: Changes() for name, seam in self.seams.items() if seam.period_s > 0}
        self.tracked_changes = tuple(self.changes.values())
        self.skipping_policies: list[str] = []  # Policies that skip their planning rounds until the state changes
        for name in self.changes:
            self.set_timer(f"round/{name}", state.now + self.seams[name].period_s)

    def send_to_pilot(self, pilot: Pilot, message: to_pilot.ToPilot) -> None:
        self.commands.append(ToPilot(pilot.id, message))

    def send_to_client(self, client: Client, message: to_client.ToClient) -> None:
        self.commands.append(ToClient(client.id, message))

    def pending_results_of(self, client: Client) -> list[CallEnd]:
        return self.results_to_send.setdefault(client, [])

    def set_timer(self, key: str, at: float) -> None:
        self.state.timers[key] = at
        self.commands.append(SetTimer(at, key))

    def report_illegal_action(self, error: PolicyError, *, seam: str) -> None:
        if self.strict:
            raise error
        self.state.count_refusal(f"plan of {seam}: {error}")

    def mark_changed(self, what: Literal["calls", "libraries", "pilots", "contexts"], id: int | str) -> None:
        for changes in self.tracked_changes:
            getattr(changes, what).add(id)

    def schedule_skipped_rounds(self) -> None:
        resting, self.skipping_policies = self.skipping_policies, []
        for name in resting:
            changes = self.changes[name]
            if changes.calls or changes.libraries or changes.pilots or changes.contexts:
                self.set_timer(f"round/{name}", self.state.now + self.seams[name].period_s)
            else:
                self.skipping_policies.append(name)
