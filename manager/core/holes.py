"""A hole in the journal: what the manager does not know that it knew once.

Numbers of frames tell peers and the manager apart on what was taken (`reliable`). Behind a hole they do not: the frames
of a peer go on with a number that skips some, and nobody can tell which were in the hole. So each is taken until the
peer says hello, and then the peer says anew what it holds.
"""

from __future__ import annotations

from stoker.manager.core import ending
from stoker.manager.core.client import Client
from stoker.manager.core.events import RecordsLost
from stoker.manager.core.manager import Manager
from stoker.protocol.calls import CallEnd, CallSpec


def records_lost(manager: Manager, event: RecordsLost) -> None:
    """Records of the journal are lost here."""
    state = manager.state
    del event
    state.refuse("damaged records of the journal")
    inboxes = [client.inbox for client in state.clients.values()]
    inboxes += [pilot.inbox for pilot in (*state.pilots.values(), *state.gone_pilots.values())]
    for inbox in inboxes:
        inbox.has_hole = True


def ends_kept(manager: Manager, ends: list[CallEnd]) -> None:
    """The journal begins anew: these calls have ended, should their clients submit them again."""
    manager.state.kept_ends.update({end.call: end for end in ends})


def end_kept(manager: Manager, client: Client, specs: list[CallSpec]) -> list[CallSpec]:
    """Of calls that a client submits again, those that had ended end now as they did. Returns the others."""
    state, rest = manager.state, []
    for spec in specs:
        end = state.kept_ends.pop(spec.call, None)
        if end is None or spec.call in state.calls:
            rest.append(spec)
            continue
        client.last_call = max(client.last_call, spec.call)
        ending.ended_before(state)
        manager.results_of(client).append(end)
    return rest
