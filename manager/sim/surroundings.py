"""What the parts of a simulation use of it: the clock, the network, the logs, chance, and the way to the manager.

Each part names what it needs (here, and in Protocols of its own where it needs more); `run.Simulation` has all of it.
So no part needs the file that puts them together.
"""

from __future__ import annotations

from typing import Protocol

from stoker.chance import Stream
from stoker.contexts.step_times import StepSeconds
from stoker.manager.core.events import Event
from stoker.manager.sim.agenda import Agenda
from stoker.manager.sim.calls_log import CallsLog
from stoker.manager.sim.flows import Network
from stoker.manager.sim.log import EventLog
from stoker.manager.sim.machine import SharedFiles
from stoker.manager.sim.token_times import TokenTimes
from stoker.manager.sim.virtual_engine import StepCounts
from stoker.manager.sim.world import World
from stoker.protocol.calls import CallSpec
from stoker.protocol.ids import CallId


class Surroundings(Protocol):
    """A simulation, as its parts see it. Times in seconds; see `run.Simulation` for each."""

    session: str
    world: World
    agenda: Agenda
    network: Network
    shared: SharedFiles
    log: EventLog
    calls_log: CallsLog
    operations_of: dict[str, int]
    chance_of_calls: Stream
    chance_of_loads: Stream
    frame_s: float
    client_gathers_s: float
    progress_s: float
    really: dict[CallId, int]
    tokens: dict[CallId, TokenTimes]
    honours: frozenset[str]
    engine_steps: StepCounts

    def handle(self, event: Event) -> None:
        """Give the manager an event."""

    def items_of(self, spec: CallSpec) -> int:
        """How many items a call has."""

    def step_seconds(self, context: str, kind: str) -> StepSeconds:
        """What the steps of a context's engine take on a kind of device."""
