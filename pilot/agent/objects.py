"""Moves data to and from the object cache: objects, large arguments and results, snapshots, and the environment.

If the pilot sees the session's folder, a large payload is a file there. Otherwise the payload goes through the
session's seed.
"""

from __future__ import annotations

import logging
import mmap
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from stoker.contexts.folders import snapshot_folder
from stoker.contexts.objects import copy_object, make_object_ref, read_object_manifest
from stoker.contexts.recipe import ObjectRef
from stoker.errors import StokerError
from stoker.pilot.agent import observing
from stoker.pilot.agent.agent import Agent, OngoingFetch
from stoker.pilot.cache import CacheFetch, DiskError, InUseError, ObjectCache, Pin, disk, store
from stoker.pilot.core import events
from stoker.pilot.core.commands import FetchArguments
from stoker.pilot.core.infrastructure import is_unwritable_disk_error
from stoker.pilot.transfer.board import FetchOutcome, ObjectSource
from stoker.pilot.transfer.fetch import send_result
from stoker.pilot.transfer.meeting import report_to_seed
from stoker.pilot.transfer.wire import PeerError
from stoker.protocol.calls import CallEnd, Failure, FailureKind
from stoker.protocol.ids import CallId, LibraryId, PilotId, RecipeKey
from stoker.protocol.to_agent import SnapshotMade
from stoker.protocol.to_manager import SnapshotWritten
from stoker.protocol.to_pilot import FetchObject

# ---- fetches

log = logging.getLogger("stoker.pilot")


def is_pilots_fault(error: BaseException) -> bool:
    """True if the disk of this pilot caused the error, so that another pilot may succeed."""
    return isinstance(error, DiskError) or is_unwritable_disk_error(error)


def start_or_update_fetch(agent: Agent, order: FetchObject) -> None:
    """Fetch an object from the sources in `order`, which replace earlier sources."""
    fetching = agent.fetches.setdefault(order.object.name, OngoingFetch(order))
    fetching.order = order
    if order.origin:  # search for the origin in a thread, because the file system may hang
        threading.Thread(target=_find_origin, args=(agent, fetching, order), name="objects-origin", daemon=True).start()
    else:
        _set_fetch_sources(agent, fetching, order, [])


def stop_fetch(agent: Agent, name: str) -> None:
    agent.peers.served_cache.forget_fetch(name)
    fetching = agent.fetches.pop(name, None)
    if fetching is not None and fetching.cache_fetch is not None:
        fetching.cache_fetch.stop()


def _find_origin(agent: Agent, fetching: OngoingFetch, order: FetchObject) -> None:
    path, seed, why = order.object.source, agent.peers.find_seed(), ""
    origin = [ObjectSource(address=seed, label="the session's seed", origin=True)] if seed else []
    if path and not (seed and agent.state.facts.is_carried):
        try:
            os.stat(path)
            origin = [ObjectSource(path=path, origin=True)]
        except OSError as error:
            why = (error.strerror or str(error)).lower()
    agent.run_in_loop(lambda: _set_fetch_sources(agent, fetching, order, origin, why=why))


def _set_fetch_sources(
    agent: Agent, fetching: OngoingFetch, order: FetchObject, origin: list[ObjectSource], *, why: str = ""
) -> None:
    ref = order.object
    if agent.fetches.get(ref.name) is not fetching or fetching.order is not order:
        return
    if fetching.cache_fetch is None:
        fetching.cache_fetch = _start_cache_fetch(agent, fetching, ref)
    peers = [ObjectSource(address=peer.address, label=peer.pilot) for peer in order.peers]
    fetching.cache_fetch.set_sources([*peers, *origin], manifest=order.manifest)
    if order.origin and not origin:
        where = f"at {ref.source} ({why})" if ref.source else "anywhere that this pilot knows"
        what = f"the object {ref.name} is not {where}; put it on a file system that compute nodes can access"
        agent.handle_event(events.SourceFailed(ref.name, what))


def _start_cache_fetch(agent: Agent, fetching: OngoingFetch, ref: ObjectRef) -> CacheFetch:
    def lost(source: ObjectSource, why: str) -> None:
        agent.run_in_loop(lambda: _report_lost_source(agent, fetching, source, why))

    bringing = CacheFetch(
        agent.cache,
        ref,
        key=agent.peers.key,
        on_source_lost=lost,
        on_copy_created=agent.peers.served_cache.serve_partial_copy,
    )

    def run() -> None:
        try:
            here, outcome = bringing.run()
        except StokerError as error:
            text, ours, is_in_use = str(error), is_pilots_fault(error), isinstance(error, InUseError)
        except Exception as error:  # a bug: report a failed fetch, because libraries wait for the object
            log.exception("the fetch of %s failed", ref.name)
            text = f"the object {ref.name} could not be fetched: {type(error).__name__}: {error}"
            ours = is_in_use = False
        else:
            agent.run_in_loop(lambda: _report_arrival(agent, fetching, ref, here, outcome))
            return
        agent.run_in_loop(lambda: _report_failed_fetch(agent, fetching, text, pilots_fault=ours, is_in_use=is_in_use))

    threading.Thread(target=run, name="objects-bring", daemon=True).start()
    return bringing


