"""The main function of a library's process, from settings to exit, and the sleep of its context."""

from __future__ import annotations

import ctypes
import errno
import gc
import inspect
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

from stoker.contexts import ambient, user_modules
from stoker.contexts.inference.adapter import set_engine_turns_factory
from stoker.contexts.loading import HubLogHandler, count_slots, get_token_cache, load_context
from stoker.decoding import UNREADABLE
from stoker.errors import ProtocolError
from stoker.pilot.core import infrastructure
from stoker.pilot.core.infrastructure import is_unwritable_disk_error
from stoker.pilot.devices.cpu import read_value
from stoker.pilot.library import connection, process
from stoker.pilot.library.call_records import CallMarker, LogTail, ThreadTail, call_output_path, route_output_by_thread
from stoker.pilot.library.connection import BatchReports, FrameReader, LibrarySettings
from stoker.pilot.library.failures import LibraryResources
from stoker.pilot.library.library_turns import LibraryTurns
from stoker.pilot.library.runner import Runner
from stoker.pilot.library.server import LibraryServer
from stoker.protocol import wire
from stoker.protocol.calls import FailureKind
from stoker.protocol.ids import DeviceId, LibraryId
from stoker.protocol.to_agent import Hello, Loaded, LoadFailed, SleepFailed, Slept, SnapshotMade, Woke
from stoker.protocol.to_library import Load, Sleep, Wake

_MIN_LIBRARY_AGE_S = 2.0
_MIN_AGE_PER_LOAD_TIME = 10
"""A library that is older than 10 times its load time exits if a function needs another version of a loaded module.
Alternating calls with different versions of a module then cost at most a tenth of the time for loads.
"""
_TEST_WRITE_BYTES = 64 << 10  # bytes of a test write, which shows whether the scratch disk is full


def serve(socket_number: int) -> None:
    process.ignore_sigterm_except_in_children()
    process.drop_resource_tracker()
    process.register_created_segments_only()
    sock = socket.socket(fileno=socket_number)
    sock.set_inheritable(False)
    sock.setblocking(True)
    reader = FrameReader(sock)
    data = _read_next_frame(reader)
    try:
        settings = connection.decode_settings(data)
    except UNREADABLE as error:
        raise ProtocolError(f"{len(data)} bytes that are not a library's settings: {error}") from None

    def send_message(message: Any) -> None:
        sock.sendall(connection.pack_frame([message]))

    def path_in_folder(name: str) -> str:
        return os.path.join(settings.folder, name)

    sys.path.extend(place for place in settings.search_path if place not in sys.path)
    send_message(Hello(library=settings.library, pid=os.getpid()))
    order = wire.to_library_decoder()(_read_next_frame(reader)).messages[0]
    if not isinstance(order, Load):
        raise SystemExit(f"the agent's first order is {type(order).__name__}, not Load")
    recipe = order.recipe
    try:
        tail = LogTail(settings.log)
        temporary = process.ClearableFolder(path_in_folder("tmp"))
        process.set_temporary_folder(temporary.short_path)
        links = process.context_file_paths(recipe, order.objects)
        workplace = process.SlotFolders(path_in_folder("load"), temporary=temporary, links=links)
        workplace.enter_working_folder(recipe.home)
        found = _load_and_report(order, settings, send_message, workplace)
        if found is None:
            return
        context, loaded = found
        slots = recipe.slots or loaded.slots
        marker = CallMarker(path_in_folder("running"), slots=slots)
        temporary.keep_present_entries()
    except OSError as error:
        send_message(LoadFailed(settings.make_failure(FailureKind.PILOT, _describe_folder_error(error, settings))))
        return
    tail.take_output()
    gc.collect()
    gc.freeze()  # the garbage collector need not scan the context, which lives as long as the process
    if slots > 1:
        route_output_by_thread()
    guard = process.ProcessGuard(temporary=temporary if slots > 1 else None)
    server = LibraryServer(
        sock, library=settings.library, context=context, calls_allowed=recipe.calls_per_library, guard=guard,
        reader=reader, host=settings.host, gang_key=settings.gang_key,
        sleep_or_wake=partial(
            sleep_or_wake_context, context=context, name=recipe.name, devices=order.devices, settings=settings
        ),
    )  # fmt: skip

    if slots == 1:
        old_at = time.monotonic() + max(_MIN_LIBRARY_AGE_S, _MIN_AGE_PER_LOAD_TIME * loaded.load_s)

        def make_way() -> None:
            if time.monotonic() > old_at:  # exit, so that a new process imports the other version
                what = "a function needs other versions of loaded modules"
                server.exit_process(process.LibraryFault(infrastructure.OTHER_MODULES, what))

        user_modules.before_replacing = make_way

    def make_runner(slot: int) -> Runner:
        own, output = temporary, cast("LogTail | ThreadTail", tail)
        if slots > 1:
            own = process.ClearableFolder(path_in_folder(f"tmp-{slot}"))
            output = ThreadTail(
                settings.log, call_output_path(settings.folder, slot), on_log_length=marker.record_log_length
            )
            if not process.unshare_working_folder():
                server.compatibility.has_shared_folder = True
        return Runner(
            settings, slot=slot, marker=marker, tail=output, context=context, report=server.outbox.report_progress,
            workplace=process.SlotFolders(path_in_folder(f"slot-{slot}"), temporary=own, links=links),
            piece_sender=server.piece_sender,
            meetings=server.meetings, guard=guard, exit_process=server.exit_process,
            resources=LibraryResources(
                settings.folder, order.devices, recipe.needs.device_memory_bytes, settings.probe
            ),
        )  # fmt: skip

    # A child process of user code must not keep the library's socket open or write to it.
    os.register_at_fork(after_in_child=sock.close)
    server.send_message(loaded)
    if callable(getattr(context, "batch_load", None)):
        reports = BatchReports(context, send_report=server.send_message)
        threading.Thread(target=reports.report_until_error, name="stoker-batch-reports", daemon=True).start()
    if slots == 1:
        server.serve(make_runner(0), on_idle=lambda: marker.record_idle(0))
    else:
        server.serve_threads(make_runner, slots, on_idle=marker.record_idle)


