"""One device, as the agent needs to know it."""

from __future__ import annotations

import msgspec

from stoker.protocol.to_manager import DeviceFacts


class PilotDevice(msgspec.Struct, frozen=True):
    """What the manager is told of a device, and what only the pilot needs.

    `cores` are the processor cores that go with it. `cuda` is how `CUDA_VISIBLE_DEVICES` names it (empty for a CPU
    device), `uuid` how NVML does.
    """

    facts: DeviceFacts
    cores: tuple[int, ...] = ()
    cuda: str = ""
    uuid: str = ""

    def with_cores(self, cores: tuple[int, ...]) -> PilotDevice:
        """The same device with these cores."""
        facts = msgspec.structs.replace(self.facts, cores=max(1, len(cores)))
        return msgspec.structs.replace(self, facts=facts, cores=cores)

    def with_fault(self, fault: str) -> PilotDevice:
        """The same device, on which nothing may be loaded for this reason."""
        return msgspec.structs.replace(self, facts=msgspec.structs.replace(self.facts, fault=fault))
