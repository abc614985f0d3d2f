"""Starts and ends the processes of libraries through zygotes, and removes their files."""

from __future__ import annotations

import errno
import logging
import shutil
from collections.abc import Sequence
from signal import SIGKILL
from typing import assert_never

from stoker.contexts.recipe import Awareness
from stoker.log_files import read_last_lines
from stoker.pilot.agent import observing
from stoker.pilot.agent.agent import Agent
from stoker.pilot.agent.objects import is_pilots_fault, is_snapshot_on_node
from stoker.pilot.agent.offers import BOARD_FILE
from stoker.pilot.agent.process import LibraryProcess
from stoker.pilot.cache import disk
from stoker.pilot.core.events import LibraryPrepared, ProcessEnded, ProcessMade
from stoker.pilot.devices import visibility_variables
from stoker.pilot.library import connection
from stoker.pilot.zygote.client import Exited, Fork, Forked, ForkFailed, Preloaded, Zygote
from stoker.protocol.ids import CallId, LibraryId
from stoker.protocol.to_library import Load
from stoker.protocol.to_pilot import StartLibrary

log = logging.getLogger("stoker.pilot")

_ENTRY = "stoker.pilot.library.main:serve"
_NO_PROCESS = (
    "its process could not be created: {}; end other processes on the node, or raise the limit of processes (ulimit -u)"
    " or of memory"
)


def prepare_library(agent: Agent, ordered: StartLibrary) -> None:
    number, recipe = ordered.library, ordered.recipe
    try:
        folder = agent.scratch.make_library_folder(number)
    except OSError as error:
        observing.report_if_cannot_create_folders(agent, error)
        agent.handle_event(LibraryPrepared(number, error=str(error)))
        return
    agent.processes[number] = LibraryProcess(number, folder=folder, log=agent.state.log_path(number))
    from_sources = recipe.awareness is Awareness.NONE and not agent.state.facts.is_carried
    changed = [ref.source for ref in recipe.objects if disk.has_source_changed(ref)] if from_sources else []
    agent.handle_event(
        LibraryPrepared(
            number,
            free_disk_bytes=shutil.disk_usage(agent.scratch.path).free if recipe.needs.disk_bytes else 0,
            changed=changed[0] if changed else "",
            snapshots_here=[form for form in ordered.snapshots if is_snapshot_on_node(form)],
        )
    )


def start_process(agent: Agent, ordered: StartLibrary, objects: dict[str, str], *, device_memory_bytes: int) -> None:
    number, recipe = ordered.library, ordered.recipe
    process = agent.processes[number]
    devices = agent.devices_of(number)
    cores = tuple(dict.fromkeys(core for device in devices for core in device.cores))
    settings = connection.LibrarySettings(
        pilot=agent.state.facts.pilot, library=number, folder=str(process.folder), log=process.log,
        objects=str(agent.session.objects), search_path=agent.search_path, host=agent.peers.host,
        gang_key=agent.peers.gang_key, turns=str(agent.scratch.path / BOARD_FILE),
        probe=observing.probe_command_for_library(agent.options, devices),
    )  # fmt: skip
    fork = Fork(
        library=number,
        entry=_ENTRY,
        log=process.log,
        folder=str(process.folder),
        environment={
            **visibility_variables(devices),
            "STOKER_LIBRARY": str(number),
            "STOKER_PILOT": agent.state.facts.pilot,
            "PARSL_WORKER_BLOCK_ID": agent.state.facts.block,  # for Parsl's monitoring
        },
        cores=cores,
        threads=max(1, len(cores)),
        fresh=recipe.awareness is not Awareness.FULL,
    )
    theirs = process.make_socket_pair()
    try:
        zygote, is_fresh = agent.zygotes.get_or_start(() if fork.fresh else recipe.preload)
        zygote.fork_library(fork, theirs)
        if is_fresh or zygote.has_unsent:
            agent.poller.watch(zygote)
    except OSError as error:
        lacks = error.errno in (errno.EAGAIN, errno.ENOMEM)
        what = _NO_PROCESS.format(error) if lacks else f"its process could not be created: {error}"
        _report_process_end(agent, number, cause=what, is_pilots_fault=is_pilots_fault(error) or lacks)
        return
    process.zygote = zygote
    process.send_bytes(connection.pack_frame_body(connection.encode_settings(settings)))
    load = Load(recipe=recipe, devices=tuple(ordered.devices), objects=objects, device_memory_bytes=device_memory_bytes)
    process.send_messages([load])
    agent.poller.watch(process)


