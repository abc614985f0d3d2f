"""Check the invariants of the core's state, for tests."""

from __future__ import annotations

from collections.abc import Iterator

from stoker.manager.core import queues
from stoker.manager.core.nouns import Call, CallState, Context, Gang, Library, LibraryState, PilotState
from stoker.manager.core.per_context import CLOSED, FREE, FULL
from stoker.manager.core.state import State
from stoker.manager.core.transfers import Fetch, FetchMode, Peer, TransferredObject, Transfers
from stoker.protocol.ids import BlockId


def find_transfer_violations(transfers: Transfers) -> Iterator[str]:
    if transfers.unsettled or transfers.freed or transfers.changed:
        yield "after an event, transfers were left that the core had not planned"
    for peer in transfers.peers.values():
        yield from _peer_violations(transfers, peer)
    for object in transfers.objects.values():
        yield from _object_violations(transfers, object)
        for fetch in object.fetches.values():
            yield from _fetch_violations(transfers, fetch)


def _peer_violations(transfers: Transfers, peer: Peer) -> Iterator[str]:
    if len(peer.serves) > transfers.limits.serves:
        yield f"{peer.id} serves {len(peer.serves)}"
    if (peer.serves or peer.has or peer.fetches) and not peer.here:
        yield f"{peer.id} is disconnected and takes part in transfers"
    if peer.serves and not peer.address:
        yield f"{peer.id} serves and has no address"
    relayed = [name for (name, _), _ in peer.serves.items() if not _is_sure_source(peer, transfers.objects[name])]
    if len(relayed) > transfers.limits.serves - 1:
        yield f"{peer.id} serves too many objects that it does not have"
    for (name, id), fetch in peer.serves.items():
        if fetch.sources.get(peer.id) is not peer or (fetch.object.ref.name, fetch.peer.id) != (name, id):
            yield f"{peer.id} serves {name} to {id}, which has no record of this"
        if name not in peer.has and name not in peer.fetches:
            yield f"{peer.id} serves {name}, which it neither has nor fetches"


def _is_sure_source(peer: Peer, object: TransferredObject) -> bool:
    return peer.id in object.holders or object.fetches[peer.id].mode is FetchMode.READER


def _object_violations(transfers: Transfers, object: TransferredObject) -> Iterator[str]:
    name = object.ref.name
    if set(object.holders) & set(object.fetches):
        yield f"{name} is fetched by pilots that have it"
    if {id for id, peer in object.holders.items() if peer.can_serve} != set(object.whole):
        yield f"{name}: its list of servers is wrong"
    if not set(object.open) <= set(object.whole):
        yield f"{name}: its list of free servers is wrong"
    if len(object.alone) > transfers.limits.readers:
        yield f"{name}: {len(object.alone)} pilots read it only for themselves"
    if object.stranded and len(object.alone) < transfers.limits.readers:
        yield f"{name}: pilots wait for its origin and no pilot reads it"
    by_way = {way: {x.peer.id for x in object.fetches.values() if x.mode is way} for way in FetchMode}
    queues = {FetchMode.WAITING: object.waiting, FetchMode.STRANDED: object.stranded, FetchMode.ALONE: object.alone}
    for way, queue in queues.items():
        if set(queue) != by_way[way]:
            yield f"{name}: the list of {way.value} fetches is wrong"
    if not set(object.underserved) <= by_way[FetchMode.PEERS]:
        yield f"{name}: the list of fetches that could use another peer is wrong"
    if by_way[FetchMode.READER] != ({object.reader.peer.id} if object.reader is not None else set()):
        yield f"{name}: its reader is wrong"
    brings = [x.peer.cache for x in object.fetches.values() if x.mode is not FetchMode.FOLLOWING]
    if len(set(brings)) < len(brings):  # fetches in mode FOLLOWING may find the object in the cache, so ignore them
        yield f"{name}: several pilots fetch it into one cache"
    numbers = [fetch.number for fetch in object.fetches.values()]
    if numbers != sorted(numbers):
        yield f"{name}: its fetches are not in the order of their numbers"
    finds = any(fetch.mode is FetchMode.FOLLOWING and fetch.leader is None for fetch in object.fetches.values())
    sure = object.whole or object.reader or object.alone or finds
    if not sure and any(fetch.mode is not FetchMode.FOLLOWING for fetch in object.fetches.values()):
        yield f"{name}: pilots wait for it, and no pilot has it, reads it, or finds it in its cache"
    if (name in transfers.needy) != bool(object.waiting or object.underserved or object.stranded):
        yield f"{name}: it is wrongly in transfers.needy, or missing there"