def _report_arrival(agent: Agent, fetching: OngoingFetch, ref: ObjectRef, here: Pin, outcome: FetchOutcome) -> None:
    if agent.fetches.get(ref.name) is fetching:  # otherwise the fetch was stopped in the meantime
        del agent.fetches[ref.name]
        agent.peers.served_cache.forget_fetch(ref.name)
    agent.arrived_pins[ref.name] = here
    agent.handle_event(
        events.ObjectArrived(ref.name, ref.size_bytes, outcome.origin_bytes, outcome.peer_bytes, outcome.seconds)
    )
    agent.arrived_pins.pop(ref.name).release()


def _report_lost_source(agent: Agent, fetching: OngoingFetch, source: ObjectSource, why: str) -> None:
    name = fetching.order.object.name
    if agent.fetches.get(name) is not fetching:
        return
    if source.origin:
        agent.handle_event(events.SourceFailed(name, f"the object {name} could not be fetched from {source}: {why}"))
    else:
        agent.handle_event(events.SourceFailed(name, why, PilotId(source.label)))


def _report_failed_fetch(
    agent: Agent, fetching: OngoingFetch, why: str, *, pilots_fault: bool, is_in_use: bool
) -> None:
    name = fetching.order.object.name
    if agent.fetches.get(name) is not fetching:
        return
    observing.report_lost_resources(agent)
    state, in_use = agent.state, {}
    if is_in_use and name in state.wants:
        waiting = [state.libraries[number] for number in state.wants[name].libraries if number in state.libraries]
        in_use = {library.number: agent.cache.bytes_to_release(library.recipe.objects) for library in waiting}
    agent.handle_event(
        events.ObjectLost(name, events.FetchFailure(why, is_pilots_fault=pilots_fault, in_use_bytes=in_use))
    )


# ---- objects of libraries


def pin_objects(agent: Agent, library: LibraryId, refs: Sequence[ObjectRef]) -> None:
    arrived = agent.arrived_pins
    if all(ref.name in arrived for ref in refs):
        _add_pins(agent, library, {ref.name: arrived[ref.name].duplicate() for ref in refs})
        return

    def find() -> None:
        found: dict[str, Pin] = {}
        lack = None
        try:
            for ref in refs:
                if (here := agent.cache.find_and_pin(ref.name)) is not None:
                    found[ref.name] = here
        except OSError as error:
            why = f"the object cache {agent.cache.folder} cannot be used: {error}"
            lack = events.FetchFailure(why, is_pilots_fault=is_pilots_fault(error))
        agent.run_in_loop(lambda: _add_pins(agent, library, found, lack))

    threading.Thread(target=find, name="objects-find", daemon=True).start()


def _add_pins(agent: Agent, library: LibraryId, found: dict[str, Pin], lack: events.FetchFailure | None = None) -> None:
    process = agent.processes.get(library)
    if process is None or lack is not None:  # `process` is None if the library has ended in the meantime
        for one in found.values():
            one.release()
        found = {}
    if lack is not None:
        observing.report_lost_resources(agent)
    if process is not None:
        process.object_pins += found.values()
        agent.handle_event(events.ObjectsPinned(library, {name: one.path for name, one in found.items()}, lack))


# ---- large arguments and results

_T = TypeVar("_T")
_RETRY_PAUSES_S = (0.5, 2.0, 5.0)  # seconds before each retry; the seed (file server) may be restarting


def fetch_arguments(agent: Agent, command: FetchArguments) -> None:
    pins: dict[CallId, Pin] = {}
    lacks: dict[CallId, events.FetchFailure] = {}

    def run() -> None:
        for call, ref in command.wanted:
            try:
                pins[call] = _fetch_from_seed(agent, ref)
            except (StokerError, OSError) as error:
                what = f"its arguments could not be fetched from the session's seed: {error}"
                lacks[call] = events.FetchFailure(what, is_pilots_fault=is_pilots_fault(error))
        agent.run_in_loop(report)

    def report() -> None:
        process = agent.processes.get(command.library)
        if process is None:  # the library has ended in the meantime
            for pin in pins.values():
                pin.release()
            return
        process.argument_pins |= pins
        paths = {call: pin.path for call, pin in pins.items()}
        agent.handle_event(events.ArgumentsFetched(command.library, command.ticket, paths, lacks))

    threading.Thread(target=run, name="payloads-bring", daemon=True).start()


def release_arguments(agent: Agent, library: LibraryId, calls: Sequence[CallId]) -> None:
    process = agent.processes.get(library)
    if process is not None:
        for call in calls:
            if (pin := process.argument_pins.pop(call, None)) is not None:
                pin.release()


def upload_results(agent: Agent, library: LibraryId, ends: list[CallEnd]) -> None:

    def run() -> None:
        done = [_upload_result(agent, library, end) for end in ends]
        agent.run_in_loop(lambda: agent.handle_event(events.ResultsUploaded(library, done)))

    threading.Thread(target=run, name="payloads-hand-in", daemon=True).start()


