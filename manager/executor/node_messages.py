"""Tells Parsl's monitoring of pilots, as Parsl's own HighThroughputExecutor tells of its worker pools."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Iterable
from typing import Protocol

from parsl.monitoring.message_type import MessageType

from stoker.protocol.status import PilotStatus


class MonitoringRadio(Protocol):
    """What takes messages for Parsl's monitoring database."""

    def send(self, message: object) -> None:
        """Send a message."""


class NodeMessages:
    """Sends a `NODE_INFO` message when a pilot joins, and another one when it is gone."""

    def __init__(self) -> None:
        self._here: dict[str, PilotStatus] = {}

    def tell(self, radio: MonitoringRadio | None, pilots: Iterable[PilotStatus], *, run_id: str) -> None:
        """Tell of pilots that have joined or left since the last time. `pilots`: those that are here."""
        if radio is None:
            return
        now = {pilot.pilot: pilot for pilot in pilots}
        for name, pilot in now.items():
            if name not in self._here:
                radio.send((MessageType.NODE_INFO, _facts(pilot, run_id=run_id, is_active=True)))
        for name, pilot in self._here.items():
            if name not in now:
                radio.send((MessageType.NODE_INFO, _facts(pilot, run_id=run_id, is_active=False)))
        self._here = now


def _facts(pilot: PilotStatus, *, run_id: str, is_active: bool) -> dict[str, object]:
    """A row of the table `node`. A pilot knows what its job was granted, not what its whole node has."""
    at = datetime.datetime.now()
    return {
        "run_id": run_id,
        "hostname": pilot.host,
        "uid": pilot.pilot,
        "block_id": pilot.block,
        "cpu_count": sum(device.cores for device in pilot.devices),
        "total_memory": sum(device.memory_bytes for device in pilot.devices),
        "active": is_active,
        "worker_count": len(pilot.devices),
        "python_v": platform.python_version(),
        "timestamp": at,
        "last_heartbeat": at,
    }