def _load_and_report(
    order: Load, settings: LibrarySettings, send_message: Callable[[Any], None], workplace: process.SlotFolders
) -> tuple[Any, Loaded] | None:

    def report_snapshot(form: str, folder: str, made_s: float) -> None:
        send_message(SnapshotMade(form=form, folder=folder, made_s=made_s))

    ambient.enter_library(
        device=order.devices,
        objects=order.objects,
        offer=report_snapshot,
        device_memory_bytes=order.device_memory_bytes,
    )
    if settings.turns:
        board, library = Path(settings.turns), LibraryId(settings.library)
        set_engine_turns_factory(lambda: LibraryTurns(board, library, [DeviceId(name) for name in order.devices]))
    started, pid = time.monotonic(), os.getpid()
    hub = HubLogHandler()
    ground = process.ScratchGuard(os.path.dirname(settings.folder))
    try:
        with hub:
            context = load_context(order.recipe, order.objects)
            slots = count_slots(order.recipe, context, device_memory_bytes=ambient.device_memory_bytes())
            cache = get_token_cache(order.recipe, context)
            os.close(os.dup(2))  # raises OSError if the loader has left no free descriptor
        if os.getpid() != pid:
            process.exit_user_forked_child(None)
    except BaseException as error:  # a loader may call sys.exit
        if os.getpid() != pid:
            process.exit_user_forked_child(error)
        if ground.is_gone:
            os._exit(infrastructure.SCRATCH_FOLDER_GONE)
        tail = connection.print_exception(error)
        kind, what = FailureKind.CONTEXT, f"the loader of {order.recipe.name} raised {type(error).__name__}: {error}"
        if advice := hub.advice(error) or workplace.explain_missing_file(error):
            what += f"\n{advice}"
        if refusal := _find_disk_write_error(settings):
            kind, what = FailureKind.PILOT, f"{what}; {_describe_folder_error(refusal, settings)}"
        send_message(LoadFailed(settings.make_failure(kind, what, tail=tail)))
        return None
    ambient.enter_library(device=order.devices, context=context)
    seconds = time.monotonic() - started
    resident, peak = measure_host_memory()
    return context, Loaded(
        load_s=seconds, resident_bytes=resident, peak_bytes=peak, device_bytes=reserved_device_bytes(order.devices),
        slots=0 if order.recipe.slots else slots, cache=cache, sleeps=can_sleep(context),
    )  # fmt: skip


