"""What a session's status says about some contexts: how many are hot, what loading cost, where they are."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from stoker.manager.protocol.to_client import Status


class ContextFacts(msgspec.Struct, frozen=True):
    """Figures of one moment, summed over the contexts asked for. Seconds are of device time, not of the clock."""

    names: tuple[str, ...] = ()
    hot: int = 0
    loading: int = 0
    loading_on: tuple[str, ...] = ()
    pilots: int = 0
    devices: int = 0
    queued: int = 0
    running: int = 0
    loads: int = 0
    load_total_s: float = 0.0
    calls: int = 0
    waits_for: str = ""

    @property
    def load_s(self) -> float:
        """The mean load."""
        return self.load_total_s / self.loads if self.loads else 0.0

    @property
    def found_hot(self) -> int:
        """Calls that did not have to wait for a load of their own."""
        return max(0, self.calls - self.loads)

    def since(self, before: ContextFacts) -> ContextFacts:
        """Without what had been done `before`: a session that was joined may have done much."""
        return msgspec.structs.replace(
            self,
            loads=self.loads - before.loads,
            load_total_s=self.load_total_s - before.load_total_s,
            calls=self.calls - before.calls,
        )


def context_facts(status: Status, *, keys: Collection[str]) -> ContextFacts:
    """The facts of the contexts with these recipe keys."""
    mine = [context for context in status.contexts if context.key in keys]
    names = {context.key: context.name for context in mine}
    here = [pilot for pilot in status.pilots if pilot.state != "gone"]
    loading_on = sorted(
        {
            device
            for library in status.libraries
            if (library.recipe in names or library.recipe in names.values()) and library.state == "loading"
            for device in library.devices
        }
    )
    return ContextFacts(
        names=tuple(context.name for context in mine),
        hot=sum(context.hot for context in mine),
        loading=sum(context.loading for context in mine),
        loading_on=tuple(loading_on),
        pilots=len(here),
        devices=sum(len(pilot.devices) for pilot in here),
        queued=sum(context.queued for context in mine),
        running=sum(context.running for context in mine),
        loads=sum(context.loads for context in mine),
        load_total_s=sum(context.load_total_s for context in mine),
        calls=sum(context.served for context in mine),
        waits_for=next((context.waits_for for context in mine if context.waits_for), ""),
    )
