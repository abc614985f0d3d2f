"""What calls have lost while they ran: the evidence that `suspects` judges by."""

from __future__ import annotations

import msgspec

from stoker.manager.core.nouns import Pilot
from stoker.protocol.calls import Failure, Printed
from stoker.protocol.ids import DeviceId, LibraryId, PilotId


class Loss:
    """A pilot or library that was lost while a call may have run there (see `suspects`)."""

    __slots__ = ("alone", "at", "failure", "library", "memory_bytes", "pilot", "printed", "ran_s")

    def __init__(
        self,
        at: float,
        pilot: Pilot,
        library: LibraryId,
        ran_s: float,
        alone: bool,
        failure: Failure | None,
        memory_bytes: int,
        printed: Printed | None,
    ) -> None:
        self.at = at
        self.pilot = pilot
        self.library = library
        self.ran_s = ran_s
        self.alone = alone
        """Whether nothing else can have been the cause: nothing else ran on the pilot."""
        self.failure = failure
        """How the library died, where its pilot lives."""
        self.memory_bytes = memory_bytes
        """The most that the library was measured to use while the call ran; 0 = not known."""
        self.printed = printed
        """The call's output, as far as it is known where that begins."""

    @property
    def counts(self) -> bool:
        """True unless the pilot is back, or went for another reason."""
        return self.failure is not None or (self.pilot.loss is not None and not self.pilot.loss.explained)

    @property
    def is_settled(self) -> bool:
        """True if no better reason can come any more."""
        return self.failure is not None or self.pilot.loss_settled


class Cut:
    """A call that ran when the walltime of its pilot was over."""

    __slots__ = ("library", "log", "pilot", "ran_s", "walltime_s", "whole")

    def __init__(
        self,
        ran_s: float,
        walltime_s: float,
        whole: bool,
        pilot: PilotId,
        library: LibraryId,
        log: str,
    ) -> None:
        self.ran_s = ran_s
        self.walltime_s = walltime_s
        self.whole = whole
        """Whether no pilot could have given it much more time."""
        self.pilot = pilot
        self.library = library
        self.log = log


class Fault(msgspec.Struct, frozen=True):
    """That a pilot's infrastructure failed a call (see `faults`). `devices`: which devices did; empty: the node did.
    `avoided_until`: the call is not sent there before; `pauses_until`: nor anywhere."""

    at: float
    pilot: PilotId
    devices: frozenset[DeviceId]
    avoided_until: float
    pauses_until: float
    failure: Failure


class Trial:
    """What a call has lost that is not done yet (see `suspects`, `faults`)."""

    __slots__ = ("cuts", "faults", "losses", "pilot", "saved")

    def __init__(self) -> None:
        self.losses: list[Loss] = []
        self.cuts: list[Cut] = []
        self.faults: list[Fault] = []
        self.saved = b""
        """What it had saved of its progress when the last of these happened."""
        self.pilot: Pilot | None = None
        """The pilot that is reserved for it."""

    def gets_on(self, saved: bytes) -> None:
        """The call has saved something since this was written: it is written anew."""
        self.saved = saved
        self.losses.clear()
        self.cuts.clear()
        self.faults.clear()

    @property
    def counted(self) -> list[Loss]:
        """Losses that count against the call."""
        return [loss for loss in self.losses if loss.counts]

    @property
    def longest_s(self) -> float:
        """The longest that it ran before it was cut off."""
        return max((cut.ran_s for cut in self.cuts), default=0.0)