def _fetch_violations(transfers: Transfers, fetch: Fetch) -> Iterator[str]:
    object, id = fetch.object, fetch.peer.id
    what = f"{object.ref.name} to {id}"
    if fetch.peer.fetches.get(object.ref.name) is not fetch:
        yield f"{what}: the pilot has no record of it"
    if len(fetch.sources) > transfers.limits.sources:
        yield f"{what}: from {len(fetch.sources)} peers"
    if id in fetch.sources or set(fetch.sources) & set(fetch.failed):
        yield f"{what}: a source is the pilot itself or has failed it"
    if any(x.serves.get((object.ref.name, id)) is not fetch for x in fetch.sources.values()):
        yield f"{what}: a source has no record of it"
    rooted = any(fetch.can_rely_on_source(source) for source in fetch.sources.values())
    if (fetch.mode is FetchMode.PEERS and not rooted) or (fetch.mode is FetchMode.WAITING and rooted):
        yield f"{what}: {fetch.mode.value}, but a source is {'' if rooted else 'not '}reliable"
    leader = fetch.leader
    if leader is not None and (fetch.mode is not FetchMode.FOLLOWING or leader.mode is FetchMode.FOLLOWING):
        yield f"{what}: a {fetch.mode.value} fetch follows a {leader.mode.value} fetch"
    if leader is not None and (object.fetches.get(leader.peer.id), leader.peer.cache) != (leader, fetch.peer.cache):
        yield f"{what}: follows a fetch that is not active in its cache"
    if leader is not None and leader.number > fetch.number:
        yield f"{what}: follows a later fetch"
    if (
        fetch.mode is FetchMode.FOLLOWING
        and leader is None
        and (transfers.find_peer_sharing_cache(fetch) is None or fetch.said is None)
    ):
        yield f"{what}: must find the object in its cache, but it is absent, or the pilot was not told"
    if fetch.mode in (FetchMode.STRANDED, FetchMode.ALONE, FetchMode.FOLLOWING) and fetch.sources:
        yield f"{what}: {fetch.mode.value} and from peers"
    if fetch.mode is FetchMode.WAITING:
        yield from _waiting_violations(transfers, fetch, what)


def _waiting_violations(transfers: Transfers, fetch: Fetch, what: str) -> Iterator[str]:
    object = fetch.object
    earlier = {x.peer.id for x in object.fetches.values() if x.number < fetch.number and x.peer.can_serve}
    reader = {object.reader.peer.id: object.reader.peer} if object.reader is not None else {}
    if not (object.whole.keys() | reader.keys() | earlier) - fetch.failed.keys():
        yield f"{what}: waits, and no pilot is left that could serve it"
    sources = [peer for peer in (*object.whole.values(), *reader.values()) if fetch.can_fetch_from(peer)]
    staying = [peer for peer in sources if not peer.draining]
    free = [peer.id for peer in staying or sources if transfers.has_free_slot(peer, object)]
    if free and len(object.waiting) <= 8:
        yield f"{what}: waits, although {free} could serve it"


