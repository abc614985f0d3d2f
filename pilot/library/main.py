"""The main function of a library's process, from settings to exit."""

from __future__ import annotations

import errno
import gc
import os
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from stoker.contexts import ambient, user_modules
from stoker.contexts.inference.adapter import set_device_share_factory
from stoker.contexts.loading import HubWatch, load_context, slots_of, token_cache_of
from stoker.decoding import UNREADABLE
from stoker.errors import ProtocolError
from stoker.pilot.core import infrastructure
from stoker.pilot.core.infrastructure import is_unwritable_disk_error
from stoker.pilot.library import connection, process
from stoker.pilot.library.call_records import LogTail, Marker, ThreadTail, call_output_path, route
from stoker.pilot.library.connection import BatchReports, Settings
from stoker.pilot.library.failures import Place
from stoker.pilot.library.functions import SideBySide, clean
from stoker.pilot.library.library_turns import LibraryTurns
from stoker.pilot.library.process import (
    ClearedFolder,
    LibraryFault,
    ProcessGuard,
    ScratchGuard,
    Workplace,
    context_file_paths,
    exit_user_forked_child,
    set_temporary_folder,
    unshare_working_folder,
)
from stoker.pilot.library.runner import Runner
from stoker.pilot.library.server import LibraryServer
from stoker.pilot.library.sleeper import Sleeper, can_sleep, device_memory, host_memory
from stoker.protocol import wire
from stoker.protocol.calls import Failure, FailureKind
from stoker.protocol.ids import DeviceId, LibraryId
from stoker.protocol.to_agent import Hello, Loaded, LoadFailed, SnapshotMade
from stoker.protocol.to_library import Load

_TAIL_LINES = 20
_LEAST_AGE_S = 2.0
_AGE_PER_LOAD = 10
"""A library that is older than 10 times its load time exits if a function needs another version of a loaded module.

Functions with alternating versions of a module then spend at most a tenth of the time on loads.
"""
_LEAST_ROOM_BYTES = 64 << 10  # a scratch disk counts as full if it refuses 64 KiB


def serve(number: int) -> None:
    # A batch system sends SIGTERM to every process of a job, but the agent decides when calls stop. Child processes of
    # user code keep the default action.
    signal.signal(signal.SIGTERM, lambda _number, _frame: None)
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    process.drop_resource_tracker()
    process.register_created_segments_only()
    sock = socket.socket(fileno=number)
    sock.set_inheritable(False)
    sock.setblocking(True)
    settings = _read_settings(sock)
    sys.path.extend(place for place in settings.search_path if place not in sys.path)
    sock.sendall(connection.pack([Hello(library=settings.library, pid=os.getpid())]))
    messages = wire.to_library_decoder()(_read_frame(sock)).messages
    order = messages[0]
    if not isinstance(order, Load):
        raise SystemExit(f"the agent's first order is {type(order).__name__}, not Load")
    try:
        tail = LogTail(settings.log)
        marker = Marker(os.path.join(settings.folder, "running"), slots=max(1, order.recipe.slots))
        temporary = ClearedFolder(os.path.join(settings.folder, "tmp"))
        set_temporary_folder(temporary.short_path)
        links = context_file_paths(order.recipe, order.objects)
        workplace = Workplace(os.path.join(settings.folder, "load"), temporary=temporary, links=links)
        workplace.enter_working_folder(order.recipe.home)
    except OSError as error:
        _report_start_failure(error, settings, sock)
        return
    loaded = _load(order, settings, sock, workplace)
    if loaded is None:
        return
    context, slots = loaded[0], order.recipe.slots or loaded[1].slots
    try:
        if slots > 1 and not order.recipe.slots:
            marker = Marker(os.path.join(settings.folder, "running"), slots=slots)
        temporary.keep()
    except OSError as error:
        _report_start_failure(error, settings, sock)
        return
    tail.take()
    gc.collect()
    gc.freeze()  # the garbage collector need not scan the context, which lives as long as the process
    if slots > 1:
        route()
    guard = ProcessGuard(temporary=temporary if slots > 1 else None)
    side_by_side = SideBySide()
    place = Place(settings.folder, order.devices, order.recipe.needs.device_memory_bytes, settings.probe)
    server = LibraryServer(
        sock,
        library=settings.library,
        context=context,
        calls_allowed=order.recipe.calls_per_library,
        guard=guard,
        host=settings.host,
        gang_key=settings.gang_key,
        sleeper=Sleeper(context, name=order.recipe.name, devices=order.devices, settings=settings),
    )

    if slots == 1:
        old_at = time.monotonic() + max(_LEAST_AGE_S, _AGE_PER_LOAD * loaded[1].load_s)

        def make_way() -> None:
            if time.monotonic() > old_at:  # a new process imports the other version
                what = "a function needs other versions of loaded modules"
                server.leave(LibraryFault(infrastructure.OTHER_MODULES, what))

        user_modules.before_replacing = make_way

    def make_runner(slot: int) -> Runner:
        own = temporary if slots == 1 else ClearedFolder(os.path.join(settings.folder, f"tmp-{slot}"))
        if slots > 1 and not unshare_working_folder():
            side_by_side.mark_folder_as_shared()
        runner = Runner(
            settings,
            slot=slot,
            marker=marker,
            workplace=Workplace(os.path.join(settings.folder, f"slot-{slot}"), temporary=own, links=links),
            tail=tail
            if slots == 1
            else ThreadTail(settings.log, call_output_path(settings.folder, slot), ended=marker.ended),
            context=context,
            report=server.outbox.report,
            lane=server.lane,
            meetings=server.meetings,
            guard=guard,
            leave=server.leave,
            place=place,
        )
        os.register_at_fork(after_in_child=lambda: setattr(runner, "forked", True))
        return runner

    # A child process of user code must not keep the library's socket open or write to it.
    os.register_at_fork(after_in_child=sock.close)
    server.send(loaded[1])
    BatchReports(context, say=server.send).start()
    if slots == 1:
        server.serve(make_runner(0), idle=lambda: marker.idle(0))
    else:
        server.serve_threads(make_runner, slots, idle=marker.idle, side_by_side=side_by_side)


