"""Transfers: every flow gets its max-min fair share of the links on its path.

Flows on a link share its capacity equally. Capacity that a flow cannot use, because another link limits it, goes to the
other flows: progressive filling (Bertsekas and Gallager, "Data Networks", §6.5.2). Round trips, slow start and packets
are not modelled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from stoker.manager.sim.agenda import Agenda, AgendaEntry, cancel_entry
from stoker.manager.sim.world import Links

_NEGLIGIBLE_UNITS = 1e-6


@dataclass(slots=True, eq=False)
class SharedLink:
    """A link with a total capacity of `rate` units per second."""

    name: str
    rate: float
    used_by: dict[_Flow, None] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Flow:
    transfer: Transfer
    links: tuple[SharedLink, ...]
    rate: float = 0.0


@dataclass(slots=True, eq=False)
class Transfer:
    """A transfer of bytes or operations on one or more paths. `moved`: units per path since the paths last changed."""

    units_left: float
    on_done: Callable[[], None]
    since: float
    moved: dict[int, float] = field(default_factory=dict)
    flows: tuple[_Flow, ...] = ()
    entry: AgendaEntry | None = None


class Network:
    def __init__(self, agenda: Agenda) -> None:
        self._agenda = agenda
        self._touched: dict[SharedLink, None] = {}
        self._idle: dict[Transfer, None] = {}
        self._is_update_scheduled = False

    def start(self, size: float, paths: Sequence[Iterable[SharedLink]], done: Callable[[], None]) -> Transfer:
        """Move `size` units over all paths in parallel. If `paths` is empty, the transfer waits."""
        transfer = Transfer(float(size), done, self._agenda.now)
        self.reroute(transfer, paths)
        return transfer

    def reroute(self, transfer: Transfer, paths: Sequence[Iterable[SharedLink]]) -> None:
        self._record_moved_units(transfer)
        self._leave_links(transfer)
        transfer.moved = {}
        transfer.flows = tuple(_Flow(transfer, tuple(link for link in path if link.rate < math.inf)) for path in paths)
        for flow in transfer.flows:
            for link in flow.links:
                link.used_by[flow] = None
                self._touched[link] = None
        self._idle[transfer] = None
        self._schedule_rate_update()

    def stop(self, transfer: Transfer) -> None:
        self._record_moved_units(transfer)
        self._leave_links(transfer)
        transfer.flows = ()
        self._idle.pop(transfer, None)

    def _leave_links(self, transfer: Transfer) -> None:
        cancel_entry(transfer.entry)
        transfer.entry = None
        for flow in transfer.flows:
            for link in flow.links:
                del link.used_by[flow]
                self._touched[link] = None
        if transfer.flows:
            self._schedule_rate_update()

    def _schedule_rate_update(self) -> None:
        if not self._is_update_scheduled:
            self._is_update_scheduled = True
            self._agenda.schedule_after(0.0, self._update_rates)

    def _update_rates(self) -> None:
        self._is_update_scheduled = False
        touched, self._touched = self._touched, {}
        flows: dict[_Flow, None] = {}
        links: dict[SharedLink, None] = {}
        look = list(touched)
        while look:
            link = look.pop()
            if link in links:
                continue
            links[link] = None
            for flow in link.used_by:
                if flow not in flows:
                    flows[flow] = None
                    look += flow.links
        transfers = dict.fromkeys(flow.transfer for flow in flows)
        idle, self._idle = self._idle, {}
        transfers.update(idle)
        for transfer in transfers:
            self._record_moved_units(transfer)
        _assign_fair_rates(list(links), flows)
        for transfer in idle:
            for flow in transfer.flows:
                if not flow.links:
                    flow.rate = math.inf
        for transfer in transfers:
            self._schedule_end(transfer)

    def _record_moved_units(self, transfer: Transfer) -> None:
        now = self._agenda.now
        seconds, transfer.since = now - transfer.since, now
        if seconds <= 0:
            return
        for place, flow in enumerate(transfer.flows):
            moved = flow.rate * seconds
            if moved and moved < math.inf:
                moved = min(moved, transfer.units_left)
                transfer.units_left -= moved
                transfer.moved[place] = transfer.moved.get(place, 0.0) + moved

    def _schedule_end(self, transfer: Transfer) -> None:
        rate = sum(flow.rate for flow in transfer.flows)
        cancel_entry(transfer.entry)
        transfer.entry = None
        if rate or (transfer.units_left <= _NEGLIGIBLE_UNITS and transfer.flows):
            wait_s = transfer.units_left / rate if rate and transfer.units_left > _NEGLIGIBLE_UNITS else 0.0
            transfer.entry = self._agenda.schedule_after(wait_s, self._end_transfer, transfer)

    def _end_transfer(self, transfer: Transfer) -> None:
        transfer.entry = None
        self._record_moved_units(transfer)
        if transfer.units_left > 0 and transfer.flows:  # left by rounding, or a path has no limited link
            quickest = max(range(len(transfer.flows)), key=lambda place: transfer.flows[place].rate)
            transfer.moved[quickest] = transfer.moved.get(quickest, 0.0) + transfer.units_left
        transfer.units_left = 0.0
        self._leave_links(transfer)
        transfer.flows = ()
        transfer.on_done()


def _assign_fair_rates(links: list[SharedLink], flows: Iterable[_Flow]) -> None:
    for flow in flows:
        flow.rate = -1.0
    left = {link: link.rate for link in links}
    open_flows = {link: len(link.used_by) for link in links}
    while True:
        shares = {link: left[link] / count for link, count in open_flows.items() if count}
        if not shares:
            return
        least = min(shares.values())
        for link, share in shares.items():
            if share > least * (1 + 1e-12):
                continue
            for flow in link.used_by:
                if flow.rate < 0:
                    flow.rate = least
                    for other in flow.links:
                        left[other] = max(0.0, left[other] - least)
                        open_flows[other] -= 1


class SharedStorage:
    def __init__(self, links: Links) -> None:
        self.bytes = SharedLink("shared", links.shared)
        self.operations = SharedLink("shared operations", links.shared_operations or float("inf"))


class Machine:
    def __init__(self, name: str, links: Links) -> None:
        self.shared = SharedLink(f"{name} shared", links.shared_node)
        self.inward = SharedLink(f"{name} in", links.network)
        self.outward = SharedLink(f"{name} out", links.network)
        self.disk = SharedLink(f"{name} disk", links.disk)
        self.memory = SharedLink(f"{name} memory", links.memory)
        self.bus = SharedLink(f"{name} bus", links.bus)
        self.on_disk: dict[str, int] = {}
        self.in_memory: dict[str, None] = {}  # Names of objects in the page cache