def kill_library_process(agent: Agent, number: LibraryId) -> None:
    """Kill the process of a library. The zygote then reports the end of the process."""
    process = agent.processes.get(number)
    if process is not None and process.zygote is not None:
        process.zygote.kill_library(number)
        if process.zygote.has_unsent:
            agent.poller.watch(process.zygote)


def kill_zygote(agent: Agent, number: LibraryId) -> None:
    process = agent.processes.get(number)
    if process is not None and process.zygote is not None:
        process.zygote.kill_zygote()


def remove_library(agent: Agent, number: LibraryId, ran: Sequence[CallId]) -> None:
    for call in ran:  # a call that was killed while it wrote a large result may leave a partial file
        for draft in agent.session.objects.glob(f"result-{call:x}-*"):
            draft.unlink(missing_ok=True)
    process = agent.processes.pop(number, None)
    if process is None:
        return
    agent.poller.unwatch(process)
    process.close()
    if process.zygote is not None:
        process.zygote.libraries.discard(number)
    shutil.rmtree(process.folder, ignore_errors=True)


def handle_zygote_messages(agent: Agent, zygote: Zygote) -> None:
    said = zygote.receive_messages()
    if said is None:
        log.warning("zygote %d (%s) died", zygote.pid, ", ".join(zygote.preload) or "plain")
        agent.poller.unwatch(zygote)
        numbers = list(zygote.libraries)
        agent.zygotes.remove_zygote(zygote)
        imports = bool(zygote.preload) and not zygote.has_preloaded
        what = f"importing {', '.join(zygote.preload)}" if imports else "serving"
        for number in numbers:
            cause = f"the zygote that it is forked from died while {what}; see {zygote.log}"
            _report_process_end(agent, LibraryId(number), cause=cause, is_pilots_fault=not imports)
        return
    for message in said:
        match message:
            case Preloaded(failed=failed, threads=threads):
                zygote.has_preloaded = True
                modules = ", ".join(zygote.preload)
                for module, why in failed.items():
                    log.warning("%s could not be preloaded, so each library imports this module: %s", module, why)
                for module, started in threads.items():
                    log.warning(
                        "the import of %s started threads (%s): libraries start without the zygote", module, started
                    )
                if message.asked_for_gpus:
                    log.info("the imports of %s query GPUs: libraries with GPUs start without the zygote", modules)
                log.info("zygote %d imported %s in %.2f s", zygote.pid, modules or "itself", message.seconds)
            case Forked(library=number, pid=pid):
                process = agent.processes.get(LibraryId(number))
                if process is not None:
                    process.pid = pid
                    agent.handle_event(ProcessMade(LibraryId(number), pid))
            case ForkFailed(library=number, reason=reason):
                zygote.libraries.discard(number)
                _report_process_end(agent, LibraryId(number), cause=_NO_PROCESS.format(reason), is_pilots_fault=True)
            case Exited(library=number, orphans=orphans):
                if orphans:
                    log.warning("lib-%d left %d processes behind; they were killed", number, orphans)
                zygote.libraries.discard(number)
                _report_process_end(agent, LibraryId(number), signal=message.signal, exit_code=message.exit_code)
            case _:
                assert_never(message)


def _report_process_end(
    agent: Agent,
    number: LibraryId,
    *,
    signal: int = 0,
    exit_code: int = 0,
    cause: str = "",
    is_pilots_fault: bool = False,
) -> None:
    process = agent.processes.get(number)
    if process is None:
        return
    agent.receive_library_messages(process, to_end=True)
    observing.report_lost_resources(agent)
    shortage = agent.oom_kills.measure_shortage() if signal == SIGKILL else None
    printed = process.recover_last_call_output()
    ended = ProcessEnded(
        number, signal=signal, exit_code=exit_code, running=process.recorded_calls(),
        tail=read_last_lines(process.log, start=printed.start if printed is not None else 0), printed=printed,
        cause=cause, is_pilots_fault=is_pilots_fault, shortage=shortage,
    )  # fmt: skip
    agent.handle_event(ended)
