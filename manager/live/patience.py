"""How long the manager waits for its peers."""

from __future__ import annotations

import msgspec


class Patience(msgspec.Struct, frozen=True):
    """The manager's time limits, in seconds.

    `heartbeat_s`: between two heartbeats of a pilot. `silence_s`: a pilot that says nothing for longer is lost.
    `pilot_back_s`, `client_back_s`: for a new connection after one broke; `restart_s`: after a restart of the manager.
    `first_client_s`: for the first client of a session that is not detached. `pilot_lease_s`: a pilot waits so long for
    a lost manager. `idle_s`: a detached session ends after so long without clients and calls (0 = never).
    """

    heartbeat_s: float = 5.0
    silence_s: float = 15.0
    pilot_back_s: float = 1.0
    client_back_s: float = 5.0
    first_client_s: float = 120.0
    restart_s: float = 20.0
    pilot_lease_s: float = 60.0
    idle_s: float = 0.0
