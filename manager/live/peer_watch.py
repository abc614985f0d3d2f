"""Track which peers send messages, are disconnected, or count as lost.

A pilot is lost if it is silent for `PeerTimeLimits.silence_s`. A disconnected peer must send a message before its time
limit, like each peer in the journal after a restart.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

import msgspec

from stoker.manager.core.nouns import PilotState
from stoker.manager.core.state import State
from stoker.manager.live.admission import PeerRole

CHECK_S = 0.5
_FIRST_CLIENT = (PeerRole.CLIENT, "")
"""Key of the first client, before its name is known."""

PeerKey = tuple[PeerRole, str]


class PeerTimeLimits(msgspec.Struct, frozen=True):
    """Time limits in seconds. `silence_s`: until a silent pilot is lost. `pilot_back_s`, `client_back_s`: for a peer to
    reconnect. `restart_s`: to reconnect after a restart of the manager. `pilot_lease_s`: until a pilot stops waiting
    for a lost manager. `idle_s`: until a session without clients and calls ends (0 = never).
    """

    heartbeat_s: float = 5.0
    silence_s: float = 15.0
    pilot_back_s: float = 1.0
    client_back_s: float = 5.0
    first_client_s: float = 120.0
    restart_s: float = 20.0
    pilot_lease_s: float = 60.0
    idle_s: float = 0.0


class PeerWatch:
    def __init__(self, limits: PeerTimeLimits, *, parent: int = 0) -> None:
        self._limits = limits
        self._parent = parent
        self._heard_at: dict[PeerKey, float] = {}
        self._reconnect_by: dict[PeerKey, float] = {}
        self._check_at = 0.0

    def note_message(self, role: PeerRole, name: str, now: float) -> None:
        peer = (role, name)
        self._heard_at[peer] = now
        if self._reconnect_by:
            self._reconnect_by.pop(peer, None)
            if role is PeerRole.CLIENT:
                self._reconnect_by.pop(_FIRST_CLIENT, None)

    def note_disconnection(self, role: PeerRole, name: str, now: float) -> bool:
        """Start the time limit of a disconnected peer. Return False if the peer is unknown."""
        if (role, name) not in self._heard_at:
            return False
        self._reconnect_by[role, name] = now + self._reconnect_limit_s(role)
        return True

    def _reconnect_limit_s(self, role: PeerRole) -> float:
        return self._limits.pilot_back_s if role is PeerRole.PILOT else self._limits.client_back_s

    def expect_all_peers_to_reconnect(self, state: State, now: float) -> None:
        pilots = [(PeerRole.PILOT, pilot.id) for pilot in state.pilots.values() if pilot.state is not PilotState.GONE]
        clients = [(PeerRole.CLIENT, client.id) for client in state.clients.values() if not client.gone]
        self._reconnect_by |= dict.fromkeys([*pilots, *clients], now + self._limits.restart_s)

    def expect_first_client(self, now: float) -> None:
        self._reconnect_by[_FIRST_CLIENT] = now + self._limits.first_client_s

    def restart_silence_limits(self, now: float, *, may_have_reconnected: bool = True) -> None:
        """Restart the silence limits after a pause in which the manager read no messages. `may_have_reconnected`: also
        extend the limits of disconnected peers.
        """
        self._heard_at = dict.fromkeys(self._heard_at, now)
        if may_have_reconnected:
            for peer, until in self._reconnect_by.items():
                self._reconnect_by[peer] = max(until, now + self._reconnect_limit_s(peer[0]))

    def next_limit_at(self) -> float:
        soonest = self._check_at if self._heard_at else math.inf
        return min(soonest, *self._reconnect_by.values()) if self._reconnect_by else soonest

    def lost_peers(self, now: float) -> Iterator[tuple[PeerRole, str, str]]:
        """Yield role, name (empty: no client ever connected) and reason of each lost peer."""
        if _FIRST_CLIENT in self._reconnect_by and self._parent and os.getppid() != self._parent:
            self._reconnect_by[_FIRST_CLIENT] = now  # no client will come: the starting program has ended
        for peer, until in list(self._reconnect_by.items()):
            if until <= now:
                del self._reconnect_by[peer]
                self._heard_at.pop(peer, None)
                yield *peer, "did not reconnect"
        if now < self._check_at:
            return
        self._check_at = now + CHECK_S
        for peer, heard_at in list(self._heard_at.items()):
            is_silent = peer[0] is PeerRole.PILOT and now - heard_at > self._limits.silence_s
            if is_silent and peer not in self._reconnect_by:
                del self._heard_at[peer]
                yield *peer, f"silent for {now - heard_at:.0f} s"