def check_state(state: State) -> None:
    for pilot in state.pilots.values():
        for device in pilot.devices.values():
            promised = sum(library.promised_bytes for library in device.libraries.values())
            _require(device.promised_bytes == promised, f"{device.id}: promised bytes are not those of its libraries")
            _require(promised >= 0 <= device.budget_bytes, f"{device.id}: more memory is promised than the device has")
        _require(
            (pilot.id in state.reserved_pilots) is (pilot.reserved_for is not None),
            f"{pilot.id}: its reservation is incomplete",
        )
        if pilot.reserved_for is not None:
            trial = state.setbacks.get(pilot.reserved_for.id)
            _require(trial is not None and trial.pilot is pilot, f"{pilot.id} is reserved for a call without a trial")
        _require(pilot.state is not PilotState.GONE or not pilot.libraries, f"{pilot.id} is gone but holds libraries")
        _require(
            pilot.block not in state.blocks or pilot.id in state.blocks[BlockId(pilot.block)].pilots,
            f"{pilot.id} is not among the pilots of its block",
        )
    for block in state.blocks.values():
        _require(not block.phase.is_over, f"block {block.id} has ended and is still listed")
        of_source = block.source.blocks.get(block.id) is block
        _require(
            of_source is not bool(block.probed_node), f"block {block.id} is not in its source, or is a listed probe"
        )
        source = block.source
        lists = tuple(block.id in one for one in (source.staying_blocks, source.coming_blocks, source.filling_blocks))
        _require(
            lists == (block.is_staying, block.has_expected_pilot, block.lacks_some_pilots),
            f"block {block.id}: wrong lists of its source",
        )
        _require(all(id in state.pilots for id in block.pilots), f"block {block.id} lists a pilot that is gone")
    for library in state.libraries.values():
        _check_library(state, library)
    for what in find_transfer_violations(state.transfers):
        raise AssertionError(what)
    for call in state.calls.values():
        _check_call(state, call)
    for context in state.contexts.values():
        _check_context(state, context)
    for group in {call.group: None for call in state.calls.values()}:
        mine = sum(call.group is group for call in state.calls.values())
        _require(group.open_calls == mine, f"{group.key}: {group.open_calls} open calls, {mine} found")
        _require(state.groups.get(group.key) is group, f"{group.key} has open calls and is not listed")


def _check_call(state: State, call: Call) -> None:
    holders = [library for library in state.libraries.values() if library.held.get(call.id) is call]
    if call.state is CallState.WAITING:
        _require(call.holder is None and not holders, f"call {call.id} waits and is held")
    elif call.state is CallState.HELD:
        ended = set(call.holder.ends) if isinstance(call.holder, Gang) else set()
        expected = [library for library in call.libraries if library.id not in ended]
        _require(bool(expected), f"call {call.id} is held by no library")
        _require(
            set(map(id, holders)) == set(map(id, expected)), f"call {call.id} is not held by its recorded libraries"
        )
    else:
        raise AssertionError(f"call {call.id} has ended and is still open")


def _check_context(state: State, context: Context) -> None:
    name, queued = context.recipe.name, list(context.queue)
    waiting = sum(call.state is CallState.WAITING and call.group.context is context for call in state.calls.values())
    _require(context.queue.count == waiting == len(queued), f"{name}: {len(queued)} calls are queued, {waiting} wait")
    _require(len({call.id for call in queued}) == len(queued), f"{name}: a call is queued twice")
    _require((context.recipe.key in state.waiting_contexts) == bool(waiting), f"{name}: waiting_contexts is wrong")
    starving = bool(waiting) and not any(library.is_usable for library in queues.libraries_serving_context(context))
    _require((context.starved_since is not None) == starving, f"{name}: starved_since is {context.starved_since}")


def _check_library(state: State, library: Library) -> None:
    context, name = library.context, f"library {library.id}"
    _require(library.state is not LibraryState.GONE, f"{name} is gone but listed")
    _require(context.libraries.get(library.id) is library, f"{name} is not listed in its context")
    _require(library.pilot.libraries.get(library.id) is library, f"{name} is not listed in its pilot")
    usable = library.is_serving and library.call_that_runs_alone is None and library.pilot.reserved_for is None
    free = usable and library.load < library.slots
    suspects = [call for call in library.held.values() if call.must_run_alone]
    _require(not suspects or library.load == 1, f"{name}: a suspect call runs with other calls")
    _require((library.id in context.idle) == free, f"{name}: idle set is wrong")
    level = (FREE if free else library.load - library.slots) if usable else None
    listed = context.index.load_level_of(library)
    _require(listed == level or (listed, level) == (CLOSED, FULL), f"{name}: its level in the load index is wrong")
    is_empty = not library.held or not (library.state is LibraryState.ASLEEP or library.is_waking)
    _require(is_empty, f"{name} is {library.state.value} and holds calls")
    _require(library.pilot.free_host_bytes_for_sleep >= 0, f"{library.pilot.id} promised too much host memory")
    _require(not library.is_stuck or listed != FULL, f"{name} is stuck, but calls may wait in it")
    _require(not (set(library.withdrawn_calls) & set(library.held)), f"{name}: a zombie call is also held")
    for id, call in library.held.items():
        _require(state.calls.get(id) is call, f"{name} holds call {id}, which is not open")


def _require(is_valid: bool, violation: str) -> None:
    if not is_valid:
        raise AssertionError(violation)