def _report_start_failure(error: OSError, settings: Settings, sock: socket.socket) -> None:
    failure = Failure(
        kind=FailureKind.PILOT,
        message=clean(_no_room(error, settings)),
        pilot=settings.pilot,
        library=settings.library,
        log=settings.log,
    )
    sock.sendall(connection.pack([LoadFailed(failure=failure)]))


def _load(order: Load, settings: Settings, sock: socket.socket, workplace: Workplace) -> tuple[Any, Loaded] | None:

    def offer(form: str, folder: str, made_s: float) -> None:
        sock.sendall(connection.pack([SnapshotMade(form=form, folder=folder, made_s=made_s)]))

    ambient.enter_library(
        device=order.devices, objects=order.objects, offer=offer, device_memory_bytes=order.device_memory_bytes
    )
    if settings.turns:
        board, library = Path(settings.turns), LibraryId(settings.library)
        set_device_share_factory(lambda: LibraryTurns(board, library, [DeviceId(name) for name in order.devices]))
    started, pid = time.monotonic(), os.getpid()
    hub = HubWatch()
    ground = ScratchGuard(os.path.dirname(settings.folder))
    try:
        with hub:
            context = load_context(order.recipe, order.objects)
            slots = slots_of(order.recipe, context, device_memory_bytes=ambient.device_memory_bytes())
            cache = token_cache_of(order.recipe, context)
            os.close(os.dup(2))  # raises OSError if the loader has left no free descriptor
        if os.getpid() != pid:
            exit_user_forked_child(None)
    except BaseException as error:  # a loader may call sys.exit
        if os.getpid() != pid:
            exit_user_forked_child(error)
        if ground.is_gone:
            os._exit(infrastructure.FOLDER_GONE)
        trace = error.__traceback__
        text = "".join(traceback.format_exception(type(error), error, trace.tb_next if trace else None))
        print(text, file=sys.stderr, flush=True)  # noqa: T201  # into the library's log
        what, refusal = f"the loader of {order.recipe.name} raised {type(error).__name__}: {error}", _refusal(settings)
        advice = hub.advice(error) or workplace.advice(error)
        what += f"\n{advice}" if advice else ""
        failure = Failure(
            kind=FailureKind.PILOT if refusal else FailureKind.CONTEXT,
            message=clean(f"{what}; {_no_room(refusal, settings)}" if refusal else what),
            pilot=settings.pilot,
            library=settings.library,
            tail=clean("\n".join(text.splitlines()[-_TAIL_LINES:])),
            log=settings.log,
        )
        sock.sendall(connection.pack([LoadFailed(failure=failure)]))
        return None
    ambient.enter_library(device=order.devices, context=context)
    seconds = time.monotonic() - started
    resident, peak = host_memory()
    return context, Loaded(
        load_s=seconds,
        resident_bytes=resident,
        peak_bytes=peak,
        device_bytes=device_memory(order.devices),
        slots=0 if order.recipe.slots else slots,
        cache=cache,
        sleeps=can_sleep(context),
    )


def _refusal(settings: Settings) -> OSError | None:
    """Return the error of a test write to the scratch disk, or None if the disk accepts the write."""
    place = os.path.join(settings.folder, "room")
    try:
        with open(place, "wb") as file:
            file.write(bytes(_LEAST_ROOM_BYTES))
    except OSError as error:
        return error if is_unwritable_disk_error(error) else None
    finally:
        with suppress(OSError):
            os.unlink(place)
    return None


def _no_room(error: OSError, settings: Settings) -> str:
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    what = f"the scratch disk is full ({settings.folder})" if is_full else f"its folder cannot be used: {error}"
    advice = "free disk space there, or set [pilot] scratch to another disk"
    return f"lib-{settings.library} on {settings.pilot}: {what}; {advice}"


def _read_settings(sock: socket.socket) -> Settings:
    data = _read_frame(sock)
    try:
        return connection.decode_settings(data)
    except UNREADABLE as error:
        raise ProtocolError(f"{len(data)} bytes that are not a library's settings: {error}") from None


def _read_frame(sock: socket.socket) -> bytes:
    return _exactly(sock, connection.read_frame_length(_exactly(sock, connection.HEAD_BYTES)))


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        got = sock.recv_into(view)
        if not got:
            raise SystemExit(1)
        view = view[got:]
    return bytes(data)
