"""What if there were one more pilot? A view with things in it that are not there, for the same policies to judge."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from stoker.manager.core.nouns import Call, Context, Device, Library, Pilot
from stoker.manager.core.seams import View
from stoker.manager.core.sources import Block, SourceState
from stoker.protocol.calls import CallForecast, CallProgress
from stoker.protocol.ids import BlockId, ClientId, LibraryId, PilotId
from stoker.protocol.to_manager import DeviceFacts


def imagine_pilot(id: PilotId, devices: tuple[DeviceFacts, ...], now: float) -> Pilot:
    """A pilot that could exist."""
    pilot = Pilot(id, host=id, pid=0, block="", folder="", now=now)
    for facts in devices:
        pilot.devices[facts.device] = Device(pilot, facts, now)
    return pilot


def with_pilots(view: View, pilots: Iterable[Pilot], *, now: float | None = None) -> View:
    """A view in which these pilots are here as well, at this time (None: as it is)."""
    return Overlay(view, pilots, now=view.now if now is None else now)


class Overlay:
    """A view over another one, at another time and with more pilots. Nothing under it is changed."""

    def __init__(self, view: View, pilots: Iterable[Pilot], *, now: float) -> None:
        self._view = view
        self._more = {pilot.id: pilot for pilot in pilots}
        self._now = now
        self._pilots = {**view.pilots, **self._more}

    @property
    def now(self) -> float:
        """The time that is imagined."""
        return self._now

    @property
    def pilots(self) -> Mapping[PilotId, Pilot]:
        """Those that are here, and those that could be."""
        return self._pilots

    @property
    def ends_per_s(self) -> int:
        """As it is."""
        return self._view.ends_per_s

    @property
    def contexts(self) -> Mapping[str, Context]:
        """As they are."""
        return self._view.contexts

    @property
    def calls(self) -> Mapping[int, Call]:
        """As they are."""
        return self._view.calls

    @property
    def libraries(self) -> Mapping[LibraryId, Library]:
        """As they are."""
        return self._view.libraries

    @property
    def hungry(self) -> Mapping[str, Context]:
        """As they are."""
        return self._view.hungry

    @property
    def reports(self) -> Mapping[int, CallProgress]:
        """As they are."""
        return self._view.reports

    @property
    def forecasts(self) -> Mapping[int, CallForecast]:
        """As they are."""
        return self._view.forecasts

    @property
    def sources(self) -> Mapping[str, SourceState]:
        """As they are."""
        return self._view.sources

    @property
    def blocks(self) -> Mapping[BlockId, Block]:
        """As they are."""
        return self._view.blocks

    @property
    def most_pilots(self) -> Mapping[ClientId, int]:
        """As they are."""
        return self._view.most_pilots

    def devices(self) -> Iterator[Device]:
        """Devices that are there, then those that could be."""
        yield from self._view.devices()
        for pilot in self._more.values():
            yield from pilot.devices.values()
