"""What the manager wants done. A shell carries commands out after the events that caused them are in the journal."""

from __future__ import annotations

import msgspec

from stoker.contexts.step_times import StepTimes
from stoker.manager.core.subjects import About
from stoker.protocol import to_client, to_pilot
from stoker.protocol.blocks import LossReason, PilotEnd
from stoker.protocol.ids import ClientId, PilotId, RecipeKey


class ToPilot(msgspec.Struct, frozen=True, gc=False):
    """Send a message to a pilot."""

    pilot: PilotId
    message: to_pilot.ToPilot


class ToClient(msgspec.Struct, frozen=True, gc=False):
    """Send a message to a client."""

    client: ClientId
    message: to_client.ToClient


class SetTimer(msgspec.Struct, frozen=True, gc=False):
    """Give `TimerFired(key)` back at this time; a later timer of the same key replaces it."""

    at: float
    key: str


class AskAdvice(msgspec.Struct, frozen=True):
    """Find out about a subject; nothing waits for the answer, an `AdviceArrived`. `name`: that of the function, as its
    runs are remembered, or of the context. `log`: where the library of a call writes, and the part of it that the call
    has written, in bytes (`end` is 0: not known). `said`: what a failure said."""

    about: About
    name: str = ""
    log: str = ""
    start: int = 0
    end: int = 0
    said: str = ""


class RecordLoad(msgspec.Struct, frozen=True):
    """Remember what a load cost on a device kind. Seconds and bytes. `slots`: calls that the library runs at once; 0:
    it did not say."""

    recipe: RecipeKey
    name: str
    kind: str
    start_s: float
    load_s: float
    resident_bytes: int
    peak_bytes: int
    device_bytes: int
    slots: int = 0


class RecordRuns(msgspec.Struct, frozen=True):
    """Remember what calls cost: their number and total time on a device kind, since the last record. `items` were
    packed into them (one each, where they were not packed)."""

    recipe: RecipeKey
    function: str
    kind: str
    calls: int
    run_s: float
    items: int = 0


class RecordPace(msgspec.Struct, frozen=True):
    """Remember how long a unit of a call's work took gangs of a size on a device kind. Seconds."""

    recipe: RecipeKey
    kind: str
    size: int
    pace_s: float


class RecordWait(msgspec.Struct, frozen=True):
    """Remember how long a block waited in its source's queue, and from the start of its job until its first pilot came.
    Seconds; 0 for the second where the batch system had not said yet that it runs. And what devices that pilot has:
    their kind, their number, and the memory of each in bytes."""

    source: str
    wait_s: float
    boot_s: float
    kind: str
    devices: int
    memory_bytes: int


class RecordStay(msgspec.Struct, frozen=True):
    """Remember how long a pilot of a source was here, and how that ended; `loss`: why it was lost, if it was."""

    source: str
    stay_s: float
    end: PilotEnd
    loss: LossReason | None = None


class RecordPilots(msgspec.Struct, frozen=True):
    """Remember how many pilots of a source are here from now on."""

    source: str
    pilots: int


class DiscardObject(msgspec.Struct, frozen=True):
    """Remove the file of a result that nobody will read."""

    path: str


class EndManager(msgspec.Struct, frozen=True):
    """The session is over: send what is to be sent, and exit."""

    reason: str


class RecordSteps(msgspec.Struct, frozen=True):
    """Remember what steps of a model's engine took on a device kind."""

    recipe: RecipeKey
    kind: str
    times: StepTimes


Record = RecordLoad | RecordRuns | RecordPace | RecordSteps | RecordWait | RecordStay | RecordPilots
Command = ToPilot | ToClient | SetTimer | AskAdvice | Record | DiscardObject | EndManager
