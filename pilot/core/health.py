"""What probes of one device add up to: a fault, no fault, or none any more.

One failure is none: the device is probed again at once. Two in a row are a fault. A device that had refused something
(memory that another program has taken) is well again after two good probes; one that computed something wrong never is,
and neither is one of which its driver has reported a fault: what may be wrong again must not be trusted in between. A
driver that does not answer is a fault for as long as that lasts.
"""

from __future__ import annotations

import enum


class ProbeVerdict(enum.Enum):
    """What a probe says of its device, by its exit code. Others are taken for FAILED."""

    SOUND = 0
    UNKNOWN = 3
    """Nothing could be found out."""
    FAILED = 4
    """It refused something, or failed in it; that may pass."""
    WRONG = 5
    """It computed something wrong."""


class DeviceHealth:
    """The state of one device."""

    def __init__(self) -> None:
        self.known = False
        """Whether there has been an answer to go by."""
        self._failed = 0
        self._sound = 0
        self._lasting = False
        self._found = ""
        """The fault that probes have found, or the driver has reported."""
        self._silence = ""
        """That the driver does not answer."""

    @property
    def fault(self) -> str:
        """Why nothing should be loaded on it; empty while there is no reason."""
        return self._found or self._silence

    @property
    def suspected(self) -> bool:
        """Whether it has failed once, and should be probed again at once."""
        return self._failed == 1

    def heard(self, answer: ProbeVerdict, said: str) -> bool:
        """A probe has answered, in these words; whether the fault has changed."""
        before = self.fault
        if answer is ProbeVerdict.UNKNOWN:
            self.known = True
            return False
        if answer is ProbeVerdict.SOUND:
            self.known = True
            self._failed = 0
            self._sound += 1
            if self._sound >= 2 and not self._lasting:
                self._found = ""
            return self.fault != before
        self._sound = 0
        self._failed += 1
        if self._failed < 2:
            return False
        self.known = True
        self._lasting |= answer is ProbeVerdict.WRONG
        self._found = self._found or f"{said}, twice"
        return self.fault != before

    def reported(self, reason: str) -> bool:
        """Its driver has reported a fault. True if it had not before."""
        before = self.fault
        self.known = self._lasting = True
        self._found = self._found or reason
        return self.fault != before

    def silent(self, reason: str) -> bool:
        """Its driver does not answer, for this reason; empty: it answers. Whether the fault has changed."""
        before = self.fault
        self.known |= bool(reason)
        self._silence = reason
        return self.fault != before
