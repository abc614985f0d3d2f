"""What pilots are told of the plan of transfers (`objects`): from whom they get an object from now on."""

from __future__ import annotations

from stoker.manager.core import object_report
from stoker.manager.core.manager import Manager
from stoker.manager.core.peers import Fetch, Peer, Way
from stoker.manager.core.transfers import Transfers
from stoker.protocol import to_pilot


def say(manager: Manager) -> None:
    """Tell pilots from whom they get objects now. The manifest goes along once."""
    transfers = manager.state.transfers
    changed, transfers.changed = transfers.changed, {}
    for fetch in changed:
        object, pilot = fetch.object, manager.state.pilots.get(fetch.peer.id)
        if pilot is None or not fetch.peer.here or object.fetches.get(pilot.id) is not fetch:
            continue
        sources, origin = _sources(transfers, fetch)
        before, fetch.said = fetch.said, (tuple(source.id for source in sources), origin)
        if not (sources or origin):
            fetch.said = None
        if fetch.said is None or fetch.said == before:
            continue
        manifest = object.manifest if before is None else b""
        if before is None:
            object_report.note(manager.state, pilot, fetch)
        peers = tuple(to_pilot.ServingPeer(source.id, source.address) for source in sources)
        manager.say(pilot, to_pilot.FetchObject(object.ref, peers, origin, manifest, fetch.kept))


def _sources(transfers: Transfers, fetch: Fetch) -> tuple[list[Peer], bool]:
    """What a pilot is told: its peers, and whether it may read the origin. One that follows finds the object in its
    cache, wherever it is sent."""
    if fetch.way is not Way.FOLLOWING:
        return list(fetch.sources.values()), fetch.way in (Way.READER, Way.ALONE)
    near = transfers.near(fetch)
    return ([near], False) if near is not None and near.serving else ([], near is not None)