def _find_disk_write_error(settings: LibrarySettings) -> OSError | None:
    """Return the error of a test write to the scratch disk, or None if the disk accepts the write."""
    try:
        Path(settings.folder, "room").write_bytes(bytes(_TEST_WRITE_BYTES))
    except OSError as error:
        return error if is_unwritable_disk_error(error) else None
    return None


def _describe_folder_error(error: OSError, settings: LibrarySettings) -> str:
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    what = f"the scratch disk is full ({settings.folder})" if is_full else f"its folder cannot be used: {error}"
    advice = "free disk space there, or set [pilot] scratch to another disk"
    return f"lib-{settings.library} on {settings.pilot}: {what}; {advice}"


def _read_next_frame(reader: FrameReader) -> memoryview:
    while (frame := reader.next_frame()) is None:
        if not reader.receive_bytes(block=True):
            raise SystemExit(1)
    return frame


# ---- sleep, and memory


def sleep_or_wake_context(
    order: Sleep | Wake, *, context: Any, name: str, devices: tuple[str, ...], settings: LibrarySettings
) -> Slept | Woke | SleepFailed:
    method = "sleep" if isinstance(order, Sleep) else "wake"
    before, began = measure_host_memory()[0], time.monotonic()
    try:
        getattr(context, method)()
    except BaseException as error:
        what = f"{method}() of the context {name} raised {type(error).__name__}: {error}"
        return SleepFailed(settings.make_failure(FailureKind.CONTEXT, what, tail=connection.print_exception(error)))
    seconds = time.monotonic() - began
    gc.collect()
    _return_freed_memory()  # also after waking, because an awake library may use less host memory
    if isinstance(order, Wake):
        return Woke(seconds)
    resident = measure_host_memory()[0]
    return Slept(resident, max(0, resident - before), reserved_device_bytes(devices), seconds)


def can_sleep(context: Any) -> bool:
    """Return True if a context's class has methods `sleep()` and `wake()` without required arguments."""
    return all(_has_method_without_arguments(context, name) for name in ("sleep", "wake"))


def _has_method_without_arguments(context: Any, name: str) -> bool:
    if not callable(getattr(type(context), name, None)):  # ask the class: a proxy object has every attribute
        return False
    method = getattr(context, name)
    try:
        inspect.signature(method).bind()
    except (TypeError, ValueError):  # an argument is required, or C code has no signature
        return False
    return not inspect.iscoroutinefunction(method)


def _initialized_cuda() -> Any:
    torch: Any = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized() else None


def _return_freed_memory() -> None:
    """Return unused memory from the allocators to the device and the operating system."""
    if cuda := _initialized_cuda():
        cuda.empty_cache()
    with suppress(OSError, AttributeError):  # the C library is not glibc
        ctypes.CDLL(None).malloc_trim(0)


def measure_host_memory() -> tuple[int, int]:
    """Return the current and the peak host memory of this process, in bytes."""
    resident, peak = (1024 * read_value(Path("/proc/self/status"), name) for name in ("VmRSS:", "VmHWM:"))
    return resident, max(resident, peak)


def reserved_device_bytes(devices: tuple[str, ...]) -> int:
    """Return the bytes that PyTorch has reserved on the device with most reserved bytes, or 0 without a GPU."""
    cuda = _initialized_cuda()
    count = min(len(devices), cuda.device_count()) if cuda else 0
    return max((int(cuda.memory_reserved(index)) for index in range(count)), default=0)
