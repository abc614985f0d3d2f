"""A library in TaskVine: the context, its calls, and the thread that stops a call.

TaskVine's program for libraries runs in `direct` mode. In the process with the context, it calls `load` once, and
`serve` for each function call. `serve` never raises, because TaskVine would then end the library.

Twice a second, a thread checks the time limit and a file of the pilot (`messages.stop_file`). To stop a call, the
thread interrupts the main thread with a signal. The call then ends with an exception, and the context stays loaded. A
library exits if a call does not stop within `STOP_GRACE_S`, or if the library exceeds the memory limit of its recipe.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import msgspec

from stoker.contexts import ambient
from stoker.contexts.loading import load_context
from stoker.pilot.library.call_records import CallMarker, LogTail
from stoker.pilot.library.connection import LibrarySettings, print_exception
from stoker.pilot.library.failures import LibraryResources
from stoker.pilot.library.functions import Function, FunctionCache, RunnableCall
from stoker.pilot.library.process import (
    ClearableFolder,
    ProcessGuard,
    SlotFolders,
    context_file_paths,
    set_temporary_folder,
)
from stoker.pilot.library.runner import Runner
from stoker.pilot.taskvine import messages
from stoker.pilot.zygote.processes import MemoryLimitCheck, resident_bytes
from stoker.protocol.calls import CallEnd, CallSpec, Failure, FailureKind
from stoker.protocol.to_library import Run
from stoker.protocol.to_pilot import FunctionBlob

STOP_GRACE_S = 10.0
WATCH_INTERVAL_S = 0.5
_SIGNAL = signal.SIGUSR2


class CallStopped(BaseException):
    """Raised in a call to end the call. An `except Exception` in the function does not catch this exception."""


class CallWatch:
    """Stops calls that run in the main thread. `before_exit` receives the reason before the process exits."""

    def __init__(self, before_exit: Callable[[str], None], *, memory_bytes: int) -> None:
        self.stop_reason = ""
        """Reason why the latest call was stopped; empty if it was not stopped."""
        self._before_exit = before_exit
        self._memory_bytes = memory_bytes
        self._memory = MemoryLimitCheck()
        self._main = threading.main_thread().ident or 0
        self._lock = threading.Lock()
        self._until = 0.0
        self._stop_file = ""
        self._asked_at = 0.0
        signal.signal(_SIGNAL, self._interrupt)
        threading.Thread(target=self._watch_calls, name="stoker-watch", daemon=True).start()

    def watch_call(self, *, limit_s: float, stop_file: str) -> None:
        with self._lock:
            self.stop_reason = ""
            self._asked_at = 0.0
            self._until = time.monotonic() + limit_s if limit_s else float("inf")
            self._stop_file = stop_file

    def stop_watching(self) -> None:
        with self._lock:
            self._until = 0.0

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        if self._until and self.stop_reason:
            raise CallStopped(self.stop_reason)

    def _watch_calls(self) -> None:
        while True:
            time.sleep(WATCH_INTERVAL_S)
            with self._lock:
                now = time.monotonic()
                if self._memory_bytes and self._memory.bytes_if_over_limit(os.getpid(), self._memory_bytes, now=now):
                    self._exit_at_once(messages.MEMORY_LIMIT_EXCEEDED)
                if not self._until:
                    continue
                if not self.stop_reason:
                    if now > self._until:
                        self.stop_reason = messages.TIME_LIMIT_EXCEEDED
                    elif self._stop_file and os.path.exists(self._stop_file):
                        self.stop_reason = messages.CANCELLED
                    else:
                        continue
                    self._asked_at = now
                    signal.pthread_kill(self._main, _SIGNAL)
                elif now > self._asked_at + STOP_GRACE_S:
                    self._exit_at_once(self.stop_reason)

    def _exit_at_once(self, reason: str) -> None:
        self._before_exit(reason)
        os._exit(3)


# ---- the library

_EXIT_DELAY_S = 0.5
_PR_SET_PDEATHSIG = 1

_library: VineLibrary | None = None


def load(setup: bytes) -> dict[str, object]:
    global _library
    _library = VineLibrary(messages.decode_setup(setup))
    return {}


def serve(order: bytes) -> bytes:
    if _library is None:
        raise RuntimeError("serve was called before load")
    return messages.encode(_library.serve(messages.decode_order(order)))


class VineLibrary:
    def __init__(self, setup: messages.VineLibrarySetup) -> None:
        # The libraries of a killed worker exit with the worker, even during a call.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # TaskVine ends a library by killing its process group. On a busy node, TaskVine creates this group too late:
        # then nothing is killed, and the worker waits forever.
        os.setpgid(0, 0)
        _silence_output()
        host = socket.gethostname().partition(".")[0]
        self._setup = setup
        self._home = os.getcwd()
        self._log = str(Path(setup.logs) / f"vine-{host}-{os.getpid()}.log")
        self._settings = LibrarySettings(setup.pilot, 0, self._home, self._log, setup.objects)
        self._log_fd = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._note = -1
        self._watch = CallWatch(self._before_exit, memory_bytes=setup.recipe.needs.memory_bytes)
        self._functions = FunctionCache()
        self._library_report = messages.LibraryReport(host=host, pid=os.getpid(), log=self._log)
        sys.path.extend(place for place in setup.search_path if place not in sys.path)
        with self._redirect_output_to_log():
            self._tail = LogTail(self._log)
            self._load_context()

    def serve(self, order: messages.PoolOrder) -> messages.PoolAnswer:
        if self._library_report.failure is not None:
            # Exit, because TaskVine would keep this useless process. A new process may succeed in loading the context.
            self._exit_after_delay()
            return messages.PoolAnswer(order.ticket, self._library_report)
        before = self._library_report
        self._library_report = msgspec.structs.replace(before, orders=before.orders + 1)
        ends: list[CallEnd] = []
        if order.calls:
            folder = os.getcwd()
            try:
                ends = self._run_calls(order, Path(folder))
            finally:
                try:
                    os.chdir(folder)
                except OSError as error:
                    self._exit_because(f"its folder {folder} is gone: {error}")
        if any(end.failure is not None and end.failure.device for end in ends):
            self._exit_after_delay()  # this process can no longer use devices
        return messages.PoolAnswer(order.ticket, before, ends)

    def _exit_because(self, why: str) -> None:
        with contextlib.suppress(OSError):
            os.write(self._log_fd, f"the library ends: {why}\n".encode("utf-8", "replace"))
        self._exit_after_delay()

    def _exit_after_delay(self) -> None:
        leave = threading.Timer(_EXIT_DELAY_S, os._exit, (1,))
        leave.daemon = True
        leave.start()

    # ---- loading

    def _load_context(self) -> None:
        recipe, setup = self._setup.recipe, self._setup
        objects = {ref.name: os.path.join(self._home, ref.name) for ref in recipe.objects}
        self._temporary = ClearableFolder(os.path.join(self._home, "stoker-tmp"))
        set_temporary_folder(self._temporary.short_path)
        workplace = SlotFolders(
            os.path.join(self._home, "stoker-call"),
            temporary=self._temporary,
            links=context_file_paths(recipe, objects),
        )
        ambient.enter_library(
            device=setup.devices, objects=objects, device_memory_bytes=recipe.needs.device_memory_bytes
        )
        started, failure, context = time.monotonic(), None, None
        self._watch.watch_call(limit_s=recipe.needs.load_limit_s, stop_file="")
        try:
            workplace.enter_working_folder(recipe.home)
            context = load_context(recipe, objects)
        except CallStopped:
            failure = self._make_load_failure(f"its loader ran longer than {recipe.needs.load_limit_s:g} s")
        except BaseException as error:  # a loader may call sys.exit
            tail, advice = print_exception(error), workplace.explain_missing_file(error)
            what = f"the loader raised {type(error).__name__}: {error}" + (f"\n{advice}" if advice else "")
            failure = self._make_load_failure(what, tail=tail)
        finally:
            self._watch.stop_watching()
        ambient.enter_library(device=setup.devices, context=context)
        self._temporary.keep_present_entries()
        self._runner = Runner(
            self._settings, slot=0, marker=CallMarker(os.path.join(self._home, "stoker-running"), slots=1),
            workplace=workplace, tail=self._tail, context=context, report=lambda _report: None,
            resources=LibraryResources(self._home, setup.devices, recipe.needs.device_memory_bytes),
        )  # fmt: skip
        os.chdir(self._home)
        self._guard = ProcessGuard()
        gc.collect()
        gc.freeze()  # the garbage collector need not scan the context, which lives as long as the process
        self._library_report = msgspec.structs.replace(
            self._library_report,
            load_s=time.monotonic() - started,
            resident_bytes=resident_bytes(os.getpid()),
            failure=failure,
        )

    def _make_load_failure(self, message: str, *, tail: str = "") -> Failure:
        return self._settings.make_failure(FailureKind.CONTEXT, f"{self._setup.recipe.name}: {message}", tail=tail)

    # ---- calls

    def _run_calls(self, order: messages.PoolOrder, folder: Path) -> list[CallEnd]:
        function = self._functions.find_or_add(order.function, None)
        if function is None:
            blob = (folder / messages.FUNCTION_FILE).read_bytes()
            function = self._functions.find_or_add(
                order.function, FunctionBlob(order.function, order.function_name, blob)
            )
        assert function is not None
        run = Run(
            function=order.function,
            calls=order.calls,
            options=order.options,
            objects={name: str(folder / file) for name, file in order.objects.items()},
        )
        path = messages.note_file(self._setup.running, order.ticket)
        self._note = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            with self._redirect_output_to_log():
                self._tail.take_output()
                return [self._run_call(spec, run, function, ticket=order.ticket) for spec in order.calls]
        finally:
            with contextlib.suppress(OSError):
                os.close(self._note)
            self._note = -1
            with contextlib.suppress(OSError):
                path.unlink()

    def _run_call(self, spec: CallSpec, run: Run, function: Function, *, ticket: int) -> CallEnd:
        self._tail.begin_call()
        self._write_note(spec.call)
        stop_file = messages.stop_file(self._setup.running, ticket, spec.call)
        self._watch.watch_call(limit_s=run.options.limit_s, stop_file=str(stop_file))
        try:
            end = self._runner.run(RunnableCall(spec, run, function))
        except CallStopped:  # raised in Stoker's code: the result of the call is lost
            end = CallEnd(spec.call, ok=False)
        finally:
            self._watch.stop_watching()
        fault = self._guard.restore_and_check(time.perf_counter()) or (
            None if self._runner.is_clean else self._runner.remove_left_files()
        )
        if fault is not None:
            self._exit_because(fault.text)
        if self._watch.stop_reason:
            kind, message = FailureKind.CANCELLED, "it was cancelled while it ran"
            if self._watch.stop_reason == messages.TIME_LIMIT_EXCEEDED:
                kind, message = FailureKind.TIMEOUT, f"the call ran longer than its limit, {run.options.limit_s:g} s"
            return CallEnd(spec.call, ok=False, failure=self._settings.make_failure(kind, message))
        return end if isinstance(end, CallEnd) else CallEnd(spec.call, ok=False)

    # ---- notes and prints

    def _write_note(self, call: int, reason: str = "") -> None:
        if self._note >= 0:
            note = messages.LibraryNote(call, self._log, reason, self._tail.start)
            with contextlib.suppress(OSError):
                os.pwrite(self._note, messages.encode_note(note), 0)

    def _before_exit(self, reason: str) -> None:
        self._write_note(self._runner.call if self._note >= 0 else 0, reason)

    @contextlib.contextmanager
    def _redirect_output_to_log(self) -> Iterator[None]:
        kept = [os.dup(number) for number in (1, 2)]
        try:
            for number in (1, 2):
                os.dup2(self._log_fd, number)
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, before in zip((1, 2), kept, strict=True):
                os.dup2(before, number)
                os.close(before)


def _silence_output() -> None:
    """Keep TaskVine's file for the output of a library empty. TaskVine sends up to a kilobyte of this file with the
    report of an ended library. TaskVine's manager would mistake these bytes for the worker's next message.
    """
    with contextlib.suppress(OSError):  # the output is not a regular file
        os.ftruncate(1, 0)
    nothing = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(nothing, number)
    os.close(nothing)