def _fetch_from_seed(agent: Agent, ref: ObjectRef) -> Pin:
    def bring() -> Pin:
        bringing = CacheFetch(agent.cache, ref, key=agent.peers.key)
        bringing.set_sources([ObjectSource(address=agent.peers.find_seed(), label="the session's seed", origin=True)])
        return bringing.run(no_source_limit_s=0.0)[0]

    return agent.cache.find_and_pin(ref.name) or _retry_exchange(bring, ref.name)


def _retry_exchange(function: Callable[[], _T], what: str) -> _T:
    for pause_s in _RETRY_PAUSES_S:
        try:
            return function()
        except DiskError:
            raise
        except (StokerError, OSError) as error:
            log.warning("%s: %s; retrying in %g s", what, error, pause_s)
            time.sleep(pause_s)
    return function()


def _upload_result(agent: Agent, library: LibraryId, end: CallEnd) -> CallEnd:
    ref = end.payload
    assert isinstance(ref, ObjectRef)
    path = Path(ref.source)

    def hand_in() -> str:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
            memoryview(data) as view,
        ):
            return send_result(ref.name, view, address=agent.peers.find_seed(), key=agent.peers.key)

    what = f"call {end.call}: its result of {ref.size_bytes} bytes could not be sent to the session's seed"
    try:
        end = msgspec.structs.replace(end, payload=msgspec.structs.replace(ref, source=_retry_exchange(hand_in, what)))
    except (StokerError, OSError) as error:
        log.warning("%s: %s", what, error)
        pilot, where = agent.state.facts.pilot, agent.state.log_path(library)
        message = f"{what.partition(': ')[2]}: {error} (on {pilot})"
        failure = Failure(FailureKind.SERIALIZATION, message, pilot=pilot, library=library, log=where)
        end = CallEnd(end.call, ok=False, run_s=end.run_s, failure=failure)
    path.unlink(missing_ok=True)
    return end


# ---- snapshots


def offer_snapshot(agent: Agent, recipe: RecipeKey, made: SnapshotMade) -> None:
    """Add a library's snapshot to the cache, then report it to the core."""

    def run() -> None:
        try:
            ref = make_object_ref(made.folder)
            manifest = read_object_manifest(ref)
            _add_to_cache(agent.cache, ref, manifest)
            store.write_snapshot_marker(agent.cache, Path(made.folder), name=ref.name)
        except (StokerError, OSError) as error:
            log.warning("the snapshot %s is not offered to other pilots: %s", made.folder, error)
            return
        here = SnapshotWritten(recipe, made.form, ref, manifest, made.made_s)
        if agent.peers.address:
            agent.run_in_loop(lambda: agent.handle_event(events.SnapshotTaken(here)))

    threading.Thread(target=run, name="snapshot-offer", daemon=True).start()


def _add_to_cache(cache: ObjectCache, ref: ObjectRef, manifest: bytes) -> None:
    here = cache.find_and_pin(ref.name)
    if here is None:
        with cache.claim_draft(ref) as draft:
            cache.free_cache_space(ref)
            disk.delete_tree(draft)
            try:
                shutil.copytree(ref.source, draft, copy_function=os.link)
            except OSError:
                disk.delete_tree(draft)
                copy_object(ref.source, draft)
            here = cache.publish_draft(ref, draft, manifest=manifest)
    here.release()


def is_snapshot_on_node(form: str) -> bool:
    """True if this node's snapshot folder contains the snapshot named `form` (digest of source and dtype)."""
    return form != os.path.basename(form) or (snapshot_folder() / form).is_dir()


# ---- the carried environment

_REPORT_INTERVAL_S = 60.0  # seconds between two reports that tell the seed that this pilot serves the archive


def share_environment_archive(agent: Agent, archive: str) -> None:
    """Offer other pilots the environment archive that was sent to this node."""
    name, _, path = archive.partition("=")
    if name:
        threading.Thread(target=_share_archive, args=(agent, name, path), name="environment", daemon=True).start()


def _share_archive(agent: Agent, name: str, path: str) -> None:
    try:
        if os.path.exists(path):  # otherwise another pilot of this host has moved the archive
            facts = os.stat(path)
            ref = ObjectRef(name, facts.st_size, path, changed_ns=facts.st_mtime_ns, inode=facts.st_ino)
            bringing = CacheFetch(agent.cache, ref, key=agent.peers.key)
            bringing.set_sources([ObjectSource(path=path, origin=True)])
            bringing.run(no_source_limit_s=0.0)[0].release()
            os.unlink(path)  # the cache now contains the archive
    except FileNotFoundError:
        pass
    except (StokerError, OSError) as error:
        log.warning("the environment is not offered to other pilots: %s", error)
        return
    while name in agent.cache.object_sizes():
        seed = agent.peers.find_seed()
        if seed and agent.peers.address:
            with suppress(PeerError):  # the next report follows after `_REPORT_INTERVAL_S`
                report_to_seed(
                    name, agent.peers.address, wants=False, again_s=_REPORT_INTERVAL_S, seed=seed, key=agent.peers.key
                )
        time.sleep(_REPORT_INTERVAL_S)
